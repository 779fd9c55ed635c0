"""Recorded rollouts as trees to imitate.

    RolloutRecord ──choose──▶ RolloutRecord ──ids that were drawn, or encode_calls──▶ prune_tree ──▶ CallTree

Ids are used again where the policy that drew them spells conversations as the student does. All else is text: rollouts
of a model behind an API, of the oracle, of a policy with another tokenizer. It is encoded once, as the proxy would have
rendered it for the student, and for imitation only (law 1). Dead leaves and other roles are dropped by the rules of
reinforcement learning (law 4), and every sampled token stands in its tree once.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from clawhpc.engine.render import ChatRenderer, RecordedReply
from clawhpc.errors import EngineError
from clawhpc.learner.settings import SftSettings
from clawhpc.learner.traces import as_message
from clawhpc.paths import RunPaths
from clawhpc.proxy.tokens import TokenStore
from clawhpc.records import POLICY_OUTCOMES, CallRecord, Conversation, Generation, Message, RolloutRecord, VersionSpan
from clawhpc.store import read_policy
from clawhpc.tree.nodes import CallTree
from clawhpc.tree.prune import prune_tree

log = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------------------------------
# Which rollouts
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The rollouts to imitate, and why the others are not."""

    records: tuple[RolloutRecord, ...]
    left_out: Counter[str]
    """Reason -> rollouts: `outcome`, `heldout`, `reward`, `per_task`."""


def choose(records: Iterable[RolloutRecord], settings: SftSettings, heldout: Container[tuple[str, str]]) -> Choice:
    """Those that ended by the policy's own doing, with reward enough, on no task of `heldout`: ids and instructions."""
    left_out: Counter[str] = Counter()
    found: defaultdict[tuple[str, str], list[tuple[float, RolloutRecord]]] = defaultdict(list)
    for record in records:
        if record.outcome not in POLICY_OUTCOMES or record.verdict is None:
            left_out["outcome"] += 1
        elif (record.key.task_id, record.instruction) in heldout:
            left_out["heldout"] += 1
        elif record.verdict.raw_reward < settings.min_reward:
            left_out["reward"] += 1
        else:
            found[record.key.task_id, record.key.harness].append((record.verdict.raw_reward, record))
    kept = []
    for rewarded in found.values():
        best = [record for _, record in sorted(rewarded, key=lambda pair: pair[0], reverse=True)]
        kept += best[: settings.per_task or None]
        left_out["per_task"] += len(best[settings.per_task :]) if settings.per_task else 0
    return Choice(records=tuple(kept), left_out=+left_out)


# ---------------------------------------------------------------------------------------------------------------------
# How a policy spells a conversation
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """What decides which ids a conversation has. Equal for policies whose ids can be exchanged."""

    tokenizer: str
    """SHA-256 of its file."""
    renderer: str
    thinking: bool

    @classmethod
    def of(cls, policy: Path) -> Spelling:
        """Of the policy in a folder. UserError, or OSError, where it is not there."""
        version = read_policy(policy)
        digest = sha256((policy / "tokenizer.json").read_bytes()).hexdigest()
        return cls(tokenizer=digest, renderer=version.renderer, thinking=version.thinking)


