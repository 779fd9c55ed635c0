"""The engine of the benchmark, as a process of its own: one reply to everybody, at once or after a set time.

It speaks what vLLM speaks to those who send ids (`/inference/v1/generate`) and to those who send messages
(`/v1/chat/completions`; with `return_token_ids` and `logprobs`, if these are asked for; streamed, one event for eight tokens). All answers are
written out beforehand and no body is parsed, so that the stub costs next to nothing.

    GET /delay/0.2      answer after 200 ms from now on
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httptools
from tokenizers import Tokenizer

from benchmarks.proxy.policy import ARGUMENTS, SAID, TOOL

MODEL = "policy"
WINDOW = 10**6
BACKLOG = 1024
"""Hundreds connect at once: one that finds asyncio's usual 100 taken waits for seconds, or for ever on a unix socket."""
PROMPT_IDS = ",".join(str(10_000 + 7919 * at % 10_000) for at in range(200_000)).encode()
"""Ids of five digits: `6 * n - 1` bytes are n of them."""
EVENT_TOKENS = 8
"""Of a streamed answer; vLLM sends an event for each token unless `--stream-interval` says otherwise. Kind to relays."""
USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


class Replies:
    """Every answer, ready to be written."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], bytes_per_token: float) -> None:
        self.bytes_per_token = bytes_per_token
        self._texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        self._ids = ids
        self.models = plain({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": WINDOW}]})
        self.generated = plain(self._generated())
        self._bare, self._full = _split(self._chat(full=False)), _split(self._chat(full=True))
        self._bare_events, self._full_events = self._events(full=False), self._events(full=True)

    def chat(self, body: bytes) -> bytes:
        """To a plain request with messages."""
        head, tail = self._full if _asks_for_ids(body) else self._bare
        ids = self._prompt_ids(body) if _asks_for_ids(body) else b"null"
        return response(head + ids + tail)

    def chat_events(self, body: bytes) -> bytes:
        """To a request for a stream: all events, and the end."""
        (head, tail), rest = self._full_events if _asks_for_ids(body) else self._bare_events
        ids = self._prompt_ids(body) if _asks_for_ids(body) else b"null"
        usage = chunk(event({"choices": [], "usage": USAGE})) if b'"include_usage"' in body else b""
        return chunk(head + ids + tail) + rest + usage + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def _prompt_ids(self, body: bytes) -> bytes:
        """As many as the body would have: what the caller has to read, and to keep."""
        return b"[" + PROMPT_IDS[: 6 * int(len(body) / self.bytes_per_token) - 1] + b"]"

    def _generated(self) -> Any:
        content: list[Any] = [
            {"token": f"token_id:{token}", "token_id": token, "logprob": -0.5, "bytes": None, "top_logprobs": []}
            for token in self._ids
        ]
        choice = {
            "index": 0,
            "token_ids": list(self._ids),
            "finish_reason": "stop",
            "logprobs": {"content": content},
            "weight_versions": [{"version": "0", "start": 0, "end": len(self._ids)}],
        }
        return {"request_id": "stub", "choices": [choice], "usage": USAGE, "prompt_logprobs": None}

    def _logprobs(self, texts: Sequence[str]) -> Any:
        return {
            "content": [
                {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": []} for text in texts
            ]
        }

    def _chat(self, *, full: bool) -> Any:
        call = {"id": "call_0", "type": "function", "function": {"name": TOOL, "arguments": json.dumps(ARGUMENTS)}}
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": SAID, "tool_calls": [call]},
            "logprobs": self._logprobs(self._texts) if full else None,
            "finish_reason": "tool_calls",
            "token_ids": list(self._ids) if full else None,
        }
        head = {"id": "chatcmpl-stub", "object": "chat.completion", "created": 1, "model": MODEL}
        return {**head, "choices": [choice], "usage": USAGE, "prompt_token_ids": "IDS"}

    def _events(self, *, full: bool) -> tuple[tuple[bytes, bytes], bytes]:
        """The first event, cut where the prompt's ids go, and the others."""
        starts = range(0, len(self._ids), EVENT_TOKENS)
        chunks = []
        for start, delta in zip(starts, _deltas(len(starts)), strict=True):
            part = slice(start, start + EVENT_TOKENS)
            more: Any = {"logprobs": None}
            if full:
                more = {"logprobs": self._logprobs(self._texts[part]), "token_ids": self._ids[part]}
            reason = "tool_calls" if start == starts[-1] else None
            chunks.append(chunk(event({"choices": [{"index": 0, "delta": delta, **more, "finish_reason": reason}]})))
        first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": "IDS"}
        head, tail = _split_bytes(event(first))
        return (head, tail), b"".join(chunks)


