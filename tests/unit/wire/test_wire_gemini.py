from __future__ import annotations

import json
from typing import Any

import pytest

from clawhpc.records import Message, Reply, Sampling, Tool, ToolCall, Usage
from clawhpc.wire.base import ContextOverflow, ErrorKind, ReplyHead, WireError, WireRequest
from clawhpc.wire.gemini import Gemini

WIRE = Gemini("policy", stream=True)
HEAD = ReplyHead(id="00000000", model="policy", created=0, input_tokens=5)
USAGE = Usage(input_tokens=100, output_tokens=7, cached_tokens=96)

Json = dict[str, Any]


def parse(*contents: Json, **fields: Any) -> WireRequest:
    return WIRE.parse_request(json.dumps({"contents": list(contents), **fields}).encode())


def messages(*contents: Json) -> tuple[Message, ...]:
    return parse(*contents).conversation.messages


def user(*parts: Json) -> Json:
    return {"role": "user", "parts": list(parts)}


def model(*parts: Json) -> Json:
    return {"role": "model", "parts": list(parts)}


def text(value: str, **fields: Any) -> Json:
    return {"text": value, **fields}


def call(name: str, **fields: Any) -> Json:
    return {"functionCall": {"name": name, **fields}}


def response(name: str, response: Json, **fields: Any) -> Json:
    return {"functionResponse": {"name": name, "response": response, **fields}}


HI = user(text("hi"))


def test_every_role_and_shape_of_content_is_read() -> None:
    read = parse(
        user(text("a"), text(" "), text("b")),
        model(
            text("hm", thought=True), text("Look."), {**call("ls", id="c1", args={"n": 1.0}), "thoughtSignature": "x"}
        ),
        user(response("ls", {"output": "out"}, id="c1"), text("and?")),
        {"parts": [text("no role")]},
        systemInstruction={"role": "user", "parts": [text("Be"), text("brief.")]},
    )
    assert read.conversation.messages == (
        Message(role="system", text="Be\nbrief."),
        Message(role="user", text="a\nb"),
        Message(
            role="assistant",
            text="Look.",
            thinking="hm",
            tool_calls=(ToolCall(id="c1", name="ls", arguments='{"n":1.0}'),),
        ),
        Message(role="tool", text="out", tool_call_id="c1"),
        Message(role="user", text="and?"),
        Message(role="user", text="no role"),
    )
    assert read.unlisted == read.overridden == ()


def test_the_url_says_which_model_and_whether_to_stream() -> None:
    body = json.dumps({"contents": [HI]}).encode()
    streamed, plain = WIRE.parse_request(body), Gemini("policy").parse_request(body)
    assert (streamed.conversation.model, streamed.conversation.stream) == ("policy", True)
    assert not plain.conversation.stream
    assert streamed.fingerprint == plain.fingerprint, "a plain fallback is the same request"
    assert streamed.fingerprint != Gemini("other").parse_request(body).fingerprint


def test_a_call_without_an_id_and_its_response_go_by_the_name_of_the_function() -> None:
    asked, answered = messages(model(call("ls"), call("pwd")), user(response("ls", {}), response("pwd", {})))[:2]
    assert [one.id for one in asked.tool_calls] == ["ls", "pwd"]
    assert [one.arguments for one in asked.tool_calls] == ["{}", "{}"]
    assert answered.tool_call_id == "ls"


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"output": "a\n"}, "a\n"),
        ({"error": "no such file"}, "no such file"),
        ({"output": {"a": 1}}, '{"output":{"a":1}}'),
        ({"output": "a", "exit": 0}, '{"output":"a","exit":0}'),
        ({"result": "a"}, '{"result":"a"}'),
        ({}, "{}"),
    ],
)
def test_a_response_is_its_text_or_else_its_json(given: Json, read: str) -> None:
    assert messages(user(response("f", given))) == (Message(role="tool", text=read, tool_call_id="f"),)


def test_a_stream_that_is_sent_back_chunk_by_chunk_is_one_message() -> None:
    chunks = (model(text("")), model(text("")), model(text("hm", thought=True)), model(text("Yes."), call("f")))
    assert messages(HI, *chunks, HI) == (
        Message(role="user", text="hi"),
        Message(role="assistant", text="Yes.", thinking="hm", tool_calls=(ToolCall(id="f", name="f", arguments="{}"),)),
        Message(role="user", text="hi"),
    )


