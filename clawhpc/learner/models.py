"""Which models are exact on trees, as far as their configuration says it: a reason by name for each that is not.

What no list of names foresees is measured: see `exactness.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from transformers import PreTrainedModel

RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid"})
LOGIT_CHANGES = ("logit_scale", "logits_scaling", "final_logit_softcapping")
WHOLE_ROW_ROPE = frozenset({"dynamic", "longrope"})
"""Kinds of rotary positions whose frequencies depend on the longest sequence of the batch."""
UNUSED_DROPOUT = ("classifier_dropout", "summary_first_dropout")
"""Of heads that a language model has not."""


def unfit_reason(model: PreTrainedModel) -> str:
    """Why the model cannot train on trees; empty where nothing speaks against it."""
    return next(chain(_reasons_of_layers(model), _reasons_of_config(model.config.to_dict())), "")


def _reasons_of_layers(model: PreTrainedModel) -> Iterator[str]:
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    window = not kinds and getattr(config, "sliding_window", None)
    if model._is_stateful or kinds & RECURRENT_LAYERS:
        yield "a recurrent layer would carry the state of one branch into the next"
    if window or kinds - {"full_attention"}:
        yield "a windowed or sparse layer counts rows, but rows before a token are not the tokens before it on its path"
    if not model._supports_attention_backend:
        yield "it does not take its attention from transformers' attention interface"
    if getattr(config, "attn_logit_softcapping", None):
        yield "it caps its attention logits (attn_logit_softcapping)"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        yield "its attention has sinks"


def _reasons_of_config(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in sorted(settings.items()):
        drawn = ("dropout" in name or name.endswith(("pdrop", "jitter_noise"))) and name not in UNUSED_DROPOUT
        if drawn and value:
            yield f"{name} is not 0"
    if any(settings.get(name) not in (None, 1.0) for name in LOGIT_CHANGES):
        yield f"it changes its logits after the output head ({' or '.join(LOGIT_CHANGES)})"
    if kinds := set(_rope_types(settings.get("rope_parameters"))) & WHOLE_ROW_ROPE:
        yield f"its rotary positions depend on the length of the whole row (rope_type {kinds.pop()})"


def _rope_types(parameters: object) -> Iterator[object]:
    """Of a model, or of each of its kinds of layers."""
    if isinstance(parameters, Mapping):
        yield parameters.get("rope_type")
        for value in parameters.values():
            yield from _rope_types(value)
