"""Real vLLM: what it draws, with which weights, and that its log-probs are those of the learner (laws 1 and 9)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from clawhpc.engine.client import PromptTooLong, SamplingParams, VllmEngine
from clawhpc.errors import EngineError
from clawhpc.records import Generation, VersionSpan
from clawhpc.serve.checks import check_probe
from tests.engine_parts import LOOPBACK, SETTINGS, EngineHost, listening, session_of

pytestmark = [pytest.mark.anyio, pytest.mark.engine]
PROMPT = tuple(range(7, 357))
GAP = 1e-4
"""Log-probs of the engine and of transformers agree within it, in fp32."""


@pytest.fixture
async def engine(engine_host: EngineHost) -> AsyncIterator[VllmEngine]:
    """A client, and the first policy in the engine."""
    await engine_host.hold(engine_host.first)
    async with engine_host.connect() as engine:
        yield engine


async def draw(
    engine: VllmEngine,
    *,
    tokens: int = 60,
    seed: int | None = 1,
    temperature: float = 1.0,
    prompt: tuple[int, ...] = PROMPT,
    stop: tuple[int, ...] = (),
) -> Generation:
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, stop_token_ids=stop)
    return await engine.generate(prompt, params, request_id="test")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_distribution_drawn_from(
    engine_host: EngineHost, engine: VllmEngine, temperature: float
) -> None:
    generation = await draw(engine, tokens=300, temperature=temperature)
    assert len(generation.completion_ids) == 300
    assert generation.finish_reason == "length"
    assert generation.weight_versions == (VersionSpan(version=1, start=0, end=300),)
    assert engine_host.first.gap(PROMPT, generation, temperature=temperature) < GAP
    other = 0.7 if temperature == 1.0 else 1.0
    assert engine_host.first.gap(PROMPT, generation, temperature=other) > 0.1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_padded_ids_are_never_drawn(engine_host: EngineHost, engine: VllmEngine, temperature: float) -> None:
    generation = await draw(engine, tokens=400, temperature=temperature)
    assert max(generation.completion_ids) < engine_host.first.num_token_ids


async def test_a_completion_ends_with_its_stop_token(engine: VllmEngine) -> None:
    stop = tuple(range(0, 400, 2))
    generation = await draw(engine, stop=stop)
    assert generation.finish_reason == "stop"
    assert [token in stop for token in generation.completion_ids] == [False] * (len(generation.completion_ids) - 1) + [
        True
    ]


async def test_a_seed_gives_the_same_tokens_alone_and_among_others(engine: VllmEngine) -> None:
    alone = await draw(engine, seed=5)
    drawn: dict[int, Generation] = {}

    async def add(seed: int) -> None:
        drawn[seed] = await draw(engine, seed=seed)

    async with anyio.create_task_group() as tasks:
        for seed in range(8):
            tasks.start_soon(add, seed)
    assert drawn[5].completion_ids == alone.completion_ids
    assert len({generation.completion_ids for generation in drawn.values()}) == 8


async def test_seeded_prompts_longer_than_a_batch_are_drawn_from(engine_host: EngineHost, engine: VllmEngine) -> None:
    """vLLM on CPU dies of a seeded prompt that it computes in pieces."""
    drawn: list[tuple[tuple[int, ...], Generation]] = []

    async def add(start: int) -> None:
        prompt = tuple(range(start, 340)) * 5
        drawn.append((prompt, await draw(engine, tokens=4, prompt=prompt)))

    async with anyio.create_task_group() as tasks:
        for start in range(6):
            tasks.start_soon(add, start)
    assert max(engine_host.first.gap(prompt, generation) for prompt, generation in drawn) < GAP


def test_an_engine_listens_on_the_loopback_alone_on_ports_that_cannot_clash(engine_host: EngineHost) -> None:
    pids = session_of(engine_host.server._process.pid)
    assert len(pids) >= 2
    assert set(listening(pids)) <= {LOOPBACK}


async def test_cancelling_a_call_aborts_it_in_the_engine(engine_host: EngineHost, engine: VllmEngine) -> None:
    with anyio.move_on_after(0.5) as scope:
        await draw(engine, tokens=1600)
    assert scope.cancelled_caught, "1600 tokens in half a second?"
    with anyio.fail_after(3.0):  # a load waits for what is still being drawn
        await engine_host.load(engine_host.first.version)


async def test_a_prompt_fits_when_it_leaves_room_for_one_token(engine: VllmEngine) -> None:
    size = SETTINGS.max_model_len
    generation = await draw(engine, tokens=50, prompt=(5,) * (size - 1))
    assert (len(generation.completion_ids), generation.finish_reason) == (1, "length")
    with pytest.raises(PromptTooLong):
        await draw(engine, prompt=(5,) * size)


async def test_new_weights_draw_what_they_must_and_old_ones_draw_the_same_again(
    engine_host: EngineHost, engine: VllmEngine
) -> None:
    before = await draw(engine)
    await engine_host.load(engine_host.second.version)
    after = await draw(engine)
    assert after.weight_versions == (VersionSpan(version=2, start=0, end=60),)
    assert engine_host.second.gap(PROMPT, after) < GAP
    assert engine_host.first.gap(PROMPT, after) > 1.0
    await engine_host.load(engine_host.first.version)
    assert (await draw(engine)).completion_ids == before.completion_ids


async def test_no_prefix_is_kept_over_new_weights(engine_host: EngineHost, engine: VllmEngine) -> None:
    await draw(engine)
    assert (await draw(engine)).cached_tokens >= 256
    await engine_host.load(engine_host.second.version)
    fresh = await draw(engine)
    assert fresh.cached_tokens == 0
    assert engine_host.second.gap(PROMPT, fresh) < GAP


@asynccontextmanager
async def drawing(engine: VllmEngine, *, tokens: int) -> AsyncIterator[list[Generation]]:
    """A call that is being drawn when the block begins, and has ended, with its result in the list, after it."""
    drawn: list[Generation] = []

    async def add() -> None:
        drawn.append(await draw(engine, tokens=tokens))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(add)
        await anyio.wait_all_tasks_blocked()
        await draw(
            engine, tokens=10
        )  # the engine draws for all at once: when this later call is done, the other goes on
        assert not drawn
        yield drawn


async def test_a_call_that_goes_on_with_new_weights_says_from_where(
    engine_host: EngineHost, engine: VllmEngine
) -> None:
    async with drawing(engine, tokens=800) as drawn:
        await engine_host.load(engine_host.second.version, in_flight="keep")
    old, new = drawn[0].weight_versions
    assert (old.version, new.version) == (1, 2)
    assert engine_host.first.gap_between(PROMPT, drawn[0], 0, old.end) < GAP
    assert engine_host.second.gap_between(PROMPT, drawn[0], new.start, new.end) < GAP
    assert engine_host.second.gap(PROMPT, await draw(engine)) < GAP


async def test_a_call_in_flight_ends_with_the_weights_that_it_began_with(
    engine_host: EngineHost, engine: VllmEngine
) -> None:
    async with drawing(engine, tokens=200) as drawn:
        await engine_host.load(engine_host.second.version)
        assert drawn, "the load did not wait"
    assert drawn[0].weight_versions == (VersionSpan(version=1, start=0, end=200),)
    assert engine_host.first.gap(PROMPT, drawn[0]) < GAP


async def test_weights_that_the_probe_denies_are_not_drawn_from(engine_host: EngineHost, engine: VllmEngine) -> None:
    lie = replace(engine_host.second.version, probe=engine_host.first.version.probe)
    with pytest.raises(EngineError, match=r"step 2: .* does not hold the weights"):
        await engine_host.load(lie)
    with pytest.raises(EngineError, match="step 2 did not load"):
        await engine_host.generate(PROMPT)
    await engine_host.load(engine_host.second.version)
    assert (await engine_host.generate(PROMPT)).weight_versions[0].version == 2


async def test_without_our_extension_a_tied_head_would_keep_its_old_weights(
    engine_host: EngineHost, engine: VllmEngine
) -> None:
    """The trap that `extension.pack_again` closes: where vLLM closes it itself, this fails and the repair can go."""
    reload = {"method": "reload_weights", "kwargs": {"weights_path": engine_host.second.version.path}}
    await engine.post("/collective_rpc", body=reload)
    await engine.post("/reset_prefix_cache")
    probe = engine_host.second.version.probe
    with pytest.raises(EngineError, match="does not hold the weights"):
        check_probe(2, probe, await engine.score(probe.token_ids), SETTINGS.dtype)
    await engine_host.load(engine_host.second.version)
    check_probe(2, probe, await engine.score(probe.token_ids), SETTINGS.dtype)
