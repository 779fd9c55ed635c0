"""What a sandbox adds to the start of a harness: real Claude Code, from its start to its first model request.

    python -m benchmarks.sandbox [--write] [--rounds 12]        about five minutes on two idle cores

Each start is a whole run: the harness makes its one request at a real proxy session of its own, is answered, and ends
with exit code 0; all else is a failure. A round starts every kind once, the kinds in turns, so that what else the
machine does meets all of them; kinds are compared within a round. Bare is the same program on the host, which reaches
its session through the same forwarder. All sandboxes stand on the same image (containers/install_parts.sh).

`--write` puts the page into docs/results/sandbox.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median

import anyio
import numpy as np
from anyio import to_thread

from clawhpc.errors import ClawError, UserError
from clawhpc.harness.base import INSTALL_MOUNT, Harness
from clawhpc.harness.claude_code import ClaudeCodeSettings
from clawhpc.harness.registry import make_harness
from clawhpc.ledger import Ledger
from clawhpc.proxy.app import open_session
from clawhpc.proxy.respond import ScriptedResponder
from clawhpc.records import Conversation, LaunchRequest, Limits, Reply
from clawhpc.sandbox import init
from clawhpc.sandbox.apptainer import find_apptainer
from clawhpc.sandbox.base import PROXY_URL, SANDBOX_PATH, Mount, Sandbox, SandboxCommand
from clawhpc.sandbox.open import open_sandbox
from clawhpc.sandbox.root import PYTHON
from clawhpc.sandbox.settings import Kind, SandboxSettings

PAGE = Path("docs/results/sandbox.md")
AIM_S = 0.35
"""Added to one start, at most."""
BARE, SANDBOXES = "bare process", ("bubblewrap", "Apptainer, folder", "Apptainer, SIF")
AT_ONCE = {1: 1.0, 8: 0.25, 32: 0.1, 64: 0.1}
"""How many start together -> share of the rounds that they get: each is as many starts."""
START_S = 300.0
"""For one start, when many do so at once."""
WORKSPACE, HOME, PROXY = "workspace", "home", "p"

NUM_WATCHED, WATCH_S = 32, 10
"""Sandboxes, and for how long, to see what their watching costs."""
IDLE = f"""
for n in $(seq 300); do echo > ~/$n; done
for n in $(seq 7); do sleep 60 & done
sleep 2; cut -d ' ' -f 14,15 /proc/1/stat; sleep {WATCH_S}; cut -d ' ' -f 14,15 /proc/1/stat
"""
"""Eight processes and 300 files; prints the CPU ticks of the sandbox's first process, before and after."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One kind, several starts at once."""

    kind: str
    at_once: int
    number: int
    first_s: tuple[float, ...]
    """To the first request, of each start that made one."""
    failures: tuple[str, ...]
    """Why a start was none, or did not end well."""


@dataclass(frozen=True)
class Bench:
    """Starts one harness in different ways."""

    harness: Harness
    sandboxes: dict[str, Sandbox]
    scratch: Path

    async def launch(self, kind: str, command: SandboxCommand) -> int:
        """Run it to its end; its exit code."""
        if kind == BARE:
            return await run_bare(command)
        return (await self.sandboxes[kind].run(command, timeout_s=START_S)).exit_code

    async def round(self, kind: str, at_once: int, number: int) -> Round:
        """As many starts at once."""
        first_s: list[float] = []
        failures: list[str] = []
        with tempfile.TemporaryDirectory(dir=self.scratch, prefix="b") as folder:
            async with anyio.create_task_group() as tasks:
                for one in range(at_once):
                    tasks.start_soon(self.start, kind, Path(folder, str(one)), first_s, failures)
        return Round(kind=kind, at_once=at_once, number=number, first_s=tuple(first_s), failures=tuple(failures))

    async def start(self, kind: str, folder: Path, first_s: list[float], failures: list[str]) -> None:
        """One run; when its first request came, or why it failed."""
        asked: list[float] = []

        def answer(conversation: Conversation) -> Reply:
            asked.append(time.perf_counter())
            return Reply(text="Done.")

        for name in (WORKSPACE, HOME):
            (folder / name).mkdir(parents=True)
        responder = ScriptedResponder(script=answer)
        async with open_session(
            responder=responder,
            classify=self.harness.classify,
            limits=Limits(),
            seed=0,
            socket=folder / PROXY,
            model="policy",
        ) as session:
            command = self.command(folder, PROXY_URL + session.base_path)
            began = time.perf_counter()
            try:
                exit_code = await self.launch(kind, command)
            except ClawError as error:
                failures.append(f"{kind}: {error}")
                return
        first_s += [at - began for at in asked[:1]]
        if exit_code or len(asked) != 1:
            failures.append(f"{kind}: exit code {exit_code} after {len(asked)} requests")

    def command(self, folder: Path, base_url: str) -> SandboxCommand:
        """As a rollout has it."""
        launch = self.harness.launch_plan(
            LaunchRequest(
                instruction="Say that you are done.",
                base_url=base_url,
                workspace_mount="/root/workspace",
                model="policy",
                context_window=32_000,
                max_output_tokens=256,
                python=PYTHON,
            )
        )
        installs = (Mount(source=Path(source), target=target) for source, target in launch.read_only.items())
        return SandboxCommand(
            sandbox_id="benchmark",
            argv=launch.argv,
            env=launch.env,
            cwd="/root/workspace",
            mounts=(Mount(source=folder / WORKSPACE, target="/root/workspace", writable=True), *installs),
            home=folder / HOME,
            proxy_socket=folder / PROXY,
        )


