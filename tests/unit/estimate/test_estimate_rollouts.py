"""Tokens and bytes of a step: by hand for a small one, and as a real record is encoded."""

from __future__ import annotations

import dataclasses
import random
import struct

import msgspec
import pytest

from clawhpc.campaign.settings import CampaignSettings
from clawhpc.estimate.rollouts import COSTS, HarnessCost, harness_costs, step_tokens
from clawhpc.estimate.settings import PlanSettings
from clawhpc.harness.claude_code import ClaudeCodeSettings
from clawhpc.harness.openclaw import OpenClawSettings
from clawhpc.harness.registry import ADAPTERS
from clawhpc.records import CallRecord, Message, Reply, Usage
from tests.fakes.records import make_group, make_record
from tests.fakes.session import Session

PLAN = PlanSettings(calls=3, reply_tokens=10, result_tokens=20)
PLAIN = HarnessCost(prompt_tokens=100, cpu_s=1.0, memory_gb=0.1)
MOVES = dataclasses.replace(PLAIN, moves_message=True)
CAMPAIGN = CampaignSettings(groups_per_step=4, samples_per_group=5)
VOCABULARY = 151_669
"""Of Qwen3's tokenizer."""


def test_every_harness_has_its_costs() -> None:
    assert set(COSTS) >= set(ADAPTERS)


def test_a_harness_in_its_bare_mode_has_a_shorter_prompt() -> None:
    bare = harness_costs({"claude_code": ClaudeCodeSettings(), "openclaw": OpenClawSettings()})
    full = harness_costs({"claude_code": ClaudeCodeSettings(bare=False), "openclaw": OpenClawSettings(bare=False)})
    assert [cost.prompt_tokens for cost in bare.values()] == [1_000, 5_000]
    assert [cost.prompt_tokens for cost in full.values()] == [20_000, 25_000]


def test_a_step_is_counted_as_by_hand() -> None:
    tokens = step_tokens(CAMPAIGN, [PLAIN], PLAN, row_tokens=290)
    assert tokens.num_rollouts == 20
    assert tokens.drawn == 20 * 3 * 10
    assert tokens.longest == 100 + 3 * 30
    assert tokens.num_rows == 10  # a head of 100, and two bodies of 90 beside it
    assert tokens.in_rows == 20 * 90 + 10 * 100
    assert tokens.read == 4 * 100 + 20 * 3 * 20
    assert tokens.mean_keys == 100 + 45


def test_a_harness_that_moves_its_last_message_has_each_reply_twice_in_its_tree() -> None:
    assert step_tokens(CAMPAIGN, [MOVES], PLAN, row_tokens=10_000).in_rows == 20 * (90 + 30) + 100


def test_two_harnesses_share_the_rollouts_and_no_row() -> None:
    tokens = step_tokens(CAMPAIGN, [PLAIN, MOVES], PLAN, row_tokens=10_000)
    assert (tokens.num_rollouts, tokens.num_rows) == (20, 2)
    assert tokens.in_rows == 10 * 90 + 100 + 10 * 120 + 100


def test_a_rollout_that_fills_more_than_a_row_has_one_at_least() -> None:
    assert step_tokens(CAMPAIGN, [PLAIN], PLAN, row_tokens=150).num_rows == 20


def drawn_calls(plan: PlanSettings, prompt_tokens: int, chance: random.Random) -> list[CallRecord]:
    """Calls as long as is planned, of words of four letters; log-probs are float32, as engines have them."""

    def ids(number: int) -> tuple[int, ...]:
        return tuple(chance.randrange(VOCABULARY) for _ in range(number))

    session, history = Session(), [ids(prompt_tokens)]
    for call in range(plan.calls):
        text = Message(role="tool" if call else "user", text="word" * len(history[-1]))
        history += [session.call(*history, reply=ids(plan.reply_tokens), new_messages=(text,)), ids(plan.result_tokens)]
    return [as_recorded(call, plan, chance) for call in session.calls]


def as_recorded(call: CallRecord, plan: PlanSettings, chance: random.Random) -> CallRecord:
    assert call.tokens is not None
    numbers = [-chance.expovariate(3) for _ in call.tokens.completion_ids]
    logprobs = struct.unpack(f"{len(numbers)}f", struct.pack(f"{len(numbers)}f", *numbers))
    return dataclasses.replace(
        call,
        tokens=dataclasses.replace(call.tokens, sampling_logprobs=logprobs),
        reply=Reply(text="word" * plan.reply_tokens),
        usage=Usage(input_tokens=30_000, output_tokens=300, cached_tokens=29_000),
        headers={"x-claude-code-session-id": "0" * 36},
    )


def test_a_rollout_is_stored_in_as_many_bytes_as_is_said() -> None:
    plan = PlanSettings(calls=6)
    record = make_record(make_group(), calls=tuple(drawn_calls(plan, PLAIN.prompt_tokens, random.Random(0))))
    said = step_tokens(CampaignSettings(groups_per_step=1, samples_per_group=1), [PLAIN], plan, row_tokens=1 << 20)
    assert said.stored_bytes == pytest.approx(len(msgspec.json.encode(record)), rel=0.1)
