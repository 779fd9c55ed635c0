"""Conversations as prompts of token ids, with every recorded reply as the very ids that were drawn (law 1).

    head ──render──▶ ids ──▶ recorded ids ──bridge──▶ ids ──▶ recorded ids ──bridge──▶ … ──▶ prompt_ids

A prompt is built by appending only. So a conversation that has grown extends the tokens of its earlier call, and a
recorded reply stands in it unchanged, whatever the harness has done to its text or to the messages before it. The chat
formats are those of `renderers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from renderers import create_renderer
from renderers.base import ParsedResponse, Renderer
from renderers.configs import config_from_name
from tokenizers import Tokenizer

from clawhpc.errors import EngineError, UserError, boundary
from clawhpc.records import Conversation, Graft, Message, Tool

SEAM = "\udc00"
"""What stands on its two sides is encoded apart. A lone surrogate: no text that came as UTF-8 holds one."""
SURROGATE = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"
UNFIT = {
    "auto": "say which chat format it is, such as qwen3",
    "default": "a template of text, of which nobody knows how a prompt goes on after a reply",
    "gpt-oss": "a chat format that fetches its vocabulary from the internet",
}
"""Renderers that exist and cannot be taken, with the reason."""
CACHED_PIECES = 256
"""Texts whose ids are kept: above all that of system prompt and tools, which all rollouts of a step share."""
CACHED_HEADS = 32
"""Beginnings of conversations, up to the first reply, whose ids are kept: all calls of a rollout share one."""

Ids = list[int]
Messages = list[Any]
"""In the form of `renderers`, which is OpenAI's."""


@dataclass(frozen=True, kw_only=True)
class RecordedReply:
    """A sampled reply that a history repeats."""

    call_id: int
    completion_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RenderedPrompt:
    """A conversation as the engine will receive it."""

    prompt_ids: tuple[int, ...]
    grafts: tuple[Graft, ...]
    """Where recorded replies stand in `prompt_ids`, in order."""
    reencoded_replies: int
    """Recorded replies that stand in it as text that was encoded again: 0, or a defect to look at."""


