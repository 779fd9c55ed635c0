"""The words of a line in a Dockerfile, taken apart and with variables put in as Docker does it. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::([-+])([^{}\"$`\\]*))?\})")
"""`$NAME`, `${NAME}`, `${NAME:-else}`, `${NAME:+then}`."""
ESCAPED = '"$\\'
"""What a backslash protects within double quotes."""


@dataclass(frozen=True)
class Reference:
    """A variable whose value the image alone knows: its base has set it."""

    shell: str
    """As a shell writes it."""


Word = tuple[str | Reference, ...]
"""Texts and references, one after the other."""


def split_words(text: str, variables: Mapping[str, str | None]) -> list[Word]:
    """The words of `text`. `variables`: name -> value; None: the image alone knows it. ValueError for an open quote."""
    return _read(text, variables, splits=True)


def whole_word(text: str, variables: Mapping[str, str | None]) -> Word:
    """The same of a text that is one word, whatever blanks are in it."""
    (word,) = _read(text, variables, splits=False)
    return word


def literal(word: Word) -> str | None:
    """Its text; None where the image alone knows it."""
    return None if any(isinstance(piece, Reference) for piece in word) else "".join(map(str, word))


def in_shell(word: Word) -> str:
    """As a shell must read it to have it so."""
    return "".join(shlex.quote(piece) if isinstance(piece, str) else f'"{piece.shell}"' for piece in word) or "''"


def _read(text: str, variables: Mapping[str, str | None], *, splits: bool) -> list[Word]:
    words: list[Word] = [] if splits else [()]
    quote, place, begun = "", 0, not splits
    while place < len(text):
        char, following = text[place], text[place + 1 : place + 2]
        piece: str | Reference | None = char
        place += 1
        if char == quote or (not quote and char in "'\""):
            quote, piece = ("" if quote else char), ""
        elif splits and not quote and char.isspace():
            piece = None
        elif char == "\\" and quote != "'" and following and (not quote or following in ESCAPED):
            piece, place = following, place + 1
        elif char == "$" and quote != "'" and (found := REFERENCE.match(text, place - 1)):
            piece, place = _value(found, variables), found.end()
        if piece is not None:
            words[-1:] = [_added(words[-1], piece)] if begun else [*words[-1:], _added((), piece)]
        begun = piece is not None or not splits
    if quote:
        raise ValueError("No closing quotation")
    return words


def _added(word: Word, piece: str | Reference) -> Word:
    if isinstance(piece, str) and word and isinstance(word[-1], str):
        return (*word[:-1], word[-1] + piece)
    return (*word, piece)


def _value(found: re.Match[str], variables: Mapping[str, str | None]) -> str | Reference:
    name, sign, text = found[1] or found[2], found[3], found[4] or ""
    value = variables.get(name, None)
    if value is None:
        return Reference(f"${{{name}:{sign}{text}}}" if sign else f"${{{name}-}}")
    if sign == "-":
        return value or text
    return (text if value else "") if sign == "+" else value
