"""What must hold of every run, whatever the harness does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from clawhpc.records import CallRecord, CallRole, Outcome, RolloutRecord
from clawhpc.tree.build import build_tree, whole_calls
from clawhpc.tree.drift import measure_drift
from clawhpc.tree.prune import PrunedTree, prune_tree
from tests.conformance.bench import INSTRUCTION, LIMITS, MODEL, Observed
from tests.conformance.scenarios import MAX_OUTPUT_TOKENS

SUM = "the sum is 5"
"""What the server says to the call of the scenario."""
TOLD = {
    "instruction": "it does not stand in the first prompt word for word",
    "model": "the main loop asks for another one",
    "max_tokens": "the main loop asks for another length",
    "workspace": "there are files that no command wrote",
}
"""What is wrong where a law of what the adapter tells is broken."""


def broken_laws(observed: Observed) -> list[str]:
    """One line for each thing that does not hold."""
    record = observed.record
    if record.outcome in (Outcome.TIMEOUT, Outcome.LIMIT) or not (record.trains or observed.scenario.may_fail):
        return [f"{record.outcome}: {record.detail}"]
    faults = [*token_faults(observed), *tree_faults(record), *delivery_faults(observed), *told_faults(observed)]
    if surplus := Counter(observed.ran) - Counter(observed.scenario.ran):
        faults.append(f"commands ran that should not have, or twice: {', '.join(surplus)}")
    if observed.scenario.mcp in ("slow", "host"):
        faults += mcp_faults(observed)
    if observed.scenario.mcp in ("host", "host_broken"):
        faults += host_faults(observed)
    faults += [
        f"call {call.call_id}: nobody lists {', '.join(call.unlisted)}" for call in record.calls if call.unlisted
    ]
    if count := reencodings(observed):
        faults.append(f"{count} replies were encoded again")
    if own_words(observed) and not speaks_for_itself(observed):
        faults.append(f"{own_words(observed)} messages of the assistant repeat no reply that was drawn")
    if count := false_forks(record):
        faults.append(f"{count} forks that no harness meant")
    return faults


def token_faults(observed: Observed) -> Iterator[str]:
    """Law 1: what is recorded is what the engine received and drew, all of it, and nothing else."""
    whole = whole_calls(observed.record.calls)
    if whole.keys() != observed.drawn.keys():
        yield f"drawn were calls {sorted(observed.drawn)}, recorded are {sorted(whole)}"
    for call_id in whole.keys() & observed.drawn.keys():
        call, (prompt_ids, drawn) = whole[call_id], observed.drawn[call_id]
        if tuple(call.prompt_ids) != prompt_ids:
            yield f"call {call_id}: the prompt is not rebuilt as the engine received it"
        if tuple(call.tokens.completion_ids) != tuple(drawn.completion_ids):
            yield f"call {call_id}: the completion is not what was drawn"
        if tuple(call.tokens.sampling_logprobs) != tuple(drawn.sampling_logprobs):
            yield f"call {call_id}: the log-probs are not those of the draw"


def tree_faults(record: RolloutRecord) -> Iterator[str]:
    """Law 2: each path is a call's prompt and completion; each draw stands in the tree once."""
    tree = build_tree(record.rollout_id, record.calls)
    whole = whole_calls(record.calls)
    for call_id, call in whole.items():
        if tuple(tree.path_token_ids(tree.leaf_of_call[call_id])) != tuple(call.token_ids):
            yield f"call {call_id}: its path is not its prompt and its completion"
    drawn = sum(len(call.tokens.completion_ids) for call in whole.values())
    if tree.num_sampled_tokens != drawn:
        yield f"{drawn} tokens were drawn, {tree.num_sampled_tokens} stand in the tree as sampled"


def delivery_faults(observed: Observed) -> Iterator[str]:
    """An answer that was drawn reached the harness, unless its connection was cut for good."""
    lost = [call.call_id for call in observed.record.calls if call.tokens is not None and not call.delivered]
    if len(lost) > len(observed.scenario.cuts):
        yield f"calls {lost} were answered and never delivered"


