"""A long session's calls cost what is new in them: counted in work, not in time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clawhpc.engine.client import SamplingParams
from clawhpc.engine.ids import PromptIds, TokenRun
from clawhpc.engine.render import ChatRenderer, Piece
from clawhpc.memo import Memo
from clawhpc.proxy.respond import PolicyResponder, PolicySampling
from clawhpc.proxy.session import Session
from clawhpc.records import Generation, Message
from clawhpc.tree.build import whole_calls
from tests.fakes.caller import session_of, user
from tests.fakes.chat_tokenizer import watch_encoding, write_tokenizer
from tests.fakes.engine import FakeEngine, draw
from tests.fakes.exact import LIMITS, AnthropicDialect, draw_apart

pytestmark = pytest.mark.anyio

TURNS, RESULT_WORDS, TOKENS = 128, 100, 70_000
CALL = 'Let me look.\n<tool_call>\n{"name": "Bash", "arguments": {"command": "ls -l"}}\n</tool_call>'
TOOLS = [{"name": f"Tool{at}", "description": "Does it. " * 100, "input_schema": {"type": "object"}} for at in range(9)]
SYSTEM = "You are a careful agent. " * 100


class CountingRenderer(ChatRenderer):
    """Counts the turns that it renders, and the ids that it works out."""

    num_turns = 0

    def __init__(self, folder: Path, *, renderer: str, thinking: bool) -> None:
        super().__init__(folder, renderer=renderer, thinking=thinking)
        self._encoded = watch_encoding(self)

    @property
    def num_encoded(self) -> int:
        return sum(self._encoded)

    def _render_turn(self, reply: Piece, following: tuple[Message, ...]) -> TokenRun | None:
        self.num_turns += 1
        return super()._render_turn(reply, following)


@dataclass
class KeepingEngine(FakeEngine):
    """Draws one and the same, and keeps what it was asked, with the work that was done until then."""

    renderer: CountingRenderer = field(kw_only=True)
    prompts: list[PromptIds] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str) -> Generation:
        self.prompts.append(PromptIds.of(prompt_ids))
        self.encoded.append(self.renderer.num_encoded)
        self.turns.append(self.renderer.num_turns)
        return draw((), draw_apart(self.renderer)(CALL), params.max_tokens)


@pytest.fixture
def renderer(tmp_path: Path) -> CountingRenderer:
    write_tokenizer(tmp_path)
    return CountingRenderer(tmp_path, renderer="qwen3", thinking=False)


@asynccontextmanager
async def keeping_session(renderer: CountingRenderer) -> AsyncIterator[tuple[Session, KeepingEngine]]:
    engine = KeepingEngine(lambda _: CALL, renderer=renderer)
    sampling = PolicySampling(context_window=10**6)
    async with session_of(
        PolicyResponder(engine=engine, renderer=renderer, sampling=sampling), limits=LIMITS
    ) as session:
        yield session, engine


async def talk(session: Session, turns: int) -> None:
    """Each result is another text."""
    dialect, history = AnthropicDialect(), [user("do it")]
    for turn in range(turns):
        reply = await dialect.ask(session, history, system=SYSTEM, tools=TOOLS)
        (call,) = [block for block in reply["content"] if block["type"] == "tool_use"]
        result = f"{turn} " + " ".join(f"file{turn * at}" for at in range(RESULT_WORDS))
        history += [reply, user([{"type": "tool_result", "tool_use_id": call["id"], "content": result}])]


async def test_a_call_encodes_renders_and_stores_what_is_new_in_it(renderer: CountingRenderer) -> None:
    async with keeping_session(renderer) as (session, engine):
        await talk(session, TURNS)
        calls, store = session.calls(), session._memory._tokens
    last = whole_calls(calls)[TURNS - 1]
    assert last.prompt_ids == tuple(engine.prompts[-1])
    assert [graft.call_id for graft in last.repeats] == [*range(TURNS - 1)]
    assert len(last.prompt_ids) > TOKENS
    for at in range(1, TURNS):
        prompt, before = engine.prompts[at], engine.prompts[at - 1]
        assert engine.encoded[at] - engine.encoded[at - 1] <= len(prompt) - len(before), "no token is encoded twice"
        assert engine.turns[at] - engine.turns[at - 1] == 1, "the last reply, and what follows it"
        assert len(prompt.runs) == len(before.runs) + 1, "ids, and their JSON text, are made of that turn alone"
        assert all(run is known for run, known in zip(prompt.runs, before.runs, strict=False))
    stored = [one for one in map(store.get, range(TURNS)) if one]
    assert sum(len(one.tail) for one in stored) == len(last.token_ids), "every token of the session is stored once"
    assert not any(one.new_repeats for one in stored), "and of what the parent repeats nothing"


async def test_a_head_is_encoded_once_for_all_sessions_of_a_host(renderer: CountingRenderer) -> None:
    encoded = []
    for _ in range(3):
        async with keeping_session(renderer) as (session, _):
            await talk(session, 1)
        encoded.append(renderer.num_encoded)
    assert encoded[0] > len(SYSTEM) // 8
    assert encoded[2] == encoded[0]


async def test_what_a_session_has_rendered_ends_with_it(renderer: CountingRenderer) -> None:
    """What is kept beyond it is bounded by `KEPT_BYTES`: heads, and turns whose reply was not drawn here."""
    before = kept(renderer._turns)
    async with keeping_session(renderer) as (session, _):
        await talk(session, 10)
    assert kept(renderer._turns) == before
    assert len(kept(renderer._heads)) == 1


def kept(memo: Memo[Any, Any]) -> set[Any]:
    return {*memo._young, *memo._old}
