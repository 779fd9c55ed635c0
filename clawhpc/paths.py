"""Every file of a run is a property of one object."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clawhpc.errors import UserError
from clawhpc.records import GroupKey, Phase


@dataclass(frozen=True)
class RunPaths:
    """The files of one run. `root` lies on a file system that learner and workers share."""

    root: Path

    @property
    def config(self) -> Path:
        """The composed configuration, written once at the start."""
        return self.root / "config.yaml"

    @property
    def lock(self) -> Path:
        """Held by the one campaign that may write here."""
        return self.root / "campaign.lock"

    @property
    def turn(self) -> Path:
        """Of a Slurm job: the last one in which a command has had this run."""
        return self.root / "turn.json"

    @property
    def plans(self) -> Path:
        """One file per planned step and phase, written by the campaign, read by workers."""
        return self.root / "plans"

    def plan(self, phase: Phase, step: int) -> Path:
        """The groups of one step."""
        return self.plans / f"{phase}-{step:06d}.json"

    @property
    def withdrawn(self) -> Path:
        """Plans that nobody is to collect for now."""
        return self.plans / "withdrawn"

    def rollouts(self, phase: Phase, step: int) -> Path:
        """The rollouts of one step, a folder per group."""
        return self.root / "rollouts" / f"{phase}-{step:06d}"

    @property
    def set_aside(self) -> Path:
        """Rollouts of collections in which every one of them failed, a folder per collection."""
        return self.root / "set_aside"

    def group(self, key: GroupKey) -> Path:
        """The rollouts of one group, a file each, and its manifest."""
        return self.rollouts(key.phase, key.step) / key.name

    @property
    def policies(self) -> Path:
        """Published PolicyVersions, a folder each."""
        return self.root / "policies"

    @property
    def policy_numbers(self) -> Path:
        """Of an evaluation: who has which number, by a digest of who it is."""
        return self.policies / "numbers.json"

    def policy(self, step: int) -> Path:
        """One published PolicyVersion."""
        return self.policies / f"step-{step:06d}"

    @property
    def checkpoints(self) -> Path:
        """The learner's whole state, for resume."""
        return self.root / "checkpoints"

    @property
    def workers(self) -> Path:
        """A folder per worker: what it was told, its engine log, its cost; and submitit's, with all logs."""
        return self.root / "workers"

    @property
    def metrics(self) -> Path:
        """Lightning's CSV log and W&B's offline folder."""
        return self.root / "metrics"

    @property
    def metrics_csv(self) -> Path:
        """One row per step."""
        return self.metrics / "metrics.csv"

    @property
    def finished(self) -> Path:
        """Written when a run has ended as planned."""
        return self.root / "finished.json"

    @property
    def sent(self) -> Path:
        """Written when W&B has been told what an evaluation says."""
        return self.metrics / "sent"

    @property
    def page(self) -> Path:
        """The self-contained HTML page of the run."""
        return self.root / "run.html"


def existing_run(root: Path) -> RunPaths:
    """The files of the run in `root`. UserError when there is no such folder, or none with a configuration."""
    if not root.is_dir():
        raise UserError(f"{root}: no such run folder")
    paths = RunPaths(root)
    if not paths.config.is_file():
        raise UserError(f"{root}: no run here; a run's folder has a {paths.config.name}")
    return paths
