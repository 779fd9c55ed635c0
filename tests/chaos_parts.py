"""A campaign that is disturbed: the commands that a user gives, their folder, and what must hold at the end.

Everything is real but the model: `python -m clawhpc.train`, submitit's workers, proxy, harness, sandbox, verifier and
learner; `tests.fakes.scripted_vllm` is in vLLM's place. tests/chaos_strikes.py has what is done to it.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from clawhpc.command import EXIT_USER
from clawhpc.ledger import Ledger, find_remains
from clawhpc.ledger.reap import find_marked, mounts_below
from clawhpc.paths import RunPaths
from clawhpc.worker.settings import READY_FILE
from tests.fakes.scripted_vllm import JOURNAL_VARIABLE
from tests.sandbox_parts import running
from tests.slurm_cluster import SlurmCluster

REPO = Path(__file__).parents[1]
TOKEN_VARIABLE = "CLAWHPC_TEST_CHAOS"
"""Marks every process of one campaign but the watchdogs, whose environment is empty."""
POLL_S = 0.05
READY_S = 120.0
"""For a campaign to come to its first rollout, on a busy machine."""
GONE_S = 20.0
"""For everything to be gone after the end: twice what is promised, on a busy machine."""
DISK_BYTES = 256 * 2**20
OVERRIDES: dict[str, object] = {
    "run.name": "chaos",
    "harness": "claude_code",
    "sandbox": "bubblewrap",
    "campaign.groups_per_step": 8,
    "campaign.samples_per_group": 2,
    "campaign.stall_min": 3,
    "learner.wandb": "disabled",
    "learner.num_threads": 1,
    "engine.max_model_len": 4096,
    "worker.concurrency": 4,
    "worker.max_output_tokens": 200,
    "worker.max_engine_starts": 1000,
    "limits.deadline_s": 60,
    "limits.max_calls": 4,
    "launch.num_workers": 2,
    "launch.max_restarts": 1000,
}
"""Bounds that are there to tell a broken machine from a mishap are out of the way: here all are mishaps."""
SLURM_OVERRIDES: dict[str, object] = {
    "launch": "slurm_cpu",
    "launch.slurm.cpus_per_task": 2,
    "launch.slurm.mem_gb": 1,
    "launch.slurm.watch_s": 1,
    "launch.slurm.lease_s": 8,
    "launch.campaign.cpus_per_task": 2,
    "launch.campaign.mem_gb": 1,
}


def write_tasks(folder: Path, count: int) -> Path:
    """Tasks that the scripted policy can do: run a command that writes a word."""
    for number in range(count):
        root = folder / f"{folder.name}-{number:03d}"
        (root / "reward").mkdir(parents=True)
        command = f"sleep 0.3; echo word-{number} >answer.txt"
        entry = {
            "task_id": root.name,
            "user_query": f"Run this command, then say that you are done: RUN> {command} <RUN",
        }
        (root / "data_entry.json").write_text(json.dumps(entry))
        (root / "reward/reward.sh").write_text(
            f'[ "$(cat "$(dirname "$0")/../answer.txt" 2>/dev/null)" = word-{number} ] && echo 1 || echo 0\n'
        )
    return folder


def write_policy(folder: Path) -> Path:
    """A policy with random weights, whose tokenizer knows enough words for a harness's prompt to be short."""
    from clawhpc.learner.policy import create_policy
    from clawhpc.learner.settings import PolicySettings
    from clawhpc.learner.tokenizer import train_tokenizer

    texts = [path.read_text() for path in sorted((REPO / "docs").glob("*.md"))]
    train_tokenizer(texts, folder / "tokenizer", vocab_size=2000)
    shape = PolicySettings(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_size=32)
    create_policy(folder / "policy", folder / "tokenizer", shape, seed=0)
    return folder / "policy"


@dataclass
class Command:
    """One that was given, and what it says."""

    process: subprocess.Popen[str]
    output: Path

    def wait(self, timeout_s: float) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    def text(self) -> str:
        """All of it, errors too."""
        return self.output.read_text(errors="replace")


