"""containers/install_harness.sh with a fake Python 3.11, the pins for pip, and what starts such a harness."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clawhpc.harness.base import PYTHON_START
from clawhpc.harness.registry import ADAPTERS, make_harness

CONTAINERS = Path(__file__).parents[3] / "containers"
PINS = CONTAINERS / "harness"
FROM_PIP = pytest.mark.parametrize("name", [name for name in ADAPTERS if (PINS / name / "requirements.txt").exists()])
PIN = re.compile(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}")


class Python:
    """A program `python3.11` with a pip that lays out a harness which says it is `version`."""

    def __init__(
        self, folder: Path, *, version: str = "2.4.6", suits: bool = True, fails: bool = False, cannot_compile: str = ""
    ) -> None:
        self.bin, self.cache, self.log = folder / "bin", folder / "cache", folder / "calls"
        self.bin.mkdir()
        lines = [
            "#!/bin/sh",
            f'echo "$*" >>{self.log}',
            'case "$*" in',
            f"*version_info*) exit {0 if suits else 1} ;;",
            f"*'pip install'*) {'exit 1' if fails else 'mkdir -m 700 bin minisweagent'} ;;",
            f"*compileall*) echo '{cannot_compile}'; exit {1 if cannot_compile else 0} ;;",
            f"*{PYTHON_START}*) echo 'This is mini-swe-agent version {version}.' ;;",
            "esac",
        ]
        for name in ("python3.11", "python3"):
            (self.bin / name).write_text("\n".join(lines) + "\n")
            (self.bin / name).chmod(0o755)

    def install(self) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{self.bin}:{os.environ['PATH']}"}
        script = CONTAINERS / "install_harness.sh"
        arguments = [script, "mini_swe_agent", self.cache]
        return subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=20)

    @property
    def installed(self) -> list[str]:
        return sorted(path.name for path in (self.cache / "harness").iterdir())


def test_pip_installs_the_pins_and_nothing_else_compiled_for_the_path_in_the_sandbox(tmp_path: Path) -> None:
    python = Python(tmp_path)
    for _ in range(2):
        done = python.install()
        assert (done.returncode, done.stderr) == (0, "")
    assert python.installed == ["mini_swe_agent-2.4.6"]
    install = python.cache / "harness" / "mini_swe_agent-2.4.6"
    assert sorted(path.name for path in install.iterdir()) == [".pins", "minisweagent", PYTHON_START]
    assert (install / "minisweagent").stat().st_mode & 0o777 == 0o755
    _, fetch, compilation, *_ = calls = python.log.read_text().splitlines()
    assert len(calls) == 4
    assert {"--no-deps", "--require-hashes", f"{PINS}/mini_swe_agent/requirements.txt"} <= set(fetch.split())
    assert "-p /harness" in compilation
    assert "unchecked-hash" in compilation
    make_harness("mini_swe_agent", ADAPTERS["mini_swe_agent"].settings_type(), install.parent).check_install()


@pytest.mark.parametrize(
    ("python", "line"),
    [
        ({"fails": True}, "pip could not fetch mini_swe_agent 2.4.6"),
        (
            {"cannot_compile": "OSError: [Errno 28] No space left on device"},
            "cannot compile mini_swe_agent: OSError: [Errno 28] No space left on device",
        ),
        ({"version": "2.4.60"}, "mini_swe_agent says it is 'This is mini-swe-agent version 2.4.60.', not 2.4.6"),
    ],
)
def test_what_goes_wrong_is_one_clear_line_and_leaves_nothing(
    tmp_path: Path, python: dict[str, bool], line: str
) -> None:
    fake = Python(tmp_path, **python)
    done = fake.install()
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"install_harness.sh: {line}"]
    assert fake.installed == []


def test_files_for_other_versions_of_python_do_not_stop_an_install(tmp_path: Path) -> None:
    assert Python(tmp_path, cannot_compile="SyntaxError: invalid syntax").install().returncode == 0


@FROM_PIP
def test_the_pins_are_whole_exact_and_without_the_name_of_a_host(name: str) -> None:
    harness = make_harness(name, ADAPTERS[name].settings_type(), Path("/cache"))
    lines = (PINS / name / "requirements.txt").read_text().splitlines()
    pins = [PIN.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(pins)
    assert pins[0] is not None
    assert pins[0][2] == harness.version
    assert len({pin[1] for pin in pins if pin}) == len(pins)
    assert "://" not in "".join(lines)


def start(folder: Path, version: tuple[int, int], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a harness that prints its arguments out of `folder`, where it was installed for Python `version`."""
    program = folder / PYTHON_START
    program.write_text((CONTAINERS / PYTHON_START).read_text().replace("(3, 11)", str(version)))
    (folder / "agent.py").write_text("import sys\n\ndef main():\n    print(sys.argv[1:], sys.path[0])\n    return 3\n")
    command = [sys.executable, "-I", "-S", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, cwd="/")


def test_a_python_harness_starts_from_its_own_folder_and_its_exit_code_is_kept(tmp_path: Path) -> None:
    done = start(tmp_path, sys.version_info[:2], "agent:main", "--task", "x")
    assert (done.returncode, done.stdout, done.stderr) == (3, f"['--task', 'x'] {tmp_path}\n", "")


def test_a_python_harness_names_the_python_that_it_needs(tmp_path: Path) -> None:
    done = start(tmp_path, (2, 7), "agent:main")
    assert done.returncode == 1
    assert "installed for Python 2.7, but" in done.stderr
    assert "set sandbox.image" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_start_needs_no_other_program() -> None:
    assert os.access(CONTAINERS / PYTHON_START, os.X_OK)
    assert (CONTAINERS / PYTHON_START).read_text().startswith("#!/usr/bin/python3 -IS\n")
