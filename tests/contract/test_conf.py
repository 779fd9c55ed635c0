"""Every file below conf/ composes into a whole, typed configuration; law 10: what goes wrong there costs nothing."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig

from clawhpc.config import CONF_DIR, RunConfig, open_campaign, register_defaults, typed
from clawhpc.credit.settings import CreditSettings
from clawhpc.errors import UserError
from clawhpc.learner.settings import LearnerSettings
from clawhpc.tasks.mix import check_mix
from clawhpc.tasks.sets import TaskSets
from tests.fakes.records import make_task

CHOICES = sorted((path.parent.name, path.stem) for path in CONF_DIR.glob("*/*.yaml") if path.parent.name != "local")
HEAVY = ("torch", "transformers", "lightning", "vllm", "wandb", "renderers", "starlette")


def compose_config(*overrides: str, with_hydra: bool = False) -> DictConfig:
    register_defaults()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return compose("config", overrides=list(overrides), return_hydra_config=with_hydra)


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_of_every_group_is_a_whole_configuration(group: str, choice: str) -> None:
    assert isinstance(typed(compose_config(f"{group}={choice}")), RunConfig)


def runs_of_sweep(experiment: str, *overrides: str) -> list[RunConfig]:
    """What `-m experiment=…` with `overrides` runs, by Hydra's own sweeper."""
    params = compose_config(f"experiment={experiment}", with_hydra=True).hydra.sweeper.params or {}
    swept = [*(f"{key}={value}" for key, value in params.items()), *overrides]
    (runs,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(swept), max_batch_size=None)
    return [typed(compose_config(f"experiment={experiment}", *run)) for run in runs]


def overrides_in(page: Path) -> list[list[str]]:
    """Those of each command that stands in a block of `page`, without what a reader has to fill in."""
    lines = re.sub(r"\\\n\s+", "", page.read_text()).splitlines()
    commands = [
        shlex.split(line, comments=True) for line in lines if re.match(r"    .*(clawhpc\.(?!view)|jobs/\w+\.sh)", line)
    ]
    return [[word for word in command if "=" in word and not word.startswith("-")] for command in commands]


@pytest.mark.parametrize(("page", "num_commands"), [("cluster", 10), ("evaluation", 4)])
def test_every_command_of_a_page_is_one_that_can_be_given(page: str, num_commands: int) -> None:
    given = overrides_in(CONF_DIR.parent / f"docs/{page}.md")
    assert len(given) >= num_commands
    for overrides in given:
        (runs,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), max_batch_size=None)
        assert typed(compose_config(*runs[0])), overrides


@pytest.mark.parametrize(("experiment", "num_runs"), [("mix_harness", 6), ("timeout_hardening", 8)])
def test_each_run_of_a_sweep_is_whole_and_has_a_name_of_its_own_and_the_policy_that_sft_makes(
    experiment: str, num_runs: int
) -> None:
    runs = runs_of_sweep(experiment)
    assert len({run.run.name for run in runs}) == len(runs) == num_runs
    assert {run.policy_folder() for run in runs} == {typed(compose_config(f"experiment={experiment}")).policy_folder()}
    for run in runs:
        check_mix(run.tasks.mix, run.campaign.groups_per_step, run.tasks.generate.num_train, len(run.harness.names))


def test_the_command_line_sweeps_other_values_in_place_of_those_of_an_experiment() -> None:
    alone = runs_of_sweep("mix_harness", "harness.names=[claude_code],[pi]", "tasks.mix=turns")
    assert [run.run.name for run in alone] == ["mix_harness_turns_claude_code", "mix_harness_turns_pi"]


def test_no_group_of_the_default_hides_a_default_of_the_learner() -> None:
    config = typed(compose_config())
    assert config.learner == LearnerSettings()
    assert config.credit == CreditSettings()


def test_an_algorithm_sets_loss_and_credit_together() -> None:
    ppo, gspo = typed(compose_config("algorithm=ppo")), typed(compose_config("algorithm=gspo"))
    assert (ppo.credit.needs_critic, ppo.learner.loss.ratio) == (True, "token")
    assert (gspo.credit.needs_critic, gspo.learner.loss.ratio, gspo.learner.loss.clip_high) == (False, "path", 4e-4)


