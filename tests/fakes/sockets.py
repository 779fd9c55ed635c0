"""HTTP by hand, for what a well-behaved client would not send or would not survive."""

from __future__ import annotations

import anyio
from anyio.abc import ByteReceiveStream


def http_request(path: str, body: bytes, *, length: int | None = None) -> bytes:
    """A POST, which may promise a longer body than it has."""
    head = f"POST {path} HTTP/1.1\r\nhost: proxy\r\ncontent-length: {len(body) if length is None else length}\r\n\r\n"
    return head.encode() + body


async def read_to_the_end(stream: ByteReceiveStream) -> bytes:
    """What comes before the other side hangs up, whichever way."""
    received = b""
    try:
        while True:
            received += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return received
