"""containers/install_harness.sh with a fake npm, and the pins that it reads."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from clawhpc.harness.openclaw import NODE_OPTIONS
from clawhpc.harness.registry import ADAPTERS, make_harness

CONTAINERS = Path(__file__).parents[3] / "containers"
PINS = CONTAINERS / "harness"
CLAUDE = "node_modules/@anthropic-ai/claude-code-linux-x64/claude"
FROM_NPM = pytest.mark.parametrize("name", [name for name in ADAPTERS if (PINS / name / "package.json").exists()])


class Npm:
    """A program `npm`: it counts its calls and lays out a Claude Code, which says it is `version` or runs `program`."""

    def __init__(
        self,
        folder: Path,
        *,
        version: str = "2.1.328",
        program: str = "",
        fails: bool = False,
        containers: Path = CONTAINERS,
    ) -> None:
        self.folder, self.log, self.cache = folder, folder / "calls", folder / "cache"
        self.containers = containers
        (folder / "bin").mkdir(parents=True)
        program = "#!/bin/sh\n" + (program or f"echo '{version} (Claude Code)'") + "\n"
        lines = [
            "#!/bin/sh",
            f'echo "$PWD $*" >>{self.log}',
            "exit 1" if fails else "",
            f"mkdir -p {Path(CLAUDE).parent} .home",
            f"cat >{CLAUDE} <<'EOF'\n{program}EOF",
            f"chmod 700 {CLAUDE}",
        ]
        (folder / "bin" / "npm").write_text("\n".join(lines) + "\n")
        (folder / "bin" / "npm").chmod(0o755)

    def install(self, name: str = "claude_code", **variables: str) -> subprocess.CompletedProcess[str]:
        env = variables | {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        script = self.containers / "install_harness.sh"
        return subprocess.run([script, name, self.cache], env=env, capture_output=True, text=True, timeout=20)

    @property
    def installed(self) -> list[str]:
        return sorted(path.name for path in (self.cache / "harness").glob("*"))

    @property
    def num_calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def test_an_install_is_made_once_whole_and_for_everybody_to_read(tmp_path: Path) -> None:
    npm = Npm(tmp_path)
    for _ in range(2):
        assert npm.install().returncode == 0
    assert npm.num_calls == 1
    assert [path.name for path in (npm.cache / "harness").iterdir()] == ["claude_code-2.1.328"]
    install = npm.cache / "harness" / "claude_code-2.1.328"
    assert (install / CLAUDE).stat().st_mode & 0o777 == 0o755
    assert install.stat().st_mode & 0o777 == 0o755
    assert not (install / ".home").exists()
    make_harness("claude_code", ADAPTERS["claude_code"].settings_type(), npm.cache / "harness").check_install()


def test_other_pins_are_another_install_and_take_the_place_of_the_old_one(tmp_path: Path) -> None:
    containers = tmp_path / "containers"
    shutil.copytree(CONTAINERS, containers)
    npm = Npm(tmp_path, containers=containers)
    assert npm.install().returncode == 0
    install = npm.cache / "harness" / "claude_code-2.1.328"
    (install / "old").touch()
    lock = containers / "harness" / "claude_code" / "package-lock.json"
    lock.write_text(lock.read_text() + "\n")
    for _ in range(2):
        assert npm.install().returncode == 0
    assert npm.num_calls == 2
    assert not (install / "old").exists()
    assert [path.name for path in install.parent.iterdir()] == [install.name]


def test_an_install_that_cannot_be_renewed_stays_as_it_was(tmp_path: Path) -> None:
    npm = Npm(tmp_path)
    assert npm.install().returncode == 0
    install = npm.cache / "harness" / "claude_code-2.1.328"
    (install / ".pins").write_text("others")
    (tmp_path / "bin" / "npm").write_text("#!/bin/sh\nexit 1\n")
    assert npm.install().returncode == 2
    assert (install / CLAUDE).exists()
    assert [path.name for path in install.parent.iterdir()] == [install.name]


def test_the_program_that_tells_its_version_sees_nothing_of_who_installs_it(tmp_path: Path) -> None:
    npm = Npm(tmp_path, program="env; cat; echo 2.1.328 X")
    assert npm.install(SECRET="1").returncode == 0
    npm = Npm(tmp_path / "other", program="env >&2; cat; exit 1")
    said = npm.install(SECRET="1").stderr
    assert "LANG=C.UTF-8" in said
    assert "SECRET" not in said


def test_another_version_than_the_pinned_one_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    npm = Npm(tmp_path, version="2.1.329")
    done = npm.install()
    assert done.returncode == 2
    assert "claude_code says it is '2.1.329 (Claude Code)', not 2.1.328" in done.stderr
    assert list((npm.cache / "harness").iterdir()) == []


def test_a_fetch_that_fails_is_one_clear_line_and_leaves_nothing(tmp_path: Path) -> None:
    npm = Npm(tmp_path, fails=True)
    done = npm.install()
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "install_harness.sh: npm could not fetch claude_code 2.1.328"
    assert list((npm.cache / "harness").iterdir()) == []


def test_an_unknown_harness_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    npm = Npm(tmp_path)
    done = npm.install("hal")
    assert done.returncode == 2
    known = " ".join(sorted(path.name for path in PINS.iterdir()))
    assert f"no harness 'hal'; there are: {known}" in done.stderr
    assert npm.num_calls == 0


@pytest.mark.parametrize(("required", "succeeds"), [("0", True), ("1", False)])
def test_a_harness_that_this_machine_cannot_have_stops_make_only_where_parts_are_required(
    tmp_path: Path, required: str, succeeds: bool
) -> None:
    containers = tmp_path / "containers"
    for name in ("fails", "works"):
        (containers / "harness" / name).mkdir(parents=True)
    (containers / "install_harness.sh").write_text('#!/bin/sh\n[ "$1" = works ] && touch "$2/$1"\n')
    (containers / "install_harness.sh").chmod(0o755)
    command = ["make", "-f", CONTAINERS.parent / "Makefile", "harness", f"REQUIRE_ALL={required}"]
    done = subprocess.run([*command, f"CLAWHPC_CACHE={tmp_path}"], cwd=tmp_path, capture_output=True, timeout=20)
    assert (done.returncode == 0) == succeeds
    assert (tmp_path / "works").exists()


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "whitebox"])
def test_a_harness_is_a_folder_that_says_how_its_program_tells_its_version(name: str) -> None:
    (line,) = (PINS / name / "version_command").read_text().splitlines()
    assert ADAPTERS[name].programs[0] in line.split()


def test_a_harness_of_ours_needs_no_install(tmp_path: Path) -> None:
    npm = Npm(tmp_path)
    done = npm.install("whitebox")
    assert (done.returncode, done.stderr) == (0, "")
    assert npm.installed == []


def test_openclaw_is_warmed_as_it_is_started() -> None:
    assert json.dumps(NODE_OPTIONS) in (PINS / "openclaw" / "warm.mjs").read_text()


@FROM_NPM
def test_the_pins_are_those_of_the_adapter_exact_and_without_the_name_of_a_host(name: str) -> None:
    harness = make_harness(name, ADAPTERS[name].settings_type(), Path("/cache"))
    package = json.loads((PINS / name / "package.json").read_text())
    assert package["version"] == harness.version
    assert harness.version in {version.removesuffix("-linux-x64") for version in package["dependencies"].values()}
    assert all(version[0].isdigit() for version in package["dependencies"].values())
    lock = json.loads((PINS / name / "package-lock.json").read_text())
    packages = {path: entry for path, entry in lock["packages"].items() if path}
    assert lock["packages"][""]["dependencies"] == package["dependencies"]
    assert not any("resolved" in entry for entry in packages.values())
    fetched = (entry for entry in packages.values() if not entry.get("inBundle"))  # what comes inside another package
    assert all(entry["integrity"].startswith("sha512-") for entry in fetched)
