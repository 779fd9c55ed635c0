"""Conversations as prompts of token ids, with every recorded reply as the very ids that were drawn (law 1).

    head ──render──▶ ids ──▶ recorded ids ──bridge──▶ ids ──▶ recorded ids ──bridge──▶ … ──▶ the prompt
                             └────────── a turn ──────────┘

A prompt is built by appending only. So a conversation that has grown extends the tokens of its earlier call, and a
recorded reply stands in it unchanged, whatever the harness has done to its text or to the messages before it. The chat
formats are those of `renderers`.

What a turn adds to a prompt depends on its reply and on the messages after it alone, and is worked out once. A prompt
that goes on where a recorded reply was drawn goes on with that call's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from renderers import create_renderer
from renderers.base import ParsedResponse, Renderer
from renderers.configs import config_from_name

from clawhpc.engine.ids import PromptIds, TokenRun
from clawhpc.engine.tokenizer import SEAM, Ids, TextTokenizer
from clawhpc.errors import EngineError, UserError
from clawhpc.memo import Memo
from clawhpc.records import Conversation, Graft, Message, Tool
from clawhpc.wire.base import is_nested_deeper

UNFIT = {
    "auto": "say which chat format it is, such as qwen3",
    "default": "a template of text, of which nobody knows how a prompt goes on after a reply",
    "gpt-oss": "a chat format that fetches its vocabulary from the internet",
}
"""Renderers that exist and cannot be taken, with the reason."""
KEPT_BYTES = 32 * 2**20
"""Of beginnings of conversations, up to the first reply, whose ids are known: all rollouts of a group share one. As
many again of turns whose reply was not drawn here.
"""
BYTES_PER_ID = 12
"""Of a known one, with its JSON text."""

Messages = list[Any]
"""In the form of `renderers`, which is OpenAI's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedReply:
    """A sampled reply that a history repeats. The same call's is always the same object."""

    call_id: int
    completion_ids: Sequence[int]
    prompt: RenderedPrompt | None = None
    """What it was drawn for, where that is known."""
    turns: dict[tuple[Message, ...], TokenRun] = field(default_factory=dict, repr=False)
    """By the messages that were seen to follow it: what the two add to a prompt."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RenderedPrompt:
    """A conversation as the engine will receive it."""

    ids: PromptIds
    grafts: tuple[Graft, ...]
    """Where recorded replies stand in `ids`, in order."""
    reencoded_replies: int
    """Recorded replies that stand in it as text that was encoded again: 0, or a defect to look at."""
    tools: str = ""
    """As JSON text."""
    pieces: Pieces = ()
    """The conversation, with what was drawn in place of the message that repeats it."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """`ids`, written out."""
        return tuple(self.ids)


Piece = Message | RecordedReply
"""Of a conversation."""
Pieces = tuple[Piece, ...]


class ChatRenderer:
    """The chat format of one policy. Nothing in it waits; several threads may share it."""

    def __init__(self, folder: Path, *, renderer: str, thinking: bool) -> None:
        """`folder`: with the policy's tokenizer.json. `renderer`: a name that `renderers` knows, such as `qwen3`."""
        self._tokenizer = TextTokenizer(folder)
        self._thinking = thinking
        self._renderer = _create_renderer(self._tokenizer, renderer, thinking)
        self._stub: Messages = [{"role": "user", "content": "."}]
        length = len(self._renderer.render_ids(self._stub))
        self._asking_stub_ids = self._renderer.render_ids(self._stub, add_generation_prompt=True)
        self._asking_ids = self._asking_stub_ids[length:]
        self._another_stub_ids = self._renderer.render_ids(self._stub * 2)[length:]
        self._tools: Memo[int, tuple[tuple[Tool, ...], str]] = Memo(KEPT_BYTES)
        self._heads: Memo[tuple[tuple[Message, ...], str], RenderedPrompt] = Memo(KEPT_BYTES)
        self._turns: Memo[tuple[Message, tuple[Message, ...]], TokenRun] = Memo(KEPT_BYTES)
        if not self._appends():
            raise UserError(
                f"policy.renderer={renderer}: not a chat format in which a user's message and a tool's result can both "
                "be appended to what was drawn, so that replies would be encoded again; see docs/engine.md"
            )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion; the first of them is how a message ends."""
        return tuple(self._renderer.get_stop_token_ids())

    @property
    def generation_prompt(self) -> str:
        """What every prompt ends with."""
        return self.decode(self._asking_ids)

    def render(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> RenderedPrompt:
        """The prompt that asks for the next reply.

        `recorded`: the sampled replies that the history repeats, by index into `conversation.messages`. All other
        messages, also those of the assistant, are encoded from their text.
        """
        tools = self._tools_text(conversation.tools)
        pieces = _pieces(conversation.messages, recorded)
        begun = _known_prompt(pieces, tools) or self._head(pieces, tools)
        prompt = self._append(begun, pieces) if begun is not None else None
        if prompt is None:
            run = TokenRun(self._render_whole(conversation.messages, tools))
            prompt = RenderedPrompt(
                ids=PromptIds((run,)), grafts=(), reencoded_replies=len(recorded), tools=tools, pieces=pieces
            )
        return prompt

    def num_new_chars(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> int:
        """How much text `render` would have to encode for the same arguments, about."""
        tools = self._tools_text(conversation.tools)
        pieces = _pieces(conversation.messages, recorded)
        begun = _known_prompt(pieces, tools) or self._heads.get((_head_messages(pieces), tools))
        if begun is None:
            return len(tools) + sum(map(_num_chars, conversation.messages))
        turns = _turns(pieces, len(begun.pieces))
        new = (piece for turn in turns if self._known_turn(*turn) is None for piece in (turn[0], *turn[1]))
        return sum(_num_chars(piece) for piece in new if isinstance(piece, Message))

    def encode_reply(self, reply: Message) -> tuple[int, ...]:
        """The ids that a policy would have drawn for a reply that is known as text only, its stop token included.

        They follow the generation prompt at the end of every rendered prompt. EngineError in a chat format in which a
        reply does not continue the generation prompt.
        """
        ids = self._reply_ids(self._message(reply))
        if ids is None:
            raise EngineError(f"{self._renderer}: a reply does not continue the generation prompt: {reply.text[:80]!r}")
        return tuple(ids)

    def parse(self, completion_ids: Sequence[int]) -> ParsedResponse:
        """What the chat format reads in a completion. ValueError or RecursionError for some malformed tool calls."""
        return self._renderer.parse_response(list(completion_ids), prompt_ids=self._asking_stub_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(ids)

    def decode_letters(self, ids: Sequence[int]) -> str:
        """The text of ids, without control tokens."""
        return self._tokenizer.decode([token for token in ids if token not in self._tokenizer.control_ids])

    def _appends(self) -> bool:
        """Law 1 can be kept: a reply that has ended, and its thinking too, can be followed as it was drawn."""
        thought = self._tokenizer.convert_tokens_to_ids("</think>")
        thinking = [] if thought is None else [thought]
        result = [self._message(Message(role="tool", text="."))]
        replies = ([*thinking, token] for token in self.stop_token_ids)
        return any(self._bridge(reply, self._stub) and self._bridge(reply, result) for reply in replies)

    # -- appending ----------------------------------------------------------------------------------------------------

    def _head(self, pieces: Pieces, tools: str) -> RenderedPrompt | None:
        """The prompt before the first reply; None where a reply is the first message."""
        messages = _head_messages(pieces)
        if not messages:
            return None
        known = self._heads.get((messages, tools))
        if known is not None:
            return known
        run = TokenRun(self._render_whole(messages, tools))
        head = RenderedPrompt(ids=PromptIds((run,)), grafts=(), reencoded_replies=0, tools=tools, pieces=messages)
        num_bytes = len(tools) + sum(map(_num_chars, messages)) + BYTES_PER_ID * len(run)
        return self._heads.put((messages, tools), head, num_bytes)

    def _append(self, begun: RenderedPrompt, pieces: Pieces) -> RenderedPrompt | None:
        """`begun` with the turns that `pieces` has beyond it; None where the chat format does not allow one."""
        runs, grafts, length = [*begun.ids.runs], [*begun.grafts], len(begun.ids)
        for reply, following in _turns(pieces, len(begun.pieces)):
            run = self._known_turn(reply, following) or self._render_turn(reply, following)
            if run is None:
                return None
            if isinstance(reply, RecordedReply):
                grafts.append(Graft(call_id=reply.call_id, start=length, length=len(reply.completion_ids)))
            runs.append(run)
            length += len(run)
        return RenderedPrompt(
            ids=PromptIds(tuple(runs)),
            grafts=tuple(grafts),
            reencoded_replies=begun.reencoded_replies,
            tools=begun.tools,
            pieces=pieces,
        )

    def _known_turn(self, reply: Piece, following: tuple[Message, ...]) -> TokenRun | None:
        return reply.turns.get(following) if isinstance(reply, RecordedReply) else self._turns.get((reply, following))

    def _render_turn(self, reply: Piece, following: tuple[Message, ...]) -> TokenRun | None:
        """The ids of a reply, and those from there to the next generation prompt; None where there is no way."""
        if isinstance(reply, RecordedReply):
            completion: Ids | None = list(reply.completion_ids)
        else:
            completion = self._reply_ids(self._message(reply))
        bridge = self._bridge(completion, [*map(self._message, following)]) if completion is not None else None
        if completion is None or bridge is None:
            return None
        run = TokenRun(completion + bridge)
        if isinstance(reply, RecordedReply):
            reply.turns[following] = run
            return run
        num_bytes = sum(map(_num_chars, (reply, *following))) + BYTES_PER_ID * len(run)
        return self._turns.put((reply, following), run, num_bytes)

    def _render_whole(self, messages: tuple[Message, ...], tools: str) -> Ids:
        """A whole conversation by the chat format's own rules."""
        rendered_tools = self._tokenizer.plain_values(json.loads(tools)) or None
        rendered = [self._message(message) for message in messages]
        return self._renderer.render_ids(rendered, tools=rendered_tools, add_generation_prompt=True)

    def _bridge(self, completion: Ids, messages: Messages) -> Ids | None:
        """From the end of a reply over `messages` to the next generation prompt; None where there is no way."""
        following = messages or self._stub
        bridge = self._bridge_from(completion, following)
        if bridge is None and completion and completion[-1] in self.stop_token_ids:
            bridge = self._bridge_from(completion[-1:], following)  # from a reply that ended while it was thinking
        return bridge if messages or bridge is None else self._without_stub(bridge)

    def _bridge_from(self, completion: Ids, messages: Messages) -> Ids | None:
        """What `renderers` appends; of what stands before a reply it reads the generation prompt only."""
        start = self._asking_stub_ids + completion
        bridged = self._renderer.bridge_to_next_turn(self._asking_stub_ids, completion, messages)
        return bridged.token_ids[len(start) :] if bridged and bridged.token_ids[: len(start)] == start else None

    def _without_stub(self, bridge: Ids) -> Ids | None:
        """Take the stub message out again, so that one reply follows another directly."""
        taken = self._another_stub_ids + self._asking_ids
        start = len(bridge) - len(taken)
        return bridge[:start] + self._asking_ids if bridge[start:] == taken else None

    def _reply_ids(self, reply: Any) -> Ids | None:
        """What the chat format writes for `reply` after the generation prompt, up to its stop token."""
        text = SEAM + reply["content"] if reply["content"] else ""
        ids = self._renderer.render_ids([*self._stub, {**reply, "content": text}])
        start = len(self._asking_stub_ids)
        ends = [index for index in range(start, len(ids)) if ids[index] in self.stop_token_ids]
        return ids[start : ends[-1] + 1] if ends and ids[:start] == self._asking_stub_ids else None

    # -- records in the form of `renderers` ---------------------------------------------------------------------------

    def _tools_text(self, tools: tuple[Tool, ...]) -> str:
        """The tools as `renderers` wants them, as JSON. Those of one rollout are one object, of tens of kilobytes."""
        known = self._tools.get(id(tools))
        if known is None or known[0] is not tools:  # what is kept keeps its id
            text = json.dumps([_tool(tool) for tool in tools])
            known = self._tools.put(id(tools), (tools, text), 8 * len(text))
        return known[1]

    def _message(self, message: Message) -> Any:
        rendered: dict[str, Any] = {"role": message.role, "content": self._tokenizer.plain(message.text)}
        if message.role == "tool":
            rendered["tool_call_id"] = message.tool_call_id
        if message.role == "assistant" and message.thinking and self._thinking:
            rendered["reasoning_content"] = self._tokenizer.plain(message.thinking)
        if message.tool_calls:
            rendered["tool_calls"] = [
                {"type": "function", "id": call.id, "function": self._function(call.name, call.arguments)}
                for call in message.tool_calls
            ]
        return rendered

    def _function(self, name: str, arguments: str) -> Any:
        """Arguments as an object, so that the chat format chooses the spaces in them; what is none, as it is."""
        value: Any = None
        with suppress(ValueError, RecursionError):
            value = json.loads(arguments)
        if not isinstance(value, dict) or is_nested_deeper(value):
            value = arguments
        return {"name": self._tokenizer.plain(name), "arguments": self._tokenizer.plain_values(value)}


