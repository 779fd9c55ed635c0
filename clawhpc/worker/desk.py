"""Who answers the calls of a worker's rollouts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from clawhpc.engine.client import Engine, EngineLost, SamplingParams
from clawhpc.engine.render import ChatRenderer
from clawhpc.errors import ClawError, EngineError, HostError, UserError
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.proxy.respond import PolicyResponder, PolicySampling, Responder, ScriptedResponder
from clawhpc.records import Generation, GroupPlan, PolicyVersion, StepPlan
from clawhpc.serve.server import PolicyServer, serve_policy
from clawhpc.store import read_policy
from clawhpc.tasks.oracle import oracle_reply, task_solution
from clawhpc.worker.settings import WorkerSpec

log = logging.getLogger(__name__)

SEEN_S = 120.0
"""For what another host has written to be seen here; NFS may look away for a minute."""
HANG_S = 30.0
"""Without one token in all that time, an engine that says that it is well hangs."""


class Desk(Protocol):
    """What a worker asks for."""

    @property
    def engine_cpu_s(self) -> float:
        """CPU seconds of the engine so far."""
        ...

    async def make_ready(self, plan: StepPlan) -> None:
        """The calls of `plan`'s rollouts can be answered. Raises UserError, EngineError or HostError when not."""
        ...

    async def recover(self) -> None:
        """Return when calls can be answered again, after one that was not. Raises as `make_ready`."""
        ...

    def responder(self, plan: StepPlan, group: GroupPlan) -> Responder:
        """The answers to the calls of one group's rollouts."""
        ...


@dataclass(eq=False)
class HeldEngine:
    """One engine from its start to its end, in a task of its own: who waits for it and is cancelled leaves it alone."""

    server: PolicyServer | None = None
    """None before it is up and after it is gone."""
    came_up: bool = False
    error: ClawError | None = None
    """Why it did not come up, or did not end well."""
    ready: anyio.Event = field(default_factory=anyio.Event)
    """Set when it is up, or did not come up."""
    unwanted: anyio.Event = field(default_factory=anyio.Event)
    gone: anyio.Event = field(default_factory=anyio.Event)
    """Set when nothing is left of it."""

    async def hold(self, serving: AbstractAsyncContextManager[PolicyServer], note: Callable[[bool], None]) -> None:
        """Keep it until it is unwanted. `note` learns whether it came up before those who wait for it do."""
        try:
            async with serving as self.server:
                self.came_up = True
                note(True)
                self.ready.set()
                await self.unwanted.wait()
        except ClawError as error:
            self.error = error
            if not self.came_up:
                note(False)
        finally:
            self.server = None
            self.ready.set()
            self.gone.set()

    def let_go(self) -> None:
        """Nobody can ask it from now on; it ends."""
        self.server = None
        self.unwanted.set()

    async def is_well(self) -> bool:
        """It is up, says so, and draws in each copy of its policy; one that is coming up is waited for."""
        await self.ready.wait()
        with suppress(EngineError):
            if self.server is not None and self.server.alive:
                await self.server.engine.recover()
                for engine in self.server.engines:
                    await engine.check_drawing(within_s=HANG_S)
                return True
        return False


