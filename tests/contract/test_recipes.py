"""Every recipe composes, fits what it asks for, and runs through, with its own settings, on a tiny policy."""

from __future__ import annotations

import functools
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clawhpc.campaign.collect import Collector
from clawhpc.campaign.install import PolicySource
from clawhpc.campaign.loop import Campaign
from clawhpc.config import CONF_DIR, RunConfig, typed
from clawhpc.engine.render import ChatRenderer
from clawhpc.errors import UserError
from clawhpc.estimate.memory import GIB
from clawhpc.estimate.misfit import find_misfits
from clawhpc.estimate.run import estimate_run
from clawhpc.estimate.settings import PlanSettings
from clawhpc.harness.registry import make_harness
from clawhpc.launch.executor import campaign_executor, make_executor, submit
from clawhpc.launch.turn import script_end
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.plan import asked_of, sections
from clawhpc.records import GroupPlan, RolloutRecord, StepPlan
from clawhpc.store import read_policy, read_rollouts
from clawhpc.tasks.sets import TaskSets
from tests.contract.recipes import (
    ALGORITHMS,
    HARNESSES,
    MODELS,
    PAGE,
    RECIPES,
    Recipe,
    changed,
    compose_recipe,
    with_plans,
)
from tests.contract.test_conf import compose_config, overrides_in
from tests.fakes.chat_tokenizer import write_tokenizer
from tests.fakes.launch import launch
from tests.fakes.records import make_record, make_task
from tests.fakes.sbatch import fake_sbatch, read_script
from tests.fakes.session import Session
from tests.fakes.workers import FakeWorkers

SMALLEST = Recipe("clawgym2", "claude_code_full", "qwen3_0_6b")
LARGEST = Recipe("clawgym2_ppo", "mixed_full", "qwen3_30b_a3b")
TASKS = TaskSets(train=tuple(make_task(f"t{number}") for number in range(256)), heldout=())
HEAD = tuple(range(100, 120))
ON_THIS_CPU = ("learner.devices=1", "learner.accelerator=cpu", "learner.num_threads=1", "learner.wandb=disabled")
ONE_STEP = ("learner.critic.warmup_steps=0", "campaign.num_steps=1", "learner.lr=0.01")


# ----------------------------------------------------------------------------------------------------------------------
# What it takes
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_recipe_is_a_whole_configuration_that_fits_what_it_asks_for(recipe: Recipe) -> None:
    asked = asked_of(compose_recipe(recipe))
    estimate = estimate_run(asked)
    assert find_misfits(asked, estimate) == ()
    assert estimate.learner.peak < 0.9 * asked.plan.gpu_memory_gib * GIB, "a tenth, for what an estimate cannot know"


