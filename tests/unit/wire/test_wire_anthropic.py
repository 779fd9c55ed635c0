from __future__ import annotations

import json
from typing import Any

import pytest

from clawhpc.records import Conversation, Message, Reply, Sampling, Tool, ToolCall, Usage
from clawhpc.wire.anthropic import Anthropic
from clawhpc.wire.base import ContextOverflow, ErrorKind, FieldRefused, FieldUnlisted, ReplyHead, WireError
from clawhpc.wire.canonical import digest_after, digest_message

WIRE = Anthropic()
HEAD = ReplyHead(id="00000000", model="policy", created=0, input_tokens=5)


def parse(*messages: dict[str, Any], **fields: Any) -> Conversation:
    body = {"model": "m", "max_tokens": 10, "messages": list(messages), **fields}
    return WIRE.parse_request(json.dumps(body).encode()).conversation


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def test_a_string_is_one_text_block_and_cache_control_means_nothing() -> None:
    marked = text("hi", cache_control={"type": "ephemeral"})
    assert parse(user("hi")) == parse(user([text("hi")])) == parse(user([marked]))


def test_the_billing_line_is_no_part_of_the_prompt() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2.1.328.a1f; cc_entrypoint=cli;")
    plain = parse(user("hi"), system=[text("You are an agent."), text("Be brief.")])
    assert plain.messages[0] == Message(role="system", text="You are an agent.\nBe brief.")
    assert parse(user("hi"), system=[billing, text("You are an agent."), text("Be brief.")]) == plain
    assert parse(user("hi"), system="x-anthropic-billing-header: a=1\nYou are an agent.\nBe brief.") == plain
    assert parse(user("hi"), system=[billing]) == parse(user("hi"))


def test_system_messages_inside_the_history_stay_where_they_stand() -> None:
    conversation = parse(user("hi"), {"role": "system", "content": "Skills: none."}, user("go on"))
    assert [message.role for message in conversation.messages] == ["user", "system", "user"]


def test_tool_use_and_results_become_calls_and_tool_messages_in_order() -> None:
    conversation = parse(
        user("list"),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "xyz"},
                text("\n\n"),
                {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}},
                text("and"),
                {"type": "tool_use", "id": "t2", "name": "Read", "input": {}},
            ],
        },
        user(
            [
                {"type": "tool_result", "tool_use_id": "t1", "content": [text("a"), text("b")], "is_error": True},
                {"type": "tool_result", "tool_use_id": "t2"},
                text("<system-reminder>"),
            ]
        ),
    )
    calls = (
        ToolCall(id="t1", name="Bash", arguments='{"command": "ls"}'),
        ToolCall(id="t2", name="Read", arguments="{}"),
    )
    assert conversation.messages == (
        Message(role="user", text="list"),
        Message(role="assistant", text="and", thinking="hm", tool_calls=calls),
        Message(role="tool", text="a\nb", tool_call_id="t1"),
        Message(role="tool", text="", tool_call_id="t2"),
        Message(role="user", text="<system-reminder>"),
    )


def test_an_echoed_reply_is_recognised_after_what_claude_code_does_to_it() -> None:
    reply = Reply(
        text="\n\n",
        tool_calls=(ToolCall(id="t1", name="Bash", arguments='{ "timeout": 1.0 }'),),
        finish_reason="tool_calls",
    )
    usage = Usage(input_tokens=5, output_tokens=2)
    sent = json.loads(json.dumps(WIRE.reply_body(HEAD, reply, usage)))
    kept = [block for block in sent["content"] if block.get("text", "x").strip()]
    kept[0]["input"] = {"timeout": 1}
    echoed = parse(user("go"), {"role": "assistant", "content": kept})
    drawn = [
        Message(role="user", text="go"),
        Message(role="assistant", text=reply.text, tool_calls=reply.tool_calls),
    ]
    assert digest_after(b"", map(digest_message, echoed.messages)) == digest_after(b"", map(digest_message, drawn))


def test_a_user_message_without_words_is_still_a_message() -> None:
    assert parse(user([text(" ")]), user([])).messages == (Message(role="user"), Message(role="user"))


def test_tools_and_sampling_are_read() -> None:
    conversation = parse(
        user("hi"),
        tools=[{"name": "Bash", "description": "run", "input_schema": {"type": "object"}, "cache_control": {}}],
        temperature=1,
        top_p=0.9,
        top_k=40,
        stop_sequences=["END"],
        tool_choice={"type": "tool", "name": "Bash"},
        stream=True,
        metadata={"user_id": "x"},
    )
    assert conversation.tools == (Tool(name="Bash", description="run", parameters={"type": "object"}),)
    assert conversation.sampling == Sampling(
        max_tokens=10, temperature=1, top_p=0.9, top_k=40, stop=("END",), tool_choice="tool:Bash"
    )
    assert conversation.stream
    assert parse(user("hi"), tool_choice={"type": "any"}).sampling.tool_choice == "required"
    assert parse(user("hi")).sampling.tool_choice == "auto"


def test_what_was_asked_is_told_from_what_is_given() -> None:
    body = {
        "model": "m",
        "max_tokens": 10,
        "messages": [user([text("hi", cache_control={"type": "ephemeral"}, colour="red")])],
        "tools": [{"name": "Bash", "input_schema": {}, "strict": True, "cache_control": {}}],
        "temperature": 0,
        "top_p": 1,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": False},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high", "format": {"type": "json_schema"}},
        "stop_sequences": ["END"],
        "metadata": {"user_id": "x"},
        "new_in_2027": None,
    }
    given = WIRE.parse_request(json.dumps(body).encode())
    assert given.overridden == (
        "temperature",
        "tool_choice.type",
        "thinking",
        "output_config.effort",
        "output_config.format",
        "tools[].strict",
    )
    assert given.unlisted == ("new_in_2027", "messages[].content[].colour")


