from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.records import Message, Reply, ToolCall
from clawhpc.wire.canonical import canonical_arguments, digest_after, digest_message, digest_reply

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)


def assistant(text: str = "", arguments: str = "{}", *, call_id: str = "toolu_1", thinking: str = "") -> Message:
    call = ToolCall(id=call_id, name="Bash", arguments=arguments)
    return Message(role="assistant", text=text, thinking=thinking, tool_calls=(call,))


def as_javascript_reads(value: Any) -> Any:
    """1.0 becomes 1, as JSON.parse and JSON.stringify leave it."""
    if isinstance(value, dict):
        return {key: as_javascript_reads(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_javascript_reads(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def spelled(value: Any) -> str:
    return json.dumps(as_javascript_reads(value), sort_keys=True)


@given(st.dictionaries(st.text(), json_values))
def test_arguments_keep_their_identity_however_a_harness_writes_them_again(arguments: dict[str, Any]) -> None:
    drawn = json.dumps(arguments, ensure_ascii=False)
    compact = json.dumps(as_javascript_reads(arguments), ensure_ascii=False, separators=(",", ":"))
    sorted_escaped = json.dumps(arguments, sort_keys=True, indent=1)
    assert canonical_arguments(drawn) == canonical_arguments(compact) == canonical_arguments(sorted_escaped)


@given(json_values, json_values)
def test_arguments_are_equal_exactly_when_javascript_reads_the_same(left: Any, right: Any) -> None:
    same = spelled(left) == spelled(right)
    assert (canonical_arguments(json.dumps(left)) == canonical_arguments(json.dumps(right))) == same


@pytest.mark.parametrize("text", ["", "{", "not json", '{"a": 1e999}', "[" * 2000, "9" * 400, "9" * 5000])
def test_arguments_that_are_no_json_are_compared_as_text(text: str) -> None:
    assert canonical_arguments(f" {text}\n") == canonical_arguments(text)


def test_large_integers_are_equal_when_javascript_cannot_tell_them_apart() -> None:
    assert canonical_arguments("[12345678901234567890]") == canonical_arguments("[12345678901234567000]")


def test_stripped_text_other_ids_and_dropped_reasoning_leave_a_message_the_same() -> None:
    drawn = assistant("\n Done. ", '{"b": 1.0, "a": "é"}', thinking="hmm")
    echoed = assistant("Done.", '{"a":"\\u00e9","b":1}', call_id="toolu1")
    assert digest_message(drawn) == digest_message(echoed)


@pytest.mark.parametrize(
    "other",
    [
        assistant("Done!"),
        assistant("Done.", '{"a": 1}'),
        Message(role="assistant", text="Done."),
        Message(role="user", text="Done."),
    ],
)
def test_what_the_model_would_read_differently_is_different(other: Message) -> None:
    assert digest_message(assistant("Done.")) != digest_message(other)


def test_a_reply_is_the_message_that_repeats_it() -> None:
    message = assistant(" Done.", '{"a": 1.0}', thinking="hmm")
    reply = Reply(text=message.text, tool_calls=message.tool_calls, finish_reason="tool_calls")
    assert digest_reply(reply) == digest_message(message)


def test_a_chain_tells_where_two_histories_part() -> None:
    first, second, other = (Message(role="user", text=text) for text in ("a", "b", "c"))
    left, right = (
        digest_after(b"", map(digest_message, [first, second, second])),
        digest_after(b"", map(digest_message, [first, other, second])),
    )
    assert left.chain[:2] == right.chain[:2]
    assert not set(left.chain[2:]) & set(right.chain[2:])
    assert left.messages[2] == right.messages[2]