def test_recipes_are_the_papers_runs_in_three_sizes() -> None:
    assert len(RECIPES) == 18
    assert set(MODELS) == {path.stem for path in (CONF_DIR / "model").glob("*.yaml")}
    assert len({compose_recipe(recipe).run.name for recipe in RECIPES}) == 18
    for recipe in RECIPES:
        config = compose_recipe(recipe)
        assert config.campaign.groups_per_step * config.campaign.samples_per_group == 256
        assert config.credit.needs_critic == (recipe.experiment == "clawgym2_ppo")
        assert config.tasks.mix == "each"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.num_nodes=1", ("learner.num_nodes=1", "a rank needs", "raise learner.num_nodes")),
        ("learner.num_nodes=3", ("learner.num_nodes=3", "a number of ranks that divides its 128 experts")),
        ("learner.gradient_checkpointing=false", ("set learner.gradient_checkpointing=true",)),
        ("learner.precision=32-true", ("set learner.precision=bf16-mixed",)),
        ("learner.logit_chunk=32768", ("lower learner.logit_chunk=32768",)),
        ("engine.gpu_memory_utilization=0.4", ("engine.tensor_parallel_size=2", "28.4 GiB of weights")),
        ("engine.tensor_parallel_size=3", ("engine.tensor_parallel_size=3", "32 attention heads")),
        ("engine.data_parallel_size=2", ("engine.data_parallel_size=2", "experts", "launch.num_workers")),
        ("engine.gpu_memory_utilization=0.43", ("engine.max_model_len=65536", "not one rollout's window")),
        ("engine.max_model_len=300000", ("engine.max_model_len=300000", "262144 positions")),
        ("engine.max_model_len=24576", ("engine.max_model_len=24576", "prompt of openclaw", "max_output_tokens")),
        ("plan.calls=90", ("engine.max_model_len=65536", "90 calls ends with 97000 tokens")),
        ("learner.token_budget=32768", ("learner.token_budget=32768", "fits into no row")),
        ("launch.slurm.gpus_per_node=1", ("launch.slurm.gpus_per_node=1", "takes 2 GPUs")),
        ("launch.campaign.gpus_per_node=4", ("launch.campaign.gpus_per_node=4", "learner.devices=8")),
        ("launch.campaign.mem_gb=500", ("launch.campaign.mem_gb=500", "checkpoint")),
        ("launch.campaign.timeout_min=60", ("launch.campaign.timeout_min=60", "learner.checkpoint_every=10 steps")),
        ("launch.slurm.mem_gb=20", ("launch.slurm.mem_gb=20", "worker.concurrency=16")),
        ("limits.deadline_s=300", ("limits.deadline_s=300", "a rollout takes")),
        ("limits.max_calls=10", ("limits.max_calls=10", "plan.calls=20")),
        ("limits.max_sampled_tokens=1000", ("limits.max_sampled_tokens=1000", "draws 6000")),
        ("worker.max_output_tokens=100", ("worker.max_output_tokens=100", "plan.reply_tokens=300")),
        ("campaign.stall_min=149", ("campaign.stall_min=149", "3 starts", "2 attempts", "raise it to 150")),
        ("engine.load_timeout_s=60", ("engine.load_timeout_s=60", "122 s")),
        ("engine.max_num_seqs=8", ("engine.max_num_seqs=8", "worker.concurrency=16")),
        ("credit.estimator=group", ("campaign.samples_per_group=1", "algorithm=ppo")),
    ],
)
def test_what_cannot_fit_is_refused_in_one_line_that_names_the_key(override: str, words: tuple[str, ...]) -> None:
    asked = asked_of(changed(compose_recipe(LARGEST), override))
    misfits = find_misfits(asked, estimate_run(asked))
    assert any(all(word in line for word in words) for line in misfits), misfits
    assert not any("\n" in line for line in misfits)


ROOMY, SMALL = 10**12, 64 * 10**9
"""Bytes of main memory."""


def misfits_of(config: RunConfig, ram_bytes: int = ROOMY) -> tuple[str, ...]:
    """On a machine with so much main memory."""
    asked = replace(asked_of(config), ram_bytes=ram_bytes)
    return find_misfits(asked, estimate_run(asked))


def test_engine_and_learner_that_share_a_gpu_must_fit_it_together() -> None:
    config = compose_recipe(SMALLEST, "launch=local", "learner.devices=1")
    (line,) = misfits_of(config)
    assert "engine.gpu_memory_utilization=0.9" in line
    assert "on one GPU" in line
    assert misfits_of(changed(config, "engine.gpu_memory_utilization=0.4")) == ()


def test_without_gpus_all_must_fit_into_main_memory() -> None:
    large = ("policy.folder=/models/Qwen3-8B", "policy.renderer=qwen3")
    here, on_slurm = typed(compose_config(*large)), typed(compose_config(*large, "launch=slurm_cpu"))
    (line,) = (line for line in misfits_of(here, SMALL) if "this machine" in line)
    assert line.startswith("worker.concurrency=12, engine.kv_cache_gib=1: workers take 36 GB, the learner 383 GB")
    assert "this machine has 64 GB" in line
    assert not any("this machine" in line for line in misfits_of(here, ROOMY))
    campaign, workers = (line for line in misfits_of(on_slurm) if "mem_gb=16" in line)
    assert campaign.startswith("launch.campaign.mem_gb=16: the learner takes 383 GB")
    assert workers.startswith("launch.slurm.mem_gb=16: 12 harnesses at a time and their engine take 36 GB")


def test_without_a_word_a_plan_is_of_the_tasks_that_are_made_here_and_fits() -> None:
    asked = asked_of(typed(compose_config()))
    assert (asked.plan.calls, asked.plan.reply_tokens, asked.plan.tool_s) == (3, 30, 0.2)
    assert misfits_of(typed(compose_config())) == ()
    assert asked_of(typed(compose_config("plan.calls=7"))).plan.calls == 7
    assert asked_of(typed(compose_config("tasks.folder=mine"))).plan == PlanSettings()


