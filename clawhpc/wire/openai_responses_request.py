"""OpenAI Responses: what is asked. Stateless, as Codex uses it: every request holds its whole history.

Choices where the API leaves them open:

- A reply is several items: reasoning, a message, calls, in this order. Items that follow one another so are one message
  of the conversation; one that comes out of this order begins another.
- `developer` is `system`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw, Struct

from clawhpc.records import Conversation, Message, MessageRole, Sampling, ToolCall
from clawhpc.wire.base import TokenLimit, WireRequest, decode_body, invalid, join_blocks
from clawhpc.wire.body import KNOWN, BodyReader, PieceReader, known_cost, refuse
from clawhpc.wire.fields import (
    AT_PROVIDER,
    NOTHING_FOUND,
    READS_TEXT,
    FieldTable,
    Findings,
    honoured,
    ignored,
    merge_findings,
    overridden,
    refused,
    rendered,
)
from clawhpc.wire.openai_responses_tools import (
    NOT_OFFERED,
    OfferedTool,
    ResponsesTool,
    flat_name,
    freeform_arguments,
    read_tools,
)

ENCRYPTED = "reasoning.encrypted_content"
NOTHING_KEPT = "nothing of a request is kept: send the whole history"

ITEM = "input[]"
TOOL, INNER = "tools[]", "tools[].tools[]"
FIELDS = FieldTable(
    honoured("how the answer is sent and named", "stream", "model"),
    honoured("counts where it is lower than what the campaign allows", "max_output_tokens"),
    honoured("`reasoning.encrypted_content` is written, the rest is not known here", "include"),
    rendered("a system message first", "instructions"),
    rendered("a message: system, developer (the same), user or assistant", "input", f"{ITEM}.type", f"{ITEM}.role"),
    rendered("text", f"{ITEM}.content", f"{ITEM}.content[].type", f"{ITEM}.content[].text"),
    rendered("text", f"{ITEM}.content[].refusal"),
    rendered("reasoning that is sent back; `content` first", f"{ITEM}.summary", f"{ITEM}.encrypted_content"),
    rendered("a call", f"{ITEM}.name", f"{ITEM}.namespace", f"{ITEM}.arguments", f"{ITEM}.input", f"{ITEM}.call_id"),
    rendered("a call's result", f"{ITEM}.output", f"{ITEM}.output[].type", f"{ITEM}.output[].text"),
    rendered("the tools that are offered", "tools", f"{TOOL}.name", f"{TOOL}.description", f"{TOOL}.parameters"),
    rendered("the grammar of a freeform tool", f"{TOOL}.format", f"{INNER}.format"),
    rendered("the tools of a namespace", f"{TOOL}.tools", f"{INNER}.name", f"{INNER}.description"),
    rendered("the tools of a namespace", f"{INNER}.parameters"),
    overridden("the campaign samples", "temperature"),
    overridden("the campaign samples from the whole distribution", "top_p", asks_nothing=(1,)),
    overridden("log-probs are the learner's", "top_logprobs", asks_nothing=(0,)),
    overridden("a forced choice would mask log-probs", "tool_choice", asks_nothing=("auto",)),
    overridden("one reply may hold several calls", "parallel_tool_calls", asks_nothing=(True,)),
    overridden("a grammar would mask log-probs", "text.format", asks_nothing=({"type": "text"},)),
    overridden("a grammar would mask log-probs", f"{TOOL}.strict", f"{INNER}.strict", asks_nothing=(False,)),
    overridden("the chat format decides whether the policy thinks", "reasoning.effort"),
    ignored(
        "reasoning is written in full",
        *("reasoning.summary", "reasoning.generate_summary", "reasoning.context", "reasoning.mode"),
    ),
    ignored("a provider's own knob", "text.verbosity"),
    ignored("padding against eavesdroppers", "stream_options.include_obfuscation"),
    ignored("items are known by their order", f"{ITEM}.id", f"{ITEM}.status", f"{ITEM}.phase"),
    ignored("who made the call: always the model", f"{ITEM}.caller"),
    ignored("what a client makes of an item for itself", f"{ITEM}.parsed_arguments", f"{ITEM}.content[].parsed"),
    ignored("nothing is written there", f"{ITEM}.content[].annotations", f"{ITEM}.content[].logprobs"),
    ignored("every tool is offered, in full", f"{TOOL}.defer_loading", f"{INNER}.defer_loading"),
    ignored("only the model calls tools", f"{TOOL}.allowed_callers", f"{INNER}.allowed_callers"),
    ignored("results are text", f"{TOOL}.output_schema", f"{INNER}.output_schema"),
    ignored("harnesses wait for results", f"{TOOL}.async", f"{INNER}.async", f"{ITEM}.async"),
    ignored(
        "of a tool that is not offered",
        *(f"{TOOL}.search_context_size", f"{TOOL}.search_content_types", f"{TOOL}.external_web_access"),
        *(f"{TOOL}.user_location", f"{TOOL}.filters", f"{TOOL}.output_format", f"{TOOL}.index_gated_web_access"),
    ),
    ignored("a prompt that does not fit is an error", "truncation", "context_management"),
    ignored("no tool runs at the provider", "max_tool_calls"),
    ignored(
        "how the provider caches: it means nothing here",
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *(f"{ITEM}.content[].prompt_cache_breakpoint", f"{ITEM}.output[].prompt_cache_breakpoint"),
    ),
    ignored(
        "how the provider serves, routes and keeps",
        *("metadata", "client_metadata", "service_tier", "store", "user", "safety_identifier", "moderation"),
        *("access_programs", "image"),
    ),
    refused(NOTHING_KEPT, "previous_response_id", "conversation", "background", "background_options"),
    refused("templates are kept at the provider", "prompt"),
    refused(AT_PROVIDER, f"{TOOL}.type", asks_nothing=("function", "custom", "namespace", *sorted(NOT_OFFERED))),
    refused(AT_PROVIDER, f"{INNER}.type", asks_nothing=("function", "custom")),
    refused(
        READS_TEXT,
        *(f"{ITEM}.content[].{name}" for name in ("image_url", "file_id", "file_data", "file_url", "input_audio")),
        *(f"{ITEM}.output[].{name}" for name in ("image_url", "file_id", "file_data", "file_url")),
    ),
)


@dataclass(frozen=True, kw_only=True)
class ResponsesForm:
    """How the answer to one request is written."""

    tools: Mapping[str, OfferedTool] = field(default_factory=dict)
    """By the policy's name; plain functions are not in it."""
    encrypted_reasoning: bool = False
    """Reasoning is wanted in `encrypted_content` too."""


