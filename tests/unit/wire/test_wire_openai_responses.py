from __future__ import annotations

import json
from typing import Any

import pytest

from clawhpc.records import Conversation, Message, Reply, Sampling, Tool, ToolCall, Usage
from clawhpc.wire.base import ContextOverflow, ErrorKind, ReplyHead, WireError, WireRequest
from clawhpc.wire.canonical import digest_after, digest_message, digest_reply
from clawhpc.wire.openai_responses import OpenAIResponses
from clawhpc.wire.openai_responses_request import ResponsesForm

WIRE = OpenAIResponses()
USAGE = Usage(input_tokens=100, output_tokens=7, cached_tokens=96)

ADD = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patch files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
LAB = {"type": "namespace", "name": "mcp__lab", "description": "The lab.", "tools": [ADD]}


def request(*items: Any, **fields: Any) -> WireRequest:
    return WIRE.parse_request(json.dumps({"model": "m", "input": list(items), **fields}).encode())


def parse(*items: Any, **fields: Any) -> Conversation:
    return request(*items, **fields).conversation


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **fields}


def text(value: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": value}


def call(name: str, arguments: str, call_id: str = "c1", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **fields}


def output(value: Any, call_id: str = "c1", kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": call_id, "output": value}


def test_every_item_is_read_and_the_items_of_a_reply_are_one_message() -> None:
    conversation = parse(
        said("developer", [text("Be brief.")]),
        {"role": "user", "content": "Read both."},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [text("hm", "reasoning_text")]},
        said("assistant", [text("Let me look.", "output_text")], id="msg_1", status="completed"),
        call("read", '{"path": "a"}', "c1", status="completed", id="fc_1"),
        call("read", '{"path": "b"}', "c2"),
        output("A", "c1"),
        output([text("B"), text(" "), text("b")], "c2"),
        instructions="You are an agent.",
    )
    calls = (
        ToolCall(id="c1", name="read", arguments='{"path": "a"}'),
        ToolCall(id="c2", name="read", arguments='{"path": "b"}'),
    )
    assert conversation.messages == (
        Message(role="system", text="You are an agent."),
        Message(role="system", text="Be brief."),
        Message(role="user", text="Read both."),
        Message(role="assistant", text="Let me look.", thinking="hm", tool_calls=calls),
        Message(role="tool", text="A", tool_call_id="c1"),
        Message(role="tool", text="B\nb", tool_call_id="c2"),
    )


def test_a_string_is_one_user_message() -> None:
    body = json.dumps({"model": "m", "input": "hi"}).encode()
    assert WIRE.parse_request(body).conversation.messages == (Message(role="user", text="hi"),)


def test_replies_that_follow_one_another_stay_apart() -> None:
    conversation = parse(
        said("user", "go"),
        said("assistant", "one"),
        said("assistant", "two"),
        call("read", "{}"),
        {"type": "reasoning", "summary": [text("so", "summary_text")]},
        said("assistant", "three"),
    )
    assert [message.text for message in conversation.messages] == ["go", "one", "two", "three"]
    assert [len(message.tool_calls) for message in conversation.messages] == [0, 0, 1, 0]
    assert conversation.messages[3].thinking == "so"


def test_the_same_history_is_read_as_the_same_objects() -> None:
    items = (said("user", "go"), said("assistant", "a"), call("read", "{}"), output("x"))
    first, second = parse(*items), parse(*items, said("user", "more"))
    assert all(one is other for one, other in zip(first.messages, second.messages, strict=False))


def test_tools_are_offered_under_one_flat_name_and_freeform_tools_as_functions() -> None:
    web = {"type": "web_search", "external_web_access": False}
    given = request(said("user", "hi"), tools=[ADD, LAB, PATCH, web, {"type": "custom", "name": "note"}])
    add, lab_add, patch, note = given.conversation.tools
    assert add == Tool(name="add", description="Add.", parameters={"type": "object"})
    assert lab_add.name == "mcp__lab__add"
    assert patch.parameters["properties"]["input"]["description"].endswith("start: /.+/")
    assert note.parameters == {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert set(given.form.tools) == {"mcp__lab__add", "apply_patch", "note"}
    assert given.unlisted == ()


def items_of(form: ResponsesForm, reply: Reply) -> list[dict[str, Any]]:
    head = ReplyHead(id="00000003", model="policy", created=0, input_tokens=5, form=form)
    body = json.loads(json.dumps(WIRE.reply_body(head, reply, USAGE)))
    items: list[dict[str, Any]] = body["output"]
    return items


@pytest.mark.parametrize(
    ("drawn", "sent"),
    [
        (
            ToolCall(id="c1", name="mcp__lab__add", arguments='{"a": 1.0}'),
            {"type": "function_call", "name": "add", "namespace": "mcp__lab", "arguments": '{"a": 1.0}'},
        ),
        (
            ToolCall(id="c1", name="apply_patch", arguments='{ "input": "*** Begin\\né" }'),
            {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin\né", "call_id": "c1"},
        ),
        (
            ToolCall(id="c1", name="apply_patch", arguments='{"input": "x", "why": "y"}'),
            {"type": "custom_tool_call", "input": '{"input": "x", "why": "y"}', "call_id": "c1_arguments"},
        ),
        (
            ToolCall(id="c1", name="apply_patch", arguments='{"input": 3}'),
            {"type": "custom_tool_call", "input": '{"input": 3}', "call_id": "c1_arguments"},
        ),
        (
            ToolCall(id="c1", name="apply_patch", arguments="no JSON"),
            {"type": "custom_tool_call", "input": "no JSON", "call_id": "c1_arguments"},
        ),
        (
            ToolCall(id="c1", name="unheard_of", arguments="{}"),
            {"type": "function_call", "name": "unheard_of", "arguments": "{}"},
        ),
    ],
)
def test_a_call_is_sent_as_the_harness_knows_the_tool_and_is_recognised_when_it_comes_back(
    drawn: ToolCall, sent: dict[str, Any]
) -> None:
    tools = [ADD, LAB, PATCH]
    reply = Reply(text="So.", thinking="hm", tool_calls=(drawn,), finish_reason="tool_calls")
    items = items_of(request(said("user", "go"), tools=tools).form, reply)
    assert items[-1].items() >= sent.items()
    history = digest_after(
        b"", map(digest_message, parse(said("user", "go"), *items, output("ok"), tools=tools).messages)
    )
    assert history.messages[1] == digest_reply(reply)


def test_reasoning_comes_back_from_what_harnesses_keep_of_it() -> None:
    form = request(said("user", "go"), include=["reasoning.encrypted_content"], store=False).form
    reasoning, _ = items_of(form, Reply(text="So.", thinking="hm 🦀"))
    for kept in (
        reasoning,
        {key: reasoning[key] for key in ("type", "summary", "content")},
        {key: reasoning[key] for key in ("type", "summary", "encrypted_content")},
    ):
        (_, echoed) = parse(said("user", "go"), kept).messages
        assert echoed == Message(role="assistant", thinking="hm 🦀")
    assert items_of(ResponsesForm(), Reply(thinking="hm"))[0]["encrypted_content"] is None


def test_reasoning_that_another_provider_has_closed_is_no_reasoning() -> None:
    (_, echoed) = parse(
        said("user", "go"), {"type": "reasoning", "summary": [], "encrypted_content": "gAAA-_9"}
    ).messages
    assert echoed == Message(role="assistant")


def test_a_reply_that_was_cut_is_incomplete() -> None:
    head = ReplyHead(id="0", model="policy", created=0, input_tokens=5, form=ResponsesForm())
    body = WIRE.reply_body(head, Reply(text="Once", finish_reason="length"), USAGE)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"
    last = list(WIRE.turn_events(head, Reply(text="Once", finish_reason="length"), USAGE))[-1]
    assert last.startswith(b"event: response.incomplete\n")


def test_an_empty_reply_has_no_items() -> None:
    assert items_of(ResponsesForm(), Reply()) == []


def test_what_was_asked_is_told_from_what_is_given() -> None:
    given = request(
        said("user", "hi"),
        max_output_tokens=9,
        temperature=0.2,
        top_p=1,
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "schema": {}}, "verbosity": "low"},
        reasoning={"effort": "high", "summary": "auto"},
        store=False,
        prompt_cache_key="x",
        client_metadata={"a": "b"},
        stream=True,
        new_in_2027=1,
    )
    assert given.conversation.sampling == Sampling(max_tokens=9, temperature=0.2, top_p=1, tool_choice="tool:add")
    assert given.conversation.stream
    assert given.overridden == (
        "temperature",
        "tool_choice",
        "parallel_tool_calls",
        "text.format",
        "reasoning.effort",
    )
    assert given.unlisted == ("new_in_2027",)


@pytest.mark.parametrize(
    ("items", "fields", "named"),
    [
        ([said("user", [{"type": "input_image", "image_url": "x"}])], {}, "content of type 'input_image' is not supp"),
        ([said("user", [{"type": "input_file"}])], {}, "text only - at `$.input[0].content[0]`"),
        ([output([{"type": "input_image", "image_url": "x"}])], {}, "text only - at `$.input[0].output[0]`"),
        ([{"type": "item_reference", "id": "x"}], {}, "an input item of type 'item_reference' is not supported"),
        ([said("tool", "x")], {}, "Invalid value 'tool'"),
        ([{"role": "user"}], {}, "missing required field `content`"),
        ([{"type": "function_call", "name": "a", "arguments": "{}"}], {}, "missing required field `call_id`"),
        ([said("user", 3)], {}, "`$.input[0].content`"),
        ([], {}, "input: at least one item"),
        ([said("user", "a")], {"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ([said("user", "a")], {"conversation": {"id": "c"}}, "conversation is not supported"),
        ([said("user", "a")], {"background": True}, "background is not supported"),
        ([said("user", "a")], {"prompt": {"id": "p"}}, "prompt is not supported"),
        ([said("user", "a")], {"tools": [{"type": "code_interpreter"}]}, "a tool of type 'code_interpreter'"),
        ([said("user", "a")], {"tools": [{"type": "mcp", "server_url": "x"}]}, "a tool of type 'mcp'"),
        ([said("user", "a")], {"model": None}, "`$.model`"),
    ],
)
def test_what_cannot_be_answered_is_named(items: list[Any], fields: dict[str, Any], named: str) -> None:
    with pytest.raises(WireError) as caught:
        parse(*items, **fields)
    assert caught.value.kind is ErrorKind.INVALID
    assert named in str(caught.value)


def test_what_asks_for_nothing_is_not_refused() -> None:
    given = request(said("user", "a"), previous_response_id=None, background=False, conversation=None)
    assert (given.overridden, given.unlisted) == ((), ())


def test_an_overflow_has_the_providers_words_and_code() -> None:
    status, body = WIRE.error_body(ContextOverflow(9000, 8192))
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "input")
