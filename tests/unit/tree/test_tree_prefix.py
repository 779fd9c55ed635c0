from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clawhpc.tree.prefix import Ids, shared_length

ids = st.lists(st.integers(0, 2), max_size=8).map(tuple)


def longest_by_definition(left: Ids, right: Ids) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


@given(ids, ids, ids)
def test_shared_length_counts_up_to_the_first_difference(head: Ids, left: Ids, right: Ids) -> None:
    whole = (9, 9, *head, *right)
    assert shared_length((*head, *left), whole, 2) == longest_by_definition((*head, *left), (*head, *right))
