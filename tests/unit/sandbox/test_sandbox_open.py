"""What a person is told when there is no sandbox to be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawhpc.errors import ClawError, HostError, UserError
from clawhpc.ledger import Ledger
from clawhpc.sandbox.open import open_sandbox
from clawhpc.sandbox.settings import SandboxSettings

pytestmark = pytest.mark.anyio


async def refusal(
    settings: SandboxSettings, ledger: Ledger, cache_dir: Path, error: type[ClawError] = UserError
) -> str:
    with pytest.raises(error) as caught:
        await open_sandbox(settings, ledger=ledger, cache_dir=cache_dir)
    return str(caught.value)


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
