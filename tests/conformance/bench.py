"""Runs one harness through one scenario: everything is real but the draw and, where one is wanted, the fault."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

import anyio

from clawhpc.engine.render import ChatRenderer
from clawhpc.harness.registry import make_harness
from clawhpc.proxy.respond import PolicyResponder, PolicySampling
from clawhpc.records import (
    MCP_MOUNT,
    CallRole,
    Generation,
    GroupKey,
    GroupPlan,
    Limits,
    McpServer,
    RolloutRecord,
    TaskSpec,
)
from clawhpc.rollout.run import RolloutParts, RolloutPlan, run_rollout
from clawhpc.sandbox.base import Sandbox
from tests.conformance.faults import FaultySandbox
from tests.conformance.policy import ListeningHarness, Said, ScriptedEngine, ScriptedPolicy
from tests.conformance.profiles import MCP_SERVER, Profile
from tests.conformance.scenarios import LOG, MAX_OUTPUT_TOKENS, SUMMARY, Scenario
from tests.fakes import mcp_server
from tests.fakes.chat_tokenizer import write_tokenizer
from tests.fakes.records import script_verifier

INSTRUCTION = """\
- Note in "the log" what is to be  noted, 'größer' things too.
--help, $HOME, `/etc` and @log.txt are to be left as they are; \\n is no line's end."""
"""All that a command line, a shell or a harness might take for something else than text."""
MODEL = "policy"
WINDOW = 200_000
"""Tokens of a byte-level tokenizer with few merges: the longest head has 70 k of them."""
LIMITS = Limits(deadline_s=240.0, reserve_s=15.0, max_calls=60)
WORDS = {
    CallRole.SUBAGENT: "The subagent is done.",
    CallRole.COMPACTION: SUMMARY,
    CallRole.SIDE: "A title",
}
"""What the policy says to all but the main loop."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """All that is known of one run."""

    profile: Profile
    scenario: Scenario
    record: RolloutRecord
    drawn: dict[int, tuple[tuple[int, ...], Generation]]
    """By call_id: the prompt that the engine received, and what it drew."""
    ran: tuple[str, ...]
    """The lines of the log."""
    files: tuple[str, ...]
    """What else lies in the workspace afterwards."""
    models: set[str]
    """What the main loop asked for."""
    num_requests: int
    """Model requests, resent ones included."""
    first_bytes: int
    """Of the first request's body."""
    strangers: int
    """See `ScriptedPolicy`."""


@dataclass(frozen=True)
class Bench:
    """What all runs share."""

    sandbox: Sandbox
    cache_dir: Path
    scratch: Path
    """Whose path is short enough for unix sockets."""
    folder: Path
    """For the files of a task and of a policy."""

    async def run(self, profile: Profile, scenario: Scenario) -> Observed:
        """Raises `UserError` where the harness is not installed."""
        settings = profile.settings
        if scenario.thinking and profile.thinking:
            settings = profile.thinking
        if scenario.compacting and profile.compacting:
            settings = profile.compacting
        adapter = make_harness(profile.name, settings, self.cache_dir / "harness")
        adapter.check_install()
        harness = ListeningHarness(adapter)
        policy = self.policy(harness, script_of(profile, scenario), thinking=scenario.thinking)
        sandbox = FaultySandbox(self.sandbox, scenario.cuts, LOG, policy.happened["cut"])
        parts = RolloutParts(
            sandbox=sandbox,
            harness=harness,
            responder=policy,
            scratch=self.scratch,
            limits=LIMITS,
            model=MODEL,
            context_window=profile.early_window if scenario.compacting and profile.early_window else WINDOW,
            max_output_tokens=MAX_OUTPUT_TOKENS,
            worker_id="conformance",
            now=time.time,
            keep_alive_s=scenario.keep_alive_s,
        )
        record = await run_rollout(self.plan(profile, scenario), parts)
        assert sandbox.line is not None, record.detail
        return Observed(
            profile=profile,
            scenario=scenario,
            record=record,
            drawn={int(request_id.split("-")[1]): drawn for request_id, drawn in policy.engine.drawn.items()},
            ran=tuple(sandbox.log.splitlines()),
            files=sandbox.files,
            models=harness.models,
            num_requests=sandbox.line.num_requests,
            first_bytes=sandbox.line.first_bytes,
            strangers=policy.strangers,
        )

    def policy(
        self, harness: ListeningHarness, script: Callable[[CallRole], Said], *, thinking: bool
    ) -> ScriptedPolicy:
        """A policy in the chat format of Qwen3."""
        engine = ScriptedEngine(write_tokenizer(self.folder / "policy"))
        inner = PolicyResponder(
            engine=engine,
            renderer=ChatRenderer(self.folder / "policy", renderer="qwen3", thinking=thinking),
            sampling=PolicySampling(context_window=WINDOW, max_tokens=MAX_OUTPUT_TOKENS),
        )
        happened = {"cut": anyio.Event(), "subagent": anyio.Event()}
        return ScriptedPolicy(inner, engine, harness, script, happened=happened)

    def plan(self, profile: Profile, scenario: Scenario) -> RolloutPlan:
        """A task without a fault to find: whatever was done is right."""
        reward_dir, mcp_dir = self.folder / "reward", self.folder / "mcp"
        reward_dir.mkdir(exist_ok=True)
        (reward_dir / "reward.sh").write_text("echo 1\n")
        mcp_dir.mkdir(exist_ok=True)
        server = Path(shutil.copy(mcp_server.__file__, mcp_dir))
        argv = {
            "": (),
            "slow": ("/usr/bin/python3", f"{MCP_MOUNT}/{server.name}"),
            "broken": ("/bin/false",),
            "host": (sys.executable, str(server)),
            "host_broken": ("/bin/sh", "-c", "echo no database >&2; exit 1"),
        }[scenario.mcp]
        on_host = scenario.mcp.startswith("host")
        adder = McpServer(name=MCP_SERVER, argv=argv, env={"DELAY_S": "2"}, on_host=on_host)
        task = TaskSpec(
            task_id=scenario.name,
            instruction=INSTRUCTION,
            input_dir=None,
            verifier=script_verifier(reward_dir),
            mcp_servers=(adder,) if scenario.mcp else (),
            mcp_dir=str(mcp_dir) if scenario.mcp and not on_host else None,
        )
        key = GroupKey(phase="train", step=0, task_id=task.task_id, harness=profile.name)
        group = GroupPlan(key=key, task=task, num_samples=1, seed=0)
        return RolloutPlan(group=group, sample=0, temperature=1.0)


def script_of(profile: Profile, scenario: Scenario) -> Callable[[CallRole], Said]:
    """What the policy says next to a call of some role."""
    said = (part if isinstance(part, Said) else Said(text=part) for part in scenario.says(profile))
    told = chain(said, repeat(Said(text=profile.last_word)))
    return lambda role: next(told) if role is CallRole.MAIN else Said(text=WORDS[role])
