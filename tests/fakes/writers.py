"""Every file of a run that is written without the learner: on a disk that is full, or read-only, and then mended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from clawhpc.campaign.install import PolicySource, install_policy
from clawhpc.campaign.run import open_run
from clawhpc.command import one_line_errors
from clawhpc.launch.lease import hold_lease
from clawhpc.paths import RunPaths
from clawhpc.records import PolicyVersion, Probe, StepPlan, WorkerUsage
from clawhpc.store import (
    claim_group,
    publish_plan,
    publish_policy,
    publish_rollout,
    publish_usage,
    seal_group,
    weights_digest,
    write_atomic,
)
from tests.fakes.records import make_group, make_record
from tests.fakes.small_disk import SmallDisk, run_scenario

GROUP = make_group(num_samples=1)
PLAN = StepPlan(phase="train", step=0, policy_step=0, temperature=1.0, groups=(GROUP,))
Writer = Callable[[RunPaths], object]


def start_run(paths: RunPaths) -> None:
    with open_run(paths.root.parent, b"a: 1"):
        pass


def hold(paths: RunPaths) -> None:
    with hold_lease(paths.workers / "lease", "c1", 60.0):
        pass


def large_record(paths: RunPaths) -> None:
    """Of several pages: it fits in part."""
    record = dataclasses.replace(make_record(GROUP, 0), instruction="do it " * 5000)
    assert publish_rollout(paths, record)


def policy(paths: RunPaths) -> None:
    """As the learner does it, which removes what it leaves."""
    part = paths.policies / ".part"
    part.mkdir(parents=True, exist_ok=True)
    for name in POLICY_FILES:
        (part / name).touch()
    probe = Probe(token_ids=(1, 2), logprobs=(-0.5,), tolerance=1e-3)
    digest = weights_digest(part)
    target = str(paths.policy(1))
    publish_policy(
        part, PolicyVersion(step=1, path=target, digest=digest, renderer="qwen3", thinking=False, probe=probe)
    )


def first_policy(paths: RunPaths) -> None:
    install_policy(paths, PolicySource(folder=paths.policy(1)))


POLICY_FILES = ("model.safetensors", "config.json", "tokenizer.json")

WRITERS: dict[str, Writer] = {
    "config.yaml and campaign.lock": start_run,
    "lease": hold,
    "plan": lambda paths: publish_plan(paths, PLAN),
    "claim": lambda paths: claim_group(paths, GROUP.key, "w0"),
    "ready": lambda paths: write_atomic(paths.workers / "w0" / "ready", b"yes"),
    "rollout": large_record,
    "manifest": lambda paths: seal_group(paths, GROUP),
    "usage": lambda paths: publish_usage(paths, "w0", WorkerUsage(own_cpu_s=1.0, engine_cpu_s=2.0)),
    "policy": policy,
    "first policy": first_policy,
    "finished": lambda paths: write_atomic(paths.finished, b"{}"),
}
"""In an order in which they can be written."""


def exit_code(write: Writer, paths: RunPaths) -> object:
    """Of a command in which `write` is all that there is."""
    try:
        with one_line_errors():
            write(paths)
    except SystemExit as end:
        return end.code
    return 0


def try_all(disk: SmallDisk, how: str) -> None:
    paths = RunPaths(disk.folder / "runs" / "001")
    for name, write in WRITERS.items():
        before = disk.files()
        with disk.broken(how):
            assert exit_code(write, paths) == 1, name
        changed = {path for path, content in disk.files().items() if before.get(path) != content}
        assert changed <= EMPTY, f"{name} has left {changed}"
        assert before.keys() <= disk.files().keys(), name
        write(paths)
        assert disk.files() != before, f"{name} wrote nothing"


EMPTY = {f"runs/001/policies/.part/{name}" for name in POLICY_FILES}

if __name__ == "__main__":
    run_scenario({how: lambda disk, how=how: try_all(disk, how) for how in ("full", "read-only")})  # type: ignore[misc]
