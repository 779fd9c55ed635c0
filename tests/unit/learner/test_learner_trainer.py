"""A whole fit: steps in order, resume after a kill at any moment, what is published when, and learning itself."""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from clawhpc.engine.tokenizer import count_token_ids
from clawhpc.errors import UserError
from clawhpc.learner.attention import TreeLayout
from clawhpc.learner.callbacks import list_checkpoints
from clawhpc.learner.policy import load_policy
from clawhpc.learner.settings import Schedule
from clawhpc.learner.trainer import LearnerPaths, fit_sft
from clawhpc.paths import RunPaths
from clawhpc.records import RolloutRecord, Verdict
from clawhpc.store import published_steps
from clawhpc.tree.nodes import CallTree
from clawhpc.tree.sequence import sequence_tree
from tests.fakes.learner_campaign import (
    ALGORITHMS,
    NUM_STEPS,
    SETTINGS,
    Campaign,
    Killed,
    equal,
    rollouts,
    rows_of,
    with_logprobs,
)
from tests.fakes.records import make_group, make_record
from tests.fakes.session import Session


def test_each_step_is_collected_after_its_policy_is_published_and_not_before(policy: Path, tmp_path: Path) -> None:
    campaign = Campaign(RunPaths(tmp_path))
    weights = campaign.train(policy)
    assert campaign.events == [
        *[(event, step) for step in range(NUM_STEPS) for event in ("policy", "collect")],
        ("policy", NUM_STEPS),
    ]
    assert not equal(weights, load_file(policy / "model.safetensors"))
    assert equal(load_file(campaign.run.policy(0) / "model.safetensors"), load_file(policy / "model.safetensors"))


KILLS = [("policy", 0), ("collect", 0), ("policy", 2), ("collect", 2), ("policy", 4)]


@pytest.mark.parametrize(
    ("algorithm", "event", "step"),
    [*(("grpo", *kill) for kill in KILLS), *((other, "collect", 2) for other in ALGORITHMS if other != "grpo")],
)
def test_a_killed_run_that_goes_on_ends_with_the_same_bits(
    policy: Path, tmp_path: Path, algorithm: str, event: str, step: int
) -> None:
    settings, credit = ALGORITHMS[algorithm]
    settings = replace(settings, schedule="linear")
    whole = Campaign(RunPaths(tmp_path / "whole"), settings=settings, credit=credit).train(policy)
    killed = Campaign(RunPaths(tmp_path / "killed"), settings=settings, credit=credit)
    killed.kill_when = lambda *now: now == (event, step)
    with pytest.raises(Killed):
        killed.train(policy)
    killed.kill_when, killed.events = lambda *now: False, []
    assert equal(killed.train(policy), whole)
    steps = range(step, NUM_STEPS)
    assert [at for what, at in killed.events if what == "collect"] == list(steps), (
        "steps that are done are not made again"
    )


@pytest.mark.parametrize("event", ["policy", "collect"])
def test_old_policies_go_and_a_run_that_makes_steps_again_makes_them_again(
    policy: Path, tmp_path: Path, event: str
) -> None:
    settings = replace(SETTINGS, keep_policies=2, checkpoint_every=5)
    whole = Campaign(RunPaths(tmp_path / "whole"), settings=settings).train(policy)
    killed = Campaign(RunPaths(tmp_path / "killed"), settings=settings)
    killed.kill_when = lambda *now: now == (event, 3)
    with pytest.raises(Killed):
        killed.train(policy)
    assert published_steps(killed.run) == {"policy": [0, 1, 2], "collect": [0, 2, 3]}[event]
    (killed.run.policies / ".step-000001.removed.part").mkdir()
    killed.kill_when = lambda *now: False
    assert equal(killed.train(policy), whole)
    assert published_steps(killed.run) == [0, 3, 4]
    assert len(list(killed.run.policies.iterdir())) == 3, "what a kill has left goes too"


