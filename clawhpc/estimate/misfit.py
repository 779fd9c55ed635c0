"""What cannot be as it is asked for: a line for each, which names the key and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import ceil

from clawhpc.estimate.memory import GIB
from clawhpc.estimate.run import Asked, RunEstimate
from clawhpc.estimate.seconds import GIGA
from clawhpc.launch.settings import JobSettings


def find_misfits(asked: Asked, estimate: RunEstimate) -> tuple[str, ...]:
    """Empty where all fits."""
    return tuple(
        chain(
            _of_engine(asked, estimate),
            _of_learner(asked, estimate),
            _of_shared_gpu(asked, estimate),
            _of_this_machine(asked, estimate),
            _of_jobs(asked, estimate),
            _of_windows(asked, estimate),
            _of_rollouts(asked, estimate),
            _of_stalls(asked),
            _of_groups(asked),
        )
    )


def _of_engine(asked: Asked, estimate: RunEstimate) -> Iterator[str]:
    settings, memory, decoder = asked.engine, estimate.engine, asked.decoder
    tensor = settings.tensor_parallel_size
    if decoder.num_heads % tensor:
        yield (
            f"engine.tensor_parallel_size={tensor}: the policy has {decoder.num_heads} attention heads; "
            "set it to a number that divides them"
        )
    if decoder.num_experts and settings.data_parallel_size > 1:
        yield (
            f"engine.data_parallel_size={settings.data_parallel_size}: the policy has experts; set it to 1, and raise "
            "launch.num_workers"
        )
    if asked.engine_on_gpu and memory.weights + memory.others >= memory.available:
        yield (
            f"engine.tensor_parallel_size={tensor}: {_gib(memory.weights)} of weights and {_gib(memory.others)} beside "
            f"them on each GPU, of {_gib(memory.available)} that are the engine's; raise it, or "
            f"engine.gpu_memory_utilization={settings.gpu_memory_utilization}"
        )
    elif estimate.cache_rollouts < 1:
        raised = "engine.tensor_parallel_size or engine.gpu_memory_utilization"
        yield (
            f"engine.max_model_len={settings.max_model_len}: an engine's cache holds {memory.cache_tokens} tokens, not "
            f"one rollout's window; lower it, or raise {raised if asked.engine_on_gpu else 'engine.kv_cache_gib'}"
        )


def _of_learner(asked: Asked, estimate: RunEstimate) -> Iterator[str]:
    if not asked.learner_on_gpu:
        return
    room = (asked.plan.gpu_memory_gib - asked.plan.reserve_gib) * GIB
    memory = estimate.learner
    if memory.peak > room:
        parts = (
            f"{_gib(memory.held)} of weights, gradients and optimizer, {_gib(memory.gathered)} of gathered layers, "
            f"{_gib(max(memory.activations, memory.logits))} for a row"
        )
        yield (
            f"learner.devices={asked.learner.devices}, learner.num_nodes={asked.learner.num_nodes}: a rank needs "
            f"{_gib(memory.peak)} ({parts}), and has {_gib(room)}; {_advice(asked, estimate)}"
        )


def _advice(asked: Asked, estimate: RunEstimate) -> str:
    """What helps, most of all first."""
    learner, memory = asked.learner, estimate.learner
    ways = ["raise learner.num_nodes or learner.devices"]
    if not learner.mixed:
        ways.append("set learner.precision=bf16-mixed")
    if not learner.gradient_checkpointing:
        ways.insert(0, "set learner.gradient_checkpointing=true")
    if asked.decoder.num_experts % asked.num_ranks:
        ways.append(f"take a number of ranks that divides its {asked.decoder.num_experts} experts")
    if memory.logits > memory.activations:
        ways.insert(0, f"lower learner.logit_chunk={learner.logit_chunk}")
    else:
        ways.append(f"lower learner.token_budget={learner.row_tokens}")
    if asked.credit.needs_critic and learner.critic.backbone == "own":
        ways.append("set learner.critic.backbone=policy")
    return ", ".join(ways)


def _of_shared_gpu(asked: Asked, estimate: RunEstimate) -> Iterator[str]:
    """Where nothing is Slurm's, learner and engine share the first GPU."""
    if asked.on_slurm or not (asked.engine_on_gpu and asked.learner_on_gpu):
        return
    room = asked.plan.gpu_memory_gib * GIB
    if estimate.engine.available + estimate.learner.peak > room:
        yield (
            f"engine.gpu_memory_utilization={asked.engine.gpu_memory_utilization}: the engine's "
            f"{_gib(estimate.engine.available)} and the learner's {_gib(estimate.learner.peak)} are on one GPU of "
            f"{_gib(room)}; lower it, or give each its own with launch=slurm"
        )