def test_an_experiment_may_choose_its_algorithm_and_change_its_values(tmp_path: Path) -> None:
    lines = (
        "# @package _global_",
        "defaults:",
        "  - override /algorithm: cispo",
        "learner:",
        "  loss:",
        "    clip_high: 7",
    )
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("\n".join(lines))
    search = f"hydra.searchpath=[file://{tmp_path}]"
    loss = typed(compose_config(search, "experiment=mine")).learner.loss
    assert (loss.objective, loss.clip_low, loss.clip_high) == ("cispo", 1.0, 7.0)
    loss = typed(compose_config(search, "experiment=mine", "learner.loss.clip_high=2")).learner.loss
    assert loss.clip_high == 2.0


@pytest.mark.parametrize("override", ["credit.role_weights={subagent: 0.5}", "credit.role_weights.subagent=0.5"])
def test_a_role_that_no_file_names_gets_its_weight_on_the_command_line(override: str) -> None:
    assert typed(compose_config(override)).credit.role_weights == {"subagent": 0.5}


def test_what_a_harness_weighs_and_how_often_it_takes_its_turn_can_be_swept() -> None:
    swept = runs_of_sweep(
        "mix_harness",
        "harness.names=[claude_code,pi]",
        "tasks.mix=turns",
        "tasks.turns={pi: 2},{pi: 3}",
        "credit.harness_weights.claude_code=1,2",
    )
    found = [(run.tasks.turns["pi"], run.credit.harness_weights["claude_code"]) for run in swept]
    assert found == [(2, 1.0), (2, 2.0), (3, 1.0), (3, 2.0)]


@pytest.mark.parametrize(
    "overrides",
    [
        ("harness=mixed", "tasks.mix=one", "credit.harness_weights={pi: 1}"),
        ("harness=mixed", "tasks.mix=each", "credit.harness_weights={pi: 2}"),
        ("harness=pi", "tasks.mix=one", "credit.harness_weights={pi: 2}"),
    ],
)
def test_a_weight_of_a_harness_is_refused_only_where_several_would_learn_by_it_and_none_does(
    overrides: tuple[str, ...],
) -> None:
    assert typed(compose_config(*overrides)).credit.harness_weights.keys() == {"pi"}


def test_a_mapping_with_free_keys_opens_no_other() -> None:
    assert typed(compose_config("launch.slurm.sbatch.nice=100")).launch.slurm.sbatch == {"nice": 100}
    with pytest.raises(UserError, match=r"role_weights.subagnt=1.0: allowed are subagent, compaction, side"):
        typed(compose_config("credit.role_weights.subagnt=1"))
    with pytest.raises(ConfigCompositionException):
        compose_config("credit.weights=1")


def test_the_seed_is_handed_on_to_every_part() -> None:
    config = typed(compose_config("seed=7"))
    assert (config.campaign.seed, config.learner.seed, config.cold_start.seed, config.tasks.generate.seed) == (
        7,
        7,
        7,
        7,
    )