@pytest.mark.parametrize("algorithm", ["ppo", "ppo with one backbone"])
def test_while_the_critic_warms_up_it_alone_learns(policy: Path, tmp_path: Path, algorithm: str) -> None:
    settings, credit = ALGORITHMS[algorithm]
    settings = replace(settings, critic=replace(settings.critic, warmup_steps=2), keep_checkpoints=3)
    run = RunPaths(tmp_path)
    Campaign(run, settings=settings, credit=credit, num_steps=3).train(policy)
    weights = [load_file(run.policy(step) / "model.safetensors") for step in range(4)]
    assert equal(weights[0], weights[1])
    assert equal(weights[1], weights[2])
    assert not equal(weights[2], weights[3])
    first, second, _ = map(critic_weights, list_checkpoints(run.checkpoints))
    assert all(not torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.parametrize(
    ("schedule", "shares"), [("constant", [0, 0, 1 / 2, 1, 1, 1]), ("linear", [0, 0, 1 / 2, 3 / 4, 1 / 2, 1 / 4])]
)
def test_the_rate_of_a_policy_that_waits_for_its_critic_rises_when_it_learns(
    schedule: Schedule, shares: list[float], policy: Path, tmp_path: Path
) -> None:
    settings, credit = ALGORITHMS["ppo with one backbone"]
    settings = replace(settings, warmup_steps=2, schedule=schedule, critic=replace(settings.critic, warmup_steps=2))
    campaign = Campaign(RunPaths(tmp_path), settings=settings, credit=credit, num_steps=6)
    campaign.train(policy)
    assert [float(row["train/lr"]) for row in rows_of(campaign.run)] == pytest.approx(
        [settings.lr * share for share in shares]
    )
    (newest,) = list_checkpoints(campaign.run.checkpoints)[-1:]
    groups = torch.load(newest, weights_only=False)["optimizer_states"][0]["param_groups"]
    critics = {"constant": 1, "linear": 1 / 6}[schedule]
    assert [group["lr"] for group in groups] == pytest.approx([settings.lr * shares[-1], settings.critic.lr * critics])


def test_what_only_a_second_update_of_a_step_moves_is_not_logged_where_there_is_none(
    policy: Path, tmp_path: Path
) -> None:
    """Ratios of a first update are 1, so that of none of these a 0 says anything."""
    settings, credit = ALGORITHMS["ppo with one backbone"]
    two = replace(settings, critic=replace(settings.critic, warmup_steps=1))
    logs = {}
    for name, learns in {"one": replace(settings, epochs=1), "two": two}.items():
        campaign = Campaign(RunPaths(tmp_path / name), settings=learns, credit=credit, num_steps=2)
        campaign.train(policy)
        logs[name] = [
            [row.get(f"train/{what}", "") for what in ("clip_share", "update_kl")] for row in rows_of(campaign.run)
        ]
    assert logs["one"] == [["", ""]] * 2
    warming, learning = logs["two"]
    assert warming == ["", ""]
    assert all(learning)


def test_an_own_critic_that_warms_up_says_nothing_of_log_probs_and_then_of_each_harness(
    policy: Path, tmp_path: Path
) -> None:
    settings, credit = ALGORITHMS["ppo"]
    settings = replace(settings, critic=replace(settings.critic, warmup_steps=1))
    campaign = Campaign(RunPaths(tmp_path), settings=settings, credit=credit, num_steps=2, by_harness=True)
    campaign.train(policy)
    warming, learning = rows_of(campaign.run)
    assert (warming["train/sampling_gap"], warming["train/pi/sampling_gap"]) == ("", "")
    assert learning["train/pi/sampling_gap"] == learning["train/sampling_gap"] != ""
    assert warming["train/pi/advantage_std"] != ""


def test_a_critic_that_has_learned_nothing_says_the_mean_of_the_rewards(policy: Path, tmp_path: Path) -> None:
    settings, credit = ALGORITHMS["ppo"]
    campaign = Campaign(RunPaths(tmp_path), settings=settings, credit=replace(credit, gae_lambda=0.5), num_steps=1)
    campaign.train(policy)
    (row,) = rows_of(campaign.run)
    assert float(row["credit/value_mean"]) == pytest.approx(float(row["train/reward"]), rel=1e-5)


def critic_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Those that only the critic has."""
    state = torch.load(checkpoint, weights_only=False)["state_dict"]
    found = {name: weight for name, weight in state.items() if name.startswith(("critic.", "policy.value_head."))}
    assert found
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_named(policy: Path, tmp_path: Path) -> None:
    campaign = Campaign(RunPaths(tmp_path), settings=replace(SETTINGS, accelerator="cuda"))
    with pytest.raises(UserError, match=r"learner\.accelerator=cuda: torch finds no GPU"):
        campaign.train(policy)
    assert campaign.events == []


def test_a_half_written_checkpoint_is_not_taken(policy: Path, tmp_path: Path) -> None:
    campaign = Campaign(RunPaths(tmp_path), num_steps=2)
    campaign.train(policy)
    (campaign.run.checkpoints / "step-000009.part").write_bytes(b"half")
    campaign.num_steps, campaign.events = 3, []
    campaign.train(policy)
    assert ("collect", 2) in campaign.events
    assert [path.name for path in list_checkpoints(campaign.run.checkpoints)] == [
        "step-000001.ckpt",
        "step-000002.ckpt",
    ]


def test_a_finished_run_that_is_started_again_does_nothing(policy: Path, tmp_path: Path) -> None:
    campaign = Campaign(RunPaths(tmp_path))
    weights = campaign.train(policy)
    campaign.events = []
    assert equal(campaign.train(policy), weights)
    assert {what for what, _ in campaign.events} == {"policy"}


def test_a_campaign_that_ended_early_goes_on_from_there(policy: Path, tmp_path: Path) -> None:
    whole = Campaign(RunPaths(tmp_path / "whole")).train(policy)
    campaign = Campaign(RunPaths(tmp_path / "early"), settings=replace(SETTINGS, checkpoint_every=2))
    campaign.collect = lambda step: rollouts(step) if step < 3 else None
    campaign.train(policy)
    assert campaign.events[-1] == ("collect", 3)
    campaign.collect, campaign.events = rollouts, []
    assert equal(campaign.train(policy), whole)
    assert campaign.events == [("policy", 3), ("collect", 3), ("policy", 4)]


def test_ctrl_c_comes_out_as_itself_and_goes_on_working(policy: Path, tmp_path: Path) -> None:
    def interrupt(step: int) -> Sequence[RolloutRecord]:
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Campaign(RunPaths(tmp_path), collect=interrupt).train(policy)
    assert signal.getsignal(signal.SIGINT) is handler


def test_checkpoints_further_apart_make_the_steps_between_again(policy: Path, tmp_path: Path) -> None:
    whole = Campaign(RunPaths(tmp_path / "whole")).train(policy)
    sparse = replace(SETTINGS, checkpoint_every=2)
    killed = Campaign(RunPaths(tmp_path / "killed"), settings=sparse, kill_when=lambda *now: now == ("collect", 3))
    with pytest.raises(Killed):
        killed.train(policy)
    killed.kill_when, killed.events = lambda *now: False, []
    assert equal(killed.train(policy), whole)
    assert [step for what, step in killed.events if what == "collect"] == [2, 3]


def test_a_learning_rate_of_zero_changes_no_bit(policy: Path, tmp_path: Path) -> None:
    weights = Campaign(RunPaths(tmp_path), settings=replace(SETTINGS, lr=0.0)).train(policy)
    assert equal(weights, load_file(policy / "model.safetensors"))


def equal_rewards(step: int) -> list[RolloutRecord]:
    return [replace(record, verdict=Verdict(reward=1.0)) for record in rollouts(step)]


def without_calls(step: int) -> list[RolloutRecord]:
    return [replace(record, calls=()) for record in rollouts(step)]


@pytest.mark.parametrize("nothing", [equal_rewards, without_calls, lambda step: []])
def test_a_step_without_anything_to_learn_changes_no_bit(
    policy: Path, tmp_path: Path, nothing: Callable[[int], Sequence[RolloutRecord]]
) -> None:
    def collect(step: int) -> Sequence[RolloutRecord]:
        return nothing(step) if step else rollouts(step)

    one = Campaign(RunPaths(tmp_path / "one"), num_steps=1).train(policy)
    three = Campaign(RunPaths(tmp_path / "three"), collect=collect, num_steps=3).train(policy)
    assert equal(one, three)


def test_bf16_trains_too(policy: Path, tmp_path: Path) -> None:
    campaign = Campaign(RunPaths(tmp_path), settings=replace(SETTINGS, precision="bf16-mixed"), num_steps=1)
    weights = campaign.train(policy)
    assert not equal(weights, load_file(policy / "model.safetensors"))
    assert all(weight.isfinite().all() for weight in weights.values())


def test_the_log_has_one_row_per_step_also_after_a_kill(policy: Path, tmp_path: Path) -> None:
    campaign = Campaign(RunPaths(tmp_path), kill_when=lambda *now: now == ("policy", 2))
    with pytest.raises(Killed):
        campaign.train(policy)
    campaign.kill_when = lambda *now: False
    campaign.train(policy)
    rows = rows_of(campaign.run)
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    for name in (
        "train/reward",
        "train/loss",
        "train/grad_norm",
        "train/skipped_updates",
        "train/lr",
        "train/clip_share",
        "train/truncated_share",
        "train/entropy",
        "train/sampling_gap",
        "train/sampling_gap_max",
        "train/sampling_kl",
        "train/update_kl",
        "train/no_credit_share",
        "credit/advantage_std",
        "tree/row_tokens",
        "drift/copied",
        "time/collect_s",
        "time/learn_s",
    ):
        assert all(math.isfinite(float(row[name])) for row in rows), name


# ---------------------------------------------------------------------------------------------------------------------
# Learning
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Bandit:
    """Rollouts of one call that the current policy draws; task t wants the reply `t`."""

    run: RunPaths
    mean_rewards: list[float] = field(default_factory=list)

    def collect(self, step: int) -> list[RolloutRecord]:
        model, generator = load_policy(self.run.policy(step)), torch.Generator().manual_seed(step)
        num_token_ids = count_token_ids(self.run.policy(step))
        records = []
        for task in (20, 30):
            prompt = (1, 2, 3, task)
            group = make_group(str(task), step=step, num_samples=16)
            logprobs = next_logprobs(model, prompt, num_token_ids)
            replies = torch.multinomial(logprobs.exp(), group.num_samples, replacement=True, generator=generator)
            for sample, reply in enumerate(replies.tolist()):
                session = Session()
                session.call(prompt, reply=(reply,), version=step)
                calls = (with_logprobs(session.calls[0], (float(logprobs[reply]),)),)
                # Partial credit: the first draws of a fresh policy are never right.
                records.append(make_record(group, sample, 1 - abs(reply - task) / 300, calls=calls))
        self.mean_rewards.append(sum(record.verdict.reward for record in records) / len(records))
        return records


@torch.no_grad()
def next_logprobs(model: PreTrainedModel, prompt: tuple[int, ...], num_token_ids: int) -> torch.Tensor:
    layout = TreeLayout.chain(len(prompt))
    logits = model(input_ids=torch.tensor([prompt]), use_cache=False, tree_layout=layout).logits[0, -1]
    return logits[:num_token_ids].log_softmax(-1)


def test_reinforcement_learning_raises_the_reward_of_what_its_own_policy_draws(policy: Path, tmp_path: Path) -> None:
    bandit = Bandit(RunPaths(tmp_path))
    settings = replace(SETTINGS, lr=2e-2, epochs=4, token_budget=2000)
    Campaign(bandit.run, collect=bandit.collect, settings=settings, num_steps=15).train(policy)
    assert bandit.mean_rewards[0] < 0.65
    assert min(bandit.mean_rewards[-3:]) > 0.9
    rows = [row for row in rows_of(bandit.run) if row["train/loss"]]
    assert max(float(row["train/sampling_gap_max"]) for row in rows) < 1e-5
    assert max(float(row["train/clip_share"]) for row in rows) > 0


def copies(step: int) -> list[CallTree]:
    """Sixteen examples: after a head that all share, a token, a mark, and the token again, which trains."""
    rng = random.Random(step)
    trees = []
    for name in range(16):
        token = rng.randrange(10, 40)
        trees.append(sequence_tree(str(name), [1, 2, 3, token, 4, token, 5], [False] * 5 + [True] * 2))
    return trees


def test_imitation_learns_to_copy(policy: Path, tmp_path: Path) -> None:
    version = fit_sft(
        replace(SETTINGS, lr=2e-2, schedule="linear", checkpoint_every=100),
        policy=policy,
        num_steps=100,
        lessons=lambda step, model: copies(step),
        output=tmp_path / "out",
        paths=LearnerPaths(checkpoints=tmp_path / "checkpoints", metrics=tmp_path / "metrics"),
    )
    model = load_policy(Path(version.path))
    found = [int(next_logprobs(model, (1, 2, 3, token, 4), 280).argmax()) for token in range(10, 40)]
    assert sum(left == right for left, right in zip(found, range(10, 40), strict=True)) > 15
