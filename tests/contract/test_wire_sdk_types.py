"""What we send validates against the types of the official SDKs."""

from __future__ import annotations

import json

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from google.genai.types import FinishReason, GenerateContentResponse, ListModelsResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from clawhpc.wire.anthropic import Anthropic
from clawhpc.wire.base import ContextOverflow, Json, WireProtocol
from clawhpc.wire.gemini import Gemini
from clawhpc.wire.openai_chat import OpenAIChat
from clawhpc.wire.openai_responses import OpenAIResponses
from tests.contract.wire_streams import REPLIES, USAGE, head_of, render_streams


def data_of(stream: bytes) -> list[str]:
    lines = stream.decode().split("\n")
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def body_of(protocol: WireProtocol, name: str) -> Json:
    return protocol.reply_body(head_of(protocol), REPLIES[name], USAGE)


@pytest.mark.parametrize("name", REPLIES)
def test_plain_bodies_are_those_of_the_sdks(name: str) -> None:
    message = Message.model_validate(body_of(Anthropic(), name))
    assert message.stop_reason is not None
    completion = ChatCompletion.model_validate(body_of(OpenAIChat(), name))
    assert completion.usage is not None
    response = GenerateContentResponse.model_validate(body_of(Gemini(), name))
    assert response.candidates is not None
    assert response.candidates[0].finish_reason in (FinishReason.STOP, FinishReason.MAX_TOKENS)


@pytest.mark.parametrize("name", REPLIES)
def test_events_are_those_of_the_sdks(name: str) -> None:
    event_type: TypeAdapter[object] = TypeAdapter(RawMessageStreamEvent)
    for data in data_of(render_streams(Anthropic())[name]):
        if json.loads(data) != {"type": "ping"}:  # documented, but not in the SDK's union
            event_type.validate_json(data)
    for data in data_of(render_streams(OpenAIChat())[name])[:-1]:
        ChatCompletionChunk.model_validate_json(data)
    for data in data_of(render_streams(Gemini())[name]):
        GenerateContentResponse.model_validate_json(data)


def test_the_list_of_models_is_that_of_the_sdk() -> None:
    body = Gemini().models_body("policy")
    for model in body["models"]:
        model["supportedActions"] = model.pop("supportedGenerationMethods")  # the SDK renames it
    (model,) = ListModelsResponse.model_validate(body).models or ()
    assert model.name == "models/policy"


@pytest.mark.parametrize("name", REPLIES)
def test_responses_are_those_of_the_sdk(name: str) -> None:
    response = Response.model_validate(body_of(OpenAIResponses(), name))
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == USAGE.cached_tokens
    kinds = {"message": "ResponseOutputMessage", "reasoning": "ResponseReasoningItem"}
    kinds |= {"function_call": "ResponseFunctionToolCall", "custom_tool_call": "ResponseCustomToolCall"}
    for item in response.output:
        assert type(item).__name__ == kinds[item.type]


@pytest.mark.parametrize("name", [*REPLIES, "engine_error"])
def test_events_of_a_response_are_those_of_the_sdk_and_numbered(name: str) -> None:
    event_type: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    events = [event_type.validate_json(data) for data in data_of(render_streams(OpenAIResponses())[name])]
    keep_alive = events.pop(2)
    assert keep_alive == events[1], "a keep-alive is the event before it once more"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type in ("response.completed", "response.incomplete", "response.failed")


def test_an_overflow_in_a_stream_of_responses_has_the_code_that_codex_knows() -> None:
    """The SDK's type does not list it, the API sends it all the same."""
    protocol = OpenAIResponses()
    event = json.loads(data_of(protocol.error_event(head_of(protocol), ContextOverflow(9000, 8192)))[0])
    assert event["response"]["error"]["code"] == "context_length_exceeded"
    assert event["response"]["status"] == "failed"
