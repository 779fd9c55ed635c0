"""What of Slurm works from here, and what its partitions allow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from clawhpc.checkup.finding import Finding, State, lacking
from clawhpc.checkup.machine import Machine

TOOLS = ("sbatch", "srun", "squeue", "sacct", "sinfo", "scontrol", "scancel")
NODES_FORMAT = "%P|%a|%l|%D|%c|%m|%G"
"""For sinfo: partition (the default one with a star), up or not, time limit, nodes, cores, MB of memory, gres."""
NO_PARTITION = "there is no default one"
MINUTES_PER_DAY = 24 * 60


@dataclass(frozen=True, kw_only=True)
class SlurmNeeds:
    """What the workers of a campaign ask of Slurm, or its own job does."""

    needed: bool
    """Whether its workers are Slurm jobs."""
    partition: str | None = None
    """One, or several with commas between, of which Slurm takes the first that is free; None: the cluster's default."""
    timeout_min: int = 60
    num_workers: int = 1
    num_gpus: int = 0
    """Of one node, as are those below."""
    num_cores: int = 1
    memory_gib: float = 0.0
    settings: str = "launch.slurm"
    """Which are to be changed where that is too much."""
    timeout: str = "launch.timeout_min"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Nodes of one kind in one partition."""

    name: str
    is_default: bool
    is_up: bool
    limit_min: float
    """Of one job; infinite where there is none."""
    num_cores: int
    memory_gib: float
    num_gpus: int
    text: str
    """For a person."""


def check_slurm(machine: Machine, needs: SlurmNeeds, campaign: SlurmNeeds | None = None) -> list[Finding]:
    """A row for each part of Slurm that campaigns rely on. `needs` are those of workers, `campaign` of its own job."""
    row = partial(_row, needs)
    absent = [tool for tool in TOOLS if machine.find(tool) is None]
    if absent:
        found = "not on this machine" if len(absent) == len(TOOLS) else f"no {', '.join(absent)}"
        return [row("Slurm", False, found, "module load slurm, or log in to a login node")]
    told = machine.ask("scontrol", "show", "config")
    if not told.ok:
        found = f"the controller does not answer: {told.reason}"
        return [row("Slurm", False, found, "scontrol ping; or log in to a login node")]
    settings = read_settings(told.output)
    found = f"{settings.get('SLURM_VERSION', '?')}, cluster {settings.get('ClusterName', '?')}; the controller answers"
    return [
        row("Slurm", True, found, ""),
        check_accounting(machine, settings, needs),
        check_requeue(settings),
        check_arrays(settings, needs),
        check_tracking(settings),
        *check_partitions(read_partitions(machine.ask("sinfo", "-h", "-o", NODES_FORMAT).output), needs, campaign),
    ]


def _row(needs: SlurmNeeds, what: str, works: bool, found: str, remedy: str) -> Finding:
    state = State.WORKS if works else lacking(needs.needed)
    return Finding(what=what, state=state, found=found, remedy=remedy if state is State.MISSING else "")


def read_settings(text: str) -> dict[str, str]:
    """What `scontrol show config` prints, by name."""
    pairs = (line.partition("=") for line in text.splitlines() if " = " in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def check_accounting(machine: Machine, settings: dict[str, str], needs: SlurmNeeds) -> Finding:
    """Whether Slurm says how a job has ended; if it keeps no accounts, who lives is looked up in its queue."""
    what = "Slurm accounting"
    if not settings.get("AccountingStorageType", "").endswith("slurmdbd"):
        found, remedy = "off: why a worker has died is not known", "ask for accounting (slurmdbd)"
        return Finding(what=what, state=State.LIMITED, found=found, remedy=remedy)
    asked = machine.ask("sacct", "-n", "-X", "-o", "jobid", "-S", "now-1minutes")
    return _row(needs, what, asked.ok, "sacct answers" if asked.ok else asked.reason, "sacct -X; ask for slurmdbd")


def check_requeue(settings: dict[str, str]) -> Finding:
    """That a job which is preempted or out of time is queued again: where that is not the rule, ours ask for it."""
    is_rule = settings.get("JobRequeue") == "1"
    found = "jobs are queued again" if is_rule else "jobs are queued again if they ask for it, as ours do"
    return Finding(what="Slurm requeue", state=State.WORKS, found=found)


def check_arrays(settings: dict[str, str], needs: SlurmNeeds) -> Finding:
    """Whether an array may have as many elements as there are to be workers."""
    most = max(0, int(settings.get("MaxArraySize", "0")) - 1)
    found = f"up to {most} elements in one"
    if needs.num_workers <= most:
        return Finding(what="Slurm arrays", state=State.WORKS, found=found)
    remedy = f"launch.num_workers={most}" if most else "ask for MaxArraySize in slurm.conf"
    return Finding(what="Slurm arrays", state=lacking(needs.needed), found=found, remedy=remedy)


def check_tracking(settings: dict[str, str]) -> Finding:
    """Whether Slurm ends every process of a job that it ends."""
    what, kind = "Slurm process tracking", settings.get("ProctrackType", "")
    if kind.endswith("cgroup"):
        return Finding(what=what, state=State.WORKS, found=kind)
    found = f"{kind}: processes that leave their session outlive their job; our watchdog ends ours"
    remedy = "on a node that lost power or its slurmd: python -m clawhpc.doctor --clean"
    return Finding(what=what, state=State.LIMITED, found=found, remedy=remedy)


def read_partitions(text: str) -> list[Partition]:
    """What sinfo prints in NODES_FORMAT."""
    rows = (line.split("|") for line in text.splitlines())
    return [_partition(*row) for row in rows if len(row) == NODES_FORMAT.count("|") + 1]


def _partition(name: str, up: str, limit: str, nodes: str, cores: str, memory_mb: str, gres: str) -> Partition:
    gib = _number(memory_mb) / 1024
    text = f"{up}, {nodes} nodes of {cores} cores, {gib:.1f} GiB, gres {gres.replace('(null)', 'none')}, time {limit}"
    return Partition(
        name=name.rstrip("*"),
        is_default=name.endswith("*"),
        is_up=up == "up",
        limit_min=minutes(limit),
        num_cores=_number(cores),
        memory_gib=gib,
        num_gpus=count_gpus(gres),
        text=text,
    )


def count_gpus(gres: str) -> int:
    """In `gpu:h200:4(S:0-1),gpu:2`, say; a `gpu` without a number is one."""
    counts = [kind.rpartition(":")[2] for kind in re.findall(r"\bgpu(?::[^:,()]*)*", gres)]
    return sum(int(count) if count.isdecimal() else 1 for count in counts)


def _number(text: str) -> int:
    """Of several kinds of nodes in one line Slurm gives the least, and a plus."""
    return int(re.sub(r"\D", "", text) or 0)


def minutes(limit: str) -> float:
    """A time limit of Slurm: `infinite`, `days-hours:minutes:seconds`, `hours:minutes:seconds`, `minutes:seconds`."""
    if not limit[:1].isdigit():
        return float("inf")
    days, _, clock = limit.rpartition("-")
    *hours, minute, _ = (int(part) for part in clock.split(":"))
    return int(days or 0) * MINUTES_PER_DAY + 60 * sum(hours) + minute


def check_partitions(
    partitions: Iterable[Partition], needs: SlurmNeeds, campaign: SlurmNeeds | None = None
) -> list[Finding]:
    """A row for those that workers may go to, one for those of the campaign's own job, and one for all others."""
    known = list(partitions)
    chosen = _chosen(known, needs)
    rows = [_judge_partition("partition", known, needs)]
    if campaign is not None:
        chosen += _chosen(known, campaign)
        rows.append(_judge_partition("campaign's partition", known, campaign))
    others = [f"{one.name}: {one.text}" for one in known if one not in chosen]
    if others:
        rows.append(Finding(what="other partitions", state=State.WORKS, found="\n".join(others)))
    return rows


