"""Rows, the choice of what to embed, notices, and one rollout in detail."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.records import FailedAttempt, McpCall, Outcome, Phase, Verdict
from clawhpc.view.detail import MAX_TEXT, TextTable, describe_rollout, split_text
from clawhpc.view.summary import Row, choose_embedded, notices, short_number, summarise
from tests.fakes.records import make_group, make_judgement, make_record
from tests.fakes.run import decode, encode, make_calls


def make_row(number: int, reward: float | None = 0.5, outcome: Outcome = Outcome.COMPLETED) -> Row:
    record = make_record(make_group(num_samples=99), number, reward, outcome=outcome)
    return dataclasses.replace(summarise(record), started_at=float(number))


def test_the_latest_the_worst_the_best_and_the_failed_are_embedded() -> None:
    rows = [make_row(number) for number in range(20)]
    rows[1] = make_row(1, 0.0)
    rows[2] = make_row(2, 1.0)
    rows[3] = make_row(3, None, Outcome.ENGINE_FAILED)
    chosen = choose_embedded(rows, 6)
    assert {row.sample for row in rows if row.rollout_id in chosen} == {19, 18, 17, 1, 2, 3}


@given(st.lists(st.none() | st.floats(0, 1), max_size=12), st.integers(0, 15))
def test_as_many_are_embedded_as_asked_for_or_all(rewards: list[float | None], count: int) -> None:
    rows = [make_row(number, reward) for number, reward in enumerate(rewards)]
    assert len(choose_embedded(rows, count)) == min(count, len(rows))


def test_a_quiet_run_has_no_notices() -> None:
    rows = [make_row(number) for number in range(10)]
    assert notices(rows, {"train/clip_share": [(0.0, 0.0), (1.0, 0.1)] * 5}) == []


def test_failures_reencodings_and_metrics_that_never_move_are_noticed() -> None:
    rows = [make_row(number) for number in range(8)] + [make_row(8, None, Outcome.SANDBOX_FAILED)]
    rows[0] = dataclasses.replace(rows[0], reencoded=3, unlisted={"top_a": 2, "seed": 1})
    dead = [(float(step), 0.0) for step in range(5)]
    found = notices(rows, {"train/clip_share": dead, "credit/advantage_std": dead})
    assert found[0] == "1 of 9 rollouts ended without training: 1 sandbox failed."
    assert found[1].startswith("3 replies in 1 rollouts were encoded again")
    assert found[2].endswith("they were ignored: seed, top_a.")
    assert [notice.split()[0] for notice in found[3:]] == ["No", "No"]


def test_rollouts_that_were_run_again_are_noticed_when_they_are_many() -> None:
    again = (Outcome.SANDBOX_FAILED, Outcome.ENGINE_FAILED)
    few = [make_row(number) for number in range(19)] + [dataclasses.replace(make_row(19), failed_attempts=again)]
    assert notices(few, {}) == []
    assert notices(few[10:], {}) == [
        "1 of 10 rollouts were run again, because the machine had failed them: 1 sandbox failed, 1 engine failed."
    ]


def test_why_earlier_attempts_failed_is_told() -> None:
    attempt = FailedAttempt(outcome=Outcome.SANDBOX_FAILED, detail="no room", seconds=1.0)
    record = dataclasses.replace(make_record(make_group()), failed_attempts=(attempt,))
    assert summarise(record).failed_attempts == (Outcome.SANDBOX_FAILED,)
    assert describe_rollout(record, TextTable(), decode)["failed_attempts"] == ["sandbox_failed: no room"]


@pytest.mark.parametrize(("phase", "reward"), [("train", 0.2), ("eval", 0.75)])
def test_the_reward_of_an_evaluation_is_what_the_verifier_said_and_that_of_training_what_trains(
    phase: Phase, reward: float
) -> None:
    record = make_record(make_group(phase=phase))
    assert summarise(dataclasses.replace(record, verdict=Verdict(reward=0.2, unshaped=0.75))).reward == reward
    assert summarise(dataclasses.replace(record, verdict=Verdict(reward=0.2))).reward == 0.2


def test_what_judges_said_and_what_it_cost_is_told() -> None:
    verdict = Verdict(reward=1.0, unshaped=0.75, breakdown={"rubric": 0.75}, judgement=make_judgement())
    texts = TextTable()
    detail = describe_rollout(dataclasses.replace(make_record(make_group()), verdict=verdict), texts, decode)
    told = detail["judgement"]
    assert (detail["unshaped"], told["agreement"], told["cost_usd"], told["digest"]) == (0.75, 0.5, None, "ab" * 6)
    assert [opinion["shown"] for opinion in told["opinions"]] == [1.0, 1.0]
    ((name, score, reason),) = told["opinions"][0]["scores"]
    assert (name, score, texts.texts[reason]) == ("right", 0.5, "half of it")
    plain = describe_rollout(make_record(make_group()), texts, decode)
    assert (plain["unshaped"], plain["judgement"]) == (None, None)


def test_what_a_server_on_the_host_was_asked_is_told() -> None:
    call = McpCall(
        server="lab",
        connection=0,
        method="tools/call",
        name="add",
        arguments='{"a": 2}',
        result="five",
        started_at=3.26,
        duration_s=0.123,
    )
    record = dataclasses.replace(make_record(make_group()), mcp_calls=(call,), mcp_counts={"lab initialize": 1})
    texts = TextTable()
    detail = describe_rollout(record, texts, decode)
    assert detail["mcp_counts"] == {"lab initialize": 1}
    (told,) = detail["mcp_calls"]
    assert (told["server"], told["name"], told["after_s"], told["seconds"]) == ("lab", "add", 3.3, 0.12)
    assert [texts.texts[told[key]] for key in ("arguments", "result", "error")] == ['{"a": 2}', "five", ""]


def test_numbers_get_units() -> None:
    assert [short_number(value) for value in (0, 12, 1234, 1_240_000)] == ["0", "12", "1.23 k", "1.24 M"]


@given(st.text())
def test_the_pieces_of_a_text_joined_are_the_text(text: str) -> None:
    text = text.encode(errors="replace").decode()
    pieces = split_text(encode(text), decode)
    assert len(pieces) == len(encode(text))
    assert "".join(pieces) == text


@given(st.binary())
def test_bytes_that_are_no_text_still_give_a_piece_per_token(data: bytes) -> None:
    assert len(split_text(tuple(data), decode)) == len(data)


def describe(kind: int) -> tuple[dict[str, object], TextTable]:
    record = make_record(make_group(), calls=make_calls(kind, "sum", random.Random(0)))
    texts = TextTable()
    return describe_rollout(record, texts, decode), texts


def test_a_tree_says_what_was_drawn_what_was_copied_and_what_was_dropped() -> None:
    retries, _ = describe(1)
    assert [node["dropped"] for node in retries["nodes"] if "call" in node] == [None, "dead", "dead", None, None]  # type: ignore[attr-defined]
    moving, texts = describe(3)
    nodes: list[dict[str, object]] = moving["nodes"]  # type: ignore[assignment]
    copies = [node for node in nodes if node.get("continues") is not None]
    assert [copy["continues"] for copy in copies] == [0, 1, 2, 3]
    assert moving["drift"]["copied"] == 4  # type: ignore[index]
    drawn = next(node for node in nodes if node.get("call") == 0)
    assert "".join(drawn["pieces"]) == texts.texts[copies[0]["text"]]  # type: ignore[call-overload, arg-type]
    assert len(drawn["pieces"]) == len(drawn["logprobs"]) == drawn["length"]  # type: ignore[arg-type]


def test_subagents_and_side_calls_are_dropped_by_role() -> None:
    detail, _ = describe(2)
    dropped = {node["call"]: node["dropped"] for node in detail["nodes"] if "call" in node}  # type: ignore[attr-defined]
    assert dropped == {0: "role", 1: None, 2: "role", 3: "role", 4: "role", 5: None}


def test_a_rollout_without_tokens_has_messages_and_says_why_there_is_no_tree() -> None:
    calls = make_calls(0, "sum", random.Random(0))
    texts = TextTable()
    text_only = tuple(dataclasses.replace(call, tokens=None) for call in calls)
    detail = describe_rollout(make_record(make_group(), calls=text_only), texts, decode)
    assert (detail["nodes"], detail["note"]) == ([], "None of its calls has tokens.")
    assert len(detail["calls"]) == len(calls)
    mixed = describe_rollout(make_record(make_group(), calls=(text_only[0], calls[1])), texts, decode)
    assert mixed["note"].startswith("No tree: call 0 is a text-only record")
    assert describe_rollout(make_record(make_group()), texts, decode)["note"] == "It made no call."


def test_what_was_not_obeyed_is_counted_and_what_went_wrong_on_the_way_is_told() -> None:
    first, *others = make_calls(0, "sum", random.Random(0))
    fields = {"overridden": ("temperature", "top_p"), "unlisted": ("top_a",), "incidents": ("the engine was back",)}
    calls = (dataclasses.replace(first, **fields), *(dataclasses.replace(call, unlisted=("top_a",)) for call in others))
    texts = TextTable()
    detail = describe_rollout(make_record(make_group(), calls=calls), texts, decode)
    assert detail["overridden"] == {"temperature": 1, "top_p": 1}
    assert detail["unlisted"] == {"top_a": len(calls)}
    assert [texts.texts[place] for place in detail["calls"][0]["incidents"]] == ["the engine was back"]


def test_a_text_is_held_once_and_a_long_one_loses_its_middle() -> None:
    texts = TextTable()
    assert [texts.add("a"), texts.add("b"), texts.add("a")] == [0, 1, 0]
    place = texts.add("x" * (MAX_TEXT + 100) + "end")
    assert texts.shortened == 1
    assert texts.texts[place].endswith("xend")
    assert "103 characters left out" in texts.texts[place]
