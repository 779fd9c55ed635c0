from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from clawhpc.errors import UserError
from clawhpc.learner.attention import TreeLayout
from clawhpc.learner.exam import Exam, Gate, describe, mean_rate, weakest_harness
from clawhpc.learner.networks import TreePolicy, load_tree_policy
from clawhpc.learner.policy import create_policy, load_policy, sequence_logprobs
from clawhpc.learner.settings import LearnerSettings, PolicySettings
from clawhpc.learner.tokenizer import train_tokenizer
from clawhpc.learner.traces import Skill
from clawhpc.tree.nodes import CallTree
from clawhpc.tree.sequence import sequence_tree

CREATE, RELAY = Skill("pi", "create"), Skill("pi", "relay")
SMALL = PolicySettings(
    num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=32, initializer_range=0.5
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    train_tokenizer([], folder / "tokenizer", vocab_size=280)
    return Path(create_policy(folder / "start", folder / "tokenizer", SMALL, seed=0).path)


def two_replies(rng: random.Random) -> CallTree:
    """A head that all share, a reply of two tokens, a result, a reply of one."""
    ids = [1, 2, 3, *(rng.randrange(265) for _ in range(5))]
    return sequence_tree("tree", ids, [False] * 4 + [True, True, False, True])


def test_a_pass_rate_is_the_mean_probability_of_all_replies_of_a_task(policy: Path) -> None:
    rng = random.Random(0)
    trees = {CREATE: [two_replies(rng) for _ in range(5)], RELAY: [two_replies(rng) for _ in range(3)]}
    model = load_policy(policy)
    taught = TreePolicy(model, num_token_ids=model.config.vocab_size, logit_chunk=99, with_values=False)
    rates = Exam(trees=trees, settings=LearnerSettings(token_budget=20)).pass_rates(taught)
    for skill, of_skill in trees.items():
        expected = []
        for tree in of_skill:
            logprobs = sequence_logprobs(model, torch.tensor(tree.path_token_ids(tree.leaves[0]))).tolist()
            expected.append(math.exp(logprobs[3] + logprobs[4] + logprobs[6]))
        assert rates[skill] == pytest.approx(sum(expected) / len(expected), rel=1e-4)


def test_a_pass_rate_is_how_often_sampling_draws_the_reply(policy: Path) -> None:
    model = load_policy(policy)
    with torch.no_grad():
        logits_V = model(input_ids=torch.tensor([[1, 2]]), tree_layout=TreeLayout.chain(2)).logits[0, -1, :265]
    draws = torch.multinomial(logits_V.softmax(-1), 4000, replacement=True, generator=torch.Generator().manual_seed(0))
    token, count = Counter(draws.tolist()).most_common(1)[0]
    tree = sequence_tree("tree", [1, 2, token], [False, False, True])
    exam = Exam(trees={CREATE: [tree]}, settings=LearnerSettings())
    rate = exam.pass_rates(load_tree_policy(policy, LearnerSettings()))[CREATE]
    assert rate == pytest.approx(count / 4000, abs=0.03)


def test_a_conversation_over_the_token_budget_is_the_users_to_mend(policy: Path) -> None:
    exam = Exam(trees={CREATE: [two_replies(random.Random(0))]}, settings=LearnerSettings(token_budget=7))
    with pytest.raises(UserError, match=r"learner\.token_budget=7"):
        exam.pass_rates(load_tree_policy(policy, LearnerSettings()))


@pytest.mark.parametrize(
    ("create", "relay", "admitted"),
    [(0.6, 0.4, True), (0.9, 0.1, False), (0.5, 0.4, False), (0.8, 0.2, True), (1.0, 0.19, False)],
)
def test_a_gate_asks_for_a_mean_and_for_a_floor_of_every_skill(create: float, relay: float, admitted: bool) -> None:
    gate = Gate(pass_rate=0.5, floor=0.2)
    rates = {CREATE: create, RELAY: relay}
    assert gate.admits(rates) is admitted
    assert gate.laggards(rates) == ([RELAY] if relay < 0.2 else [])


def test_rates_are_told_by_family_and_by_harness_where_there_are_several() -> None:
    assert describe({CREATE: 0.5, RELAY: 0.25}) == "0.38 (create 0.50, relay 0.25)"
    assert mean_rate({CREATE: 0.5, Skill("codex", "create"): 1.0}) == 0.75
    assert describe({CREATE: 0.5, Skill("codex", "create"): 1.0}) == "0.75 (pi create 0.50, codex create 1.00)"


def test_the_weakest_harness_is_the_one_with_the_lowest_mean_over_its_skills() -> None:
    assert weakest_harness({CREATE: 0.5, RELAY: 0.2, Skill("codex", "create"): 0.4}) == "pi"
    assert weakest_harness({CREATE: 0.5, RELAY: 0.2, Skill("codex", "create"): 0.3}) == "codex"
