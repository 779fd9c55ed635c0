"""Gemini generateContent: what is asked.

Choices where the API leaves them open:

- Fields may be spelled as in JSON (`systemInstruction`) or as in the API's own definition (`system_instruction`).
- Contents of the model that follow one another are one message: clients send a stream back chunk by chunk.
- A function call without an id goes by the name of its function, and so does its response.
- A response that is `{"output": …}` or `{"error": …}` with a text is that text; every other one is its JSON.
- Schemas in the API's own dialect become JSON Schema as far as the spelling of types goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from clawhpc.records import Conversation, Message, Sampling, Tool, ToolCall
from clawhpc.wire.base import TokenLimit, WireRequest, invalid, join_blocks, split_at_results
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
from clawhpc.wire.gemini_spelling import spelled_as_json

PART = "contents[].parts[]"
DECLARATION = "tools[].functionDeclarations[]"
CHOICE = "toolConfig.functionCallingConfig"
VALUE_KEYWORDS = frozenset({"const", "default", "enum", "example", "examples"})
"""What stands below these keywords of a schema is no schema."""
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Below these, keys are names, whatever they are."""
MAX_TOP_K = 2**31 - 1
"""The API has it as a number with a fraction; no vocabulary is larger."""


def _config(*names: str) -> Iterator[str]:
    return (f"generationConfig.{name}" for name in names)


OF_MEDIA = (
    *("mediaResolution", "mediaProcessing", "videoMetadata", "audioMetadata", "audioTranscription"),
    *("speechMetadata", "documentMetadata", "spreadsheetMetadata"),
)
# An empty object asks for such a tool.
TOOLS_AT_PROVIDER = tuple(
    replace(row, asks_nothing=(None,))
    for row in refused(
        AT_PROVIDER,
        *("tools[].googleSearch", "tools[].googleSearchRetrieval", "tools[].googleMaps", "tools[].enterpriseWebSearch"),
        *("tools[].codeExecution", "tools[].urlContext", "tools[].fileSearch", "tools[].retrieval"),
        *("tools[].computerUse", "tools[].mcpServers", "tools[].parallelAiSearch", "tools[].exaAiSearch"),
    )
)
FIELDS = FieldTable(
    honoured("counts where it is lower than what the campaign allows", *_config("maxOutputTokens")),
    honoured("the reply ends before the first of them", *_config("stopSequences")),
    honoured("reasoning is always sent", *_config("thinkingConfig.includeThoughts")),
    rendered("one system message first", "systemInstruction.parts", "systemInstruction.parts[].text"),
    rendered("`countTokens` may wrap what it counts", "generateContentRequest"),
    rendered("user or model", "contents", "contents[].role", "contents[].parts"),
    rendered("text, or reasoning that is sent back", f"{PART}.text", f"{PART}.thought"),
    rendered("a tool call", *(f"{PART}.functionCall.{name}" for name in ("id", "name", "args"))),
    rendered("a tool's result", *(f"{PART}.functionResponse.{name}" for name in ("id", "name", "response"))),
    rendered("the tools that are offered", f"{DECLARATION}.name", f"{DECLARATION}.description"),
    rendered("the tools that are offered", f"{DECLARATION}.parameters", f"{DECLARATION}.parametersJsonSchema"),
    overridden("the campaign samples", *_config("temperature", "seed")),
    overridden("the campaign samples from the whole distribution", *_config("topP"), asks_nothing=(1,)),
    overridden("the campaign samples from the whole distribution", *_config("topK"), asks_nothing=(-1, 0)),
    overridden("the campaign samples", *_config("presencePenalty", "frequencyPenalty"), asks_nothing=(0,)),
    overridden("a forced choice would mask log-probs", f"{CHOICE}.mode", asks_nothing=("AUTO", "MODE_UNSPECIFIED")),
    overridden("a grammar would mask log-probs", *_config("responseMimeType"), asks_nothing=("text/plain",)),
    overridden("a grammar would mask log-probs", *_config("responseSchema", "responseJsonSchema", "responseFormat")),
    overridden(
        "the chat format decides whether the policy thinks",
        *_config("thinkingConfig.thinkingBudget", "thinkingConfig.thinkingLevel"),
    ),
    ignored("the URL names the model", "model"),
    ignored("it is the system's", "systemInstruction.role"),
    ignored("belongs to `mode`", f"{CHOICE}.allowedFunctionNames"),
    ignored("a call is sent whole", f"{CHOICE}.streamFunctionCallArguments"),
    ignored("a call is sent whole", f"{PART}.functionCall.partialArgs", f"{PART}.functionCall.willContinue"),
    ignored("belongs to tools at the provider", "toolConfig.retrievalConfig"),
    ignored("belongs to tools at the provider", "toolConfig.includeServerSideToolInvocations"),
    ignored("only the provider can read it", f"{PART}.thoughtSignature", f"{PART}.partMetadata"),
    ignored(
        "the client does it",
        *(f"{PART}.functionResponse.willContinue", f"{PART}.functionResponse.scheduling", f"{DECLARATION}.behavior"),
    ),
    ignored("results are read as they come", f"{DECLARATION}.response", f"{DECLARATION}.responseJsonSchema"),
    ignored("nothing is filtered, served, billed or kept", "safetySettings", "labels", "serviceTier", "store"),
    ignored("log-probs are recorded, not sent", *_config("responseLogprobs", "logprobs")),
    ignored("there is one model", *_config("modelSelectionConfig", "routingConfig")),
    ignored("of media, which are refused", *_config("mediaResolution", "audioTimestamp", "enableAffectiveDialog")),
    ignored("of media, which are refused", *_config("audioTranscriptionConfig", "translationConfig")),
    ignored("of media, which are refused", *(f"{PART}.{name}" for name in OF_MEDIA)),
    ignored("the answer is text", *_config("speechConfig", "imageConfig", "enableEnhancedCivicAnswers")),
    refused("only one candidate can be drawn", *_config("candidateCount"), asks_nothing=(1,)),
    refused(WRITES_TEXT, *_config("responseModalities"), asks_nothing=(["TEXT"], ["MODALITY_UNSPECIFIED"])),
    refused(AT_PROVIDER, "cachedContent", "continuationToken"),
    refused(READS_TEXT, f"{PART}.inlineData", f"{PART}.fileData", f"{PART}.functionResponse.parts"),
    refused(READS_TEXT, "systemInstruction.parts[].inlineData", "systemInstruction.parts[].fileData"),
    refused(AT_PROVIDER, f"{PART}.executableCode", f"{PART}.codeExecutionResult"),
    refused(AT_PROVIDER, f"{PART}.toolCall", f"{PART}.toolResponse"),
    TOOLS_AT_PROVIDER,
)


