"""What was worked out lately, so that it is not worked out again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memo(Generic[K, V]):
    """Values by key; those that were used least recently go when there are more than `max_bytes` of them.

    Two generations: what is used moves to the young one; when that has half of the bytes, it becomes the old one, and
    what nobody has used meanwhile is gone. So a look-up is one of a dictionary. Several threads may share it: at worst,
    two of them work out the same.
    """

    def __init__(self, max_bytes: int) -> None:
        self._half = max_bytes // 2
        self._young: dict[K, tuple[V, int]] = {}
        self._old: dict[K, tuple[V, int]] = {}
        self._num_bytes = 0

    def get(self, key: K) -> V | None:
        """What was put under `key`, or None."""
        found = self._young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is None:
                return None
            self.put(key, *found)
        return found[0]

    def put(self, key: K, value: V, num_bytes: int) -> V:
        """Keep `value`, unless its `num_bytes`, the key included, are more than half of all that there may be."""
        if num_bytes <= self._half:
            if self._num_bytes + num_bytes > self._half:
                self._old, self._young, self._num_bytes = self._young, {}, 0
            self._young[key] = (value, num_bytes)
            self._num_bytes += num_bytes
        return value
