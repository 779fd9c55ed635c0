"""How far two runs of tokens agree."""

from __future__ import annotations

from array import array
from typing import TypeVar

Ids = TypeVar("Ids", "tuple[int, ...]", "array[int]")


def shared_length(ids: Ids, whole: Ids, start: int = 0) -> int:
    """How many tokens of `ids` stand in `whole` from `start` on. Halves the search, so that compares run in C."""
    low, high = 0, min(len(ids), len(whole) - start)
    if not high or ids[0] != whole[start]:
        return 0
    if ids[:high] == whole[start : start + high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if ids[low:middle] == whole[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
