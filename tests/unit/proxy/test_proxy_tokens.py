from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.engine.ids import PromptIds
from clawhpc.proxy.tokens import TokenStore
from clawhpc.records import CallTokens, Generation, VersionSpan

Ids = tuple[int, ...]

ids = st.lists(st.integers(0, 2), max_size=8).map(tuple)


def generation(completion: Ids = ()) -> Generation:
    return Generation(
        completion_ids=completion,
        sampling_logprobs=(-1.0,) * len(completion),
        finish_reason="stop",
        weight_versions=(VersionSpan(version=0, start=0, end=len(completion)),),
    )


def longest_by_definition(left: Ids, right: Ids) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_each_call_is_stored_as_a_difference_to_the_call_that_it_extends_the_furthest(
    calls: list[tuple[Ids, Ids]], random: Random
) -> None:
    order = list(range(len(calls)))
    random.shuffle(order)
    store, whole, stored = TokenStore(), {}, {}
    for call_id in order:
        prompt, completion = calls[call_id]
        added = store.add(call_id, PromptIds.of(prompt), generation(completion), continues_id=None)
        parent, tokens = added.parent_id, added.written_out()
        earlier = {other: longest_by_definition(whole[other], prompt) for other in whole if other < call_id}
        longest = max(earlier.values(), default=0)
        assert tokens.prefix_length == longest
        assert (parent is None) == (longest == 0)
        assert parent is None or earlier[parent] == longest
        stored[call_id], whole[call_id] = (parent, tokens), prompt + completion
        assert rebuilt(call_id, stored) == prompt
        assert tokens.completion_ids == completion


def rebuilt(call_id: int, stored: dict[int, tuple[int | None, CallTokens]]) -> Ids:
    parent, tokens = stored[call_id]
    head = () if parent is None else rebuilt(parent, stored) + stored[parent][1].completion_ids
    return head[: tokens.prefix_length] + tokens.suffix_ids


@pytest.mark.parametrize("continued", [0, 1])
def test_of_two_calls_that_drew_the_same_the_continued_one_is_the_parent(continued: int) -> None:
    store = TokenStore()
    for call_id in (0, 1):
        store.add(call_id, PromptIds.of((1, 2)), generation((3,)), continues_id=None)
    assert store.add(2, PromptIds.of((1, 2, 3, 4)), generation(), continues_id=continued).parent_id == continued


def test_only_new_tokens_are_kept() -> None:
    store, prompt = TokenStore(), (0,)
    for call_id in range(100):
        stored = store.add(call_id, PromptIds.of(prompt), generation((call_id, 7)), continues_id=call_id - 1)
        assert len(stored.tail) == 1 + 2
        prompt = (*prompt, call_id, 7, 5)
