"""The official clients of three providers against the real proxy on a real unix socket, with the real chat format."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from google import genai
from google.genai import types
from tokenizers import Tokenizer

from clawhpc.engine.render import ChatRenderer
from clawhpc.errors import EngineError
from clawhpc.proxy.app import open_session
from clawhpc.proxy.respond import PolicyResponder, PolicySampling
from clawhpc.proxy.session import Session
from clawhpc.records import Limits
from clawhpc.tree.build import build_tree
from tests.fakes.caller import classify
from tests.fakes.chat_tokenizer import write_tokenizer
from tests.fakes.engine import FakeEngine, replies
from tests.fakes.prompts import rebuild_prompt_ids

pytestmark = pytest.mark.anyio

WINDOW = 4000
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ_TWICE = (
    'Let me look.\n<tool_call>\n{"name": "Read", "arguments": {"path": "a.txt", "limit": 1.0}}\n</tool_call>\n'
    '<tool_call>\n{"name": "Read", "arguments": {"path": "b.txt"}}\n</tool_call>'
)


@dataclass(frozen=True, kw_only=True)
class Clients:
    """One session, and all clients on it. They validate strictly and do not retry."""

    session: Session
    engine: FakeEngine
    anthropic: anthropic.AsyncAnthropic
    openai: openai.AsyncOpenAI
    gemini: genai.client.AsyncClient

    def check_tokens(self) -> None:
        """Each prompt is rebuilt as the engine received it, and the calls are one path."""
        calls = self.session.calls()
        for call, request in zip(calls, self.engine.requests, strict=True):
            assert rebuild_prompt_ids(calls, call.call_id) == request.prompt_ids
            assert call.delivered
        assert len(build_tree("r", calls).nodes) == 2 * len(calls)


@asynccontextmanager
async def clients_of(folder: Path, *said: str | Exception) -> AsyncIterator[Clients]:
    """The engine says one thing after the other, drawn in single bytes: not as an encoder would cut it."""
    tokenizer = write_tokenizer(folder / "policy")
    end = tokenizer.token_to_id("<|im_end|>")
    engine = FakeEngine(replies(*said), draw_ids=lambda text: (*spell(tokenizer, text), end))
    responder = PolicyResponder(
        engine=engine,
        renderer=ChatRenderer(folder / "policy", renderer="qwen3", thinking=False),
        sampling=PolicySampling(context_window=WINDOW, max_tokens=1000),
    )
    socket = folder / "p.sock"
    async with (
        open_session(
            responder=responder,
            classify=classify,
            limits=Limits(),
            seed=0,
            socket=socket,
            model="policy",
            keep_alive_s=0.02,
        ) as session,
        httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(socket))) as http,
    ):
        url = f"http://proxy{session.base_path}"
        strict: dict[str, Any] = {"api_key": "x", "http_client": http, "max_retries": 0, "timeout": 10}
        yield Clients(
            session=session,
            engine=engine,
            anthropic=anthropic.AsyncAnthropic(base_url=url, _strict_response_validation=True, **strict),
            openai=openai.AsyncOpenAI(base_url=f"{url}/v1", _strict_response_validation=True, **strict),
            gemini=genai.Client(
                api_key="x", http_options=types.HttpOptions(base_url=url, httpx_async_client=http, timeout=10_000)
            ).aio,
        )


def spell(tokenizer: Tokenizer, text: str) -> Iterator[int]:
    """The ids of a text, one character at a time; tool call markup stays the control token that it is."""
    for part in re.split("(</?tool_call>)", text):
        pieces = [part] if part.endswith("tool_call>") else list(part)
        for piece in pieces:
            yield from tokenizer.encode(piece).ids


ANTHROPIC_TOOLS: Any = [{"name": "Read", "description": "Read a file.", "input_schema": PARAMETERS}]
OPENAI_TOOLS: Any = [
    {"type": "function", "function": {"name": "Read", "description": "Read a file.", "parameters": PARAMETERS}}
]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_anthropic_client_runs_a_tool_loop_on_one_path(tmp_path: Path, stream: bool) -> None:
    async with clients_of(tmp_path, READ_TWICE, "Both read. ✅") as clients:
        messages: list[Any] = [{"role": "user", "content": "Read both."}]
        request: Any = {"model": "policy", "max_tokens": 500, "system": "Be brief.", "tools": ANTHROPIC_TOOLS}
        first = await ask_anthropic(clients, stream, messages=messages, **request)
        assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
        assert first.stop_reason == "tool_use"
        calls = [block for block in first.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"path": "a.txt", "limit": 1.0}, {"path": "b.txt"}]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"} for call in calls]
        messages += [first.to_param(), {"role": "user", "content": results}]
        second = await ask_anthropic(clients, stream, messages=messages, **request)
        assert [block.text for block in second.content if block.type == "text"] == ["Both read. ✅"]
        assert second.stop_reason == "end_turn"
        clients.check_tokens()
        for message, call in zip((first, second), clients.session.calls(), strict=True):
            cached = message.usage.cache_read_input_tokens or 0
            assert message.usage.input_tokens + cached == call.usage.input_tokens
            assert message.usage.output_tokens == call.usage.output_tokens


async def ask_anthropic(clients: Clients, stream: bool, **request: Any) -> anthropic.types.Message:
    if not stream:
        return await clients.anthropic.messages.create(**request)
    async with clients.anthropic.messages.stream(**request) as events:
        message = await events.get_final_message()
    return anthropic.types.Message.model_validate(message.model_dump())


@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_client_runs_a_tool_loop_on_one_path(tmp_path: Path, stream: bool) -> None:
    async with clients_of(tmp_path, READ_TWICE, "Both read. ✅") as clients:
        messages: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Read both."}]
        request: Any = {"model": "policy", "max_completion_tokens": 500, "tools": OPENAI_TOOLS}
        first = await ask_openai(clients, stream, messages=messages, **request)
        choice = first.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
        calls = choice.message.tool_calls or []
        spelled = [json.loads(call.function.arguments) for call in calls if call.type == "function"]
        assert spelled == [{"path": "a.txt", "limit": 1.0}, {"path": "b.txt"}]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in calls]
        messages += [choice.message.model_dump(exclude_none=True), *results]
        second = await ask_openai(clients, stream, messages=messages, **request)
        assert second.choices[0].message.content == "Both read. ✅"
        assert second.choices[0].finish_reason == "stop"
        clients.check_tokens()
        for completion, call in zip((first, second), clients.session.calls(), strict=True):
            assert completion.usage is not None
            assert completion.usage.prompt_tokens == call.usage.input_tokens
            assert completion.usage.completion_tokens == call.usage.output_tokens


async def ask_openai(clients: Clients, stream: bool, **request: Any) -> openai.types.chat.ChatCompletion:
    if not stream:
        return await clients.openai.chat.completions.create(**request)
    options: Any = {"include_usage": True}
    async with clients.openai.chat.completions.stream(stream_options=options, **request) as events:
        completion = await events.get_final_completion()
    return completion


async def test_the_clients_read_keep_alives_empty_replies_and_length_stops(tmp_path: Path) -> None:
    async with clients_of(tmp_path, "", "", "long reply", "long reply") as clients:
        clients.engine.delay_s = 0.1
        said: list[Any] = [{"role": "user", "content": "hi"}]
        empty = await ask_anthropic(clients, True, model="policy", max_tokens=500, messages=said)
        assert (empty.content, empty.stop_reason, empty.usage.output_tokens) == ([], "end_turn", 1)
        also_empty = await ask_openai(clients, True, model="policy", messages=said)
        assert not also_empty.choices[0].message.content
        said[0]["content"] = "again"
        cut = await ask_anthropic(clients, True, model="policy", max_tokens=4, messages=said)
        assert (cut.content[0].to_dict()["text"], cut.stop_reason) == ("long", "max_tokens")
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            await ask_openai(clients, True, model="policy", max_tokens=4, messages=said)
        assert caught.value.completion.choices[0].message.content == "long"


async def test_the_anthropic_client_counts_tokens_and_meets_errors_as_its_own(tmp_path: Path) -> None:
    async with clients_of(tmp_path, "ok", EngineError("gone"), "unused") as clients:
        assert [model.id async for model in clients.anthropic.models.list()] == ["policy"]
        assert (await clients.anthropic.models.retrieve("policy")).id == "policy"
        said: list[Any] = [{"role": "user", "content": "hi"}]
        counted = await clients.anthropic.messages.count_tokens(model="policy", messages=said)
        answered = await ask_anthropic(clients, False, model="policy", max_tokens=9, messages=said)
        assert counted.input_tokens == clients.session.calls()[0].usage.input_tokens
        assert answered.content[0].to_dict()["text"] == "ok"
        too_long: Any = [{"role": "user", "content": "x " * WINDOW}]
        with pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: [0-9]+ tokens > {WINDOW} maximum"):
            await clients.anthropic.messages.create(model="policy", max_tokens=9, messages=too_long, stream=True)
        image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
        with pytest.raises(anthropic.BadRequestError, match="content of type 'image' is not supported"):
            await clients.anthropic.messages.create(model="policy", max_tokens=9, messages=image)
        with pytest.raises(anthropic.APIStatusError, match="overloaded") as caught:
            await ask_anthropic(clients, True, model="policy", max_tokens=10, messages=said)
        assert caught.value.status_code == 200, "it came inside the stream"
        with pytest.raises(anthropic.InternalServerError) as refused:
            await ask_anthropic(clients, False, model="policy", max_tokens=11, messages=said)
        assert refused.value.status_code == 529


async def test_the_openai_client_lists_the_model_and_meets_errors_as_its_own(tmp_path: Path) -> None:
    async with clients_of(tmp_path, EngineError("gone")) as clients:
        assert [model.id async for model in clients.openai.models.list()] == ["policy"]
        assert (await clients.openai.models.retrieve("policy")).id == "policy"
        too_long: Any = [{"role": "user", "content": "x " * WINDOW}]
        with pytest.raises(openai.BadRequestError, match="maximum context length is 4000 tokens") as caught:
            await clients.openai.chat.completions.create(model="policy", messages=too_long, stream=True)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.APIError, match="overloaded"):
            await ask_openai(clients, True, model="policy", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.InternalServerError):
            await ask_openai(clients, False, model="policy", messages=[{"role": "user", "content": "hello"}])


GEMINI_TOOLS: Any = [
    {"function_declarations": [{"name": "Read", "description": "Read a file.", "parameters_json_schema": PARAMETERS}]}
]


RESPONSES_TOOLS: Any = [
    {
        "type": "namespace",
        "name": "mcp__lab",
        "description": "The lab.",
        "tools": [{"type": "function", "name": "Read", "description": "Read a file.", "parameters": PARAMETERS}],
    },
    {"type": "custom", "name": "apply_patch", "description": "Patch files."},
]
READ_AND_PATCH = (
    '<tool_call>\n{"name": "mcp__lab__Read", "arguments": {"path": "a.txt", "limit": 1.0}}\n</tool_call>\n'
    '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin Patch\\n+é"}}\n</tool_call>'
)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_client_runs_a_tool_loop_of_responses_on_one_path(tmp_path: Path, stream: bool) -> None:
    async with clients_of(tmp_path, READ_AND_PATCH, "Both done. ✅") as clients:
        items: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Do both."}]
        request: Any = {
            "model": "policy",
            "max_output_tokens": 500,
            "instructions": "You are an agent.",
            "tools": RESPONSES_TOOLS,
            "store": False,
            "include": ["reasoning.encrypted_content"],
        }
        first = await ask_responses(clients, stream, input=items, **request)
        called, patched = first.output
        assert called.type == "function_call"
        assert (called.name, called.namespace) == ("Read", "mcp__lab")
        assert json.loads(called.arguments) == {"path": "a.txt", "limit": 1.0}
        assert patched.type == "custom_tool_call"
        assert (patched.name, patched.input) == ("apply_patch", "*** Begin Patch\n+é")
        items += [item.to_dict() for item in first.output]
        items.append({"type": "function_call_output", "call_id": called.call_id, "output": "ok"})
        items.append({"type": "custom_tool_call_output", "call_id": patched.call_id, "output": "done"})
        second = await ask_responses(clients, stream, input=items, **request)
        assert (second.status, second.output_text) == ("completed", "Both done. ✅")
        clients.check_tokens()
        for response, call in zip((first, second), clients.session.calls(), strict=True):
            assert response.usage is not None
            assert response.usage.input_tokens == call.usage.input_tokens
            assert response.usage.output_tokens == call.usage.output_tokens
            assert call.unlisted == ()


async def ask_responses(clients: Clients, stream: bool, **request: Any) -> openai.types.responses.Response:
    if not stream:
        return await clients.openai.responses.create(**request)
    async with clients.openai.responses.stream(**request) as events:
        return await events.get_final_response()


async def test_the_openai_client_reads_every_end_of_a_response(tmp_path: Path) -> None:
    async with clients_of(tmp_path, "", "long reply", EngineError("gone"), "unused") as clients:
        clients.engine.delay_s = 0.1
        empty = await ask_responses(clients, True, model="policy", input="hi")
        assert (empty.status, empty.output) == ("completed", [])
        cut = await ask_responses(clients, False, model="policy", input="again", max_output_tokens=4)
        assert (cut.status, cut.output_text) == ("incomplete", "long")
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"
        with pytest.raises(openai.BadRequestError, match="maximum context length is 4000 tokens") as caught:
            await clients.openai.responses.create(model="policy", input="x " * WINDOW)
        assert caught.value.code == "context_length_exceeded"
        image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "auto"}]}]
        with pytest.raises(openai.BadRequestError, match="content of type 'input_image' is not supported"):
            await clients.openai.responses.create(model="policy", input=image)
        with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
            await clients.openai.responses.create(model="policy", input="hi", previous_response_id="resp_1")
        events = await clients.openai.responses.create(model="policy", input="more", stream=True)
        last = [event async for event in events][-1]
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.code == "server_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_gemini_client_runs_a_tool_loop_on_one_path(tmp_path: Path, stream: bool) -> None:
    async with clients_of(tmp_path, READ_TWICE, "Both read. ✅") as clients:
        config = types.GenerateContentConfig(
            system_instruction="Be brief.",
            tools=GEMINI_TOOLS,
            max_output_tokens=500,
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        )
        chat = clients.gemini.chats.create(model="policy", config=config)
        first = await ask_gemini(chat, stream, "Read both.")
        assert (first.text, first.finish_reason) == ("Let me look.", types.FinishReason.STOP)
        assert [call.args for call in first.calls] == [{"path": "a.txt", "limit": 1.0}, {"path": "b.txt"}]
        results = [
            types.Part(function_response=types.FunctionResponse(id=call.id, name=call.name, response={"output": "ok"}))
            for call in first.calls
        ]
        second = await ask_gemini(chat, stream, results)
        assert (second.text, second.finish_reason) == ("Both read. ✅", types.FinishReason.STOP)
        clients.check_tokens()
        for answer, call in zip((first, second), clients.session.calls(), strict=True):
            assert answer.usage.prompt_token_count == call.usage.input_tokens
            assert answer.usage.candidates_token_count == call.usage.output_tokens
            assert not call.unlisted


@dataclass(frozen=True, kw_only=True)
class GeminiAnswer:
    """What a chat said, from one response or from all that were streamed."""

    text: str
    calls: list[types.FunctionCall]
    finish_reason: types.FinishReason | None
    usage: types.GenerateContentResponseUsageMetadata


async def ask_gemini(chat: genai.chats.AsyncChat, stream: bool, message: Any) -> GeminiAnswer:
    if stream:
        chunks = [chunk async for chunk in await chat.send_message_stream(message)]
    else:
        chunks = [await chat.send_message(message)]
    last = chunks[-1]
    assert last.candidates is not None
    assert last.usage_metadata is not None
    parts = [part for chunk in chunks for part in chunk.parts or ()]
    return GeminiAnswer(
        text="".join(part.text for part in parts if part.text),
        calls=[part.function_call for part in parts if part.function_call],
        finish_reason=last.candidates[0].finish_reason,
        usage=last.usage_metadata,
    )


async def test_the_gemini_client_reads_keep_alives_empty_replies_and_length_stops(tmp_path: Path) -> None:
    async with clients_of(tmp_path, "", "long reply") as clients:
        clients.engine.delay_s = 0.1
        empty = await ask_gemini(clients.gemini.chats.create(model="policy"), True, "hi")
        assert (empty.text, empty.finish_reason) == ("", types.FinishReason.STOP)
        config = types.GenerateContentConfig(max_output_tokens=4)
        cut = await ask_gemini(clients.gemini.chats.create(model="policy", config=config), True, "again")
        assert (cut.text, cut.finish_reason) == ("long", types.FinishReason.MAX_TOKENS)


async def test_the_gemini_client_counts_lists_and_meets_errors_as_its_own(tmp_path: Path) -> None:
    async with clients_of(tmp_path, "ok", EngineError("gone")) as clients:
        models = clients.gemini.models
        assert [model.name async for model in await models.list()] == ["models/policy"]
        assert (await models.get(model="policy")).name == "models/policy"
        counted = await models.count_tokens(model="policy", contents="hi")
        await models.generate_content(model="policy", contents="hi")
        assert counted.total_tokens == clients.session.calls()[0].usage.input_tokens
        with pytest.raises(
            genai.errors.ClientError, match=f"exceeds the maximum number of tokens allowed .{WINDOW}."
        ) as caught:
            await ask_gemini(clients.gemini.chats.create(model="policy"), True, "x " * WINDOW)
        assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
        image = types.Part.from_bytes(data=b"", mime_type="image/png")
        with pytest.raises(genai.errors.ClientError, match="inlineData is not supported: this model reads text only"):
            await models.generate_content(model="policy", contents=[image])
        with pytest.raises(genai.errors.ServerError, match="overloaded") as broken:
            await ask_gemini(clients.gemini.chats.create(model="policy"), True, "again")
        assert broken.value.code == 503, "it came inside the stream"
        with pytest.raises(genai.errors.ServerError) as refused:
            await models.generate_content(model="policy", contents="hello")
        assert refused.value.code == 503
