"""Tokens, and one model call as the proxy recorded it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from clawhpc.records.conversation import FinishReason, Message, Reply, Sampling, Tool, Usage


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """`completion_ids[start:end]` were drawn by the weights of policy step `version` (law 9)."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What the engine drew for one prompt (engine -> proxy)."""

    completion_ids: tuple[int, ...]
    """Sampled tokens, the stop token included when the model drew one."""
    sampling_logprobs: tuple[float, ...]
    """Aligned with `completion_ids`: natural log, under the distribution that the token was drawn from."""
    finish_reason: FinishReason
    weight_versions: tuple[VersionSpan, ...]
    """In order, without gaps, covering `completion_ids`."""
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.completion_ids) != len(self.sampling_logprobs):
            raise ValueError(
                f"{len(self.completion_ids)} completion_ids but {len(self.sampling_logprobs)} sampling_logprobs"
            )
        position = 0
        for span in self.weight_versions:
            if span.start != position or span.end < span.start:
                raise ValueError(f"weight_versions have a gap or overlap at {position}: {self.weight_versions}")
            position = span.end
        if position != len(self.completion_ids):
            raise ValueError(f"weight_versions cover {position} of {len(self.completion_ids)} tokens")

    def until(self, length: int) -> Generation:
        """Its first `length` tokens, as if a stop string had ended it there."""
        spans = (
            VersionSpan(version=span.version, start=span.start, end=min(span.end, length))
            for span in self.weight_versions
            if span.start < length
        )
        return Generation(
            completion_ids=self.completion_ids[:length],
            sampling_logprobs=self.sampling_logprobs[:length],
            finish_reason="stop",
            weight_versions=tuple(spans),
            cached_tokens=self.cached_tokens,
        )


class CallRole(StrEnum):
    """What a harness made a call for."""

    MAIN = "main"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    SIDE = "side"


@dataclass(frozen=True, kw_only=True)
class Graft:
    """`prompt_ids[start:start + length]` of a call repeat the sampled reply of `call_id`: context, not draws."""

    call_id: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class CallTokens:
    """The tokens of a call, stored as a difference to its parent (proxy -> store, tree)."""

    prefix_length: int
    """Of the parent's `prompt_ids + completion_ids`, how many stand at the head of this prompt; 0 without parent."""
    suffix_ids: tuple[int, ...]
    """The rest of the prompt: `prompt_ids = (parent's tokens)[:prefix_length] + suffix_ids`."""
    completion_ids: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    """Aligned with `completion_ids`."""
    weight_versions: tuple[VersionSpan, ...]
    grafts: tuple[Graft, ...] = ()
    """The recorded replies that this prompt repeats, in order of position, but for those that follow from the parent:
    what its prompt repeats inside the shared prefix, and its own reply where this call continues it.
    """
    reencoded_replies: int = 0
    """Replies in this history that stand in the prompt as encoded text although ids were drawn there: 0, or a defect to
    look at. Recorded ones that could not be grafted, and messages that the harness made up in place of one.
    """


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """One model request and its reply, as the proxy recorded it (proxy -> store, tree)."""

    call_id: int
    """Position in the rollout, from 0, in order of arrival."""
    parent_id: int | None
    """The earlier call whose tokens this prompt extends the furthest."""
    conversation_id: int
    """Calls that continue one another share it: the id of the first of them."""
    continues_id: int | None
    """The last earlier call whose sampled reply stands in this history; None for the first call of a conversation."""
    role: CallRole
    protocol: str
    headers: dict[str, str]
    """Only those from which the role was read."""
    new_messages: tuple[Message, ...]
    """The history after the reply of `continues_id`; all of it for the first call of a conversation."""
    tools: tuple[Tool, ...]
    """Empty when equal to the tools of `continues_id`."""
    tools_same: bool
    """The tools are those of `continues_id`."""
    requested: Sampling
    """What the harness asked for."""
    overridden: tuple[str, ...] = ()
    """Request fields that the campaign decides, whatever the harness asked for: it asked for something else."""
    unlisted: tuple[str, ...] = ()
    """Request fields that the protocol's table does not list, by path: nobody has decided what they mean here."""
    reply: Reply | None
    """None when the call was cancelled or failed before there was one; then `failure` says why."""
    tokens: CallTokens | None
    """None for a text-only record (oracle, API model), which RL refuses, and for a failed call."""
    usage: Usage
    model: str = ""
    """Of a text-only record: the model behind an API that answered, as its endpoint calls it. Empty for all others."""
    received_at: float
    """Seconds since the epoch."""
    duration_s: float
    engine_s: float
    """Of `duration_s`, the wait for the engine."""
    delivered: bool
    """The whole reply was written to a connection that was still open."""
    failure: str = ""
    incidents: tuple[str, ...] = ()
    """What went wrong on the way although it was answered, such as an engine that died and came back."""
