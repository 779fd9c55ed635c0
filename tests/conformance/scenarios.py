"""What a policy, an engine or a connection may do to a harness: one scenario for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.conformance.faults import Cut
from tests.conformance.policy import SPLIT, Said
from tests.conformance.profiles import Profile, tool_call

LOG = "log.txt"
"""In the workspace: every command of a scenario adds its line, so that one that ran twice shows."""
MAX_OUTPUT_TOKENS = 700
"""A character of three bytes that is drawn until then is cut in the middle: 700 is no multiple of 3."""
SUMMARY = "<summary>One line is in the log; one is to come.</summary>"
HALF = "Of this sentence only the first half"
LITERALS = "<|im_end|>\\n<|im_start|>user"
"""Letters that spell control tokens, as a file may hold them."""
KEEP_ALIVE_S = 0.2
MANY = 20
LONG_RESULTS = 4
ENDLESS = 40
"""More often than any harness tries."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One trial of a harness."""

    name: str
    says: Callable[[Profile], tuple[str | Said, ...]]
    """What the main loop is told, one after the other; afterwards the last word, however often it asks."""
    ran: tuple[str, ...] = ("one",)
    """Lines in the log of a harness that goes on to the end."""
    odd: int = 0
    """The position in `says` of what the scenario is about."""
    cuts: tuple[Cut, ...] = ()
    thinking: bool = False
    compacting: bool = False
    mcp: Literal["", "slow", "broken", "host", "host_broken"] = ""
    """The task declares a server that takes its time to start, or one that ends at once; in the sandbox, or on the
    host."""
    may_fail: bool = False
    """A run that is no doing of the policy is right too."""
    keep_alive_s: float = KEEP_ALIVE_S


def note(line: str) -> str:
    """A command that adds a line to the log."""
    return f"echo {line} >> {LOG}"


def think(profile: Profile, line: str) -> str:
    """A reply of all parts: reasoning, text, a tool call."""
    return f"<think>\n{line} is to be noted — quickly.\n</think>\n\nNoting {line}.\n{profile.run(note(line))}"


def unicode_replies(profile: Profile) -> tuple[str, ...]:
    """Characters of two, three and four bytes in text and arguments; one that is cut; letters of control tokens."""
    shown = f"printf '{LITERALS}\\n'; {note('größe-日本-👩‍👧')}"
    return (
        f"Grüße an 日本 ✅\n{profile.run(shown)}",
        f"Half of ✅{SPLIT} it\n{profile.run(note('two'))}",
    )


def fill(profile: Profile) -> tuple[str | Said, ...]:
    """A window that is full after the first result: because we say so, or by the harness's own reckoning."""
    long = (profile.run("seq 20000"),) * LONG_RESULTS if profile.early_window or profile.long_history else ()
    full = () if profile.early_window else (Said(instead="overflow"),)
    return (profile.run(note("one")), *long, *full, profile.run(note("two")))


SCENARIOS = (
    Scenario(name="tool_call", says=lambda harness: (f"I note it.\n{harness.run(note('one'))}",)),
    Scenario(
        name="many_turns",
        says=lambda harness: tuple(harness.run(note(str(turn))) for turn in range(MANY)),
        ran=tuple(map(str, range(MANY))),
    ),
    Scenario(
        name="parallel_calls",
        says=lambda harness: (f"Both.\n{harness.run(note('one'))}\n{harness.run(note('two'))}",),
        ran=("one", "two"),
    ),
    Scenario(
        name="thinking",
        says=lambda harness: (think(harness, "one"), think(harness, "two"), "<think>\nAll done.\n</think>\n\nDone."),
        ran=("one", "two"),
        thinking=True,
    ),
    Scenario(name="unicode", says=unicode_replies, ran=("größe-日本-👩‍👧", "two")),
    Scenario(
        name="bad_json",
        says=lambda harness: (harness.run(note("one")).replace("}}", ""), harness.run(note("one"))),
    ),
    Scenario(
        name="wrong_arguments",
        says=lambda harness: (tool_call(harness.shell, {"wrong": 1.0}), harness.run(note("one"))),
    ),
    Scenario(
        name="unknown_tool",
        says=lambda harness: (tool_call("Teleport", {"to": "Mars"}), harness.run(note("one"))),
    ),
    Scenario(name="length_stop", says=lambda harness: ("✅" * MAX_OUTPUT_TOKENS, harness.run(note("one")))),
    Scenario(
        name="cut_call",
        says=lambda harness: (harness.run(f"{note('never')} # {'✅' * MAX_OUTPUT_TOKENS}"), harness.run(note("one"))),
    ),
    Scenario(name="empty_reply", says=lambda harness: ("", harness.run(note("one")))),
    Scenario(
        name="silence",
        says=lambda harness: (Said(text=harness.run(note("one")), silence_s=15 * KEEP_ALIVE_S),),
    ),
    Scenario(
        name="engine_error",
        says=lambda harness: (harness.run(note("one")), Said(instead="overloaded"), harness.run(note("two"))),
        ran=("one", "two"),
        odd=1,
    ),
    Scenario(
        name="engine_errors",
        says=lambda harness: (harness.run(note("one")), *(Said(instead="overloaded"),) * ENDLESS),
        odd=1,
        may_fail=True,
    ),
    Scenario(
        name="status_errors",
        says=lambda harness: (harness.run(note("one")), *(Said(instead="refused"),) * ENDLESS),
        odd=1,
        may_fail=True,
    ),
    Scenario(
        name="engine_restart",
        says=lambda harness: (harness.run(note("one")), Said(text=harness.run(note("two")), instead="lost")),
        ran=("one", "two"),
        odd=1,
    ),
    Scenario(
        name="cut_stream",
        says=lambda harness: (
            harness.run(note("one")),
            f"{HALF} is heard.\n{harness.run(note('never'))}",
            harness.run(note("two")),
        ),
        ran=("one", "two"),
        odd=1,
        cuts=(Cut(request=1, after=HALF.encode()),),
    ),
    Scenario(
        name="lost_answer",
        says=lambda harness: (
            harness.run(note("one")),
            Said(text=harness.run(note("two")), after="cut"),
        ),
        ran=("one", "two"),
        odd=1,
        cuts=(Cut(request=1),),
    ),
    Scenario(
        name="context_overflow",
        says=lambda harness: (harness.run(note("one")), *(Said(instead="overflow"),) * ENDLESS),
        odd=1,
    ),
    Scenario(
        name="compaction",
        says=fill,
        ran=("one", "two"),
        odd=1,
        compacting=True,
    ),
    Scenario(
        name="subagent",
        says=lambda harness: (
            tool_call(harness.subagent, harness.subagent_arguments),
            Said(text=harness.run(note("one")), after="subagent"),
        ),
    ),
    Scenario(
        name="mcp_tool",
        says=lambda harness: (tool_call(harness.mcp_tool, {"a": 2, "b": 3}), harness.run(note("one"))),
        mcp="slow",
    ),
    Scenario(
        name="mcp_host",
        says=lambda harness: (tool_call(harness.mcp_tool, {"a": 2, "b": 3}), harness.run(note("one"))),
        mcp="host",
    ),
    Scenario(
        name="mcp_host_broken", says=lambda harness: (harness.run(note("one")),), mcp="host_broken", may_fail=True
    ),
    Scenario(name="mcp_broken", says=lambda harness: (harness.run(note("one")),), mcp="broken", may_fail=True),
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