def _of_this_machine(asked: Asked, estimate: RunEstimate) -> Iterator[str]:
    """Where nothing is Slurm's, all share its main memory."""
    if asked.on_slurm or asked.ram_bytes is None:
        return
    workers = asked.workers.num * estimate.worker_ram
    if workers + estimate.learner_ram > asked.ram_bytes:
        engines = "" if asked.engine_on_gpu else f", engine.kv_cache_gib={asked.engine.kv_cache_gib:g}"
        yield (
            f"worker.concurrency={asked.worker.concurrency}{engines}: workers take {_gb(workers)}, the learner "
            f"{_gb(estimate.learner_ram)}, and this machine has {_gb(asked.ram_bytes)}; lower them, take a smaller "
            "policy, or give each part a host of its own with launch=slurm"
        )


def _gpus_of(key: str, job: JobSettings) -> str:
    """The setting that says how many GPUs `job` asks for."""
    return f"{key}.gpus_per_node={job.gpus_per_node}" if job.gpus_per_node is not None else f"{key}.gres={job.gres}"


def _of_jobs(asked: Asked, estimate: RunEstimate) -> Iterator[str]:
    if not asked.on_slurm:
        return
    workers, campaign = asked.launch.slurm, asked.launch.campaign
    have = workers.num_gpus
    if asked.engine_on_gpu and have is not None and have < asked.engine_gpus:
        yield (
            f"{_gpus_of('launch.slurm', workers)}: an engine takes {asked.engine_gpus} GPUs "
            "(engine.tensor_parallel_size times engine.data_parallel_size)"
        )
    have = campaign.num_gpus
    if asked.learner_on_gpu and have is not None and have < asked.learner.devices:
        asks = _gpus_of("launch.campaign", campaign)
        yield f"{asks}: learner.devices={asked.learner.devices} takes a GPU each"
    if campaign.mem_gb is not None and estimate.learner_ram > campaign.mem_gb * GIGA:
        written = "checkpoint" if estimate.host.checkpoint == estimate.host.peak else "policy"
        needs = f"rank 0 holds {_gb(estimate.learner_ram)} when it writes a {written}"
        if not asked.learner_on_gpu:
            needs = f"the learner takes {_gb(estimate.learner_ram)}"
        yield f"launch.campaign.mem_gb={campaign.mem_gb:g}: {needs}; raise it"
    again_s = asked.learner.checkpoint_every * (estimate.seconds.learn + estimate.seconds.publish)
    if again_s > 60 * campaign.timeout_min:
        yield (
            f"launch.campaign.timeout_min={campaign.timeout_min}: the next turn begins at the last checkpoint, and "
            f"none gets to the next one: learner.checkpoint_every={asked.learner.checkpoint_every} steps take "
            f"{again_s / 60:.0f} minutes to learn; raise it, or lower that"
        )
    if workers.mem_gb is not None and estimate.worker_ram > workers.mem_gb * GIGA:
        engine = "" if asked.engine_on_gpu else " and their engine"
        yield (
            f"launch.slurm.mem_gb={workers.mem_gb:g}: {estimate.together} harnesses at a time{engine} take "
            f"{_gb(estimate.worker_ram)}; raise it, or lower worker.concurrency={asked.worker.concurrency}"
        )


