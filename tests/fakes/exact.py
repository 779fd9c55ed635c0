"""Rollouts with the real chat format, whose engine draws ids that no encoder would make; and what must hold of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgspec

from clawhpc.engine.render import ChatRenderer
from clawhpc.proxy.respond import PolicyResponder, PolicySampling
from clawhpc.proxy.session import Session
from clawhpc.records import CallRecord, Limits
from clawhpc.tree.build import build_tree, whole_calls
from clawhpc.tree.drift import Drift, measure_drift
from clawhpc.tree.prune import prune_tree
from clawhpc.wire.anthropic import Anthropic
from clawhpc.wire.base import ReplyHead
from clawhpc.wire.openai_chat import OpenAIChat
from clawhpc.wire.openai_responses import OpenAIResponses
from tests.fakes.caller import session_of
from tests.fakes.chat_tokenizer import CONTROL, write_tokenizer
from tests.fakes.engine import FakeEngine, replies
from tests.fakes.prompts import repeated_calls

Body = dict[str, Any]
Echo = Callable[[Body], Body]
PARTS = re.compile("(" + "|".join(map(re.escape, CONTROL)) + ")")
LIMITS = Limits(max_calls=1000, max_sampled_tokens=10**7)


def make_renderer(folder: Path, *, thinking: bool = False) -> ChatRenderer:
    write_tokenizer(folder)
    return ChatRenderer(folder, renderer="qwen3", thinking=thinking)


def draw_apart(renderer: ChatRenderer) -> Callable[[str], tuple[int, ...]]:
    """The ids of a reply, each character by itself. A control token's name is that token, unless `~` is before it."""

    def draw(text: str) -> tuple[int, ...]:
        ids: list[int] = []
        for at, part in enumerate(PARTS.split(text)):
            if at % 2 and not (ids and renderer.decode(ids).endswith("~")):
                ids.append(renderer._tokenizer.convert_tokens_to_ids(part))
            else:
                for character in part:
                    ids += renderer._tokenizer.encode(character)
        return (*ids, renderer.stop_token_ids[0])

    return draw


def exact_policy(renderer: ChatRenderer, *said: str, window: int = 10**6) -> tuple[PolicyResponder, FakeEngine]:
    """A policy that says one after the other."""
    engine = FakeEngine(replies(*said), draw_ids=draw_apart(renderer))
    return PolicyResponder(engine=engine, renderer=renderer, sampling=PolicySampling(context_window=window)), engine


class Dialect(Protocol):
    """How one protocol's harness speaks."""

    def results(self, reply: Body) -> list[Body]:
        """What the harness sends after a reply."""
        ...

    async def ask(self, session: Session, messages: Sequence[Body], **fields: Any) -> Body:
        """Send a history; the answer as it would be echoed."""
        ...


async def _answered(session: Session, protocol: Any, body: Body) -> Body:
    content = msgspec.json.encode(body)
    request = protocol.parse_request(content)
    call = await session.open_call(protocol=protocol.name, request=request, headers={}, num_bytes=len(content))
    with anyio.fail_after(5):
        await call.done.wait()
    assert call.response is not None, call.error
    session.mark_delivered(call)
    head = ReplyHead(id=str(call.call_id), model="policy", created=0, input_tokens=0, form=request.form)
    whole: Body = protocol.reply_body(head, call.response.reply, call.response.usage)
    return whole


class AnthropicDialect:
    def results(self, reply: Body) -> list[Body]:
        calls = [block for block in reply["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": f"ran {call['name']}"} for call in calls
        ]
        return [{"role": "user", "content": results or "go on"}]

    async def ask(self, session: Session, messages: Sequence[Body], **fields: Any) -> Body:
        whole = await _answered(session, Anthropic(), {"model": "policy", "messages": [*messages], **fields})
        return {"role": "assistant", "content": whole["content"]}


class ChatDialect:
    def results(self, reply: Body) -> list[Body]:
        calls = reply.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "ran it"} for call in calls]
        return results or [{"role": "user", "content": "go on"}]

    async def ask(self, session: Session, messages: Sequence[Body], **fields: Any) -> Body:
        whole = await _answered(session, OpenAIChat(), {"model": "policy", "messages": [*messages], **fields})
        message: Body = whole["choices"][0]["message"]
        message.pop("refusal", None)
        return message


class ResponsesDialect:
    """What is one message elsewhere is a list of items here."""

    def results(self, reply: Body) -> list[Body]:
        calls = [item for item in reply["items"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "ran it"} for call in calls]
        return results or [{"role": "user", "content": "go on"}]

    async def ask(self, session: Session, messages: Sequence[Body], **fields: Any) -> Body:
        items = [item for message in messages for item in message.get("items", [message])]
        whole = await _answered(session, OpenAIResponses(), {"model": "policy", "input": items, **fields})
        return {"items": whole["output"]}


async def converse(
    renderer: ChatRenderer,
    said: Sequence[str],
    dialect: Dialect,
    echo: Echo = lambda message: message,
    task: str = "do it",
    **fields: Any,
) -> tuple[tuple[CallRecord, ...], FakeEngine]:
    """One call for each of `said`; the harness keeps of each reply what `echo` makes of it."""
    responder, engine = exact_policy(renderer, *said)
    history: list[Body] = [{"role": "user", "content": task}]
    async with session_of(responder, limits=LIMITS) as session:
        for _ in said:
            reply = await dialect.ask(session, history, **fields)
            echoed = echo(msgspec.json.decode(msgspec.json.encode(reply)))
            history += [echoed, *dialect.results(echoed)]
        return session.calls(), engine


def check_exact(calls: Sequence[CallRecord], engine: FakeEngine, *, rewritten: bool = False) -> None:
    """Laws 1 and 2, and no reply encoded again, unless the harness has `rewritten` some."""
    assert [call.failure for call in calls] == [""] * len(calls)
    requests = {request.request_id.split("-")[1]: request for request in engine.requests}
    tree, whole = build_tree("r", calls), whole_calls(calls)
    for call in calls:
        assert call.tokens is not None
        assert len(call.tokens.completion_ids) == len(call.tokens.sampling_logprobs)
        asked = requests[str(call.call_id)].prompt_ids
        assert whole[call.call_id].prompt_ids == asked
        assert tree.path_token_ids(tree.leaf_of_call[call.call_id]) == asked + call.tokens.completion_ids
        assert rewritten or call.tokens.reencoded_replies == 0
        assert call.usage.input_tokens == len(asked)


def check_one_path(calls: Sequence[CallRecord], engine: FakeEngine) -> None:
    """The calls are one conversation in which each extends the draw of the one before it."""
    check_exact(calls, engine)
    assert {call.conversation_id for call in calls} == {0}
    assert [call.continues_id for call in calls] == [None, *range(len(calls) - 1)]
    assert repeated_calls(calls, len(calls) - 1) == [*range(len(calls) - 1)]
    assert len(build_tree("r", calls).leaves) == 1
    drift = drift_of(calls)
    assert (drift.extended, drift.copied, drift.reencoded, drift.alarm) == (len(calls) - 1, 0, 0, False)


def drift_of(calls: Sequence[CallRecord], max_live_leaves: int = 1) -> Drift:
    """How faithfully the histories repeated what was drawn."""
    pruned = prune_tree("r", calls, max_live_leaves=max_live_leaves)
    assert not pruned.over_branched
    return measure_drift(calls, pruned)
