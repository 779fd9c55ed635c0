"""What a task may say of its rollout: how long its harness may run, its variables, where its workspace stands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clawhpc.errors import UserError
from clawhpc.records import ExecResult, LaunchPlan, LaunchRequest
from clawhpc.rollout.run import run_rollout
from clawhpc.sandbox.base import SandboxCommand
from clawhpc.tasks.harbor import load_tasks
from clawhpc.tasks.layout import Layout
from clawhpc.verify.script import GUARD_FOLDER
from tests.fakes.records import make_task
from tests.fakes.rollout import LIMITS, OK, FakeHarness, FakeSandbox, one_call, parts_of, plan_of
from tests.fakes.task_sets import lay_harbor

pytestmark = pytest.mark.anyio


async def test_a_task_may_give_its_harness_less_time_than_the_limits_leave(tmp_path: Path) -> None:
    given = []
    for run_s in (None, 15.0, 500.0):
        sandbox = FakeSandbox(one_call)
        record = await run_rollout(plan_of(replace(make_task(), run_s=run_s)), parts_of(tmp_path, sandbox))
        assert record.verdict is not None
        given.append(sandbox.timeouts_s[0])
    limits_s = LIMITS.deadline_s - LIMITS.reserve_s
    assert [limits_s - 5 < seconds <= limits_s for seconds in given] == [True, False, True]
    assert 0 < given[1] <= 15


async def test_what_no_harness_may_see_of_a_task_is_looked_for_before_it_starts(tmp_path: Path) -> None:
    def hide(path: Path) -> None:
        raise UserError(f"{path}: a harness could read it")

    task = replace(make_task(), mcp_host_dir="/tasks/mcp_host")
    sandbox = FakeSandbox(one_call)
    await run_rollout(plan_of(task), parts_of(tmp_path, sandbox))
    assert task.verifier.script is not None
    assert sandbox.hidden == [Path(task.verifier.script.folder), Path("/tasks/mcp_host")]
    sandbox = FakeSandbox(one_call)
    sandbox.check_hidden = hide  # type: ignore[method-assign]
    with pytest.raises(UserError, match="could read it"):
        await run_rollout(plan_of(task), parts_of(tmp_path, sandbox))
    assert sandbox.commands == []


async def test_a_task_s_variables_reach_the_harness_and_the_script_but_change_none_of_the_harness_s_own(
    tmp_path: Path,
) -> None:
    sandbox = FakeSandbox(one_call)
    plan = plan_of(replace(make_task(), env={"MODE": "fast", "BASE_URL": "http://elsewhere"}))
    await run_rollout(plan, parts_of(tmp_path, sandbox))
    harness, script = sandbox.commands
    assert harness.env["MODE"] == script.env["MODE"] == "fast"
    assert harness.env["BASE_URL"] != "http://elsewhere"


async def test_the_harness_sees_of_a_harbor_task_its_workspace_and_no_other_of_its_files(tmp_path: Path) -> None:
    root = lay_harbor(tmp_path / "set")
    (task,) = load_tasks(tmp_path / "set", Layout(tmp_path / "cache")).tasks

    async def look(command: SandboxCommand) -> ExecResult:
        (workspace,) = (mount.source for mount in command.mounts if mount.target == "/app")
        assert [path.name for path in workspace.iterdir()] == ["numbers.txt"]
        return await one_call(command)

    async def write_reward(command: SandboxCommand) -> ExecResult:
        (rewards,) = (mount.source for mount in command.mounts if mount.target == "/logs/verifier")
        (rewards / "reward.txt").write_text("0.5\n")
        return OK

    sandbox = FakeSandbox(look, write_reward)
    (tmp_path / "scratch").mkdir()
    record = await run_rollout(plan_of(task), parts_of(tmp_path / "scratch", sandbox))
    harness, script = sandbox.commands
    assert record.verdict is not None
    assert record.verdict.reward == 0.5
    assert harness.cwd == "/app"
    assert not any(mount.source.is_relative_to(root) for mount in harness.mounts)
    assert {"/tests", "/logs/verifier"}.isdisjoint(mount.target for mount in harness.mounts)
    targets = {mount.target for mount in script.mounts}
    assert {"/app", "/tests", "/logs/verifier"} == {one for one in targets if not one.startswith(GUARD_FOLDER)}


class Asking(FakeHarness):
    """Is told of its sandbox what it starts with."""

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        return replace(super().launch_plan(request), argv=(request.python,))


async def test_a_harness_is_told_which_python_its_sandbox_has(tmp_path: Path) -> None:
    sandbox = FakeSandbox(one_call, python="/usr/local/bin/python3")
    await run_rollout(plan_of(), replace(parts_of(tmp_path, sandbox), harness=Asking()))
    assert sandbox.commands[0].argv == ("/usr/local/bin/python3",)
