"""Who answers the calls of a worker's rollouts where a model behind an API stands in for the policy."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
from anyio.abc import TaskGroup

from clawhpc.errors import EngineError
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.proxy.endpoint import Endpoint, EndpointResponder
from clawhpc.proxy.respond import Responder, ScriptedResponder
from clawhpc.records import GroupPlan, StepPlan
from clawhpc.tasks.oracle import oracle_reply, task_solution
from clawhpc.worker.desk import Desk, PolicyDesk
from clawhpc.worker.settings import WorkerSpec

CHECK_S = 300.0
"""For an endpoint to give its first answer, however often it has to be asked."""


@asynccontextmanager
async def open_desk(
    spec: WorkerSpec, paths: RunPaths, worker_id: str, ledger: Ledger, tasks: TaskGroup
) -> AsyncIterator[Desk]:
    """The desk that `spec` asks for: that of an endpoint where one is set, else that of the policy.

    UserError where the key of the endpoint is not to be had here.
    """
    if not spec.endpoint.is_set:
        yield PolicyDesk(spec, paths, worker_id, ledger, tasks)
        return
    key = spec.endpoint.key("policy.endpoint", os.environ)
    async with Endpoint(spec.endpoint, key, window=spec.engine.max_model_len) as endpoint:
        yield EndpointDesk(spec, endpoint)


class EndpointDesk:
    """The endpoint answers, or for `capture` plans the oracle. There is no engine to start, and no policy to load."""

    engine_cpu_s = 0.0

    def __init__(self, spec: WorkerSpec, endpoint: Endpoint) -> None:
        self._spec, self._endpoint = spec, endpoint
        self._has_answered = False
        self._checking = anyio.Lock()

    async def make_ready(self, plan: StepPlan) -> None:
        """The endpoint has answered once. Raises UserError where it refuses, EngineError where it does not answer."""
        if plan.phase == "capture":
            return
        async with self._checking:
            if self._has_answered:
                return
            try:
                with anyio.fail_after(CHECK_S):
                    await self._endpoint.check()
            except TimeoutError as error:
                raise EngineError(f"policy.endpoint: no answer within {CHECK_S:g} s") from error
            self._has_answered = True

    async def recover(self) -> None:
        """Each request sees to that itself."""

    def responder(self, plan: StepPlan, group: GroupPlan) -> Responder:
        """The answers to one rollout's calls."""
        if plan.phase == "capture":
            return ScriptedResponder(script=partial(oracle_reply, task_solution(group.task)))
        return EndpointResponder(
            endpoint=self._endpoint,
            max_tokens=self._spec.worker.max_output_tokens,
            temperature=plan.temperature,
        )
