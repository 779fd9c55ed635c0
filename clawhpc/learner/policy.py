"""Make, save and load policy folders: what transformers and vLLM load as it is, with `policy.json` beside it."""

from __future__ import annotations

import copy
import logging
import shutil
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config
from transformers.utils import logging as transformers_logging

from clawhpc.engine.render import ChatRenderer
from clawhpc.engine.tokenizer import count_token_ids
from clawhpc.errors import UserError, boundary
from clawhpc.learner.attention import TreeLayout, use_tree_attention
from clawhpc.learner.disk import disk_errors
from clawhpc.learner.exactness import check_exactness
from clawhpc.learner.settings import PolicySettings
from clawhpc.learner.tokenizer import END_OF_MESSAGE, END_OF_TEXT
from clawhpc.records import PolicyVersion, Probe
from clawhpc.store import is_whole, publish_policy, read_policy, weights_digest

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
PART = ".part"
"""Ends the name of a folder that is being written."""
RECOMPUTED = "rotary_emb.inv_freq"
"""Ends the name of what old checkpoints hold beside their weights."""
LOADING_FAULTS = ("missing_keys", "mismatched_keys", "unexpected_keys")
"""Of transformers' report on a load: what it would draw at random, or leave out."""
PROBE_TOKENS = 64
PROBE_TOLERANCE = 1e-4
"""The learner's weights are float32, in which fused and unfused kernels differ by 1e-6 on average."""
BFLOAT16_TIMES = 3.0
"""An engine in bfloat16 may differ from the learner by so many times what this model does in it here, for its kernels
round elsewhere. Another policy's weights differ by far more: tests/unit/learner/test_learner_policy.py.
"""
VOCAB_MULTIPLE = 64
"""Rows of the embedding are padded to a multiple of it, which GPU kernels like. Never drawn, never trained."""


def create_policy(
    folder: Path, tokenizer_folder: Path, settings: PolicySettings, *, seed: int, renderer: str = "qwen3"
) -> PolicyVersion:
    """A fresh policy of step 0 in `folder`, with random weights that depend on `seed` alone."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = _config(settings, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    use_tree_attention(model)
    return save_policy(folder, model, tokenizer_folder, step=0, renderer=renderer, thinking=False)


def _config(settings: PolicySettings, tokenizer: Any) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=-(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.ffn_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.max_positions,
        initializer_range=settings.initializer_range,
        tie_word_embeddings=settings.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_MESSAGE),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )


def save_policy(
    folder: Path,
    model: PreTrainedModel,
    tokenizer_folder: Path,
    *,
    step: int,
    renderer: str,
    thinking: bool,
    state_dict: Mapping[str, Tensor] | None = None,
) -> PolicyVersion:
    """Publish `model` as the PolicyVersion of `step` in `folder`, whole or not at all. A whole one that is there stays.

    `tokenizer_folder` is any folder with the tokenizer's files, such as that of an earlier version; they are copied.
    What bfloat16 does to that version is taken to be true of this one: to measure it takes a pass of the whole model.
    `state_dict` has the weights where `model` is sharded: all of them, on the CPU, by the model's own names. Then
    `model` is asked for its class and configuration alone, so one rank can publish for all.
    OSError, which names a path, when the disk is full.
    """
    transformers_logging.disable_progress_bar()
    if state_dict is not None:
        model = _whole_model(model, state_dict, torch.float32)
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}{PART}")
    try:
        with disk_errors(folder):
            part.mkdir(parents=True)
            _save_weights(model, part)
            num_token_ids = _copy_tokenizer(tokenizer_folder, part)
            policy = PolicyVersion(
                step=step,
                path=str(folder),
                digest=weights_digest(part),
                renderer=renderer,
                thinking=thinking,
                probe=make_probe(model, num_token_ids, bfloat16_tolerance=known_tolerance(tokenizer_folder)),
            )
            return publish_policy(part, policy)
    finally:  # published, it is there no more
        shutil.rmtree(part, ignore_errors=True)


def _whole_model(model: PreTrainedModel, state_dict: Mapping[str, Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """A model like `model` around the given weights, which are not copied if `dtype` is theirs."""
    loaded: Any = type(model).from_pretrained(
        None,
        config=copy.deepcopy(model.config),
        state_dict=dict(state_dict),
        dtype=dtype,
        output_loading_info=True,
    )
    whole, found = loaded
    wrong = [f"{kind}: {sorted(map(str, found[kind]))}" for kind in LOADING_FAULTS if found[kind]]
    assert not wrong, f"the weights to publish are not those of {type(model).__name__}: {wrong}"
    use_tree_attention(whole)
    return whole


def _save_weights(model: PreTrainedModel, folder: Path) -> None:
    """As the model is known on the hub, where each expert has its name; in memory those of a layer are one tensor.

    Else transformers gives back the names that the model was loaded by, which need not be those that an engine knows.
    """
    model._weight_conversions = None  # type: ignore[assignment]
    model.save_pretrained(folder)


def describe_model(folder: Path, *, renderer: str, thinking: bool) -> PolicyVersion:
    """What `policy.json` says of a Hugging Face model that has none. UserError for one that cannot learn on trees.

    A warning where the model has learned to answer prompts that end otherwise than ours.
    """
    ours = ChatRenderer(folder, renderer=renderer, thinking=thinking).generation_prompt  # tells a wrong name first
    theirs = template_prompt(folder, thinking=thinking)
    if theirs is not None and theirs != ours:
        log.warning(
            "%s: its own chat template ends a prompt with %r; policy.renderer=%s, policy.thinking=%s ends it with %r: "
            "try the other policy.thinking, or another policy.renderer",
            *(folder, theirs, renderer, str(thinking).lower(), ours),
        )
    model, num_token_ids = load_policy(folder), count_token_ids(folder)
    with boundary(UserError, f"{folder}: {type(model).__name__} ({model.config.model_type}) cannot train on trees"):
        probe = make_probe(model, num_token_ids)
        check_exactness(model, num_token_ids)
    return PolicyVersion(
        step=0,
        path=str(folder),
        digest=weights_digest(folder),
        renderer=renderer,
        thinking=thinking,
        probe=probe,
    )


def template_prompt(folder: Path, *, thinking: bool) -> str | None:
    """What the model's own chat template ends a prompt with; None where it has none, or one that fails."""
    message = [{"role": "user", "content": "."}]
    try:
        with boundary(UserError, f"{folder}: its chat template"):
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            if tokenizer.chat_template is None:
                return None
            texts: list[str] = [
                tokenizer.apply_chat_template(
                    message, tokenize=False, add_generation_prompt=asking, enable_thinking=thinking
                )
                for asking in (False, True)
            ]
    except UserError as error:
        log.info("no prompt to compare ours with: %s", error)
        return None
    told, asked = texts
    return asked.removeprefix(told) if asked.startswith(told) else None


