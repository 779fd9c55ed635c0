"""Anthropic Messages: asking an endpoint.

- The system messages that come first stand in `system`; later ones stay where they are.
- Blank messages, which the API refuses, are left out.
- Reasoning of earlier replies is not sent back: its signature is the provider's, and does not cross a harness that was
  told of another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, takewhile

import msgspec
from msgspec import Struct

from clawhpc.records import Conversation, Message, Tool, Usage
from clawhpc.wire.base import Json, invalid, join_blocks
from clawhpc.wire.client import Answer, Ask, decode_answer, make_reply, read_arguments, with_own_ids

VERSION = "2023-06-01"
"""Of the API; there is no later one."""


class AnthropicClient:
    """The Messages API."""

    path = "/v1/messages"

    def headers(self, key: str | None) -> dict[str, str]:
        """The key, where there is one, and the version of the API."""
        return {"anthropic-version": VERSION, **({} if key is None else {"x-api-key": key})}

    def request_body(self, conversation: Conversation, ask: Ask) -> Json:
        """A body of `/v1/messages`."""
        messages = [message for message in with_own_ids(conversation.messages) if not _is_blank(message)]
        system = list(takewhile(lambda message: message.role == "system", messages))
        if len(system) == len(messages):
            raise invalid("messages: none of them says anything")
        return {
            "model": ask.model,
            **({"system": [_text(message.text) for message in system]} if system else {}),
            "messages": [one for group in _turns(messages[len(system) :]) for one in group],
            **({"tools": [_tool(tool) for tool in conversation.tools]} if conversation.tools else {}),
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            **({"stop_sequences": list(conversation.sampling.stop)} if conversation.sampling.stop else {}),
        }

    def read_answer(self, body: bytes, new_id: Callable[[], str]) -> Answer:
        """A `Message`."""
        answer = decode_answer(body, _decoder)
        blocks = answer.content
        reply = make_reply(
            texts=[block.text for block in blocks if block.type == "text"],
            thinking=join_blocks(block.thinking for block in blocks if block.type == "thinking"),
            calls=[(block.name, bytes(block.input).decode()) for block in blocks if block.type == "tool_use"],
            new_id=new_id,
            cut=answer.stop_reason in ("max_tokens", "model_context_window_exceeded"),
            stop_sequence=answer.stop_sequence or "",
        )
        return Answer(reply=reply, usage=_usage(answer.usage), model=answer.model)


# ---------------------------------------------------------------------------------------------------------------------
# Conversation -> request
# ---------------------------------------------------------------------------------------------------------------------


def _is_blank(message: Message) -> bool:
    return message.role != "tool" and not message.tool_calls and not message.text.strip()


def _turns(messages: list[Message]) -> Iterator[list[Json]]:
    """Results that follow one another are one message: the API wants those of one reply together."""
    for role, group in groupby(messages, key=lambda message: message.role):
        if role == "tool":
            yield [{"role": "user", "content": [_result(message) for message in group]}]
        else:
            yield [{"role": role, "content": list(_blocks(message))} for message in group]


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _result(message: Message) -> Json:
    return {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.text}


def _blocks(message: Message) -> Iterator[Json]:
    if message.text.strip():
        yield _text(message.text)
    for call in message.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": read_arguments(call)}


def _tool(tool: Tool) -> Json:
    schema: Json = {"type": "object"} | tool.parameters
    return {"name": tool.name, "description": tool.description, "input_schema": schema}


# ---------------------------------------------------------------------------------------------------------------------
# Answer -> Reply
# ---------------------------------------------------------------------------------------------------------------------


class _Block(Struct):
    """Of any type: what other types have is not read."""

    type: str
    text: str = ""
    thinking: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")


class _Usage(Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class _Answer(Struct):
    content: list[_Block]
    usage: _Usage
    model: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None


def _usage(usage: _Usage) -> Usage:
    """The API counts cached input apart."""
    cached = usage.cache_read_input_tokens or 0
    written = usage.cache_creation_input_tokens or 0
    return Usage(
        input_tokens=usage.input_tokens + written + cached, output_tokens=usage.output_tokens, cached_tokens=cached
    )


_decoder = msgspec.json.Decoder(_Answer)
