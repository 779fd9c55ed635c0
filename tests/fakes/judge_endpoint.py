"""A Chat Completions endpoint on the loopback that says what a test has written for it, and keeps what it was asked;
and a judge that asks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import msgspec

from clawhpc.records import Criterion, Judgement, Rubric
from clawhpc.verify.judge import open_judge
from clawhpc.verify.prompt import Case
from clawhpc.verify.settings import JudgeModel, JudgeSettings

RUBRIC = Rubric(
    criteria=(
        Criterion(name="right", text="The report names the cause.", weight=3.0),
        Criterion(name="short", text="The report has at most ten lines."),
    ),
    expected="Reads the log, writes report.md.",
)


@dataclass(frozen=True)
class Answer:
    """One answer; `body` that is not bytes is written as JSON."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0


@dataclass
class Request:
    """One request that came."""

    path: str
    headers: dict[str, str]
    body: Any

    @property
    def system(self) -> str:
        return self.body["messages"][0]["content"]

    @property
    def user(self) -> str:
        return self.body["messages"][1]["content"]


Says = Callable[[Request], Answer]


@dataclass
class JudgeEndpoint:
    """What it will say, one after the other; the last one again and again."""

    script: list[Answer | Says]
    url: str = ""
    requests: list[Request] = field(default_factory=list)

    def answer(self, request: Request) -> Answer:
        says = self.script[min(len(self.requests), len(self.script) - 1)]
        self.requests.append(request)
        return says(request) if callable(says) else says

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
                body = await reader.readexactly(int(headers["content-length"]))
                answer = self.answer(Request(head[0].split()[1], headers, msgspec.json.decode(body)))
                await anyio.sleep(answer.after_s)
                writer.write(_response(answer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def _response(answer: Answer) -> bytes:
    content = answer.body if isinstance(answer.body, bytes) else msgspec.json.encode(answer.body)
    lines = [f"HTTP/1.1 {answer.status} X", f"content-length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


@asynccontextmanager
async def judge_endpoint(*script: Answer | Says) -> AsyncIterator[JudgeEndpoint]:
    endpoint = JudgeEndpoint(list(script))
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0, limit=1 << 20)
    endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield endpoint
    finally:
        server.close()


def completion(
    content: str | None, *, finish: str = "stop", usage: tuple[int, int] | None = (100, 20), **more: Any
) -> Answer:
    """A chat completion that says `content`."""
    message = {"role": "assistant", "content": content, **more}
    counts = {} if usage is None else {"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}
    return Answer({"id": "1", "choices": [{"index": 0, "message": message, "finish_reason": finish}], **counts})


def scores(*values: float, reason: str = "so") -> str:
    """What a judge says that gives these scores."""
    answer = {f"c{number}": {"reason": reason, "score": value} for number, value in enumerate(values, 1)}
    return msgspec.json.encode(answer).decode()


def verdict(*values: float) -> Answer:
    return completion(scores(*values))


def failure(status: int, message: str = "no", **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer({"error": {"message": message}}, status=status, headers=named)


# ---- a judge that asks it --------------------------------------------------------------------------------------------

CASE = Case(rubric=RUBRIC, instruction="Find the cause.", workspace=('{"path": "report.md", "text": "It was DNS."}',))
FAST = JudgeSettings(request_s=5.0, backoff_s=0.0)
GOOD = verdict(1.0, 0.5)
"""0.875 by the weights 3 and 1."""


@asynccontextmanager
async def asking(
    *script: Answer | Says,
    key: str | None = None,
    models: int = 1,
    settings: JudgeSettings = FAST,
    case: Case = CASE,
    **model: Any,
) -> AsyncIterator[tuple[JudgeEndpoint, Any]]:
    """A scripted endpoint, and what asks its judge about the case."""
    async with judge_endpoint(*script) as endpoint:
        env = None if key is None else "JUDGE_KEY"
        named = {
            name: JudgeModel(name=name, base_url=endpoint.url, api_key_env=env, **model)
            for name in (f"judge-{number}" for number in range(models))
        }
        async with open_judge(replace(settings, models=named), {"JUDGE_KEY": key or ""}) as judge:

            async def ask(timeout_s: float = 10.0) -> Judgement:
                assert judge is not None
                return await judge.judge(case, timeout_s=timeout_s)

            yield endpoint, ask


async def judged(*script: Answer | Says, timeout_s: float = 10.0, **more: Any) -> Judgement:
    async with asking(*script, **more) as (_, ask):
        return await ask(timeout_s)
