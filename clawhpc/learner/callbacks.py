"""What happens around a step: the random state and the checkpoint, then the published policy, and the logs.

After the updates of step k come, in this order: its line in the logs, checkpoint k, PolicyVersion k + 1. So whatever
moment a run is killed at, its newest checkpoint is of a step whose line is written, and whose policy is published again
at the start if it is missing.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO

from clawhpc.errors import UserError
from clawhpc.learner.disk import disk_errors
from clawhpc.learner.module import LearnerModule
from clawhpc.learner.policy import save_policy, sweep_parts
from clawhpc.learner.settings import LearnerSettings, WandbMode
from clawhpc.learner.steps import StepBatch
from clawhpc.learner.wandb_file import drop_torn_end
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.store import drop_policies, is_whole, sync, write_atomic, write_once

log = logging.getLogger(__name__)


class WriteCsv(Callback):
    """`path` holds one row per step, in order, each metric a column; rows of steps that are made again are replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """Write the row of the step."""
        rows = [row for row in self._read() if int(row["step"]) < batch.step]
        rows.append({"step": str(batch.step), **{name: repr(value) for name, value in outputs.items()}})
        columns = dict.fromkeys(name for row in rows for name in row)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomic(self.path, text.getvalue().encode())

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))


class StreamCheckpoint(TorchCheckpointIO):
    """Writes a checkpoint to its file as it is made, and onto the disk.

    Lightning's own makes it in memory first, and then in the folder for temporary files, where a kill leaves it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """`path`: a file on a mounted file system."""
        with open(path, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())


class SaveCheckpoint(Callback):
    """`folder` holds the newest checkpoints, each whole: weights, optimizer, position in the data, random state."""

    def __init__(self, folder: Path, *, every: int, keep: int) -> None:
        self.folder = folder
        self.every = every
        self.keep = keep

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove what a save that was killed has left."""
        for part in self.folder.glob("step-*.part") if trainer.is_global_zero else ():
            part.unlink()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """A checkpoint is due every so many steps."""
        if (batch.step + 1) % self.every == 0:
            self._save(trainer, batch.step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """And after the last step."""
        num_done = trainer.datamodule.stream.next_step  # type: ignore[attr-defined]
        if num_done % self.every:
            self._save(trainer, num_done - 1)

    def _save(self, trainer: Trainer, step: int) -> None:
        """Write under another name, rename, and drop the oldest. OSError, which names a path, when the disk is full."""
        path = checkpoint_path(self.folder, step)
        part = path.with_suffix(".part")
        if not trainer.is_global_zero:
            trainer.save_checkpoint(part)  # gives rank 0 its part of the weights
            return
        try:
            with disk_errors(path):
                self.folder.mkdir(parents=True, exist_ok=True)
                trainer.save_checkpoint(part)
                part.replace(path)
                sync(self.folder)
        finally:
            part.unlink(missing_ok=True)
        for old in list_checkpoints(self.folder)[: -self.keep]:
            old.unlink()

    def state_dict(self) -> dict[str, Any]:
        """The random state of this process."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {
            "torch": torch.get_rng_state(),
            "cuda": cuda,
            "numpy": np.random.get_state(),
            "python": random.getstate(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the random state of the checkpoint."""
        torch.set_rng_state(state_dict["torch"])
        if state_dict["cuda"]:
            torch.cuda.set_rng_state_all(state_dict["cuda"][: torch.cuda.device_count()])
        np.random.set_state(state_dict["numpy"])
        random.setstate(state_dict["python"])


def checkpoint_path(folder: Path, step: int) -> Path:
    """The learner's state after `step`."""
    return folder / f"step-{step:06d}.ckpt"


def list_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints, oldest first."""
    return sorted(folder.glob("step-*.ckpt"))


class PublishPolicy(Callback):
    """The policy that collects the next step is in its folder before that step is asked for; then old ones go."""

    def __init__(
        self, folder_of: Callable[[int], Path], renderer: str, thinking: bool, settings: LearnerSettings
    ) -> None:
        self.folder_of = folder_of
        self.renderer = renderer
        self.thinking = thinking
        self.settings = settings

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publish the policy that the first step of this run needs, unless it is there; remove what a kill has left."""
        assert isinstance(pl_module, LearnerModule)
        step = trainer.datamodule.stream.next_step  # type: ignore[attr-defined]
        folder = self.folder_of(step)
        sweep_parts(folder.parent)
        self.publish(pl_module, step, folder)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """Publish the policy that the next step needs."""
        assert isinstance(pl_module, LearnerModule)
        self.publish(pl_module, batch.step + 1, self.folder_of(batch.step + 1))

    def publish(self, module: LearnerModule, step: int, folder: Path) -> None:
        """Make PolicyVersion `step`; a whole one that is there stays. Remove those that it lets go."""
        if module.ranks.broadcast(not is_whole(folder)):
            save_policy(
                folder,
                module.policy.model,
                module.policy_folder,
                step=step,
                renderer=self.renderer,
                thinking=self.thinking,
                state_dict=module.policy_weights(),
            )
        drop_policies(folder.parent, partial(self.settings.keeps_policy, newest=step))


class GivePolicy(Callback):
    """What another rank does while rank 0 publishes: gives its part of the weights."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As `PublishPolicy`."""
        assert isinstance(pl_module, LearnerModule)
        self.give(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """As `PublishPolicy`."""
        assert isinstance(pl_module, LearnerModule)
        self.give(pl_module)

    def give(self, module: LearnerModule) -> None:
        """Where rank 0 asks for it."""
        if module.ranks.broadcast(None):
            module.policy_weights()


class PrintSteps(Callback):
    """A plain line in the log for every `every`-th step."""

    def __init__(self, num_steps: int, names: tuple[str, ...], *, every: int) -> None:
        self.num_steps = num_steps
        self.names = names
        self.every = every
        self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """Log the line of the step."""
        if (batch.step + 1) % self.every and batch.step + 1 < self.num_steps:
            return
        values = "  ".join(f"{name.split('/')[-1]} {outputs[name]:.4g}" for name in self.names if name in outputs)
        elapsed_s = time.perf_counter() - self.began
        log.info("step %d  %s  elapsed %.0f s", batch.step + 1, values, elapsed_s)


@contextmanager
def wandb_run(paths: RunPaths, mode: WandbMode, ledger: Ledger) -> Iterator[WandbLogger | Literal[False]]:
    """Weights & Biases for one run of ours, one run of its own after a resume too.

    `offline` keeps it in the folder of the metrics until `wandb sync`, and makes no connection; what a kill has cut
    short there is made fit to be sent. Its process and its temporary files are `ledger`'s. UserError when it does not
    start, as without a key for `online`.
    """
    if mode == "disabled":
        yield False
        return
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else its import connects to a crash reporter
    os.environ.setdefault("WANDB_SILENT", "true")  # else its import advertises
    paths.metrics.mkdir(parents=True, exist_ok=True)
    for former in paths.metrics.glob("wandb/offline-run-*/*.wandb"):
        drop_torn_end(former)
    with _started_things_are(ledger):
        import wandb  # which makes folders for temporary files

        settings = wandb.Settings(mode=mode, console="off", silent=True, disable_git=True, disable_code=True)
        try:
            run = wandb.init(
                project="clawhpc",
                name=f"{paths.root.parent.name}/{paths.root.name}",
                id=_wandb_id(paths),
                resume="allow",
                dir=paths.metrics,
                settings=settings,
            )
        except wandb.Error as error:
            raise UserError(f"learner.wandb={mode}: {error}; learner.wandb=offline needs no server") from error
    exit_code = 1
    try:
        yield WandbLogger(experiment=run)
        exit_code = 0
    finally:  # `with run` would print a traceback of what is ours to tell
        ignored = (ConnectionError,) if exit_code else ()  # whoever ends all of a job ends the process of wandb too
        with suppress(*ignored):
            run.finish(exit_code)
        with suppress(*ignored):
            wandb.teardown()  # else its process would serve the next run too, but it ends with the ledger of this one


@contextmanager
def _started_things_are(ledger: Ledger) -> Iterator[None]:
    """Processes that are started within the block are `ledger`'s, and so are temporary files, theirs and ours."""
    scratch = str(ledger.scratch)
    before, tempfile.tempdir = tempfile.tempdir, scratch
    try:
        with ledger.lend_environment(TMPDIR=scratch, WANDB_CACHE_DIR=f"{scratch}/wandb"):
            yield
    finally:
        tempfile.tempdir = before


def _wandb_id(paths: RunPaths) -> str:
    """The run's id there, chosen once: its name is not unique among all folders and users."""
    path = paths.metrics / "wandb_id"
    write_once(path, uuid.uuid4().hex[:12].encode())
    return path.read_text()