def read_request(body: bytes) -> WireRequest:
    """Read a body of `/v1/responses`. Raises `WireError`."""
    read = _body.read(body)
    request = read.fields
    items, in_items = _read_input(request.input)
    (tools, offered), in_tools = _tools.read(request.tools, "$.tools")
    found = merge_findings((read.found, in_items, in_tools))
    refuse(found)
    instructions = (Message(role="system", text=request.instructions),) if request.instructions else ()
    return WireRequest(
        conversation=Conversation(
            model=request.model,
            messages=(*instructions, *_messages(items)),
            tools=tools,
            sampling=_sampling(request),
            stream=request.stream or False,
        ),
        fingerprint=read.fingerprint,
        form=ResponsesForm(tools=offered, encrypted_reasoning=ENCRYPTED in (request.include or ())),
        overridden=found.overridden,
        unlisted=found.unlisted,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The request, as far as it is read
# ---------------------------------------------------------------------------------------------------------------------


class _InputText(Struct, tag="input_text"):
    text: str


class _OutputText(_InputText, tag="output_text"):
    pass


class _Text(_InputText, tag="text"):
    pass


class _ReasoningText(_InputText, tag="reasoning_text"):
    pass


class _SummaryText(_InputText, tag="summary_text"):
    pass


class _Refusal(Struct, tag="refusal"):
    refusal: str


_Content = str | list[_InputText | _OutputText | _Text | _ReasoningText | _SummaryText | _Refusal] | None
_Output = str | list[_InputText | _OutputText | _Text] | None


class _Item(Struct):
    """Any item: a message need not say that it is one."""

    type: str = "message"
    role: str = ""
    content: _Content = None
    summary: _Content = None
    encrypted_content: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    call_id: str | None = None
    output: _Output = None


class _NamedTool(Struct):
    type: str
    name: str = ""


class _Request(Struct):
    model: str
    input: Raw
    instructions: str | None = None
    tools: Raw = Raw(b"null")
    include: list[str] | None = None
    stream: bool | None = None
    max_output_tokens: TokenLimit | None = None
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: str | _NamedTool | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Items -> messages
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """What one item says: a message, or, for an assistant, a part of one."""

    message: Message
    rank: int = 0
    """Of a part: its place in a reply. 0 for a message that stands for itself."""


REASONING, SAID, CALL = 1, 2, 3


def _read_item(item: _Item) -> _Part:
    match item.type:
        case "message":
            return _read_message(item)
        case "reasoning":
            return _Part(message=Message(role="assistant", thinking=_reasoning(item)), rank=REASONING)
        case "function_call":
            call = ToolCall(
                id=_given(item, "call_id"),
                name=flat_name(item.namespace, _given(item, "name")),
                arguments=_given(item, "arguments"),
            )
            return _Part(message=Message(role="assistant", tool_calls=(call,)), rank=CALL)
        case "custom_tool_call":
            return _Part(message=Message(role="assistant", tool_calls=(_freeform_call(item),)), rank=CALL)
        case "function_call_output" | "custom_tool_call_output":
            return _Part(message=Message(role="tool", text=_join(item.output), tool_call_id=_given(item, "call_id")))
        case _:
            raise invalid(f"an input item of type {item.type!r} is not supported: {NOTHING_KEPT}")


ROLES: dict[str, MessageRole] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def _read_message(item: _Item) -> _Part:
    role = ROLES.get(item.role)
    if role is None:
        raise invalid(f"Invalid value {item.role!r}: the role of a message is one of {', '.join(ROLES)}")
    if item.content is None:
        raise invalid("missing required field `content` of a message")
    return _Part(message=Message(role=role, text=_join(item.content)), rank=SAID if role == "assistant" else 0)


def _given(item: _Item, name: str) -> str:
    value = getattr(item, name)
    if value is None:
        raise invalid(f"missing required field `{name}` of a {item.type}")
    return value


def _join(content: _Content | _Output) -> str:
    if isinstance(content, str):
        return content
    return join_blocks(part.refusal if isinstance(part, _Refusal) else part.text for part in content or ())


def _reasoning(item: _Item) -> str:
    return _join(item.content) or _join(item.summary) or open_reasoning(item.encrypted_content or "")


def _freeform_call(item: _Item) -> ToolCall:
    call_id, name = _given(item, "call_id"), flat_name(item.namespace, _given(item, "name"))
    return ToolCall(id=call_id, name=name, arguments=freeform_arguments(call_id, _given(item, "input")))


def _messages(parts: Iterable[_Part]) -> Iterator[Message]:
    """Each reply as one message."""
    reply: list[_Part] = []
    for part in parts:
        if reply and not reply[-1].rank < part.rank and not reply[-1].rank == part.rank == CALL:
            yield _merge(tuple(reply))
            reply = []
        if part.rank:
            reply.append(part)
        else:
            yield part.message
    if reply:
        yield _merge(tuple(reply))


def _merge(parts: tuple[_Part, ...]) -> Message:
    """One message of the same parts is one object: parts are equal only to themselves."""
    if len(parts) == 1:
        return parts[0].message
    known: Message | None = KNOWN.get(parts)
    if known is not None:
        return known
    messages = [part.message for part in parts]
    text, thinking = ("".join(getattr(message, name) for message in messages) for name in ("text", "thinking"))
    calls = tuple(call for message in messages for call in message.tool_calls)
    merged = Message(role="assistant", text=text, thinking=thinking, tool_calls=calls)
    return KNOWN.put(parts, merged, known_cost(len(text) + len(thinking)))


# ---------------------------------------------------------------------------------------------------------------------
# Reasoning, as harnesses carry it
# ---------------------------------------------------------------------------------------------------------------------


def close_reasoning(thinking: str) -> str:
    """Reasoning as harnesses carry it that cannot read it. It is no secret here."""
    return b64encode(thinking.encode()).decode()


def open_reasoning(encrypted: str) -> str:
    """The inverse; empty for what another provider has written."""
    try:
        return b64decode(encrypted, validate=True).decode()
    except ValueError:
        return ""


# ---------------------------------------------------------------------------------------------------------------------
# Sampling
# ---------------------------------------------------------------------------------------------------------------------


def _sampling(request: _Request) -> Sampling:
    choice = request.tool_choice
    return Sampling(
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        tool_choice=f"tool:{choice.name or choice.type}" if isinstance(choice, _NamedTool) else choice or "auto",
    )


def _read_input(given: Raw) -> tuple[list[_Part], Findings]:
    """A string is one user message."""
    items = decode_body(bytes(given), _input_decoder, "$.input")
    if isinstance(items, str):
        return [_Part(message=Message(role="user", text=items))], NOTHING_FOUND
    if not items:
        raise invalid("input: at least one item is required")
    return _items.read_each(items, "$.input")


_body = BodyReader(_Request, FIELDS, pieces=frozenset({"input", "tools"}))
_input_decoder: msgspec.json.Decoder[str | list[Raw]] = msgspec.json.Decoder(str | list[Raw])
_items = PieceReader(_Item, _read_item, FIELDS, ITEM)
_tools = PieceReader(list[ResponsesTool] | None, read_tools, FIELDS, "tools")
