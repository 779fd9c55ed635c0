from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch

from clawhpc.credit.settings import CreditSettings
from clawhpc.errors import UserError
from clawhpc.learner.settings import LearnerSettings, LossSettings, Normaliser
from clawhpc.learner.steps import StepBatch, build_rl_step, build_sft_step
from clawhpc.records import CallRole, FailedAttempt, Outcome, RolloutRecord
from clawhpc.tree.sequence import sequence_tree
from tests.fakes.learner_trees import context, draw, plant
from tests.fakes.records import make_group, make_record
from tests.fakes.session import Session
from tests.fakes.tree_task import NUM_SAMPLES, WORDS, attempt_tasks

SETTINGS = LearnerSettings()
STEP = 5


def rollout(
    task: str,
    sample: int,
    reward: float | None,
    *,
    num_calls: int = 2,
    version: int = STEP,
    prompt: int = 4,
    harness: str = "pi",
) -> RolloutRecord:
    """Each call draws two tokens; the first prompt has four, each later one three more of its own."""
    session = Session()
    history: tuple[tuple[int, ...] | int, ...] = (tuple(range(1, prompt + 1)),)
    for at in range(num_calls):
        history += (session.call(*history, reply=(7, sample), version=version), (5, 6, at))
    return make_record(make_group(task, step=STEP, harness=harness), sample, reward, calls=tuple(session.calls))


def step(records: Sequence[RolloutRecord], settings: LearnerSettings = SETTINGS) -> StepBatch:
    return build_rl_step(STEP, records, settings, CreditSettings())


def weights_by_rollout(batch: StepBatch) -> list[list[float]]:
    """Of the rollouts that are computed: the runs of draws that share an advantage of their own."""
    pairs = zip(batch.draws.advantages.tolist(), batch.draws.token_weight.tolist(), strict=True)
    return [[weight for _, weight in run] for _, run in groupby(pairs, key=lambda pair: pair[0])]


def test_rollouts_without_credit_are_not_computed_but_count_in_the_denominator() -> None:
    batch = step([rollout("a", 0, 1.0), rollout("a", 1, 0.0), rollout("b", 0, 1.0), rollout("b", 1, 1.0)])
    assert weights_by_rollout(batch) == [[pytest.approx(1 / 16)] * 4] * 2
    assert batch.metrics["train/no_credit_share"] == 0.5
    assert batch.metrics["credit/skipped_no_spread"] == 1


def test_tokens_without_credit_are_told_by_their_advantage_though_a_kl_term_computes_them() -> None:
    records = [rollout("a", 0, 1.0), rollout("a", 1, 0.0), rollout("b", 0, 1.0), rollout("b", 1, 1.0, num_calls=6)]
    stale = [rollout("c", sample, float(sample), version=STEP - 1) for sample in range(2)]
    batch = step([*records, *stale], replace(SETTINGS, loss=LossSettings(kl_coef=0.1)))
    assert len(batch.draws) == 2 * (2 + 2 + 2 + 6 + 2 + 2)
    assert batch.metrics["train/no_credit_share"] == pytest.approx(16 / 24)
    by_values = build_rl_step(STEP, records, SETTINGS, CreditSettings(estimator="path_gae"))
    assert "train/no_credit_share" not in by_values.metrics


def test_every_rollout_weighs_the_same_per_rollout_whatever_its_calls() -> None:
    records = [rollout("a", 0, 1.0, num_calls=1), rollout("a", 1, 0.0, num_calls=4)]
    weights = weights_by_rollout(step(records, replace(SETTINGS, loss=LossSettings(normaliser="rollout"))))
    assert [sum(of_rollout) for of_rollout in weights] == [pytest.approx(0.5)] * 2


def test_a_failure_of_the_machine_has_no_part_in_anything() -> None:
    sound = [rollout("a", 0, 1.0), rollout("a", 1, 0.0)]
    failed = replace(rollout("a", 2, None), outcome=Outcome.ENGINE_FAILED)
    with_failure, without = step([*sound, failed]), step(sound)
    assert weights_by_rollout(with_failure) == weights_by_rollout(without)
    assert with_failure.metrics["credit/discarded_rollouts"] == 1
    assert with_failure.metrics["collect/failed_share"] == pytest.approx(1 / 3)
    assert without.metrics["collect/failed_share"] == without.metrics["collect/retried_share"] == 0