def test_a_policy_that_is_not_there_is_the_one_that_sft_would_make_unless_it_comes_from_elsewhere() -> None:
    made = typed(compose_config("experiment=mix_harness", "policy.shape.num_layers=3"))
    assert asked_of(made).decoder.num_layers == 3
    said = dict(sections(asked_of(made), estimate_run(asked_of(made))))
    assert dict(said["policy"])["shape"].endswith(", though the folder is not there yet")
    with pytest.raises(UserError, match=r"policy\.folder=.*mystery"):
        asked_of(changed(compose_recipe(SMALLEST), "policy.folder=/models/mystery"))


def test_gpus_that_are_a_gres_are_counted_and_shown_as_those_that_are_not() -> None:
    gres = [
        f"launch.{job}.{asked}"
        for job, number in (("slurm", 2), ("campaign", 8))
        for asked in ("gpus_per_node=null", f"gres=gpu:h200:{number}")
    ]
    asked = asked_of(compose_recipe(LARGEST, "launch=site_gres", *gres))
    assert find_misfits(asked, estimate_run(asked)) == ()
    jobs = dict(dict(sections(asked, estimate_run(asked)))["jobs"])
    assert "each 8 GPUs (gpu:h200:8)" in jobs["campaign"]
    assert "each 2 GPUs (gpu:h200:2)" in jobs["workers"]


def test_half_the_nodes_hold_the_largest_without_a_critic() -> None:
    assert compose_recipe(LARGEST).learner.num_nodes == 6
    grpo = asked_of(changed(compose_recipe(replace(LARGEST, experiment="clawgym2")), "learner.num_nodes=3"))
    assert find_misfits(grpo, estimate_run(grpo)) == ()


def test_of_a_large_policy_few_versions_stay_and_of_a_small_one_all() -> None:
    recipe = compose_recipe(LARGEST)
    few, all_of_them = (
        estimate_run(asked_of(config)).storage for config in (recipe, changed(recipe, "learner.keep_policies=null"))
    )
    assert few.num_policies == 11, "steps 0, 50, … 400, the one before the last, and one that is being written"
    assert all_of_them.num_policies == 401
    assert all_of_them.run - few.run == pytest.approx(390 * few.policy)
    assert few.policy == 4 * 30_532_122_624


def test_the_page_says_of_each_recipe_what_its_plan_says() -> None:
    assert PAGE.read_text() == with_plans(PAGE.read_text()), "`python -m tests.contract.recipes` renews it"


def test_every_command_of_the_page_is_one_that_can_be_given() -> None:
    given = [overrides for overrides in overrides_in(PAGE) if overrides]
    assert len(given) >= 3
    for overrides in given:
        assert isinstance(typed(compose_config(*overrides)), RunConfig), overrides


def run_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "clawhpc.plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def own_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Of standard error, what the program itself says."""
    return [line for line in done.stderr.splitlines() if not line.startswith("import time:")]


def test_a_plan_is_printed_without_torch_and_ends_with_0_where_all_fits() -> None:
    done = run_plan(*SMALLEST.overrides)
    assert (done.returncode, own_lines(done)) == (0, [])
    assert "It fits" in done.stdout
    assert "596,049,920" in done.stdout
    assert re.search(r"plan\.learner_efficiency +0\.25", done.stdout), "what is assumed is said"
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert not imported & {"torch", "transformers", "lightning", "vllm", "wandb"}


def test_a_plan_that_does_not_fit_ends_with_2_and_says_in_json_what_it_says_in_lines() -> None:
    done = run_plan("--json", *SMALLEST.overrides, "limits.max_calls=10", "limits.max_sampled_tokens=1000")
    said = json.loads(done.stdout)
    assert done.returncode == 2
    assert own_lines(done) == [f"clawhpc: {line}" for line in said["misfits"]]
    assert len(said["misfits"]) == 2
    assert not said["fits"]
    assert said["estimate"]["tokens"]["num_rollouts"] == 256


