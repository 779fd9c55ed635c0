"""Whatever ids the policy draws become a reply that a harness can be sent."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawhpc.engine.parse import find_stop, parse_reply
from clawhpc.engine.render import ChatRenderer
from clawhpc.records import FinishReason, Message, Reply, ToolCall
from tests.fakes.chat_tokenizer import write_tokenizer

laws = settings(max_examples=100, deadline=None)
Parse = Callable[..., Reply]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return ChatRenderer(folder, renderer="qwen3", thinking=False)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return ChatRenderer(folder, renderer="qwen3", thinking=True)


def read(renderer: ChatRenderer, ids: Sequence[int], finish_reason: FinishReason = "stop") -> Reply:
    numbers = count()
    return parse_reply(renderer, ids, finish_reason, new_id=lambda: f"call_{next(numbers)}")


def drawn(renderer: ChatRenderer, text: str) -> list[int]:
    """A completion of `text`, in which control tokens are what they spell."""
    return [*renderer._tokenizer.encode(text), renderer.stop_token_ids[0]]


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=4)


@laws
@given(text=st.text(max_size=20), arguments=st.dictionaries(st.text(), json_values, max_size=3))
def test_an_encoded_reply_reads_back_as_itself(renderer: ChatRenderer, text: str, arguments: dict[str, object]) -> None:
    call = ToolCall(id="c", name="write", arguments=json.dumps(arguments))
    reply = read(renderer, renderer.encode_reply(Message(role="assistant", text=text, tool_calls=(call,))))
    assert reply.text == text.strip()
    assert [(found.id, found.name) for found in reply.tool_calls] == [("call_0", "write")]
    assert json.loads(reply.tool_calls[0].arguments) == arguments
    assert reply.finish_reason == "tool_calls"


@laws
@given(ids=st.lists(st.integers(0, 408), max_size=40), finish_reason=st.sampled_from(["stop", "length", "cancelled"]))
def test_any_ids_become_a_reply_that_can_be_sent(
    renderer: ChatRenderer, ids: list[int], finish_reason: FinishReason
) -> None:
    reply = read(renderer, ids, finish_reason)
    for text in (reply.text, reply.thinking, *(call.arguments for call in reply.tool_calls)):
        text.encode()
    assert (reply.finish_reason == "tool_calls") == bool(reply.tool_calls and finish_reason != "cancelled")


@pytest.mark.parametrize("ids", [[], ["<|im_end|>"], ["<|endoftext|>"]])
def test_an_empty_completion_is_an_empty_reply(renderer: ChatRenderer, ids: list[str]) -> None:
    assert read(renderer, renderer._tokenizer.convert_tokens_to_ids(ids)) == Reply()


def test_calls_are_named_in_order_and_text_stands_before_them(renderer: ChatRenderer) -> None:
    one = '<tool_call>\n{"name": "a", "arguments": {"n": 1}}\n</tool_call>'
    two = '<tool_call>\n{"name": "b", "arguments": {"n": 2}}\n</tool_call>'
    reply = read(renderer, drawn(renderer, f"first\n{one}\n{two}"))
    assert reply.text == "first"
    assert [(call.id, call.name, call.arguments) for call in reply.tool_calls] == [
        ("call_0", "a", '{"n": 1}'),
        ("call_1", "b", '{"n": 2}'),
    ]


def test_arguments_that_the_policy_has_quoted_are_read(renderer: ChatRenderer) -> None:
    reply = read(renderer, drawn(renderer, '<tool_call>{"name": "a", "arguments": "{\\"n\\": 1}"}</tool_call>'))
    assert reply.tool_calls[0].arguments == '{"n": 1}'


MALFORMED = {
    "no json": '{"name": "a", "arguments": {',
    "no name": '{"arguments": {}}',
    "name of another kind": '{"name": 3, "arguments": {}}',
    "arguments of another kind": '{"name": "a", "arguments": [1]}',
    "arguments that are text": '{"name": "a", "arguments": "yes"}',
    "not a number": '{"name": "a", "arguments": {"n": NaN}}',
    "nested deeply": '{"name": "a", "arguments": {"b": ' + "[" * 300 + "]" * 300 + "}}",
    "nested too deeply": '{"name": "a", "arguments": ' + "[" * 20_000,
    "too many digits": '{"name": "a", "arguments": {"n": ' + "1" * 5_000 + "}}",
    "quoted and nested too deeply": '{"name": "a", "arguments": "' + "[" * 20_000 + '"}',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_call_is_passed_on_as_text(renderer: ChatRenderer, body: str) -> None:
    reply = read(renderer, drawn(renderer, f"see\n<tool_call>\n{body}\n</tool_call>"))
    assert reply.tool_calls == ()
    assert reply.text == f"see\n<tool_call>\n{body}\n</tool_call>"
    assert reply.finish_reason == "stop"


def test_a_malformed_call_does_not_hide_the_good_one(renderer: ChatRenderer) -> None:
    good = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    reply = read(renderer, drawn(renderer, f"<tool_call>no</tool_call>{good}"))
    assert reply.text == "<tool_call>no</tool_call>"
    assert [call.name for call in reply.tool_calls] == ["a"]


def test_a_call_that_was_cut_is_text(renderer: ChatRenderer) -> None:
    ids = drawn(renderer, '<tool_call>{"name": "a", "argum')[:-1]
    reply = read(renderer, ids, "length")
    assert (reply.text, reply.finish_reason) == ('<tool_call>{"name": "a", "argum', "length")


def test_a_reply_cut_inside_a_character_ends_before_it(renderer: ChatRenderer) -> None:
    ids = drawn(renderer, "file 🙂")[:-3]
    assert read(renderer, ids, "length").text.rstrip() == "file"


def test_bytes_that_are_no_text_inside_a_reply_are_shown_as_such(renderer: ChatRenderer) -> None:
    smile = renderer._tokenizer.encode("🙂")
    assert read(renderer, [*renderer._tokenizer.encode("a"), *smile[:2], renderer.stop_token_ids[0]]).text == "a\ufffd"


def test_a_lone_surrogate_in_arguments_does_not_reach_the_wire(renderer: ChatRenderer) -> None:
    reply = read(renderer, drawn(renderer, '<tool_call>{"name": "a", "arguments": {"t": "\\ud83d"}}</tool_call>'))
    assert json.loads(reply.tool_calls[0].arguments) == {"t": "\ufffd"}


def test_thinking_is_told_apart(thinking: ChatRenderer) -> None:
    reply = read(thinking, drawn(thinking, "<think>\nhm\n</think>\n\nyes"))
    assert (reply.thinking, reply.text) == ("hm", "yes")


def test_a_reply_that_stopped_while_thinking_has_no_text(thinking: ChatRenderer) -> None:
    reply = read(thinking, drawn(thinking, "<think>\nhm"))
    assert (reply.thinking.strip(), reply.text) == ("hm", "")


def test_a_second_stop_token_ends_the_view(renderer: ChatRenderer) -> None:
    assert read(renderer, [*drawn(renderer, "yes"), 70, 71]).text == "yes"


def test_text_between_and_after_calls_joins_the_text_before_them(renderer: ChatRenderer) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    reply = read(renderer, drawn(renderer, f"one\n{call}\ntwo\n{call}{call}</tool_call>\nthree"))
    assert (reply.text, len(reply.tool_calls)) == ("one\ntwo\nthree", 3)


CALLED = '<tool_call>\n{"name": "f", "arguments": {"x": "END"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "stop", "kept", "found"),
    [
        ("one END two END", ("END",), "one END", "END"),
        ("END", ("END",), "END", "END"),
        ("one STOP END", ("END", "STOP"), "one STOP", "STOP"),
        ("one\n\ntwo", ("\n\n",), "one\n\n", "\n\n"),
        ("a 😀 END", ("😀",), "a 😀", "😀"),
        ("<think>\nEND\n</think>\n\none END two", ("END",), "<think>\nEND\n</think>\n\none END", "END"),
        ("one END" + CALLED, ("END",), "one END", "END"),
        (CALLED + "two END three", ("END",), CALLED + "two END", "END"),
    ],
)
def test_a_stop_string_ends_a_completion_after_the_token_that_completes_it(
    thinking: ChatRenderer, text: str, stop: tuple[str, ...], kept: str, found: str
) -> None:
    by_character = [token for part in re.split("(<[^>]*>)", text) for token in _apart(thinking, part)]
    for ids in (by_character, drawn(thinking, text)[:-1]):
        stopped = find_stop(thinking, ids, stop)
        assert stopped is not None
        length, sequence = stopped
        assert sequence == found
        assert thinking.decode(ids[:length]).startswith(kept)
        assert not thinking.decode(ids[: length - 1]).startswith(kept)
    assert thinking.decode(by_character[: find_stop(thinking, by_character, stop)[0]]) == kept  # type: ignore[index]


def _apart(renderer: ChatRenderer, part: str) -> list[int]:
    control = renderer._tokenizer.convert_tokens_to_ids(part)
    return [control] if control is not None else [one for letter in part for one in renderer._tokenizer.encode(letter)]


@pytest.mark.parametrize("stop", [(), ("",), ("never",)])
def test_without_a_stop_string_in_the_text_nothing_is_cut(thinking: ChatRenderer, stop: tuple[str, ...]) -> None:
    assert find_stop(thinking, drawn(thinking, "<think>\nEND\n</think>\n\none" + CALLED), stop) is None
    assert find_stop(thinking, drawn(thinking, "<think>\nEND\n</think>\n\none" + CALLED), ("END",)) is None


def test_a_stop_string_is_found_behind_a_control_token_that_is_no_part_of_the_text(thinking: ChatRenderer) -> None:
    ids = drawn(thinking, f"{CALLED}mid <|im_start|> END more")
    stopped = find_stop(thinking, ids, ("END",))
    assert stopped is not None
    assert thinking.decode(ids[: stopped[0]]).endswith("<|im_start|> END")


def test_the_text_of_a_stopped_reply_ends_before_the_stop_string(renderer: ChatRenderer) -> None:
    ids = drawn(renderer, "one END two")
    length, found = find_stop(renderer, ids, ("END",))  # type: ignore[misc]
    reply = parse_reply(renderer, ids[:length], "stop", new_id=str, stop_sequence=found)
    assert reply == Reply(text="one ", finish_reason="stop", stop_sequence="END")
