"""Whether the harnesses are installed, each from its pins."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path

from clawhpc.checkup.finding import Finding, State
from clawhpc.errors import UserError
from clawhpc.harness.base import CONTAINERS_DIR, PYTHON_START
from clawhpc.harness.registry import ADAPTERS

PINS_FILE = ".pins"
"""In an install: the sum of all that it was made from, by containers/install_harness.sh."""


def check_harnesses(cache_dir: Path, wanted: Collection[str], containers: Path = CONTAINERS_DIR) -> list[Finding]:
    """A row for each that the configuration names, and one for all others."""
    states = {name: _install_state(name, cache_dir, containers) for name in ADAPTERS}
    rows = [_wanted(name, *states[name], cache_dir, containers) for name in ADAPTERS if name in wanted]
    others = {name: state for name, (state, _) in states.items() if name not in wanted}
    return [*rows, _others(others, cache_dir, containers)] if others else rows


def _install_state(name: str, cache_dir: Path, containers: Path) -> tuple[State, str]:
    """How harness `name` is installed, and what to say of it."""
    adapter = ADAPTERS[name]
    harness = adapter(adapter.settings_type(), cache_dir / "harness")
    try:
        harness.check_install()
    except UserError:
        return State.MISSING, f"{adapter.version} is not in {cache_dir / 'harness'}"
    if not harness.install_dir.is_relative_to(cache_dir):
        return State.WORKS, f"{adapter.version}, comes with clawhpc"
    made_from = harness.install_dir / PINS_FILE
    if not made_from.is_file() or made_from.read_text().strip() != pins_sum(containers, name):
        return State.LIMITED, f"{adapter.version}, made from other pins than those here"
    return State.WORKS, adapter.version


def _wanted(name: str, state: State, found: str, cache_dir: Path, containers: Path) -> Finding:
    remedy = "" if state is State.WORKS else install_command(name, cache_dir, containers)
    return Finding(what=f"harness {name}", state=state, found=found, remedy=remedy)


def _others(states: Mapping[str, State], cache_dir: Path, containers: Path) -> Finding:
    words = {State.WORKS: "installed", State.LIMITED: "of other pins", State.MISSING: "not installed"}
    lines = []
    for state, word in words.items():
        names = [name for name, one in states.items() if one is state]
        lines += [f"{word}: {', '.join(names)}"] if names else []
    lacks = any(state is not State.WORKS for state in states.values())
    remedy = install_command("NAME", cache_dir, containers) if lacks else ""
    return Finding(what="other harnesses", state=State.NOT_NEEDED, found="\n".join(lines), remedy=remedy)


def install_command(name: str, cache_dir: Path, containers: Path) -> str:
    """What installs harness `name`, or renews it."""
    script = containers / "install_harness.sh"
    near = script.is_relative_to(Path.cwd())
    return shlex.join([str(script.relative_to(Path.cwd()) if near else script), name, str(cache_dir)])


def pins_sum(containers: Path, name: str) -> str:
    """What containers/install_harness.sh writes into PINS_FILE: sha256sum of what sha256sum says of each file."""
    folder = containers / "harness" / name
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    names = sorted(os.fsencode(path.relative_to(containers)) for path in files)
    if not (folder / "package-lock.json").is_file():
        names.append(os.fsencode(PYTHON_START))
    lines = [f"{_sha256(containers / os.fsdecode(one))}  {os.fsdecode(one)}\n" for one in names]
    return f"{hashlib.sha256(''.join(lines).encode()).hexdigest()}  -"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
