"""A worker whose rollouts a model behind an API answers: which desk it has, and what it needs before it begins."""

from __future__ import annotations

import pickle
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx2
import pytest

from clawhpc.errors import EngineError, UserError
from clawhpc.paths import RunPaths
from clawhpc.proxy.endpoint import Endpoint, EndpointResponder
from clawhpc.proxy.respond import ScriptedResponder
from clawhpc.proxy.settings import EndpointSettings
from clawhpc.records import StepPlan
from clawhpc.tasks.clawgym import load_tasks
from clawhpc.tasks.families import draw_task
from clawhpc.tasks.generate import write_task
from clawhpc.worker.desk import PolicyDesk
from clawhpc.worker.endpoint_desk import EndpointDesk, open_desk
from clawhpc.worker.settings import WorkerSettings
from tests.fakes.records import make_group
from tests.fakes.slurm_worker import stub_spec
from tests.fakes.upstream import Upstream, listening

pytestmark = pytest.mark.anyio
SETTINGS = EndpointSettings(base_url="http://endpoint/v1", model="large", max_retries=0)


def plan_of(phase: Any = "eval") -> StepPlan:
    return StepPlan(phase=phase, step=0, policy_step=0, temperature=0.5, groups=(make_group(phase=phase),))


@asynccontextmanager
async def desk_of(tmp_path: Path, upstream: Upstream) -> AsyncIterator[EndpointDesk]:
    spec = replace(stub_spec(tmp_path), endpoint=SETTINGS, worker=WorkerSettings(max_output_tokens=77))
    async with Endpoint(SETTINGS, None, window=100, transport=httpx2.MockTransport(upstream)) as endpoint:
        yield EndpointDesk(spec, endpoint)


async def test_a_worker_has_the_desk_that_its_spec_asks_for(tmp_path: Path) -> None:
    ledger: Any = SimpleNamespace(scratch=tmp_path, environment={})
    spec = stub_spec(tmp_path)
    async with anyio.create_task_group() as tasks:
        async with open_desk(spec, RunPaths(tmp_path), "w0", ledger, tasks) as desk:
            assert isinstance(desk, PolicyDesk)
        async with open_desk(replace(spec, endpoint=SETTINGS), RunPaths(tmp_path), "w0", ledger, tasks) as desk:
            assert isinstance(desk, EndpointDesk)


async def test_the_endpoint_is_tried_once_before_the_first_rollout(tmp_path: Path) -> None:
    upstream = Upstream()
    async with desk_of(tmp_path, upstream) as desk:
        for _ in range(3):
            await desk.make_ready(plan_of())
        responder = desk.responder(plan_of(), plan_of().groups[0])
    assert len(upstream.bodies) == 1
    assert isinstance(responder, EndpointResponder)
    assert (responder.max_tokens, responder.temperature) == (77, 0.5)


async def test_an_endpoint_that_refuses_is_the_users_and_one_that_fails_the_machines(tmp_path: Path) -> None:
    refuses, fails = httpx2.Response(401, json={"error": {"message": "no such key"}}), httpx2.Response(500)
    async with desk_of(tmp_path, Upstream(failures=[refuses, fails])) as desk:
        with pytest.raises(UserError, match="no such key"):
            await desk.make_ready(plan_of())
        with pytest.raises(EngineError, match="500"):
            await desk.make_ready(plan_of())
        await desk.make_ready(plan_of())


async def test_what_is_captured_comes_from_the_oracle_all_the_same(tmp_path: Path) -> None:
    write_task(draw_task("create", random.Random(0), "train"), "t", tmp_path / "tasks")
    group = make_group(phase="capture", task=load_tasks(tmp_path / "tasks").tasks[0])
    upstream = Upstream()
    async with desk_of(tmp_path, upstream) as desk:
        await desk.make_ready(plan_of("capture"))
        assert isinstance(desk.responder(plan_of("capture"), group), ScriptedResponder)
    assert upstream.bodies == []


async def test_the_key_is_read_where_the_worker_runs_and_its_variable_is_named_when_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream, ledger = Upstream(), SimpleNamespace(scratch=tmp_path, environment={})
    monkeypatch.setenv("LARGE_KEY", "secret\n")
    with listening(upstream) as url:
        settings = replace(SETTINGS, base_url=url, api_key_env="LARGE_KEY")
        spec = replace(stub_spec(tmp_path), endpoint=settings)
        assert b"secret" not in pickle.dumps(spec)
        async with anyio.create_task_group() as tasks:
            opening: Any = partial(open_desk, spec, RunPaths(tmp_path), "w0", ledger, tasks)
            async with opening() as desk:
                await desk.make_ready(plan_of())
            monkeypatch.delenv("LARGE_KEY")
            with pytest.raises(UserError, match=r"policy\.endpoint\.api_key_env=LARGE_KEY: on .* holds no key"):
                await opening().__aenter__()
    assert upstream.headers[0]["authorization"] == "Bearer secret"
