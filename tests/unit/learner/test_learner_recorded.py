"""Recorded rollouts as what to imitate: which, with which ids, and that text becomes the ids that the proxy records."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from clawhpc.engine.render import ChatRenderer
from clawhpc.learner.recorded import Spelling, Student, choose, encode_calls
from clawhpc.learner.settings import SftSettings
from clawhpc.paths import RunPaths
from clawhpc.proxy.respond import PolicyResponder, PolicySampling
from clawhpc.records import (
    CallRecord,
    Message,
    Outcome,
    PolicyVersion,
    Probe,
    Reply,
    RolloutRecord,
    ToolCall,
    Verdict,
    VersionSpan,
)
from clawhpc.store import publish_policy
from clawhpc.tree.nodes import CallTree
from tests.fakes.caller import AGENT_HEADER, ask, session_of, tool_result, user
from tests.fakes.chat_tokenizer import write_tokenizer
from tests.fakes.engine import FakeEngine, replies
from tests.fakes.records import make_group, make_record

LOOK = ToolCall(id="x", name="Bash", arguments='{"command": "ls"}')
SAID = (
    Message(role="assistant", text="I look.", tool_calls=(LOOK,)),
    Message(role="assistant", text="A subagent's word."),
    Message(role="assistant", text="This answer was thrown away."),
    Message(role="assistant", tool_calls=(LOOK, LOOK)),
    Message(role="assistant", text="Done."),
)
"""One reply after the other."""
TOOL = {"name": "Bash", "description": "Run.", "input_schema": {"type": "object", "properties": {}}}


def write_policy(folder: Path, *, renderer: str = "qwen3", merges: int | None = None) -> Path:
    """A policy of which only the way it spells is looked at."""
    part = folder.with_name("part")
    part.mkdir(parents=True)
    write_tokenizer(part)
    if merges is not None:
        (part / "tokenizer.json").write_text((part / "tokenizer.json").read_text() + "\n" * merges)
    (part / "model.safetensors").write_bytes(b"w")
    probe = Probe(token_ids=(1, 2), logprobs=(-0.5,), tolerance=1e-3)
    publish_policy(
        part,
        PolicyVersion(step=0, path=str(folder), digest="d", renderer=renderer, thinking=False, probe=probe),
    )
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("student") / "policy")


@pytest.fixture(scope="module")
def renderer(policy: Path) -> ChatRenderer:
    return ChatRenderer(policy, renderer="qwen3", thinking=False)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def calls(renderer: ChatRenderer, anyio_backend: str) -> tuple[CallRecord, ...]:
    """A rollout through the real proxy: a subagent in between, and an answer that the harness asks for again."""
    engine = FakeEngine(
        replies(*map(str, range(len(SAID)))), draw_ids=lambda number: renderer.encode_reply(SAID[int(number)])
    )
    responder = PolicyResponder(engine=engine, renderer=renderer, sampling=PolicySampling(context_window=10_000))
    async with session_of(responder) as session:
        head = {"system": "Be brief.", "tools": [TOOL]}
        first = await ask(session, user("Go."), **head)
        await ask(session, user("Look closer."), headers={AGENT_HEADER: "1"})
        then = (user("Go."), first, user([tool_result("call_0_0", "a.txt")]))
        await ask(session, *then, **head)
        again = await ask(session, *then, **head)
        results = user([tool_result("call_3_0", "b.txt"), tool_result("call_3_1", "c.txt")])
        await ask(session, *then, again, results, **head)
        return session.calls()


def as_text(calls: Sequence[CallRecord]) -> tuple[CallRecord, ...]:
    """The same from a model behind an API."""
    return tuple(replace(call, tokens=None, parent_id=None, model="large") for call in calls)


def without_logprobs(call: CallRecord) -> CallRecord:
    assert call.tokens is not None
    num_tokens = len(call.tokens.completion_ids)
    span = VersionSpan(version=0, start=0, end=num_tokens)
    tokens = replace(call.tokens, sampling_logprobs=(0.0,) * num_tokens, weight_versions=(span,))
    return replace(call, tokens=tokens)


def record_of(calls: Sequence[CallRecord]) -> RolloutRecord:
    return make_record(make_group(), calls=tuple(calls))


def drawn(tree: CallTree | None) -> list[tuple[int, ...]]:
    assert tree is not None
    return [node.token_ids for node in tree.nodes if node.sampled]


def test_text_becomes_the_very_ids_that_the_proxy_would_have_recorded(
    renderer: ChatRenderer, calls: tuple[CallRecord, ...]
) -> None:
    encoded = encode_calls(renderer, as_text(calls), thinking=False)
    assert [replace(call, model="") for call in encoded] == [without_logprobs(call) for call in calls]


def test_what_is_thrown_away_or_a_subagents_is_not_imitated_and_the_rest_stands_once(
    policy: Path, renderer: ChatRenderer, calls: tuple[CallRecord, ...], tmp_path: Path
) -> None:
    tree = Student(policy).tree(RunPaths(tmp_path), record_of(as_text(calls)))
    assert drawn(tree) == [renderer.encode_reply(SAID[at]) for at in (0, 3, 4)]


def test_ids_are_used_again_where_the_policy_that_drew_them_spells_alike(
    policy: Path, calls: tuple[CallRecord, ...], tmp_path: Path
) -> None:
    write_policy(RunPaths(tmp_path).policy(1))
    tokens = calls[0].tokens
    assert tokens is not None
    span = VersionSpan(version=1, start=0, end=2)
    tokens = replace(tokens, completion_ids=(7, 8), sampling_logprobs=(-1.0, -2.0), weight_versions=(span,))
    odd = [replace(calls[0], tokens=tokens)]
    student = Student(policy)
    assert drawn(student.tree(RunPaths(tmp_path), record_of(odd))) == [(7, 8)]
    assert student.num_encoded == 0


@pytest.mark.parametrize("other", [{"merges": 1}, {"renderer": "qwen3.5"}, None])
def test_the_ids_of_a_policy_that_spells_otherwise_or_is_gone_are_encoded_again_and_that_is_said(
    policy: Path,
    renderer: ChatRenderer,
    calls: tuple[CallRecord, ...],
    other: dict[str, object] | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if other is not None:
        write_policy(RunPaths(tmp_path).policy(1), **other)  # type: ignore[arg-type]
    student = Student(policy)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            tree = student.tree(RunPaths(tmp_path), record_of(calls))
            assert drawn(tree) == [renderer.encode_reply(SAID[at]) for at in (0, 3, 4)]
    assert student.num_encoded == 2
    assert caplog.text.count("encoded again") == 1


def test_a_reply_that_was_cut_does_not_teach_to_end_there(
    renderer: ChatRenderer, calls: tuple[CallRecord, ...]
) -> None:
    cut = replace(as_text(calls)[0], reply=Reply(text="I loo", finish_reason="length"))
    (encoded,) = encode_calls(renderer, [cut], thinking=False)
    assert encoded.tokens is not None
    assert not set(encoded.tokens.completion_ids) & set(renderer.stop_token_ids)


def test_a_student_that_does_not_think_learns_no_reasoning(
    renderer: ChatRenderer, calls: tuple[CallRecord, ...]
) -> None:
    thought = replace(as_text(calls)[0], reply=Reply(text="Yes.", thinking="Let me see."))
    (encoded,) = encode_calls(renderer, [thought], thinking=False)
    assert encoded.tokens is not None
    assert renderer.decode(encoded.tokens.completion_ids).startswith("Yes.")


def test_a_call_without_an_answer_stays_without_tokens(renderer: ChatRenderer, calls: tuple[CallRecord, ...]) -> None:
    failed = replace(as_text(calls)[2], reply=None, failure="cancelled")
    first, encoded = encode_calls(renderer, [as_text(calls)[0], failed], thinking=False)
    assert (encoded.tokens, first.tokens is None) == (None, False)


def test_a_rollout_that_makes_no_tree_is_named_and_left_out(
    policy: Path, calls: tuple[CallRecord, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_policy(RunPaths(tmp_path).policy(1))
    orphan = replace(calls[-1], parent_id=77)
    assert Student(policy).tree(RunPaths(tmp_path), record_of([orphan])) is None
    assert "task" in caplog.text
    assert "parent 77" in caplog.text


def test_rollouts_are_chosen_by_outcome_reward_and_task_and_the_rest_is_counted() -> None:
    def rewarded(task: str, sample: int, reward: float | None, outcome: Outcome | None = None) -> RolloutRecord:
        return make_record(make_group(task, num_samples=9), sample, reward, outcome=outcome)

    shaped = replace(rewarded("a", 3, 1.0), verdict=Verdict(reward=0.2, unshaped=1.0))
    records = [
        rewarded("a", 0, 0.4),
        rewarded("a", 1, 0.9),
        rewarded("a", 2, 1.0),
        shaped,
        rewarded("a", 4, None),
        rewarded("a", 5, 1.0, Outcome.OVER_BRANCHED),
        rewarded("a", 6, 1.0, Outcome.TIMEOUT),
        rewarded("b", 0, 1.0),
        rewarded("secret", 0, 1.0),
    ]
    heldout = {("secret", "do it"), ("b", "another task of that name")}
    choice = choose(records, SftSettings(min_reward=0.5), heldout)
    assert [(one.key.task_id, one.sample) for one in choice.records] == [
        ("a", 2),
        ("a", 3),
        ("a", 6),
        ("a", 1),
        ("b", 0),
    ]
    assert choice.left_out == {"reward": 1, "outcome": 2, "heldout": 1}
    best = choose(records, SftSettings(min_reward=0.5, per_task=2), heldout)
    assert [(one.key.task_id, one.sample) for one in best.records] == [("a", 2), ("a", 3), ("b", 0)]
    assert best.left_out["per_task"] == 2


def test_a_spelling_is_the_tokenizer_the_chat_format_and_whether_it_thinks(tmp_path: Path) -> None:
    first = Spelling.of(write_policy(tmp_path / "a" / "one"))
    assert Spelling.of(write_policy(tmp_path / "b" / "two")) == first
    assert Spelling.of(write_policy(tmp_path / "c" / "three", merges=1)) != first
    assert Spelling.of(write_policy(tmp_path / "d" / "four", renderer="qwen3.5")) != first
