"""Harnesses that do anything: what is remembered from earlier calls changes no prompt, and laws 1 and 2 hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawhpc.engine.render import ChatRenderer, RecordedReply
from clawhpc.memo import Memo
from clawhpc.proxy.respond import PolicyResponder, PolicySampling, Prompt
from clawhpc.records import Conversation
from tests.fakes.caller import ask, session_of, text, user
from tests.fakes.engine import FakeEngine
from tests.fakes.exact import LIMITS, AnthropicDialect, check_exact, draw_apart, make_renderer

Body = dict[str, Any]
CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'
SAID = ("ok", "ok", "So.\n" + CALL, CALL, CALL + CALL, " two words\n", "", "~<|im_end|>")
TOOL = {"name": "Bash", "description": "Run.", "input_schema": {"type": "object"}}
MOVES = (
    "continue",
    "continue",
    "continue",
    "retry",
    "fork",
    "edit",
    "drop",
    "move",
    "strip",
    "other tools",
    "insert",
    "insert blank",
)


@dataclass(frozen=True, kw_only=True)
class Forgetful(PolicyResponder):
    """Holds each prompt against one that is made from nothing."""

    forgetful: ChatRenderer

    def prepare(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> Prompt:
        prompt = super().prepare(conversation, recorded)
        assert prompt.rendered is not None
        bare = {at: replace(reply, prompt=None, turns={}) for at, reply in recorded.items()}
        afresh = self.forgetful.render(conversation, bare)
        assert prompt.rendered.prompt_ids == afresh.prompt_ids
        assert prompt.rendered.grafts == afresh.grafts
        assert prompt.rendered.reencoded_replies == 0
        assert [*prompt.rendered.ids.whole()] == [*afresh.ids]
        return prompt


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return make_renderer(tmp_path_factory.mktemp("renderer"))


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    renderer = make_renderer(tmp_path_factory.mktemp("forgetful"))
    renderer._tools, renderer._heads, renderer._turns = Memo(0), Memo(0), Memo(0)
    renderer._tokenizer._known = Memo(0)
    return renderer


def rewrite(move: str, history: list[Body], number: int) -> list[Body]:
    """The history that the harness goes on with."""
    match move:
        case "edit":
            return [user(f"task, edited {number}"), *history[1:]]
        case "drop" if len(history) > 3:
            return [history[0], *history[3:]]
        case "fork" if len(history) > 2:
            return [*history[:-2], user(f"fork {number}")]
        case "strip":
            return [*map(_without_blanks, history)]
        case "insert":
            return [*history, {"role": "assistant", "content": "made up"}, user("so?")]
        case "insert blank":
            return [*history, {"role": "assistant", "content": ""}, user("so?")]
        case _:
            return history


def _without_blanks(message: Body) -> Body:
    if message["role"] == "user" or isinstance(message["content"], str):
        return message
    blocks = [{**one, "text": one["text"].strip()} if one["type"] == "text" else one for one in message["content"]]
    return {**message, "content": blocks}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(MOVES), st.sampled_from(SAID), st.integers(0, 3)), min_size=2, max_size=10))
def test_memory_changes_no_prompt_and_the_laws_hold(
    renderer: ChatRenderer, forgetful: ChatRenderer, turns: list[tuple[str, str, int]]
) -> None:
    anyio.run(play, renderer, forgetful, turns)


async def play(renderer: ChatRenderer, forgetful: ChatRenderer, turns: list[tuple[str, str, int]]) -> None:
    waiting = iter([said for _, said, _ in turns])
    engine = FakeEngine(lambda _: next(waiting), draw_ids=draw_apart(renderer))
    sampling = PolicySampling(context_window=10**6)
    responder = Forgetful(engine=engine, renderer=renderer, sampling=sampling, forgetful=forgetful)
    histories: list[list[Body]] = [[user("task")]]
    async with session_of(responder, limits=LIMITS) as session:
        for number, (move, _, base) in enumerate(turns):
            history = rewrite(move, histories[-1 - base % len(histories)], number)
            asked = [*history, user([text("moving")])] if move == "move" else history
            reply = await ask(session, *asked, tools=[TOOL] * (1 + (move == "other tools")))
            histories.append(history if move == "retry" else [*history, reply, *AnthropicDialect().results(reply)])
        calls = session.calls()
    assert session.failure is None
    check_exact(calls, engine, rewritten=True)
