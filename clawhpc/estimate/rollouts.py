"""What a step draws and reads, in tokens, and what of it the store keeps, in bytes.

With n calls in a rollout, r tokens in a reply and s in what comes back from a tool, h in the prompt of the harness:

    drawn    n r
    context  h + n (r + s) at the end of a rollout: what the window must hold
    body     n (r + s), which no other rollout has; n r more where a harness moves its last message, and so each reply
             stands in the tree a second time, as context
    rows     as many bodies as a row holds beside one head: trees of a row share their context
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from clawhpc.campaign.settings import CampaignSettings
from clawhpc.estimate.settings import PlanSettings
from clawhpc.harness.base import HarnessSettings

CONTEXT_BYTES = 10.5
"""Of a token of a prompt in a rollout's JSON: its id, and four letters of text."""
DRAWN_BYTES = 31.0
"""Of a drawn token: its id, its log-prob, its text."""
CALL_BYTES = 1_000.0
"""Of a call beside its tokens."""


@dataclass(frozen=True, kw_only=True)
class HarnessCost:
    """What a harness costs in every rollout: docs/harnesses.md, as measured with the real programs."""

    prompt_tokens: int
    """Before the first word of the task."""
    cpu_s: float
    """To start and end."""
    memory_gb: float
    """Of all its processes, at most."""
    moves_message: bool = False
    """Its last message moves to the end of each prompt."""


COSTS: Mapping[str, HarnessCost] = {
    "claude_code": HarnessCost(prompt_tokens=20_000, cpu_s=0.9, memory_gb=0.2),
    "openclaw": HarnessCost(prompt_tokens=25_000, cpu_s=15.0, memory_gb=1.5, moves_message=True),
    "codex": HarnessCost(prompt_tokens=9_000, cpu_s=0.4, memory_gb=0.15),
    "pi": HarnessCost(prompt_tokens=1_000, cpu_s=1.2, memory_gb=0.2),
    "qwen_code": HarnessCost(prompt_tokens=18_000, cpu_s=4.0, memory_gb=1.9),
    "opencode": HarnessCost(prompt_tokens=7_000, cpu_s=7.0, memory_gb=0.7),
    "gemini_cli": HarnessCost(prompt_tokens=11_000, cpu_s=3.0, memory_gb=0.5),
    "mini_swe_agent": HarnessCost(prompt_tokens=1_000, cpu_s=6.0, memory_gb=0.25),
    "hermes": HarnessCost(prompt_tokens=13_000, cpu_s=4.0, memory_gb=0.2),
    "nanobot": HarnessCost(prompt_tokens=8_000, cpu_s=3.0, memory_gb=0.15),
    "whitebox": HarnessCost(prompt_tokens=1_000, cpu_s=0.5, memory_gb=0.1),
}
"""As people use each of them; tokens of Qwen3's tokenizer, rounded up."""
BARE_TOKENS: Mapping[str, int] = {"claude_code": 1_000, "openclaw": 5_000, "gemini_cli": 1_000}
"""Of those that have a bare mode, in it."""


def harness_costs(settings: Mapping[str, HarnessSettings]) -> dict[str, HarnessCost]:
    """Of the harnesses of a run, as it sets them."""
    return {name: _cost(name, of_harness) for name, of_harness in settings.items()}


def _cost(name: str, settings: HarnessSettings) -> HarnessCost:
    cost = COSTS[name]
    if not getattr(settings, "bare", False):
        return cost
    return HarnessCost(
        prompt_tokens=BARE_TOKENS[name],
        cpu_s=cost.cpu_s,
        memory_gb=cost.memory_gb,
        moves_message=cost.moves_message,
    )


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """Of one step; where there are several harnesses, each has an equal share of its rollouts."""

    num_groups: int
    num_rollouts: int
    drawn: int
    read: int
    """That engines compute of prompts, at most: a head once for each group, then what is new in each call."""
    longest: int
    """The context at the end of the longest rollout."""
    in_rows: int
    """That the learner computes in each pass."""
    num_rows: int
    mean_keys: int
    """That a token of a row looks at, on average."""
    stored_bytes: int


def step_tokens(
    campaign: CampaignSettings, costs: Sequence[HarnessCost], plan: PlanSettings, *, row_tokens: int
) -> StepTokens:
    """Of a step of `groups_per_step` groups; a row has at most `row_tokens`."""
    num_rollouts = campaign.groups_per_step * campaign.samples_per_group
    shares = [_share(cost, num_rollouts / len(costs), plan, row_tokens) for cost in costs]
    turn = plan.reply_tokens + plan.result_tokens
    heads = sum(cost.prompt_tokens for cost in costs) / len(costs)
    context = plan.calls * turn
    again = plan.reply_tokens * sum(cost.moves_message for cost in costs) / len(costs)
    of_call = CALL_BYTES + plan.reply_tokens * DRAWN_BYTES
    between = (plan.result_tokens + again) * CONTEXT_BYTES
    stored = heads * CONTEXT_BYTES + plan.calls * of_call + (plan.calls - 1) * between
    return StepTokens(
        num_groups=campaign.groups_per_step,
        num_rollouts=num_rollouts,
        drawn=num_rollouts * plan.calls * plan.reply_tokens,
        read=int(campaign.groups_per_step * heads + num_rollouts * plan.calls * plan.result_tokens),
        longest=max(cost.prompt_tokens for cost in costs) + context,
        in_rows=sum(tokens for tokens, _ in shares),
        num_rows=sum(rows for _, rows in shares),
        mean_keys=int(heads + context / 2),
        stored_bytes=int(num_rollouts * stored),
    )


def _share(cost: HarnessCost, num_rollouts: float, plan: PlanSettings, row_tokens: int) -> tuple[int, int]:
    """Tokens in rows, and rows, of the rollouts of one harness."""
    body = plan.calls * (plan.reply_tokens * (2 if cost.moves_message else 1) + plan.result_tokens)
    in_a_row = max(1.0, (row_tokens - cost.prompt_tokens) // body)  # a tree over a row is cut, its head repeated
    num_rows = ceil(num_rollouts / in_a_row)
    return int(num_rollouts * body + num_rows * cost.prompt_tokens), num_rows