class Student:
    """Turns rollouts into trees of the ids that the policy in `folder` takes."""

    def __init__(self, folder: Path) -> None:
        self._spelling = Spelling.of(folder)
        self._renderer = ChatRenderer(folder, renderer=self._spelling.renderer, thinking=self._spelling.thinking)
        self._known: dict[Path, bool] = {}
        self.num_encoded = 0
        """Rollouts that were encoded from their text."""

    def tree(self, run: RunPaths, record: RolloutRecord) -> CallTree | None:
        """What of a rollout of `run` is imitated; None, and a line in the log, for one that makes no tree."""
        calls: Sequence[CallRecord] = record.calls
        try:
            if not self._can_take(run, record):
                calls = encode_calls(self._renderer, calls, thinking=self._spelling.thinking)
                self.num_encoded += 1
            return prune_tree(record.rollout_id, calls, max_live_leaves=len(calls)).tree
        except (EngineError, ValueError) as error:
            log.warning("rollout %s of %s is not imitated: %s", record.rollout_id, run.root, error)
            return None

    def _can_take(self, run: RunPaths, record: RolloutRecord) -> bool:
        """All of its replies have ids, drawn by policies that spell as this one."""
        replied = [call for call in record.calls if call.reply is not None]
        versions = {span.version for call in replied if call.tokens for span in call.tokens.weight_versions}
        return all(call.tokens for call in replied) and all(self._spells_alike(run.policy(one)) for one in versions)

    def _spells_alike(self, policy: Path) -> bool:
        if policy not in self._known:
            self._known[policy] = (policy / "tokenizer.json").exists() and Spelling.of(policy) == self._spelling
            if not self._known[policy]:
                log.info("the ids of %s are not the student's: its rollouts are encoded again, from their text", policy)
        return self._known[policy]


# ---------------------------------------------------------------------------------------------------------------------
# From text to ids
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Heard:
    """A call, and what its request repeats."""

    request: Conversation
    said: Message
    recorded: Mapping[int, RecordedReply]
    """By index into the request's messages."""
    reply: RecordedReply


def encode_calls(renderer: ChatRenderer, calls: Sequence[CallRecord], *, thinking: bool) -> tuple[CallRecord, ...]:
    """The calls as the proxy would have recorded them, had the student drawn their replies.

    `thinking`: whether it thinks; else reasoning is left out. Log-probs are 0: for imitation only. EngineError where
    the chat format cannot say a reply.
    """
    heard: dict[int, _Heard] = {}
    return tuple(_encoded(renderer, calls, heard, TokenStore(), thinking=thinking))


def _encoded(
    renderer: ChatRenderer, calls: Sequence[CallRecord], heard: dict[int, _Heard], store: TokenStore, *, thinking: bool
) -> Iterator[CallRecord]:
    for call in sorted(calls, key=lambda call: call.call_id):
        if call.reply is None:
            yield replace(call, parent_id=None, tokens=None)
            continue
        request, recorded = _request(call, heard)
        prompt = renderer.render(request, recorded)
        said = as_message(call.reply) if thinking else replace(as_message(call.reply), thinking="")
        ids = renderer.encode_reply(said)
        if call.reply.finish_reason == "length" and ids[-1] in renderer.stop_token_ids:
            ids = ids[:-1]  # it was cut: that it should end here is nothing to learn
        stored = store.add(
            call.call_id,
            prompt.ids,
            Generation(
                completion_ids=ids,
                sampling_logprobs=(0.0,) * len(ids),
                finish_reason=call.reply.finish_reason,
                weight_versions=(VersionSpan(version=0, start=0, end=len(ids)),),
            ),
            continues_id=call.continues_id,
            grafts=prompt.grafts,
            reencoded_replies=prompt.reencoded_replies,
        )
        reply = RecordedReply(call_id=call.call_id, completion_ids=stored.completion_ids, prompt=prompt)
        heard[call.call_id] = _Heard(request=request, said=said, recorded=recorded, reply=reply)
        yield replace(call, parent_id=stored.parent_id, tokens=stored.written_out())


def _request(call: CallRecord, heard: Mapping[int, _Heard]) -> tuple[Conversation, dict[int, RecordedReply]]:
    """The request of a call, and the replies in it: those of the call that it continues, and that one's own."""
    if call.continues_id is None:
        return Conversation(model="", messages=call.new_messages, tools=call.tools), {}
    before = heard[call.continues_id]
    messages = before.request.messages
    request = Conversation(
        model="",
        messages=(*messages, before.said, *call.new_messages),
        tools=before.request.tools if call.tools_same else call.tools,
    )
    return request, {**before.recorded, len(messages): before.reply}