def test_what_the_machine_failed_at_first_trains_and_is_counted() -> None:
    attempt = FailedAttempt(outcome=Outcome.SANDBOX_FAILED, detail="no room", seconds=1.0)
    sound = [rollout("a", 0, 1.0), rollout("a", 1, 0.0)]
    retried = [sound[0], replace(sound[1], failed_attempts=(attempt,))]
    assert weights_by_rollout(step(retried)) == weights_by_rollout(step(sound))
    assert step(retried).metrics["collect/retried_share"] == 0.5


def test_a_record_that_is_text_only_is_refused_named_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    bad = rollout("a", 2, 1.0)
    bad = replace(bad, calls=tuple(replace(call, tokens=None) for call in bad.calls))
    with caplog.at_level(logging.WARNING):
        batch = step([rollout("a", 0, 1.0), rollout("a", 1, 0.0), bad])
    assert batch.metrics["tree/refused_rollouts"] == 1
    assert batch.metrics["train/reward"] == 0.5
    assert bad.rollout_id in caplog.text
    assert "text-only" in caplog.text


def test_calls_over_the_budget_are_named_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    records = [rollout("a", 0, 1.0), rollout("a", 1, 0.0, num_calls=9)]
    with caplog.at_level(logging.WARNING):
        batch = step(records, replace(SETTINGS, token_budget=20))
    assert batch.metrics["tree/over_budget"] == 6
    assert f"{records[1].rollout_id}: 6 of its 9 calls do not train" in caplog.text
    assert [len(weights) for weights in weights_by_rollout(batch)] == [2 * 2, 3 * 2]


def test_a_ratio_per_path_needs_all_of_a_tree_in_one_row() -> None:
    forked = Session()
    for reply in ((7, 8), (9, 8)):
        forked.call((1, 2, 3, 4), forked.call((1, 2, 3, 4, 5), reply=reply, version=STEP), reply=(3,), version=STEP)
    records = [
        make_record(make_group("a", step=STEP), 0, 1.0, calls=tuple(forked.calls)),
        rollout("a", 1, 0.0, num_calls=1),
    ]
    settings = replace(SETTINGS, token_budget=10)
    assert step(records, settings).metrics["tree/over_budget"] == 0
    by_path = step(records, replace(settings, loss=LossSettings(ratio="path")))
    assert by_path.metrics["tree/over_budget"] == 4
    assert [row.paths.num_paths for row in by_path.rows] == [1]


def with_subagent(sample: int) -> RolloutRecord:
    """Two main calls of 6 and 11 tokens, and between them a subagent's of 3 + 2."""
    session = Session()
    first = session.call((1, 2, 3, 4), reply=(7, sample), version=STEP)
    session.call((1, 2, 8), reply=(9, sample), role=CallRole.SUBAGENT, version=STEP)
    session.call((1, 2, 3, 4), first, (5, 6, 0), reply=(7, sample), version=STEP)
    return make_record(make_group("a", step=STEP), sample, float(sample), calls=tuple(session.calls))


@pytest.mark.parametrize(("budget", "refused"), [(20, 0), (11, 0), (10, 2)])
def test_a_ratio_per_path_needs_all_of_a_roles_conversations_in_one_row_whatever_else_trains(
    budget: int, refused: int
) -> None:
    settings = replace(SETTINGS, token_budget=budget, loss=LossSettings(ratio="path"))
    records = [with_subagent(sample) for sample in range(2)]
    found = []
    for weights in ({}, {"subagent": 0.5}):
        batch = build_rl_step(STEP, records, settings, CreditSettings(role_weights=weights))
        tokens = {draw: row.targets_N[at].item() for row in batch.rows for at, draw in enumerate(row.draw_N.tolist())}
        assert sorted(tokens) == list(range(len(batch.draws)))
        assert sum(row.paths.num_paths for row in batch.rows) == 2 * (1 + len(weights))
        found.append((batch.metrics["tree/over_budget"], [tokens[draw] for draw in sorted(tokens)]))
    assert found[0][0] == found[1][0] == refused
    of_main, with_other = found[0][1], found[1][1]
    assert of_main == [7, 0, *[7, 0][refused:], 7, 1, *[7, 1][refused:]]
    assert sorted(with_other) == sorted([*of_main, 9, 0, 9, 1])


