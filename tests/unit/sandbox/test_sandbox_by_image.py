"""Each image of a task's own has one sandbox in a worker, opened when it is first asked for."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import pytest

from clawhpc.errors import HostError, SandboxError
from clawhpc.ledger import Ledger
from clawhpc.records import TaskImage
from clawhpc.sandbox.base import Sandbox
from clawhpc.sandbox.by_image import Sandboxes, open_images
from clawhpc.sandbox.settings import SandboxSettings
from tests.fakes.built_image import lay_image
from tests.fakes.rollout import FakeSandbox, succeed
from tests.sandbox_parts import run, shell, working_sandbox

pytestmark = pytest.mark.anyio

IMAGES = [TaskImage(folder=f"/images/{name}", python="/usr/bin/python3") for name in ("a", "b")]


async def test_one_is_opened_for_each_image_however_many_ask_at_the_same_time() -> None:
    opened: list[TaskImage] = []

    def open_image(image: TaskImage) -> Sandbox:
        time.sleep(0.05)
        opened.append(image)
        return FakeSandbox(succeed)

    own = FakeSandbox(succeed)
    sandboxes, found = Sandboxes(own, open_image), list[Sandbox]()

    async def ask(image: TaskImage | None) -> None:
        found.append(await sandboxes.of(image))

    async with anyio.create_task_group() as asking:
        for image in (*IMAGES, *IMAGES, None):
            asking.start_soon(ask, image)
    assert sorted(image.folder for image in opened) == ["/images/a", "/images/b"]
    assert len({id(one) for one in found}) == 3
    assert await sandboxes.of(None) is own


async def test_a_host_that_does_not_take_one_is_at_fault_and_is_asked_again() -> None:
    errors = [OSError("no space")]

    def open_image(image: TaskImage) -> Sandbox:
        if errors:
            raise errors.pop()
        return FakeSandbox(succeed)

    sandboxes = Sandboxes(FakeSandbox(succeed), open_image)
    with pytest.raises(HostError, match="image /images/a: OSError: no space"):
        await sandboxes.of(IMAGES[0])
    assert (await sandboxes.of(IMAGES[0])).name == "fake"


@pytest.mark.sandbox
@pytest.mark.parametrize(("stage", "num_copies"), [(None, 0), (True, 1)])
async def test_an_image_is_used_where_it_lies_unless_it_is_to_be_copied(
    stage: bool | None, num_copies: int, ledger: Ledger, tmp_path: Path
) -> None:
    settings = SandboxSettings(kind="bubblewrap", stage=stage)
    own = await working_sandbox(settings, ledger, tmp_path)
    image = TaskImage(folder=str(lay_image(tmp_path / "a")), python="/opt/python")
    assert (await open_images(own, settings, ledger).of(image)).python == "/opt/python"
    assert len(list(ledger.scratch.glob("images/*"))) == num_copies


@pytest.mark.sandbox
@pytest.mark.parametrize("stage", [None, True])
async def test_an_image_from_which_nothing_starts_is_named_by_whoever_runs_something_there(
    stage: bool | None, ledger: Ledger, tmp_path: Path
) -> None:
    settings = SandboxSettings(kind="bubblewrap", stage=stage)
    sandboxes = open_images(await working_sandbox(settings, ledger, tmp_path), settings, ledger)
    gone = await sandboxes.of(TaskImage(folder=str(tmp_path / "gone"), python="/usr/bin/python3"))
    with pytest.raises(SandboxError, match=f"{tmp_path}/gone"):
        await run(gone, shell("true"))


@pytest.mark.sandbox
@pytest.mark.parametrize("stage", [None, True])
async def test_a_host_that_does_not_see_where_images_lie_takes_none(
    stage: bool | None, ledger: Ledger, tmp_path: Path
) -> None:
    settings = SandboxSettings(kind="bubblewrap", stage=stage)
    sandboxes = open_images(await working_sandbox(settings, ledger, tmp_path), settings, ledger)
    with pytest.raises(HostError, match=rf"^{tmp_path}/images: no such folder here"):
        await sandboxes.of(TaskImage(folder=f"{tmp_path}/images/a", python="/usr/bin/python3"))