def test_paths_are_absolute_whatever_the_folder_they_are_used_in() -> None:
    config = typed(compose_config("cache_dir=cache", 'scratch_dir="~/s"', "policy.folder=p", "tasks.folder=t"))
    assert config.cache_dir == str(Path.cwd() / "cache")
    assert config.scratch_dir == str(Path.home() / "s")
    assert Path(config.run.root).is_absolute()
    assert config.policy.folder == str(Path.cwd() / "p")
    assert config.tasks.folder == str(Path.cwd() / "t")
    assert config.tasks.heldout is None
    recorded = typed(compose_config("sft.runs=[runs/a/001,/b]"))
    assert recorded.sft.runs == (str(Path.cwd() / "runs/a/001"), "/b")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("+learner.lrr=1",), ("learner.lrr", "lr, ")),
        (("+nonsense=1",), ("nonsense", "campaign, ")),
        (("+tasks.generate.colour=red",), ("tasks.generate.colour", "families")),
        (("learner.lr=fast",), ("learner.lr", "float")),
        (("learner.schedule=cosine",), ("learner.schedule", "linear")),
        (("tasks.mix=random",), ("tasks.mix=random", "each, one, turns")),
        (("sandbox.kind=docker",), ("sandbox.kind", "bubblewrap")),
        (("harness.names=[emacs]",), ("names=['emacs']", "claude_code", "`harness`")),
        (("harness.names=[pi,pi]",), ("names=", "each once", "`harness`")),
        (("harness.names=[]",), ("names=[]", "claude_code", "`harness`")),
        (("tasks.generate.families=[nope]",), ("families=['nope']", "relay", "`tasks.generate`")),
        (("tasks.generate.families=[]",), ("families=[]", "relay", "`tasks.generate`")),
        (("tasks.generate.num_train=-1",), ("num_train=-1", "at least 1", "`tasks.generate`")),
        (("learner.loss.objective=ppo",), ("learner.loss.objective", "cispo")),
        (("learner.loss.importance_low=3",), ("importance_high=2.0", "importance_low", "learner.loss")),
        (("learner.critic.backbone=none",), ("learner.critic.backbone", "own")),
        (("credit.estimator=gae",), ("credit.estimator", "tree_gae")),
        (("credit.harness_weights.emacs=2",), ("credit.harness_weights.emacs", "claude_code")),
        (
            ("harness=mixed", "tasks.mix=one", "credit.harness_weights={pi: 2}"),
            ("credit.harness_weights.pi=2", "tasks.mix=one", "allowed are turns, each"),
        ),
        (("harness=mixed", "credit.harness_weights.pi=0"), ("harness_weights.pi=0", "over 0", "`credit`")),
        (("harness=mixed", "tasks.turns={cdex: 2}"), ("tasks.turns.cdex", "claude_code", "codex")),
        (("harness=mixed", "tasks.turns.pi=0"), ("turns.pi=0", "at least 1", "`tasks`")),
        (("credit.std_epsilon=-1",), ("std_epsilon=-1", "at least 0", "`credit`")),
        (("credit.std_epsilon=nan",), ("std_epsilon=nan", "at least 0", "`credit`")),
        (("policy.folder=",), ("policy.folder is empty",)),
        (("policy.endpoint.model=large",), ("endpoint.base_url is missing", "policy.endpoint")),
        (("policy.endpoint.protocol=gemini",), ("policy.endpoint.protocol=gemini", "anthropic, openai")),
        (("policy.endpoint.max_concurrency=0",), ("max_concurrency=0", "at least 1", "policy.endpoint")),
        (
            ("policy.folder=p", "policy.endpoint.model=large", "policy.endpoint.base_url=http://host/v1"),
            ("folder and endpoint.model are both set", "policy"),
        ),
        (('sft.runs=[""]',), ("sft.runs is empty",)),
        (("sft.heldout_share=1",), ("heldout_share=1", "less than 1", "`sft`")),
        (("sft.normaliser=none",), ("sft.normaliser", "rollout")),
        (("run=foo",), ("run: holds settings, such as run.root",)),
        (("tasks.generate=null",), ("tasks.generate: holds settings",)),
        (("~run",), ("run is missing",)),
        (("~learner.lr",), ("learner.lr is missing",)),
        ((f"campaign.num_steps={10**23}",), ("campaign.num_steps=1", "64 bits")),
        (("launch.cluster=moon",), ("launch.cluster", "slurm")),
        (("worker.concurrency=0",), ("concurrency", "at least 1")),
        (("launch.num_workers=0",), ("num_workers", "at least 1")),
        (("launch=slurm", "launch.slurm.gres=gpu:2"), ("gres=gpu:2", "gpus_per_node=1", "null", "`launch.slurm`")),
        (("launch=site_gres", "model=qwen3_4b"), ("gres=gpu:h200:1", "gpus_per_node=1", "null", "`launch.slurm`")),
        (("campaign.samples_per_group=0",), ("samples_per_group", "at least 1")),
        (("campaign.num_steps=-1",), ("num_steps", "at least 0")),
        (("campaign.train_min=nan",), ("train_min", "at least 0")),
        (("campaign.temperature=nan",), ("temperature", "more than 0")),
        (("learner.lr=-1",), ("lr=-1", "at least 0", "learner")),
        (("learner.max_staleness=-1",), ("max_staleness=-1", "at least 0", "learner")),
        (
            ("algorithm=ppo", "learner.critic.warmup_steps=7", "campaign.num_steps=7"),
            ("learner.critic.warmup_steps=7", "less than campaign.num_steps=7"),
        ),
        (("learner.accelerator=gpuu",), ("learner.accelerator", "cuda")),
        (("learner.betas=[0.9,2]",), ("betas", "less than 1")),
        (("policy.shape.num_kv_heads=3",), ("num_kv_heads", "num_heads", "policy.shape")),
        (("cold_start.lr=-1",), ("lr=-1", "cold_start")),
        (("seed=-1",), ("seed=-1", "at least 0")),
        (("limits.reserve_s=500",), ("reserve_s", "deadline_s")),
    ],
)
def test_a_configuration_error_names_the_key_and_what_is_allowed(
    overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        typed(compose_config(*overrides))
    for word in words:
        assert word in str(caught.value)


def run_command(*arguments: str, folder: Path, name: str = "train") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", f"clawhpc.{name}", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        *(("train", argument) for argument in ("--help", "learner.lrr=1", "experiment=nothing", "learner.lr=fast")),
        *((name, argument) for name in ("sft", "evaluate", "images") for argument in ("--help", "learner.lrr=1")),
        *((name, argument) for name in ("view", "report") for argument in ("--help", "nowhere")),
    ],
)
def test_help_and_what_a_user_gets_wrong_import_nothing_heavy(name: str, argument: str, tmp_path: Path) -> None:
    done = run_command(argument, folder=tmp_path, name=name)
    assert done.returncode == (0 if argument == "--help" else 2), done.stderr[-2000:]
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "clawhpc" in imported
    assert not imported.intersection(HEAVY)
    assert list(tmp_path.iterdir()) == []


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.stdout == ""
    return line


