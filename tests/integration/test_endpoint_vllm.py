"""Real vLLM's own OpenAI and Anthropic servers as the endpoint that answers a session, and a real harness."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx2
import pytest

from clawhpc.errors import UserError
from clawhpc.harness.pi import PiSettings
from clawhpc.harness.registry import make_harness
from clawhpc.ledger import Ledger
from clawhpc.proxy.endpoint import Endpoint, EndpointResponder
from clawhpc.proxy.settings import EndpointProtocol, EndpointSettings
from clawhpc.records import GroupKey, GroupPlan, Limits, Outcome
from clawhpc.rollout.run import RolloutParts, RolloutPlan, run_rollout
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.serve.command import engine_environment
from clawhpc.serve.process import running
from clawhpc.tasks.clawgym import load_tasks
from clawhpc.tasks.families import draw_task
from clawhpc.tasks.generate import write_task
from clawhpc.wire.base import ContextOverflow
from tests.engine_parts import SETTINGS, make_policy
from tests.fakes.caller import ask, open_call, session_of, user
from tests.sandbox_parts import missing, working_sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("vllm")]

START_S = 300.0
"""For vLLM to listen, on a busy machine with two cores."""
WINDOW = 8192
"""Longer than the tiny model's, for the prompt of a harness has thousands of its tokens."""
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
ARGUMENTS = (
    *("--served-model-name", "large", "--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill"),
    *("--max-model-len", str(WINDOW), "--max-num-batched-tokens", str(WINDOW), "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(1 << 28), "--distributed-executor-backend", "uni"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--generation-config", "vllm"),
    *("--enable-prompt-tokens-details", "--disable-log-stats"),
)


@asynccontextmanager
async def vllm_chat(folder: Path, cache_dir: Path) -> AsyncIterator[httpx2.AsyncBaseTransport]:
    """vLLM's own server, and the way to it."""
    make_policy(folder / "policy", step=1)
    (folder / "chat.jinja").write_text(CHAT)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "policy")),
        *("--uds", str(folder / "v"), "--chat-template", str(folder / "chat.jinja"), *ARGUMENTS),
    ]
    environment = engine_environment(SETTINGS, scratch=folder, cache_dir=cache_dir, cpu=True)
    environment |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    log = folder / "vllm.log"
    async with running(command, environment=environment, folder=folder, log=log, stop_timeout_s=10.0) as process:
        transport = httpx2.AsyncHTTPTransport(uds=str(folder / "v"))
        async with httpx2.AsyncClient(transport=transport, base_url="http://endpoint") as client:
            with anyio.fail_after(START_S):
                while not await is_up(client):
                    assert process.returncode is None, log.read_text()[-3000:]
                    await anyio.sleep(0.5)
        yield httpx2.AsyncHTTPTransport(uds=str(folder / "v"))


async def is_up(client: httpx2.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == httpx2.codes.OK
    except httpx2.TransportError:
        return False


def settings_of(protocol: EndpointProtocol, model: str = "large") -> EndpointSettings:
    base_url = "http://endpoint/v1" if protocol == "openai" else "http://endpoint"
    return EndpointSettings(protocol=protocol, base_url=base_url, model=model, max_retries=1)


async def test_vllm_answers_sessions_and_a_harness_over_either_protocol(
    short_folder: Path, engine_cache: Path, ledger: Ledger, cache_dir: Path, tmp_path: Path
) -> None:
    async with vllm_chat(short_folder, engine_cache) as transport:
        for protocol in ("openai", "anthropic"):
            async with Endpoint(settings_of(protocol), None, window=WINDOW, transport=transport) as endpoint:
                await endpoint.check()
                other = Endpoint(settings_of(protocol, "none"), None, window=WINDOW, transport=transport)
                with pytest.raises(UserError, match="does not exist"):
                    await other.check()
                await converse(EndpointResponder(endpoint=endpoint, max_tokens=32, temperature=1.0))
                if protocol == "openai":
                    await run_harness(endpoint, ledger, cache_dir, tmp_path)


async def converse(responder: EndpointResponder) -> None:
    """Two calls that continue one another, and one whose prompt does not fit."""
    tool = {"name": "Bash", "description": "Run.", "input_schema": {"type": "object", "properties": {}}}
    async with session_of(responder) as session:
        first = await ask(session, user("Go."), system="Be brief.", tools=[tool])
        await ask(session, user("Go."), first, user("And on."), system="Be brief.", tools=[tool])
        long = await open_call(session, user("word " * 3 * WINDOW))
        await long.done.wait()
        one, two, failed = session.calls()
    assert isinstance(long.error, ContextOverflow), failed.failure
    assert long.error.maximum == WINDOW
    assert long.error.num_tokens > WINDOW
    assert (one.tokens, one.model, two.continues_id) == (None, "large", 0)
    assert 0 < one.usage.output_tokens <= 32
    assert two.usage.input_tokens > one.usage.input_tokens > 0


async def run_harness(endpoint: Endpoint, ledger: Ledger, cache_dir: Path, folder: Path) -> None:
    """Pi on a task: the model babbles, so that Pi has its answer and ends."""
    write_task(draw_task("create", random.Random(0), "train"), "t", folder)
    harness = make_harness("pi", PiSettings(), cache_dir / "harness")
    try:
        harness.check_install()
    except UserError as error:
        missing(str(error))
    parts = RolloutParts(
        sandbox=await working_sandbox(SandboxSettings(kind="bubblewrap"), ledger, cache_dir),
        harness=harness,
        responder=EndpointResponder(endpoint=endpoint, max_tokens=64, temperature=1.0),
        scratch=ledger.scratch,
        limits=Limits(deadline_s=120.0, reserve_s=15.0),
        model="policy",
        context_window=WINDOW,
        max_output_tokens=64,
        worker_id="test",
        now=time.time,
    )
    key = GroupKey(phase="eval", step=0, task_id="t", harness="pi")
    group = GroupPlan(key=key, task=load_tasks(folder).tasks[0], num_samples=1, seed=0)
    record = await run_rollout(RolloutPlan(group=group, sample=0, temperature=1.0), parts)
    assert record.outcome is Outcome.COMPLETED, record.detail
    assert record.verdict is not None
    assert record.calls
    assert all(call.tokens is None and call.model == "large" and call.usage.output_tokens for call in record.calls)
