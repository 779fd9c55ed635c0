"""A whole fit: steps in order, resume after a kill at any moment, what is published when, and learning itself."""

from __future__ import annotations

import csv
import math
import random
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from clawhpc.credit.group import GroupCreditSettings
from clawhpc.engine.render import count_token_ids
from clawhpc.errors import UserError
from clawhpc.learner.attention import TreeLayout
from clawhpc.learner.batch import TreeBatch
from clawhpc.learner.callbacks import list_checkpoints
from clawhpc.learner.data import rl_source, sequence_tree
from clawhpc.learner.losses import Sums
from clawhpc.learner.module import GrpoModule
from clawhpc.learner.policy import create_policy, load_policy
from clawhpc.learner.settings import LearnerSettings, PolicySettings
from clawhpc.learner.tokenizer import train_tokenizer
from clawhpc.learner.trainer import LearnerPaths, _fit, fit_rl, fit_sft
from clawhpc.paths import RunPaths
from clawhpc.records import CallRecord, RolloutRecord, Verdict
from clawhpc.store import read_policy
from clawhpc.tree.nodes import CallTree
from tests.fakes.disk import largest_file
from tests.fakes.records import make_group, make_record
from tests.fakes.session import Session

SMALL = PolicySettings(num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=32)
SETTINGS = LearnerSettings(lr=1e-2, warmup_steps=1, epochs=2, token_budget=200, wandb="disabled")
NUM_STEPS = 4


