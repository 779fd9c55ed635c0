"""What the proxy costs, beside that of other proxies for training.

    python -m benchmarks.proxy                 # everything, about twenty minutes on two cores that nobody else uses
    python -m benchmarks.proxy --quick         # a minute, for a first look
    python -m benchmarks.proxy --write         # and docs/results/proxy.md, proxy.png
    python -m benchmarks.proxy --only-write    # these, from the last run's figures

Peers are installed into environments of their own, from the pins in benchmarks/peers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.proxy.growth import measure_growth
from benchmarks.proxy.lanes import PEERS, Lane, Setting, start_ours, start_stub
from benchmarks.proxy.machine import Neighbours
from benchmarks.proxy.measure import Bench, Budget, CellFigures
from benchmarks.proxy.page import Results, cell_rows, write_page
from benchmarks.proxy.policy import source_text, write_policy

FULL = Budget(sessions=(1, 16, 64, 256), history_tokens=(1_000, 20_000, 60_000), repeats=5)
QUICK = Budget(sessions=(1, 16), history_tokens=(20_000,), repeats=1)
GROWTH = {"turns": 128, "repeats": 3}
QUICK_GROWTH = {"turns": 32, "repeats": 1}
JSON_THRIFT = 0.91
"""Bytes per token of a request, to those of the text in it: JSON and schemas take more tokens."""
VERSIONED = ("clawhpc", "renderers", "tokenizers", "uvicorn", "starlette", "httpx2", "msgspec")


async def run(budget: Budget, growth: dict[str, int], peers: Path, chosen: Sequence[str]) -> Results:
    """Start all lanes, measure, stop them."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        policy = write_policy(folder / "policy")
        stub = await stack.enter_async_context(start_stub(folder, policy))
        setting = Setting(
            folder=folder, policy=policy, engine_socket=folder / "engine.sock", engine_port=stub.port, peers=peers
        )
        started = [await start_ours(setting, stack)]
        absent: dict[str, str] = {}
        for name in chosen:
            await start(name, PEERS[name](setting, stack), started, absent, folder)
        bench = Bench(stub, started, source_text(), JSON_THRIFT * policy.bytes_per_token)
        neighbours = Neighbours(bench.lanes)
        print(f"one session of {growth['turns']} turns", flush=True)
        grown = await measure_growth(bench, **growth)
        cells: list[CellFigures] = []
        for sessions in budget.sessions:
            for history_tokens in budget.history_tokens:
                async for figures in bench.measure(budget.cells(sessions, history_tokens)):
                    cells.append(figures)
                    print("\n".join(cell_rows(figures)), flush=True)
        return Results(
            date=datetime.now(UTC).date().isoformat(),
            machine=neighbours.machine(),
            versions=[*(f"{name} {version(name)}" for name in VERSIONED), *(f"{name} {pin(name)}" for name in chosen)],
            records={lane.name: lane.records for lane in bench.lanes},
            absent=absent,
            recorded={name: dict(counts) for name, counts in bench.recorded.items()},
            memory_mib={lane.name: lane.process.memory_mib() for lane in bench.lanes},
            cells=cells,
            growth=grown,
        )


async def start(
    name: str, starting: Awaitable[Lane], started: list[Lane], absent: dict[str, str], folder: Path
) -> None:
    """Add the peer to `started`, or to `absent`, with the reason."""
    print(f"starting {name}", flush=True)
    try:
        started.append(await starting)
    except (OSError, RuntimeError, TimeoutError, ValueError) as error:
        log = folder / f"{name}.log"
        said = log.read_text(errors="replace").strip().splitlines()[-3:] if log.exists() else []
        absent[name] = " / ".join([f"{type(error).__name__}: {error}", *said])
        print(f"{name} does not run: {absent[name]}", flush=True)


def pin(name: str) -> str:
    """The version of a peer."""
    lines = (Path(__file__).parents[1] / "peers" / f"{name}.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{name}=="))


def parse_arguments() -> Any:
    """See the module's docstring."""
    cache = Path(os.environ.get("CLAWHPC_CACHE", Path.home() / ".cache/clawhpc"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute")
    parser.add_argument("--sessions", type=int, nargs="+", help=f"instead of {FULL.sessions}")
    parser.add_argument("--history-tokens", type=int, nargs="+", help=f"instead of {FULL.history_tokens}")
    parser.add_argument("--write", action="store_true", help="write the page and the plot")
    parser.add_argument("--only-write", action="store_true", help="write them from the last run's figures")
    parser.add_argument("--figures", type=Path, default=Path("runs/proxy_benchmark.json"), help="where figures go")
    parser.add_argument("--peers-dir", type=Path, default=cache / "peers", help="where peers are installed")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="which are measured")
    return parser.parse_args()


def main() -> None:
    """Run, keep the figures, print, write."""
    given = parse_arguments()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # five lanes of 256 connections
    if not given.only_write:
        budget, growth = (QUICK, QUICK_GROWTH) if given.quick else (FULL, GROWTH)
        budget = replace(
            budget,
            sessions=given.sessions or budget.sessions,
            history_tokens=given.history_tokens or budget.history_tokens,
        )
        results = asyncio.run(run(budget, growth, given.peers_dir, given.peers))
        given.figures.parent.mkdir(parents=True, exist_ok=True)
        given.figures.write_bytes(msgspec.json.encode(results))
    results = msgspec.json.decode(given.figures.read_bytes(), type=Results)
    write_page(results, publish=given.write or given.only_write)


if __name__ == "__main__":
    main()
