"""What a person is told when there is no sandbox to be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawhpc.errors import ClawError, HostError, UserError
from clawhpc.ledger import Ledger
from clawhpc.sandbox.image import build_image
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


def fake_apptainer(folder: Path, script: str) -> str:
    """A program that, called as `apptainer build --sandbox TARGET RECIPE`, runs `script` with `$target` set."""
    program = folder / "apptainer"
    program.write_text(f"#!/bin/sh\necho once >> {folder}/calls\ntarget=$3\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_an_image_is_built_once_for_each_content_of_its_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "base.def"
    recipe.write_text("Bootstrap: docker")
    apptainer = fake_apptainer(tmp_path, "mkdir $target")
    first = build_image(recipe, apptainer=apptainer, cache_dir=tmp_path)
    assert build_image(recipe, apptainer=apptainer, cache_dir=tmp_path) == first
    assert (tmp_path / "calls").read_text() == "once\n"
    recipe.write_text("Bootstrap: docker\n# changed")
    assert build_image(recipe, apptainer=apptainer, cache_dir=tmp_path) != first


def test_a_build_that_fails_tells_why_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    recipe = tmp_path / "base.def"
    recipe.write_text("Bootstrap: docker")
    apptainer = fake_apptainer(tmp_path, "mkdir $target; echo no such registry >&2; exit 1")
    with pytest.raises(UserError, match=r"base.def: cannot be built: no such registry"):
        build_image(recipe, apptainer=apptainer, cache_dir=tmp_path)
    assert [path.suffix for path in (tmp_path / "images").iterdir()] == [".lock"]


def test_what_a_killed_build_has_left_goes_with_the_next(tmp_path: Path) -> None:
    recipe = tmp_path / "base.def"
    recipe.write_text("Bootstrap: docker")
    image = build_image(recipe, apptainer=fake_apptainer(tmp_path, "mkdir $target"), cache_dir=tmp_path)
    image.rename(image.with_name(f"{image.name}.cut_off"))
    assert build_image(recipe, apptainer=fake_apptainer(tmp_path, "mkdir $target"), cache_dir=tmp_path) == image
    assert sorted(path.name for path in image.parent.iterdir()) == [image.name, f"{image.name}.lock"]


def test_a_build_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawhpc.sandbox.image.BUILD_S", 0.2)
    recipe = tmp_path / "base.def"
    recipe.write_text("Bootstrap: docker")
    with pytest.raises(UserError, match=r"base\.def: has been building for .* build it by hand"):
        build_image(recipe, apptainer=fake_apptainer(tmp_path, "exec sleep 60"), cache_dir=tmp_path)
    assert [path.suffix for path in (tmp_path / "images").iterdir()] == [".lock"]
