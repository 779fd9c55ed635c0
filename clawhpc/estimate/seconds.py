"""How long a step takes, from stated throughput: a roofline, with how much of it is assumed to be reached.

collect   rounds of as many rollouts as run at a time. A rollout starts, and then n times reads what is new, draws a
          reply and waits for its tool. A token is drawn for all that run on one engine at once, in the time in which
          the GPU reads the weights and the keys and values of all of them
          A token takes 2 A + 4 L Q S operations (A: parameters that it is multiplied with; S: tokens that it looks at)
learn     rounds of one row for each rank, `epochs` times forward, of as many operations for each token, twice that
          backward, and once more with checkpointing; values and a reference take a forward pass of their own
publish   weights in fp32: written, and read for their digest; a checkpoint, every so many steps
load      weights in fp32, by all engines at the same time
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from clawhpc.credit.settings import CreditSettings
from clawhpc.estimate.decoder import Decoder
from clawhpc.estimate.memory import BYTES, FP32, MOMENTS, count_networks
from clawhpc.estimate.rollouts import HarnessCost, StepTokens
from clawhpc.estimate.settings import PlanSettings
from clawhpc.learner.settings import LearnerSettings
from clawhpc.serve.settings import EngineSettings

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What collects at the same time."""

    num: int
    concurrency: int
    """Rollouts of each."""
    num_cpus: int | None
    """Of each; None where nobody has said it."""

    def at_a_time(self, tokens: StepTokens) -> int:
        """Rollouts of a step that run on one worker together: of whole groups, for each has one worker."""
        return min(self.concurrency, ceil(tokens.num_groups / self.num) * tokens.num_rollouts // tokens.num_groups)


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Of one step."""

    rollout: float
    """One rollout, from start to end."""
    rounds: int
    """Of rollouts, one after the other on the same place."""
    collect: float
    learn: float
    publish: float
    """With a step's share of a checkpoint."""
    load: float
    drawn_per_s: float
    """Tokens, by one engine."""
    learned_per_s: float
    """Tokens in rows, by each rank in each pass."""

    def step(self, max_staleness: int) -> float:
        """From one step to the next."""
        ours, theirs = self.learn + self.publish, self.collect + self.load
        return max(ours, theirs) if max_staleness else ours + theirs


def step_seconds(
    decoder: Decoder,
    tokens: StepTokens,
    costs: Sequence[HarnessCost],
    workers: Workers,
    engine: EngineSettings,
    learner: LearnerSettings,
    credit: CreditSettings,
    plan: PlanSettings,
    *,
    on_gpu: tuple[bool, bool],
) -> StepSeconds:
    """`on_gpu`: the engines, the learner."""
    together = workers.at_a_time(tokens)
    token_s = draw_s(decoder, engine, plan, together, tokens, on_gpu=on_gpu[0])
    read_s = token_operations(decoder, tokens) / (_engine_tflops(engine, plan, on_gpu[0]) * TERA)
    new = plan.calls * plan.result_tokens * together / engine.data_parallel_size
    cpu_s = [cost.cpu_s for cost in costs]
    start_s = max([*cpu_s, sum(cpu_s) / len(cpu_s) * together / (workers.num_cpus or together)])
    reading_s = (max(cost.prompt_tokens for cost in costs) + new) * read_s  # others' prompts are read in between
    rollout = start_s + reading_s + plan.calls * (plan.reply_tokens * token_s + plan.tool_s)
    rounds = ceil(tokens.num_rollouts / (workers.num * together))
    learn, learned_per_s = learn_s(decoder, tokens, learner, credit, plan, on_gpu=on_gpu[1])
    disk = plan.disk_gb_s * GIGA
    checkpoint = FP32 * (1 + MOMENTS) * count_networks(decoder, learner, credit).learned / disk
    return StepSeconds(
        rollout=rollout,
        rounds=rounds,
        collect=rounds * rollout,
        learn=learn,
        publish=2 * FP32 * decoder.num_params / disk + checkpoint / learner.checkpoint_every,
        load=FP32 * decoder.num_params / disk,
        drawn_per_s=together / token_s,
        learned_per_s=learned_per_s,
    )


def token_operations(decoder: Decoder, tokens: StepTokens) -> float:
    """Of a token's way through the layers."""
    return 2 * decoder.computed_params + 4 * decoder.num_layers * decoder.query_width * tokens.mean_keys


def _engine_tflops(engine: EngineSettings, plan: PlanSettings, on_gpu: bool) -> float:
    """Of one copy of the policy."""
    return plan.prefill_efficiency * (plan.gpu_tflops * engine.tensor_parallel_size if on_gpu else plan.cpu_tflops)


def draw_s(
    decoder: Decoder, engine: EngineSettings, plan: PlanSettings, together: int, tokens: StepTokens, *, on_gpu: bool
) -> float:
    """For one more token of each of `together` rollouts."""
    width = BYTES[engine.dtype]
    on_a_copy = ceil(together / engine.data_parallel_size)
    idle = (1 - decoder.num_chosen / decoder.num_experts) ** on_a_copy if decoder.num_experts else 0.0
    experts = decoder.num_layers * decoder.num_experts * decoder.expert_params
    weights = width * (decoder.num_params - experts * idle)  # experts that nobody has chosen are not read
    cache = 2 * decoder.num_layers * decoder.key_width * width * on_a_copy * tokens.mean_keys
    bandwidth = plan.gpu_bandwidth_gb_s * engine.tensor_parallel_size if on_gpu else plan.cpu_bandwidth_gb_s
    return (weights + cache) / (plan.draw_efficiency * bandwidth * GIGA)


def learn_s(
    decoder: Decoder,
    tokens: StepTokens,
    learner: LearnerSettings,
    credit: CreditSettings,
    plan: PlanSettings,
    *,
    on_gpu: bool,
) -> tuple[float, float]:
    """Of all updates of a step; and tokens of a row in a second, in an update."""
    num_ranks = learner.devices * learner.num_nodes
    tflops = plan.learner_efficiency * (plan.gpu_tflops if on_gpu else plan.cpu_tflops)
    head = 2 * decoder.embedding_params * tokens.drawn / tokens.in_rows
    forward_s = (token_operations(decoder, tokens) + head) / (tflops * TERA)
    own_critic = credit.needs_critic and learner.critic.backbone == "own"
    passes = 4 if learner.gradient_checkpointing else 3
    before = int(credit.needs_critic) + int(learner.loss.kl_coef > 0)
    row_s = forward_s * tokens.in_rows / tokens.num_rows
    rounds = ceil(tokens.num_rows / num_ranks)
    total = learner.epochs * passes * (2 if own_critic else 1) + before
    return rounds * total * row_s, 1 / (passes * forward_s)
