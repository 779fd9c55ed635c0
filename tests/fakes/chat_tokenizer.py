"""A tiny byte-level tokenizer with the control tokens of the Qwen family, written in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from clawhpc.engine.render import ChatRenderer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CONTROL = SPECIAL + MARKUP
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = (
    "You are a helpful assistant.\n\nWrite the file notes.txt.\n\n\n",
    'user\nassistant\nsystem\n{"name": "write", "arguments": {"path": "notes.txt", "content": "hello"}}\n',
    "def function(value):\n    return value\n\n    # the  comment\n",
)
Words = Literal["gpt2", "qwen"]


def write_tokenizer(folder: Path, words: Words = "gpt2") -> Tokenizer:
    """tokenizer.json and tokenizer_config.json in `folder`; `words`: whose rule cuts texts into words."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    if words == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def watch_encoding(renderer: ChatRenderer) -> list[int]:
    """How many ids were worked out for each text from now on that was not known already."""
    numbers: list[int] = []
    encode = renderer._tokenizer._encode_text

    def counted(text: str) -> list[int]:
        ids = encode(text)
        numbers.append(len(ids))
        return ids

    renderer._tokenizer._encode_text = counted  # type: ignore[method-assign]
    return numbers
