"""What a person is told when there is no sandbox to be had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clawhpc.errors import ClawError, HostError, SandboxError, UserError
from clawhpc.ledger import Ledger
from clawhpc.records import ExecResult
from clawhpc.sandbox.base import SandboxCommand
from clawhpc.sandbox.open import CHECK_S, CHECKS, check_sandbox, open_sandbox
from clawhpc.sandbox.settings import SandboxSettings
from tests.fakes.rollout import OK, FakeSandbox, succeed

pytestmark = pytest.mark.anyio


async def refusal(
    settings: SandboxSettings, ledger: Ledger, cache_dir: Path, error: type[ClawError] = UserError
) -> str:
    with pytest.raises(error) as caught:
        await open_sandbox(settings, ledger=ledger, cache_dir=cache_dir)
    return str(caught.value)


async def test_a_check_that_something_kills_says_nothing_of_the_host() -> None:
    """As where the machine runs out of memory just then, or, of several workers, one is killed."""
    endings: list[ExecResult | SandboxError] = [replace(OK, exit_code=137), SandboxError("was killed"), OK]

    async def end(command: SandboxCommand) -> ExecResult:
        ending = endings.pop(0)
        if isinstance(ending, SandboxError):
            raise ending
        return ending

    await check_sandbox(FakeSandbox(succeed, verifier=end))
    assert endings == []


async def test_one_that_always_fails_does_and_within_its_time() -> None:
    async def fail(command: SandboxCommand) -> ExecResult:
        return replace(OK, exit_code=1, stderr_tail="no user namespaces")

    failing = FakeSandbox(succeed, verifier=fail)
    with pytest.raises(SandboxError, match="/bin/true ended with exit code 1: no user namespaces"):
        await check_sandbox(failing)
    assert len(failing.commands) == CHECKS
    assert CHECK_S >= failing.timeouts_s[0] > failing.timeouts_s[-1] > 0


async def test_an_unknown_kind_is_refused_with_those_that_exist(ledger: Ledger, tmp_path: Path) -> None:
    message = await refusal(SandboxSettings(kind="docker"), ledger, tmp_path)  # type: ignore[arg-type]
    assert message == "sandbox.kind=docker: must be one of auto, apptainer, bubblewrap"


async def test_a_missing_image_is_named(ledger: Ledger, tmp_path: Path) -> None:
    assert await refusal(SandboxSettings(image="/nowhere.sif"), ledger, tmp_path) == (
        "sandbox.image=/nowhere.sif: no such image"
    )


async def test_the_hosts_own_programs_are_never_written(ledger: Ledger, tmp_path: Path) -> None:
    message = await refusal(SandboxSettings(writable=True), ledger, tmp_path)
    assert message.startswith("sandbox.writable: needs sandbox.image")


async def test_an_image_is_written_with_apptainer_only(ledger: Ledger, tmp_path: Path) -> None:
    settings = SandboxSettings(kind="bubblewrap", image=str(tmp_path), writable=True)
    message = await refusal(settings, ledger, tmp_path, HostError)
    assert message == "no sandbox works here. bubblewrap: sandbox.writable takes Apptainer"


async def test_bubblewrap_takes_no_image_that_is_a_file(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "image.sif"
    image.touch()
    why = "sandbox.image: bubblewrap takes an image as a folder; Apptainer takes a .sif"
    assert await refusal(SandboxSettings(kind="bubblewrap", image=str(image)), ledger, tmp_path) == why
    monkeypatch.setenv("PATH", str(tmp_path))
    message = await refusal(SandboxSettings(image=str(image)), ledger, tmp_path, HostError)
    assert message.endswith(f"see containers/README.md; bubblewrap: {why}")


async def test_a_missing_apptainer_says_where_to_read_on(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    message = await refusal(SandboxSettings(kind="apptainer"), ledger, tmp_path, HostError)
    assert message == (
        "no sandbox works here. apptainer: not installed; ask your cluster for it, or see containers/README.md"
    )


async def test_where_neither_works_both_reasons_are_told(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("apptainer", "bwrap"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} may not make namespaces >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    message = await refusal(SandboxSettings(), ledger, tmp_path, HostError)
    assert "apptainer did not start: apptainer may not make namespaces (exit code 1)" in message
    assert "bubblewrap did not start: bwrap may not make namespaces (exit code 1)" in message
    assert list(ledger.scratch.glob("run-*")) == []
