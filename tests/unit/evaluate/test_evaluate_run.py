"""An evaluation from its settings to its tables, with workers that make up what comes of a rollout."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clawhpc.campaign.settings import CampaignSettings, EvaluateSettings, PolicyChoice
from clawhpc.config import HarnessChoice, RunConfig, RunSettings
from clawhpc.errors import UserError
from clawhpc.evaluate import evaluate
from clawhpc.evaluation import Evaluation
from clawhpc.learner.settings import LearnerSettings
from clawhpc.paths import RunPaths
from clawhpc.proxy.settings import EndpointSettings
from clawhpc.records import GroupPlan, PolicyVersion, Probe, RolloutRecord, StepPlan, Usage
from clawhpc.store import publish_policy, read_policy, rollout_files, weights_digest
from clawhpc.tasks.servers import McpSettings, RunServer
from clawhpc.tasks.sets import TaskSettings
from clawhpc.view.__main__ import main as view
from clawhpc.view.compared import read_run
from clawhpc.worker.settings import WorkerSpec
from tests.fakes.chat_tokenizer import write_tokenizer
from tests.fakes.records import make_record
from tests.fakes.session import Session
from tests.fakes.workers import FakeWorkers, Fate, Killed

SKILL = {"start": 0.0, "trained": 1.0}
ENDPOINT = EndpointSettings(base_url="http://127.0.0.1:9/v1", model="big", input_price=1.0, output_price=10.0)


def write_policy(folder: Path, name: str) -> Path:
    """One whose weights are its name."""
    part = folder / f".{name}"
    part.mkdir(parents=True)
    (part / "model.safetensors").write_text(name)
    write_tokenizer(part)
    (part / "config.json").write_text("{}")
    probe = Probe(token_ids=(1, 2), logprobs=(-0.5,), tolerance=1e-3)
    target, digest = folder / name, weights_digest(part)
    publish_policy(
        part, PolicyVersion(step=9, path=str(target), digest=digest, renderer="qwen3", thinking=False, probe=probe)
    )
    return target


def write_set(folder: Path, *task_ids: str) -> Path:
    """Tasks in the ClawGym format."""
    for task_id in task_ids:
        (folder / task_id / "reward").mkdir(parents=True)
        entry = {"task_id": task_id, "user_query": "do it"}
        (folder / task_id / "data_entry.json").write_text(json.dumps(entry))
        (folder / task_id / "reward" / "reward.sh").write_text("echo 1\n")
    return folder


@dataclass
class Workers:
    """Opens pools of made-up workers, whose policies solve every task or none, and remembers what they were told."""

    moment: Callable[[], None] = lambda: None
    specs: list[WorkerSpec] = field(default_factory=list)
    done: list[tuple[int, int]] = field(default_factory=list)

    @contextmanager
    def open(self, launch: Any, spec: WorkerSpec, ledger: Any) -> Iterator[FakeWorkers]:
        self.specs.append(spec)
        paths = RunPaths(Path(spec.run_root))
        workers = FakeWorkers(paths, draw=self._draw(paths, spec), moment=self.moment, done=self.done)
        yield workers

    def _draw(self, paths: RunPaths, spec: WorkerSpec) -> Callable[[StepPlan, GroupPlan, int], RolloutRecord]:
        def draw(plan: StepPlan, group: GroupPlan, sample: int) -> RolloutRecord:
            if spec.endpoint.is_set:
                reward = 0.5
            else:
                version = read_policy(paths.policy(plan.policy_step))
                reward = SKILL.get((Path(version.path) / "model.safetensors").read_text(), 1.0)
            session = Session()
            session.call((1, 2), reply=(3,))
            call = replace(session.calls[0], usage=Usage(input_tokens=1000, output_tokens=100))
            return make_record(group, sample, reward, calls=(call,))

        return draw


@pytest.fixture
def config(tmp_path: Path) -> Iterator[RunConfig]:
    """Two policies, two harnesses, two sets."""
    with tempfile.TemporaryDirectory(prefix="ev-") as scratch:
        yield RunConfig(
            cache_dir=str(tmp_path / "cache"),
            scratch_dir=scratch,
            run=RunSettings(root=str(tmp_path / "runs"), name="e"),
            tasks=TaskSettings(folder=str(write_set(tmp_path / "train", "t1"))),
            harness=HarnessChoice(names=("pi", "codex")),
            campaign=CampaignSettings(eval_samples=2),
            learner=LearnerSettings(wandb="disabled"),
            evaluate=EvaluateSettings(
                policies={name: str(write_policy(tmp_path / "policies", name)) for name in SKILL},
                sets={
                    "easy": str(write_set(tmp_path / "easy", "a", "b", "c")),
                    "hard": str(write_set(tmp_path / "hard", "a", "b")),
                },
            ),
        )


def run_of(config: RunConfig) -> RunPaths:
    return RunPaths(Path(config.run.root) / "evaluations" / "e" / "001")


def result_of(config: RunConfig) -> Evaluation:
    return read_result(run_of(config))


def read_result(paths: RunPaths) -> Evaluation:
    return msgspec.json.decode(paths.finished.read_bytes(), type=Evaluation)


def with_policies(config: RunConfig, **more: str | PolicyChoice) -> RunConfig:
    return replace(config, evaluate=replace(config.evaluate, policies=config.evaluate.policies | more))


NUM_ROLLOUTS = 2 * 2 * (3 + 2) * 2
"""Policies, harnesses, tasks of both sets, samples."""


HARNESSES, SETS = ("pi", "codex"), ("easy", "hard")
RATES = {(policy, harness, on): SKILL[policy] for policy in SKILL for harness in HARNESSES for on in SETS}


def rates_of(result: Evaluation) -> dict[tuple[str, str, str], float | None]:
    passed = {(cell.policy, cell.harness, cell.set): cell.table.pass_at_1 for cell in result.cells}
    return {key: rate.mean if rate else None for key, rate in passed.items()}


def test_every_policy_meets_every_set_with_every_harness(config: RunConfig) -> None:
    workers = Workers()
    evaluate(config, workers.open)
    result = result_of(config)
    assert rates_of(result) == RATES
    assert [(one.name, one.num_tasks) for one in result.sets] == [("easy", 3), ("hard", 2)]
    assert len(workers.done) == len(rollout_files(run_of(config))) == NUM_ROLLOUTS
    assert [step for step, _ in workers.done] == sorted(step for step, _ in workers.done), "a policy at a time"
    assert len(workers.specs) == 1, "one pool for all policies of ours"
    differences = {(one.policy, one.baseline, one.harness, one.set): one.pass_at_1.mean for one in result.differences}
    assert differences == {("trained", "start", harness, on): 1.0 for harness in HARNESSES for on in SETS}


def test_where_weights_and_biases_fails_the_json_is_there_and_the_same_command_tells_it_once(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []

    def fail(*parts: object) -> None:
        raise ImportError("no lightning")

    monkeypatch.setattr("clawhpc.evaluate.send", fail)
    with pytest.raises(ImportError):
        evaluate(config, Workers().open)
    assert rates_of(result_of(config)) == RATES
    monkeypatch.setattr("clawhpc.evaluate.send", lambda *parts: told.append(parts))
    for _ in range(2):
        evaluate(config, Workers().open)
    assert len(told) == 1


def test_the_same_task_of_two_sets_is_two_tasks(config: RunConfig) -> None:
    evaluate(config, Workers().open)
    steps = {(cell.policy, cell.set): cell.step for cell in result_of(config).cells}
    assert len(set(steps.values())) == 4


@pytest.mark.parametrize("kill_at", [1, 17, NUM_ROLLOUTS])
def test_after_a_kill_the_same_command_runs_what_is_missing_and_nothing_twice(config: RunConfig, kill_at: int) -> None:
    killed = Workers(moment=Fate(kill_at=kill_at))
    with pytest.raises(Killed):
        evaluate(config, killed.open)
    assert len(killed.done) == kill_at - 1
    again = Workers()
    evaluate(config, again.open)
    assert len(killed.done) + len(again.done) == NUM_ROLLOUTS == len(rollout_files(run_of(config)))
    assert rates_of(result_of(config)) == RATES


def test_when_nothing_is_missing_no_worker_starts_and_the_tables_are_shown_again(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(config, Workers().open)
    first, written = capsys.readouterr().out, run_of(config).finished.read_bytes()
    workers = Workers()
    evaluate(config, workers.open)
    assert workers.specs == []
    assert capsys.readouterr().out == first
    assert run_of(config).finished.read_bytes() == written
    assert "easy: 3 tasks, 2 rollouts of each" in first
    assert max(map(len, first.splitlines())) <= 120


def test_a_policy_more_costs_its_own_rollouts_only(config: RunConfig, tmp_path: Path) -> None:
    evaluate(config, Workers().open)
    again, workers = write_policy(tmp_path / "copies", "trained"), Workers()
    more = with_policies(config, again=str(again))
    evaluate(more, workers.open)
    assert workers.done == [], "the same weights under another name"
    evaluate(with_policies(config, third=str(write_policy(tmp_path / "copies", "third"))), workers.open)
    assert len(workers.done) == NUM_ROLLOUTS // 2
    assert [one.name for one in result_of(config).policies] == ["start", "trained", "third"]


def test_a_policy_that_is_no_longer_asked_for_is_not_collected(config: RunConfig) -> None:
    with pytest.raises(Killed):
        evaluate(config, Workers(moment=Fate(kill_at=3)).open)
    only = replace(config, evaluate=replace(config.evaluate, policies={"trained": config.evaluate.policies["trained"]}))
    workers = Workers()
    evaluate(only, workers.open)
    assert {policy_step for _, policy_step in workers.done} == {1}
    evaluate(config, workers.open)
    assert len(workers.done) + 2 == NUM_ROLLOUTS, "what the first had collected was kept"


def test_a_model_behind_an_api_is_a_policy_with_workers_of_its_own_and_a_cost(config: RunConfig) -> None:
    workers = Workers()
    evaluate(with_policies(config, api=PolicyChoice(endpoint=ENDPOINT)), workers.open)
    assert [spec.endpoint for spec in workers.specs] == [EndpointSettings(), ENDPOINT]
    api = [cell.table for cell in result_of(config).cells if cell.policy == "api"]
    assert [table.mean_reward.mean for table in api] == [0.5] * 4  # type: ignore[union-attr]
    assert api[0].per_rollout["policy_usd"].mean == pytest.approx(0.002)
    assert api[0].policy_usd == pytest.approx(3 * 2 * 0.002)
    assert all(cell.table.policy_usd is None for cell in result_of(config).cells if cell.policy != "api")


def test_an_endpoint_of_which_something_is_missing_is_not_asked_of_an_engine(config: RunConfig, tmp_path: Path) -> None:
    both = with_policies(config, api=PolicyChoice(endpoint=ENDPOINT))
    with pytest.raises(Killed):
        evaluate(both, Workers(moment=Fate(kill_at=NUM_ROLLOUTS + 2)).open)
    workers = Workers()
    evaluate(with_policies(config, fourth=str(write_policy(tmp_path / "copies", "fourth"))), workers.open)
    assert {policy_step for _, policy_step in workers.done} == {3}


def test_workers_know_whose_plans_are_theirs_and_leave_those_of_others_alone_though_they_outlive_their_evaluation(
    config: RunConfig,
) -> None:
    workers = Workers()
    others = {name: PolicyChoice(endpoint=replace(ENDPOINT, model=name)) for name in ("big", "small")}
    evaluate(with_policies(config, **others), workers.open)
    assert [spec.policy_steps for spec in workers.specs] == [{0, 1}, {2}, {3}]


def test_a_set_that_has_changed_is_refused_where_another_policy_met_the_old_one(
    config: RunConfig, tmp_path: Path
) -> None:
    evaluate(config, Workers().open)
    write_set(tmp_path / "hard", "c")
    with pytest.raises(UserError, match=r"start was evaluated here on other tasks .* the set hard .*run\.name"):
        evaluate(config, Workers().open)


def test_without_names_the_policy_of_the_settings_is_evaluated_on_the_held_out_tasks_or_all(
    config: RunConfig, tmp_path: Path
) -> None:
    folder = str(tmp_path / "policies" / "start")
    alone = replace(config, policy=PolicyChoice(folder=folder), evaluate=EvaluateSettings())
    evaluate(alone, Workers().open)
    (policy,), (on,) = result_of(alone).policies, result_of(alone).sets
    assert (policy.name, policy.source, on.name, on.num_tasks) == ("start", folder, "heldout", 1)


def test_a_run_stands_for_its_last_policy_and_a_star_for_all_that_match(config: RunConfig, tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    for step, name in enumerate(SKILL):
        write_policy(tmp_path, name).rename(make_parent(run.policy(step)))
    named = {"run": str(run.root), "all": f"{run.policies}/step-*"}
    compared = replace(config, evaluate=replace(config.evaluate, policies=named))
    evaluate(compared, Workers().open)
    assert {one.name: Path(one.source) for one in result_of(compared).policies} == {
        "run": run.policy(1),
        "all/step-000000": run.policy(0),
        "all/step-000001": run.policy(1),
    }


def make_parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate": EvaluateSettings(policies={"x": "/nowhere"})}, r"/nowhere: no such policy folder"),
        (
            {"evaluate": EvaluateSettings(policies={"x": "/nowhere/step-*"})},
            r"^evaluate\.policies\.x: no folder matches /nowhere/step-\*",
        ),
        (
            {"policy": PolicyChoice(folder="/nowhere/step-*"), "evaluate": EvaluateSettings()},
            r"^policy: no folder matches /nowhere/step-\*",
        ),
        ({"campaign": CampaignSettings(eval_tasks=0)}, r"eval_tasks=0: there is nothing"),
        ({"tasks": TaskSettings(mcp=McpSettings(servers={"lab": RunServer(command=("lab",))}))}, r"pi has no MCP"),
        ({"campaign": CampaignSettings(eval_tasks=3)}, r"eval_tasks=3: there are only 2"),
    ],
)
def test_what_cannot_be_is_refused_before_there_is_a_run(
    config: RunConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(replace(config, **changes), Workers().open)
    assert not Path(config.run.root).exists()


def test_a_key_that_is_not_there_is_said_before_there_is_a_run(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LARGE_KEY", raising=False)
    locked = PolicyChoice(endpoint=replace(ENDPOINT, api_key_env="LARGE_KEY"))
    for asks, setting in (
        (with_policies(config, api=locked), r"evaluate\.policies\.api\.endpoint"),
        (replace(config, policy=locked, evaluate=replace(config.evaluate, policies={})), r"policy\.endpoint"),
    ):
        with pytest.raises(UserError, match=rf"^{setting}\.api_key_env=LARGE_KEY: on .* holds no key"):
            evaluate(asks, Workers().open)
    assert not Path(config.run.root).exists()


def test_the_page_of_a_run_shows_an_evaluation_too(config: RunConfig) -> None:
    evaluate(config, Workers().open)
    view([str(run_of(config).root)])
    assert "codex" in run_of(config).page.read_text()


def test_a_report_names_the_policies_of_an_evaluation_and_says_what_they_cost(config: RunConfig) -> None:
    free = replace(ENDPOINT, model="free", input_price=0.0, output_price=0.0)
    asked = with_policies(config, big=PolicyChoice(endpoint=ENDPOINT), free=PolicyChoice(endpoint=free))
    evaluate(asked, Workers().open)
    run = read_run("e", run_of(config))
    policies = (*SKILL, "big", "free")
    assert list(run.evaluated.values()) == [f"{policy} on {on}" for policy in policies for on in SETS]
    rewards = {
        run.evaluated[step]: {one.verdict.reward for one in records if one.verdict}
        for step, records in run.evaluations.items()
    }
    assert rewards == {f"{policy} on {on}": {SKILL.get(policy, 0.5)} for policy in policies for on in SETS}
    assert run.usd == {"API": pytest.approx(NUM_ROLLOUTS / 2 * 0.002)}
    assert run.finished


@pytest.mark.slow
def test_weights_and_biases_gets_a_row_for_each_cell_offline(config: RunConfig) -> None:
    evaluate(replace(config, learner=LearnerSettings(wandb="offline")), Workers().open)
    (table,) = run_of(config).metrics.glob("wandb/offline-run-*/files/media/table/cells_*.table.json")
    content = json.loads(table.read_text())
    rows = [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
    assert {(row["policy"], row["harness"], row["set"]): row["pass@1"] for row in rows} == RATES
