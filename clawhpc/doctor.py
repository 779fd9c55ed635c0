"""What of this machine or cluster works, and what to do about the rest: python -m clawhpc.doctor [--json] [--clean]"""

from __future__ import annotations

import argparse
import getpass
import os
import shlex
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from clawhpc.checkup import containers, files, gpus, harnesses, host, kernel, packages, slurm, tracking
from clawhpc.checkup.finding import Check, Finding, State, of_other_hosts, run_checks
from clawhpc.checkup.machine import Machine, ThisMachine
from clawhpc.command import one_line_errors
from clawhpc.config import RunConfig, entry_point
from clawhpc.errors import UserError
from clawhpc.launch.settings import JobSettings
from clawhpc.ledger import Ledger, clear_remains, default_root, find_remains
from clawhpc.sandbox.apptainer import find_apptainer

LONG_S = 7.5
"""For checks that ask several programs. All are made at once, so this is also the longest that anyone waits."""
INDENT = "  "
ALL_WELL = "All that this configuration needs works."
COLOURS = {State.WORKS: "green", State.LIMITED: "yellow", State.MISSING: "bold red", State.NOT_NEEDED: "dim"}


@one_line_errors()
def main() -> None:
    """Exit code 0 when all works that the configuration needs (with --clean: when nothing is left), else 1."""
    flags, sys.argv[1:] = parse_flags(sys.argv[1:])
    code = 0

    def doctor(config: RunConfig) -> None:
        nonlocal code
        code = clean(scratch_root(config), flags.json) if flags.clean else examine(config, flags.json)

    entry_point(doctor)()
    raise SystemExit(code)