class PolicyDesk:
    """The policy in the engine answers, or for `capture` plans the oracle.

    An engine that dies is started again, with the weights that its plan names, as soon as a call or a rollout asks for
    it; the calls that it left without an answer wait meanwhile.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        paths: RunPaths,
        worker_id: str,
        ledger: Ledger,
        tasks: TaskGroup,
        serve: Callable[..., AbstractAsyncContextManager[PolicyServer]] = serve_policy,
    ) -> None:
        """`tasks`: its end is the end of the engine."""
        self._spec = spec
        self._paths = paths
        self._engine_log = paths.workers / worker_id / "engine.log"
        self._ledger = ledger
        self._tasks = tasks
        self._serve = serve
        self._held = HeldEngine()
        self._held.ready.set()
        self._held.gone.set()
        self._policy: PolicyVersion | None = None
        self._renderer: ChatRenderer | None = None
        self._form: tuple[bytes, str, bool] | None = None
        """What `_renderer` was made of: the digest of its tokenizer, and what it was told."""
        self._past_cpu_s = 0.0
        """Of engines that were let go."""
        self._num_starts = 0
        """Of engines, those that failed included."""
        self._num_up = self._up_before = 0
        """Engines that have come up: in all, and in earlier plans."""
        self._num_failed = 0
        """Starts that have failed since one last came up."""
        self._plan: tuple[str, int] | None = None
        """The phase and the step of the one that is being collected."""
        self._turns = count()
        """Rollouts take turns at the copies of the policy."""
        self._changing = anyio.Lock()
        """Held while the engine or its weights are changed."""

    @property
    def server(self) -> PolicyServer | None:
        """The engine that can be asked now."""
        return self._held.server

    @property
    def engine_cpu_s(self) -> float:
        """CPU seconds of the engine that runs, and of those before it; of one that has died nothing is known."""
        return self._past_cpu_s + (self.server.cpu_s if self.server is not None else 0.0)

    async def make_ready(self, plan: StepPlan) -> None:
        """The engine holds the weights that `plan` names.

        Raises EngineError when it died too often meanwhile, HostError when it failed to start too often.
        """
        if plan.phase == "capture":
            return
        if self._plan != (plan.phase, plan.step):
            self._plan, self._up_before = (plan.phase, plan.step), self._num_up
        if self._holds(plan.policy_step):
            return
        async with self._changing:
            await self._held.ready.wait()
            self._policy = await self._published(plan.policy_step)
            if self.server is None or not self.server.alive:
                await self._replace(self._policy)
            elif self.server.policy_step != plan.policy_step:
                await self._load(self.server, self._policy)

    async def recover(self) -> None:
        """Return when the engine can be asked, another one where the last is not well. Raises as `make_ready`."""
        async with self._changing:
            assert self._policy is not None, "make_ready comes first"
            if not await self._held.is_well():
                await self._replace(self._policy)

    def responder(self, plan: StepPlan, group: GroupPlan) -> Responder:
        """The answers to one rollout's calls."""
        if plan.phase == "capture":
            return ScriptedResponder(script=partial(oracle_reply, task_solution(group.task)))
        assert self._renderer is not None, "make_ready comes first"
        return PolicyResponder(
            engine=StandingEngine(self, rank=next(self._turns) % self._spec.engine.data_parallel_size),
            renderer=self._renderer,
            sampling=PolicySampling(
                context_window=self._spec.engine.max_model_len,
                max_tokens=self._spec.worker.max_output_tokens,
                temperature=plan.temperature,
            ),
        )

    async def _published(self, step: int) -> PolicyVersion:
        """It was published before the plan that names it, but may be seen here after it. UserError if it is not."""
        folder = self._paths.policy(step)
        with anyio.move_on_after(SEEN_S):
            while not folder.is_dir():
                await anyio.sleep(self._spec.worker.poll_s)
        return read_policy(folder)

    def _holds(self, policy_step: int) -> bool:
        return self.server is not None and self.server.alive and self.server.policy_step == policy_step

    async def _load(self, server: PolicyServer, policy: PolicyVersion) -> None:
        """New weights; in another engine where this one cannot take them, or dies, or masks by another tokenizer."""
        if self._form is None or self._form[0] != tokenizer_digest(policy):
            log.info("policy step %d has another tokenizer, and an engine of its own", policy.step)
            return await self._replace(policy)
        try:
            await server.load(policy)
        except EngineError as error:
            log.warning("the engine is started again, for it did not load policy step %d: %s", policy.step, error)
            return await self._replace(policy)
        self._use_renderer(policy)

    async def _replace(self, policy: PolicyVersion) -> None:
        """Another engine in place of the one that is held, which ends first: the memory is not for two."""
        while True:
            self._past_cpu_s = self.engine_cpu_s
            self._held.let_go()
            await self._held.gone.wait()
            self._check_starts()
            self._held = self._start(policy)
            await self._held.ready.wait()
            if self._held.came_up:
                return self._use_renderer(policy)
            if isinstance(self._held.error, UserError):
                raise self._held.error
            log.warning("the engine did not start, %d times in a row now: %s", self._num_failed, self._held.error)

    def _check_starts(self) -> None:
        num_died = self._num_up - self._up_before
        if num_died >= self._spec.worker.max_engine_starts:
            raise EngineError(f"the engine has died {num_died} times in one plan; its log: {self._engine_log}")
        if self._num_failed >= self._spec.worker.max_failed_starts:
            raise HostError(f"the engine has failed to start {self._num_failed} times in a row: {self._held.error}")

    def _start(self, policy: PolicyVersion) -> HeldEngine:
        """One that comes up, or does not."""
        self._num_starts += 1
        serving = self._serve(
            self._spec.engine,
            policy,
            socket=self._ledger.scratch / f"engine{self._num_starts}",
            log=self._engine_log,
            environment=self._ledger.environment,
            cache_dir=Path(self._spec.cache_dir) / "vllm",
        )
        held = HeldEngine()
        self._tasks.start_soon(held.hold, serving, self._note_start)
        return held

    def _note_start(self, came_up: bool) -> None:
        if came_up:
            self._num_up, self._num_failed = self._num_up + 1, 0
        else:
            self._num_failed += 1

    def _use_renderer(self, policy: PolicyVersion) -> None:
        """What one has encoded stays known, as long as the chat format and the tokenizer stay the same."""
        form = (tokenizer_digest(policy), policy.renderer, policy.thinking)
        if self._form != form:
            self._renderer = ChatRenderer(Path(policy.path), renderer=policy.renderer, thinking=policy.thinking)
            self._form = form


def tokenizer_digest(policy: PolicyVersion) -> bytes:
    """Equal for equal tokenizers."""
    return sha256((Path(policy.path) / "tokenizer.json").read_bytes()).digest()


@dataclass(frozen=True)
class StandingEngine:
    """The engine of one rollout: whichever its desk holds when it is asked."""

    desk: PolicyDesk
    rank: int
    """The copy of the policy that all its calls are for: it knows how their prompts begin."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str) -> Generation:
        """See `Engine`."""
        return await self._now().generate(prompt_ids, params, request_id=request_id)

    async def recover(self) -> None:
        """See `Engine`. What that means for the worker, it sees itself."""
        try:
            await self.desk.recover()
        except (UserError, HostError) as error:
            raise EngineError(f"the engine did not start again: {error}") from error

    async def check_drawing(self, *, within_s: float) -> None:
        """See `Engine`."""
        await self._now().check_drawing(within_s=within_s)

    def _now(self) -> Engine:
        if self.desk.server is None:
            raise EngineLost("the engine is being started again")
        return self.desk.server.engines[self.rank]
