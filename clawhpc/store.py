"""Publish and read what learner and workers exchange, atomically: plans, claims, rollouts, group manifests, policies.

    campaign --plan--> worker --claim, rollouts, manifest--> campaign -> learner --policy--> worker

Every file is written whole under another name and renamed, so that a reader sees all of it or nothing. Files are never
changed after that: a rollout is published once (law 8), a plan is written once, a policy is one folder for ever.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from clawhpc.errors import UserError
from clawhpc.paths import RunPaths
from clawhpc.records import GroupKey, GroupPlan, Phase, PolicyVersion, RolloutRecord, StepPlan, WorkerUsage, rollout_id

MANIFEST = "manifest.json"
POLICY_FILE = "policy.json"
CLAIM = "claim"
USAGE = "usage.json"

T = TypeVar("T")


def write_atomic(path: Path, data: bytes) -> None:
    """`path` holds all of `data`, or what it held before; on disk when this returns."""
    with _written(path, data) as part:
        part.replace(path)


def write_once(path: Path, data: bytes) -> bool:
    """True when `path` was not there and now holds all of `data`; of several writers at once, for one of them."""
    with _written(path, data) as part:
        try:
            os.link(part, path)  # atomic also on NFS, and fails where the name exists
        except FileExistsError:
            return False
    return True


@contextmanager
def _written(path: Path, data: bytes) -> Iterator[Path]:
    """A file beside `path` that holds `data`, on disk; gone after the block, unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with named_errors(path), part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield part
    finally:
        part.unlink(missing_ok=True)


