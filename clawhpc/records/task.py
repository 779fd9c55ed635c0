"""A task, its bounds, and how its harness is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from clawhpc.errors import at_least

WORKSPACE_MOUNT = "/root/.openclaw/workspace"
"""Where ClawGym's reward scripts expect the workspace; both sandboxes present it there."""
MCP_MOUNT = "/mcp"
"""Where a sandbox shows the programs of a task's MCP servers, read-only."""
RUN_MCP_MOUNT = "/mcp_run"
"""Where it shows those of the servers that a run adds to every task."""
SANDBOX_HOME = "/root"
"""HOME inside a sandbox: a throwaway directory of the rollout."""
TEARDOWN_S = 5.0
"""Of a rollout's deadline, what verification leaves for removing the workspace."""
LEAST_VERIFY_S = 3.0
"""A verifier needs a sandbox of its own, and an interpreter in it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one rollout. Reaching one is the outcome `limit` or `timeout`.

    What it may take of its host is a matter of its sandbox: `SandboxLimits`.
    """

    deadline_s: float = 120.0
    """Wall clock for the whole rollout, boot and teardown included (law 5)."""
    reserve_s: float = 20.0
    """Of `deadline_s`, kept for settle, verify and teardown: what these take, if all goes slowly."""
    settle_s: float = 2.0
    """How long calls may go on after the harness has ended, before they are cancelled."""
    engine_wait_s: float = 60.0
    """How long a call waits for an engine that was lost to come back, with the harness kept waiting; at most to the end
    of the rollout's own time.
    """
    max_calls: int = 50
    max_sampled_tokens: int = 32_000
    max_live_leaves: int = 8
    """Live leaves of one conversation, after dead leaves and roles are dropped; more is `over_branched` (law 4)."""

    @property
    def harness_s(self) -> float:
        """What a harness has at most."""
        return self.deadline_s - self.reserve_s

    @property
    def verify_s(self) -> float:
        """What is left for a verifier at least, in seconds."""
        return self.reserve_s - self.settle_s - TEARDOWN_S

    def __post_init__(self) -> None:
        at_least(self, deadline_s=1, settle_s=0, engine_wait_s=0, max_calls=1, max_sampled_tokens=1, max_live_leaves=0)
        least_s = self.settle_s + LEAST_VERIFY_S + TEARDOWN_S
        if not self.reserve_s >= least_s:
            raise ValueError(
                f"reserve_s={self.reserve_s}: must be at least {least_s:g}: settle_s={self.settle_s}, "
                f"{LEAST_VERIFY_S:g} s for the verifier and {TEARDOWN_S:g} s for teardown"
            )
        if self.reserve_s >= self.deadline_s:
            raise ValueError(f"reserve_s={self.reserve_s}: must be less than deadline_s={self.deadline_s}")


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """A server of the Model Context Protocol that a task declares: a program that speaks it over stdin and stdout."""

    name: str
    """Harnesses build the names of its tools from it: letters, digits, `_` and `-`."""
    argv: tuple[str, ...]
    """In the sandbox, its current directory is the workspace; on the host, an empty folder of the rollout's."""
    env: dict[str, str] = field(default_factory=dict)
    on_host: bool = False
    """It runs outside the sandbox, with the rights of whoever runs the worker, and is reached through a unix socket."""


@dataclass(frozen=True, kw_only=True)
class ScriptCheck:
    """A script that scores the workspace. Its folder is never visible to the harness (law 7)."""

    folder: str
    """On the host: the script and its helpers."""
    script: str = "reward.sh"
    """Below `folder`; run with bash."""
    mount: str = f"{WORKSPACE_MOUNT}/reward"
    """Where the verifier's sandbox shows `folder`, read-only; below the workspace, it hides what is there."""
    reward_folder: str | None = None
    """Where in that sandbox it writes reward.txt or reward.json; None: it prints the reward."""
    cwd: str | None = None
    """Where it starts. None: in `mount`, where nothing lies that the harness wrote."""
    env: dict[str, str] = field(default_factory=dict)
    """Of the script alone."""
    timeout_s: float | None = None
    """The most that it may take; None: what is left of the rollout's own time, which bounds it in any case."""


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One thing that a judge is asked."""

    name: str
    """In the verdict's breakdown."""
    text: str
    weight: float = 1.0
    """Beside those of the other criteria; more than 0."""


