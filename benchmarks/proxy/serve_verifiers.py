"""verifiers' interception server with its training client, which records ids and log-probs. Runs in its own environment.

The same commands as in serve_clawhpc.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack

import verifiers.v1 as vf
from renderers import Qwen3RendererConfig
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask


def new_session(context: ModelContext) -> RolloutSession:
    """As a rollout makes it, without hooks and limits."""
    task = TraceTask(type="Task", data=TaskData(prompt="benchmark"))
    return RolloutSession(ctx=context, trace=Trace(task=task, agent=AgentInfo(config=vf.AgentConfig())))


def records(sessions: list[RolloutSession]) -> dict[str, int]:
    """How many calls are recorded, and how many of them with as many log-probs as sampled ids."""
    nodes = [node for session in sessions for node in session.trace.nodes if node.sampled]
    calls = sum(len(session.trace.calls) for session in sessions)
    return {"calls": calls, "complete": sum(0 < len(node.logprobs) <= len(node.token_ids) for node in nodes)}


async def serve(folder: str, engine_port: int) -> None:
    """Until standard input ends."""
    client = TrainClientConfig(
        base_url=f"http://127.0.0.1:{engine_port}/v1",
        api_key_var="NO_KEY",
        renderer=Qwen3RendererConfig(enable_thinking=False),
        renderer_model_name=folder,
    )
    context = ModelContext(model="policy", client=client)
    async with InterceptionServer() as server, AsyncExitStack() as stack:
        sessions: list[RolloutSession] = []
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            if command is None:
                print(json.dumps(records(sessions)), flush=True)
                continue
            await stack.aclose()
            sessions = [new_session(context) for _ in range(command)]
            slots = [await stack.enter_async_context(server.acquire(session)) for session in sessions]
            endpoints = [
                {
                    "port": server.port,
                    "path": "/v1/chat/completions",
                    "headers": {"authorization": f"Bearer {secret}"},
                }
                for _, secret, _ in slots
            ]
            print(json.dumps(endpoints), flush=True)


def main() -> None:
    """Read the arguments, serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("engine_port", type=int)
    asyncio.run(serve(*vars(parser.parse_args()).values()))


if __name__ == "__main__":
    main()