def sweep_parts(policies: Path) -> None:
    """Remove what saves that were killed have left beside the policies of a folder. Nobody may be saving there."""
    for part in policies.glob(f".*{PART}"):
        shutil.rmtree(part)


def load_policy(folder: Path) -> PreTrainedModel:
    """The model of a policy folder: float32, for trees, in training mode. UserError for one that does not suit them.

    It is on the CPU also where Lightning has torch make things on a GPU: for that transformers wants another package.
    """
    transformers_logging.disable_progress_bar()
    loaded: Any
    with boundary(UserError, f"{folder}: no model that can be loaded"), torch.device("cpu"):
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    model, found = loaded
    _check_weights(folder, found)
    use_tree_attention(model)
    return model.train()


def empty_policy(folder: Path) -> PreTrainedModel:
    """As `load_policy`, but on the meta device: no weights are read, and no memory is taken."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    use_tree_attention(model)
    return model.train()


def _check_weights(folder: Path, found: Mapping[str, Collection[Any]]) -> None:
    """UserError for weights of another model than config.json describes: transformers would draw what is missing."""
    for kind in LOADING_FAULTS:
        keys = sorted(str(key) for key in found[kind] if not str(key).endswith(RECOMPUTED))
        if keys:
            raise UserError(f"{folder}: its weights are not those of its config.json: {len(keys)} {kind}, as {keys[0]}")


def known_tolerance(folder: Path) -> float | None:
    """How far an engine in bfloat16 may differ from the PolicyVersion in `folder`; None where there is none."""
    return read_policy(folder).probe.bfloat16_tolerance if is_whole(folder) else None


def make_probe(model: PreTrainedModel, num_token_ids: int, *, bfloat16_tolerance: float | None = None) -> Probe:
    """Ids that are the same for all versions of a policy, with this model's log-probs over its whole output head.

    Whoever computes in bfloat16 may differ as far as bfloat16 itself goes, which depends on the model: it is measured
    where `bfloat16_tolerance` does not say it. UserError for a model that gives NaN or infinity.
    """
    generator = torch.Generator().manual_seed(0)
    length = min(PROBE_TOKENS, model.config.max_position_embeddings)
    ids_T = torch.randint(num_token_ids, (length,), generator=generator)
    logprobs_T = sequence_logprobs(model, ids_T)
    if not logprobs_T.isfinite().all():
        raise UserError("the model's log-probs are not finite: its weights are broken")
    if bfloat16_tolerance is None:
        rounded = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
        rounded_T = sequence_logprobs(_whole_model(model, rounded, torch.bfloat16), ids_T)
        gap = (rounded_T - logprobs_T).abs().mean().item()
        bfloat16_tolerance = max(Probe.bfloat16_tolerance, BFLOAT16_TIMES * gap)
    return Probe(
        token_ids=tuple(ids_T.tolist()),
        logprobs=tuple(logprobs_T.tolist()),
        tolerance=PROBE_TOLERANCE,
        bfloat16_tolerance=bfloat16_tolerance,
    )


@torch.no_grad()
def sequence_logprobs(model: PreTrainedModel, ids_T: Tensor) -> Tensor:
    """(T - 1,) log-probs of each token given those before it: temperature 1, all rows of the output head."""
    ids_BT = ids_T.to(model.device)[None]
    logits_TV = model(input_ids=ids_BT, use_cache=False, tree_layout=TreeLayout.chain(len(ids_T))).logits[0, :-1]
    return logits_TV.float().log_softmax(-1).gather(-1, ids_BT[0, 1:, None])[:, 0].cpu()


def _copy_tokenizer(source: Path, target: Path) -> int:
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)
    return count_token_ids(target)
