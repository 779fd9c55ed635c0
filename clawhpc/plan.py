"""What a run will take, before anyone queues for a GPU: python -m clawhpc.plan [--json] experiment=…"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence

import msgspec

from clawhpc.command import EXIT_USER, FAILED, one_line_errors
from clawhpc.config import RunConfig, entry_point
from clawhpc.estimate.decoder import find_decoder
from clawhpc.estimate.memory import GIB
from clawhpc.estimate.misfit import find_misfits
from clawhpc.estimate.rollouts import harness_costs
from clawhpc.estimate.run import Asked, RunEstimate, estimate_run
from clawhpc.launch.settings import JobSettings

FITS = "It fits, as far as can be worked out."
Section = tuple[str, list[tuple[str, str]]]
"""A title, and rows of what and how much."""


@one_line_errors()
def main() -> None:
    """Exit code 0 when all fits, else 2, with a line on standard error for each thing that does not."""
    flags, sys.argv[1:] = parse_flags(sys.argv[1:])
    misfits: tuple[str, ...] = ()

    def plan(config: RunConfig) -> None:
        nonlocal misfits
        asked = asked_of(config)
        estimate = estimate_run(asked)
        misfits = find_misfits(asked, estimate)
        if flags.json:
            say_json(asked, estimate, misfits)
        else:
            print_tables([*sections(asked, estimate), assumptions(asked)])
            sys.stdout.write("" if misfits else f"\n{FITS}\n")

    entry_point(plan)()
    sys.stderr.writelines(f"{FAILED}{line}\n" for line in misfits)
    raise SystemExit(EXIT_USER if misfits else 0)


def parse_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own flag, and what is left for Hydra, which shows its help after ours."""
    parser = argparse.ArgumentParser(
        prog="python -m clawhpc.plan",
        usage="python -m clawhpc.plan [--json] [experiment=NAME] [KEY=VALUE ...]",
        description="Say what a run will take: memory, tokens, time, storage. What cannot fit is refused.",
        epilog="It takes the overrides of clawhpc.train, and plan.*, what it takes for granted. Nothing is started.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="say it in JSON")
    flags, overrides = parser.parse_known_args(arguments)
    if {"-h", "--help"}.intersection(overrides):
        sys.stdout.write(f"{parser.format_help()}\n")
    return flags, overrides


def asked_of(config: RunConfig) -> Asked:
    """What a configuration asks for. UserError where nothing says the shape of its policy."""
    folder = config.policy_folder()
    shape = config.policy.shape if config.policy.renderer is None else None  # sft's own has its chat format in it
    return Asked(
        folder=folder,
        decoder=find_decoder(folder, shape),
        costs=harness_costs({name: getattr(config.harness, name) for name in config.harness.names}),
        campaign=config.campaign,
        learner=config.learner_settings(),
        credit=config.credit,
        engine=config.engine,
        worker=config.worker,
        limits=config.limits,
        launch=config.launch,
        num_cpus=os.cpu_count(),
        ram_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        plan=config.plan if config.tasks.folder else config.plan.for_made_tasks(),
    )


def sections(asked: Asked, estimate: RunEstimate) -> Iterator[Section]:
    """The tables, in the order in which one asks."""
    yield "policy", list(_policy(asked, estimate))
    yield f"learner, each of {asked.num_ranks} ranks", list(_learner(asked, estimate))
    yield f"engine, each of {asked.workers.num} workers", list(_engine(asked, estimate))
    yield "a step", list(_step(asked, estimate))
    yield "time", list(_time(asked, estimate))
    yield "storage", list(_storage(asked, estimate))
    if asked.on_slurm:
        yield "jobs", list(_jobs(asked, estimate))


def _policy(asked: Asked, estimate: RunEstimate) -> Iterator[tuple[str, str]]:
    decoder = asked.decoder
    unseen = "" if (asked.folder / "config.json").is_file() else ", though the folder is not there yet"
    yield "shape", f"{asked.folder.name}, {decoder.num_layers} layers of {decoder.hidden_size}{unseen}"
    active = f", {_billions(decoder.active_params)} of them active" if decoder.num_experts else ""
    yield "parameters", f"{decoder.num_params:,} ({_billions(decoder.num_params)}{active})"
    if estimate.networks.critic:
        yield "critic", f"{estimate.networks.critic:,} ({asked.learner.critic.backbone} backbone)"
    if estimate.networks.reference:
        yield "reference", f"{estimate.networks.reference:,}"


def _learner(asked: Asked, estimate: RunEstimate) -> Iterator[tuple[str, str]]:
    memory, learner = estimate.learner, asked.learner
    yield "weights", _gib(memory.weights)
    yield "gradients", _gib(memory.gradients)
    yield "AdamW", _gib(memory.moments)
    if memory.reference:
        yield "reference", _gib(memory.reference)
    yield "gathered layers", _gib(memory.gathered)
    how = "recomputed in the backward pass" if learner.gradient_checkpointing else "kept for the backward pass"
    yield "activations", f"{_gib(memory.activations)}, {how}, a row of {learner.row_tokens:,} tokens"
    yield "with logits instead", f"{_gib(memory.logits)}, {learner.logit_chunk:,} at a time"
    of_gpu = f" of {asked.plan.gpu_memory_gib - asked.plan.reserve_gib:g} GiB" if asked.learner_on_gpu else " of RAM"
    yield "most at a time", _gib(memory.peak) + of_gpu
    yield "host of rank 0", f"{_on_disk(estimate.host.peak)} of RAM to load, publish and write checkpoints"


def _engine(asked: Asked, estimate: RunEstimate) -> Iterator[tuple[str, str]]:
    memory, engine = estimate.engine, asked.engine
    per = f"on each of {asked.engine_gpus} GPUs" if asked.engine_on_gpu else "of RAM"
    yield "weights", f"{_gib(memory.weights)} {per}"
    yield "cache", f"{_gib(memory.cache)}: {memory.cache_tokens:,} tokens of {memory.token_bytes / 1024:.0f} KiB"
    yield "rollouts in it", f"{estimate.cache_rollouts:.1f} with a whole window of {engine.max_model_len:,}, unshared"
    many = f"{estimate.together} (worker.concurrency={asked.worker.concurrency})"
    yield "rollouts at a time", f"{many}, which need {estimate.cache_share:.0%} of the cache at their end"


def _step(asked: Asked, estimate: RunEstimate) -> Iterator[tuple[str, str]]:
    campaign, tokens = asked.campaign, estimate.tokens
    yield "rollouts", f"{tokens.num_rollouts} = {campaign.groups_per_step} groups of {campaign.samples_per_group}"
    for name, cost in asked.costs.items():
        yield f"prompt of {name}", f"{cost.prompt_tokens:,} tokens"
    yield "longest context", f"{tokens.longest:,} tokens of {asked.engine.max_model_len:,}"
    yield "drawn", f"{tokens.drawn:,} tokens"
    yield "read", f"{tokens.read:,} tokens at most: prompts of harnesses once for each group, and what is new"
    yield "in rows", f"{tokens.in_rows:,} tokens in {tokens.num_rows} rows, {asked.learner.epochs} times"


def _time(asked: Asked, estimate: RunEstimate) -> Iterator[tuple[str, str]]:
    seconds = estimate.seconds
    yield "collect", f"{seconds.collect:.0f} s: {seconds.rounds} rounds of {seconds.rollout:.0f} s"
    yield "learn", f"{seconds.learn:.0f} s"
    yield "publish", f"{seconds.publish:.0f} s, checkpoints included; {seconds.load:.0f} s to load"
    yield "drawn by an engine", f"{seconds.drawn_per_s:,.0f} tokens/s"
    yield "learned by a rank", f"{seconds.learned_per_s:,.0f} tokens/s"
    at_once = "collecting and learning at the same time" if asked.learner.max_staleness else "one after the other"
    yield "step", f"{estimate.step_s:.0f} s, {at_once}"
    yield "run", f"{estimate.run_hours:.1f} h of {asked.campaign.num_steps} steps, without evaluation and queue"
    if estimate.num_gpus:
        yield "GPU hours", f"{estimate.gpu_hours:,.0f} on {estimate.num_gpus} GPUs"


def _storage(asked: Asked, estimate: RunEstimate) -> Iterator[tuple[str, str]]:
    storage = estimate.storage
    yield "rollouts of a step", _on_disk(storage.rollouts)
    policies = f"{storage.num_policies} of {asked.campaign.num_steps + 1}, {_on_disk(storage.policy)} each"
    yield "policies", f"{_on_disk(storage.num_policies * storage.policy)}: {policies}"
    kept = asked.learner.keep_checkpoints
    yield "checkpoints", f"{_on_disk(storage.checkpoints)}: {kept} that stay, and the next one"
    yield "run", _on_disk(storage.run)


def _jobs(asked: Asked, estimate: RunEstimate) -> Iterator[tuple[str, str]]:
    launch = asked.launch
    yield "campaign", f"{asked.learner.num_nodes} nodes, {_job(launch.campaign, launch.campaign.timeout_min)}"
    elements = f"{launch.num_workers} elements, {asked.workers.num} at a time"
    yield "workers", f"{elements}, {_job(launch.slurm, launch.timeout_min)}"
    turns = max(1.0, estimate.run_hours * 60 / launch.campaign.timeout_min)
    yield "turns of the campaign", f"{turns:.1f}, after each of which it is back in the queue"


def _job(job: JobSettings, timeout_min: int) -> str:
    gpus = f"{job.num_gpus or 0} GPUs" + (f" ({job.gres})" if job.gres else "")
    return f"each {gpus}, {job.cpus_per_task or '?'} CPUs, {job.mem_gb or '?'} GB, {timeout_min / 60:g} h"


def assumptions(asked: Asked) -> Section:
    """What all of it takes for granted."""
    plan = dataclasses.asdict(asked.plan)
    return "taken for granted, not measured", [(f"plan.{name}", f"{value:g}") for name, value in plan.items()]


def say_json(asked: Asked, estimate: RunEstimate, misfits: Sequence[str]) -> None:
    """One JSON text on standard output: bytes, tokens and seconds."""
    learner, engine = estimate.learner, estimate.engine
    derived = {
        "learner_peak_bytes": learner.peak,
        "host_peak_bytes": estimate.host.peak,
        "engine_cache_tokens": engine.cache_tokens,
        "num_params": asked.decoder.num_params,
        "active_params": asked.decoder.active_params,
    }
    said = {"fits": not misfits, "misfits": misfits, "derived": derived, "estimate": estimate, "plan": asked.plan}
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(said)).decode() + "\n")


def print_tables(tables: Sequence[Section]) -> None:
    """A title and its rows, one below the other."""
    from rich.console import Console  # a tenth of a second that --help need not spend
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    width = max(len(what) for _, rows in tables for what, _ in rows)
    for title, rows in tables:
        console.print(Text(title, style="bold"))
        table = Table.grid(padding=(0, 2, 0, 2))
        table.add_column(width=width)
        table.add_column(overflow="fold")
        for what, how_much in rows:
            table.add_row(Text(what), Text(how_much))
        console.print(table)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def _on_disk(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1e6:.1f} MB"


def _billions(num_params: int) -> str:
    return f"{num_params / 1e9:.2f} B" if num_params >= 1e8 else f"{num_params / 1e6:.1f} M"


if __name__ == "__main__":
    main()
