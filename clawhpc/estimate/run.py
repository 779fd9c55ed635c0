"""What one run takes, all of it together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from clawhpc.campaign.settings import CampaignSettings
from clawhpc.credit.settings import CreditSettings
from clawhpc.estimate.decoder import Decoder
from clawhpc.estimate.memory import (
    FP32,
    MOMENTS,
    EngineMemory,
    HostMemory,
    LearnerMemory,
    Networks,
    count_networks,
    engine_memory,
    host_memory,
    learner_memory,
)
from clawhpc.estimate.rollouts import HarnessCost, StepTokens, step_tokens
from clawhpc.estimate.seconds import GIGA, StepSeconds, Workers, step_seconds
from clawhpc.estimate.settings import PlanSettings
from clawhpc.launch.settings import LaunchSettings
from clawhpc.learner.settings import LearnerSettings
from clawhpc.records import Limits
from clawhpc.serve.settings import EngineSettings
from clawhpc.worker.settings import WorkerSettings

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a configuration asks for."""

    folder: Path
    """Of the policy, which need not be there."""
    decoder: Decoder
    costs: Mapping[str, HarnessCost]
    """Harness -> what it costs."""
    campaign: CampaignSettings
    learner: LearnerSettings
    """With the budget of its rows."""
    credit: CreditSettings
    engine: EngineSettings
    worker: WorkerSettings
    limits: Limits
    launch: LaunchSettings
    num_cpus: int | None
    """Of this machine, which a local worker has."""
    ram_bytes: int | None
    """Of this machine, which all that is local shares; None where nobody knows it."""
    plan: PlanSettings

    @property
    def on_slurm(self) -> bool:
        """Jobs have their resources from Slurm; else all share this machine."""
        return self.launch.cluster == "slurm"

    @property
    def engine_on_gpu(self) -> bool:
        """Engines have GPUs: they are asked for, or the engine is that of conf/engine/gpu.yaml."""
        return self.engine.dtype == "bfloat16" or (self.on_slurm and bool(self.launch.slurm.num_gpus))

    @property
    def learner_on_gpu(self) -> bool:
        """Its ranks have a GPU each."""
        asked = self.on_slurm and bool(self.launch.campaign.num_gpus)
        return self.learner.accelerator == "cuda" or (self.learner.accelerator == "auto" and asked)

    @property
    def engine_gpus(self) -> int:
        """Of one engine."""
        return self.engine.tensor_parallel_size * self.engine.data_parallel_size

    @property
    def num_ranks(self) -> int:
        """Of the learner."""
        return self.learner.devices * self.learner.num_nodes

    @property
    def workers(self) -> Workers:
        """Those that Slurm lets run at the same time."""
        at_once = self.launch.slurm.array_parallelism if self.on_slurm else None
        num = min(self.launch.num_workers, at_once or self.launch.num_workers)
        cpus = self.launch.slurm.cpus_per_task if self.on_slurm else self.num_cpus
        return Workers(num=num, concurrency=self.worker.concurrency, num_cpus=cpus)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """On the shared file system; bytes."""

    rollouts: float
    """Of a step."""
    policy: float
    """One PolicyVersion."""
    num_policies: int
    """That stay at the end, and one more while they are made, where any are removed."""
    checkpoints: float
    """Those that stay, and the one that is written."""
    run: float
    """The most at a time: at the end."""


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """What a run takes."""

    networks: Networks
    learner: LearnerMemory
    host: HostMemory
    engine: EngineMemory
    tokens: StepTokens
    seconds: StepSeconds
    storage: Storage
    worker_ram: float
    """Main memory of a worker, in bytes: its harnesses, and its engine where that has no GPU."""
    learner_ram: float
    """Main memory of the host of rank 0, in bytes: what that holds whole, or all of its ranks where none has a GPU."""
    together: int
    """Rollouts that run on one engine at the same time."""
    cache_rollouts: float
    """Rollouts whose whole window has room in the cache of one copy of the policy at the same time, each by itself."""
    cache_share: float
    """Of that cache, what all that run at a time need at their end, when they share the prompt of their harness; over 1
    means that some are put off, and read again.
    """
    num_gpus: int
    """Of learner and workers."""
    step_s: float
    run_hours: float
    gpu_hours: float


def estimate_run(asked: Asked) -> RunEstimate:
    """All of it."""
    engine = engine_memory(asked.decoder, asked.engine, asked.plan, on_gpu=asked.engine_on_gpu)
    costs = tuple(asked.costs.values())
    tokens = step_tokens(asked.campaign, costs, asked.plan, row_tokens=asked.learner.row_tokens)
    seconds = step_seconds(
        asked.decoder,
        tokens,
        costs,
        asked.workers,
        asked.engine,
        asked.learner,
        asked.credit,
        asked.plan,
        on_gpu=(asked.engine_on_gpu, asked.learner_on_gpu),
    )
    networks = count_networks(asked.decoder, asked.learner, asked.credit)
    step_s = seconds.step(asked.learner.max_staleness)
    hours = asked.campaign.num_steps * step_s / HOUR_S
    learner = learner_memory(asked.decoder, asked.learner, asked.credit)
    host = host_memory(asked.decoder, asked.learner, asked.credit)
    together = asked.workers.at_a_time(tokens)
    harness_ram = together * GIGA * max(cost.memory_gb for cost in costs)
    of_workers = asked.workers.num * asked.engine_gpus if asked.engine_on_gpu else 0
    gpus = of_workers + (asked.num_ranks if asked.learner_on_gpu and asked.on_slurm else 0)
    return RunEstimate(
        networks=networks,
        learner=learner,
        host=host,
        engine=engine,
        tokens=tokens,
        seconds=seconds,
        storage=_storage(asked, tokens, networks),
        worker_ram=harness_ram + (0 if asked.engine_on_gpu else asked.engine_gpus * engine.available),
        learner_ram=max(host.peak, 0 if asked.learner_on_gpu else asked.learner.devices * learner.peak),
        together=together,
        cache_rollouts=engine.cache_tokens / asked.engine.max_model_len,
        cache_share=_cache_share(asked, engine, tokens),
        num_gpus=gpus,
        step_s=step_s,
        run_hours=hours,
        gpu_hours=hours * gpus,
    )


def _cache_share(asked: Asked, engine: EngineMemory, tokens: StepTokens) -> float:
    together = asked.workers.at_a_time(tokens) / asked.engine.data_parallel_size
    body = asked.plan.calls * (asked.plan.reply_tokens + asked.plan.result_tokens)
    needed = sum(cost.prompt_tokens for cost in asked.costs.values()) + together * body
    return needed / max(1, engine.cache_tokens)


def _storage(asked: Asked, tokens: StepTokens, networks: Networks) -> Storage:
    learner, num_steps = asked.learner, asked.campaign.num_steps
    policy = FP32 * asked.decoder.num_params
    checkpoint = FP32 * (1 + MOMENTS) * networks.learned
    stay = sum(learner.keeps_policy(step, newest=num_steps) for step in range(num_steps + 1))
    num_policies = min(stay + 1, num_steps + 1)
    kept = min(learner.keep_checkpoints + 1, ceil(num_steps / learner.checkpoint_every))
    return Storage(
        rollouts=tokens.stored_bytes,
        policy=policy,
        num_policies=num_policies,
        checkpoints=kept * checkpoint,
        run=num_steps * tokens.stored_bytes + num_policies * policy + kept * checkpoint,
    )
