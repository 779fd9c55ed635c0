from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.engine.ids import PromptIds, TokenRun

runs = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=5)


@given(runs)
def test_a_prompt_is_its_runs_one_after_the_other(parts: list[list[int]]) -> None:
    prompt, ids = PromptIds(tuple(map(TokenRun, parts))), [token for part in parts for token in part]
    assert [*prompt] == [*prompt.whole()] == [*PromptIds.of(ids)] == ids
    assert json.loads(prompt.json) == ids
    assert (len(prompt), prompt.whole().itemsize) == (len(ids), 4)
    assert (prompt.lowest, prompt.highest) == (min(ids, default=0), max(ids, default=0))
    assert all(prompt[at] == token for at, token in enumerate(ids))
    assert [prompt[at - len(ids)] for at in range(len(ids))] == ids
    assert [*prompt[1:3]] == ids[1:3]
    for outside in (len(ids), -len(ids) - 1):
        with pytest.raises(IndexError):
            prompt[outside]


def test_what_is_a_prompt_already_is_not_made_again() -> None:
    prompt = PromptIds.of((1, 2))
    assert PromptIds.of(prompt) is prompt