class TextTokenizer:
    """A tokenizer.json as `renderers` wants it, without the seconds that it takes to import transformers.

    Control tokens are what the chat format writes. The same letters inside a message are letters: whoever fills a
    message passes its text through `plain` first.
    """

    unk_token_id = None
    eos_token_id = None

    def __init__(self, folder: Path) -> None:
        self.name_or_path = str(folder)
        self._all = _load_tokenizer(folder)
        self._letters = _without_control_tokens(self._all)
        self._control = {token.content: number for number, token in self._all.get_added_tokens_decoder().items()}
        names = sorted(map(re.escape, self._control), key=len, reverse=True)
        self._names = re.compile("|".join(names) or "(?!)")
        self._parts = re.compile(f"({self._names.pattern})|{SEAM}")
        self._encode = lru_cache(CACHED_PIECES)(self._encode_text)

    def plain(self, text: str) -> str:
        """`text` as the content of a message: encoding it gives no control token, even where it spells one."""
        text = SURROGATE.sub(REPLACEMENT, text)
        return self._names.sub(lambda name: name[0][0] + SEAM + name[0][1:], text)

    def plain_values(self, value: Any) -> Any:
        """A JSON value with every string in it, keys included, as `plain` makes it."""
        if isinstance(value, str):
            return self.plain(value)
        if isinstance(value, dict):
            return {self.plain(key): self.plain_values(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain_values(item) for item in value]
        return value

    def encode(self, text: str, *_: Any, **__: Any) -> Ids:
        """The ids of a text that a chat format has written; nothing is added at either end."""
        return list(self._encode(text))

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        """The text of ids, control tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._all.decode(list(token_ids), skip_special_tokens=False)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or of each in a list; None for one that there is not."""
        if isinstance(tokens, str):
            return self._all.token_to_id(tokens)
        return [self._all.token_to_id(token) for token in tokens]

    def _encode_text(self, text: str) -> tuple[int, ...]:
        ids: Ids = []
        position = 0
        for part in self._parts.finditer(text):
            ids += self._encode_letters(text[position : part.start()])
            if part[1]:
                ids.append(self._control[part[1]])
            position = part.end()
        return (*ids, *self._encode_letters(text[position:]))

    def _encode_letters(self, text: str) -> Ids:
        """A batch of one: other threads go on meanwhile, which `encode` would not let them do."""
        return self._letters.encode_batch_fast([text], add_special_tokens=False)[0].ids if text else []


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
        self._head_ids = lru_cache(CACHED_HEADS)(self._render_head)
        if not self._appends():
            raise UserError(
                f"policy.renderer={renderer}: not a chat format in which a user's message and a tool's result can both "
                "be appended to what was drawn, so that replies would be encoded again; see docs/engine.md"
            )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion; the first of them is how a message ends."""
        return tuple(self._renderer.get_stop_token_ids())

    def render(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> RenderedPrompt:
        """The prompt that asks for the next reply.

        `recorded`: the sampled replies that the history repeats, by index into `conversation.messages`. All other
        messages, also those of the assistant, are encoded from their text.
        """
        grafted = self._graft(conversation, recorded)
        if grafted is not None:
            return grafted
        ids = self._render_head(conversation.messages, _tools_key(conversation.tools))
        return RenderedPrompt(prompt_ids=ids, grafts=(), reencoded_replies=len(recorded))

    def encode_reply(self, reply: Message) -> tuple[int, ...]:
        """The ids that a policy would have drawn for a reply that is known as text only, its stop token included.

        They follow the generation prompt at the end of every rendered prompt. EngineError in a chat format in which a
        reply does not continue the generation prompt.
        """
        ids = self._reply_ids(self._message(reply))
        if ids is None:
            raise EngineError(f"{self._renderer}: a reply does not continue the generation prompt: {reply.text[:80]!r}")
        return tuple(ids)

    def parse(self, completion_ids: Sequence[int], prompt_ids: Sequence[int]) -> ParsedResponse:
        """What the chat format reads in a completion. ValueError or RecursionError for some malformed tool calls."""
        return self._renderer.parse_response(list(completion_ids), prompt_ids=list(prompt_ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(ids)

    def _appends(self) -> bool:
        """Law 1 can be kept: a reply that has ended, and its thinking too, can be followed as it was drawn."""
        thought = self._tokenizer.convert_tokens_to_ids("</think>")
        thinking = [] if thought is None else [thought]
        result = [self._message(Message(role="tool", text="."))]
        replies = ([*thinking, token] for token in self.stop_token_ids)
        return any(self._bridge(reply, self._stub) and self._bridge(reply, result) for reply in replies)

    # -- appending ----------------------------------------------------------------------------------------------------

    def _render_head(self, messages: tuple[Message, ...], tools: str) -> tuple[int, ...]:
        """A whole conversation by the chat format's own rules. `tools`: see `_tools_key`."""
        rendered_tools = self._tokenizer.plain_values(json.loads(tools)) or None
        rendered = [self._message(message) for message in messages]
        return tuple(self._renderer.render_ids(rendered, tools=rendered_tools, add_generation_prompt=True))

    def _graft(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> RenderedPrompt | None:
        """The prompt made by appending; None where the chat format does not allow it."""
        messages = conversation.messages
        replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
        assert set(recorded) <= set(replies), f"recorded replies at {sorted(recorded)}, the assistant's at {replies}"
        ends = [*replies, len(messages)]
        if ends[0] == 0:
            return None
        ids = list(self._head_ids(messages[: ends[0]], _tools_key(conversation.tools)))
        grafts = []
        for index, end in zip(replies, ends[1:], strict=True):
            reply = recorded.get(index)
            completion = list(reply.completion_ids) if reply else self._reply_ids(self._message(messages[index]))
            following = [self._message(message) for message in messages[index + 1 : end]]
            bridge = self._bridge(completion, following) if completion is not None else None
            if completion is None or bridge is None:
                return None
            if reply:
                grafts.append(Graft(call_id=reply.call_id, start=len(ids), length=len(completion)))
            ids += completion + bridge
        return RenderedPrompt(prompt_ids=tuple(ids), grafts=tuple(grafts), reencoded_replies=0)

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
        """Arguments as an object, so that the chat format chooses the spaces in them."""
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = arguments
        if not isinstance(value, dict):
            value = arguments
        return {"name": self._tokenizer.plain(name), "arguments": self._tokenizer.plain_values(value)}


def _tools_key(tools: Sequence[Tool]) -> str:
    """The tools as `renderers` wants them, as JSON, so that a head can be looked up by them."""
    functions = ({"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in tools)
    return json.dumps([{"type": "function", "function": function} for function in functions])


def count_token_ids(folder: Path) -> int:
    """Ids that the tokenizer in `folder` knows; the output head of its model may have more rows."""
    return _load_tokenizer(folder).get_vocab_size(with_added_tokens=True)


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder}: no tokenizer.json here; a policy is a Hugging Face folder with a fast tokenizer")
    with boundary(UserError, f"{path}: not a fast tokenizer"):  # its library raises a bare Exception
        return Tokenizer.from_file(str(path))


def _without_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same merges, but for no text an added token."""
    state = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**state, "added_tokens": [], "post_processor": None}))


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
