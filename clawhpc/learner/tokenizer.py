"""Train a byte-level BPE whose chat tokens are those of the Qwen family, so that its renderer fits."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
END_OF_MESSAGE = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_MESSAGE)
"""Left out when a text is decoded without special tokens."""
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens that stay in a decoded text, as in Qwen's own tokenizers."""
_CHAT_TOKEN = re.compile("|".join(map(re.escape, CONTROL_TOKENS + MARKUP_TOKENS)))


def train_tokenizer(texts: Iterable[str], folder: Path, *, vocab_size: int) -> Tokenizer:
    """Learn merges from `texts` and write tokenizer.json and tokenizer_config.json to `folder`.

    Every text round-trips: all 256 bytes have a token and nothing is normalised. There may be fewer than `vocab_size`
    tokens where the texts give fewer merges. Chat tokens in the texts teach no merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKUP_TOKENS),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in _CHAT_TOKEN.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_MESSAGE, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)
    return tokenizer
