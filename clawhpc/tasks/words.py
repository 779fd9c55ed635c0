"""The words of a line in a Dockerfile, taken apart and with variables put in as Docker does it. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-+])|(?=\})))")
"""`$NAME`, and how `${NAME}`, `${NAME:-else}` and `${NAME:+then}` begin, which may be without the colon."""
ESCAPED = '"$\\'
"""What a backslash protects within double quotes."""
IN_SHELL = re.compile(r'(["$`\\}])')
"""What a shell would not take for itself in `"${NAME:-…}"`."""
MAX_DEPTH = 50
"""Of references within one another."""


@dataclass(frozen=True)
class Reference:
    """A variable whose value the image alone knows: its base has set it."""

    shell: str
    """As a shell writes it."""


Word = tuple[str | Reference, ...]
"""Texts and references, one after the other."""


def split_words(text: str, variables: Mapping[str, str | None]) -> list[Word]:
    """The words of `text`. `variables`: name -> value; None, or not there: the image alone knows it.

    ValueError for an open quote, and for what Docker would put in and we do not.
    """
    return _Reader(text, variables, None).words(splits=True)


def whole_word(text: str, variables: Mapping[str, str | None], unset: str | None = None) -> Word:
    """The same of a text that is one word, whatever blanks are in it. `unset`: of variables that are not there."""
    (word,) = _Reader(text, variables, unset).words(splits=False)
    return word


def literal(word: Word) -> str | None:
    """Its text; None where the image alone knows it."""
    return None if any(isinstance(piece, Reference) for piece in word) else "".join(map(str, word))


def in_shell(word: Word) -> str:
    """As a shell must read it to have it so."""
    return "".join(shlex.quote(piece) if isinstance(piece, str) else f'"{piece.shell}"' for piece in word) or "''"


class _Reader:
    """Goes through a text once."""

    def __init__(self, text: str, variables: Mapping[str, str | None], unset: str | None) -> None:
        self._text, self._variables, self._unset = text, variables, unset
        self._place = self._depth = 0

    def words(self, *, splits: bool, end: str = "") -> list[Word]:
        """Those up to `end`, and it, or up to the end of the text."""
        words: list[Word] = [] if splits else [()]
        quote, begun = "", not splits
        while (char := self._text[self._place : self._place + 1]) and (quote or char != end):
            following = self._text[self._place + 1 : self._place + 2]
            piece: Word | None = (char,)
            if char == "$" and quote != "'":
                piece = self._value()
            else:
                self._place += 1
            if char == quote or (not quote and char in "'\""):
                quote, piece = ("" if quote else char), ()
            elif splits and not quote and char.isspace():
                piece = None
            elif char == "\\" and quote != "'" and following and (not quote or following in ESCAPED):
                piece, self._place = (following,), self._place + 1
            if piece is not None:
                words[-1:] = [_joined(words[-1], piece)] if begun else [*words[-1:], piece]
            begun = piece is not None or not splits
        if quote:
            raise ValueError("No closing quotation")
        if end and not char:
            raise ValueError(f"No closing {end}")
        self._place += len(end)
        return words

    def _value(self) -> Word:
        """Of the reference that begins here; a $ where none does."""
        found = REFERENCE.match(self._text, self._place)
        if found is None:
            if self._text.startswith("${", self._place):
                raise ValueError("of ${…} only ${NAME}, ${NAME:-else} and ${NAME:+then} are put in")
            self._place += 1
            return ("$",)
        self._place = found.end()
        name, sign = found[1] or found[2], found[3] or ""
        text: Word = ()
        if found[2]:
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise ValueError(f"${{…}} stand more than {MAX_DEPTH} deep in one another")
            (text,) = self.words(splits=False, end="}")
            self._depth -= 1
        value = self._variables.get(name, self._unset)
        if value is None:
            within = "".join(IN_SHELL.sub(r"\\\1", part) if isinstance(part, str) else part.shell for part in text)
            return (Reference(f"${{{name}{sign or '-'}{within}}}"),)
        is_set = bool(value) if sign.startswith(":") else name in self._variables
        if sign.endswith("+"):
            return text if is_set else ()
        return (value,) if is_set or not sign else text


def _joined(word: Word, more: Word) -> Word:
    if word and more and isinstance(word[-1], str) and isinstance(more[0], str):
        return (*word[:-1], word[-1] + more[0], *more[1:])
    return (*word, *more)
