"""An endpoint that answers from a script, in its provider's words: for a client's transport, or on a port."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import msgspec

from clawhpc.proxy.settings import EndpointProtocol
from clawhpc.records import Conversation, Reply, Usage
from clawhpc.wire.anthropic import Anthropic
from clawhpc.wire.base import ReplyHead, WireProtocol
from clawhpc.wire.openai_chat import OpenAIChat
from clawhpc.wire.openai_chat_request import ChatForm

MODEL = "large-2026-11"
"""What the endpoint says that it is, whatever it was asked as."""
USAGE = Usage(input_tokens=1000, output_tokens=20, cached_tokens=400)
SIDES: dict[EndpointProtocol, tuple[str, WireProtocol]] = {
    "openai": ("/v1/chat/completions", OpenAIChat()),
    "anthropic": ("/v1/messages", Anthropic()),
}


@dataclass
class Upstream:
    """Fails as it is told, in order; then answers."""

    script: Callable[[Conversation], Reply] = lambda conversation: Reply(text="ok")
    protocol: EndpointProtocol = "openai"
    failures: list[httpx2.Response | Exception] = field(default_factory=list)
    asked: list[Conversation] = field(default_factory=list)
    bodies: list[dict[str, object]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        path, side = SIDES[self.protocol]
        if request.url.path != path:
            return httpx2.Response(404, json={"detail": "Not Found"})
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.bodies.append(msgspec.json.decode(request.content))
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            return failure
        conversation = side.parse_request(request.content).conversation
        self.asked.append(conversation)
        head = ReplyHead(id="0", model=MODEL, created=0, input_tokens=0, form=ChatForm())
        return httpx2.Response(200, json=side.reply_body(head, self.script(conversation), USAGE))


@contextmanager
def listening(upstream: Upstream) -> Iterator[str]:
    """Its base URL, while the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            url = f"http://endpoint{self.path}"
            answer = upstream(httpx2.Request("POST", url, headers=dict(self.headers), content=content))
            self.send_response(answer.status_code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{'/v1' if upstream.protocol == 'openai' else ''}"
        finally:
            server.shutdown()
            thread.join()
