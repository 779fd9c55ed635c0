"""In place of `serve_policy`: engines that hold a policy, draw one token, and die or hang when they are told to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio

from clawhpc.engine.client import EngineLost, SamplingParams
from clawhpc.errors import ClawError, EngineError
from clawhpc.records import Generation, PolicyVersion
from clawhpc.serve.settings import EngineSettings
from tests.fakes.engine import draw


@dataclass
class FakeServer:
    """Holds one policy, draws one token, and dies when it is told to."""

    policy_step: int
    alive: bool = True
    well: bool = True
    cpu_s: float = 2.0

    loads: bool = True
    num_copies: int = 1
    asked: list[int] = field(default_factory=list)
    """Copies, one for each draw."""
    hanging: set[int] = field(default_factory=set)
    """Copies that draw nothing any more."""

    @property
    def engine(self) -> FakeServer:
        return self

    @property
    def engines(self) -> list[FakeCopy]:
        return [FakeCopy(self, rank) for rank in range(self.num_copies)]

    async def load(self, policy: PolicyVersion) -> None:
        if not self.loads:
            raise EngineLost("it was killed in the middle")
        self.policy_step = policy.step

    async def recover(self) -> None:
        if not self.well:
            raise EngineLost("it answers 503")


@dataclass
class FakeCopy:
    """One copy of its policy."""

    server: FakeServer
    rank: int

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str) -> Generation:
        if not self.server.alive:
            raise EngineLost("the engine is gone")
        self.server.asked.append(self.rank)
        return draw(tuple(prompt_ids), (self.server.policy_step,), 1)

    async def check_drawing(self, *, within_s: float) -> None:
        if self.rank in self.server.hanging:
            raise EngineError(f"the engine hangs: no token within {within_s:g} s")


@dataclass
class FakeServe:
    """In place of `serve_policy`: remembers the servers that it started."""

    servers: list[FakeServer] = field(default_factory=list)
    open: int = 0
    """Servers of which something is left."""
    gate: anyio.Event | None = None
    """Starts wait for it."""
    num_failures: int = 0
    """So many of the next starts fail."""
    failure: ClawError = field(default_factory=lambda: EngineError("it did not start"))

    @asynccontextmanager
    async def __call__(self, settings: EngineSettings, policy: PolicyVersion, **rest: Any) -> AsyncIterator[FakeServer]:
        assert self.open == 0, "two engines at once"
        self.open += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.num_failures:
                self.num_failures -= 1
                raise self.failure
            self.servers.append(FakeServer(policy.step, num_copies=settings.data_parallel_size))
            yield self.servers[-1]
        finally:
            self.open -= 1
