"""Train a policy: `fit_rl` on rollouts, `fit_sft` on traces. Both go on from the newest checkpoint that they find."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment

from clawhpc.credit.settings import CreditSettings
from clawhpc.errors import UserError
from clawhpc.learner.callbacks import (
    PrintSteps,
    PublishPolicy,
    SaveCheckpoint,
    StreamCheckpoint,
    WriteCsv,
    list_checkpoints,
)
from clawhpc.learner.data import StepData, StepSource, rl_source, sft_source
from clawhpc.learner.module import LearnerModule, SftModule
from clawhpc.learner.networks import TreePolicy
from clawhpc.learner.policy import save_policy
from clawhpc.learner.rl_module import RlModule
from clawhpc.learner.settings import LearnerSettings
from clawhpc.records import PolicyVersion, RolloutRecord
from clawhpc.store import read_policy
from clawhpc.tree.nodes import CallTree


@dataclass(frozen=True, kw_only=True)
class LearnerPaths:
    """Where a run of the learner keeps what it writes."""

    checkpoints: Path
    metrics: Path
    """For `metrics.csv`."""


def fit_rl(
    settings: LearnerSettings,
    credit: CreditSettings,
    *,
    policy: Path,
    num_steps: int,
    collect: Callable[[int], Sequence[RolloutRecord] | None],
    policy_folder: Callable[[int], Path],
    paths: LearnerPaths,
    logger: Logger | Literal[False] = False,
) -> int:
    """Make at most `num_steps` steps, starting from the policy in folder `policy`; returns the step of the last policy.

    PolicyVersion k is in `policy_folder(k)` before `collect(k)` is called, which may block, and returns the rollouts of
    step k, or None to end here.
    """
    first = read_policy(policy)
    module = RlModule(settings, policy, num_steps, with_critic=credit.needs_critic)
    publish = PublishPolicy(policy_folder, first.renderer, first.thinking)
    return _fit(module, rl_source(collect, settings, credit), paths, publish=publish, names=RL_LINE, logger=logger)


def fit_sft(
    settings: LearnerSettings,
    *,
    policy: Path,
    num_steps: int,
    lessons: Callable[[int, TreePolicy], Sequence[CallTree] | None],
    output: Path,
    paths: LearnerPaths,
) -> PolicyVersion:
    """Imitate in at most `num_steps` steps, and publish the result in `output` as policy of step 0.

    `lessons(k, policy)` says what: the sampled tokens of its trees. It sees the policy as it is before step k, and
    returns None to end here. There is one update per step, whatever `settings` say.
    """
    first = read_policy(policy)
    module = SftModule(settings, policy, num_steps)
    source = sft_source(lambda step: lessons(step, module.policy), settings)
    _fit(module, source, paths, publish=None, names=SFT_LINE)
    return save_policy(output, module.policy.model, policy, step=0, renderer=first.renderer, thinking=first.thinking)


RL_LINE = (
    "train/reward",
    "train/loss",
    "train/grad_norm",
    "train/clip_share",
    "train/entropy",
    "time/collect_s",
    "time/learn_s",
)
SFT_LINE = ("train/loss", "train/grad_norm", "train/lr", "time/learn_s")
"""What the plain line of a step shows."""
SFT_LINE_EVERY = 25
"""Steps of imitation between two such lines: they take a fraction of a second each."""


def _fit(
    module: LearnerModule,
    source: StepSource,
    paths: LearnerPaths,
    *,
    publish: Callback | None,
    names: tuple[str, ...],
    logger: Logger | Literal[False] = False,
) -> int:
    """Returns the number of steps that are done."""
    settings = module.settings
    if settings.accelerator == "cuda" and not torch.cuda.is_available():
        raise UserError("learner.accelerator=cuda: torch finds no GPU here; on this machine it is cpu, or auto")
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    seed_everything(settings.seed, verbose=False)
    _silence_lightning()
    show_bar = publish is None and sys.stdout.isatty()  # collecting draws a bar of its own
    watch = (
        RichProgressBar() if show_bar else PrintSteps(module.num_steps, names, every=1 if publish else SFT_LINE_EVERY)
    )
    checkpoint = SaveCheckpoint(paths.checkpoints, every=settings.checkpoint_every, keep=settings.keep_checkpoints)
    trainer = Trainer(
        accelerator=settings.accelerator,
        devices=1,
        precision=settings.precision,
        max_epochs=1,
        logger=logger,
        callbacks=[watch, WriteCsv(paths.metrics / "metrics.csv"), checkpoint, *([publish] if publish else [])],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=show_bar,
        log_every_n_steps=1,
        # Under Slurm, Lightning would else take the requeue signal, which belongs to the launcher.
        plugins=[LightningEnvironment(), StreamCheckpoint()],
    )
    saved = list_checkpoints(paths.checkpoints)
    data = StepData(source, module.num_steps)
    try:
        trainer.fit(
            module,
            datamodule=data,
            ckpt_path=saved[-1] if saved else None,
            weights_only=False,
        )
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise stop.__context__ from None  # Lightning exits; what Ctrl-C means is the entry point's to say
        raise
    return data.stream.next_step


def _silence_lightning() -> None:
    """No hardware report, no advertisement, and no warning that is Lightning's own to heed."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r".*LeafSpec.*", category=FutureWarning)
