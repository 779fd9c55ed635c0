from __future__ import annotations

import json
from typing import Any

import pytest

from clawhpc.records import Conversation, Message, Reply, Sampling, Tool, ToolCall, Usage
from clawhpc.wire.base import ContextOverflow, ErrorKind, FieldRefused, FieldUnlisted, ReplyHead, WireError
from clawhpc.wire.openai_chat import OpenAIChat
from clawhpc.wire.openai_chat_request import ChatForm

WIRE = OpenAIChat()
HEAD = ReplyHead(id="00000000", model="policy", created=0, input_tokens=5, form=ChatForm())
USAGE = Usage(input_tokens=100, output_tokens=7, cached_tokens=96)


def parse(*messages: dict[str, Any], **fields: Any) -> Conversation:
    return WIRE.parse_request(json.dumps({"model": "m", "messages": list(messages), **fields}).encode()).conversation


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_every_role_and_shape_of_content_is_read() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"a": 1.0}'}}
    conversation = parse(
        {"role": "developer", "content": "Be brief."},
        user([{"type": "text", "text": "a"}, {"type": "text", "text": " "}, {"type": "text", "text": "b"}]),
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "out"}]},
        {"role": "assistant", "content": "", "reasoning": "so"},
        {"role": "assistant", "content": None, "refusal": "No."},
    )
    calls = (ToolCall(id="c1", name="bash", arguments='{"a": 1.0}'),)
    assert conversation.messages == (
        Message(role="system", text="Be brief."),
        Message(role="user", text="a\nb"),
        Message(role="assistant", thinking="hm", tool_calls=calls),
        Message(role="tool", text="out", tool_call_id="c1"),
        Message(role="assistant", thinking="so"),
        Message(role="assistant", text="No."),
    )


def test_tools_and_sampling_are_read() -> None:
    function = {"name": "bash", "description": "run", "parameters": {"type": "object"}, "strict": True}
    conversation = parse(
        user("hi"),
        tools=[{"type": "function", "function": function}, {"type": "function", "function": {"name": "stop"}}],
        max_tokens=5,
        max_completion_tokens=9,
        temperature=0,
        stop="END",
        tool_choice={"type": "function", "function": {"name": "bash"}},
        stream=True,
    )
    assert conversation.tools == (
        Tool(name="bash", description="run", parameters={"type": "object"}),
        Tool(name="stop", description="", parameters={}),
    )
    assert conversation.sampling == Sampling(max_tokens=9, temperature=0, stop=("END",), tool_choice="tool:bash")
    assert conversation.stream
    for choice, read in (
        ({"type": "custom", "custom": {"name": "patch"}}, "tool:patch"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function"}]}}, "required"),
    ):
        assert parse(user("hi"), tool_choice=choice).sampling.tool_choice == read
    assert parse(user("hi"), max_tokens=5, tool_choice="required").sampling == Sampling(
        max_tokens=5, tool_choice="required"
    )


def test_usage_is_streamed_only_where_it_was_asked_for() -> None:
    body: dict[str, Any] = {"model": "m", "messages": [user("hi")], "stream": True}
    assert not WIRE.parse_request(json.dumps(body).encode()).form.usage_in_stream
    body["stream_options"] = {"include_usage": True}
    assert WIRE.parse_request(json.dumps(body).encode()).form.usage_in_stream
    assert b"usage" not in b"".join(WIRE.turn_events(HEAD, Reply(text="hi"), USAGE))


@pytest.mark.parametrize(
    ("reply", "content"),
    [
        (Reply(), ""),
        (Reply(text="hi"), "hi"),
        (Reply(tool_calls=(ToolCall(id="c1", name="bash", arguments="{}"),), finish_reason="tool_calls"), None),
    ],
)
def test_content_is_null_only_beside_tool_calls(reply: Reply, content: str | None) -> None:
    (choice,) = WIRE.reply_body(HEAD, reply, USAGE)["choices"]
    assert choice["message"]["content"] == content
    assert choice["finish_reason"] == reply.finish_reason


def test_usage_counts_cached_input_with_the_prompt() -> None:
    usage = WIRE.reply_body(HEAD, Reply(), USAGE)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (100, 7, 107)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 96}


