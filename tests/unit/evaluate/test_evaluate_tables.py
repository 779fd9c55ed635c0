"""What an evaluation says: cells by themselves, tables that fit, JSON whose names stay."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from clawhpc.evaluation import (
    EngineShare,
    EvaluatedPolicy,
    EvaluatedSet,
    Evaluation,
    as_metrics,
    as_rows,
    as_tables,
    compare,
    lighten,
    make_cells,
)
from clawhpc.passrate import tabulate
from clawhpc.records import EngineTime, Judgement, Outcome, RolloutRecord, Usage, Verdict
from tests.fakes.records import make_group, make_record
from tests.fakes.session import Session

HARNESSES = ("claude_code", "mini_swe_agent")
WORST = {Outcome.COMPLETED: 1000, Outcome.HARNESS_EXIT: 1000, Outcome.TIMEOUT: 1000, Outcome.SANDBOX_FAILED: 1000}


def record_of(task: str, harness: str = "claude_code", sample: int = 0, reward: float | None = 1.0) -> RolloutRecord:
    session = Session()
    session.call((1, 2), reply=(3,))
    call = replace(session.calls[0], usage=Usage(input_tokens=200_000, output_tokens=30_000, cached_tokens=100_000))
    group = make_group(task, phase="eval", harness=harness, num_samples=sample + 1)
    return make_record(group, sample, reward, calls=(call,))


def judged(record: RolloutRecord) -> RolloutRecord:
    usage = Usage(input_tokens=1, output_tokens=1)
    judgement = Judgement(
        opinions=(), score=0.5, agreement=None, spread={}, prompt_digest="", num_requests=1, usage=usage, cost_usd=0.125
    )
    return replace(record, verdict=Verdict(reward=0.5, judgement=judgement))


def evaluation_of(records: Sequence[RolloutRecord], names: Sequence[str] = ("start", "trained")) -> Evaluation:
    cells = [cell for name in names for cell in make_cells(name, "easy", 0, HARNESSES, records, lambda usage: 1.0)]
    return Evaluation(
        run="runs/evaluations/e/001",
        num_samples=2,
        temperature=1.0,
        policies=tuple(EvaluatedPolicy(name=name, source=name, policy_step=at) for at, name in enumerate(names)),
        sets=(EvaluatedSet(name="easy", num_tasks=3),),
        harnesses=HARNESSES,
        cells=tuple(cells),
        differences=tuple(compare((names[0], names[-1]), "easy", HARNESSES, records, records)),
        engines=(EngineShare(policy=names[0], set="easy", time=EngineTime(wall_s=5.0, cpu_s=9.0), num_devices=8),),
        cpu_s={"harness": 1.0},
    )


ROLLOUTS = st.tuples(st.sampled_from("ab"), st.sampled_from(HARNESSES), st.sampled_from([None, 0.0, 1.0]))


@settings(max_examples=25, deadline=None)
@given(drawn=st.lists(ROLLOUTS, max_size=8))
def test_a_cell_says_what_its_own_rollouts_say(drawn: list[tuple[str, str, float | None]]) -> None:
    records = [record_of(task, harness, sample, reward) for sample, (task, harness, reward) in enumerate(drawn)]
    for cell in make_cells("p", "easy", 0, HARNESSES, records, None):
        assert cell.table == tabulate(record for record in records if record.key.harness == cell.harness)


def test_a_rollout_without_its_texts_says_the_same() -> None:
    records = [judged(record_of("a")), record_of("b", reward=None)]
    assert tabulate(map(lighten, records), lambda usage: 1.0) == tabulate(records, lambda usage: 1.0)
    assert len(msgspec.json.encode(lighten(records[0]))) < len(msgspec.json.encode(records[0]))


def test_policies_are_compared_on_what_both_have_a_verdict_for_and_not_at_all_without() -> None:
    before = [record_of("a", reward=0.0), record_of("b", reward=0.0), record_of("c", HARNESSES[1], reward=0.0)]
    after = [record_of("a"), record_of("b", reward=None), record_of("c", HARNESSES[1], reward=None)]
    (difference,) = compare(("one", "other"), "easy", HARNESSES, before, after)
    assert (difference.baseline, difference.policy, difference.harness) == ("one", "other", HARNESSES[0])
    assert (difference.num_tasks, difference.pass_at_1.mean, difference.mean_reward.mean) == (1, 1.0, 1.0)


def test_the_widest_tables_fit_into_a_hundred_and_twenty_columns_and_cut_no_number() -> None:
    records = [judged(record_of(str(task), harness, at)) for task in range(3) for harness in HARNESSES for at in (0, 1)]
    evaluation = evaluation_of(records, ("Qwen3-30B-A3B-Instruct", "runs/mixed_ppo/001/step-000100"))
    cells = [
        replace(one, table=replace(one.table, outcomes={str(k): v for k, v in WORST.items()}))
        for one in evaluation.cells
    ]
    text = io.StringIO()
    Console(file=text, width=120).print(*as_tables(replace(evaluation, cells=tuple(cells))), sep="\n")
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 120
    assert not any("…" in line for line in lines)
    assert "0.50 [0.50, 0.50]" in text.getvalue()
    assert "200,000" in text.getvalue()
    assert "0.125" in text.getvalue()


def test_a_cell_in_which_every_rollout_failed_is_shown_without_numbers() -> None:
    evaluation = evaluation_of([record_of("a", harness, reward=None) for harness in HARNESSES])
    text = io.StringIO()
    Console(file=text, width=120).print(*as_tables(evaluation), sep="\n")
    assert "1 verifier_failed" in text.getvalue()
    assert not any("pass@1" in name for name in as_metrics(evaluation))


NAMES = {
    "": "format run num_samples temperature policies sets harnesses cells differences engines cpu_s",
    "policies": "name source policy_step",
    "sets": "name num_tasks",
    "cells": "policy harness set step table",
    "differences": "policy baseline harness set num_tasks mean_reward pass_at_1",
    "engines": "policy set time num_devices",
}
TABLE = (
    "num_tasks num_rollouts num_failed num_retried outcomes mean_reward pass_at_1 pass_at_k per_rollout policy_usd "
    "judge_usd"
)
PER_ROLLOUT = "calls prompt_tokens cached_tokens sampled_tokens wall_s engine_wait_s harness_cpu_s policy_usd judge_usd"


def test_the_names_of_the_json_are_those_of_format_1() -> None:
    """Whoever reads it relies on them: another name or meaning is another format."""
    records = [judged(record_of(task, harness, at)) for task in "ab" for harness in HARNESSES for at in (0, 1)]
    evaluation = evaluation_of(records)
    content = msgspec.json.decode(msgspec.json.encode(evaluation))
    assert content["format"] == 1
    for key, names in NAMES.items():
        assert list(content[key][0] if key else content) == names.split(), key
    table = content["cells"][0]["table"]
    assert list(table) == TABLE.split()
    assert list(table["per_rollout"]) == PER_ROLLOUT.split()
    assert list(table["pass_at_k"]) == ["2"]
    assert list(table["pass_at_1"]) == ["mean", "low", "high"]
    assert msgspec.json.decode(msgspec.json.encode(evaluation), type=Evaluation) == evaluation


def test_rows_and_metrics_have_every_cell() -> None:
    evaluation = evaluation_of([record_of("a", sample=at, reward=float(at)) for at in (0, 1)])
    columns, rows = as_rows(evaluation)
    assert len(rows) == len(evaluation.cells) == 4
    assert all(len(row) == len(columns) for row in rows)
    by_name = dict(zip(columns, rows[0], strict=True))
    assert (by_name["policy"], by_name["pass@1"], by_name["pass@2"]) == ("start", 0.5, 1.0)
    metrics = as_metrics(evaluation)
    assert metrics["easy/claude_code/start/reward"] == 0.5
    assert metrics["easy/claude_code/trained/outcome/completed"] == 2.0
    assert metrics["easy/claude_code/start/policy_usd"] == pytest.approx(1.0)
    assert "easy/mini_swe_agent/start/reward" not in metrics, "no rollout, no rate"
