"""Start, throughput, new weights, idleness and memory of the engine: `python -m benchmarks.bench_engine`.

A random policy of the default shape. The requests are those of small rollouts: a prompt of which most is shared, and a
short completion. The engine's processes are watched from outside, in /proc.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import anyio

from clawhpc.engine.client import SamplingParams, VllmEngine
from clawhpc.learner.policy import create_policy
from clawhpc.learner.settings import PolicySettings
from clawhpc.records import PolicyVersion
from clawhpc.serve.server import serve_policy
from clawhpc.serve.settings import EngineSettings
from tests.fakes.chat_tokenizer import write_tokenizer

SHARED = 800
OWN = 30
IDLE_S = 10.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MARKER = f"clawhpc-bench-{os.getpid()}"


def engine_processes() -> list[Path]:
    """Their folders in /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if MARKER.encode() in (folder / "environ").read_bytes():
                found.append(folder)
    return found


def cpu_seconds() -> float:
    """User and system time of the engine so far."""
    stats = (folder.joinpath("stat").read_text().rpartition(")")[2].split() for folder in engine_processes())
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / TICKS_PER_S


def memory_gib() -> float:
    """Resident memory; pages that the processes share count for each."""
    pages = (int(folder.joinpath("statm").read_text().split()[1]) for folder in engine_processes())
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") / (1 << 30)


async def ask(engine: VllmEngine, *, at_once: int, tokens: int) -> None:
    """`at_once` requests, together."""

    async def one(number: int) -> None:
        prompt = [5 + at * 7 % 300 for at in range(SHARED)] + [5 + (at * 11 + number * 13) % 300 for at in range(OWN)]
        await engine.generate(prompt, SamplingParams(max_tokens=tokens, seed=number), request_id=f"bench-{number}")

    async with anyio.create_task_group() as tasks:
        for number in range(at_once):
            tasks.start_soon(one, number)


async def measure(policy: PolicyVersion, settings: EngineSettings, folder: Path, cache: Path) -> None:
    """One engine from start to stop, with its figures printed."""
    clock: Callable[[], float] = time.monotonic
    start = clock()
    async with serve_policy(
        settings,
        policy,
        socket=folder / "e",
        log=folder / "engine.log",
        environment={"CLAWHPC_OWNER": MARKER, "SPT_NOENV": "1"},
        cache_dir=cache,
    ) as server:
        print(f"start              {clock() - start:6.1f} s, {cpu_seconds():.1f} s of CPU, {memory_gib():.2f} GiB")
        for at_once in (1, 12, 12, 32):
            before, start = cpu_seconds(), clock()
            await ask(server.engine, at_once=at_once, tokens=40)
            took, used = clock() - start, cpu_seconds() - before
            print(
                f"{at_once:2d} x 40 tokens     {took:6.2f} s, {at_once * 40 / took:.0f} tokens/s, {used:.2f} s of CPU"
            )
        start = clock()
        await server.load(replace(policy, step=1))
        print(f"new weights        {clock() - start:6.2f} s")
        before = cpu_seconds()
        await anyio.sleep(IDLE_S)
        print(f"idle               {100 * (cpu_seconds() - before) / IDLE_S:6.1f} % of one core")
        start = clock()
    print(f"stop               {clock() - start:6.2f} s")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    settings = EngineSettings(kv_cache_gib=0.25, enforce_eager=not options.compile, cpu_threads=options.threads)
    cache = Path(os.environ.get("CLAWHPC_CACHE", Path.home() / ".cache/clawhpc")) / "vllm"
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        write_tokenizer(folder / "tokenizer")
        policy = create_policy(folder / "policy", folder / "tokenizer", PolicySettings(), seed=0)
        anyio.run(measure, policy, settings, folder, cache)


if __name__ == "__main__":
    main()