def test_no_line_break_of_any_client_splits_an_event() -> None:
    events = b"".join(WIRE.turn_events(HEAD, Reply(text="a\u2028b\u2029c\u0085d\r\ne"), USAGE)).decode()
    assert all(line == "" or line.startswith("data: ") for line in events.splitlines())


def test_what_was_asked_is_told_from_what_is_given() -> None:
    body = {
        "model": "m",
        "messages": [user([{"type": "text", "text": "hi", "colour": "red"}])],
        "temperature": 0,
        "top_p": 0.9,
        "tool_choice": "required",
        "parallel_tool_calls": True,
        "response_format": {"type": "json_object"},
        "frequency_penalty": 0,
        "logprobs": False,
        "chat_template_kwargs": {"enable_thinking": True},
        "stop": ["END"],
        "n": 1,
        "store": False,
        "functions": [],
        "new_in_2027": 1,
    }
    given = WIRE.parse_request(json.dumps(body).encode())
    assert given.overridden == ("temperature", "top_p", "tool_choice", "response_format", "chat_template_kwargs")
    assert given.unlisted == ("new_in_2027", "messages[].content[].colour")
    assert given.conversation.sampling.stop == ("END",)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


@pytest.mark.parametrize(
    ("messages", "fields", "named"),
    [
        ([user([IMAGE])], {}, "content of type 'image_url' is not supported: this model reads text only"),
        ([user([{"type": "input_audio"}])], {}, "'input_audio' is not supported"),
        ([{"role": "function", "content": "a"}], {}, "'function' - at `$.messages[0].role`"),
        ([{"role": "tool", "content": "a"}], {}, "missing required field `tool_call_id`"),
        ([user(3)], {}, "`$.messages[0].content`"),
        ([{"role": "user"}], {}, "missing required field `content`"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "a"}}]}], {}, "'custom'"),
        ([{"role": "assistant", "tool_calls": [{}]}], {}, "`$.messages[0].tool_calls[0]`"),
        ([user("a")], {"tools": [{"type": "web_search"}]}, "`$.tools[0]"),
        ([user("a")], {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "a tool of type 'custom' is not supp"),
        ([user("a")], {"functions": [{"name": "x"}]}, "functions is not supported: it is the form before `tools`"),
        ([user("a")], {"modalities": ["text", "audio"]}, "modalities is not supported: this model writes text only"),
        ([user("a")], {"web_search_options": {"user_location": None}}, "web_search_options is not supported"),
        ([user("a")], {"n": 2}, "n is not supported: only one"),
        ([user("a")], {"stream": "yes"}, "`$.stream`"),
        ([user("a")], {"tool_choice": 3}, "`$.tool_choice`"),
        ([], {}, "messages: at least one"),
    ],
)
def test_what_cannot_be_answered_is_named(messages: list[Any], fields: dict[str, Any], named: str) -> None:
    with pytest.raises(WireError) as caught:
        parse(*messages, **fields)
    assert caught.value.kind is ErrorKind.INVALID
    assert named in str(caught.value)


def test_an_overflow_has_the_providers_words_and_code() -> None:
    status, body = WIRE.error_body(ContextOverflow(9000, 8192))
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["message"].startswith("This model's maximum context length is 8192 tokens. However, your")


@pytest.mark.parametrize(
    ("error", "param", "code"),
    [
        (FieldUnlisted("x"), "x", "unknown_parameter"),
        (FieldRefused("n", "one only"), "n", "unsupported_parameter"),
        (WireError(ErrorKind.INVALID, "why"), None, None),
    ],
)
def test_an_error_names_the_parameter(error: WireError, param: str | None, code: str | None) -> None:
    status, body = WIRE.error_body(error)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code)


@pytest.mark.parametrize(
    ("kind", "status"),
    [(ErrorKind.INVALID, 400), (ErrorKind.NOT_FOUND, 404), (ErrorKind.TOO_LARGE, 413), (ErrorKind.OVERLOADED, 503)],
)
def test_errors_have_a_status_that_says_whether_to_try_again(kind: ErrorKind, status: int) -> None:
    assert WIRE.error_body(WireError(kind, "why"))[0] == status