@dataclass
class Account:
    """What was done to a campaign, and how its commands ended."""

    strikes: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    """There was nobody to strike."""
    endings: list[tuple[str, int, str]] = field(default_factory=list)
    """Of the commands but the last: what was struck last, the exit code, the last line of what it had said."""
    wall_s: float = 0.0


@dataclass
class Chaos:
    """One campaign, from the first command to the last."""

    folder: Path
    """Of its own, with a short path."""
    overrides: Mapping[str, object]
    environment: Mapping[str, str]
    seed: int
    cluster: SlurmCluster | None = None
    token: str = field(default_factory=lambda: f"chaos-{uuid.uuid4().hex}")
    account: Account = field(default_factory=Account)
    command: Command | None = None
    """The one that was given last and not refused."""
    num_commands: int = 0
    last_strike: str = "nothing"
    until: float = 0.0
    """When it must have finished, by the monotonic clock."""

    @property
    def disk(self) -> Path:
        """Where the run lies: a disk of its own, for who may mount one."""
        return self.folder / "disk"

    @property
    def scratch(self) -> Path:
        """Where the ledgers of campaign and workers lie."""
        return self.folder / "s"

    @property
    def temporary(self) -> Path:
        """TMPDIR of all of it."""
        return self.folder / "t"

    @property
    def journal(self) -> Path:
        """Of the engines."""
        return self.folder / "journal"

    @property
    def paths(self) -> RunPaths:
        """Of the run."""
        return RunPaths(self.disk / "runs/chaos/001")

    # -----------------------------------------------------------------------------------------------------------------
    # Commands
    # -----------------------------------------------------------------------------------------------------------------

    def give_command(self, **environment: str) -> Command:
        """The campaign's command, always the same."""
        self.num_commands += 1
        search = os.pathsep.join(map(str, (REPO / "tests/fakes/scripted_site", REPO)))
        overrides = {"run.root": self.disk / "runs", "scratch_dir": self.scratch, **self.overrides}
        output = self.folder / f"output-{self.num_commands}.txt"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "clawhpc.train", *(f"{key}={value}" for key, value in overrides.items())],
                cwd=self.folder,
                env={
                    **os.environ,
                    **self.environment,
                    TOKEN_VARIABLE: self.token,
                    JOURNAL_VARIABLE: str(self.journal),
                    "TMPDIR": str(self.temporary),
                    "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),  # torch keeps one for each user, for good
                    "PYTHONPATH": search,
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        return Command(process=process, output=output)

    def campaign_pid(self) -> int | None:
        """The process that holds the run, as its lock says."""
        try:
            found = re.match(r"process (\d+) on ", self.paths.lock.read_text())
        except FileNotFoundError:
            return None
        pid = int(found[1]) if found else None
        return pid if pid in self.processes() else None

    def processes(self) -> dict[int, list[str]]:
        """The arguments of every process of the campaign, watchdogs aside."""
        found = {}
        for pid in find_marked(self.token, set()):
            try:
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            found[pid] = arguments
        return found

    def run(
        self,
        strikes: Iterable[tuple[str, Callable[[Chaos, random.Random], bool]]],
        *,
        between_s: tuple[float, float] = (1.5, 4.0),
        limit_s: float,
    ) -> Account:
        """Give the command until the campaign has finished; strike between. AssertionError after `limit_s`."""
        chance, began = random.Random(self.seed), time.monotonic()
        self.until = began + limit_s
        self.command = self.give_command()
        alive = self.go_on(READY_S, until=lambda: any(self.paths.workers.glob(f"*/{READY_FILE}")))
        for name, strike in strikes:
            alive = alive and self.go_on(chance.uniform(*between_s))
            if not alive:
                break
            struck = strike(self, chance)
            if not struck and self.command.process.poll() == 0:
                break
            (self.account.strikes if struck else self.account.missed)[name] += 1
            self.last_strike = name if struck else self.last_strike
        while alive:
            alive = self.go_on(5.0)
        self.account.wall_s = time.monotonic() - began
        return self.account

    def go_on(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let it work for so long, and give the command again where it has ended. False: the campaign has finished."""
        assert self.command is not None
        end = time.monotonic() + seconds
        while True:
            assert time.monotonic() < self.until, f"not finished in time: {self.account}\n{self.command.text()[-2000:]}"
            code = self.command.process.poll()
            if code == 0:
                return False
            if code is not None:
                words = self.command.text().strip().rpartition("\n")[2]
                self.account.endings.append((self.last_strike, code, words[-300:]))
                assert code != EXIT_USER, words
                assert len(self.account.endings) <= 3 + sum(self.account.strikes.values()), self.account.endings
                self.command = self.give_command()
            if time.monotonic() >= end or until():
                return True
            time.sleep(POLL_S)

    # -----------------------------------------------------------------------------------------------------------------
    # What is left
    # -----------------------------------------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """Processes, mounts, sockets, temporary files, jobs of the campaign that are still there."""
        processes = {**self.processes(), **{pid: ["?"] for pid in running(f"{self.folder}/")}}
        own = {self.disk}
        return [
            *(f"process {pid}: {' '.join(arguments)[:200]}" for pid, arguments in processes.items()),
            *(f"mount {point}" for point, _ in mounts_below(self.folder) if point not in own),
            *(str(path) for folder in (self.scratch, self.temporary) for path in sorted(folder.glob("*"))),
            *(f"remains {one.summary}" for one in (find_remains(self.scratch) if self.scratch.exists() else ())),
            *(f"job {job_id} {state}" for job_id, state in (self.cluster.queue() if self.cluster else {}).items()),
        ]

    def wait_until_nothing_is_left(self, within_s: float = GONE_S) -> float:
        """Seconds until then; fails, naming what is left, after `within_s`."""
        began = time.monotonic()
        while left := self.left():
            assert time.monotonic() < began + within_s, f"left {within_s:.0f} s after the end: {left}"
            time.sleep(POLL_S)
        return time.monotonic() - began


@contextmanager
def chaos_in(
    root: Path,
    overrides: Mapping[str, object],
    *,
    policy: Path,
    cache_dir: Path,
    num_steps: int,
    num_heldout: int = 0,
    seed: int = 0,
    cluster: SlurmCluster | None = None,
) -> Iterator[Chaos]:
    """A campaign of `num_steps` steps, in a ledger on `root`; after the block nothing of it is left, come what may."""
    with Ledger.open(root) as ledger:
        environment = {"CLAWHPC_CACHE": str(cache_dir), **(cluster.environment if cluster else {})}
        groups = int(str({**OVERRIDES, **overrides}["campaign.groups_per_step"]))
        chosen = {
            **OVERRIDES,
            **(SLURM_OVERRIDES if cluster else {}),
            "policy.folder": policy,
            "campaign.num_steps": num_steps,
            "tasks.folder": write_tasks(ledger.scratch / "tasks", 2 * groups),
            **overrides,
        }
        if num_heldout:
            chosen["tasks.heldout"] = write_tasks(ledger.scratch / "heldout", num_heldout)
        chaos = Chaos(ledger.scratch, chosen, {**environment, **ledger.environment}, seed, cluster)
        for folder in (chaos.disk, chaos.temporary):
            folder.mkdir()
        own_disk = ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(chaos.disk))
        subprocess.run(own_disk, capture_output=True)  # where that is not allowed, the disk is never full
        try:
            yield chaos
        finally:
            if chaos.cluster is not None:
                chaos.cluster.clear()
            if chaos.command is not None and chaos.command.process.poll() is None:
                os.killpg(chaos.command.process.pid, signal.SIGKILL)
                chaos.command.wait(10)
            if os.path.ismount(chaos.disk):
                subprocess.run(["umount", "-l", chaos.disk], check=True)
