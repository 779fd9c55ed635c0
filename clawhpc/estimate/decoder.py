"""The shape of a model, and how many parameters that makes.

Per layer, of a full-attention decoder as Qwen3 and Llama are, with D the hidden size, Q and K the widths of queries and
of keys (heads times the size of a head), F that of the feed-forward network, E experts of which k are chosen:

    attention     D (Q + 2 K) + Q D, and biases of the first where there are any
    feed-forward  3 D F, or E (3 D F) and the router's D E
    norms         2 D, and 2 sizes of a head where queries and keys are normed

as weights whose rows are queries, keys, experts, … : what ranks share is rows (`count_numbers`).

Beside the layers: V D for the embedding, V D more for an output head that is not tied to it, D for the last norm.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from clawhpc.errors import UserError
from clawhpc.learner.settings import PolicySettings
from clawhpc.serve.checks import count_positions

Weight = tuple[int, int]
"""Rows, and numbers of a row."""


def count_numbers(weights: Iterable[Weight], num_ranks: int = 1) -> int:
    """In `weights`, with what fills them up among ranks: FSDP gives each as many rows as the one with the most."""
    return sum(ceil(rows / num_ranks) * num_ranks * width for rows, width in weights)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The shape of a full-attention decoder."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Of one expert, where there are experts."""
    vocab_size: int
    """Rows of the embedding."""
    tied: bool
    """The output head is the embedding."""
    num_positions: int | None
    """None where its configuration does not say it in so many words, as the engine's `ModelShape` has it."""
    num_experts: int = 0
    num_chosen: int = 0
    """Experts that compute a token."""
    qk_norm: bool = True
    """Queries and keys are normed, as in Qwen3."""
    qkv_bias: bool = False

    @property
    def query_width(self) -> int:
        """Q."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """K."""
        return self.num_kv_heads * self.head_dim

    @property
    def attention_params(self) -> int:
        """Of a layer."""
        inputs = self.query_width + 2 * self.key_width
        norms = 2 * self.head_dim if self.qk_norm else 0
        return self.hidden_size * (inputs + self.query_width) + (inputs if self.qkv_bias else 0) + norms

    @property
    def expert_params(self) -> int:
        """Of one expert, or of the feed-forward network of a layer."""
        return 3 * self.hidden_size * self.ffn_size

    @property
    def router_params(self) -> int:
        """Of a layer."""
        return self.hidden_size * self.num_experts

    @property
    def layer_weights(self) -> tuple[Weight, ...]:
        """Of a layer, as transformers has them."""
        hidden, ffn, experts = self.hidden_size, self.ffn_size, self.num_experts
        inputs = (self.query_width, self.key_width, self.key_width)
        dense = ((ffn, hidden), (ffn, hidden), (hidden, ffn))
        mixture = ((experts, 2 * ffn * hidden), (experts, hidden * ffn), (experts, hidden))
        return (
            *((rows, hidden) for rows in inputs),
            (hidden, self.query_width),
            *((rows, 1) for rows in inputs if self.qkv_bias),
            *(((self.head_dim, 1),) * 2 if self.qk_norm else ()),
            *(mixture if experts else dense),
            *((hidden, 1),) * 2,
        )

    @property
    def layer_params(self) -> int:
        """Of a layer."""
        return count_numbers(self.layer_weights)

    @property
    def embedding_params(self) -> int:
        """Of the embedding, or of an output head."""
        return self.vocab_size * self.hidden_size

    @property
    def backbone_weights(self) -> tuple[Weight, ...]:
        """Of all but an output head of its own: what a critic begins as."""
        return (*self.layer_weights * self.num_layers, (self.vocab_size, self.hidden_size), (self.hidden_size, 1))

    @property
    def backbone_params(self) -> int:
        """Of the same."""
        return count_numbers(self.backbone_weights)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Of the model."""
        return (*self.backbone_weights, *(() if self.tied else ((self.vocab_size, self.hidden_size),)))

    @property
    def outer_weights(self) -> tuple[Weight, ...]:
        """Of the model, outside of its layers."""
        return self.weights[self.num_layers * len(self.layer_weights) :]

    @property
    def num_params(self) -> int:
        """Of the model."""
        return count_numbers(self.weights)

    @property
    def computed_params(self) -> int:
        """That a token is multiplied with in the layers."""
        feed_forward = max(1, self.num_chosen) * self.expert_params + self.router_params
        return self.num_layers * (self.attention_params + feed_forward)

    @property
    def active_params(self) -> int:
        """As models with experts are named after: of all parameters, without the experts that are not chosen."""
        idle = max(0, self.num_experts - self.num_chosen) * self.expert_params
        return self.num_params - self.num_layers * idle


