"""Train a policy: `fit_rl` on rollouts, `fit_sft` on traces. Both go on from the newest checkpoint that they find.

`fit_rl` may share its work among several processes; each of the others runs `follow_rl`.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment

from clawhpc.credit.settings import CreditSettings
from clawhpc.errors import UserError
from clawhpc.learner.callbacks import (
    GivePolicy,
    PrintSteps,
    PublishPolicy,
    SaveCheckpoint,
    StreamCheckpoint,
    WriteCsv,
    list_checkpoints,
)
from clawhpc.learner.data import StepData, StepSource, rl_source, sft_source, shared_source
from clawhpc.learner.hosts import THIS_HOST, Host
from clawhpc.learner.module import LearnerModule, SftModule
from clawhpc.learner.networks import TreePolicy
from clawhpc.learner.policy import save_policy
from clawhpc.learner.ranks import ALONE, Ranks, group_of_one, lead_ranks
from clawhpc.learner.rl_module import RlModule
from clawhpc.learner.settings import LearnerSettings
from clawhpc.learner.sharding import RankEnvironment, ShardedStrategy
from clawhpc.records import PolicyVersion, RolloutRecord
from clawhpc.store import read_policy
from clawhpc.tree.nodes import CallTree


@dataclass(frozen=True, kw_only=True)
class LearnerPaths:
    """Where a run of the learner keeps what it writes."""

    checkpoints: Path
    metrics: Path
    """For `metrics.csv`."""

    @property
    def ranks(self) -> Path:
        """What each process but the first has said, `rank-1.log` and so on."""
        return self.metrics / "ranks"


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
    environment: Mapping[str, str] = MappingProxyType({}),
    hosts: Sequence[Host] = (THIS_HOST,),
    by_harness: bool = False,
) -> int:
    """Make at most `num_steps` steps, starting from the policy in folder `policy`; returns the step of the last policy.

    PolicyVersion k is in `policy_folder(k)` before `collect(k)` is called, which may block, and returns the rollouts of
    step k, or None to end here. All of this happens in this process. The others run on `hosts`, which are as many as
    `settings.num_nodes`, this one first; `environment` is for them. `by_harness`: the log tells harnesses apart.
    """
    first = read_policy(policy)
    job = RankJob(
        settings=settings,
        with_critic=credit.needs_critic,
        policy=str(policy),
        num_steps=num_steps,
        checkpoints=str(paths.checkpoints),
        cuda=check_devices(settings),
    )
    with _ranks(job, hosts, logs=paths.ranks, environment=environment) as ranks:
        return fit(
            job.module(ranks),
            shared_source(rl_source(collect, settings, credit, by_harness=by_harness), ranks),
            [
                PrintSteps(num_steps, RL_LINE, every=1),
                WriteCsv(paths.metrics / "metrics.csv"),
                _checkpoints(settings, paths.checkpoints),
                PublishPolicy(policy_folder, first.renderer, first.thinking, settings),
            ],
            list_checkpoints(paths.checkpoints),
            logger=logger,
        )


def _ranks(
    job: RankJob, hosts: Sequence[Host], *, logs: Path, environment: Mapping[str, str]
) -> AbstractContextManager[Ranks]:
    settings = job.settings
    assert len(hosts) == settings.num_nodes, f"{len(hosts)} hosts for learner.num_nodes={settings.num_nodes}"
    if settings.devices * settings.num_nodes == 1:
        return _alone(settings, cuda=job.cuda)
    return lead_ranks(settings.devices, job.command, hosts=hosts, logs=logs, environment=environment, cuda=job.cuda)


def _alone(settings: LearnerSettings, *, cuda: bool) -> AbstractContextManager[Ranks]:
    return group_of_one(cuda=cuda) if settings.mixed else nullcontext(ALONE)


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What another process than the first must know to share the work of `fit_rl`; all else it is told step by step."""

    settings: LearnerSettings
    with_critic: bool
    policy: str
    """Folder of the policy that the fit begins with."""
    num_steps: int
    checkpoints: str
    """Folder."""
    cuda: bool

    @property
    def command(self) -> list[str]:
        """Its process."""
        return [sys.executable, "-m", "clawhpc.learner.follower", msgspec.json.encode(self).decode()]

    def module(self, ranks: Ranks) -> RlModule:
        """The same on all ranks, but for its place among them."""
        return RlModule(self.settings, Path(self.policy), self.num_steps, with_critic=self.with_critic, ranks=ranks)