def test_an_error_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    line = only_line(run_command("learner.lrr=1", folder=tmp_path))
    assert line.startswith("clawhpc: ")
    assert "learner.lrr" in line
    assert "learner.lr," not in line
    assert "lr, " in line


@pytest.mark.parametrize("override", ["learner.lr=-1", "learner.lr=abc", "+foo=1", "~seed", "engine=null", "run=foo"])
def test_so_is_every_other_error_whoever_finds_it(tmp_path: Path, override: str) -> None:
    done = run_command(override, folder=tmp_path)
    assert done.returncode == 2
    assert only_line(done).startswith("clawhpc: ")
    assert override.strip("+~").split("=")[0].split(".")[-1] in only_line(done)


def test_too_few_tasks_to_evaluate_on_are_refused_before_there_is_a_run(tmp_path: Path) -> None:
    config = typed(compose_config("campaign.eval_tasks=3"))
    tasks = TaskSets(train=(make_task("a"),), heldout=(make_task("b"), make_task("c")))
    with (
        pytest.raises(UserError, match=r"campaign\.eval_tasks=3: there are only 2"),
        open_campaign(config, tasks, tmp_path / "runs"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def policy_name(*overrides: str) -> str:
    return typed(compose_config(*overrides)).policy_folder().name


def test_each_cold_start_has_a_policy_of_its_own_which_training_finds(tmp_path: Path) -> None:
    start = policy_name("experiment=quickstart")
    for changed in ("harness=pi", "seed=1", "policy.shape.hidden_size=64", "cold_start.pass_rate=0.6"):
        assert policy_name("experiment=quickstart", changed) != start
    for same in ("learner.lr=0", "campaign.train_min=1", "run.name=other", "harness.pi.compact=true"):
        assert policy_name("experiment=quickstart", same) == start


@pytest.mark.parametrize(("given", "folder"), [("policy.folder=nowhere", "nowhere"), ("seed=77", "cold-start-")])
def test_a_policy_that_is_not_there_is_said(tmp_path: Path, given: str, folder: str) -> None:
    missing = run_command(given, folder=tmp_path)
    assert missing.returncode == 2
    (message,) = [line for line in missing.stderr.splitlines() if line.startswith("clawhpc: ")]
    assert folder in message
    assert "no such policy folder; `python -m clawhpc.sft` with the same settings makes one" in message
    assert not (tmp_path / "runs").exists()