def test_fields_may_be_spelled_as_in_the_definition_of_the_api_but_arguments_and_schemas_stay() -> None:
    schema = {"type": "object", "properties": {"function_call": {"type": "string"}}}
    body = {
        "contents": [
            model(
                {"function_call": {"name": "f", "args": {"file_data": {"function_call": 1}, "functionCall.name": 2}}}
            ),
            user({"function_response": {"name": "f", "response": {"inline_data": 1}}}),
        ],
        "system_instruction": {"parts": [text("Be brief.")]},
        "tools": [{"function_declarations": [{"name": "f", "parameters_json_schema": schema}]}],
        "generation_config": {"max_output_tokens": 5, "stop_sequences": ["END"]},
        "no_such_field": 1,
    }
    read = WIRE.parse_request(json.dumps(body).encode())
    system, asked, answered = read.conversation.messages
    assert system.text == "Be brief."
    assert json.loads(asked.tool_calls[0].arguments) == {"file_data": {"function_call": 1}, "functionCall.name": 2}
    assert answered.text == '{"inline_data":1}'
    assert read.conversation.tools == (Tool(name="f", description="", parameters=schema),)
    assert read.conversation.sampling == Sampling(max_tokens=5, stop=("END",))
    assert read.unlisted == ("no_such_field",)


def test_properties_may_be_named_as_keywords_are() -> None:
    schema = {"properties": {"default": {"type": "STRING"}, "enum": {"type": "ARRAY", "items": {"type": "STRING"}}}}
    request = {
        "contents": [{"parts": [{"text": "x"}]}],
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT", **schema}}]}],
    }
    (tool,) = Gemini("m").parse_request(json.dumps(request).encode()).conversation.tools
    assert tool.parameters == {
        "type": "object",
        "properties": {"default": {"type": "string"}, "enum": {"type": "array", "items": {"type": "string"}}},
    }


def test_schemas_in_the_apis_own_dialect_become_json_schema() -> None:
    own = {
        "type": "OBJECT",
        "properties": {"type": {"type": "STRING", "enum": ["OBJECT"]}, "n": {"anyOf": [{"type": "INTEGER"}]}},
        "default": {"type": "OBJECT"},
    }
    (tool,) = parse(HI, tools=[{"functionDeclarations": [{"name": "f", "parameters": own}]}]).conversation.tools
    assert tool.parameters == {
        "type": "object",
        "properties": {"type": {"type": "string", "enum": ["OBJECT"]}, "n": {"anyOf": [{"type": "integer"}]}},
        "default": {"type": "OBJECT"},
    }


def test_sampling_is_read_and_what_the_campaign_decides_is_named() -> None:
    config = {
        "temperature": 1,
        "topP": 0.95,
        "topK": 64.0,
        "maxOutputTokens": 9,
        "stopSequences": ["END"],
        "responseSchema": {"type": "OBJECT"},
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": -1},
        "candidateCount": 1,
    }
    read = parse(HI, generationConfig=config, safetySettings=[])
    assert read.conversation.sampling == Sampling(max_tokens=9, temperature=1, top_p=0.95, top_k=64, stop=("END",))
    assert {path.removeprefix("generationConfig.") for path in read.overridden} == {
        *("temperature", "topP", "topK", "responseSchema", "thinkingConfig.thinkingBudget"),
    }


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        ({}, "auto"),
        ({"mode": "AUTO"}, "auto"),
        ({"mode": "NONE"}, "none"),
        ({"mode": "ANY"}, "required"),
        ({"mode": "ANY", "allowedFunctionNames": ["f"]}, "tool:f"),
        ({"mode": "ANY", "allowedFunctionNames": ["f", "g"]}, "required"),
    ],
)
def test_a_forced_choice_is_recorded_and_named_as_not_obeyed(choice: Json, read: str) -> None:
    request = parse(HI, toolConfig={"functionCallingConfig": choice})
    assert request.conversation.sampling.tool_choice == read
    assert request.overridden == (() if read == "auto" else ("toolConfig.functionCallingConfig.mode",))


def test_a_request_to_count_may_be_wrapped() -> None:
    wrapped = {"generateContentRequest": {"model": "models/policy", "contents": [HI]}}
    assert WIRE.parse_request(json.dumps(wrapped).encode()).conversation.messages == messages(HI)


