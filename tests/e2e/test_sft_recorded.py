"""Imitation of recorded rollouts as a user does it: those of a model behind an API, then those of the policy itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clawhpc.paths import RunPaths
from clawhpc.store import read_policy
from tests.campaign_parts import Desk
from tests.e2e.test_endpoint import MODEL, solver
from tests.fakes.upstream import listening

pytestmark = [pytest.mark.harness, pytest.mark.sandbox, pytest.mark.slow]
COMMAND_S = 400.0
"""For one command, on a busy machine with two cores."""
COMMON = {
    "run.name": "e2e",
    "harness": "pi",
    "sandbox": "bubblewrap",
    "tasks.generate.num_train": 8,
    "tasks.generate.num_heldout": 8,
    "campaign.eval_samples": 1,
    "engine.max_model_len": 8192,
    "engine.kv_cache_gib": 0.25,
    "worker.max_output_tokens": 8,
    "limits.max_calls": 3,
}
RECORD = COMMON | {"worker.max_output_tokens": 256, "limits.max_calls": 50}


def test_a_policy_learns_from_what_a_model_behind_an_api_has_done(desk: Desk) -> None:
    with listening(solver(desk.cache_dir)) as url:
        asked = {"policy.endpoint.base_url": url, "policy.endpoint.model": MODEL}
        command = desk.start_plain("evaluate", RECORD | asked)
        assert command.wait(COMMAND_S) == 0, command.text()
    # With another seed other tasks are held out, and what was recorded may be imitated.
    taught = teach(desk, {"sft.epochs": 6, "sft.batch_size": 4, "sft.lr": 0.01, "tasks.generate.seed": 1})
    assert (taught["rollouts"], taught["encoded_from_text"], taught["left_out"]) == (8, 8, {})
    losses = [taught["heldout_loss"][step] for step in sorted(taught["heldout_loss"], key=int)]
    assert losses[-1] < losses[0] - 1.5, losses
    assert read_policy(RunPaths(desk.folder / "runs/sft/e2e/001").policy(1)).step == 1


@pytest.mark.engine
def test_of_what_a_policy_has_drawn_itself_the_ids_are_imitated(desk: Desk) -> None:
    command = desk.start_plain("evaluate", COMMON | {"policy.folder": desk.policy, "campaign.eval_tasks": 4})
    assert command.wait(COMMAND_S) == 0, command.text()
    taught = teach(desk, {"sft.min_reward": 0, "sft.epochs": 1, "tasks.generate.seed": 1})
    assert (taught["rollouts"], taught["encoded_from_text"]) == (4, 0)


def teach(desk: Desk, changes: dict[str, object]) -> dict[str, Any]:
    """What sft says of its run on the evaluation before."""
    recorded = {"sft.runs": f"[{desk.folder / 'runs/evaluations/e2e/001'}]", "policy.folder": desk.policy}
    command = desk.start_plain("sft", COMMON | recorded | {"learner.token_budget": 40_000} | changes)
    assert command.wait(COMMAND_S) == 0, command.text()
    return json.loads(RunPaths(desk.folder / "runs/sft/e2e/001").finished.read_bytes())
