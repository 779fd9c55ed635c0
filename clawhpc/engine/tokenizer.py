"""A tokenizer.json, as chat formats use it."""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from clawhpc.engine.ids import INT32
from clawhpc.errors import UserError, boundary
from clawhpc.memo import Memo

SEAM = "\udc00"
"""What stands on its two sides is encoded apart. A lone surrogate: no text that came as UTF-8 holds one."""
SURROGATE = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"
KEPT_BYTES = 32 * 2**20
"""Of texts whose ids are known: above all those of system prompts and tools, which all rollouts of a host share."""

Ids = list[int]


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
        self.control_ids = frozenset(self._control.values())
        names = sorted(map(re.escape, self._control), key=len, reverse=True)
        self._names = re.compile("|".join(names) or "(?!)")
        self._parts = re.compile(f"({self._names.pattern})|{SEAM}")
        self._known: Memo[str, array[int]] = Memo(KEPT_BYTES)

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
        ids = self._known.get(text)
        if ids is None:
            ids = array(INT32, self._encode_text(text))
            self._known.put(text, ids, len(text) + ids.itemsize * len(ids))
        return ids.tolist()

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        """The text of ids, control tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._all.decode(list(token_ids), skip_special_tokens=False)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or of each in a list; None for one that there is not."""
        if isinstance(tokens, str):
            return self._all.token_to_id(tokens)
        return [self._all.token_to_id(token) for token in tokens]

    def _encode_text(self, text: str) -> Ids:
        ids: Ids = []
        position = 0
        for part in self._parts.finditer(text):
            ids += self._encode_letters(text[position : part.start()])
            if part[1]:
                ids.append(self._control[part[1]])
            position = part.end()
        return ids + self._encode_letters(text[position:])

    def _encode_letters(self, text: str) -> Ids:
        """A batch of one: other threads go on meanwhile, which `encode` would not let them do."""
        return self._letters.encode_batch_fast([text], add_special_tokens=False)[0].ids if text else []


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
