"""What a campaign does around the learner, on a policy so small that a step takes milliseconds."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch.loggers import Logger
from safetensors.torch import load_file

from clawhpc.credit.settings import CreditSettings
from clawhpc.learner.hosts import THIS_HOST, Host
from clawhpc.learner.settings import CriticSettings, LearnerSettings, LossSettings, PolicySettings
from clawhpc.learner.trainer import LearnerPaths, fit_rl
from clawhpc.paths import RunPaths
from clawhpc.records import CallRecord, RolloutRecord
from clawhpc.store import read_policy
from tests.fakes.records import make_group, make_record
from tests.fakes.session import Session
from tests.fakes.workers import Killed

SMALL = PolicySettings(num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=32)
SETTINGS = LearnerSettings(lr=1e-2, warmup_steps=1, epochs=2, token_budget=200)
NUM_STEPS = 4
OWN_CRITIC = CriticSettings(backbone="own", lr=1e-2)
SHARED_CRITIC = CriticSettings(backbone="policy", lr=1e-2)
ALGORITHMS: dict[str, tuple[LearnerSettings, CreditSettings]] = {
    "grpo": (SETTINGS, CreditSettings()),
    "grpo with a reference": (replace(SETTINGS, loss=LossSettings(kl_coef=0.1)), CreditSettings()),
    "ppo": (replace(SETTINGS, critic=OWN_CRITIC), CreditSettings(estimator="path_gae")),
    "ppo with one backbone": (
        replace(SETTINGS, critic=SHARED_CRITIC),
        CreditSettings(estimator="tree_gae", gae_lambda=0.9),
    ),
}


def rollouts(step: int) -> list[RolloutRecord]:
    """Two groups of two rollouts, each of two calls; the same for the same step."""
    rng = random.Random(step)
    records = []
    for task in ("a", "b"):
        group = make_group(task, step=step)
        for sample in range(2):
            session = Session()
            first = session.call((1, 2, 3, 4), reply=(rng.randrange(250), rng.randrange(250)), version=step)
            session.call((1, 2, 3, 4), first, (9, 8), reply=(rng.randrange(250),), version=step)
            records.append(make_record(group, sample, rng.choice([0.0, 0.5, 1.0]), calls=tuple(session.calls)))
    return records


@dataclass
class Campaign:
    """What a campaign does around the learner: collect, say where policies go, die."""

    run: RunPaths
    collect: Callable[[int], Sequence[RolloutRecord] | None] = rollouts
    settings: LearnerSettings = SETTINGS
    credit: CreditSettings = field(default_factory=CreditSettings)
    num_steps: int = NUM_STEPS
    logger: Logger | Literal[False] = False
    hosts: Sequence[Host] = (THIS_HOST,)
    by_harness: bool = False
    kill_when: Callable[[str, int], bool] = lambda event, step: False
    events: list[tuple[str, int]] = field(default_factory=list)

    def train(self, policy: Path) -> dict[str, torch.Tensor]:
        last = fit_rl(
            self.settings,
            self.credit,
            policy=policy,
            num_steps=self.num_steps,
            collect=self._collect,
            policy_folder=self._policy_folder,
            paths=LearnerPaths(checkpoints=self.run.checkpoints, metrics=self.run.metrics),
            logger=self.logger,
            hosts=self.hosts,
            by_harness=self.by_harness,
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


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """To a thousandth of a step of `lr`. Only the order of sums differs, by 1e-7 of a gradient; but AdamW divides by
    its size, and where a gradient is next to nothing, that is 3e-4 of a step.
    """
    assert left.keys() == right.keys()
    return all((left[name] - right[name]).abs().max() < 1e-3 * SETTINGS.lr for name in left)


def rows_of(run: RunPaths) -> list[dict[str, str]]:
    with (run.metrics / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def with_logprobs(call: CallRecord, logprobs: tuple[float, ...]) -> CallRecord:
    assert call.tokens is not None
    return replace(call, tokens=replace(call.tokens, sampling_logprobs=logprobs))
