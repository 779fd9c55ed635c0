"""A published form of task, script and rubric in one, from its file to its verdict in each real sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawhpc.sandbox.base import Sandbox
from clawhpc.tasks.layout import Layout
from clawhpc.tasks.pinchbench import load_tasks
from clawhpc.verify.judge import open_judge
from clawhpc.verify.settings import JudgeModel, JudgeSettings, ShapingSettings
from clawhpc.verify.verdict import verify
from tests.fakes.judge_endpoint import judge_endpoint, verdict
from tests.fakes.task_sets import lay_pinchbench

pytestmark = pytest.mark.anyio


async def test_a_task_of_script_and_rubric_has_one_verdict_of_both(sandbox: Sandbox, tmp_path: Path) -> None:
    lay_pinchbench(tmp_path / "set", grading_weights={"automated": 0.6, "llm_judge": 0.4})
    loaded = load_tasks(tmp_path / "set", Layout(tmp_path / "laid"))
    assert not loaded.faults
    (task,) = loaded.tasks
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "note.txt").write_text("buy bread")
    async with judge_endpoint(verdict(1, 0)) as endpoint:
        settings = JudgeSettings(models={"one": JudgeModel(name="one", base_url=endpoint.url)})
        async with open_judge(settings, {}) as judge:
            given = await verify(
                task,
                workspace,
                (),
                sandbox=sandbox,
                judge=judge,
                shaping=ShapingSettings(),
                sandbox_id="verify",
                timeout_s=30.0,
            )
    assert given.reward == pytest.approx(0.6 * 0.75 + 0.4 * 0.25)
    assert given.breakdown == pytest.approx(
        {
            **{"script": 0.75, "script/written": 1.0, "script/right": 0.5},
            **{"rubric": 0.25, "rubric/Tone": 1.0, "rubric/Content": 0.0},
        }
    )
    (request,) = endpoint.requests
    assert "buy bread" in request.user
    assert "It writes note.txt." in request.user
    assert "def grade" not in request.user
