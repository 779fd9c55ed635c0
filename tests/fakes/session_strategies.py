"""Random rollouts for the laws of the tree: what harnesses do, in any order."""

from __future__ import annotations

from hypothesis import strategies as st

from clawhpc.records import CallRole
from tests.fakes.session import Ids, Session

History = tuple[Ids | int, ...]

# Few different tokens, so that prompts and draws agree by chance as often as by design.
ids = st.lists(st.integers(0, 3), max_size=3).map(tuple)
some_ids = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
MOVING: Ids = (2, 2)
OPENINGS = ("fresh", "subagent")
TURNS = ("continue", "retry", "regenerate", "fork", "move", "cut", "encode_again", "compact", "fail", "side")


@st.composite
def sessions(draw: st.DrawFn, max_calls: int = 14, replies: st.SearchStrategy[Ids] = ids) -> Session:
    """A session with forks, retries, equal redraws, interleaved conversations, moved replies, failures."""
    session, histories = Session(), dict[int, History]()
    for _ in range(draw(st.integers(1, max_calls))):
        turn = draw(st.sampled_from(TURNS if histories else OPENINGS))
        base = draw(st.sampled_from(sorted(histories))) if histories else 0
        _turn(draw, session, histories, turn, base, replies)
    return session


def _turn(
    draw: st.DrawFn,
    session: Session,
    histories: dict[int, History],
    turn: str,
    base: int,
    replies: st.SearchStrategy[Ids],
) -> None:
    before = histories.get(base, ())
    history: History = (*before, base, draw(ids))
    reply, role, continues = draw(replies), CallRole.MAIN, None
    if turn in OPENINGS:
        history, role = (draw(some_ids),), CallRole.SUBAGENT if turn == "subagent" else CallRole.MAIN
    elif turn == "retry":
        history = before
    elif turn == "regenerate":
        tokens = session.calls[base].tokens
        history, reply = before, tokens.completion_ids if tokens else ()
    elif turn in ("fork", "side"):
        history, role = (*before, draw(some_ids)), CallRole.SIDE if turn == "side" else CallRole.MAIN
    elif turn == "move":
        head = before[:-1] if before[-1:] == (MOVING,) else before
        history = (*head, base, draw(ids), MOVING)
    elif turn == "cut":
        history = (draw(some_ids), *before[-2:], base, draw(ids))
    elif turn == "encode_again":
        history, continues = (*before, draw(some_ids)), base
    elif turn == "compact":
        role = CallRole.COMPACTION
    if turn == "fail":
        session.fail(*history)
        return
    call_id = session.call(*history, reply=reply, role=role, continues=continues, reencoded=continues is not None)
    histories[call_id] = history
