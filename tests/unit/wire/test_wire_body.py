from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any

import pytest
from msgspec import Raw, Struct

from clawhpc.memo import Memo
from clawhpc.wire.base import MAX_DEPTH, FieldRefused, WireError, is_nested_deeper
from clawhpc.wire.body import BodyReader, PieceReader, known_cost, refuse
from clawhpc.wire.fields import FieldTable, honoured, overridden, refused, rendered

TABLE = FieldTable(
    rendered("words", "words", "words[].text"),
    honoured("length", "length"),
    overridden("ours", "heat"),
    refused("none", "image", "words[].image"),
)


class Word(Struct):
    text: str


class Body(Struct):
    words: list[Raw]
    length: int = 0


def body_of(**fields: Any) -> bytes:
    return json.dumps({"words": [], **fields}).encode()


class Counting:
    """Reads words, and counts how often it had to."""

    def __init__(self, max_known_bytes: int = 2**20) -> None:
        self.count = 0
        self.known: Memo[Hashable, Any] = Memo(max_known_bytes)
        self.reader = PieceReader(Word, self.convert, TABLE, "words[]", self.known)

    def convert(self, word: Word) -> list[str]:
        self.count += 1
        return [word.text]

    def read(self, *words: str) -> list[list[str]]:
        return self.reader.read_each([Raw(json.dumps({"text": word}).encode()) for word in words], "$.words")[0]


def test_a_body_is_read_but_for_its_pieces() -> None:
    read = BodyReader(Body, TABLE, frozenset({"words"})).read(body_of(words=[{"strange": 1}], length=3, heat=0, new=1))
    assert read.fields.length == 3
    assert (read.found.unlisted, read.found.overridden) == (("new",), ("heat",))


def test_a_retry_has_the_same_fingerprint_in_whatever_order_its_keys_come() -> None:
    def fingerprint(body: str) -> bytes:
        return BodyReader(Body, TABLE, frozenset({"words"})).read(body.encode()).fingerprint

    first = fingerprint('{"words": [], "meta": {"a": {"b": 1, "c": 2}, "d": 3}}')
    assert fingerprint('{"meta": {"d": 3, "a": {"c": 2, "b": 1}}, "words": []}') == first
    assert fingerprint('{"words": [], "meta": {"a": {"b": 1, "c": 2}, "d": 3}, "stream": true}') == first
    assert fingerprint('{"words": [], "meta": {"a": {"b": 1, "c": 2}, "d": 4}}') != first
    assert fingerprint('{"words": [], "max": 1, "min": 7}') != fingerprint('{"words": [], "max": 1, "min": 8}')
    assert fingerprint('{"words": [], "max": 1, "1seed": 7}') != fingerprint('{"words": [], "max": 11, "seed": 7}')
    assert fingerprint('{"words": [{}], "meta": {"a": {"b": 1, "c": 2}, "d": 3}}') != first


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"cut \ud83d", "cut \ufffd"),
        (r"\ude00\ud83d x \uD83D\uDE00", "\ufffd\ufffd x 😀"),
        (r"\\ud83d \n \ud83d\ud83d\ude00", "\\ud83d \n \ufffd😀"),
    ],
)
def test_half_a_surrogate_pair_is_a_character_that_nobody_knows(written: str, read: str) -> None:
    body = ('{"words": [{"text": "WORD"}], "ours": "WORD"}').replace("WORD", written).encode()
    fields = BodyReader(Body, TABLE, frozenset({"words"})).read(body).fields
    assert PieceReader(Word, lambda word: word.text, TABLE, "words[]").read(fields.words[0], "$")[0] == read


def test_values_may_be_nested_as_deep_as_anybody_needs_and_no_deeper() -> None:
    for depth, deeper in ((MAX_DEPTH, False), (MAX_DEPTH + 1, True), (800, True)):
        for text in ("[" * depth + "1" + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
            assert is_nested_deeper(json.loads(text)) is deeper
    assert not is_nested_deeper("text")


def test_a_piece_is_read_once_and_comes_back_as_the_same_object() -> None:
    counting = Counting()
    first, second = counting.read("a", "b"), counting.read("a", "b", "c")
    assert counting.count == 3
    assert all(one is other for one, other in zip(first, second, strict=False))


def test_what_a_known_piece_holds_is_found_every_time() -> None:
    reader = PieceReader(Word, lambda word: word.text, TABLE, "words[]")
    for _ in range(2):
        _, found = reader.read_each([Raw(b'{"text": "a", "new": 1, "image": "x"}')], "$.words")
        assert found.unlisted == ("words[].new",)
        with pytest.raises(FieldRefused, match=r"words\[\]\.image is not supported: none"):
            refuse(found)


def test_a_piece_that_cannot_be_read_is_named_by_its_place_every_time() -> None:
    reader = PieceReader(Word, lambda word: word.text, TABLE, "words[]")
    for _ in range(2):
        with pytest.raises(WireError, match=r"`\$\.words\[1\]\.text`"):
            reader.read_each([Raw(b'{"text": "a"}'), Raw(b'{"text": 1}')], "$.words")


def test_what_is_remembered_is_bounded_and_what_is_in_use_stays() -> None:
    counting = Counting(max_known_bytes=8 * known_cost(20))
    for index in range(100):
        counting.read("always", f"once {index}")
    assert counting.count == 101
    assert len({*counting.known._young, *counting.known._old}) <= 8


def test_a_piece_over_the_bound_is_read_and_not_remembered() -> None:
    counting = Counting(max_known_bytes=2 * known_cost(20))
    assert counting.read("x" * 100) == counting.read("x" * 100) == [["x" * 100]]
    assert counting.count == 2


def test_readers_that_share_a_memory_do_not_mix_what_they_read() -> None:
    known: Memo[Hashable, Any] = Memo(2**20)
    upper = PieceReader(Word, lambda word: word.text.upper(), TABLE, "words[]", known)
    lower = PieceReader(Word, lambda word: word.text.lower(), TABLE, "words[]", known)
    piece = Raw(b'{"text": "aB"}')
    assert [upper.read(piece, "$")[0], lower.read(piece, "$")[0]] == ["AB", "ab"]
    assert [upper.read(piece, "$")[0], lower.read(piece, "$")[0]] == ["AB", "ab"]
