"""The table of what each harness does in each scenario, as docs/harnesses.md holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from clawhpc.harness.registry import ADAPTERS
from clawhpc.records import CallRecord, CallRole
from tests.conformance.bench import Observed
from tests.conformance.laws import dead_leaves, false_forks, own_words, reencodings
from tests.conformance.profiles import PROFILES, Profile
from tests.conformance.scenarios import SCENARIOS, Scenario

PAGE = Path(__file__).parents[2] / "docs/harnesses.md"
OVERVIEW = "overview"
RUNS = "runs"
"""The parts of the page that `python -m tests.conformance --write` writes."""
SAME = (
    "harness",
    "scenario",
    "what it does",
    "calls",
    "resent",
    "roles",
    "lines run",
    "outcome",
    "dead leaves",
    "re-encodings",
    "own words",
    "false forks",
)
"""Columns that are the same in every run of a pinned harness: the page holds them, and the tests compare them."""
MEASURED = ("first request kB", "CPU s", "wall s")
"""Columns that are not: of one run of each harness, PLAIN, they stand in the overview."""
PLAIN = "tool_call"
COLUMNS = (*SAME, *MEASURED)

Row = dict[str, str]
"""By column."""
Rows = dict[tuple[str, str], Row]
"""By harness and scenario."""


def row_of(observed: Observed) -> Row:
    """One run as the page shows it."""
    record = observed.record
    result = record.exec_result
    ended = f", exit {result.exit_code}" if result is not None else ""
    cells = (
        observed.profile.label,
        observed.scenario.name,
        manner(observed),
        len(record.calls),
        observed.num_requests - len(record.calls),
        roles(record.calls),
        len(observed.ran),
        f"{record.outcome}{ended}",
        dead_leaves(record),
        reencodings(observed),
        own_words(observed),
        false_forks(record),
        f"{observed.first_bytes / 1000:.1f}",
        f"{record.timings.harness_cpu_s:.1f}",
        f"{record.timings.run_s:.1f}",
    )
    return dict(zip(COLUMNS, map(str, cells), strict=True))


def absent_row(profile: Profile, scenario: Scenario) -> Row:
    """Of a scenario that makes no sense for a harness: why."""
    told = {"harness": profile.label, "scenario": scenario.name, "what it does": f"— {profile.cannot[scenario.name]}"}
    return {column: told.get(column, "") for column in COLUMNS}


def roles(calls: Iterable[CallRecord]) -> str:
    counts = Counter(str(call.role) for call in calls)
    return ", ".join(f"{count} {role}" for role, count in counts.items())


def manner(observed: Observed) -> str:
    """How the main loop went on after what the scenario is about, in a few words."""
    calls = observed.record.calls
    asked = [call for call in calls if call.role is CallRole.MAIN]
    odd = observed.scenario.odd
    if (compaction := next((call for call in calls if call.role is CallRole.COMPACTION), None)) is not None:
        odd = sum(call.call_id < compaction.call_id for call in asked) - 1
    if not asked:
        return "makes no call"
    if len(asked) <= odd:
        return "does not come so far"
    before, after = asked[odd], asked[odd + 1 :][:1]
    steps = [
        *(f"calls for {role}" for role in between(calls, before, after)),
        went_on(before, after[0]) if after else "ends the run",
    ]
    return ", ".join(steps)


def between(calls: Iterable[CallRecord], before: CallRecord, after: list[CallRecord]) -> Iterator[str]:
    """The roles of the calls between two calls of the main loop, but for subagents: when they speak is chance."""
    end = after[0].call_id if after else float("inf")
    yield from dict.fromkeys(
        str(call.role) for call in calls if before.call_id < call.call_id < end and call.role is not CallRole.SUBAGENT
    )


def went_on(before: CallRecord, after: CallRecord) -> str:
    """How one call of the main loop follows another."""
    added = {message.role for message in after.new_messages}
    if after.continues_id == before.call_id:
        return "goes on" if added == {"tool"} else f"goes on, adds a {'/'.join(sorted(added - {'tool'}))} message"
    if (before.continues_id, before.new_messages) == (after.continues_id, after.new_messages):
        return "asks the same again"
    kept = "" if before.reply is None else ", without the reply"
    return f"asks otherwise{kept}"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """In Markdown."""
    head = list(columns)
    return "\n".join(map(line_of, [head, ["---"] * len(head), *rows]))


def line_of(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table_line(row: Row) -> str:
    return line_of(row[column] for column in COLUMNS)


def overview_table(plain: dict[str, Row]) -> str:
    """One line for each harness; `plain`: of each the row of its plain run."""
    columns = ("harness", "version", "protocol", "MCP", "compacts", "subagents", *MEASURED)
    return table(columns, (overview(profile, plain[profile.label]) for profile in PROFILES.values()))


def overview(profile: Profile, plain: Row) -> list[str]:
    adapter = ADAPTERS[profile.name]
    mcp = f"`{profile.mcp_tool}`" if adapter.mounts_mcp else "no"
    compacts = "no" if "compaction" in profile.cannot else "yes"
    subagents = f"`{profile.subagent}`" if profile.subagent else "no"
    measured = [plain[column] for column in MEASURED]
    return [profile.label, adapter.version, adapter.protocol, mcp, compacts, subagents, *measured]


def every_run() -> Iterator[tuple[Profile, Scenario]]:
    """Each row of the table."""
    yield from ((profile, scenario) for profile in PROFILES.values() for scenario in SCENARIOS)


def read_page() -> Rows:
    """The rows of the page, without what was measured."""
    return {(row["harness"], row["scenario"]): row for row in read_table(RUNS)}


def read_table(part: str) -> Iterator[Row]:
    _, written, _ = split_page(PAGE.read_text(), part)
    columns, _, *lines = ([cell.strip() for cell in line[1:-1].split("|")] for line in written.strip().splitlines())
    yield from (dict(zip(columns, cells, strict=True)) for cells in lines)


def write_page(rows: Rows) -> None:
    """Put `rows` in the place of those that the page has for the same runs."""
    known = read_page() | rows
    ordered = [known[key] for profile, scenario in every_run() if (key := (profile.label, scenario.name)) in known]
    plain = {row["harness"]: row for row in read_table(OVERVIEW)}
    plain |= {harness: row for (harness, scenario), row in rows.items() if scenario == PLAIN}
    runs = table(SAME, ([row[column] for column in SAME] for row in ordered))
    page = PAGE.read_text()
    for part, text in ((OVERVIEW, overview_table(plain)), (RUNS, runs)):
        before, _, after = split_page(page, part)
        page = f"{before}\n{text}\n{after}"
    PAGE.write_text(page)


def split_page(page: str, part: str) -> tuple[str, str, str]:
    """What stands before, in and after a written part, whose marks stay outside."""
    begin, end = f"<!-- {part}: written by python -m tests.conformance --write -->", f"<!-- end of {part} -->"
    before, _, rest = page.partition(begin)
    written, _, after = rest.partition(end)
    return before + begin, written, end + after