def read_request(body: bytes, *, model: str, stream: bool) -> WireRequest:
    """Read the body of a request to `model`. Raises `WireError`."""
    request = _read(body, model, stream)
    if any("_" in path for path in request.unlisted):
        return _read(spelled_as_json(body, FIELDS), model, stream)
    return request


def _read(body: bytes, model: str, stream: bool, *, is_wrapped: bool = False) -> WireRequest:
    read = _body.read(body)
    request = read.fields
    if wrapped := bytes(request.generate_content_request):
        if is_wrapped:
            raise invalid("a generateContentRequest stands in a generateContentRequest")
        return _read(wrapped, model, stream, is_wrapped=True)
    if not request.contents:
        raise invalid("contents is not specified")
    system, in_system = _system.read(request.system_instruction, "$.systemInstruction")
    messages, in_messages = _messages.read_each(request.contents, "$.contents")
    tools, in_tools = _tools.read(request.tools, "$.tools")
    found = merge_findings((read.found, in_system, in_messages, in_tools))
    refuse(found)
    return WireRequest(
        conversation=Conversation(
            model=model,
            messages=(*system, *_join_replies(chain.from_iterable(messages))),
            tools=tools,
            sampling=_sampling(request),
            stream=stream,
        ),
        fingerprint=read.fingerprint + model.encode(),
        overridden=found.overridden,
        unlisted=found.unlisted,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The request, as far as it is read
# ---------------------------------------------------------------------------------------------------------------------


class _FunctionCall(Struct):
    name: str
    id: str | None = None
    args: dict[str, Any] | None = None


class _FunctionResponse(Struct):
    name: str = ""
    id: str | None = None
    response: dict[str, Any] | None = None


class _Part(Struct, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    function_call: _FunctionCall | None = None
    function_response: _FunctionResponse | None = None


class _Content(Struct):
    parts: list[_Part] | None = None
    role: Literal["user", "model", "function", "tool"] | None = None


class _SystemInstruction(Struct):
    parts: list[_Part] | None = None


class _FunctionDeclaration(Struct, rename="camel"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class _Tool(Struct, rename="camel"):
    function_declarations: list[_FunctionDeclaration] | None = None


class _FunctionCallingConfig(Struct, rename="camel"):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


class _ToolConfig(Struct, rename="camel"):
    function_calling_config: _FunctionCallingConfig | None = None


class _GenerationConfig(Struct, rename="camel"):
    max_output_tokens: TokenLimit | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    stop_sequences: list[str] | None = None


class _Request(Struct, rename="camel"):
    contents: list[Raw] = []
    generate_content_request: Raw = Raw(b"")
    system_instruction: Raw = Raw(b"null")
    tools: Raw = Raw(b"null")
    tool_config: _ToolConfig | None = None
    generation_config: _GenerationConfig | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Request -> Conversation
# ---------------------------------------------------------------------------------------------------------------------


def _system_messages(instruction: _SystemInstruction | None) -> tuple[Message, ...]:
    text = _texts(instruction.parts or () if instruction else ())
    return (Message(role="system", text=text),) if text else ()


def _read_content(content: _Content) -> tuple[Message, ...]:
    parts = content.parts or ()
    if content.role == "model":
        return (_assistant_message(parts),)
    return tuple(_user_messages(parts))


def _assistant_message(parts: Sequence[_Part]) -> Message:
    if any(part.function_response for part in parts):
        raise invalid("a functionResponse stands in a content of the model")
    return Message(
        role="assistant",
        text=_texts(part for part in parts if not part.thought),
        thinking=_texts(part for part in parts if part.thought),
        tool_calls=tuple(_tool_call(part.function_call) for part in parts if part.function_call),
    )


def _user_messages(parts: Sequence[_Part]) -> Iterator[Message]:
    if any(part.function_call for part in parts):
        raise invalid("a functionCall stands in a content of the user")
    return split_at_results(parts, _tool_message, lambda part: part.text or "")


def _texts(parts: Iterable[_Part]) -> str:
    return join_blocks(part.text for part in parts if part.text is not None)


def _tool_call(call: _FunctionCall) -> ToolCall:
    return ToolCall(id=call.id or call.name, name=call.name, arguments=_json_text(call.args or {}))


def _tool_message(part: _Part) -> Message | None:
    response = part.function_response
    if response is None:
        return None
    return Message(role="tool", text=_result(response.response or {}), tool_call_id=response.id or response.name)


def _result(response: Mapping[str, Any]) -> str:
    match response:
        case {"output": str(text)} | {"error": str(text)} if len(response) == 1:
            return text
        case _:
            return _json_text(response)


def _json_text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _join_replies(messages: Iterable[Message]) -> Iterator[Message]:
    last: Message | None = None
    for message in messages:
        if last is not None and last.role == message.role == "assistant":
            message = _join(last, message)
        elif last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def _join(first: Message, second: Message) -> Message:
    return replace(
        first,
        text=join_blocks((first.text, second.text)),
        thinking=join_blocks((first.thinking, second.thinking)),
        tool_calls=first.tool_calls + second.tool_calls,
    )


def _read_tools(tools: list[_Tool] | None) -> tuple[Tool, ...]:
    return tuple(
        Tool(
            name=declaration.name,
            description=declaration.description or "",
            parameters=declaration.parameters_json_schema or _json_schema(declaration.parameters or {}),
        )
        for tool in tools or ()
        for declaration in tool.function_declarations or ()
    )


def _json_schema(schema: Any) -> Any:
    """The API's own dialect shouts the names of types."""
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _schema_value(key, value) for key, value in schema.items()}


def _schema_value(key: str, value: Any) -> Any:
    if key in VALUE_KEYWORDS:
        return value
    if key in NAMED_SCHEMAS and isinstance(value, dict):
        return {name: _json_schema(schema) for name, schema in value.items()}
    return value.lower() if key == "type" and isinstance(value, str) else _json_schema(value)


def _sampling(request: _Request) -> Sampling:
    config = request.generation_config or _GenerationConfig()
    return Sampling(
        max_tokens=config.max_output_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=None if config.top_k is None else min(int(config.top_k), MAX_TOP_K),
        stop=tuple(config.stop_sequences or ()),
        tool_choice=_tool_choice(request.tool_config),
    )


def _tool_choice(config: _ToolConfig | None) -> str:
    choice = config and config.function_calling_config
    match (choice or _FunctionCallingConfig()).mode:
        case "ANY":
            names = choice.allowed_function_names if choice else None
            return f"tool:{names[0]}" if names and len(names) == 1 else "required"
        case "NONE":
            return "none"
        case _:
            return "auto"


# ---------------------------------------------------------------------------------------------------------------------
# The readers
# ---------------------------------------------------------------------------------------------------------------------

_body = BodyReader(_Request, FIELDS, frozenset({"contents", "generateContentRequest", "systemInstruction", "tools"}))
_system = PieceReader(_SystemInstruction | None, _system_messages, FIELDS, "systemInstruction")
_messages = PieceReader(_Content, _read_content, FIELDS, "contents[]")
_tools = PieceReader(list[_Tool] | None, _read_tools, FIELDS, "tools")
