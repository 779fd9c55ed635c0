"""One rollout for the page: its tree with decoded text, its messages, its verdict and tails, as plain JSON values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from clawhpc.records import CallRecord, ExecResult, McpCall, Message, Reply, RolloutRecord, ToolCall, Verdict
from clawhpc.tree.build import build_tree
from clawhpc.tree.drift import measure_drift
from clawhpc.tree.nodes import CallTree, Node
from clawhpc.tree.prune import DropRule, prune_tree
from clawhpc.view.summary import PARTS, seconds_of_parts

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, special tokens included."""

MAX_TEXT = 60_000
"""Characters of one text on the page; a longer one loses its middle, and says so."""
MAX_BYTES_OF_A_CHARACTER = 4
"""In UTF-8. A token that ends inside a character waits for at most this many others."""
REPLACEMENT = "\ufffd"


@dataclass
class TextTable:
    """Texts of the page, each once: the rollouts of a run share most of their context."""

    texts: list[str] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)
    shortened: int = 0

    def add(self, text: str) -> int:
        """The place of `text` in the table."""
        if len(text) > MAX_TEXT:
            self.shortened += 1
            half = MAX_TEXT // 2
            text = f"{text[:half]}\n\n… {len(text) - 2 * half:,} characters left out …\n\n{text[-half:]}"
        if text not in self.index:
            self.index[text] = len(self.texts)
            self.texts.append(text)
        return self.index[text]


def describe_rollout(record: RolloutRecord, texts: TextTable, decode: Decode) -> dict[str, Any]:
    """All that the page shows of a rollout; texts are places in `texts`."""
    nodes, drift, note = _describe_tree(record, texts, decode)
    return {
        "seed": record.seed,
        "worker": record.worker_id,
        "instruction": texts.add(record.instruction),
        "detail": texts.add(record.detail),
        "breakdown": record.verdict.breakdown if record.verdict else {},
        "unshaped": record.verdict.unshaped if record.verdict else None,
        "judgement": _describe_judgement(record.verdict, texts),
        "parts": list(zip(PARTS, seconds_of_parts(record.timings), strict=True)),
        "harness_cpu_s": record.timings.harness_cpu_s,
        "failed_attempts": [f"{failed.outcome}: {failed.detail}" for failed in record.failed_attempts],
        "dropped_leaves": record.dropped_leaves,
        "overridden": dict(record.overridden),
        "unlisted": dict(record.unlisted),
        "mcp_counts": record.mcp_counts,
        "mcp_calls": [_describe_mcp_call(call, record.timings.started_at, texts) for call in record.mcp_calls],
        "exec": _describe_exec(record.exec_result, texts),
        "nodes": nodes,
        "drift": drift,
        "note": note,
        "calls": [_describe_call(call, texts) for call in record.calls],
    }


def _describe_judgement(verdict: Verdict | None, texts: TextTable) -> dict[str, Any] | None:
    """Each opinion with its reasons, and what all of them have in common."""
    if verdict is None or verdict.judgement is None:
        return None
    judgement = verdict.judgement
    return {
        "agreement": judgement.agreement,
        "spread": judgement.spread,
        "digest": judgement.prompt_digest[:12],
        "requests": judgement.num_requests,
        "input": judgement.usage.input_tokens,
        "output": judgement.usage.output_tokens,
        "cost_usd": judgement.cost_usd,
        "opinions": [
            {
                "model": opinion.model,
                "shown": opinion.shown,
                "scores": [
                    (name, score, texts.add(opinion.reasons.get(name, ""))) for name, score in opinion.scores.items()
                ],
            }
            for opinion in judgement.opinions
        ],
    }


def _describe_exec(result: ExecResult | None, texts: TextTable) -> dict[str, Any] | None:
    if result is None:
        return None
    return {
        "exit_code": result.exit_code,
        "timed_out": result.timed_out,
        "stdout": texts.add(result.stdout_tail),
        "stderr": texts.add(result.stderr_tail),
    }


# ---------------------------------------------------------------------------------------------------------------------
# The tree
# ---------------------------------------------------------------------------------------------------------------------


