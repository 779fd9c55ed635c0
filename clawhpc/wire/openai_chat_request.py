"""OpenAI Chat Completions: what is asked.

Choices where the API leaves them open:

- `developer` is `system`.
- Reasoning travels as `reasoning_content`, as with vLLM, DeepSeek and Qwen; `reasoning` is read too.
- Only one choice is drawn: `n` over 1 is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Raw, Struct

from clawhpc.records import Conversation, Message, Sampling, Tool, ToolCall
from clawhpc.wire.base import TokenLimit, WireRequest, invalid, join_blocks
from clawhpc.wire.body import BodyReader, PieceReader, refuse
from clawhpc.wire.fields import (
    AT_PROVIDER,
    READS_TEXT,
    WRITES_TEXT,
    FieldTable,
    honoured,
    ignored,
    merge_findings,
    overridden,
    refused,
    rendered,
)

CALL = "messages[].tool_calls[]"
FIELDS = FieldTable(
    honoured("how the answer is sent and named", "stream", "stream_options.include_usage", "model"),
    honoured("counts where it is lower than what the campaign allows", "max_tokens"),
    honoured("the same; it wins over `max_tokens`", "max_completion_tokens"),
    honoured("the reply ends before the first of them", "stop"),
    rendered("system, developer (the same), user, assistant or tool", "messages", "messages[].role"),
    rendered(
        "text",
        *("messages[].content", "messages[].content[].type", "messages[].content[].text"),
        *("messages[].refusal", "messages[].content[].refusal"),
    ),
    rendered("reasoning that is sent back, the first of them", "messages[].reasoning_content", "messages[].reasoning"),
    rendered("tool calls", "messages[].tool_calls", f"{CALL}.id", f"{CALL}.type"),
    rendered("tool calls", f"{CALL}.function.name", f"{CALL}.function.arguments"),
    rendered("the call that a tool's result answers", "messages[].tool_call_id"),
    rendered("the tools that are offered", "tools", "tools[].function.name"),
    rendered("the tools that are offered", "tools[].function.description", "tools[].function.parameters"),
    overridden("the campaign samples", "temperature", "seed"),
    overridden("the campaign samples from the whole distribution", "top_p", asks_nothing=(1,)),
    overridden("the campaign samples from the whole distribution", "top_k", asks_nothing=(-1, 0)),
    overridden("the campaign samples from the whole distribution", "min_p", "logit_bias", asks_nothing=(0, {})),
    overridden("it would change log-probs", "frequency_penalty", "presence_penalty", asks_nothing=(0,)),
    overridden("it would change log-probs", "repetition_penalty", asks_nothing=(1,)),
    overridden("log-probs are the learner's", "logprobs", "top_logprobs", asks_nothing=(False, 0)),
    overridden("a forced choice would mask log-probs", "tool_choice", asks_nothing=("auto",)),
    overridden("one reply may hold several calls", "parallel_tool_calls", asks_nothing=(True,)),
    overridden("a grammar would mask log-probs", "response_format", asks_nothing=({"type": "text"},)),
    overridden("a grammar would mask log-probs", "tools[].function.strict", asks_nothing=(False,)),
    overridden(
        "the chat format decides whether the policy thinks",
        *("reasoning_effort", "reasoning", "thinking", "enable_thinking", "chat_template_kwargs"),
    ),
    ignored("roles say who speaks", "messages[].name"),
    ignored("what a client makes of a message for itself", "messages[].parsed", f"{CALL}.function.parsed_arguments"),
    ignored("the order of a list says it", f"{CALL}.index"),
    ignored("opaque reasoning of a provider; the text of it stands in `reasoning`", "messages[].reasoning_details"),
    ignored("citations are not written", "messages[].annotations"),
    ignored("padding against eavesdroppers", "stream_options.include_obfuscation"),
    ignored("a provider's own knob", "verbosity", "prediction"),
    ignored(
        "how the provider caches: it means nothing here",
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("messages[].cache_control", "messages[].content[].cache_control", "tools[].cache_control"),
        "messages[].content[].prompt_cache_breakpoint",
    ),
    ignored(
        "how the provider serves, routes and keeps",
        *("metadata", "service_tier", "store", "user", "safety_identifier", "moderation"),
    ),
    refused("only one choice can be drawn", "n", asks_nothing=(1,)),
    refused("it is the form before `tools`", "functions", "function_call", "messages[].function_call"),
    refused("only functions are offered", "tools[].type", f"{CALL}.custom", asks_nothing=("function",)),
    refused(WRITES_TEXT, "modalities", asks_nothing=(["text"],)),
    refused(WRITES_TEXT, "audio", "messages[].audio"),
    refused(AT_PROVIDER, "web_search_options", "tools[].custom"),
    refused(
        READS_TEXT,
        *("messages[].content[].image_url", "messages[].content[].input_audio", "messages[].content[].file"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class ChatForm:
    """How the answer to one request is written."""

    usage_in_stream: bool = False
    """`stream_options.include_usage`: the stream ends with a chunk that carries the usage."""


def read_request(body: bytes) -> WireRequest:
    """Read a body of `/v1/chat/completions`. Raises `WireError`."""
    read = _body.read(body)
    request = read.fields
    if not request.messages:
        raise invalid("messages: at least one message is required")
    messages, in_messages = _messages.read_each(request.messages, "$.messages")
    tools, in_tools = _tools.read(request.tools, "$.tools")
    found = merge_findings((read.found, in_messages, in_tools))
    refuse(found)
    return WireRequest(
        conversation=Conversation(
            model=request.model,
            messages=tuple(messages),
            tools=tools,
            sampling=_sampling(request),
            stream=request.stream or False,
        ),
        fingerprint=read.fingerprint,
        form=ChatForm(usage_in_stream=bool(request.stream_options and request.stream_options.include_usage)),
        overridden=found.overridden,
        unlisted=found.unlisted,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The request, as far as it is read
# ---------------------------------------------------------------------------------------------------------------------


class _Text(Struct, tag="text"):
    text: str


class _Refusal(Struct, tag="refusal"):
    refusal: str


class _FunctionCall(Struct):
    name: str
    arguments: str | None = None


class _ToolCall(Struct):
    function: _FunctionCall
    type: Literal["function"] = "function"
    id: str | None = None


class _System(Struct, tag_field="role", tag="system"):
    content: str | list[_Text]


class _Developer(_System, tag="developer"):
    pass


class _User(Struct, tag_field="role", tag="user"):
    content: str | list[_Text]


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: str | list[_Text | _Refusal] | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _ToolMessage(Struct, tag_field="role", tag="tool"):
    tool_call_id: str
    content: str | list[_Text] | None = None


_Message = _System | _Developer | _User | _Assistant | _ToolMessage


class _Function(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Struct):
    function: _Function | None = None
    type: str = "function"


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Named(Struct):
    name: str


class _AllowedTools(Struct):
    mode: str


class _ToolChoice(Struct):
    function: _Named | None = None
    custom: _Named | None = None
    allowed_tools: _AllowedTools | None = None


class _Request(Struct):
    model: str
    messages: list[Raw]
    tools: Raw = Raw(b"null")
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    tool_choice: str | _ToolChoice | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Request -> Conversation
# ---------------------------------------------------------------------------------------------------------------------


def _read_message(message: _Message) -> Message:
    text = _join(message.content)
    match message:
        case _System():
            return Message(role="system", text=text)
        case _User():
            return Message(role="user", text=text)
        case _Assistant(tool_calls=calls):
            text = text or message.refusal or ""
            thinking = message.reasoning_content or message.reasoning or ""
            return Message(
                role="assistant", text=text, thinking=thinking, tool_calls=tuple(map(_tool_call, calls or ()))
            )
        case _ToolMessage(tool_call_id=call_id):
            return Message(role="tool", text=text, tool_call_id=call_id)


def _join(content: str | list[Any] | None) -> str:
    if isinstance(content, str):
        return content
    return join_blocks(part.text if isinstance(part, _Text) else part.refusal for part in content or ())


def _tool_call(call: _ToolCall) -> ToolCall:
    return ToolCall(id=call.id or "", name=call.function.name, arguments=call.function.arguments or "")


def _read_tools(tools: list[_Tool] | None) -> tuple[Tool, ...]:
    return tuple(_read_tool(tool, f"$.tools[{index}]") for index, tool in enumerate(tools or ()))


def _read_tool(tool: _Tool, place: str) -> Tool:
    if tool.type != "function":
        raise invalid(f"a tool of type {tool.type!r} is not supported: only functions are - at `{place}.type`")
    if tool.function is None:
        raise invalid(f"Object missing required field `function` - at `{place}`")
    function = tool.function
    return Tool(name=function.name, description=function.description or "", parameters=function.parameters or {})


def _sampling(request: _Request) -> Sampling:
    return Sampling(
        max_tokens=request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        tool_choice=_tool_choice(request.tool_choice),
    )


def _tool_choice(choice: str | _ToolChoice | None) -> str:
    if not isinstance(choice, _ToolChoice):
        return choice or "auto"
    if choice.allowed_tools is not None:
        return choice.allowed_tools.mode
    named = choice.function or choice.custom
    if named is None:
        raise invalid("Object missing required field `function` - at `$.tool_choice`")
    return f"tool:{named.name}"


_body = BodyReader(_Request, FIELDS, pieces=frozenset({"messages", "tools"}))
_messages = PieceReader(_Message, _read_message, FIELDS, "messages[]")
_tools = PieceReader(list[_Tool] | None, _read_tools, FIELDS, "tools")