@pytest.mark.parametrize(
    ("contents", "fields", "named"),
    [
        (
            [user({"inlineData": {"mimeType": "image/png", "data": ""}})],
            {},
            "inlineData is not supported: this model reads",
        ),
        ([user({"inline_data": {"mime_type": "image/png"}})], {}, "contents[].parts[].inlineData is not supported"),
        ([user({"fileData": {"fileUri": "x"}})], {}, "fileData is not supported"),
        ([model({"executableCode": {"code": "1"}})], {}, "executableCode is not supported: it would run"),
        ([user(response("f", {}, parts=[{"inlineData": {}}]))], {}, "functionResponse.parts is not supported"),
        ([HI], {"tools": [{"googleSearch": {}}]}, "tools[].googleSearch is not supported: it would run"),
        ([HI], {"tools": [{"google_search": {}}]}, "tools[].googleSearch is not supported"),
        ([HI], {"cachedContent": "cachedContents/x"}, "cachedContent is not supported"),
        ([HI], {"generationConfig": {"candidateCount": 2}}, "candidateCount is not supported: only one"),
        ([HI], {"generationConfig": {"responseModalities": ["AUDIO"]}}, "this model writes text only"),
        ([HI], {"generationConfig": {"maxOutputTokens": "9"}}, "`$.generationConfig.maxOutputTokens`"),
        ([HI], {"tools": [{"functionDeclarations": [{}]}]}, "`$.tools[0].functionDeclarations[0]`"),
        ([{"role": "system", "parts": []}], {}, "'system' - at `$.contents[0].role`"),
        ([user(text("a"), {"text": 3})], {}, "`$.contents[0].parts[1].text`"),
        ([user(call("f"))], {}, "a functionCall stands in a content of the user"),
        ([model(response("f", {}))], {}, "a functionResponse stands in a content of the model"),
        ([model(call("f", args=[]))], {}, "`$.contents[0].parts[0].functionCall.args`"),
        ([], {}, "contents is not specified"),
    ],
)
def test_what_cannot_be_answered_is_named(contents: list[Json], fields: Json, named: str) -> None:
    with pytest.raises(WireError) as caught:
        parse(*contents, **fields)
    assert caught.value.kind is ErrorKind.INVALID
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("reply", "parts", "reason"),
    [
        (Reply(), [{"text": ""}], "STOP"),
        (Reply(text="hi", thinking="hm"), [{"text": "hm", "thought": True}, {"text": "hi"}], "STOP"),
        (Reply(text="hi", finish_reason="length"), [{"text": "hi"}], "MAX_TOKENS"),
        (
            Reply(tool_calls=(ToolCall(id="c1", name="f", arguments='{"a": 1.0}'),), finish_reason="tool_calls"),
            [{"functionCall": {"id": "c1", "name": "f", "args": {"a": 1.0}}}],
            "STOP",
        ),
    ],
)
def test_a_reply_is_one_candidate(reply: Reply, parts: list[Json], reason: str) -> None:
    (candidate,) = WIRE.reply_body(HEAD, reply, USAGE)["candidates"]
    assert candidate == {"content": {"parts": parts, "role": "model"}, "finishReason": reason, "index": 0}


def test_a_reply_that_is_sent_back_is_the_message_that_it_was() -> None:
    calls = (ToolCall(id="c1", name="f", arguments='{"a":[1.5,"é"]}'), ToolCall(id="c2", name="f", arguments="{}"))
    reply = Reply(text=" Look.\n", thinking="hm", tool_calls=calls, finish_reason="tool_calls")
    content = WIRE.reply_body(HEAD, reply, USAGE)["candidates"][0]["content"]
    assert messages(content) == (Message(role="assistant", text=" Look.\n", thinking="hm", tool_calls=calls),)


def test_usage_counts_cached_input_with_the_prompt() -> None:
    assert WIRE.reply_body(HEAD, Reply(), USAGE)["usageMetadata"] == {
        "promptTokenCount": 100,
        "cachedContentTokenCount": 96,
        "candidatesTokenCount": 7,
        "totalTokenCount": 107,
    }


def test_nothing_before_the_turn_says_that_the_reply_has_ended() -> None:
    for event in (WIRE.opening_event(HEAD), WIRE.keep_alive_event(HEAD)):
        body = json.loads(event.removeprefix(b"data: "))
        assert "finishReason" not in body["candidates"][0]
        assert body["usageMetadata"]["promptTokenCount"] == 5


def test_an_overflow_has_the_providers_words() -> None:
    status, body = WIRE.error_body(ContextOverflow(9000, 8192))
    assert (status, body["error"]["code"], body["error"]["status"]) == (400, 400, "INVALID_ARGUMENT")
    wording = "The input token count (9000) exceeds the maximum number of tokens allowed (8192)."
    assert body["error"]["message"] == wording


@pytest.mark.parametrize(
    ("kind", "status", "name"),
    [
        (ErrorKind.INVALID, 400, "INVALID_ARGUMENT"),
        (ErrorKind.NOT_FOUND, 404, "NOT_FOUND"),
        (ErrorKind.TOO_LARGE, 413, "INVALID_ARGUMENT"),
        (ErrorKind.LIMIT, 400, "FAILED_PRECONDITION"),
        (ErrorKind.OVERLOADED, 503, "UNAVAILABLE"),
    ],
)
def test_errors_have_a_status_that_says_whether_to_try_again(kind: ErrorKind, status: int, name: str) -> None:
    code, body = WIRE.error_body(WireError(kind, "why"))
    assert (code, body) == (status, {"error": {"code": status, "message": "why", "status": name}})