def parse_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and what is left for Hydra, which shows its help after ours."""
    parser = argparse.ArgumentParser(
        prog="python -m clawhpc.doctor",
        usage="python -m clawhpc.doctor [--json] [--clean] [run.root=FOLDER] [launch=slurm] [...]",
        description="Say what of this machine or cluster works, and what to do about the rest.",
        epilog="It takes the overrides of clawhpc.train, and looks at what a run with them needs.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="say it in JSON")
    parser.add_argument("--clean", action="store_true", help="remove what dead runs have left here; living ones stay")
    flags, overrides = parser.parse_known_args(arguments)
    if {"-h", "--help"}.intersection(overrides):
        sys.stdout.write(f"{parser.format_help()}\n")
    return flags, overrides


def examine(config: RunConfig, as_json: bool) -> int:
    """Make all checks, print what they find; the exit code."""
    with scratch_ledger(config) as (ledger, failure):
        marker = ledger.environment if ledger else {}
        desk = Desk(config, ledger, failure, ThisMachine({**os.environ, **marker}))
        findings, hanging = run_checks(desk.checks())
        works = not missing(findings)
        if as_json:
            say_json({"works": works, "parts": findings})
        else:
            print_table(findings)
        if hanging:
            sys.stdout.flush()
            os._exit(not works)  # no thread that hangs may hold us; the ledger's watchdog ends what it has started
    return int(not works)


@contextmanager
def scratch_ledger(config: RunConfig) -> Iterator[tuple[Ledger | None, str]]:
    """A ledger where workers have theirs, for what the checks start; or None and why there can be none."""
    try:
        ledger = Ledger.open(scratch_root(config), clear=False)
    except UserError as error:
        yield None, str(error)
        return
    with ledger:
        yield ledger, ""


def scratch_root(config: RunConfig) -> Path:
    """Where ledgers lie."""
    return config.scratch_root() or default_root()


@dataclass(frozen=True)
class Desk:
    """Knows which checks a configuration calls for."""

    config: RunConfig
    ledger: Ledger | None
    failure: str
    """Why there is no ledger."""
    machine: Machine

    def checks(self) -> list[Check]:
        """All of them, in the order of the table. Those of hosts on which workers run count only there."""
        hosts = [*self._sandboxes(), *self._gpus(), *self._host()]
        if self._is_login_node():
            hosts = [of_other_hosts(check, self._on_a_node()) for check in hosts]
        return [*hosts, self._remains(), *self._slurm(), *self._files(), *self._harnesses(), *self._software()]

    @property
    def _on_slurm(self) -> bool:
        return self.config.launch.cluster == "slurm"

    def _is_login_node(self) -> bool:
        return self._on_slurm and "SLURM_JOB_ID" not in os.environ

    def _on_a_node(self) -> str:
        """The command that looks at one of the hosts on which workers will run."""
        asked = self.config.launch.slurm
        options = {"partition": asked.partition, "gres": asked.gres, "gpus-per-node": asked.gpus_per_node}
        chosen = [f"--{name}={value}" for name, value in options.items() if value]
        on_gpus = ["engine=gpu"] if self.config.engine.dtype == "bfloat16" else []
        return shlex.join(["srun", *chosen, "python", "-m", "clawhpc.doctor", "launch=slurm", *on_gpus])

    def _sandboxes(self) -> list[Check]:
        check, machine, image = partial(Check, part="sandboxes"), self.machine, self.config.sandbox.image
        builds = image is not None and image.endswith(".def")
        user, uid = getpass.getuser(), os.getuid()
        return [
            check(what="user namespaces", look=lambda: [kernel.check_user_namespaces(machine)]),
            check(
                what="subordinate ids",
                look=lambda: [kernel.check_subordinate_ids(machine, user=user, uid=uid, needed=builds)],
            ),
            check(
                what="FUSE",
                look=lambda: [kernel.check_fuse(machine, needed=image is not None and image.endswith(".sif"))],
            ),
            check(what="containers", look=self._containers, deadline_s=LONG_S),
        ]

    def _containers(self) -> list[Finding]:
        settings, cache_dir = self.config.sandbox, Path(self.config.cache_dir)
        if self.ledger is None:
            return [Finding(what="containers", state=State.MISSING, found="not tried, for want of scratch")]
        trials = containers.try_containers(settings, machine=self.machine, ledger=self.ledger, cache_dir=cache_dir)
        return containers.judge_containers(trials, settings.kind)

    def _image(self) -> list[Finding]:
        found = find_apptainer(Path(self.config.cache_dir))
        return [containers.check_image(self.config.sandbox.image, has_apptainer=found is not None)]

    def _gpus(self) -> list[Check]:
        dtype, needed = self.config.engine.dtype, self._needs_gpu()

        def look() -> list[Finding]:
            return gpus.check_gpus(self.machine, torch_cuda=gpus.torch_cuda(), dtype=dtype, needed=needed)

        compilers = (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang")  # as Triton looks for them
        headers = Path(sysconfig.get_path("include", "posix_prefix"))
        return [
            Check(part="GPUs", what="GPUs", look=look, needed=needed),
            Check(
                part="GPUs",
                what="C compiler",
                look=lambda: [gpus.check_compiler(self.machine, compilers, headers, needed=needed)],
                needed=needed,
            ),
        ]

    def _needs_gpu(self) -> bool:
        return self.config.learner.accelerator == "cuda" or packages.built_for(packages.installed_version) == "gpu"

    def _host(self) -> list[Check]:
        check, root, machine = partial(Check, part="this host"), scratch_root(self.config), self.machine
        concurrency = self.config.worker.concurrency
        cache_gib = 0.0 if self._needs_gpu() else self.config.engine.kv_cache_gib
        return [
            check(what="scratch", look=lambda: host.check_scratch(root, self.ledger, self.failure, machine)),
            check(what="cores", look=lambda: [host.check_cores(len(os.sched_getaffinity(0)))]),
            check(
                what="memory",
                look=lambda: [
                    host.check_memory(host.free_memory(machine), cache_gib=cache_gib, concurrency=concurrency)
                ],
            ),
        ]

    def _remains(self) -> Check:
        scratch = [f"scratch_dir={self.config.scratch_dir}"] if self.config.scratch_dir else []
        again = shlex.join(["python", "-m", "clawhpc.doctor", "--clean", *scratch])

        def look() -> list[Finding]:
            return [host.check_remains(find_remains(scratch_root(self.config)), again)]

        return Check(part="this host", what="left over", look=look, needed=False)

    def _slurm(self) -> list[Check]:
        launch = self.config.launch
        workers = self._slurm_needs(launch.slurm, launch.timeout_min, num_workers=launch.num_workers)
        names = {"settings": "launch.campaign", "timeout": "launch.campaign.timeout_min"}
        campaign = self._slurm_needs(launch.campaign, launch.campaign.timeout_min, **names)
        look = partial(slurm.check_slurm, self.machine, workers, campaign if self._on_slurm else None)
        return [Check(part="Slurm", what="Slurm", look=look, needed=self._on_slurm, deadline_s=LONG_S)]

    def _slurm_needs(self, asked: JobSettings, timeout_min: int, **rest: Any) -> slurm.SlurmNeeds:
        return slurm.SlurmNeeds(
            needed=self._on_slurm,
            partition=asked.partition,
            timeout_min=timeout_min,
            num_gpus=asked.num_gpus or 0,
            num_cores=asked.cpus_per_task or 1,
            memory_gib=asked.mem_gb or 0.0,
            **rest,
        )

    def _gpus_per_node(self) -> int:
        asked = self.config.launch.slurm
        return asked.gpus_per_node or slurm.count_gpus(asked.gres or "")

    def _files(self) -> list[Check]:
        check, root, machine = partial(Check, part="files"), Path(self.config.run.root), self.machine
        has_slurm = self._on_slurm and machine.find("sdiag") is not None
        return [
            check(what="run folder", look=lambda: files.check_run_folder(root, machine, shared=self._on_slurm)),
            check(what="image", look=self._image),
            check(what="quota", look=lambda: [files.check_quota(machine)], needed=False),
            check(
                what="clocks",
                look=lambda: [host.check_clocks(files.existing(root), machine, has_slurm=has_slurm)],
                needed=False,
            ),
        ]

    def _harnesses(self) -> list[Check]:
        look = partial(harnesses.check_harnesses, Path(self.config.cache_dir), self.config.harness.names)
        return [Check(part="harnesses", what="harnesses", look=look)]

    def _software(self) -> list[Check]:
        check, mode = partial(Check, part="software"), self.config.learner.wandb
        wants_gpus = self.config.learner.accelerator == "cuda" or (self._on_slurm and self._gpus_per_node() > 0)
        return [
            check(
                what="Python packages",
                look=lambda: packages.check_packages(
                    packages.read_pins(), packages.installed_version, wants_gpus=wants_gpus
                ),
            ),
            check(
                what="Weights & Biases",
                look=lambda: [tracking.check_tracking(mode, has_key=has_wandb_key(), reach=tracking.reach_server)],
            ),
        ]


def has_wandb_key() -> bool:
    """Where the wandb client looks for one."""
    return "WANDB_API_KEY" in os.environ or tracking.HOST in ThisMachine({}).read(str(Path.home() / ".netrc"))


def say_json(value: object) -> None:
    """One JSON text on standard output."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def print_table(findings: Mapping[str, Sequence[Finding]]) -> None:
    """A row for each finding, what is to be done below it, and a line that sums up.

    What is to be done stands on one line however long, for that is what a terminal copies whole.
    """
    from rich.console import Console  # a tenth of a second that --help need not spend
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    what_width = max(len(row.what) for rows in findings.values() for row in rows)
    state_width = max(map(len, State))
    for part, rows in findings.items():
        console.print(part, style="bold")
        for row in rows:
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(width=what_width + len(INDENT))
            table.add_column(width=state_width)
            table.add_column(overflow="fold")
            table.add_row(Text(f"{INDENT}{row.what}"), Text(row.state, style=COLOURS[row.state]), Text(row.found))
            console.print(table)
            if row.remedy:
                console.print(Text(f"{INDENT * 2}-> {row.remedy}", style="cyan"), soft_wrap=True)
    lacks = missing(findings)
    console.print(f"Missing for this configuration: {', '.join(lacks)}" if lacks else ALL_WELL, style="bold")


def missing(findings: Mapping[str, Sequence[Finding]]) -> list[str]:
    """What the configuration needs and does not have."""
    return [row.what for rows in findings.values() for row in rows if row.state is State.MISSING]


def clean(root: Path, as_json: bool) -> int:
    """List what dead owners have left on `root`, remove it, say what is gone and what is not; the exit code."""
    found = find_remains(root)
    if not as_json:
        sys.stdout.writelines(f"found {one.summary}\n" for one in found)
        sys.stdout.flush()
    cleared = clear_remains(root)
    if as_json:
        say_json({"found": found, "removed": cleared.owners, "left": cleared.failures})
    else:
        sys.stdout.writelines(f"removed all of {owner}\n" for owner in cleared.owners)
        sys.stdout.writelines(f"left: {failure}\n" for failure in cleared.failures)
        if not (found or cleared.owners or cleared.failures):
            sys.stdout.write(f"nothing of dead owners in {root}\n")
    return int(bool(cleared.failures))


if __name__ == "__main__":
    main()
