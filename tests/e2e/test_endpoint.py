"""A model behind an API, evaluated as a user does it: no policy, no engine, a real harness, an endpoint on a port."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clawhpc.config import typed
from clawhpc.paths import RunPaths
from clawhpc.records import CallRecord, Conversation, Outcome, Reply
from clawhpc.store import read_rollouts
from clawhpc.tasks.oracle import oracle_reply, task_solution
from clawhpc.tasks.sets import load_task_sets
from tests.campaign_parts import Desk
from tests.contract.test_conf import compose_config
from tests.fakes.upstream import MODEL, USAGE, Upstream, listening

pytestmark = [pytest.mark.harness, pytest.mark.sandbox]
COMMAND_S = 200.0
"""For one command, on a busy machine with two cores."""
TASKS = {"tasks.generate.num_train": 8, "tasks.generate.num_heldout": 8}


def solver(cache_dir: Path) -> Upstream:
    """An endpoint that solves every held-out task, which it knows by its instruction."""
    overrides = [f"{key}={value}" for key, value in TASKS.items()]
    tasks = load_task_sets(typed(compose_config(*overrides)).tasks, cache_dir).heldout
    solutions = {task.instruction: task_solution(task) for task in tasks}

    def solve(conversation: Conversation) -> Reply:
        told = "\n".join(message.text for message in conversation.messages)
        solution = next((solutions[instruction] for instruction in solutions if instruction in told), None)
        return Reply(text="ok") if solution is None else oracle_reply(solution, conversation)

    return Upstream(script=solve)


def calls_of(paths: RunPaths) -> list[CallRecord]:
    records = list(read_rollouts(paths))
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * 2
    assert [record.verdict.reward for record in records if record.verdict] == [1.0, 1.0]
    return [call for record in records for call in record.calls]


def test_a_model_behind_an_api_solves_tasks_in_a_real_harness_and_its_records_are_text(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "LARGE_KEY", "sk-very-secret")
    upstream = solver(desk.cache_dir)
    with listening(upstream) as url:
        overrides = {
            "policy.endpoint.base_url": url,
            "policy.endpoint.model": "large",
            "policy.endpoint.api_key_env": "LARGE_KEY",
            "run.name": "e2e",
            "harness": "pi",
            "sandbox": "bubblewrap",
            "campaign.eval_tasks": 2,
            "campaign.eval_samples": 1,
            **TASKS,
        }
        command = desk.start_plain("evaluate", overrides)
        assert command.wait(COMMAND_S) == 0, command.text()
        refused = desk.start_plain("train", overrides)
        assert refused.wait(COMMAND_S) == 2
        assert "policy.endpoint.model=large" in refused.text()
    paths = RunPaths(desk.folder / "runs/evaluations/e2e/001")
    calls = calls_of(paths)
    assert {call.model for call in calls} == {MODEL}
    assert all(call.tokens is None and call.usage == USAGE for call in calls)
    assert {headers["authorization"] for headers in upstream.headers} == {"Bearer sk-very-secret"}
    assert len(upstream.asked) == 1 + len(calls)  # the first is a look whether anybody answers
    kept = [path for path in desk.folder.rglob("*") if path.is_file()]
    assert not [path for path in kept if b"sk-very-secret" in path.read_bytes()]
    assert not list(desk.folder.rglob("engine.log"))
    assert json.loads(paths.finished.read_bytes())