def test_a_tool_reference_in_a_result_is_the_name_of_the_tool() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "Grep"}]}
    assert parse(user([result])).messages == (Message(role="tool", text="Grep", tool_call_id="t"),)


def test_a_reply_that_a_stop_string_ended_says_which() -> None:
    usage = Usage(input_tokens=5, output_tokens=2)
    body = WIRE.reply_body(HEAD, Reply(text="Once", stop_sequence="upon"), usage)
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "upon")
    body = WIRE.reply_body(HEAD, Reply(text="Once"), usage)
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    call = ToolCall(id="t", name="Bash", arguments="{}")
    body = WIRE.reply_body(HEAD, Reply(tool_calls=(call,), finish_reason="tool_calls", stop_sequence="upon"), usage)
    assert body["stop_reason"] == "tool_use", "or its harness would not run them"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("messages", "fields", "named"),
    [
        ([user([IMAGE])], {}, "content of type 'image' is not supported: this model reads text only"),
        ([user([text("a"), {"type": "document"}])], {}, "'document' is not supported: this model reads text only - at"),
        ([user([{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}])], {}, "content of type 'image'"),
        ([{"role": "assistant", "content": [{"type": "server_tool_use"}]}], {}, "`$.messages[0].content[0]`"),
        ([user("a")], {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "`$.tools[0].type`"),
        ([user("a")], {"tools": [{"name": "Bash"}]}, "missing required field `input_schema` - at `$.tools[0]`"),
        ([user("a")], {"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported: it would run or be kept at"),
        ([user("a")], {"container": "c"}, "container is not supported"),
        ([user("a")], {"system": [IMAGE]}, "'image' - at `$.system[0].type`"),
        ([user("a")], {"model": None}, "`$.model`"),
        ([user("a")], {"max_tokens": "many"}, "`$.max_tokens`"),
        ([user("a")], {"temperature": True}, "`$.temperature`"),
        ([user("a")], {"stop_sequences": [1]}, "`$.stop_sequences[0]`"),
        ([{"role": "bot", "content": "a"}], {}, "'bot' - at `$.messages[0].role`"),
        ([{"role": "user"}], {}, "missing required field `content` - at `$.messages[0]`"),
        ([{"role": "user", "content": [{"type": "tool_result"}]}], {}, "`tool_use_id`"),
        ([{"role": ["user"], "content": "a"}], {}, "`$.messages[0].role`"),
        ([user([{"type": {"a": 1}}])], {}, "`$.messages[0].content[0].type`"),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "B", "input": 1}]}],
            {},
            "'t' is not",
        ),
        (["hello"], {}, "`$.messages[0]`"),
        ([], {}, "messages: at least one"),
    ],
)
def test_what_cannot_be_answered_is_named(messages: list[Any], fields: dict[str, Any], named: str) -> None:
    with pytest.raises(WireError) as caught:
        parse(*messages, **fields)
    assert caught.value.kind is ErrorKind.INVALID
    assert named in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"a": "\\ud800"}', b"[" * 5000, b'{"a":' * 5000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(WireError) as caught:
        WIRE.parse_request(body)
    assert caught.value.kind is ErrorKind.INVALID


def test_a_request_has_the_fingerprint_of_its_retry_and_of_its_plain_fallback() -> None:
    body = {"model": "m", "messages": [user("hi")], "metadata": {"user_id": "x"}}
    prints = [
        WIRE.parse_request(json.dumps(variant).encode()).fingerprint
        for variant in (body, body, {**body, "stream": True}, {**body, "metadata": {}}, {**body, "max_tokens": 3})
    ]
    assert prints[0] == prints[1] == prints[2]
    assert len(set(prints)) == 3


def test_cached_input_is_counted_apart_and_only_once() -> None:
    usage = Usage(input_tokens=100, output_tokens=7, cached_tokens=96)
    body = WIRE.reply_body(HEAD, Reply(text="hi"), usage)["usage"]
    assert (body["input_tokens"], body["cache_read_input_tokens"], body["output_tokens"]) == (4, 96, 7)


@pytest.mark.parametrize(
    ("error", "status", "error_type", "message"),
    [
        (
            ContextOverflow(205_000, 200_000),
            400,
            "invalid_request_error",
            "prompt is too long: 205000 tokens > 200000 maximum",
        ),
        (WireError(ErrorKind.OVERLOADED, "busy"), 529, "overloaded_error", "busy"),
        (WireError(ErrorKind.NOT_FOUND, "ended"), 404, "not_found_error", "ended"),
        (WireError(ErrorKind.TOO_LARGE, "big"), 413, "request_too_large", "big"),
        (FieldUnlisted("messages[].x"), 400, "invalid_request_error", "messages[].x: Extra inputs are not permitted"),
        (FieldRefused("container", "no"), 400, "invalid_request_error", "container is not supported: no"),
        (WireError(ErrorKind.LIMIT, "calls"), 400, "invalid_request_error", "calls"),
    ],
)
def test_errors_have_the_providers_words(error: WireError, status: int, error_type: str, message: str) -> None:
    assert WIRE.error_body(error) == (status, {"type": "error", "error": {"type": error_type, "message": message}})
