"""OpenAI Chat Completions: asking an endpoint.

Reasoning of earlier replies is not sent back: the API has no field for it, and servers differ in theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct, field

from clawhpc.records import Conversation, Message, Tool, Usage
from clawhpc.wire.base import Json
from clawhpc.wire.client import Answer, Ask, decode_answer, make_reply, read_arguments, with_own_ids


class OpenAIChatClient:
    """The Chat Completions API."""

    path = "/chat/completions"

    def headers(self, key: str | None) -> dict[str, str]:
        """A bearer token, where there is a key."""
        return {} if key is None else {"authorization": f"Bearer {key}"}

    def request_body(self, conversation: Conversation, ask: Ask) -> Json:
        """A body of `/v1/chat/completions`."""
        sampling = conversation.sampling
        return {
            "model": ask.model,
            "messages": [_message(message) for message in with_own_ids(conversation.messages)],
            **({"tools": [_tool(tool) for tool in conversation.tools]} if conversation.tools else {}),
            "max_completion_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
        }

    def read_answer(self, body: bytes, new_id: Callable[[], str]) -> Answer:
        """A `ChatCompletion`."""
        answer = decode_answer(body, _decoder)
        if not answer.choices:
            raise ValueError("an answer without choices")
        choice = answer.choices[0]
        said = choice.message
        reply = make_reply(
            texts=[text for text in (said.content, said.refusal) if text],
            thinking=said.reasoning_content or said.reasoning or "",
            calls=[(call.function.name, call.function.arguments or "{}") for call in said.tool_calls or ()],
            new_id=new_id,
            cut=choice.finish_reason == "length",
        )
        return Answer(reply=reply, usage=_usage(answer.usage), model=answer.model)


# ---------------------------------------------------------------------------------------------------------------------
# Conversation -> request
# ---------------------------------------------------------------------------------------------------------------------


def _message(message: Message) -> Json:
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.text}
    if not message.tool_calls:
        return {"role": message.role, "content": message.text}
    return {"role": message.role, "content": message.text or None, "tool_calls": list(_calls(message))}


def _calls(message: Message) -> Iterator[Json]:
    for call in message.tool_calls:
        read_arguments(call)  # servers read them, and fail where they cannot
        function = {"name": call.name, "arguments": call.arguments or "{}"}
        yield {"id": call.id, "type": "function", "function": function}


def _tool(tool: Tool) -> Json:
    function: Json = {"name": tool.name, "description": tool.description}
    return {"type": "function", "function": function | ({"parameters": tool.parameters} if tool.parameters else {})}


# ---------------------------------------------------------------------------------------------------------------------
# Answer -> Reply
# ---------------------------------------------------------------------------------------------------------------------


class _Function(Struct):
    name: str
    arguments: str | None = None


class _Call(Struct):
    function: _Function


class _Said(Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(Struct):
    message: _Said
    finish_reason: str | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Completion(Struct):
    choices: list[_Choice]
    model: str = ""
    usage: _Usage | None = field(default_factory=_Usage)


def _usage(usage: _Usage | None) -> Usage:
    counted = usage or _Usage()
    cached = counted.prompt_tokens_details.cached_tokens if counted.prompt_tokens_details else None
    return Usage(input_tokens=counted.prompt_tokens, output_tokens=counted.completion_tokens, cached_tokens=cached or 0)


_decoder = msgspec.json.Decoder(_Completion)
