"""From the raw reward to what trains. Pure; see `ShapingSettings` for the formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clawhpc.records import CallRecord, Verdict
from clawhpc.verify.settings import ShapingSettings

PLAIN = ShapingSettings()
"""Changes nothing."""


def shape(verdict: Verdict, calls: Sequence[CallRecord], settings: ShapingSettings) -> Verdict:
    """`verdict` with the reward that trains; its raw reward stays beside it."""
    if settings == PLAIN:
        return verdict
    share = malformed_share(calls)
    return replace(
        verdict,
        reward=shaped_reward(verdict.raw_reward, share, settings),
        unshaped=verdict.raw_reward,
        breakdown={**verdict.breakdown, "malformed_share": share},
    )


def shaped_reward(raw: float, malformed: float, settings: ShapingSettings) -> float:
    """In [0, 1]; grows with `raw`, falls with `malformed`, the share of malformed calls."""
    outcome = 1.0 if raw >= settings.threshold else settings.partial_credit * raw
    penalty = settings.format_penalty
    return min(1.0, (1.0 - penalty) * outcome + penalty * (1.0 - malformed))


def malformed_share(calls: Sequence[CallRecord]) -> float:
    """Of the answered calls, those with a tool call that could not be read, or of a tool that was not offered.

    0 where none was answered. What a harness that takes its commands from plain text makes of one is not known here.
    """
    offered: dict[int | None, frozenset[str]] = {}
    malformed = []
    for call in calls:
        own = frozenset(tool.name for tool in call.tools)
        offered[call.call_id] = offered.get(call.continues_id, own) if call.tools_same else own
        if call.reply is not None:
            unknown = any(made.name not in offered[call.call_id] for made in call.reply.tool_calls)
            malformed.append(unknown or call.reply.malformed_calls > 0)
    return sum(malformed) / len(malformed) if malformed else 0.0
