"""Asking an endpoint: what we would read of our own requests and answers, and what providers make of errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, takewhile

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawhpc.records import Conversation, Message, Reply, Sampling, Tool, ToolCall, Usage
from clawhpc.wire.anthropic import Anthropic
from clawhpc.wire.anthropic_client import AnthropicClient
from clawhpc.wire.base import ReplyHead, WireError, WireProtocol, join_blocks
from clawhpc.wire.canonical import digest_message, digest_reply
from clawhpc.wire.client import Ask, ClientProtocol, error_message, overflow_of
from clawhpc.wire.openai_chat import OpenAIChat
from clawhpc.wire.openai_chat_client import OpenAIChatClient
from clawhpc.wire.openai_chat_request import ChatForm

ASK = Ask(model="large", max_tokens=100, temperature=0.7, seed=3)
HEAD = ReplyHead(id="0", model="large", created=0, input_tokens=0, form=ChatForm())
SIDES: dict[str, tuple[ClientProtocol, WireProtocol]] = {
    "openai": (OpenAIChatClient(), OpenAIChat()),
    "anthropic": (AnthropicClient(), Anthropic()),
}
both = pytest.mark.parametrize("protocol", SIDES)

texts = st.text(max_size=20)
names = st.text(alphabet="abcXYZ_-9", min_size=1, max_size=9)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
arguments = st.dictionaries(texts, values, max_size=3).map(lambda value: msgspec.json.encode(value).decode())
tools = st.builds(
    Tool,
    name=names,
    description=texts,
    parameters=st.just({}) | st.just({"type": "object", "properties": {"path": {"type": "string"}}}),
)


@st.composite
def turns(draw: st.DrawFn) -> list[Message]:
    """A question, or a reply whose calls are answered in any order, with ids as odd as harnesses make them."""
    if draw(st.booleans()):
        return [Message(role=draw(st.sampled_from(("user", "system"))), text=draw(texts))]
    calls = draw(st.lists(st.builds(ToolCall, id=texts, name=names, arguments=arguments), max_size=3))
    said = Message(role="assistant", text=draw(texts), thinking=draw(texts), tool_calls=tuple(calls))
    results = [Message(role="tool", text=draw(texts), tool_call_id=call.id) for call in calls]
    return [said, *draw(st.permutations(results))]


conversations = st.builds(
    Conversation,
    model=st.just("policy"),
    messages=st.lists(turns(), max_size=4).map(
        lambda turns: (
            Message(role="system", text="Be brief."),
            Message(role="user", text="Hi."),
            *(message for turn in turns for message in turn),
        )
    ),
    tools=st.lists(tools, max_size=2).map(tuple),
    sampling=st.builds(Sampling, stop=st.lists(names, max_size=2).map(tuple)),
)
replies = st.builds(
    lambda text, thinking, calls: Reply(
        text=text.strip(), thinking=thinking, tool_calls=calls, finish_reason="tool_calls" if calls else "stop"
    ),
    texts,
    texts,
    st.lists(st.builds(ToolCall, id=names, name=names, arguments=arguments), max_size=2).map(tuple),
)
usages = st.builds(
    lambda fresh, cached, drawn: Usage(input_tokens=fresh + cached, output_tokens=drawn, cached_tokens=cached),
    *[st.integers(0, 10**6)] * 3,
)


def spelled(protocol: str, conversation: Conversation) -> list[bytes]:
    """The identities of the messages, as this protocol can have them."""
    messages = list(conversation.messages)
    if protocol == "anthropic":
        silent = [m for m in messages if m.role != "tool" and not m.tool_calls and not m.text.strip()]
        messages = [message for message in messages if not any(message is one for one in silent)]
        head = list(takewhile(lambda message: message.role == "system", messages))
        text = join_blocks(message.text for message in head)
        messages = [Message(role="system", text=text), *messages[len(head) :]]
    return [digest_message(message) for message in messages]


def ids() -> Callable[[], str]:
    return partial(next, (f"id{at}" for at in count()))


@both
@settings(max_examples=40)
@given(conversation=conversations)
def test_our_own_side_reads_a_request_as_the_same_conversation(protocol: str, conversation: Conversation) -> None:
    client, server = SIDES[protocol]
    body = msgspec.json.encode(client.request_body(conversation, ASK))
    request = server.parse_request(body)
    read = request.conversation
    assert request.unlisted == ()
    assert [digest_message(message) for message in read.messages] == spelled(protocol, conversation)
    assert [tool.name for tool in read.tools] == [tool.name for tool in conversation.tools]
    assert [{"type": "object"} | tool.parameters for tool in read.tools] == [
        {"type": "object"} | tool.parameters for tool in conversation.tools
    ]
    assert (read.model, read.stream) == ("large", False)
    assert (read.sampling.max_tokens, read.sampling.temperature) == (100, 0.7)
    assert read.sampling.stop == conversation.sampling.stop


@both
@settings(max_examples=40)
@given(conversation=conversations)
def test_every_result_answers_the_call_that_it_answered_and_ids_please_every_provider(
    protocol: str, conversation: Conversation
) -> None:
    client, server = SIDES[protocol]
    read = server.parse_request(msgspec.json.encode(client.request_body(conversation, ASK))).conversation
    called = {call.id: call for message in read.messages for call in message.tool_calls}
    answers = [message.tool_call_id for message in read.messages if message.role == "tool"]
    assert sorted(answers) == sorted(called)
    assert all(one.isascii() and one.isalnum() and len(one) == 9 for one in called)


@both
@settings(max_examples=40)
@given(reply=replies, usage=usages)
def test_an_answer_of_our_own_side_is_read_as_the_same_reply(protocol: str, reply: Reply, usage: Usage) -> None:
    client, server = SIDES[protocol]
    body = msgspec.json.encode(server.reply_body(HEAD, reply, usage))
    answer = client.read_answer(body, ids())
    assert digest_reply(answer.reply) == digest_reply(reply)
    assert answer.reply.finish_reason == reply.finish_reason
    assert answer.reply.thinking.strip() == reply.thinking.strip()
    assert [call.id for call in answer.reply.tool_calls] == [f"id{at}" for at in range(len(reply.tool_calls))]
    assert (answer.usage, answer.model) == (usage, "large")


@both
def test_results_go_to_the_latest_call_of_their_id_and_each_call_has_one(protocol: str) -> None:
    """A protocol without ids names calls by their function."""
    client, server = SIDES[protocol]
    call = ToolCall(id="run", name="run", arguments="{}")
    turn = [
        Message(role="assistant", tool_calls=(call, call)),
        Message(role="tool", text="a", tool_call_id="run"),
        Message(role="tool", text="b", tool_call_id="run"),
    ]
    messages = (Message(role="user", text="Hi."), *turn, *turn)
    body = client.request_body(Conversation(model="policy", messages=messages), ASK)
    read = server.parse_request(msgspec.json.encode(body)).conversation
    assert [m.tool_call_id for m in read.messages if m.role == "tool"] == [f"call0000{at}" for at in range(4)]


@both
def test_what_an_endpoint_could_not_read_is_refused_by_name(protocol: str) -> None:
    client, _ = SIDES[protocol]
    user = Message(role="user", text="Hi.")
    bad_call = ToolCall(id="a", name="run", arguments="[1]")
    orphan = Message(role="tool", text="x", tool_call_id="gone")
    for messages, named in (
        ((user, orphan), r"messages\[1\]"),
        ((user, Message(role="assistant", tool_calls=(bad_call,))), "'run'"),
        ((user, Message(role="assistant", tool_calls=(replace(bad_call, arguments="{"),))), "'run'"),
    ):
        with pytest.raises(WireError, match=named):
            client.request_body(Conversation(model="policy", messages=messages), ASK)


def test_blank_messages_which_anthropic_refuses_are_left_out() -> None:
    client, _ = SIDES["anthropic"]
    messages = (Message(role="user", text="Hi."), Message(role="assistant"), Message(role="user", text="Go on."))
    body = client.request_body(Conversation(model="policy", messages=messages), ASK)
    assert [message["role"] for message in body["messages"]] == ["user", "user"]
    with pytest.raises(WireError, match="messages"):
        client.request_body(Conversation(model="policy", messages=messages[1:2]), ASK)


def test_a_call_that_no_harness_could_run_is_text_and_a_cut_reply_says_so() -> None:
    client, _ = SIDES["openai"]
    function = {"name": "run", "arguments": '{"command": "ls'}
    choice = {"message": {"content": "I", "tool_calls": [{"function": function}]}, "finish_reason": "length"}
    answer = client.read_answer(msgspec.json.encode({"choices": [choice]}), ids())
    assert answer.reply == Reply(text='I\nrun {"command": "ls', finish_reason="length", malformed_calls=1)
    assert answer.usage == Usage(input_tokens=0, output_tokens=0)


@both
def test_what_is_no_answer_is_a_value_error_that_shows_it(protocol: str) -> None:
    client, _ = SIDES[protocol]
    for body in (b"<html>busy</html>", b'{"choices": [], "content": 1}', b"[]", b'{"error": {"message": "no"}}'):
        with pytest.raises(ValueError, match="answer"):
            client.read_answer(body, ids())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "No  such\\nmodel", "type": "t", "code": "not_found"}}', "not_found: No such model"),
        (b'{"type": "error", "error": {"type": "overloaded_error", "message": "Busy"}}', "overloaded_error: Busy"),
        (b'{"object": "error", "message": "Bad", "type": "BadRequestError", "code": 400}', "Bad"),
        (b'{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (b"<html>\n502</html>", "<html> 502</html>"),
        (b"[1]", "[1]"),
        (b"", ""),
    ],
)
def test_an_error_is_read_in_every_form(body: bytes, said: str) -> None:
    assert error_message(body) == said


@pytest.mark.parametrize(
    ("message", "figures"),
    [
        ("This model's maximum context length is 8192 tokens. However, your messages resulted in 9000", (9000, 8192)),
        ("maximum context length is 32768 tokens. However, your prompt contains 33000 input tokens", (33000, 32768)),
        ("invalid_request_error: prompt is too long: 210000 tokens > 200000 maximum", (210000, 200000)),
        ("input length and `max_tokens` exceed context limit: 190000 + 32000 > 200000", (200001, 200000)),
        ("the request exceeds the available context size", (1001, 1000)),
        ("context_length_exceeded: too long", (1001, 1000)),
        ("Unsupported parameter: 'temperature'", None),
    ],
)
def test_an_overflow_is_known_by_the_words_of_each_provider(message: str, figures: tuple[int, int] | None) -> None:
    overflow = overflow_of(message, 1000)
    assert (overflow and (overflow.num_tokens, overflow.maximum)) == figures


def test_what_anthropic_counts_apart_is_all_input() -> None:
    usage = {"input_tokens": 5, "cache_creation_input_tokens": 30, "cache_read_input_tokens": 200, "output_tokens": 7}
    body = msgspec.json.encode({"content": [{"type": "text", "text": "hi"}], "usage": usage})
    counted = AnthropicClient().read_answer(body, str).usage
    assert counted == Usage(input_tokens=235, output_tokens=7, cached_tokens=200)
