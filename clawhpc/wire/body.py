"""Reading request bodies piece by piece, each piece once.

A harness sends its whole history with every call, so all but the end of a body was read before. `BodyReader` takes a
body apart without looking into its messages and tools; `PieceReader` reads each of these, and holds it against the
protocol's table of fields, the first time that its bytes are seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw

from clawhpc.memo import Memo
from clawhpc.wire.base import MAX_DEPTH, FieldRefused, WireError, decode_body, invalid, is_nested_deeper
from clawhpc.wire.fields import FieldTable, Findings, merge_findings

FORM_FIELDS = frozenset({"stream", "stream_options"})
"""They say how to send the answer, not what to answer: a harness's plain fallback differs in them."""
MAX_KNOWN_BYTES = 256 * 2**20
"""Of the pieces that a process remembers, with what is made of them."""
KNOWN_BYTES_PER_BYTE = 8
"""What remembering a piece costs for each of its bytes, at most: a list of small tools. Texts cost a quarter of it."""
KNOWN_OVERHEAD_BYTES = 1000
"""What remembering a piece costs beside that, about."""
KNOWN: Memo[Hashable, Any] = Memo(MAX_KNOWN_BYTES)
"""Pieces, and what is made of them. It belongs to the process: the heads of all rollouts of a group are the same."""

Body_T = TypeVar("Body_T")
Piece_T = TypeVar("Piece_T")
Value_T = TypeVar("Value_T")


@dataclass(frozen=True, kw_only=True)
class ReadBody(Generic[Body_T]):
    """One request body, its pieces still unread."""

    fields: Body_T
    fingerprint: bytes
    """See `WireRequest`."""
    found: Findings
    """Of all that is no piece."""


class BodyReader(Generic[Body_T]):
    """Reads bodies as `kind`, whose attributes `pieces` are `Raw` or lists of it."""

    def __init__(self, kind: type[Body_T], table: FieldTable, pieces: frozenset[str]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._table, self._pieces = table, pieces

    def read(self, body: bytes) -> ReadBody[Body_T]:
        """Linear in the bytes. Raises `WireError`, which names the place."""
        try:
            fields = decode_body(body, self._decoder)
        except WireError:
            mended = mend_surrogates(body)
            if mended == body:
                raise
            return self.read(mended)
        raw = decode_body(body, _split)
        small = {
            name: decode_value(bytes(value), f"$.{name}") for name, value in raw.items() if name not in self._pieces
        }
        return ReadBody(fields=fields, fingerprint=_fingerprint(raw, small), found=self._table.inspect(small))


def _fingerprint(raw: Mapping[str, Raw], small: Mapping[str, Any]) -> bytes:
    """The order of keys has no part in it but inside pieces: Codex's metadata come in another one with every try."""
    digest = sha256()  # of the safe ones, that for which processors have instructions: a body has 100 kB
    for name in sorted(raw.keys() - FORM_FIELDS):
        value = _encode_sorted(small[name]) if name in small else bytes(raw[name])
        digest.update(b"%b:%b\0" % (msgspec.json.encode(name), value))  # JSON has no zero byte
    return digest.digest()


class PieceReader(Generic[Piece_T, Value_T]):
    """Reads one kind of piece, which stands at the path `at`, and remembers what it made of the latest ones.

    What was read before costs a hash of its bytes, and comes back as the same object.
    """

    def __init__(
        self,
        kind: Any,
        convert: Callable[[Piece_T], Value_T],
        table: FieldTable,
        at: str,
        known: Memo[Hashable, Any] = KNOWN,
    ) -> None:
        self._decoder: msgspec.json.Decoder[Piece_T] = msgspec.json.Decoder(kind)
        self._convert, self._table, self._at = convert, table, at
        self._known = known

    def read(self, raw: Raw, root: str) -> tuple[Value_T, Findings]:
        """The value of one piece. Raises `WireError`, which calls the place of the piece `root`."""
        piece = bytes(raw)
        known: tuple[Value_T, Findings] | None = self._known.get((self, piece))
        if known is None:
            read = self._read_new(piece, root)
            known = self._known.put((self, piece), read, known_cost(len(piece)))
        return known

    def read_each(self, raws: Sequence[Raw], root: str) -> tuple[list[Value_T], Findings]:
        """The values of a list of pieces."""
        read = [self.read(raw, f"{root}[{index}]") for index, raw in enumerate(raws)]
        return [value for value, _ in read], merge_findings(found for _, found in read)

    def _read_new(self, piece: bytes, root: str) -> tuple[Value_T, Findings]:
        fields = decode_value(piece, root)  # first: it reads also what the decoder leaves raw
        value = self._convert(decode_body(piece, self._decoder, root))
        return value, self._table.inspect(fields, self._at)


def known_cost(num_bytes: int) -> int:
    """Bytes of memory that a piece of `num_bytes` takes which is remembered."""
    return KNOWN_BYTES_PER_BYTE * num_bytes + KNOWN_OVERHEAD_BYTES


def decode_value(text: bytes, root: str = "$", *, max_depth: int = MAX_DEPTH) -> Any:
    """Any JSON value, which errors call `root`. Raises `WireError`, also for one that is nested deeper."""
    value = decode_body(text, _any, root)
    if is_nested_deeper(value, max_depth):
        raise invalid(f"values are nested more than {max_depth} deep - at `{root}`")
    return value


def mend_surrogates(body: bytes) -> bytes:
    """JSON text with U+FFFD for each half of a surrogate pair: JavaScript cuts texts in the middle of an emoji."""
    if rb"\ud" not in body and rb"\uD" not in body:
        return body
    return _ESCAPE.sub(lambda escape: rb"\ufffd" if escape["lone"] else escape[0], body)


def refuse(found: Findings) -> None:
    """Raise `FieldRefused` for the first field that the request asks for in vain."""
    for row in found.refused:
        raise FieldRefused(row.path, row.why)


_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_split = msgspec.json.Decoder(dict[str, Raw])
_any: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
