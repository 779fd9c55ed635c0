"""Time from throughput: by hand for a small case, and how it changes with what one would change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clawhpc.campaign.settings import CampaignSettings
from clawhpc.credit.settings import CreditSettings
from clawhpc.estimate.decoder import KNOWN, Decoder
from clawhpc.estimate.memory import FP32
from clawhpc.estimate.rollouts import HarnessCost, step_tokens
from clawhpc.estimate.seconds import StepSeconds, Workers, draw_s, learn_s, step_seconds
from clawhpc.estimate.settings import PlanSettings
from clawhpc.learner.settings import CriticSettings, LearnerSettings, LossSettings
from clawhpc.serve.settings import EngineSettings

COST = HarnessCost(prompt_tokens=20_000, cpu_s=10.0, memory_gb=0.2)
ENGINE = EngineSettings(dtype="bfloat16")
LEARNER = LearnerSettings(epochs=1, token_budget=65_536)
PPO = CreditSettings(estimator="path_gae")
CAMPAIGN = CampaignSettings(groups_per_step=32, samples_per_group=8)
PLAN = PlanSettings()
TOKENS = step_tokens(CAMPAIGN, [COST], PLAN, row_tokens=65_536)
QWEN = KNOWN["Qwen3-4B"]


def seconds(
    workers: Workers | None = None, learner: LearnerSettings = LEARNER, decoder: Decoder = QWEN, **plan: Any
) -> StepSeconds:
    return step_seconds(
        decoder,
        TOKENS,
        [COST],
        workers or Workers(num=8, concurrency=32, num_cpus=16),
        ENGINE,
        learner,
        CreditSettings(),
        replace(PLAN, **plan),
        on_gpu=(True, True),
    )


def learning(learner: LearnerSettings = LEARNER, credit: CreditSettings | None = None) -> float:
    return learn_s(QWEN, TOKENS, learner, credit or CreditSettings(), PLAN, on_gpu=True)[0]


def test_a_token_for_one_rollout_takes_as_long_as_reading_the_weights_and_its_cache() -> None:
    plan = PlanSettings(draw_efficiency=0.5, gpu_bandwidth_gb_s=1000.0)
    read = 2 * QWEN.num_params + 147_456 * TOKENS.mean_keys
    assert draw_s(QWEN, ENGINE, plan, 1, TOKENS, on_gpu=True) == pytest.approx(read / 500e9)


def test_a_rollout_reads_its_prompt_and_what_is_new_in_all_beside_it() -> None:
    one = Workers(num=8, concurrency=1, num_cpus=16)
    slow, fast = seconds(one, gpu_tflops=100.0), seconds(one, gpu_tflops=1e9)
    num_read = COST.prompt_tokens + PLAN.calls * PLAN.result_tokens
    operations = num_read * (2 * QWEN.computed_params + 4 * 36 * 4096 * TOKENS.mean_keys)
    assert slow.rollout - fast.rollout == pytest.approx(operations / (PLAN.prefill_efficiency * 100e12), rel=1e-4)


def test_a_mixture_reads_the_experts_that_somebody_has_chosen() -> None:
    mixture, read = KNOWN["Qwen3-30B-A3B"], []
    no_cache = replace(TOKENS, mean_keys=0)
    for together in (1, 16, 1000):
        token_s = draw_s(mixture, ENGINE, PLAN, together, no_cache, on_gpu=True)
        read.append(token_s * PLAN.draw_efficiency * PLAN.gpu_bandwidth_gb_s * 1e9 / 2)
    assert read[0] == pytest.approx(mixture.active_params)
    assert mixture.active_params < read[1] < mixture.num_params
    assert read[2] == pytest.approx(mixture.num_params)


def test_tensor_parallel_draws_faster() -> None:
    two = replace(ENGINE, tensor_parallel_size=2)
    alone, shared = (draw_s(QWEN, engine, PLAN, 8, TOKENS, on_gpu=True) for engine in (ENGINE, two))
    assert shared == alone / 2


def test_rollouts_that_do_not_run_at_a_time_run_in_rounds() -> None:
    few = seconds(Workers(num=4, concurrency=16, num_cpus=16))
    assert few.rounds == 4
    assert few.collect == 4 * few.rollout
    assert seconds(Workers(num=8, concurrency=1000, num_cpus=16)).rounds == 1


@pytest.mark.parametrize(("num_workers", "together"), [(1, 20), (8, 20), (11, 20), (16, 16), (32, 8), (100, 8)])
def test_a_group_runs_on_one_worker_so_that_workers_without_one_are_of_no_use(num_workers: int, together: int) -> None:
    assert Workers(num=num_workers, concurrency=20, num_cpus=16).at_a_time(TOKENS) == together


def test_harnesses_that_start_together_share_their_cpus() -> None:
    wide, narrow = (seconds(Workers(num=8, concurrency=32, num_cpus=cpus)) for cpus in (32, 8))
    assert narrow.rollout - wide.rollout == pytest.approx(3 * COST.cpu_s)


def test_a_rollout_alone_on_many_cpus_starts_in_the_time_that_its_harness_takes() -> None:
    alone = seconds(Workers(num=8, concurrency=1, num_cpus=64), gpu_tflops=1e9, gpu_bandwidth_gb_s=1e9, tool_s=0.0)
    assert alone.rollout == pytest.approx(COST.cpu_s, rel=1e-3)


def test_learning_takes_three_forward_passes_four_with_checkpointing_and_each_update_again() -> None:
    once = learning()
    assert learning(replace(LEARNER, gradient_checkpointing=True)) == pytest.approx(4 / 3 * once)
    assert learning(replace(LEARNER, epochs=4)) == pytest.approx(4 * once)
    assert learning(replace(LEARNER, loss=LossSettings(kl_coef=0.1))) == pytest.approx(4 / 3 * once)
    assert learning(credit=PPO) == pytest.approx(7 / 3 * once)
    shared = replace(LEARNER, critic=CriticSettings(backbone="policy"))
    assert learning(shared, PPO) == pytest.approx(4 / 3 * once)


def test_a_forward_pass_is_two_operations_a_parameter_and_attention() -> None:
    plan = PlanSettings(learner_efficiency=0.5, gpu_tflops=100.0)
    operations = TOKENS.in_rows * (2 * QWEN.computed_params + 4 * 36 * 4096 * TOKENS.mean_keys)
    operations += 2 * QWEN.embedding_params * TOKENS.drawn  # the head sees what is drawn alone
    total, _ = learn_s(QWEN, TOKENS, LEARNER, CreditSettings(), plan, on_gpu=True)
    assert total == pytest.approx(3 * operations / 50e12)


def test_more_ranks_than_rows_are_of_no_use() -> None:
    assert TOKENS.num_rows == 128
    assert learning(replace(LEARNER, devices=8)) == pytest.approx(learning() / 8)
    assert learning(replace(LEARNER, devices=8, num_nodes=100)) == learning(replace(LEARNER, devices=128))


def test_a_policy_is_written_and_read_once_for_its_digest_and_a_checkpoint_in_part() -> None:
    found = seconds(learner=replace(LEARNER, checkpoint_every=10), disk_gb_s=2.0)
    policy = FP32 * QWEN.num_params / 2e9
    assert found.publish == pytest.approx(2 * policy + 3 * policy / 10)
    assert found.load == pytest.approx(policy)


def test_one_step_ahead_the_longer_part_decides() -> None:
    found = seconds()
    assert found.step(0) == pytest.approx(found.collect + found.load + found.learn + found.publish)
    assert found.step(1) == max(found.collect + found.load, found.learn + found.publish)