def _tool(tool: Tool) -> Any:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _pieces(messages: tuple[Message, ...], recorded: Mapping[int, RecordedReply]) -> Pieces:
    pieces: list[Piece] = [*messages]
    for index, reply in recorded.items():
        assert messages[index].role == "assistant", f"a recorded reply at {index}, which is a {messages[index].role}'s"
        pieces[index] = reply
    return tuple(pieces)


def _is_reply(piece: Piece) -> bool:
    return isinstance(piece, RecordedReply) or piece.role == "assistant"


def _head_messages(pieces: Pieces) -> tuple[Message, ...]:
    """Those before the first reply."""
    first = next((index for index, piece in enumerate(pieces) if _is_reply(piece)), len(pieces))
    return pieces[:first]  # type: ignore[return-value]


def _turns(pieces: Pieces, start: int) -> Iterator[tuple[Piece, tuple[Message, ...]]]:
    """Each reply from `start` on, which is one, with the messages up to the next."""
    replies = (index for index in range(start, len(pieces)) if _is_reply(pieces[index]))
    for index, end in pairwise((*replies, len(pieces))):
        yield pieces[index], pieces[index + 1 : end]  # type: ignore[misc]


def _known_prompt(pieces: Pieces, tools: str) -> RenderedPrompt | None:
    """That of the last recorded reply, if it was drawn at this very place."""
    for index in reversed(range(len(pieces))):
        reply = pieces[index]
        if isinstance(reply, RecordedReply):
            prompt = reply.prompt
            same = prompt is not None and prompt.tools == tools and prompt.pieces == pieces[:index]
            return prompt if same else None
    return None


def _num_chars(message: Message) -> int:
    return len(message.text) + len(message.thinking) + sum(len(call.arguments) for call in message.tool_calls)


def _create_renderer(tokenizer: TextTokenizer, name: str, thinking: bool) -> Renderer:
    """`thinking_retention="all"`: a new message of the user, too, leaves earlier replies as they are."""
    if name in UNFIT:
        raise UserError(f"policy.renderer={name}: {UNFIT[name]}")
    try:
        default: Any = config_from_name(name)
    except ValueError as error:
        raise UserError(f"policy.renderer={name}: {error}") from error
    told = {"enable_thinking": thinking} if hasattr(default, "enable_thinking") else {}
    if thinking and not told:
        raise UserError(f"policy.renderer={name}: it cannot be told to think; set policy.thinking=false")
    try:
        return create_renderer(tokenizer, type(default)(**told, thinking_retention="all"))
    except (AssertionError, ValueError) as error:
        raise UserError(f"{tokenizer.name_or_path}: not a tokenizer for policy.renderer={name}: {error}") from error