_QWEN3: dict[str, Any] = {"head_dim": 128, "vocab_size": 151936, "num_kv_heads": 8, "num_positions": 40960}
_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_kv_heads": 8,
    "num_positions": 131072,
    "qk_norm": False,
}
_LONG: dict[str, Any] = {"num_positions": 262144}
_QWEN3_4B: dict[str, Any] = _QWEN3 | {
    "num_layers": 36, "hidden_size": 2560, "num_heads": 32, "ffn_size": 9728, "tied": True
}  # fmt: skip
_QWEN3_30B: dict[str, Any] = _QWEN3 | {
    "num_layers": 48, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4, "ffn_size": 768, "tied": False,
    "num_experts": 128, "num_chosen": 8,
}  # fmt: skip
KNOWN: Mapping[str, Decoder] = {
    "Qwen3-0.6B": Decoder(**_QWEN3, num_layers=28, hidden_size=1024, num_heads=16, ffn_size=3072, tied=True),
    "Qwen3-1.7B": Decoder(**_QWEN3, num_layers=28, hidden_size=2048, num_heads=16, ffn_size=6144, tied=True),
    "Qwen3-4B": Decoder(**_QWEN3_4B),
    "Qwen3-4B-Instruct-2507": Decoder(**(_QWEN3_4B | _LONG)),
    "Qwen3-8B": Decoder(**_QWEN3, num_layers=36, hidden_size=4096, num_heads=32, ffn_size=12288, tied=False),
    "Qwen3-14B": Decoder(**_QWEN3, num_layers=40, hidden_size=5120, num_heads=40, ffn_size=17408, tied=False),
    "Qwen3-32B": Decoder(**_QWEN3, num_layers=64, hidden_size=5120, num_heads=64, ffn_size=25600, tied=False),
    "Qwen3-30B-A3B": Decoder(**_QWEN3_30B),
    "Qwen3-30B-A3B-Instruct-2507": Decoder(**(_QWEN3_30B | _LONG)),
    "Qwen3-Coder-30B-A3B-Instruct": Decoder(**(_QWEN3_30B | _LONG)),
    "Llama-3.2-1B": Decoder(
        **_LLAMA3, num_layers=16, hidden_size=2048, num_heads=32, head_dim=64, ffn_size=8192, tied=True
    ),
    "Llama-3.2-3B": Decoder(
        **_LLAMA3, num_layers=28, hidden_size=3072, num_heads=24, head_dim=128, ffn_size=8192, tied=True
    ),
    "Llama-3.1-8B": Decoder(
        **_LLAMA3, num_layers=32, hidden_size=4096, num_heads=32, head_dim=128, ffn_size=14336, tied=False
    ),
    "Llama-3.1-70B": Decoder(
        **_LLAMA3, num_layers=80, hidden_size=8192, num_heads=64, head_dim=128, ffn_size=28672, tied=False
    ),
}
"""Of public models, by the name of their folder: from the config.json of each."""


def find_decoder(folder: Path, shape: PolicySettings | None = None) -> Decoder:
    """The shape of the model in `folder`; where there is none yet, that of its name, or that which `sft` makes.

    UserError when nothing says it.
    """
    if (folder / "config.json").is_file():
        return read_decoder(folder / "config.json")
    names = {name.lower(): decoder for name, decoder in KNOWN.items()}
    if (known := names.get(folder.name.lower())) is not None:
        return known
    if shape is not None:
        return made_decoder(shape)
    raise UserError(
        f"policy.folder={folder}: there is no config.json, and its name is none of those whose shape is known: "
        f"{', '.join(KNOWN)}"
    )


def made_decoder(shape: PolicySettings) -> Decoder:
    """What `sft` makes, with as many tokens as it may have."""
    return Decoder(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_size=shape.ffn_size,
        vocab_size=shape.vocab_size,
        tied=shape.tie_embeddings,
        num_positions=shape.max_positions,
    )


def read_decoder(path: Path) -> Decoder:
    """The shape that a config.json describes. UserError for one of another kind."""
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        return _read(config)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not the shape of a decoder such as Qwen3 or Llama: {error!r}") from error


def _read(config: Mapping[str, Any]) -> Decoder:
    num_heads = int(config["num_attention_heads"])
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    if experts and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise ValueError("some of its layers have experts, and some have none")
    if others := set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"layers of {' and '.join(sorted(others))}, which cannot train on trees")
    return Decoder(
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=int(config["hidden_size"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
        ffn_size=int(config.get("moe_intermediate_size") or config["intermediate_size"]),
        vocab_size=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        num_positions=count_positions(config),
        num_experts=experts,
        num_chosen=int(config["num_experts_per_tok"]) if experts else 0,
        qk_norm=str(config.get("model_type", "")).startswith("qwen3"),
        qkv_bias=config.get("model_type") == "qwen2" or bool(config.get("attention_bias", False)),
    )
