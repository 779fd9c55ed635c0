"""The command of an evaluation on a task with a rubric: real workers, sandbox and verifier, both models scripted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from clawhpc.paths import RunPaths
from clawhpc.store import read_rollouts
from tests.fakes.judge_endpoint import Answer, Request, completion, judge_endpoint, verdict
from tests.fakes.task_sets import lay_pinchbench

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox, pytest.mark.slow]
KEY = "sk-only-in-the-environment"
ANY_MACHINE_S = 400.0


def says(request: Request) -> Answer:
    return verdict(1, 0.5) if request.body["model"] == "judge" else completion("I have looked at it.")


async def test_a_judge_is_asked_with_its_key_and_its_verdict_is_kept_beside_what_trains(tmp_path: Path) -> None:
    lay_pinchbench(tmp_path / "set")
    async with judge_endpoint(says) as endpoint:
        judge = f"{{mine: {{name: judge, base_url: '{endpoint.url}', api_key_env: JUDGE_KEY}}}}"
        overrides = (
            *("policy.endpoint.model=policy", f"policy.endpoint.base_url={endpoint.url}", "harness=whitebox"),
            *(f"tasks.folder={tmp_path / 'set'}", f"run.root={tmp_path / 'runs'}", f"cache_dir={tmp_path / 'cache'}"),
            *("limits.deadline_s=160", "limits.reserve_s=70", f"verify.judge.models={judge}"),
            *("verify.shaping.threshold=0.3", "campaign.eval_samples=2"),
        )
        with anyio.fail_after(ANY_MACHINE_S):
            done = await anyio.run_process(
                [sys.executable, "-m", "clawhpc.evaluate", *overrides],
                env={**os.environ, "JUDGE_KEY": KEY},
                stderr=subprocess.STDOUT,
                check=False,
            )
    assert done.returncode == 0, done.stdout.decode()[-3000:]
    asked = [request for request in endpoint.requests if request.body["model"] == "judge"]
    assert {request.headers["authorization"] for request in asked} == {f"Bearer {KEY}"}
    (run,) = (tmp_path / "runs/evaluations/default").iterdir()
    given = [record.verdict for record in read_rollouts(RunPaths(run))]
    assert [(one.reward, one.breakdown["rubric"], one.breakdown["script"]) for one in given if one] == [
        (1.0, 0.625, 0.0)
    ] * 2
    assert [one.raw_reward for one in given if one] == pytest.approx([0.5 * 0.625] * 2)
    assert KEY.encode() not in done.stdout
    assert not any(KEY.encode() in path.read_bytes() for path in run.rglob("*") if path.is_file())
