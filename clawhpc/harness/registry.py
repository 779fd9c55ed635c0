"""Harnesses by name."""

from __future__ import annotations

from pathlib import Path

from clawhpc.errors import UserError
from clawhpc.harness.base import Harness
from clawhpc.harness.claude_code import ClaudeCode, ClaudeCodeSettings
from clawhpc.harness.pi import Pi, PiSettings

HarnessSettings = ClaudeCodeSettings | PiSettings
SETTINGS: dict[str, type[HarnessSettings]] = {ClaudeCode.name: ClaudeCodeSettings, Pi.name: PiSettings}


def make_harness(name: str, settings: HarnessSettings, install_root: Path) -> Harness:
    """The adapter `name`. Its program need not be installed yet: see `check_install`."""
    match name, settings:
        case ClaudeCode.name, ClaudeCodeSettings():
            return ClaudeCode(settings, install_root)
        case Pi.name, PiSettings():
            return Pi(settings, install_root)
    if name in SETTINGS:
        raise UserError(f"harness {name} takes {SETTINGS[name].__name__}, not {type(settings).__name__}")
    raise UserError(f"harness={name}: allowed are {', '.join(SETTINGS)}")