def _describe_tree(
    record: RolloutRecord, texts: TextTable, decode: Decode
) -> tuple[list[dict[str, Any]], dict[str, int], str]:
    """The nodes in preorder and how calls continue one another, or nothing and the reason."""
    if not any(call.tokens for call in record.calls):
        return [], {}, "None of its calls has tokens." if record.calls else "It made no call."
    try:
        tree = build_tree(record.rollout_id, record.calls)
        pruned = prune_tree(record.rollout_id, record.calls, max_live_leaves=len(record.calls))
    except ValueError as error:
        return [], {}, f"No tree: {error}."
    nodes = [_describe_node(node, tree, pruned.dropped, texts, decode) for node in tree.nodes]
    return nodes, asdict(measure_drift(record.calls, pruned)), ""


def _describe_node(
    node: Node, tree: CallTree, dropped: dict[int, DropRule], texts: TextTable, decode: Decode
) -> dict[str, Any]:
    shared = {
        "parent": node.parent_id,
        "start": node.start,
        "length": len(node.token_ids),
        "leaf": not tree.children[node.node_id],
    }
    if not node.sampled or node.call_id is None:
        return {**shared, "text": texts.add(decode(node.token_ids)), "continues": node.continues_id}
    return {
        **shared,
        "call": node.call_id,
        "dropped": dropped.get(node.call_id),
        "ids": node.token_ids,
        "pieces": split_text(node.token_ids, decode),
        "logprobs": [round(value, 3) for value in node.sampling_logprobs],
        "versions": [(span.version, span.start, span.end) for span in node.weight_versions],
    }


def split_text(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """The text of each token; joined, the text of all. A character in several tokens stands at the last of them."""
    pieces: list[str] = []
    waiting: list[int] = []
    for token in token_ids:
        waiting.append(token)
        text = decode(waiting)
        if text.endswith(REPLACEMENT) and len(waiting) < MAX_BYTES_OF_A_CHARACTER:
            pieces.append("")
        else:
            pieces.append(text)
            waiting.clear()
    if waiting:
        pieces[-1] = decode(waiting)
    return pieces


# ---------------------------------------------------------------------------------------------------------------------
# The messages
# ---------------------------------------------------------------------------------------------------------------------


def _describe_call(call: CallRecord, texts: TextTable) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "conversation": call.conversation_id,
        "continues": call.continues_id,
        "role": call.role,
        "protocol": call.protocol,
        "tools": [tool.name for tool in call.tools],
        "messages": [_describe_message(message, texts) for message in call.new_messages],
        "reply": _describe_reply(call.reply, texts) if call.reply else None,
        "failure": texts.add(call.failure),
        "incidents": [texts.add(incident) for incident in call.incidents],
        "delivered": call.delivered,
        "input": call.usage.input_tokens,
        "output": call.usage.output_tokens,
        "cached": call.usage.cached_tokens,
        "seconds": round(call.duration_s, 2),
        "engine_s": round(call.engine_s, 2),
        "reencoded": call.tokens.reencoded_replies if call.tokens else 0,
    }


def _describe_mcp_call(call: McpCall, began_at: float, texts: TextTable) -> dict[str, Any]:
    return {
        "server": call.server,
        "method": call.method,
        "name": call.name,
        "arguments": texts.add(call.arguments),
        "result": texts.add(call.result),
        "error": texts.add(call.error),
        "after_s": round(call.started_at - began_at, 1),
        "seconds": round(call.duration_s, 2),
    }


def _describe_message(message: Message, texts: TextTable) -> dict[str, Any]:
    return {
        "role": message.role,
        "text": texts.add(message.text),
        "thinking": texts.add(message.thinking),
        "tool_calls": _describe_tool_calls(message.tool_calls, texts),
        "answers": message.tool_call_id,
    }


def _describe_reply(reply: Reply, texts: TextTable) -> dict[str, Any]:
    return {
        "text": texts.add(reply.text),
        "thinking": texts.add(reply.thinking),
        "tool_calls": _describe_tool_calls(reply.tool_calls, texts),
        "finish": reply.finish_reason,
    }


def _describe_tool_calls(tool_calls: tuple[ToolCall, ...], texts: TextTable) -> list[dict[str, Any]]:
    return [{"id": call.id, "name": call.name, "arguments": texts.add(call.arguments)} for call in tool_calls]