def _names(needs: SlurmNeeds) -> list[str]:
    """As sbatch reads them; empty for the default one."""
    return [name for name in (needs.partition or "").split(",") if name]


def _chosen(known: Iterable[Partition], needs: SlurmNeeds) -> list[Partition]:
    names = _names(needs)
    return [one for one in known if (one.name in names if names else one.is_default)]


def _judge_partition(prefix: str, known: Sequence[Partition], needs: SlurmNeeds) -> Finding:
    """One that has what is asked for is enough; one that is not there makes Slurm refuse them all."""
    row, names, chosen = partial(_row, needs), _names(needs), _chosen(known, needs)
    choose = f"{needs.settings}.partition=NAME, NAME one of: " + ", ".join(dict.fromkeys(one.name for one in known))
    absent = [name for name in names if name not in {one.name for one in chosen}]
    if absent or not chosen:
        return row(prefix, False, f"no {', '.join(absent)}" if absent else NO_PARTITION, choose)
    what = f"{prefix} {','.join(names) or chosen[0].name}"
    found = "\n".join(f"{one.name}: {one.text}" if len(names) > 1 else one.text for one in chosen)
    best = min(chosen, key=lambda one: (not one.is_up, len(_too_much(one, needs))))
    if not best.is_up:
        return row(what, False, found, choose)
    excess = _too_much(best, needs)
    return row(what, not excess, "\n".join([found, *excess]), " ".join(excess.values()) or choose)


def _too_much(nodes: Partition, needs: SlurmNeeds) -> dict[str, str]:
    """What is asked for and these nodes do not have, and what to ask for instead."""
    wanted = (
        ("minutes", needs.timeout_min, nodes.limit_min, needs.timeout),
        ("GPUs", needs.num_gpus, nodes.num_gpus, f"{needs.settings}.gpus_per_node"),
        ("cores", needs.num_cores, nodes.num_cores, f"{needs.settings}.cpus_per_task"),
        ("GiB", needs.memory_gib, nodes.memory_gib, f"{needs.settings}.mem_gb"),
    )
    excess = [one for one in wanted if one[1] > one[2]]
    return {f"{asked:g} {unit} are asked for": f"{key}={int(have)}" for unit, asked, have, key in excess}
