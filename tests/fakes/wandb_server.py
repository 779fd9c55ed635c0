"""A Weights & Biases server on loopback: it takes whatever runs it is sent, and keeps their rows.

It knows as much of GraphQL and of the file stream as `wandb sync` asks for, and notes what it does not know.
"""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0" * 40
"""Of anyone: it checks no key."""
STREAM = re.compile(r"/files/(?P<entity>[^/]+)/(?P<project>[^/]+)/(?P<run>[^/]+)/file_stream")


@dataclass
class WandbServer:
    """What it was sent."""

    url: str
    names: dict[str, str] = field(default_factory=dict)
    """Run id -> its name."""
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    """Run id -> its history."""
    files: set[str] = field(default_factory=set)
    """Paths of those that came whole."""
    unknown: list[str] = field(default_factory=list)
    """What was asked, and has no answer."""

    def answer(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of the GraphQL query `name`."""
        match name:
            case "RunResumeStatus":
                return {"model": {"id": "1", "name": "clawhpc", "bucket": self._resume(variables["name"])}}
            case "UpsertBucket":
                return {"upsertBucket": {"bucket": self._upsert(variables), "inserted": True}}
            case "CreateRunFiles":
                files = [{"name": file, "uploadUrl": f"{self.url}/put/{file}"} for file in variables["files"]]
                return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
        self.unknown.append(name)
        return {}

    def stream(self, run: str, sent: dict[str, Any]) -> None:
        """Lines of a run's files, from an offset on."""
        history = sent.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
        for number, line in enumerate(history["content"], history["offset"]):
            self.rows[run][number:] = [json.loads(line)]

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = variables["name"]
        self.names[run] = variables["displayName"] or self.names[run]
        project = {"id": "1", "name": variables["project"], "entity": {"id": "1", "name": "someone"}}
        return {"id": run, "name": run, "displayName": self.names[run], "config": "{}", "project": project}

    def _resume(self, run: str) -> dict[str, Any] | None:
        """What it has of a run; None where it has none."""
        if run not in self.names:
            return None
        tail = json.dumps([json.dumps(row) for row in self.rows[run][-1:]])
        counts = {"historyLineCount": len(self.rows[run]), "eventsLineCount": 0, "logLineCount": 0}
        texts = {"historyTail": tail, "eventsTail": "[]", "config": "{}", "summaryMetrics": "{}"}
        return {"id": run, "name": run, "displayName": self.names[run], "wandbConfig": '{"t": 1}', **counts, **texts}


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """Serves within the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if match := STREAM.fullmatch(self.path):
                server.stream(match["run"], body)
                self._reply(200, {})
            elif self.path == "/graphql":
                name = body["query"].split()[1].partition("(")[0]
                self._reply(200, {"data": server.answer(name, body.get("variables") or {})})
            else:
                server.unknown.append(self.path)
                self._reply(404, {})

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            server.files.add(self.path.removeprefix("/put/"))
            self._reply(200, {})

        def _reply(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            print(f"wandb server: {format % args}")

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server = WandbServer(url=f"http://127.0.0.1:{http.server_address[1]}")
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