def told_faults(observed: Observed) -> Iterator[str]:
    """What the adapter was told reaches the model, and nothing but the task's own files lies in the workspace."""
    calls = [call for call in observed.record.calls if call.role is CallRole.MAIN]
    if not calls:
        return
    kept = {
        "instruction": any(INSTRUCTION in message.text for message in calls[0].new_messages),
        "model": observed.models == {MODEL},
        "max_tokens": {call.requested.max_tokens for call in until_cut(calls)} == {MAX_OUTPUT_TOKENS},
        "workspace": not observed.files,
    }
    for law, holds in kept.items():
        if holds and law in observed.profile.breaks:
            yield f"the profile says that it does not keep {law}, and it does"
        if not holds and law not in observed.profile.breaks:
            yield f"{law}: {TOLD[law]}"
    if observed.scenario.name == "many_turns" and len({call.conversation_id for call in calls}) != 1:
        yield "one conversation is recorded as several"


def until_cut(calls: list[CallRecord]) -> list[CallRecord]:
    """Up to the first whose reply the length limit cut: afterwards a harness may ask for more, and Hermes does."""
    cut = (
        place for place, call in enumerate(calls, 1) if call.reply is not None and call.reply.finish_reason == "length"
    )
    return calls[: next(cut, len(calls))]


def mcp_faults(observed: Observed) -> Iterator[str]:
    """The tool of a server that is slow to start is offered from the first call, and its answer comes through."""
    calls = observed.record.calls
    if observed.profile.mcp_tool not in {tool.name for tool in calls[0].tools}:
        offered = ", ".join(tool.name for tool in calls[0].tools)
        yield f"the first call does not offer {observed.profile.mcp_tool}, but {offered}"
    if any(call.tools for call in calls[1:] if call.role is CallRole.MAIN):
        yield "the tools change on the way"
    if not any(SUM in message.text for call in calls for message in call.new_messages):
        yield "the server's answer is in no history"


def host_faults(observed: Observed) -> Iterator[str]:
    """What a server on the host was asked is recorded; one that does not start is no doing of the policy."""
    record = observed.record
    if observed.scenario.mcp == "host" and [(call.name, SUM in call.result) for call in record.mcp_calls] != [
        ("add", True)
    ]:
        yield f"the record has other calls of the server than one that was answered: {record.mcp_calls}"
    if observed.scenario.mcp == "host_broken" and "exit code 1: no database" not in record.detail:
        yield f"a server that does not start is {record.outcome}: {record.detail}"


def pruned(record: RolloutRecord) -> PrunedTree:
    return prune_tree(record.rollout_id, record.calls, max_live_leaves=LIMITS.max_live_leaves)


def dead_leaves(record: RolloutRecord) -> int:
    """Replies that the harness asked for and threw away, of the main loop's."""
    return pruned(record).dropped_leaves.get("dead", 0)


def reencodings(observed: Observed) -> int:
    """Replies that a history repeats in other ids than were drawn."""
    return max(0, recorded_reencodings(observed) - (own_words(observed) if speaks_for_itself(observed) else 0))


def own_words(observed: Observed) -> int:
    """Messages of the assistant, in one history, that repeat no reply at all. The record takes one for a reply that was
    encoded again where it stands in the place of a reply.
    """
    if speaks_for_itself(observed):
        return observed.strangers
    return max(0, observed.strangers - recorded_reencodings(observed))


def speaks_for_itself(observed: Observed) -> bool:
    return observed.scenario.name in observed.profile.own_words


def recorded_reencodings(observed: Observed) -> int:
    return measure_drift(observed.record.calls, pruned(observed.record)).reencoded_replies


def false_forks(record: RolloutRecord) -> int:
    """Places where one conversation of the main loop became two.

    Of a conversation one leaf may be alive, its last: another one is a reply that the conversation went on from. The
    main loop has one conversation that trains, and one more after each compaction: another one went on from a reply
    that was not recognised.
    """
    compactions = sum(call.role is CallRole.COMPACTION and call.tokens is not None for call in record.calls)
    leaves = pruned(record).live_leaves
    return sum(len(alive) - 1 for alive in leaves.values()) + max(0, len(leaves) - 1 - compactions)
