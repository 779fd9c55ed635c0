"""The optimizer updates of one step.

A step is `epochs` updates, each over all rows of the step with their gradients added up. The forward pass of the first
update is by the policy before the update, so its log-probs are the old log-probs, and its ratio learner/old is exactly
1: no pass is made for them alone.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import PreTrainedModel

from clawhpc.engine.tokenizer import count_token_ids
from clawhpc.errors import UserError
from clawhpc.learner.batch import TreeBatch
from clawhpc.learner.data import StepBatch
from clawhpc.learner.losses import Clip, Sums, chunked_logprobs, grpo_loss, sft_loss
from clawhpc.learner.policy import load_policy
from clawhpc.learner.settings import LearnerSettings

log = logging.getLogger(__name__)


class LearnerModule(LightningModule):
    """Trains the policy in a folder, one `StepBatch` at a time. Subclasses say what the loss of a row is."""

    model: PreTrainedModel
    """Once Lightning has called `configure_model`."""
    num_token_ids: int
    """Ids that can be drawn; the output head may have more."""
    num_epochs = 1
    """Updates per step."""

    def __init__(self, settings: LearnerSettings, policy_folder: Path, num_steps: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.settings = settings
        self.policy_folder = policy_folder
        self.num_steps = num_steps

    def configure_model(self) -> None:
        """Load the policy. Sharding it over ranks belongs here."""
        if hasattr(self, "model"):
            return
        self.model = load_policy(self.policy_folder)
        self.num_token_ids = count_token_ids(self.policy_folder)
        if self.settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        settings = self.settings
        return torch.optim.AdamW(
            self.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out Lightning's loop counters: the position in the data says all, also if more steps are asked for."""
        del checkpoint["loops"]

    def training_step(self, step: StepBatch, batch_idx: int) -> dict[str, Any]:
        """Make the updates of `step`. A step without a trained token leaves weights and optimizer as they are."""
        began = time.perf_counter()
        rate = learning_rate(self.settings, step.step, self.num_steps)
        metrics = {**step.metrics, "train/lr": rate}
        if step.rows:
            metrics |= {f"train/{name}": value for name, value in self._update(step, rate).items()}
        metrics["time/learn_s"] = time.perf_counter() - began
        self._log(step.step, metrics)
        return metrics

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        on_bar = {name: value for name, value in metrics.items() if name in ("train/reward", "train/loss")}
        rest = {name: value for name, value in metrics.items() if name not in on_bar}
        self.log_dict(on_bar, prog_bar=True, batch_size=1)
        self.log_dict({**rest, "step": float(step)}, batch_size=1)  # Lightning takes its x-axis from "step"

    def _update(self, step: StepBatch, rate: float) -> dict[str, float]:
        """Means over the step. An update whose gradient is not finite is left out; UserError when all of them are."""
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = list(step.rows)
        total = StepMeans()
        for _ in range(self.num_epochs):
            for index, row in enumerate(rows):
                row = row.to(self.device)
                logprobs_N, entropy_N = row_logprobs(self.model, row, self.settings, self.num_token_ids)
                if row.old_logprobs_BT is None:
                    row = with_old_logprobs(row, logprobs_N.detach())
                    rows[index] = row.to("cpu")
                loss, sums = self.row_loss(row, logprobs_N)
                self.manual_backward(loss)
                total.add(loss, sums | {"entropy": entropy_N.sum()}, len(logprobs_N))
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), self.settings.max_grad_norm).item()
            total.add_update(norm)
            if math.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
        self._judge(step.step, total)
        return total.means()

    def _judge(self, step: int, total: StepMeans) -> None:
        """A step of which nothing is fit to keep must not reach a checkpoint: no resume would ever leave it."""
        if not total.norms:
            raise UserError(
                f"step {step}: none of its {total.num_skipped} updates has a finite gradient, and none is kept; "
                "where the policy has diverged, begin again with a lower learner.lr"
            )
        if total.num_skipped:
            log.warning("step %d: %d updates are left out: their gradients are not finite", step, total.num_skipped)

    def row_loss(self, row: TreeBatch, learner_logprobs_N: Tensor) -> tuple[Tensor, Sums]:
        """The row's part of the loss of the step, and sums for the log."""
        raise NotImplementedError