# ---- ways to start --------------------------------------------------------------------------------------------------


async def run_bare(command: SandboxCommand) -> int:
    """On the host, in the folders that a sandbox would show."""
    assert command.home is not None
    assert command.proxy_socket is not None
    port = free_port()
    init.forward(port, str(command.proxy_socket))
    workspace, install = (mount.source for mount in command.mounts)
    env = {name: value.replace(PROXY_URL, f"http://127.0.0.1:{port}") for name, value in command.env.items()}
    process = await anyio.open_process(
        [command.argv[0].replace(INSTALL_MOUNT, str(install)), *command.argv[1:]],
        env={"HOME": str(command.home), "PATH": SANDBOX_PATH, **env},
        cwd=workspace,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    async with process:
        with anyio.fail_after(START_S):
            return await process.wait()


def free_port() -> int:
    """Of the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def find_image(cache_dir: Path) -> tuple[Path, Path]:
    """The image as a folder and as a .sif, which is made of it once. UserError where it is not there."""
    folder, file = cache_dir / "images/debian-base", cache_dir / "images/debian-base.sif"
    apptainer = find_apptainer(cache_dir)
    if apptainer is None or not folder.is_dir():
        raise UserError("needs Apptainer and the base image: containers/install_parts.sh")
    if not file.exists():
        partial = file.with_name("debian-base.partial.sif")
        quick = "-comp zstd -Xcompression-level 1"
        command = [apptainer, "build", "--force", "--mksquashfs-args", quick, str(partial), str(folder)]
        subprocess.run(["unshare", "-Ur", *command], check=True, capture_output=True)
        partial.rename(file)
    return folder, file


# ---- what comes of it -----------------------------------------------------------------------------------------------


async def measure(num_rounds: int, cache_dir: Path, ledger: Ledger) -> tuple[list[Round], list[Round], float]:
    """The rounds of the harness, those of a command that does nothing, and what watching costs."""
    folder, file = await to_thread.run_sync(find_image, cache_dir)
    harness = make_harness("claude_code", ClaudeCodeSettings(), cache_dir / "harness")
    harness.check_install()
    ways: tuple[tuple[Kind, Path], ...] = (("bubblewrap", folder), ("apptainer", folder), ("apptainer", file))
    bench = Bench(harness, {}, ledger.scratch)
    for name, (kind, image) in zip(SANDBOXES, ways, strict=True):
        settings = SandboxSettings(kind=kind, image=str(image))
        bench.sandboxes[name] = await open_sandbox(settings, ledger=ledger, cache_dir=cache_dir)
    for one in turns(0):
        await bench.round(one, 1, -1)  # what is read for the first time comes from disk
    nothing = [await time_nothing(bench, kind, number) for number in range(num_rounds) for kind in turns(number)]
    rounds = []
    for at_once, share in AT_ONCE.items():
        for number in range(max(1, round(share * num_rounds))):
            for kind in turns(number):
                rounds.append(await bench.round(kind, at_once, number))
                print(f"{at_once} at once, round {number}: {kind}: {median(rounds[-1].first_s or (0.0,)):.2f} s")
    return rounds, nothing, await watch_cost(bench.sandboxes[SANDBOXES[0]])


async def watch_cost(sandbox: Sandbox) -> float:
    """CPU seconds that the first process of a sandbox takes in a second, while its command does nothing."""
    ticks: list[int] = []

    async def idle() -> None:
        command = SandboxCommand(sandbox_id="idle", argv=("/bin/bash", "-c", IDLE), env={}, cwd="/")
        before, after = (await sandbox.run(command, timeout_s=START_S)).stdout_tail.splitlines()
        ticks.append(sum(map(int, after.split())) - sum(map(int, before.split())))

    async with anyio.create_task_group() as tasks:
        for _ in range(NUM_WATCHED):
            tasks.start_soon(idle)
    return sum(ticks) / os.sysconf("SC_CLK_TCK") / NUM_WATCHED / WATCH_S


def turns(number: int) -> list[str]:
    """All kinds, another one first in each round."""
    kinds = [BARE, *SANDBOXES]
    first = number % len(kinds)
    return kinds[first:] + kinds[:first]


async def time_nothing(bench: Bench, kind: str, number: int) -> Round:
    """A whole run of `true`, from its start until nothing is left of it."""
    with tempfile.TemporaryDirectory(dir=bench.scratch, prefix="b") as name:
        for part in (WORKSPACE, HOME):
            Path(name, part).mkdir()
        command = replace(bench.command(Path(name), PROXY_URL), argv=("/bin/true",), proxy_socket=Path(name, PROXY))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(command.proxy_socket))
            began = time.perf_counter()
            code = await bench.launch(kind, command)
            took_s = time.perf_counter() - began
    return Round(
        kind=kind, at_once=1, number=number, first_s=(took_s,), failures=() if code == 0 else (f"exit {code}",)
    )


def page(rounds: list[Round], nothing: list[Round], watch: float, arguments: str, wall_s: float) -> str:
    """The whole page."""
    failures = [failure for one in (*rounds, *nothing) for failure in one.failures]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    lines = [
        "# A sandbox around a harness, measured",
        "",
        f"{date.today()}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}, user {os.getuid()}, load {os.getloadavg()[2]:.1f}"
        f" (mean of 15 minutes, ours included). Made by `python -m benchmarks.sandbox{arguments}` in {wall_s / 60:.0f} min.",
        "",
        "Real Claude Code, from its start to its first model request at the proxy; it is answered, and ends. Seconds. Added: the difference to the"
        " bare process in the same round, median and, in brackets, the quartiles over the rounds; where several start at once, a round is the median of its starts.",
        "",
        "| at once | kind | to the first request: median | slowest | added | times bare |",
        "|---|---|---|---|---|---|",
        *(row(kind, at_once, rounds) for at_once in AT_ONCE for kind in (BARE, *SANDBOXES)),
        "",
        "Nothing in it: a whole run of `true`, until no process, mount or file of it is left.",
        "",
        "| kind | median | quartiles |",
        "|---|---|---|",
        *(nothing_row(kind, nothing) for kind in (BARE, *SANDBOXES)),
        "",
        f"Looking after one that idles (8 processes, 300 files; {NUM_WATCHED} at once) takes {1000 * watch:.1f} ms of CPU time a second.",
        "",
        f"Starts: {sum(one.at_once for one in rounds)}; failures: {len(failures)}. Aim for one: at most {AIM_S} s added: "
        + "; ".join(f"{kind} {verdict(kind, rounds)}" for kind in SANDBOXES)
        + ".",
        *(f"- {failure}" for failure in failures[:10]),
    ]
    return "\n".join(lines) + "\n"


def added_s(kind: str, at_once: int, rounds: list[Round]) -> tuple[list[float], list[float]]:
    """Round by round, over the bare process: the difference, and the ratio."""
    of = {(one.kind, one.number): median(one.first_s) for one in rounds if one.at_once == at_once and one.first_s}
    pairs = [(taken, of[BARE, number]) for (name, number), taken in of.items() if name == kind and (BARE, number) in of]
    return [taken - bare for taken, bare in pairs], [taken / bare for taken, bare in pairs]


def row(kind: str, at_once: int, rounds: list[Round]) -> str:
    """One kind, at one number of starts."""
    all_s = [taken for one in rounds if (one.kind, one.at_once) == (kind, at_once) for taken in one.first_s] or [np.nan]
    cells = [str(at_once), kind, f"{median(all_s):.2f}", f"{max(all_s):.2f}"]
    if kind != BARE:
        differences, ratios = added_s(kind, at_once, rounds)
        cells += [spread(differences), f"{median(ratios or [np.nan]):.2f}"]
    return f"| {' | '.join([*cells, '', ''][:6])} |"


def nothing_row(kind: str, nothing: list[Round]) -> str:
    """How long nothing takes."""
    taken = [one.first_s[0] for one in nothing if one.kind == kind]
    low, high = np.quantile(taken, (0.25, 0.75))
    return f"| {kind} | {median(taken):.3f} | {low:.3f} to {high:.3f} |"


def spread(values: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = np.quantile(values or [np.nan], (0.25, 0.5, 0.75))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def verdict(kind: str, rounds: list[Round]) -> str:
    """Against the aim."""
    middle = median(added_s(kind, 1, rounds)[0] or [np.nan])
    return f"{middle:.2f} s{'' if middle <= AIM_S else ' (missed)'}"


def main() -> None:
    """Measure, print the page, write it on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    cache_dir = Path(os.environ.get("CLAWHPC_CACHE") or Path.home() / ".cache/clawhpc")
    began = time.monotonic()
    with Ledger.open(Path(f"/tmp/clawhpc-bench-{os.getuid()}")) as ledger:
        rounds, nothing, watch = anyio.run(measure, options.rounds, cache_dir, ledger)
    arguments = "" if options.rounds == parser.get_default("rounds") else f" --rounds {options.rounds}"
    text = page(rounds, nothing, watch, arguments, time.monotonic() - began)
    print(text)
    if options.write:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