def test_a_roles_tokens_weigh_together_what_its_weight_says() -> None:
    batch = build_rl_step(
        STEP, [with_subagent(sample) for sample in range(2)], SETTINGS, CreditSettings(role_weights={"subagent": 0.5})
    )
    tokens = {draw: row.targets_N[at].item() for row in batch.rows for at, draw in enumerate(row.draw_N.tolist())}
    by_subagent = torch.tensor([9 in (tokens[draw], tokens[max(0, draw - 1)]) for draw in sorted(tokens)])
    assert batch.draws.token_weight[by_subagent].tolist() == [pytest.approx(0.5 / 4)] * 4
    assert batch.draws.token_weight[~by_subagent].tolist() == [pytest.approx(1 / 8)] * 8


@pytest.mark.parametrize("normaliser", ["token", "rollout", "constant"])
def test_calls_over_the_budget_take_no_share_of_the_loss(normaliser: Normaliser) -> None:
    settings = replace(SETTINGS, token_budget=20, loss=LossSettings(normaliser=normaliser))
    small = [rollout("a", 0, 1.0), rollout("a", 1, 0.0)]
    weights = weights_by_rollout(step([*small, rollout("a", 2, 0.0, num_calls=9)], settings))
    assert weights == weights_by_rollout(step([*small, rollout("a", 2, 0.0, num_calls=3)], settings))


def test_a_budget_that_no_tree_of_a_step_fits_into_is_the_users_to_mend() -> None:
    settings = replace(SETTINGS, token_budget=6)
    small = rollout("a", 0, 1.0, prompt=5)
    message = r"learner\.token_budget=6: .*the shortest has 7 tokens"
    with pytest.raises(UserError, match=message):
        step([small, rollout("a", 1, 0.0, prompt=6)], settings)
    assert step([small, rollout("a", 1, 1.0, prompt=6)], settings).rows == ()  # without spread it would teach nothing
    with pytest.raises(UserError, match=message):
        build_sft_step(0, [plant(context(1, 2, 3, 4, 5, below=[draw(7, 0)]))], settings)
    with pytest.raises(UserError, match=message):
        step([small, rollout("a", 1, 0.0, prompt=6), rollout("b", 0, 1.0, num_calls=1)], settings)


def test_a_rollout_that_drew_nothing_is_counted_and_stays_in_the_baseline() -> None:
    silent = replace(rollout("a", 1, 0.0), calls=())
    batch = step([rollout("a", 0, 1.0), silent])
    assert batch.metrics["tree/without_draws"] == 1
    assert batch.metrics["train/reward"] == 0.5
    assert len(weights_by_rollout(batch)) == 1


def test_calls_of_other_roles_do_not_train() -> None:
    session = Session()
    session.call((1, 2, 3), reply=(7, 8), version=STEP)
    session.call((4, 4), reply=(9,), role=CallRole.SIDE, version=STEP)
    titled = make_record(make_group("a", step=STEP), 0, 1.0, calls=tuple(session.calls))
    batch = step([titled, rollout("a", 1, 0.0)])
    assert len(weights_by_rollout(batch)[0]) == 2
    assert batch.metrics["tree/dropped_role"] == 1


@pytest.mark.parametrize("credit", [CreditSettings(), CreditSettings(estimator="path_gae", gae_lambda=0.9)])
@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("normaliser", ["token", "rollout"])
def test_what_else_trains_changes_no_bit_of_the_main_paths_credit(
    credit: CreditSettings, forks: bool, normaliser: Normaliser
) -> None:
    settings = replace(SETTINGS, loss=LossSettings(normaliser=normaliser))
    alone = credit_by_token(settings, credit, forks=forks)
    beside = credit_by_token(settings, replace(credit, role_weights={"subagent": 0.5}), forks=forks)
    assert len(beside) > len(alone) > 0
    assert {name: beside[name] for name in alone} == alone
    assert any(advantage and weight for name, (advantage, weight) in beside.items() if name not in alone)