def _of_windows(asked: Asked, estimate: RunEstimate) -> Iterator[str]:
    window, positions = asked.engine.max_model_len, asked.decoder.num_positions
    if positions is not None and window > positions:
        yield f"engine.max_model_len={window}: the policy has {positions} positions; set it to at most {positions}"
    for name, cost in asked.costs.items():
        if cost.prompt_tokens + asked.worker.max_output_tokens > window:
            yield (
                f"engine.max_model_len={window}: the prompt of {name} has about {cost.prompt_tokens} tokens, and a "
                f"reply up to worker.max_output_tokens={asked.worker.max_output_tokens}; raise it, or lower that"
            )
    if estimate.tokens.longest > window:
        yield (
            f"engine.max_model_len={window}: a rollout of {asked.plan.calls} calls ends with "
            f"{estimate.tokens.longest} tokens; raise it, or expect less (plan.calls, plan.result_tokens)"
        )
    if estimate.tokens.longest > asked.learner.row_tokens:
        yield (
            f"learner.token_budget={asked.learner.row_tokens}: a path of {estimate.tokens.longest} tokens fits into no "
            "row, and would not train; raise it"
        )


def _of_rollouts(asked: Asked, estimate: RunEstimate) -> Iterator[str]:
    limits, plan, seconds = asked.limits, asked.plan, estimate.seconds
    left_s = limits.harness_s
    if seconds.rollout > left_s:
        yield (
            f"limits.deadline_s={limits.deadline_s:g}: a rollout takes {seconds.rollout:.0f} s, and has {left_s:.0f} s "
            f"before limits.reserve_s; raise it, or lower worker.concurrency={asked.worker.concurrency}, of which "
            f"{estimate.together} draw from one engine"
        )
    if plan.calls > limits.max_calls:
        yield f"limits.max_calls={limits.max_calls}: ends a rollout of plan.calls={plan.calls}; raise it"
    if plan.calls * plan.reply_tokens > limits.max_sampled_tokens:
        yield (
            f"limits.max_sampled_tokens={limits.max_sampled_tokens}: ends a rollout that draws "
            f"{plan.calls * plan.reply_tokens}; raise it"
        )
    if plan.reply_tokens > asked.worker.max_output_tokens:
        yield (
            f"worker.max_output_tokens={asked.worker.max_output_tokens}: cuts a reply of "
            f"plan.reply_tokens={plan.reply_tokens}; raise it"
        )
    if seconds.load > asked.engine.load_timeout_s:
        yield (
            f"engine.load_timeout_s={asked.engine.load_timeout_s:g}: new weights take {seconds.load:.0f} s to read at "
            f"plan.disk_gb_s={plan.disk_gb_s:g}; raise it"
        )


def _of_stalls(asked: Asked) -> Iterator[str]:
    """No rollout ends while an engine does not start, nor in the attempts that follow."""
    limits, worker, engine, stall_min = asked.limits, asked.worker, asked.engine, asked.campaign.stall_min
    needed_s = worker.max_failed_starts * engine.startup_timeout_s + worker.max_attempts * limits.deadline_s
    if needed_s > 60 * stall_min:
        yield (
            f"campaign.stall_min={stall_min:g}: less than {worker.max_failed_starts} starts of "
            f"engine.startup_timeout_s={engine.startup_timeout_s:g} and {worker.max_attempts} attempts of "
            f"limits.deadline_s={limits.deadline_s:g}; raise it to {ceil(needed_s / 60)}"
        )


def _of_groups(asked: Asked) -> Iterator[str]:
    campaign = asked.campaign
    if not asked.credit.needs_critic and campaign.samples_per_group < 2:
        yield (
            "campaign.samples_per_group=1: a rollout is compared with the others of its group, and there are none; "
            "raise it, or take algorithm=ppo"
        )
    if asked.worker.concurrency > asked.engine.max_num_seqs * asked.engine.data_parallel_size:
        yield (
            f"engine.max_num_seqs={asked.engine.max_num_seqs}: fewer than worker.concurrency="
            f"{asked.worker.concurrency} rollouts, of which the others would wait; raise it"
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GIGA:.0f} GB"