class GrpoModule(LearnerModule):
    """Tree GRPO."""

    def __init__(self, settings: LearnerSettings, policy_folder: Path, num_steps: int) -> None:
        super().__init__(settings, policy_folder, num_steps)
        self.num_epochs = settings.epochs
        self.clip = Clip(low=settings.clip_low, high=settings.clip_high, truncation=settings.truncation)

    def row_loss(self, row: TreeBatch, learner_logprobs_N: Tensor) -> tuple[Tensor, Sums]:
        """`losses.grpo_loss` of the row's sampled tokens."""
        assert row.old_logprobs_BT is not None, "old log-probs are those of the first pass"
        at = row.sampled_BT
        return grpo_loss(
            learner_logprobs_N,
            row.old_logprobs_BT[at],
            row.sampling_logprobs_BT[at],
            row.advantages_BT[at],
            row.token_weight_BT[at],
            self.clip,
        )


class SftModule(LearnerModule):
    """Imitation of the sampled tokens; credit plays no part."""

    def row_loss(self, row: TreeBatch, learner_logprobs_N: Tensor) -> tuple[Tensor, Sums]:
        """`losses.sft_loss` of the row's sampled tokens."""
        return sft_loss(learner_logprobs_N, row.token_weight_BT[row.sampled_BT])


def row_logprobs(
    model: PreTrainedModel, row: TreeBatch, settings: LearnerSettings, num_token_ids: int
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (N,) of the row's sampled tokens, each predicted from the token before it on its path.

    A token before a fork is read once for every child's first token. Hidden states that predict no sampled token do
    not reach the output head.
    """
    hidden_BTD = model.base_model(
        input_ids=row.input_ids_BT, position_ids=row.positions_BT, use_cache=False, tree_layout=row.layout
    ).last_hidden_state
    return chunked_logprobs(
        hidden_BTD[0, row.predecessor_BT[row.sampled_BT]],
        row.input_ids_BT[row.sampled_BT],
        model.get_output_embeddings(),
        temperature=row.temperature,
        num_token_ids=num_token_ids,
        chunk=settings.logit_chunk,
    )


def with_old_logprobs(row: TreeBatch, old_logprobs_N: Tensor) -> TreeBatch:
    """`row` with its old log-probs in place."""
    old_logprobs_BT = row.sampling_logprobs_BT.new_zeros(row.sampled_BT.shape, dtype=old_logprobs_N.dtype)
    old_logprobs_BT[row.sampled_BT] = old_logprobs_N
    return dataclasses.replace(row, old_logprobs_BT=old_logprobs_BT)


def learning_rate(settings: LearnerSettings, step: int, num_steps: int) -> float:
    """Of every update of `step`, from 0: a line up over the warm-up, then as `schedule` says."""
    warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    left = (num_steps - step) / num_steps if settings.schedule == "linear" else 1.0
    return settings.lr * warm * left


class StepMeans:
    """Sums over rows and updates of a step, and their means per trained token."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.num_tokens = 0
        self.norms: list[float] = []
        """Of the gradients that were used."""
        self.num_skipped = 0
        self.sums: defaultdict[str, float] = defaultdict(float)

    def add(self, loss: Tensor, sums: Sums, num_tokens: int) -> None:
        """One row of one update."""
        self.loss += loss.item()
        self.num_tokens += num_tokens
        for name, value in sums.items():
            self.sums[name] = max(self.sums[name], value.item()) if _is_max(name) else self.sums[name] + value.item()

    def add_update(self, grad_norm: float) -> None:
        """One update is complete, or was left out."""
        if math.isfinite(grad_norm):
            self.norms.append(grad_norm)
        else:
            self.num_skipped += 1

    def means(self) -> dict[str, float]:
        """Loss and gradient norm per update, all else per trained token. Not before there is an update."""
        per_token = {
            name: value if _is_max(name) else value / max(1, self.num_tokens) for name, value in self.sums.items()
        }
        return {
            "loss": self.loss / (len(self.norms) + self.num_skipped),
            "grad_norm": sum(self.norms) / len(self.norms),
            "skipped_updates": float(self.num_skipped),
            **per_token,
        }


def _is_max(name: str) -> bool:
    return name.endswith("_max")
