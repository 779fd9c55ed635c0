"""Score the workspace of each task as the task begins with it: what that earns, a policy gets for doing nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio import to_thread

from clawhpc.check.survey import Untouched
from clawhpc.errors import BoundaryError, SandboxError, boundary
from clawhpc.ledger import discard
from clawhpc.records import TEARDOWN_S, ExecResult, TaskSpec, Verdict
from clawhpc.rollout.folder import WORKSPACE, lay_out
from clawhpc.sandbox.base import Sandbox, SandboxCommand
from clawhpc.sandbox.by_image import Sandboxes
from clawhpc.verify.judge import Judge
from clawhpc.verify.script import verify_workspace
from clawhpc.verify.settings import ShapingSettings
from clawhpc.verify.verdict import verify

NO_PROGRAM = re.compile(
    r"(?:: (?:line )?\d+|^\w*sh): (\S{1,64}): (?:command )?not found$"
    r"|\benv: [\u2018'](\S{1,64})[\u2019']: No such file or directory$"
    r"|/python[\d.]*: (No module named \S{1,64})$",
    re.MULTILINE,
)
"""As bash, dash, env, and `python3 -m` say it."""
NO_NETWORK = re.compile(
    r"Temporary failure (?:in name resolution|resolving)|(?:Could not|unable to) resolve|Network is unreachable"
    r"|Failed to fetch|\bdns error\b|\bEAI_AGAIN\b"
)
"""As programs say it that fetch something."""
NETWORK = "a network"


class _Listening:
    """A sandbox that keeps what its commands printed on standard error."""

    def __init__(self, inner: Sandbox) -> None:
        self.name, self.python, self._inner, self.heard = inner.name, inner.python, inner, ""

    async def run(self, command: SandboxCommand, *, timeout_s: float) -> ExecResult:
        """See `Sandbox.run`."""
        result = await self._inner.run(command, timeout_s=timeout_s)
        self.heard += result.stderr_tail
        return result

    def check_hidden(self, path: Path) -> None:
        """See `Sandbox.check_hidden`."""
        self._inner.check_hidden(path)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """With what workspaces are scored."""

    sandboxes: Sandboxes
    judge: Judge | None
    """None: rubrics are not asked about."""
    scratch: Path
    timeout_s: float
    """For one task."""
    concurrency: int


async def score_untouched(tasks: Sequence[TaskSpec], bench: Bench, done: Callable[[int], None]) -> list[Untouched]:
    """One for each task, in their order; `done` hears how many there are by now.

    What fails in one task is its own. Nothing is left when this returns, raises or is cancelled.
    """
    found: dict[str, Untouched] = {}
    slots = anyio.CapacityLimiter(bench.concurrency)

    async def score(task: TaskSpec) -> None:
        async with slots:
            found[task.task_id] = await _score_one(task, bench)
        done(len(found))

    async with anyio.create_task_group() as scoring:
        for task in tasks:
            scoring.start_soon(score, task)
    return [found[task.task_id] for task in tasks]


async def _score_one(task: TaskSpec, bench: Bench) -> Untouched:
    folder = Path(await anyio.mkdtemp(prefix="c", dir=str(bench.scratch)))
    try:
        sandbox = _Listening(await bench.sandboxes.of(task.image))
        with boundary(SandboxError, "its workspace"):
            await to_thread.run_sync(lay_out, task, folder, abandon_on_cancel=True)
        start = anyio.current_time()
        verdict = await _verdict(task, folder / WORKSPACE, bench, sandbox)
        verify_s = anyio.current_time() - start
    except BoundaryError as error:
        return Untouched(task_id=task.task_id, reward=None, failure=str(error))
    finally:
        await discard(folder, within_s=TEARDOWN_S)
    return Untouched(
        task_id=task.task_id,
        reward=verdict.reward,
        breakdown=verdict.breakdown,
        verify_s=verify_s,
        lacking=lacking(sandbox.heard),
    )


def lacking(errors: str) -> tuple[str, ...]:
    """What programs that printed `errors` looked for and did not find: programs, modules of Python, a network."""
    programs = ("".join(found.groups("")) for found in NO_PROGRAM.finditer(errors))
    return tuple(dict.fromkeys([*programs, *([NETWORK] if NO_NETWORK.search(errors) else [])]))


async def _verdict(task: TaskSpec, workspace: Path, bench: Bench, sandbox: Sandbox) -> Verdict:
    name = f"{task.task_id}-untouched"
    if bench.judge is None:
        return await verify_workspace(task, workspace, sandbox, sandbox_id=name, timeout_s=bench.timeout_s)
    return await verify(
        task,
        workspace,
        (),
        sandbox=sandbox,
        judge=bench.judge,
        shaping=ShapingSettings(),
        sandbox_id=name,
        timeout_s=bench.timeout_s,
    )
