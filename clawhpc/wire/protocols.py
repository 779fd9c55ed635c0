"""Every protocol, and the page that says what each makes of every field: `python -m clawhpc.wire.protocols`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby

from clawhpc.wire.anthropic import Anthropic
from clawhpc.wire.base import WireProtocol
from clawhpc.wire.fields import Field, FieldUse
from clawhpc.wire.gemini import Gemini
from clawhpc.wire.openai_chat import OpenAIChat
from clawhpc.wire.openai_responses import OpenAIResponses

PROTOCOLS: tuple[WireProtocol, ...] = (Anthropic(), OpenAIChat(), OpenAIResponses(), Gemini())

TITLES = {
    "anthropic": "Anthropic Messages",
    "openai_chat": "OpenAI Chat Completions",
    "openai_responses": "OpenAI Responses",
    "gemini": "Gemini generateContent",
}
INTRODUCTION = """\
# What becomes of each field of a request

One table for each protocol, printed by `python -m clawhpc.wire.protocols` from the tables that the code reads by.

| use | means |
|---|---|
| rendered | part of the prompt |
| honoured | decides how the reply is drawn or written |
| overridden | the campaign decides it; a request that asks for something is recorded (`CallRecord.overridden`) |
| refused | a request that asks for it gets the provider's own kind of error, which names it |
| ignored | changes nothing, on purpose |

A field that no table lists is recorded (`CallRecord.unlisted`), and refused where the session is `strict`. `[]` stands
for each item of a list. What lies below a listed field, and is not listed itself, is part of it. Content that is no
text, and tools that run at the provider, are refused by the name of their type.
"""


def render_page() -> str:
    """The whole page, in Markdown."""
    return "\n".join([INTRODUCTION, *(line for protocol in PROTOCOLS for line in _section(protocol))]) + "\n"


def _section(protocol: WireProtocol) -> Iterator[str]:
    yield from (f"## {TITLES[protocol.name]}", "", "| field | use | why |", "|---|---|---|")
    uses = list(FieldUse)
    rows = sorted(protocol.fields.fields, key=lambda row: uses.index(row.use))
    for (use, why), alike in groupby(rows, key=lambda row: (row.use, row.why)):
        yield f"| {', '.join(map(_cell, alike))} | {use} | {why} |"
    yield ""


def _cell(row: Field) -> str:
    return f"`{row.path}`"


if __name__ == "__main__":
    sys.stdout.write(render_page())