@dataclass(frozen=True, kw_only=True)
class Rubric:
    """What a judge scores the workspace by."""

    criteria: tuple[Criterion, ...]
    """At least one; their names differ."""
    expected: str = ""
    """What a good rollout does, in the task's words."""


@dataclass(frozen=True, kw_only=True)
class Verifier:
    """How a workspace is scored: by a script, by a judge, or by both (tasks -> verify)."""

    script: ScriptCheck | None = None
    rubric: Rubric | None = None
    rubric_weight: float = 0.5
    """The judge's share of the reward, where there is a script too."""

    def __post_init__(self) -> None:
        if self.script is None and self.rubric is None:
            raise ValueError("a verifier has a script, a rubric, or both")


@dataclass(frozen=True, kw_only=True)
class TaskImage:
    """An image of a task's own, which its harness and its verifier stand on in place of the run's."""

    folder: str
    """On the host: its root file system."""
    python: str
    """An interpreter in it, 3.9 or newer, for programs of ours."""


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """Instruction, initial workspace and verifier (tasks -> rollout)."""

    task_id: str
    instruction: str
    input_dir: str | None
    """Folder on the host whose content is copied into the workspace; None for an empty one."""
    input_subdir: str = "."
    """Where below the workspace it is copied to."""
    verifier: Verifier
    workspace_mount: str = WORKSPACE_MOUNT
    """Where both sandboxes present the workspace."""
    image: TaskImage | None = None
    """What it has at `workspace_mount` the workspace begins with, before the content of `input_dir`. None: the image of
    the run, of which nothing is in the workspace."""
    mcp_servers: tuple[McpServer, ...] = ()
    """Offered to the model from its first call. The harness starts those in the sandbox."""
    mcp_dir: str | None = None
    """Folder on the host with the programs of those, shown read-only at MCP_MOUNT; None where they need none."""
    mcp_host_dir: str | None = None
    """Folder on the host with the programs of those on the host. No sandbox shows it."""
    run_mcp_dir: str | None = None
    """The same of servers that the run adds, at RUN_MCP_MOUNT."""
    env: dict[str, str] = field(default_factory=dict)
    """In the sandboxes of the harness and of the script."""
    run_s: float | None = None
    """The most that its harness may run; None: what `Limits` leave of a rollout's time, which bound it in any case."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """From the task's file, untouched."""

    @property
    def hidden_folders(self) -> tuple[str, ...]:
        """Folders of the host that its harness must not see (law 7)."""
        script = self.verifier.script.folder if self.verifier.script is not None else None
        return tuple(folder for folder in (script, self.mcp_host_dir) if folder is not None)


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What one rollout asks of a harness (rollout -> harness)."""

    instruction: str
    base_url: str
    """The proxy session, without a trailing slash."""
    workspace_mount: str
    """Its current directory, inside the sandbox."""
    model: str
    """The name under which to ask for the policy."""
    context_window: int
    """Of the model, in tokens."""
    max_output_tokens: int
    """Of one reply, in tokens."""
    python: str
    """An interpreter inside the sandbox, 3.9 or newer: images have theirs in different places."""
    mcp_servers: tuple[McpServer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How to start one harness in a sandbox (harness -> sandbox)."""

    argv: tuple[str, ...]
    """First element: an absolute path inside the sandbox."""
    env: dict[str, str]
    """The whole environment inside, but for HOME and PATH."""
    files: dict[str, str]
    """Written before the start: path below HOME -> content."""
    read_only: dict[str, str]
    """Install folders: host path -> path inside."""


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """How one command in a sandbox ended (sandbox -> rollout, verify)."""

    exit_code: int
    """128 + n for signal n; 124 when it ran out of time."""
    stdout_tail: str
    stderr_tail: str
    wall_s: float
    cpu_s: float
    """User and system time of every process of the command, measured inside; 0.0 when it was killed from outside."""
    timed_out: bool
    exceeded: str = ""
    """The limit of its sandbox that ended it, with what was measured, for a person; empty where none did."""
