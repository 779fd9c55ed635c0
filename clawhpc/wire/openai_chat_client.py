"""OpenAI Chat Completions: asking an endpoint.

Reasoning of earlier replies is not sent back: the API has no field for it, and servers differ in theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct

from clawhpc.records import Conversation, Message, Tool, Usage
from clawhpc.wire.base import Json
from clawhpc.wire.client import Answer, Ask, decode_answer, make_reply, read_arguments, with_own_ids

NO_USAGE = Usage(input_tokens=0, output_tokens=0)
"""Where an endpoint counts nothing."""


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
        answer = read_completion(body)
        choice = answer.choices[0]
        said = choice.message
        reply = make_reply(
            texts=[text for text in (said.content, said.refusal) if text],
            thinking=said.reasoning_content or said.reasoning or "",
            calls=[(call.function.name, call.function.arguments or "{}") for call in said.tool_calls or ()],
            new_id=new_id,
            cut=choice.finish_reason == "length",
        )
        return Answer(reply=reply, usage=answer.counted or NO_USAGE, model=answer.model)


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
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class Completion(Struct):
    """A `ChatCompletion`, as far as it is read."""

    choices: list[_Choice]
    model: str = ""
    usage: _Usage | None = None

    @property
    def counted(self) -> Usage | None:
        """What it took, where the endpoint says so."""
        used = self.usage
        if used is None or used.prompt_tokens is None or used.completion_tokens is None:
            return None
        cached = used.prompt_tokens_details.cached_tokens if used.prompt_tokens_details else None
        return Usage(input_tokens=used.prompt_tokens, output_tokens=used.completion_tokens, cached_tokens=cached or 0)


def read_completion(body: bytes) -> Completion:
    """The body of an answer, with one choice at least. ValueError where it is none."""
    completion = decode_answer(body, _decoder)
    if not completion.choices:
        raise ValueError("an answer without choices")
    return completion


_decoder = msgspec.json.Decoder(Completion)