# ----------------------------------------------------------------------------------------------------------------------
# Dry runs
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_slurm_is_asked_for_what_the_plan_counts_on(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose_recipe(Recipe("clawgym2_ppo", "mixed_full", model))
    taken, end = fake_sbatch(tmp_path, monkeypatch), script_end(None)
    submit(campaign_executor(config.launch.campaign, config.learner.num_nodes, tmp_path / "c", end), [print])
    campaign = read_script(taken, tmp_path / "c")
    submit(make_executor(config.launch, tmp_path / "w", end), [print] * config.launch.num_workers)
    workers = read_script(taken, tmp_path / "w")
    assert f"#SBATCH --nodes={config.learner.num_nodes}\n" in campaign
    assert f"#SBATCH --gpus-per-node={config.learner.devices}\n" in campaign
    assert f"#SBATCH --gpus-per-node={config.engine.tensor_parallel_size}\n" in workers
    assert f"#SBATCH --array=0-{config.launch.num_workers - 1}" in workers


@pytest.mark.parametrize("harness", HARNESSES)
def test_each_harness_of_a_recipe_is_started_with_its_whole_prompt(harness: str, tmp_path: Path) -> None:
    config = compose_recipe(replace(SMALLEST, harness=harness))
    spec = config.worker_spec(tmp_path)
    assert spec.harnesses
    for name, settings in spec.harnesses.items():
        plan = launch(make_harness(name, settings, tmp_path))
        assert "--bare" not in plan.argv
        assert getattr(settings, "compact", False), "a window that is full is the harness's affair"


@pytest.mark.parametrize(
    ("model", "asking"),
    [
        ("qwen3_30b_a3b", "<|im_start|>assistant\n"),
        ("qwen3_4b", "<|im_start|>assistant\n"),
        ("qwen3_0_6b", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_a_recipes_model_is_asked_as_its_own_chat_template_asks(model: str, asking: str, tmp_path: Path) -> None:
    """The Instruct releases do not think, and their template has no block that says so."""
    policy = compose_recipe(replace(SMALLEST, model=model)).policy
    assert policy.renderer is not None
    write_tokenizer(tmp_path)
    assert ChatRenderer(tmp_path, renderer=policy.renderer, thinking=policy.thinking).generation_prompt == asking


@pytest.fixture(scope="module")
def babbler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that is no one's."""
    from clawhpc.learner.policy import create_policy
    from clawhpc.learner.tokenizer import train_tokenizer
    from tests.fakes.learner_campaign import SMALL

    folder = tmp_path_factory.mktemp("babbler")
    train_tokenizer(["write kiwi to apple.txt"] * 3, folder / "tokenizer", vocab_size=280)
    return Path(create_policy(folder / "policy", folder / "tokenizer", SMALL, seed=0).path)


def draw(plan: StepPlan, group: GroupPlan, sample: int) -> RolloutRecord:
    """Two calls; every other sample, or task, is solved."""
    chance = random.Random(f"{group.key.name} {sample}")
    session = Session()
    first = session.call(HEAD, reply=(chance.randrange(250), chance.randrange(250)), version=plan.policy_step)
    session.call(HEAD, first, (9, 8), reply=(chance.randrange(250),), version=plan.policy_step)
    return make_record(group, sample, float(chance.random() < 0.5), calls=tuple(session.calls))


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with tempfile.TemporaryDirectory(prefix="claw-", dir="/tmp") as root, Ledger.open(Path(root)) as opened:
        yield opened


@pytest.mark.parametrize("harness", HARNESSES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_of_a_recipe_runs_through_from_its_plan_to_its_policy(
    algorithm: str, harness: str, babbler: Path, ledger: Ledger, tmp_path: Path
) -> None:
    recipe = Recipe(algorithm, harness, "qwen3_0_6b")
    whole = compose_recipe(recipe)
    fewer = f"campaign.groups_per_step={whole.campaign.groups_per_step // 8}"
    config = functools.reduce(changed, (*ON_THIS_CPU, *ONE_STEP, fewer), whole)
    paths = RunPaths(tmp_path)
    collector = Collector(paths, FakeWorkers(paths, draw), stall_min=1, poll_s=0.0)  # type: ignore[arg-type]
    campaign = Campaign(
        config.campaign,
        paths=paths,
        collector=collector,
        ledger=ledger,
        tasks=TASKS,
        harnesses=config.harness.names,
        mix=config.tasks.mix,
    )
    campaign.run(config.learner_settings(), config.credit, PolicySource(folder=babbler))
    records = list(read_rollouts(paths))
    pairs = {(record.key.task_id, record.key.harness) for record in records}
    assert len(records) == 32
    assert len(pairs) == config.campaign.groups_per_step
    assert {name for _, name in pairs} == set(config.harness.names)
    assert len({task for task, _ in pairs}) == len(pairs) / len(config.harness.names)
    before, after = (read_policy(paths.policy(step)) for step in (0, 1))
    assert before.digest != after.digest
    _, row = paths.metrics_csv.read_text().splitlines()
    assert "nan" not in row
