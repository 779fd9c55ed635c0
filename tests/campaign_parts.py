"""Fixtures: a tiny random policy, and commands as a user starts them: processes of their own, in their own folder."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clawhpc.paths import RunPaths
from clawhpc.sandbox.bubblewrap import find_bubblewrap
from tests.sandbox_parts import missing, running

TEXTS = ("You are a helpful agent. Use the tools that you have. ", '{"name": "Bash", "arguments": {"command": "ls"}}')
OVERRIDES = {
    "run.name": "e2e",
    "campaign.num_steps": 2,
    "campaign.groups_per_step": 2,
    "campaign.samples_per_group": 2,
    "campaign.eval_tasks": 4,
    "worker.concurrency": 4,
    "worker.max_output_tokens": 8,
    "engine.max_model_len": 8192,
    "engine.kv_cache_gib": 0.25,
    "limits.deadline_s": 120,
    "limits.max_calls": 3,
    "sandbox": "bubblewrap",
    "tasks.generate.num_train": 8,
    "tasks.generate.num_heldout": 8,
}
"""The smallest campaign: a policy that babbles, eight rollouts of it before and after, two steps of four."""
WITHOUT_NETWORK = ("--dev-bind", "/", "/", "--unshare-net", "--die-with-parent")
"""Options of bubblewrap."""
COUNT = 'counts=$1; shift; "$@"; code=$?; cat /proc/net/snmp /proc/net/snmp6 > "$counts"; exit $code'
"""Runs a command, and leaves what the kernel has counted meanwhile in this network."""


@dataclass
class Command:
    """One `python -m clawhpc.<name>` and what it printed."""

    process: subprocess.Popen[str]
    output: Path
    counts: Path = Path(os.devnull)
    """Of the kernel, for a command that is cut off, when it has ended."""

    def wait(self, timeout_s: float) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    def text(self) -> str:
        """What it has printed, errors too."""
        return self.output.read_text()


def cut_off(command: list[str], counts: Path) -> list[str]:
    """`command` as on a compute node that is cut off: with a loopback interface and no other. See `attempts`."""
    return [find_bubblewrap(), *WITHOUT_NETWORK, "sh", "-c", COUNT, "sh", str(counts), *command]


def attempts(counts: Path) -> dict[str, int]:
    """What a command that was `cut_off` has tried: how often a way out was looked for, and a datagram sent."""
    rows = [line.split() for line in counts.read_text().splitlines()]
    found = {name: int(count) for name, count in (row for row in rows if len(row) == 2) if count.isdecimal()}
    for head, values in itertools.pairwise(rows):
        if head[0] == values[0]:  # a table of two lines for each protocol
            found |= {f"{head[0]} {name}": int(value) for name, value in zip(head[1:], values[1:], strict=True)}
    return {name: found[name] for name in ("Ip: OutNoRoutes", "Ip6OutNoRoutes", "Udp: OutDatagrams") if found[name]}


@dataclass
class Desk:
    """Starts commands in a folder, and knows what of them is left."""

    folder: Path
    cache_dir: Path
    policy: Path
    commands: list[Command] = field(default_factory=list)

    @property
    def scratch(self) -> Path:
        """Where ledgers lie; short, for the sockets below it."""
        return Path(f"/tmp/clawhpc-e2e-{os.getpid()}")

    def run_paths(self, number: int = 1) -> RunPaths:
        """The files of a run."""
        return RunPaths(self.folder / "runs" / "e2e" / f"{number:03d}")

    def start(self, name: str = "train", **changes: object) -> Command:
        """`python -m clawhpc.<name>` with `OVERRIDES` and `changes` (`a__b` stands for `a.b`)."""
        overrides = OVERRIDES | {"policy.folder": self.policy, "learner.wandb": "disabled"}
        return self.start_plain(name, overrides | {key.replace("__", "."): value for key, value in changes.items()})

    def start_plain(self, name: str, overrides: Mapping[str, object], *, network: bool = True) -> Command:
        """`python -m clawhpc.<name>` with `overrides` and a scratch folder of this desk.

        Without `network` it is `cut_off`.
        """
        overrides = {"scratch_dir": self.scratch, **overrides}
        command = [sys.executable, "-m", f"clawhpc.{name}", *(f"{key}={value}" for key, value in overrides.items())]
        output, counts = (self.folder / f"{kind}-{len(self.commands)}.txt" for kind in ("output", "counts"))
        if not network:
            command = cut_off(command, counts)
        with output.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, "CLAWHPC_CACHE": str(self.cache_dir)},
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.commands.append(Command(process=process, output=output, counts=counts))
        return self.commands[-1]

    def left(self) -> list[str]:
        """Processes and temporary files that are still there, those of Weights & Biases too, which bear our pid."""
        pids = [command.process.pid for command in self.commands if command.process.poll() is not None]
        needles = (str(self.scratch), str(self.folder), *(f" --pid {pid} " for pid in pids))
        processes = [str(pid) for needle in needles for pid in running(needle)]
        files = [str(path) for path in self.scratch.glob("*")] if self.scratch.exists() else []
        wandb_files = [str(path) for pid in pids for path in Path(tempfile.gettempdir()).glob(f"wandb*-{pid}-*")]
        return processes + files + wandb_files

    def wait_until_nothing_is_left(self, within_s: float) -> None:
        """Fails, naming what is left, after `within_s`."""
        deadline = time.monotonic() + within_s
        while left := self.left():
            assert time.monotonic() < deadline, f"left {within_s} s after the end: {left}"
            time.sleep(0.1)


def wait_for(what: Callable[[], bool], command: Command, timeout_s: float) -> None:
    """Return when `what` is true; fail with the command's output when it ends or time is up before."""
    deadline = time.monotonic() + timeout_s
    while not what():
        ended = command.process.poll() is not None
        assert not ended and time.monotonic() < deadline, f"{'ended' if ended else 'too slow'}:\n{command.text()}"  # noqa: PT018
        time.sleep(0.01)


@pytest.fixture(scope="session")
def babbler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy folder with random weights."""
    from clawhpc.learner.policy import create_policy
    from clawhpc.learner.settings import PolicySettings
    from clawhpc.learner.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("babbler")
    train_tokenizer(TEXTS * 20, folder / "tokenizer", vocab_size=400)
    shape = PolicySettings(num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=32, ffn_size=64)
    create_policy(folder / "policy", folder / "tokenizer", shape, seed=0)
    return folder / "policy"


@pytest.fixture
def desk(tmp_path: Path, cache_dir: Path, babbler: Path) -> Iterator[Desk]:
    """Commands that this test starts; afterwards none of them, and nothing that they started, is left."""
    if not list((cache_dir / "harness").glob("claude_code-*")):
        missing("Claude Code (containers/install_harness.sh claude_code CACHE_DIR)")
    desk = Desk(folder=tmp_path, cache_dir=cache_dir, policy=babbler)
    yield desk
    for command in desk.commands:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait(10)
    desk.wait_until_nothing_is_left(within_s=15)
    shutil.rmtree(desk.scratch, ignore_errors=True)
