"""Token ids as the engine receives them: compact, and encoded once.

A prompt of a long conversation is that of the call before it with a little at its end. It is kept as *runs* that later
prompts share: what is known is neither encoded as JSON nor checked again, and joining runs copies bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload

import msgspec

INT32 = "i"
"""`array` rather than numpy: slices and comparisons of short runs cost less, and nothing needs to be imported."""


class TokenRun:
    """Some ids, for good, with their JSON text."""

    __slots__ = ("highest", "ids", "lowest", "text")

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = array(INT32, ids)
        """Four bytes each. Nobody writes to it."""
        self.text = msgspec.json.encode(self.ids.tolist())[1:-1]
        """Without brackets: `1,2,3`."""
        self.lowest = min(self.ids, default=0)
        self.highest = max(self.ids, default=0)

    def __len__(self) -> int:
        return len(self.ids)


class PromptIds(Sequence[int]):
    """A prompt, as the runs that it is made of."""

    __slots__ = ("_length", "runs")

    def __init__(self, runs: tuple[TokenRun, ...]) -> None:
        self.runs = runs
        self._length = sum(map(len, runs))

    @classmethod
    def of(cls, ids: Sequence[int]) -> PromptIds:
        """`ids` as a prompt: the very same where they are one."""
        return ids if isinstance(ids, cls) else cls((TokenRun(ids),))

    @property
    def json(self) -> bytes:
        """A JSON array."""
        return b"[" + b",".join([run.text for run in self.runs if run.text]) + b"]"

    @property
    def lowest(self) -> int:
        """The smallest id; 0 in an empty prompt."""
        return min((run.lowest for run in self.runs if run.ids), default=0)

    @property
    def highest(self) -> int:
        """The largest id; 0 in an empty prompt."""
        return max((run.highest for run in self.runs), default=0)

    def whole(self) -> array[int]:
        """A copy of all ids."""
        return array(INT32, b"".join([run.ids for run in self.runs]))  # as bytes: that neither looks at ids nor grows

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(run.ids for run in self.runs)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> array[int]: ...
    def __getitem__(self, index: int | slice) -> int | array[int]:
        if isinstance(index, slice):
            return self.whole()[index]
        if not -self._length <= index < self._length:
            raise IndexError(index)
        at, left = 0, index % self._length
        while left >= len(self.runs[at]):
            left -= len(self.runs[at])
            at += 1
        return self.runs[at].ids[left]
