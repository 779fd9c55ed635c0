"""What we send validates against the types of the official SDKs."""

from __future__ import annotations

import json

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from google.genai.types import FinishReason, GenerateContentResponse, ListModelsResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from clawhpc.wire.anthropic import Anthropic
from clawhpc.wire.gemini import Gemini
from clawhpc.wire.openai_chat import OpenAIChat
from tests.contract.wire_streams import HEAD, REPLIES, USAGE, render_streams


def data_of(stream: bytes) -> list[str]:
    lines = stream.decode().split("\n")
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("name", REPLIES)
def test_plain_bodies_are_those_of_the_sdks(name: str) -> None:
    message = Message.model_validate(Anthropic().reply_body(HEAD, REPLIES[name], USAGE))
    assert message.stop_reason is not None
    completion = ChatCompletion.model_validate(OpenAIChat().reply_body(HEAD, REPLIES[name], USAGE))
    assert completion.usage is not None
    response = GenerateContentResponse.model_validate(Gemini().reply_body(HEAD, REPLIES[name], USAGE))
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
