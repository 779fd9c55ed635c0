"""Who answers the calls of a worker's rollouts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

from clawhpc.engine.render import ChatRenderer
from clawhpc.errors import EngineError
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.proxy.respond import PolicyResponder, PolicySampling, Responder, ScriptedResponder
from clawhpc.records import GroupPlan, PolicyVersion, StepPlan
from clawhpc.serve.server import PolicyServer, serve_policy
from clawhpc.store import read_policy
from clawhpc.tasks.oracle import oracle_reply, task_solution
from clawhpc.worker.settings import WorkerSpec


class Desk(Protocol):
    """What a worker asks for."""

    @property
    def broken(self) -> bool:
        """No rollout should start before the next `make_ready`."""
        ...

    @property
    def engine_cpu_s(self) -> float:
        """CPU seconds of the engine so far."""
        ...

    async def make_ready(self, plan: StepPlan) -> None:
        """The calls of `plan`'s rollouts can be answered. Raises UserError or EngineError when they cannot."""
        ...

    def responder(self, plan: StepPlan, group: GroupPlan) -> Responder:
        """The answers to the calls of one group's rollouts."""
        ...


class PolicyDesk:
    """The policy in the engine answers, or for `capture` plans the oracle. An engine that dies is started again."""

    def __init__(
        self,
        spec: WorkerSpec,
        paths: RunPaths,
        worker_id: str,
        ledger: Ledger,
        stack: AsyncExitStack,
        serve: Callable[..., AbstractAsyncContextManager[PolicyServer]] = serve_policy,
    ) -> None:
        self._spec = spec
        self._paths = paths
        self._engine_log = paths.workers / worker_id / "engine.log"
        self._ledger = ledger
        self._stack = stack
        self._serve = serve
        self._server: PolicyServer | None = None
        self._renderer: ChatRenderer | None = None
        self._num_starts = 0

    @property
    def broken(self) -> bool:
        """The engine has died."""
        return self._server is not None and not self._server.alive

    @property
    def engine_cpu_s(self) -> float:
        """CPU seconds of the engine that runs; of one that has died nothing is known."""
        return self._server.cpu_s if self._server is not None else 0.0

    async def make_ready(self, plan: StepPlan) -> None:
        """The engine holds the weights that `plan` names. Raises EngineError when it has died too often."""
        if plan.phase == "capture":
            return
        policy = read_policy(self._paths.policy(plan.policy_step))
        if self._server is None or not self._server.alive:
            await self._start(policy)
        elif self._server.policy_step != policy.step:
            await self._server.load(policy)

    async def _start(self, policy: PolicyVersion) -> None:
        self._num_starts += 1
        if self._num_starts > self._spec.worker.max_engine_starts:
            raise EngineError(f"the engine has died {self._num_starts - 1} times; its log: {self._engine_log}")
        self._server = await self._stack.enter_async_context(
            self._serve(
                self._spec.engine,
                policy,
                socket=self._ledger.scratch / f"engine{self._num_starts}",
                log=self._engine_log,
                environment=self._ledger.environment,
                cache_dir=Path(self._spec.cache_dir) / "vllm",
            )
        )
        self._renderer = ChatRenderer(Path(policy.path), renderer=policy.renderer, thinking=policy.thinking)

    def responder(self, plan: StepPlan, group: GroupPlan) -> Responder:
        """The answers to one rollout's calls."""
        if plan.phase == "capture":
            return ScriptedResponder(script=partial(oracle_reply, task_solution(group.task)))
        assert self._server is not None, "make_ready comes first"
        assert self._renderer is not None, "the server is started with it"
        return PolicyResponder(
            engine=self._server.engine,
            renderer=self._renderer,
            sampling=PolicySampling(
                context_window=self._spec.engine.max_model_len,
                max_tokens=self._spec.worker.max_output_tokens,
                temperature=plan.temperature,
            ),
        )
