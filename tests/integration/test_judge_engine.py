"""A judge behind a real OpenAI-compatible server: vLLM, whose decoding follows the schema whatever the model is like.

The engine of a campaign takes token ids only, so that this is a server of its own. Its model has random weights: that
it gives a verdict at all, in JSON, from 0 to 1, is the server's doing, and what this test is about.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx2
import pytest

from clawhpc.serve.command import PROGRAM, engine_environment
from clawhpc.serve.process import running
from clawhpc.verify.judge import open_judge
from clawhpc.verify.prompt import Case
from clawhpc.verify.settings import JudgeModel, JudgeSettings
from tests.engine_parts import SETTINGS, make_policy
from tests.fakes.judge_endpoint import RUBRIC

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.slow]
WINDOW = 8192
"""A tokenizer of bytes makes many tokens of a judge's instructions."""
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
START_S = 120.0
CASE = Case(rubric=RUBRIC, instruction="Find the cause.", workspace=('{"path": "report.md", "text": "It was DNS."}',))


@asynccontextmanager
async def chat_server(folder: Path, cache_dir: Path) -> AsyncIterator[str]:
    """The base URL of a vLLM server that answers chat completions from a tiny model with random weights."""
    policy = folder / "policy"
    make_policy(policy, step=1)
    shape = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": WINDOW}))
    (folder / "template.jinja").write_text(TEMPLATE)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    arguments = [
        *("--model", str(policy), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--chat-template", str(folder / "template.jinja"), "--max-model-len", str(WINDOW)),
        *("--generation-config", "vllm", "--dtype", SETTINGS.dtype, "--kv-cache-memory-bytes", str(1 << 28)),
        *("--distributed-executor-backend", "uni", "--max-num-batched-tokens", str(WINDOW)),
        *("--no-enable-chunked-prefill", "--enforce-eager", "--disable-log-stats"),
    ]
    environment = engine_environment(SETTINGS, scratch=folder, cache_dir=cache_dir, cpu=True)
    command, log = [sys.executable, "-c", PROGRAM, *arguments], folder / "server.log"
    async with running(command, environment=environment, folder=folder, log=log, stop_timeout_s=10.0) as process:
        async with httpx2.AsyncClient(trust_env=False) as client:
            with anyio.fail_after(START_S):
                while not await is_well(client, f"http://127.0.0.1:{port}/health"):
                    assert process.returncode is None, log.read_text()[-3000:]
                    await anyio.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"


async def is_well(client: httpx2.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == httpx2.codes.OK
    except httpx2.TransportError:
        return False


async def test_a_real_server_gives_a_verdict_that_is_one_and_says_what_it_took(
    vllm: None, short_folder: Path, engine_cache: Path
) -> None:
    async with chat_server(short_folder, engine_cache) as url:
        model = JudgeModel(
            name="tiny", base_url=url, temperature=2.0, max_tokens=4000, input_price=1.0, output_price=1.0
        )
        settings = JudgeSettings(models={"tiny": model}, repeats=2, request_s=100.0, max_attempts=3)
        async with open_judge(settings, {}) as judge:
            assert judge is not None
            judgement = await judge.judge(CASE, timeout_s=200.0)
    assert len(judgement.opinions) == 2
    assert all(0.0 <= score <= 1.0 for opinion in judgement.opinions for score in opinion.scores.values())
    assert judgement.agreement is not None
    assert judgement.usage.input_tokens > 1000
    assert judgement.cost_usd is not None
    assert judgement.num_requests <= 4