def sweep_parts(paths: RunPaths) -> None:
    """Remove what writers of plans, claims and rollouts have left that were killed; for when nobody writes any more."""
    for folder in (paths.plans, paths.root / "rollouts"):
        for part in folder.rglob(".*.part"):
            part.unlink(missing_ok=True)


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """An OSError out of the block names a file, `path` if no other: Python's own does not where a disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def _read(path: Path, kind: type[T]) -> T:
    """The record in `path`, or a UserError that names the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UserError(f"{path}: not a {kind.__name__} of this version of clawhpc: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Plans and claims
# ---------------------------------------------------------------------------------------------------------------------


def publish_plan(paths: RunPaths, plan: StepPlan) -> StepPlan:
    """Make `plan` visible to workers. One of the same phase and step that is there already wins (law 8)."""
    path = paths.plan(plan.phase, plan.step)
    write_once(path, msgspec.json.encode(plan))
    return _read(path, StepPlan)


def withdraw_plans(paths: RunPaths, phase: Phase) -> None:
    """Workers find no plan of `phase` that still lacks a rollout. None may be at work; what is collected stays."""
    paths.withdrawn.mkdir(parents=True, exist_ok=True)
    for path in paths.plans.glob(f"{phase}-*.json"):
        if unsealed_groups(paths, _read(path, StepPlan)):
            path.replace(paths.withdrawn / path.name)


def restore_plan(paths: RunPaths, plan: StepPlan) -> StepPlan | None:
    """The plan of the same phase and step, which workers find again if it was withdrawn; None where there is none."""
    path = paths.plan(plan.phase, plan.step)
    with suppress(FileNotFoundError):
        (paths.withdrawn / path.name).replace(path)
    return _read(path, StepPlan) if path.exists() else None


def read_plans(paths: RunPaths) -> list[StepPlan]:
    """All plans of a run, in the order of their file names."""
    return [_read(path, StepPlan) for path in sorted(paths.plans.glob("*.json"))]


def open_plans(paths: RunPaths, done: set[Path] | None = None) -> list[StepPlan]:
    """The plans of which a group has no manifest yet. Files of others are added to `done`; those in it are not read."""
    plans, done = [], set() if done is None else done
    for path in sorted(paths.plans.glob("*.json")):
        if path not in done:
            plan = _read(path, StepPlan)
            if unsealed_groups(paths, plan):
                plans.append(plan)
            else:
                done.add(path)
    return plans


def unsealed_groups(paths: RunPaths, plan: StepPlan) -> list[GroupPlan]:
    """The groups of `plan` that still lack a rollout."""
    return [group for group in plan.groups if not (paths.group(group.key) / MANIFEST).exists()]


def claim_group(paths: RunPaths, key: GroupKey, worker_id: str) -> bool:
    """True for exactly one worker: the group is then its to collect. A worker's own claim is true again."""
    claimed = write_once(paths.group(key) / CLAIM, worker_id.encode())
    return claimed or claim_owner(paths, key) == worker_id


def claim_owner(paths: RunPaths, key: GroupKey) -> str | None:
    """The worker that has claimed a group; None when it is free."""
    try:
        return (paths.group(key) / CLAIM).read_text()
    except FileNotFoundError:
        return None


def release_claims(paths: RunPaths, plan: StepPlan, alive: frozenset[str]) -> int:
    """Free the unsealed groups whose worker is not among `alive`; how many. Only the campaign knows who is alive."""
    return _free(paths, plan, lambda owner: owner not in alive)


def give_back(paths: RunPaths, plan: StepPlan, worker_id: str) -> int:
    """Free the unsealed groups that `worker_id` itself has claimed; how many. Its rollouts of them have ended."""
    return _free(paths, plan, lambda owner: owner == worker_id)


def _free(paths: RunPaths, plan: StepPlan, is_let_go: Callable[[str], bool]) -> int:
    freed = 0
    for group in unsealed_groups(paths, plan):
        owner = claim_owner(paths, group.key)
        if owner is not None and is_let_go(owner):
            (paths.group(group.key) / CLAIM).unlink(missing_ok=True)
            freed += 1
    return freed


# ---------------------------------------------------------------------------------------------------------------------
# Rollouts
# ---------------------------------------------------------------------------------------------------------------------


def publish_rollout(paths: RunPaths, record: RolloutRecord) -> bool:
    """Publish `record` under its id. False, and nothing changes, when that id is there already (law 8)."""
    return write_once(paths.group(record.key) / f"{record.rollout_id}.json", msgspec.json.encode(record))


def missing_samples(paths: RunPaths, group: GroupPlan) -> list[int]:
    """The samples of a group that have no rollout yet."""
    folder = paths.group(group.key)
    return [
        sample for sample in range(group.num_samples) if not (folder / f"{rollout_id(group.key, sample)}.json").exists()
    ]


def seal_group(paths: RunPaths, group: GroupPlan) -> None:
    """Say that a group is whole. ValueError while a sample is missing."""
    missing = missing_samples(paths, group)
    if missing:
        raise ValueError(f"group {group.key.name} lacks samples {missing}")
    names = [rollout_id(group.key, sample) for sample in range(group.num_samples)]
    write_atomic(paths.group(group.key) / MANIFEST, msgspec.json.encode(names))


def count_rollouts(paths: RunPaths, plan: StepPlan) -> int:
    """Published rollouts of a plan."""
    return sum(group.num_samples - len(missing_samples(paths, group)) for group in plan.groups)


def set_aside(paths: RunPaths, plan: StepPlan) -> Path:
    """Move the rollouts of `plan` out of the way, so that they are collected again; where they are now."""
    folder = paths.rollouts(plan.phase, plan.step)
    number = 1
    while (target := paths.set_aside / f"{folder.name}-{number}").exists():
        number += 1
    target.parent.mkdir(exist_ok=True)
    folder.rename(target)
    return target


def read_step(paths: RunPaths, plan: StepPlan) -> list[RolloutRecord]:
    """The rollouts of a plan in planned order, those that are there."""
    names = [
        paths.group(group.key) / f"{rollout_id(group.key, sample)}.json"
        for group in plan.groups
        for sample in range(group.num_samples)
    ]
    return [_read(path, RolloutRecord) for path in names if path.exists()]


def rollout_files(paths: RunPaths) -> list[Path]:
    """Every published rollout of a run, in the order of their names."""
    return sorted(path for path in (paths.root / "rollouts").glob("*/*/*.json") if path.name != MANIFEST)


def read_rollouts(paths: RunPaths, phase: Phase | None = None) -> Iterator[RolloutRecord]:
    """Every published rollout of a run, or of one phase, one at a time."""
    for path in rollout_files(paths):
        if phase is None or path.name.startswith(f"{phase}-"):
            yield _read(path, RolloutRecord)


def publish_usage(paths: RunPaths, worker_id: str, usage: WorkerUsage) -> None:
    """Say what a worker has cost so far."""
    write_atomic(paths.workers / worker_id / USAGE, msgspec.json.encode(usage))


def read_usage(paths: RunPaths) -> list[WorkerUsage]:
    """What the workers of a run have cost, those that have died included."""
    return [_read(path, WorkerUsage) for path in sorted(paths.workers.glob(f"*/{USAGE}"))]


# ---------------------------------------------------------------------------------------------------------------------
# Policies
# ---------------------------------------------------------------------------------------------------------------------


def weights_digest(folder: Path) -> str:
    """SHA-256 over the weight files of a Hugging Face folder, by name. UserError when there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no *.safetensors here; a policy is a Hugging Face folder with its weights")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            for block in iter(lambda: stream.read(1 << 20), b""):
                digest.update(block)
    return digest.hexdigest()


def publish_policy(part: Path, policy: PolicyVersion) -> PolicyVersion:
    """Rename the finished folder `part` to `policy.path`, with `policy.json` in it; on disk when this returns.

    A whole policy that is there already stays; what a crash has left of one is replaced.
    """
    target = Path(policy.path)
    if is_whole(target):
        shutil.rmtree(part)
        return read_policy(target)
    write_atomic(part / POLICY_FILE, msgspec.json.encode(policy))
    for path in (*part.rglob("*"), part):
        sync(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        shutil.rmtree(target)
    part.replace(target)
    sync(target.parent)
    return policy


def is_whole(folder: Path) -> bool:
    """The policy in `folder` has the very weights that were published there: after a crash, a file may be cut short."""
    try:
        return weights_digest(folder) == read_policy(folder).digest
    except UserError:
        return False


def sync(path: Path) -> None:
    """What a file holds, or which names a folder has, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with named_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_policy(folder: Path) -> PolicyVersion:
    """The PolicyVersion in `folder`, wherever that now lies. UserError that names what is missing."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such policy folder; `python -m clawhpc.sft` makes one")
    path = folder / POLICY_FILE
    if not path.exists():
        raise UserError(f"{folder}: no {POLICY_FILE} here; it is no policy of ours")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder}: no *.safetensors here; the folder has no weights")
    return dataclasses.replace(_read(path, PolicyVersion), path=str(folder))


def published_steps(paths: RunPaths) -> Sequence[int]:
    """Steps of the policies of a run, ascending."""
    return sorted(_policies(paths.policies))


def drop_policies(folder: Path, keeps: Callable[[int], bool]) -> None:
    """Remove the policies of a run that are in `folder`, but those whose step `keeps` wants.

    Each is there whole, or not at all; a kill, and a file that NFS keeps because it is open, leave what has the name of
    a part.
    """
    for step, policy in _policies(folder).items():
        if not keeps(step):
            part = policy.with_name(f".{policy.name}.{uuid.uuid4().hex}.part")
            policy.rename(part)
            sync(folder)
            shutil.rmtree(part, ignore_errors=True)


def _policies(folder: Path) -> dict[int, Path]:
    return {int(policy.name.removeprefix("step-")): policy for policy in folder.glob("step-*")}