def follow_rl(job: RankJob, ranks: Ranks) -> None:
    """Share the work of a `fit_rl` in another process, which reads the policy and a checkpoint, and writes nothing."""
    checkpoints = _checkpoints(job.settings, Path(job.checkpoints))
    fit(job.module(ranks), shared_source(None, ranks), [checkpoints, GivePolicy()], [])


def fit_sft(
    settings: LearnerSettings,
    *,
    policy: Path,
    num_steps: int,
    lessons: Callable[[int, TreePolicy], Sequence[CallTree] | None],
    output: Path,
    paths: LearnerPaths,
    step: int = 0,
) -> PolicyVersion:
    """Imitate in at most `num_steps` steps, and publish the result in `output` as policy of `step`.

    `lessons(k, policy)` says what: the sampled tokens of its trees. It sees the policy as it is before step k, and
    returns None to end here. There is one update per step, and one process, whatever `settings` say.
    """
    first = read_policy(policy)
    cuda = check_devices(settings)
    module = SftModule(settings, policy, num_steps)
    source = sft_source(lambda at: lessons(at, module.policy), settings)
    watch = RichProgressBar() if sys.stdout.isatty() else PrintSteps(num_steps, SFT_LINE, every=SFT_LINE_EVERY)
    callbacks = [watch, WriteCsv(paths.metrics / "metrics.csv"), _checkpoints(settings, paths.checkpoints)]
    with _alone(settings, cuda=cuda):
        fit(module, source, callbacks, list_checkpoints(paths.checkpoints))
        return save_policy(
            output,
            module.policy.model,
            policy,
            step=step,
            renderer=first.renderer,
            thinking=first.thinking,
            state_dict=module.policy_weights(),
        )


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


def check_devices(settings: LearnerSettings) -> bool:
    """UserError where there are not the GPUs that `settings` ask for of this host, and so of each."""
    num_gpus = torch.cuda.device_count() if settings.accelerator != "cpu" else 0
    if settings.accelerator == "cuda" and not num_gpus:
        raise UserError("learner.accelerator=cuda: torch finds no GPU here; on this machine it is cpu, or auto")
    if num_gpus and settings.devices > num_gpus:
        raise UserError(f"learner.devices={settings.devices}: each needs a GPU, and torch finds {num_gpus} here")
    return num_gpus > 0


def _checkpoints(settings: LearnerSettings, folder: Path) -> SaveCheckpoint:
    return SaveCheckpoint(folder, every=settings.checkpoint_every, keep=settings.keep_checkpoints)


def fit(
    module: LearnerModule,
    source: StepSource,
    callbacks: Sequence[Callback],
    saved: Sequence[Path],
    *,
    logger: Logger | Literal[False] = False,
) -> int:
    """Go through `source`, from the last of the `saved` checkpoints that rank 0 has on; the number of steps done."""
    settings, ranks = module.settings, module.ranks
    if settings.num_threads or ranks.size > 1:
        torch.set_num_threads(settings.num_threads or max(1, len(os.sched_getaffinity(0)) // ranks.per_host))
    seed_everything(settings.seed, verbose=False)
    _silence_lightning()
    trainer = Trainer(
        accelerator=settings.accelerator,
        devices=ranks.per_host,
        num_nodes=ranks.num_hosts,
        strategy=ShardedStrategy(ranks) if module.sharded else "auto",
        precision="32-true",  # of the weights; what is computed in bf16 is `sharding.py`'s affair
        max_epochs=1,
        logger=logger,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=any(isinstance(callback, RichProgressBar) for callback in callbacks),
        log_every_n_steps=1,
        # Under Slurm, Lightning would else take the requeue signal, which belongs to the launcher.
        plugins=[RankEnvironment(ranks) if module.sharded else LightningEnvironment(), StreamCheckpoint()],
    )
    data = StepData(source, module.num_steps)
    try:
        trainer.fit(
            module,
            datamodule=data,
            ckpt_path=ranks.broadcast(saved[-1] if saved else None),
            weights_only=False,
        )
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise stop.__context__ from None  # Lightning exits; what Ctrl-C means is the entry point's to say
        raise
    return data.stream.next_step


def _silence_lightning() -> None:
    """No hardware report, no advertisement, no advice to start by srun, no warning that is its own to heed."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r".*LeafSpec.*", category=FutureWarning)
    warnings.filterwarnings("ignore", message="The `srun` command is available", category=PossibleUserWarning)
