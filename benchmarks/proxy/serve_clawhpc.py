"""Our proxy, as a process of its own, as a worker runs it: sessions on unix sockets, one event loop, one renderer.

Reads commands from standard input, one JSON value a line, and answers each with one: a number opens so many new
sessions, after the earlier ones were closed, and gives their endpoints; `null` says what the open ones have recorded.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from benchmarks.proxy.stub import WINDOW
from clawhpc.engine.client import VllmEngine
from clawhpc.engine.render import ChatRenderer
from clawhpc.proxy.app import open_session
from clawhpc.proxy.respond import PolicyResponder, PolicySampling
from clawhpc.proxy.session import Session
from clawhpc.records import CallRole, Conversation, Limits


def classify(headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
    """Every call is the main loop's."""
    return CallRole.MAIN, {}


async def serve(folder: Path, engine_socket: Path, sockets: Path, num_token_ids: int) -> None:
    """Until standard input ends."""
    numbers = itertools.count()
    engine = VllmEngine(engine_socket, max_model_len=WINDOW, num_token_ids=num_token_ids)
    responder = PolicyResponder(
        engine=engine,
        renderer=ChatRenderer(folder, renderer="qwen3", thinking=False),
        sampling=PolicySampling(context_window=WINDOW),
    )
    gc.freeze()  # as a worker does
    async with engine, AsyncExitStack() as stack:
        sessions: list[Session] = []
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            command = json.loads(line)
            if command is None:
                answer(records(sessions))
                continue
            await stack.aclose()
            paths = [sockets / f"{next(numbers)}.sock" for _ in range(command)]
            sessions = [await stack.enter_async_context(new_session(responder, path)) for path in paths]
            answer(
                [
                    {"socket": str(path), "path": f"{session.base_path}/v1/chat/completions"}
                    for path, session in zip(paths, sessions, strict=True)
                ]
            )


def new_session(responder: PolicyResponder, socket: Path) -> Any:
    """Without bounds that a benchmark could meet."""
    limits = Limits(max_calls=10**6, max_sampled_tokens=10**9)
    return open_session(responder=responder, classify=classify, limits=limits, seed=0, socket=socket, model="policy")


def records(sessions: list[Session]) -> dict[str, Any]:
    """Over all open sessions; sizes are those of the first."""
    calls = [call for session in sessions for call in session.calls()]
    tokens = [call.tokens for call in calls if call.tokens is not None]
    first = sessions[0].calls()
    return {
        "calls": len(calls),
        "complete": sum(call.tokens is not None and call.delivered for call in calls),
        "reencoded": sum(each.reencoded_replies for each in tokens),
        "conversations": len({id(session) for session in sessions}),
        "roots": sum(call.continues_id is None for call in calls),
        "record_bytes": [len(msgspec.json.encode(call)) for call in first],
        "stored_ids": [len(call.tokens.suffix_ids) + len(call.tokens.completion_ids) for call in first if call.tokens],
        "prompt_ids": [call.usage.input_tokens for call in first],
    }


def answer(value: object) -> None:
    """One line."""
    print(json.dumps(value), flush=True)


def main() -> None:
    """Read the arguments, serve."""
    parser = argparse.ArgumentParser()
    for name in ("folder", "engine_socket", "sockets"):
        parser.add_argument(name, type=Path)
    parser.add_argument("num_token_ids", type=int)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in a worker
    anyio.run(serve, *vars(parser.parse_args()).values())


if __name__ == "__main__":
    main()
