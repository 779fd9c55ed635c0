"""The tables list every field that the official SDKs can send: when a pin moves, this says what is new."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_type_hints

import pytest
from anthropic.types import beta
from anthropic.types.beta.message_create_params import MessageCreateParamsBase
from google.genai import types as gemini
from openai.types import chat, responses
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses import response_input_item_param as items
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel

from clawhpc.wire.anthropic import Anthropic
from clawhpc.wire.base import WireProtocol
from clawhpc.wire.gemini import Gemini
from clawhpc.wire.openai_chat import OpenAIChat
from clawhpc.wire.openai_responses import OpenAIResponses

ANTHROPIC: list[tuple[Any, str]] = [
    (MessageCreateParamsBase, ""),
    (beta.BetaOutputConfigParam, "output_config."),
    (beta.BetaToolChoiceToolParam, "tool_choice."),
    (beta.BetaTextBlockParam, "system[]."),
    (beta.BetaUserMessageParam, "messages[]."),
    (beta.BetaAssistantMessageParam, "messages[]."),
    (beta.BetaSystemMessageParam, "messages[]."),
    (beta.BetaTextBlockParam, "messages[].content[]."),
    (beta.BetaThinkingBlockParam, "messages[].content[]."),
    (beta.BetaRedactedThinkingBlockParam, "messages[].content[]."),
    (beta.BetaToolUseBlockParam, "messages[].content[]."),
    (beta.BetaToolResultBlockParam, "messages[].content[]."),
    (beta.BetaTextBlockParam, "messages[].content[].content[]."),
    (beta.BetaToolReferenceBlockParam, "messages[].content[].content[]."),
    (beta.BetaToolParam, "tools[]."),
]
CHAT: list[tuple[Any, str]] = [
    (CompletionCreateParamsBase, ""),
    (chat.ChatCompletionStreamOptionsParam, "stream_options."),
    (chat.ChatCompletionSystemMessageParam, "messages[]."),
    (chat.ChatCompletionDeveloperMessageParam, "messages[]."),
    (chat.ChatCompletionUserMessageParam, "messages[]."),
    (chat.ChatCompletionAssistantMessageParam, "messages[]."),
    (chat.ChatCompletionToolMessageParam, "messages[]."),
    (chat.ChatCompletionContentPartTextParam, "messages[].content[]."),
    (chat.ChatCompletionContentPartRefusalParam, "messages[].content[]."),
    (chat.ChatCompletionMessageFunctionToolCallParam, "messages[].tool_calls[]."),
    (chat.ChatCompletionFunctionToolParam, "tools[]."),
]
RESPONSES: list[tuple[Any, str]] = [
    (ResponseCreateParamsBase, ""),
    (responses.ResponseTextConfigParam, "text."),
    (responses.EasyInputMessageParam, "input[]."),
    (items.Message, "input[]."),
    (responses.ResponseOutputMessageParam, "input[]."),
    (responses.ResponseReasoningItemParam, "input[]."),
    (responses.ResponseFunctionToolCallParam, "input[]."),
    (items.FunctionCallOutput, "input[]."),
    (responses.ResponseCustomToolCallParam, "input[]."),
    (responses.ResponseCustomToolCallOutputParam, "input[]."),
    (responses.ResponseInputTextParam, "input[].content[]."),
    (responses.ResponseOutputTextParam, "input[].content[]."),
    (responses.ResponseOutputRefusalParam, "input[].content[]."),
    (responses.ResponseInputTextParam, "input[].output[]."),
    (responses.FunctionToolParam, "tools[]."),
    (responses.CustomToolParam, "tools[]."),
    (responses.NamespaceToolParam, "tools[]."),
    (responses.FunctionToolParam, "tools[].tools[]."),
    (responses.CustomToolParam, "tools[].tools[]."),
    (responses.WebSearchToolParam, "tools[]."),
]

GEMINI: list[tuple[Any, str]] = [
    (gemini.GenerationConfig, "generationConfig."),
    (gemini.ThinkingConfig, "generationConfig.thinkingConfig."),
    (gemini.Content, "systemInstruction."),
    (gemini.Content, "contents[]."),
    (gemini.Part, "contents[].parts[]."),
    (gemini.FunctionCall, "contents[].parts[].functionCall."),
    (gemini.FunctionResponse, "contents[].parts[].functionResponse."),
    (gemini.Tool, "tools[]."),
    (gemini.FunctionDeclaration, "tools[].functionDeclarations[]."),
    (gemini.ToolConfig, "toolConfig."),
    (gemini.FunctionCallingConfig, "toolConfig.functionCallingConfig."),
]


@pytest.mark.parametrize(
    ("protocol", "kinds"),
    [(Anthropic(), ANTHROPIC), (OpenAIChat(), CHAT), (OpenAIResponses(), RESPONSES), (Gemini(), GEMINI)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_field_of_the_sdk_is_listed(protocol: WireProtocol, kinds: list[tuple[Any, str]]) -> None:
    paths = {at + name for kind, at in kinds for name in names_of(kind)}
    assert {path for path in paths if not protocol.fields.lists(path)} == set()


def names_of(kind: Any) -> Iterable[str]:
    """As JSON spells them: those of a dictionary, or of a model, which has them as aliases."""
    if issubclass(kind, BaseModel):
        return (field.alias or name for name, field in kind.model_fields.items())
    return get_type_hints(kind)