def credit_by_token(
    settings: LearnerSettings, credit: CreditSettings, *, forks: bool
) -> dict[float, tuple[float, float]]:
    """Sampling log-prob of each token, by which it is known -> its advantage and weight."""
    rng, names = random.Random(0), itertools.count(1)

    def draw(prompts: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        return [(tuple(rng.choices(WORDS, k=2)), (-next(names) / 1024, -next(names) / 1024)) for _ in prompts]

    attempts = attempt_tasks(draw, forks=forks, version=STEP)
    records = [attempt.record(STEP, number % NUM_SAMPLES) for number, attempt in enumerate(attempts)]
    batch = build_rl_step(STEP, records, settings, credit)
    tokens, advantages = batch.draws.sampling_logprobs.tolist(), batch.draws.advantages.tolist()
    if batch.credit is not None:
        advantages = batch.credit(np.sin(1000 * np.array(tokens))).advantages.tolist()
    known = dict(zip(tokens, zip(advantages, batch.draws.token_weight.tolist(), strict=True), strict=True))
    assert len(known) == len(tokens)
    return known


def test_draws_that_are_staler_than_allowed_do_not_train_and_are_counted() -> None:
    records = [rollout("a", 0, 1.0, version=STEP - 1), rollout("a", 1, 0.0), rollout("a", 2, 0.0, version=STEP - 2)]
    batch = step(records, replace(SETTINGS, max_staleness=1))
    assert batch.metrics["train/staleness_max"] == 2
    assert batch.metrics["train/stale_tokens"] == 4
    assert batch.draws.token_weight.tolist() == [pytest.approx(1 / 8)] * 8 + [0.0] * 4
    assert step(records).metrics["train/stale_tokens"] == 8


def test_log_probs_are_of_the_temperature_that_the_rollouts_were_drawn_at() -> None:
    records = [replace(rollout("a", sample, float(sample)), temperature=0.7) for sample in range(2)]
    assert [row.temperature for row in step(records).rows] == [0.7]
    with pytest.raises(AssertionError, match=r"different temperatures: \[0\.7, 1\.0\]"):
        step([records[0], rollout("a", 1, 1.0)])


def test_how_faithfully_histories_repeat_draws_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    moved, reencoded = Session(), Session()
    first = moved.call((1, 2, 3, 4), reply=(7, 8))
    moved.call((1, 2, 9), first, (5, 6), reply=(7,))
    heard = reencoded.call((1, 2, 3, 4), reply=(7, 8))
    reencoded.call((1, 2, 3, 4, 70, 80, 5), reply=(7,), continues=heard, reencoded=1)
    records = [
        make_record(make_group("a", step=STEP), sample, float(sample), calls=tuple(session.calls))
        for sample, session in enumerate((moved, reencoded))
    ]
    with caplog.at_level(logging.WARNING):
        metrics = step(records).metrics
    assert [value for name, value in metrics.items() if name.startswith("drift/")] == [1, 1, 1, 1]
    assert records[1].rollout_id in caplog.text
    assert records[0].rollout_id not in caplog.text


def test_what_sharing_saves_is_logged() -> None:
    metrics = step([rollout("a", 0, 1.0), rollout("a", 1, 0.0)]).metrics
    assert metrics["tree/path_tokens"] == 2 * (4 + 2 + 3 + 2)
    assert metrics["tree/row_tokens"] == 4 + 2 * (2 + 3 + 2)


def of_two_harnesses() -> list[RolloutRecord]:
    """One task in two harnesses, of unlike rewards and lengths; their groups are mixed."""
    ours = [rollout("a", sample, reward) for sample, reward in enumerate((0.25, 0.5))]
    theirs = [rollout("a", sample, reward, num_calls=4, harness="codex") for sample, reward in enumerate((1.0, 0.0))]
    flat = [rollout("b", sample, 1.0, harness="codex") for sample in range(2)]
    failed = replace(rollout("b", 2, None, harness="codex"), outcome=Outcome.ENGINE_FAILED)
    late = replace(flat[1], outcome=Outcome.TIMEOUT)
    return [ours[0], theirs[0], flat[0], ours[1], theirs[1], late, failed]


def test_rollouts_of_one_task_in_two_harnesses_are_not_compared_with_one_another() -> None:
    credit = CreditSettings(baseline="dr_grpo")
    advantages = build_rl_step(STEP, of_two_harnesses(), SETTINGS, credit).draws.advantages.tolist()
    assert advantages == [0.5] * 8 + [-0.5] * 8 + [-0.125] * 4 + [0.125] * 4


def test_each_harness_has_numbers_of_its_own() -> None:
    metrics = build_rl_step(STEP, of_two_harnesses(), SETTINGS, CreditSettings(), by_harness=True).metrics
    of_codex = {name.split("/")[2]: value for name, value in metrics.items() if name.startswith("train/codex/")}
    assert of_codex == {
        "reward": pytest.approx(3 / 4),
        "pass_rate": pytest.approx(3 / 4),
        "calls": 3.0,
        "drawn_tokens": pytest.approx((8 + 8 + 4 + 4) / 4),
        "groups": 2.0,
        "spread_share": 0.5,
        "completed_share": pytest.approx(3 / 5),
        "timeout_share": pytest.approx(1 / 5),
        "harness_exit_share": 0.0,
        "limit_share": 0.0,
        "left_out_share": pytest.approx(1 / 5),
        "advantage_std": pytest.approx(0.5**0.5, rel=1e-4),
    }
    assert metrics["train/pi/reward"] == pytest.approx(0.375)
    assert metrics["train/pi/pass_rate"] == 0.0
    assert not [name for name in step(of_two_harnesses()).metrics if name.count("/") > 1]


def test_a_critics_advantages_have_a_spread_for_each_harness() -> None:
    credit = CreditSettings(estimator="path_gae", whiten=False)
    batch = build_rl_step(STEP, of_two_harnesses(), SETTINGS, credit, by_harness=True)
    assert batch.credit is not None
    metrics = batch.credit(np.zeros(len(batch.draws))).metrics
    assert metrics["train/codex/advantage_std"] == pytest.approx(np.std([1.0] * 8 + [0.0] * 8 + [1.0] * 8))
    assert metrics["train/pi/advantage_std"] == pytest.approx(0.125)
    assert "train/pi/advantage_std" not in batch.metrics


@pytest.mark.parametrize("normaliser", ["token", "rollout", "constant"])
def test_a_harness_that_weighs_twice_counts_as_if_its_rollouts_were_there_twice(normaliser: Normaliser) -> None:
    settings = replace(SETTINGS, loss=LossSettings(normaliser=normaliser))
    records = of_two_harnesses()
    weighed = build_rl_step(STEP, records, settings, CreditSettings(harness_weights={"pi": 2.0}))
    again = [rollout("again", sample, reward) for sample, reward in enumerate((0.25, 0.5))]
    doubled = build_rl_step(STEP, [*records, *again], settings, CreditSettings())
    assert len(weighed.draws) == 24
    once, twice = weighed.draws.token_weight, doubled.draws.token_weight
    torch.testing.assert_close(once[:16], twice[:16])
    torch.testing.assert_close(once[16:], twice[16:24] + twice[24:])
    assert weighed.draws.advantages.tolist() == doubled.draws.advantages[:24].tolist()


def test_rollouts_of_a_harness_share_their_rows_wherever_they_stand_in_the_plan() -> None:
    mixed = [
        rollout(task, sample, float(sample), prompt=40 if harness == "pi" else 41, harness=harness)
        for task in ("a", "b")
        for harness in ("pi", "codex")
        for sample in range(2)
    ]
    rows = step(mixed, replace(SETTINGS, token_budget=70)).rows
    alone = [step([one for one in mixed if one.key.harness == name]).rows for name in ("codex", "pi")]
    assert [row.num_tokens for row in rows] == [row.num_tokens for (row,) in alone]


def test_a_plain_sequence_trains_where_it_is_told_to() -> None:
    tree = sequence_tree("s", [1, 2, 3, 4, 5], [False, True, True, False, True])
    assert [(node.token_ids, node.sampled, node.start) for node in tree.nodes] == [
        ((1,), False, 0),
        ((2, 3), True, 1),
        ((4,), False, 3),
        ((5,), True, 4),
    ]
    row = build_sft_step(0, [tree], SETTINGS).rows[0]
    assert row.trained_N.tolist() == [1, 2, 4]


def test_imitation_takes_every_tree_that_has_a_draw() -> None:
    batch = build_sft_step(0, [plant(context(1, below=[draw(2)])), plant(context(1))], SETTINGS)
    assert batch.draws.token_weight.tolist() == [1.0]
