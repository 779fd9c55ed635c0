"""The decoded view of a completion: text, thinking and tool calls, for harnesses and people.

Whatever the policy drew becomes a reply. A tool call that cannot be read is passed on as the text that it is, so that
the policy meets its own mistake; a character that was cut in the middle is left out.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence

from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from clawhpc.engine.render import ChatRenderer
from clawhpc.engine.tokenizer import REPLACEMENT, SURROGATE
from clawhpc.records import FinishReason, Reply, ToolCall


def parse_reply(
    renderer: ChatRenderer,
    completion_ids: Sequence[int],
    finish_reason: FinishReason,
    *,
    new_id: Callable[[], str],
    stop: Sequence[str] = (),
) -> Reply:
    """What a completion says. `new_id` names its tool calls, one by one, in order.

    The text ends before the first of the strings in `stop`. A reply with a readable tool call finishes for `tool_calls`
    even where it was cut after that call.
    """
    ids = _until_stop(completion_ids, renderer.stop_token_ids)
    parsed = _parse(renderer, ids)
    content, stop_sequence = _before_stop(parsed.content, stop)
    texts = [content]
    calls: list[ToolCall] = []
    for attempt in parsed.tool_calls:
        read = _read_call(attempt)
        if read is None:
            texts.append(_as_drawn(renderer, ids, attempt))
        else:
            calls.append(ToolCall(id=new_id(), name=read[0], arguments=read[1]))
    texts += _texts_after_calls(renderer, ids, parsed)
    cut = finish_reason != "stop"
    return Reply(
        text=_valid("\n".join(text for text in texts if text), cut=cut),
        thinking=_valid(parsed.reasoning_content or "", cut=cut),
        tool_calls=tuple(calls),
        finish_reason="tool_calls" if calls and finish_reason != "cancelled" else finish_reason,
        stop_sequence=stop_sequence,
    )


def length_at_stop(renderer: ChatRenderer, completion_ids: Sequence[int], stop: Sequence[str]) -> int | None:
    """How many tokens there are up to the one that completes the first of the strings in `stop`; None without one.

    What counts is the text: a stop string in thinking or in a tool call stops nothing, as with the providers.
    """

    def stopped(length: int) -> bool:
        return bool(_before_stop(_parse(renderer, list(completion_ids[:length])).content, stop)[1])

    if not stop or not stopped(len(completion_ids)):
        return None
    return bisect_left(range(len(completion_ids)), True, key=stopped)


def _before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """The text before the first stop string, and that string; all of it, and none."""
    at, found = min(((text.index(one), one) for one in stop if one and one in text), default=(len(text), ""))
    return text[:at], found


def _until_stop(ids: Sequence[int], stop_token_ids: Sequence[int]) -> list[int]:
    for index, token in enumerate(ids):
        if token in stop_token_ids:
            return list(ids[:index])
    return list(ids)


def _parse(renderer: ChatRenderer, ids: list[int]) -> ParsedResponse:
    """Some JSON breaks Python's reader rather than its grammar: nested too deeply, or a number of too many digits."""
    try:
        return renderer.parse(ids)
    except (RecursionError, ValueError):
        return ParsedResponse(content=renderer.decode(ids))


def _read_call(attempt: ParsedToolCall) -> tuple[str, str] | None:
    """Name and arguments as JSON text; None for what no harness could run."""
    if attempt.status != ToolCallParseStatus.OK or not isinstance(attempt.name, str):
        return None
    arguments = attempt.arguments
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (RecursionError, ValueError):
        return None
    return _valid(attempt.name), _valid(text)


def _as_drawn(renderer: ChatRenderer, ids: list[int], attempt: ParsedToolCall) -> str:
    """A malformed call with the control tokens around it, where the chat format says where it stood."""
    if attempt.token_span is None:
        return attempt.raw
    start, end = attempt.token_span
    return renderer.decode(ids[start:end])


def _texts_after_calls(renderer: ChatRenderer, ids: list[int], parsed: ParsedResponse) -> list[str]:
    """What stands between tool calls and after the last, where the chat format says where these stand."""
    spans = [attempt.token_span for attempt in parsed.tool_calls if attempt.token_span is not None]
    starts = [start for start, _ in spans[1:]] + [len(ids)]
    texts = (renderer.decode(ids[end:start]).strip() for (_, end), start in zip(spans, starts, strict=False))
    return [text for text in texts if text]


def _valid(text: str, *, cut: bool = False) -> str:
    """Text that can be sent as UTF-8; where it was cut, without the part of a character at its end."""
    text = SURROGATE.sub(REPLACEMENT, text)
    return text.rstrip(REPLACEMENT) if cut else text