class Killed(BaseException):
    """As SIGKILL: nothing that handles errors may handle it."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    train_tokenizer(["write kiwi to apple.txt"] * 3, folder / "tokenizer", vocab_size=280)
    return Path(create_policy(folder / "start", folder / "tokenizer", SMALL, seed=0).path)


def rollouts(step: int) -> list[RolloutRecord]:
    """Two groups of two rollouts, each of two calls; the same for the same step."""
    rng = random.Random(step)
    records = []
    for task in ("a", "b"):
        group = make_group(task, step=step)
        for sample in range(2):
            session = Session()
            first = session.call((1, 2, 3, 4), reply=(rng.randrange(250), rng.randrange(250)))
            session.call((1, 2, 3, 4), first, (9, 8), reply=(rng.randrange(250),))
            records.append(make_record(group, sample, rng.choice([0.0, 0.5, 1.0]), calls=tuple(session.calls)))
    return records


@dataclass
class Campaign:
    """What a campaign does around the learner: collect, say where policies go, die."""

    run: RunPaths
    collect: Callable[[int], Sequence[RolloutRecord] | None] = rollouts
    settings: LearnerSettings = SETTINGS
    num_steps: int = NUM_STEPS
    kill_when: Callable[[str, int], bool] = lambda event, step: False
    events: list[tuple[str, int]] = field(default_factory=list)

    def train(self, policy: Path) -> dict[str, torch.Tensor]:
        last = fit_rl(
            self.settings,
            GroupCreditSettings(),
            policy=policy,
            num_steps=self.num_steps,
            collect=self._collect,
            policy_folder=self._policy_folder,
            paths=LearnerPaths(checkpoints=self.run.checkpoints, metrics=self.run.metrics),
        )
        return load_file(self.run.policy(last) / "model.safetensors")

    def _collect(self, step: int) -> Sequence[RolloutRecord] | None:
        self._note("collect", step)
        assert read_policy(self.run.policy(step)).step == step
        return self.collect(step)

    def _policy_folder(self, step: int) -> Path:
        self._note("policy", step)
        return self.run.policy(step)

    def _note(self, event: str, step: int) -> None:
        self.events.append((event, step))
        if self.kill_when(event, step):
            raise Killed


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_each_step_is_collected_after_its_policy_is_published_and_not_before(policy: Path, tmp_path: Path) -> None:
    campaign = Campaign(RunPaths(tmp_path))
    weights = campaign.train(policy)
    assert campaign.events == [
        *[(event, step) for step in range(NUM_STEPS) for event in ("policy", "collect")],
        ("policy", NUM_STEPS),
    ]
    assert not equal(weights, load_file(policy / "model.safetensors"))
    assert equal(load_file(campaign.run.policy(0) / "model.safetensors"), load_file(policy / "model.safetensors"))


@pytest.mark.parametrize(
    ("event", "step"), [("policy", 0), ("collect", 0), ("policy", 2), ("collect", 2), ("policy", 4)]
)
def test_a_killed_run_that_goes_on_ends_with_the_same_bits(policy: Path, tmp_path: Path, event: str, step: int) -> None:
    whole = Campaign(RunPaths(tmp_path / "whole"), settings=replace(SETTINGS, schedule="linear")).train(policy)
    killed = Campaign(RunPaths(tmp_path / "killed"), settings=replace(SETTINGS, schedule="linear"))
    killed.kill_when = lambda *now: now == (event, step)
    with pytest.raises(Killed):
        killed.train(policy)
    killed.kill_when, killed.events = lambda *now: False, []
    assert equal(killed.train(policy), whole)
    steps = range(step, NUM_STEPS)
    assert [at for what, at in killed.events if what == "collect"] == list(steps), (
        "steps that are done are not made again"
    )


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


# ---------------------------------------------------------------------------------------------------------------------
# What must not reach a file
# ---------------------------------------------------------------------------------------------------------------------


class Faulty(GrpoModule):
    """The loss of every update but the first is not a number."""

    def row_loss(self, row: TreeBatch, learner_logprobs_N: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        loss, sums = super().row_loss(row, learner_logprobs_N)
        first = bool((learner_logprobs_N.detach() == row.old_logprobs_BT[row.sampled_BT]).all())
        return (loss if first else loss * math.nan), sums


def test_an_update_whose_gradient_is_not_finite_leaves_no_trace_and_is_counted(policy: Path, tmp_path: Path) -> None:
    weights = []
    for module in (Faulty(SETTINGS, policy, 1), GrpoModule(replace(SETTINGS, epochs=1), policy, 1)):
        paths = LearnerPaths(checkpoints=tmp_path / type(module).__name__, metrics=tmp_path / type(module).__name__)
        _fit(module, rl_source(rollouts, SETTINGS, GroupCreditSettings()), paths, publish=None, names=())
        weights.append(module.model.state_dict())
    assert equal(*weights)
    with (tmp_path / "Faulty" / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (float(row["train/skipped_updates"]), math.isfinite(float(row["train/grad_norm"]))) == (1.0, True)


def test_a_step_without_a_finite_gradient_ends_the_fit_before_anything_is_written(policy: Path, tmp_path: Path) -> None:
    def poisoned(step: int) -> list[RolloutRecord]:
        return [replace(record, calls=(with_logprobs(record.calls[0], (math.nan,) * 2),)) for record in rollouts(step)]

    campaign = Campaign(RunPaths(tmp_path), collect=lambda step: rollouts(step) if step < 2 else poisoned(step))
    with pytest.raises(UserError, match=r"step 2: none of its 2 updates has a finite gradient.*learner\.lr"):
        campaign.train(policy)
    assert list_checkpoints(campaign.run.checkpoints)[-1].name == "step-000001.ckpt"
    assert not campaign.run.policy(3).exists()
    assert [row["step"] for row in rows_of(campaign.run)] == ["0", "1"]
    campaign.collect = rollouts
    assert equal(campaign.train(policy), Campaign(RunPaths(tmp_path / "whole")).train(policy))


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_told_with_its_path_and_leaves_no_part(
    policy: Path, tmp_path: Path
) -> None:
    campaign, size = Campaign(RunPaths(tmp_path)), (policy / "model.safetensors").stat().st_size
    with largest_file(2 * size), pytest.raises(OSError, match=r"File too large: '.*step-000000\.ckpt'"):
        campaign.train(policy)  # a checkpoint also has the two moments of every weight
    assert list(campaign.run.checkpoints.iterdir()) == []
    assert campaign.run.policy(0).exists()


def test_a_checkpoint_is_written_nowhere_but_in_its_folder(policy: Path, tmp_path: Path) -> None:
    campaign = Campaign(RunPaths(tmp_path / "run"), num_steps=1)
    tempfile_folder, tempfile.tempdir = tempfile.tempdir, str(tmp_path / "nowhere")
    try:
        campaign.train(policy)
    finally:
        tempfile.tempdir = tempfile_folder
    assert len(list_checkpoints(campaign.run.checkpoints)) == 1


def test_what_a_kill_has_left_is_removed_when_the_fit_goes_on(policy: Path, tmp_path: Path) -> None:
    campaign = Campaign(RunPaths(tmp_path), num_steps=1)
    half_policy = campaign.run.policies / ".step-000001.0123abcd.part"
    half_checkpoint = campaign.run.checkpoints / "step-000000.part"
    for path in (half_policy / "model.safetensors", half_checkpoint):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    campaign.train(policy)
    assert not half_policy.exists()
    assert not half_checkpoint.exists()


def test_a_policy_that_a_crash_has_cut_short_is_published_again(policy: Path, tmp_path: Path) -> None:
    whole = Campaign(RunPaths(tmp_path / "whole")).train(policy)
    killed = Campaign(RunPaths(tmp_path / "killed"), kill_when=lambda *now: now == ("collect", 2))
    with pytest.raises(Killed):
        killed.train(policy)
    (killed.run.policy(2) / "model.safetensors").write_bytes(b"half")
    killed.kill_when = lambda *now: False
    assert equal(killed.train(policy), whole)
    load_policy(killed.run.policy(2))


def test_bf16_trains_too(policy: Path, tmp_path: Path) -> None:
    campaign = Campaign(RunPaths(tmp_path), settings=replace(SETTINGS, precision="bf16-mixed"), num_steps=1)
    weights = campaign.train(policy)
    assert not equal(weights, load_file(policy / "model.safetensors"))
    assert all(weight.isfinite().all() for weight in weights.values())


def rows_of(run: RunPaths) -> list[dict[str, str]]:
    with (run.metrics / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


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


def test_offline_wandb_keeps_the_run_on_disk(policy: Path, tmp_path: Path) -> None:
    campaign = Campaign(RunPaths(tmp_path), settings=replace(SETTINGS, wandb="offline"), num_steps=1)
    campaign.train(policy)
    assert list((campaign.run.metrics / "wandb").glob("offline-run-*/*.wandb"))


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
                session.call(prompt, reply=(reply,))
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


def with_logprobs(call: CallRecord, logprobs: tuple[float, ...]) -> CallRecord:
    assert call.tokens is not None
    return replace(call, tokens=replace(call.tokens, sampling_logprobs=logprobs))


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
