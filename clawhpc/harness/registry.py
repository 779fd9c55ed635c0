"""Harnesses by name."""

from __future__ import annotations

from pathlib import Path

from clawhpc.errors import UserError
from clawhpc.harness.base import Harness, HarnessSettings
from clawhpc.harness.claude_code import ClaudeCode
from clawhpc.harness.codex import Codex
from clawhpc.harness.gemini_cli import GeminiCli
from clawhpc.harness.hermes import Hermes
from clawhpc.harness.mini_swe_agent import MiniSweAgent
from clawhpc.harness.nanobot import Nanobot
from clawhpc.harness.openclaw import OpenClaw
from clawhpc.harness.opencode import Opencode
from clawhpc.harness.pi import Pi
from clawhpc.harness.qwen_code import QwenCode
from clawhpc.harness.whitebox import Whitebox

ADAPTERS: dict[str, type[Harness]] = {
    adapter.name: adapter
    for adapter in (
        ClaudeCode,
        OpenClaw,
        Codex,
        Pi,
        QwenCode,
        Opencode,
        GeminiCli,
        MiniSweAgent,
        Hermes,
        Nanobot,
        Whitebox,
    )
}
"""Every harness, in the order in which people read of them."""


def make_harness(name: str, settings: HarnessSettings, install_root: Path) -> Harness:
    """The adapter `name`. Its program need not be installed yet: see `check_install`."""
    if name not in ADAPTERS:
        raise UserError(f"harness={name}: allowed are {', '.join(ADAPTERS)}")
    wanted = ADAPTERS[name].settings_type
    if not isinstance(settings, wanted):
        raise UserError(f"harness {name} takes {wanted.__name__}, not {type(settings).__name__}")
    return ADAPTERS[name](settings, install_root)
