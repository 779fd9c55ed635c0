"""The folder of a rollout: made, filled and gone within the rollout's time, whatever is in it (law 5)."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from clawhpc.errors import SandboxError
from clawhpc.records import ExecResult, Outcome, TaskImage
from clawhpc.rollout.folder import lay_out
from clawhpc.rollout.run import run_rollout
from clawhpc.sandbox.base import SandboxCommand
from tests.fakes.records import make_task
from tests.fakes.rollout import FakeSandbox, one_call, parts_of, plan_of, roll, succeed, workspace_of
from tests.fakes.task_sets import write_files
from tests.fakes.trees import nest

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("mode", [0o000, 0o444])
async def test_folders_that_the_harness_locked_are_removed_all_the_same(tmp_path: Path, mode: int) -> None:
    async def lock(command: SandboxCommand) -> ExecResult:
        inner, outer = workspace_of(command) / "deep" / "deeper", workspace_of(command) / "deep"
        inner.mkdir(parents=True)
        (outer / "link").symlink_to("/etc")
        for folder in (inner, outer):
            folder.chmod(mode)
        return await one_call(command)

    assert (await roll(tmp_path, FakeSandbox(lock))).outcome is Outcome.COMPLETED
    assert Path("/etc").exists()


async def is_emptied(folder: Path) -> bool:
    """Sooner or later: a busy machine goes on removing in the background."""
    with anyio.move_on_after(60):
        while list(folder.iterdir()):
            await anyio.sleep(0.05)
    return not list(folder.iterdir())


async def test_a_workspace_too_deep_for_recursion_is_removed(tmp_path: Path) -> None:
    async def dig(command: SandboxCommand) -> ExecResult:
        nest(workspace_of(command), 1500)
        return await one_call(command)

    record = await run_rollout(plan_of(), parts_of(tmp_path, FakeSandbox(dig)))
    assert record.outcome is Outcome.COMPLETED
    assert await is_emptied(tmp_path)


async def test_a_workspace_that_takes_long_to_remove_does_not_hold_up_its_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rm").write_text('#!/bin/sh\nsleep 1\nexec /bin/rm "$@"\n')
    (tmp_path / "rm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("clawhpc.rollout.folder.TEARDOWN_S", 0.1)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    record = await run_rollout(plan_of(), parts_of(scratch, FakeSandbox(one_call)))
    assert record.outcome is Outcome.COMPLETED
    assert 0.1 <= record.timings.teardown_s < 0.9
    assert await is_emptied(scratch)


async def test_inputs_that_take_long_to_copy_do_not_hold_up_the_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, go_on = [], threading.Event()

    def copy_slowly(source: str, target: str) -> None:
        copied.append(source)
        go_on.wait(20)

    monkeypatch.setattr("clawhpc.rollout.folder.shutil.copy2", copy_slowly)
    inputs, scratch = tmp_path / "inputs", tmp_path / "scratch"
    for folder in (inputs, scratch):
        folder.mkdir()
    for number in range(3):
        (inputs / str(number)).touch()
    plan = plan_of(replace(make_task(), input_dir=str(inputs)))
    with anyio.fail_after(10):
        record = await run_rollout(plan, parts_of(scratch, FakeSandbox(succeed), deadline_s=10.3, reserve_s=10.0))
    assert (record.outcome, record.detail) == (Outcome.SANDBOX_FAILED, "boot: the deadline of the rollout passed")
    go_on.set()
    assert list(scratch.iterdir()) == []
    assert len(copied) == 1


async def test_the_inputs_of_a_set_that_is_read_only_can_be_written_by_the_harness(tmp_path: Path) -> None:
    inputs, scratch = tmp_path / "inputs", tmp_path / "scratch"
    (inputs / "src").mkdir(parents=True)
    scratch.mkdir()
    (inputs / "src/run.sh").touch()
    (inputs / "link").symlink_to("src/run.sh")
    modes: dict[str, int] = {}

    async def look(command: SandboxCommand) -> ExecResult:
        workspace = workspace_of(command)
        modes.update({name: (workspace / name).stat().st_mode & 0o777 for name in ("", "src", "src/run.sh")})
        assert os.readlink(workspace / "link") == "src/run.sh"
        return await one_call(command)

    (inputs / "src/run.sh").chmod(0o555)
    for folder in (inputs / "src", inputs):
        folder.chmod(0o555)
    try:
        record = await run_rollout(
            plan_of(replace(make_task(), input_dir=str(inputs))), parts_of(scratch, FakeSandbox(look))
        )
        assert inputs.stat().st_mode & 0o777 == 0o555, "the set itself is left as it is"
    finally:
        for folder in (inputs, inputs / "src"):
            folder.chmod(0o755)
    assert record.outcome is Outcome.COMPLETED
    assert modes == {"": 0o755, "src": 0o755, "src/run.sh": 0o755}


async def test_a_scratch_folder_that_cannot_be_written_is_an_outcome(tmp_path: Path) -> None:
    record = await run_rollout(plan_of(), parts_of(tmp_path / "missing", FakeSandbox(one_call)))
    assert record.outcome is Outcome.SANDBOX_FAILED
    assert "missing" in record.detail


# ---- what a workspace begins with -----------------------------------------------------------------------------------


async def laid_out(tmp_path: Path, inputs: dict[str, str], mount: str = "/app") -> Path:
    """The workspace of a task with `inputs`, on the image in tmp_path/image, which stands at `mount`."""
    task = replace(
        make_task(),
        image=TaskImage(folder=str(tmp_path / "image"), python="/usr/bin/python3"),
        input_dir=str(write_files(tmp_path / "inputs", inputs)),
        workspace_mount=mount,
    )
    (tmp_path / "rollout").mkdir()
    await to_thread.run_sync(lay_out, task, tmp_path / "rollout")
    return tmp_path / "rollout" / "workspace"


async def test_a_workspace_begins_with_what_the_image_has_there_and_the_tasks_files_over_it(tmp_path: Path) -> None:
    image = write_files(tmp_path / "image/app", {"repo/.git/HEAD": "main", "a": "old", "bin/run": "#!/bin/sh", "b": ""})
    (image / "bin/run").chmod(0o555)
    (image / "link").symlink_to("/nowhere")
    (image / "a.link").symlink_to("a")
    (tmp_path / "image/elsewhere").touch()
    workspace = await laid_out(tmp_path, {"a": "new", "repo/added": "", "a.link": "no link"})
    assert {str(path.relative_to(workspace)) for path in workspace.rglob("*") if not path.is_dir()} == {
        *("repo/.git/HEAD", "repo/added", "a", "a.link", "b", "bin/run", "link")
    }
    assert ((workspace / "a").read_text(), (workspace / "a.link").read_text()) == ("new", "no link")
    assert os.readlink(workspace / "link") == "/nowhere"
    assert (workspace / "bin/run").stat().st_mode & 0o777 == 0o755
    assert (image / "a").read_text() == "old"


async def test_pipes_and_sockets_that_a_build_left_in_the_workspace_are_not_copied(tmp_path: Path) -> None:
    image = write_files(tmp_path / "image/app", {"run/state": ""})
    os.mkfifo(image / "run/pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(image / "run/agent"))
    workspace = await laid_out(tmp_path, {"a": ""})
    assert {path.name for path in workspace.rglob("*")} == {"a", "run", "state"}


async def test_a_link_in_an_image_leads_no_file_of_a_task_out_of_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "image/app").mkdir(parents=True)
    (tmp_path / "image/app/data").symlink_to(tmp_path / "host")
    with pytest.raises(SandboxError, match=r"^data of the workspace is a link in the task's image"):
        await laid_out(tmp_path, {"data/a": ""})
    assert list((tmp_path / "host").iterdir()) == []


@pytest.mark.parametrize("link", ["app", "opt"])
async def test_a_workspace_that_is_a_link_in_the_image_shows_no_file_of_the_host(tmp_path: Path, link: str) -> None:
    write_files(tmp_path / "host", {"secret": "", "app/secret": ""})
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / link).symlink_to(tmp_path / "host")
    with pytest.raises(SandboxError, match="a link leads there in the task's image"):
        await laid_out(tmp_path, {"b": ""}, mount={"app": "/app", "opt": "/opt/app"}[link])
    assert list((tmp_path / "rollout/workspace").iterdir()) == []


async def test_the_folder_of_images_may_be_reached_by_a_link(tmp_path: Path) -> None:
    write_files(tmp_path / "real/app", {"a": ""})
    (tmp_path / "image").symlink_to("real")
    assert (await laid_out(tmp_path, {"b": ""}) / "a").exists()
