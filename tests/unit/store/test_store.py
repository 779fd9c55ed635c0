"""Law 8: what is published is published once, whole, and readable by another process."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clawhpc.errors import UserError
from clawhpc.paths import RunPaths
from clawhpc.records import GroupPlan, PolicyVersion, Probe, StepPlan, Verdict, rollout_id
from clawhpc.store import (
    claim_group,
    claim_owner,
    count_rollouts,
    drop_policies,
    give_back,
    is_whole,
    missing_samples,
    open_plans,
    publish_plan,
    publish_policy,
    publish_rollout,
    published_steps,
    read_plans,
    read_policy,
    read_rollouts,
    read_step,
    release_claims,
    restore_plan,
    rollout_files,
    seal_group,
    unsealed_groups,
    weights_digest,
    withdraw_plans,
    write_atomic,
    write_once,
)
from tests.fakes.disk import largest_file
from tests.fakes.records import make_group, make_record
from tests.fakes.workers import Killed


def make_plan(*groups: GroupPlan) -> StepPlan:
    return StepPlan(phase="train", step=0, policy_step=0, temperature=1.0, groups=groups or (make_group(),))


def test_a_rollout_published_twice_is_there_once_and_the_first_stays(tmp_path: Path) -> None:
    paths, group = RunPaths(tmp_path), make_group()
    assert publish_rollout(paths, make_record(group, 0, reward=0.25))
    assert not publish_rollout(paths, make_record(group, 0, reward=1.0))
    (record,) = read_rollouts(paths)
    assert record.verdict == Verdict(reward=0.25)


def test_records_survive_the_way_through_the_store_unchanged(tmp_path: Path) -> None:
    paths, group = RunPaths(tmp_path), make_group()
    record = make_record(group, 1)
    publish_rollout(paths, record)
    assert list(read_rollouts(paths, "train")) == [record]
    assert list(read_rollouts(paths, "eval")) == []


@pytest.mark.parametrize("content", ["{", "{}", '{"unknown": ' + "[" * 200_000], ids=["cut", "other", "nested"])
def test_a_file_that_is_no_record_is_named(tmp_path: Path, content: str) -> None:
    paths = RunPaths(tmp_path)
    paths.plans.mkdir()
    (paths.plans / "train-000000.json").write_text(content)
    with pytest.raises(UserError, match=r"train-000000\.json: not a StepPlan of this version"):
        read_plans(paths)


def test_a_group_is_sealed_only_when_whole(tmp_path: Path) -> None:
    paths, group = RunPaths(tmp_path), make_group()
    plan = publish_plan(paths, make_plan(group))
    publish_rollout(paths, make_record(group, 1))
    assert missing_samples(paths, group) == [0]
    with pytest.raises(ValueError, match="lacks samples"):
        seal_group(paths, group)
    publish_rollout(paths, make_record(group, 0))
    seal_group(paths, group)
    assert unsealed_groups(paths, plan) == []
    assert open_plans(paths) == []
    assert count_rollouts(paths, plan) == 2
    assert [record.sample for record in read_step(paths, plan)] == [0, 1]


def test_the_first_plan_of_a_step_wins(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    first = publish_plan(paths, make_plan(make_group("a")))
    second = publish_plan(paths, make_plan(make_group("b")))
    assert second == first


def test_a_plan_that_is_withdrawn_is_found_by_no_worker_until_it_is_restored(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    open_, done, other = (
        StepPlan(phase=phase, step=step, policy_step=0, temperature=1.0, groups=(make_group(phase=phase, step=step),))
        for phase, step in (("eval", 0), ("eval", 1), ("train", 0))
    )
    for plan in (open_, done, other):
        publish_plan(paths, plan)
    for sample in range(2):
        publish_rollout(paths, make_record(done.groups[0], sample))
    seal_group(paths, done.groups[0])
    withdraw_plans(paths, "eval")
    assert read_plans(paths) == [done, other]
    assert open_plans(paths) == [other]
    for plan in (open_, done):
        assert restore_plan(paths, plan) == plan
    assert open_plans(paths) == [open_, other]
    assert restore_plan(paths, dataclasses.replace(open_, step=9)) is None


def test_a_group_is_claimed_by_one_worker_and_freed_when_that_worker_is_dead(tmp_path: Path) -> None:
    paths, group = RunPaths(tmp_path), make_group()
    plan = publish_plan(paths, make_plan(group))
    assert claim_group(paths, group.key, "w0")
    assert claim_group(paths, group.key, "w0")
    assert not claim_group(paths, group.key, "w1")
    assert release_claims(paths, plan, alive=frozenset({"w0"})) == 0
    assert release_claims(paths, plan, alive=frozenset({"w1"})) == 1
    assert claim_owner(paths, group.key) is None
    assert claim_group(paths, group.key, "w1")


def test_a_worker_gives_back_what_it_has_claimed_and_not_sealed(tmp_path: Path) -> None:
    paths, sealed = RunPaths(tmp_path), make_group("sealed", num_samples=1)
    mine, other, free = (make_group(task) for task in ("mine", "other", "free"))
    plan = publish_plan(paths, make_plan(sealed, mine, other, free))
    for group, owner in ((sealed, "w0"), (mine, "w0"), (other, "w1")):
        claim_group(paths, group.key, owner)
    publish_rollout(paths, make_record(sealed, 0))
    seal_group(paths, sealed)
    assert give_back(paths, plan, "w0") == 1
    assert [claim_owner(paths, group.key) for group in plan.groups] == ["w0", None, "w1", None]
    assert claim_group(paths, mine.key, "w1")


def test_a_failed_write_leaves_the_old_content_and_no_part(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with pytest.raises(TypeError):
        write_atomic(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_an_error_and_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    code = (
        "import resource, signal, sys; from pathlib import Path; from clawhpc.store import write_atomic\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_atomic(Path(sys.argv[1]), bytes(10_000))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert "OSError: [Errno 27] File too large" in done.stderr
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_parts_of_a_killed_writer_are_not_rollouts(tmp_path: Path) -> None:
    paths, group = RunPaths(tmp_path), make_group()
    publish_rollout(paths, make_record(group, 0))
    (paths.group(group.key) / ".x.json.1234.part").write_text("{half")
    claim_group(paths, group.key, "w0")
    assert [path.stem for path in rollout_files(paths)] == [rollout_id(group.key, 0)]


def test_keys_that_sanitise_alike_get_folders_of_their_own() -> None:
    names = {make_group(task_id).key.name for task_id in ("a/b", "a_b", "a b", "a?b")}
    assert len(names) == 4


def published(path: Path, weights: bytes = b"weights") -> PolicyVersion:
    """What comes of publishing `weights` as the policy in `path`."""
    part = path.with_name("part")
    part.mkdir(parents=True)
    (part / "model.safetensors").write_bytes(weights)
    probe = Probe(token_ids=(1, 2), logprobs=(-0.5,), tolerance=1e-3)
    digest = weights_digest(part)
    policy = PolicyVersion(step=4, path=str(path), digest=digest, renderer="qwen3", thinking=False, probe=probe)
    policy = publish_policy(part, policy)
    assert not part.exists()
    return policy


def test_a_policy_is_published_whole_and_read_where_it_lies(tmp_path: Path) -> None:
    policy = published(tmp_path / "policies" / "step-000004")
    assert read_policy(Path(policy.path)) == policy
    moved = tmp_path / "moved"
    Path(policy.path).rename(moved)
    assert read_policy(moved) == dataclasses.replace(policy, path=str(moved))


def test_a_policy_that_is_there_stays_and_one_that_was_cut_short_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    first = published(folder, b"first")
    assert published(folder, b"second") == first
    (folder / "model.safetensors").write_bytes(b"fir")
    assert not is_whole(folder)
    assert published(folder, b"second").digest != first.digest
    assert (folder / "model.safetensors").read_bytes() == b"second"
    assert is_whole(folder)


def test_the_weights_of_a_policy_are_on_disk_before_its_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", note)
    published(tmp_path / "policy")
    part = tmp_path / "part"
    assert {str(part / "model.safetensors"), str(part / "policy.json"), str(part)} <= set(synced)
    assert synced[-1] == str(tmp_path)


def test_policies_that_nobody_wants_are_removed_each_of_them_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path)
    for step in range(4):
        published(paths.policy(step))
    drop_policies(paths.policies, {0, 2, 3}.__contains__)
    assert published_steps(paths) == [0, 2, 3]
    assert len(list(paths.policies.iterdir())) == 3, "nothing is left of it"
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Killed):
        drop_policies(paths.policies, {0, 3}.__contains__)
    assert published_steps(paths) == [0, 3], "what is left of it has no policy's name"
    assert all(is_whole(paths.policy(step)) for step in (0, 3))


def killed(*of: object, **how: object) -> None:
    raise Killed


def test_a_policy_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such policy folder"):
        read_policy(tmp_path / "nothing")
    write_atomic(tmp_path / "policy.json", b"{}")
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        read_policy(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"w")
    with pytest.raises(UserError, match=r"policy\.json"):
        read_policy(tmp_path)


@pytest.mark.parametrize("write", [write_atomic, write_once])
def test_a_file_that_does_not_fit_on_the_disk_is_named_and_leaves_nothing(
    tmp_path: Path, write: Callable[[Path, bytes], object]
) -> None:
    with largest_file(100), pytest.raises(OSError, match=r"File too large: '.*plan\.json'"):
        write(tmp_path / "plan.json", b"x" * 200)
    assert list(tmp_path.iterdir()) == []
