"""A tokenizer as large and as thrifty as a real one, and the one reply that the engine of the benchmark draws.

It is trained on Python's own standard library, of which the conversations are made too: about as many bytes per token as
the tokenizers of real policies have on code.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.fakes.chat_tokenizer import MARKUP, QWEN_WORDS, SPECIAL

VOCABULARY = 24_000
TRAINED_CHARACTERS = 3_000_000
SAID = (
    "The failing test points at the parser. Before I change anything I want to see how the file starts, which names it "
    "exports, and where the function that the test calls is defined; then the fix should be a few lines."
)
ARGUMENTS = {
    "command": "sed -n '1,80p' src/parser.py && grep -n 'def parse_header' -A 40 src/parser.py | head -n 60",
    "description": "Show the beginning of the parser and the function that the test calls",
    "timeout": 20000,
}
"""Of the tool call that follows `SAID`."""
TOOL = "bash"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A folder with tokenizer.json, and what is known of it."""

    folder: Path
    num_token_ids: int
    bytes_per_token: float
    """Of the standard library's text."""
    reply_ids: tuple[int, ...]
    """What the engine draws, its stop token included."""


def source_text() -> str:
    """The standard library's own modules, one after the other: the same on every machine with this Python."""
    folder = Path(os.__file__).parent
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.py")))


def write_policy(folder: Path) -> Policy:
    """Train the tokenizer and write it; seconds."""
    text = source_text()
    tokenizer = _train(text[:TRAINED_CHARACTERS])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    sample = text[TRAINED_CHARACTERS : TRAINED_CHARACTERS + 300_000]
    call = json.dumps({"name": TOOL, "arguments": ARGUMENTS})
    drawn = f"{SAID}\n<tool_call>\n{call}\n</tool_call><|im_end|>"
    return Policy(
        folder=folder,
        num_token_ids=tokenizer.get_vocab_size(with_added_tokens=True),
        bytes_per_token=len(sample.encode()) / len(tokenizer.encode(sample).ids),
        reply_ids=tuple(tokenizer.encode(drawn).ids),
    )


def _train(text: str) -> Tokenizer:
    """Byte-level BPE, cut into words as the Qwen family cuts them, with that family's control tokens."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    return tokenizer
