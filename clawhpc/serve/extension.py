"""What runs inside the engine's process: start it, load a policy, mask the padding. The only module that imports vLLM.

Traps of vLLM 0.32 on CPU that are closed here:

- Weights are packed for the kernels. A reload leaves the packed copy of a tied output head as it was, and the experts
  of a MoE layer unpacked where packed ones are read. Either way it answers 200, and draws from wrong weights.
- It insists on a new interpreter for the engine's core, which imports for 12 s what its parent has imported already.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondLogitsProcessor

from clawhpc.ledger.parent import die_with_parent
from clawhpc.serve.command import NUM_TOKEN_IDS_KEY


class PolicyLoader:
    """Methods that vLLM adds to its worker (`--worker-extension-cls`), to be called by `/collective_rpc`."""

    model_runner: Any
    reload_weights: Any

    def load_policy(self, folder: str) -> None:
        """The weights in `folder` are the model's, wherever it keeps them. The caller has paused generation."""
        self.reload_weights(weights_path=folder)
        if current_platform.is_cpu():
            pack_again(self.model_runner.get_model())


def pack_again(model: Any) -> None:
    """Pack what vLLM's reload forgets to pack."""
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


class PaddingMask(LogitsProcessor, SecondLogitsProcessor):
    """No id beyond the tokenizer is drawn, and log-probs are those of the distribution without them.

    vLLM takes its second model runner wherever Triton works, so on every GPU, and the first one on CPUs. Each refuses a
    processor that is not of its own kind, and draws, and takes processed log-probs, from what the processor leaves.
    """

    def __init__(self, vllm_config: VllmConfig, *_of_the_runner: Any) -> None:
        additional: Any = vllm_config.additional_config
        self._num_token_ids: int = additional[NUM_TOKEN_IDS_KEY]

    def apply(self, logits: torch.Tensor, ctx: object = None) -> torch.Tensor:
        """Logits of a batch, (requests, rows of the head). `ctx`: which of them they are, by the second runner."""
        logits[:, self._num_token_ids :] = -torch.inf
        return logits

    def is_argmax_invariant(self) -> bool:
        """For the first runner. A padded row can be the largest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """For the first runner. There is none."""


def main() -> None:
    """vLLM's server, with the arguments of this process. See `command.PROGRAM`."""
    os.register_at_fork(after_in_child=die_with_parent)
    if current_platform.is_cpu():
        fork_engine_core()
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    gc.freeze()  # what has been imported is never looked at again, and its pages stay shared after the fork
    gc.enable()
    serve()


def fork_engine_core() -> None:
    """Fork the engine's core from the server, as vLLM does by default, although its CPU platform asks for `spawn`.

    That gives each worker its own OpenMP variables; here one process does all the work, with those that it was given.
    """
    check = CpuPlatform.check_and_update_config

    def check_and_fork(vllm_config: VllmConfig) -> None:
        check(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_fork)  # type: ignore[method-assign]