def _deltas(number: int) -> list[Any]:
    """What each event adds to the message: a third of them its text, the others the arguments of its call."""
    num_texts = number // 3
    deltas: list[Any] = [{"content": part} for part in _cut(SAID, num_texts)]
    for at, part in enumerate(_cut(json.dumps(ARGUMENTS), number - num_texts)):
        named = {} if at else {"id": "call_0", "type": "function"}
        function = {"arguments": part} if at else {"name": TOOL, "arguments": part}
        deltas.append({"tool_calls": [{"index": 0, **named, "function": function}]})
    return deltas


def _cut(text: str, number: int) -> list[str]:
    """Pieces of about the same length."""
    return [text[len(text) * at // number : len(text) * (at + 1) // number] for at in range(number)]


def event(body: Any) -> bytes:
    """A chunk of a chat completion as a server-sent event."""
    head = {"id": "chatcmpl-stub", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + json.dumps({**head, **body}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    """One piece of a body of unknown length."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def plain(body: Any) -> bytes:
    """A whole HTTP response."""
    return response(json.dumps(body).encode())


def response(body: bytes) -> bytes:
    """See `plain`."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def _split(body: Any) -> tuple[bytes, bytes]:
    return _split_bytes(json.dumps(body).encode())


def _split_bytes(data: bytes) -> tuple[bytes, bytes]:
    head, _, tail = data.partition(b'"IDS"')
    return head, tail


def _asks_for_ids(body: bytes) -> bool:
    return b'"return_token_ids": true' in body or b'"return_token_ids":true' in body


class Connection(asyncio.Protocol):
    """One connection; requests come one after the other."""

    delay_s = 0.0
    """Shared by all connections."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", bytearray()

    def connection_made(self, transport: Any) -> None:
        """Keep the way back."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Part of a request."""
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        """A request begins."""
        self._path, self._body = url, bytearray()

    def on_body(self, data: bytes) -> None:
        """Part of its body."""
        self._body += data

    def on_message_complete(self) -> None:
        """Answer, now or later. The head of a stream goes out at once, as vLLM's does."""
        answer, draws = self._answer(self._path.partition(b"?")[0], bytes(self._body))
        if draws and self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, self._transport.write, answer)
        else:
            self._transport.write(answer)

    def _answer(self, path: bytes, body: bytes) -> tuple[bytes, bool]:
        if path == b"/inference/v1/generate":
            return self._replies.generated, True
        if path == b"/v1/chat/completions":
            if b'"stream": true' not in body and b'"stream":true' not in body:
                return self._replies.chat(body), True
            self._transport.write(STREAM_HEAD)
            return self._replies.chat_events(body), True
        if path.startswith(b"/delay/"):
            Connection.delay_s = float(path.removeprefix(b"/delay/"))
        return (self._replies.models if path == b"/v1/models" else plain({})), False


async def serve(folder: Path, socket: Path, replies: Replies) -> None:
    """On a unix socket and on a port of the loopback interface, whose number is printed; until killed."""
    loop = asyncio.get_running_loop()
    await loop.create_unix_server(lambda: Connection(replies), str(socket), backlog=BACKLOG)
    server = await loop.create_server(lambda: Connection(replies), "127.0.0.1", 0, backlog=BACKLOG)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


def main() -> None:
    """Read the policy, serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("socket", type=Path)
    parser.add_argument("bytes_per_token", type=float)
    parser.add_argument("reply_ids", type=json.loads)
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(given.folder / "tokenizer.json"))
    asyncio.run(serve(given.folder, given.socket, Replies(tokenizer, given.reply_ids, given.bytes_per_token)))


if __name__ == "__main__":
    main()
