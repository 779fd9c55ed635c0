"""What every protocol bounds or mends alike, in requests as harnesses send them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clawhpc.wire.base import ErrorKind, WireError, WireProtocol
from clawhpc.wire.gemini import Gemini
from clawhpc.wire.protocols import PROTOCOLS
from tests.fakes.mangle import REQUESTS, encode

HALF = "\ud83d"
"""Of an emoji, which JavaScript writes as an escape."""
TOKEN_LIMITS = {
    "anthropic": "max_tokens",
    "openai_chat": "max_completion_tokens",
    "openai_responses": "max_output_tokens",
    "gemini": "generation_config",
}
each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)


@each_protocol
def test_a_text_that_was_cut_in_the_middle_of_an_emoji_is_read(protocol: WireProtocol) -> None:
    whole = encode(REQUESTS[protocol.name])
    cut = whole.replace(b"Read it.", encode(f"Read it {HALF}")[1:-1]).replace(b"Be brief.", encode(f"Be {HALF}!")[1:-1])
    texts = [message.text for message in protocol.parse_request(cut).conversation.messages[:2]]
    assert texts == ["Be \ufffd!", "Read it \ufffd"]
    assert protocol.parse_request(cut).fingerprint != protocol.parse_request(whole).fingerprint


@each_protocol
@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_no_tokens_is_refused(protocol: WireProtocol, limit: int) -> None:
    asked: Any = {"maxOutputTokens": limit} if isinstance(protocol, Gemini) else limit
    with pytest.raises(WireError, match=r"Expected `int` >= 1") as caught:
        protocol.parse_request(encode({**REQUESTS[protocol.name], TOKEN_LIMITS[protocol.name]: asked}))
    assert caught.value.kind is ErrorKind.INVALID


@each_protocol
@pytest.mark.parametrize("depth", [150, 500, 900])
@pytest.mark.parametrize("ends", [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
def test_values_that_are_nested_too_deeply_are_refused_wherever_they_stand(
    protocol: WireProtocol, depth: int, ends: tuple[str, str]
) -> None:
    """In schemas, in arguments, in fields that nobody knows."""
    deep = ends[0] * depth + "1" + ends[1] * depth
    whole = json.dumps({**REQUESTS[protocol.name], "metadata": "here"})
    for place in ('"here"', '{"type": "string"}', '{"list": [1, null, "\\u00e9"]}'):
        if place in whole:
            with pytest.raises(WireError) as caught:
                protocol.parse_request(whole.replace(place, deep).encode())
            assert caught.value.kind is ErrorKind.INVALID


def test_a_request_of_gemini_is_unwrapped_once() -> None:
    request = json.dumps(REQUESTS["gemini"])
    for _ in range(2):
        request = '{"generateContentRequest": ' + request + "}"
    with pytest.raises(WireError, match="stands in a generateContentRequest"):
        Gemini().parse_request(request.encode())
    for depth in (200, 800):
        with pytest.raises(WireError):
            Gemini().parse_request(('{"generateContentRequest":' * depth + request + "}" * depth).encode())
