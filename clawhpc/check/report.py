"""What was found, as text and as one record."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from clawhpc.check.survey import Spread, Survey, Untouched, spread
from clawhpc.records import Limits
from clawhpc.tasks.faults import by_kind

SHOWN = 20
"""Of lines that name tasks one by one without being faults; the JSON file has all."""
SHOWN_ALIKE = 3
"""Of faults like one that is shown, those whose file is named."""
FULL = 1.0
"""A reward that leaves nothing to be learnt."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that was found in some sets of tasks."""

    sets: tuple[Survey, ...]
    shared_ids: tuple[str, ...]
    """Of tasks that are in several of the sets."""
    untouched: tuple[Untouched, ...]
    """One for each task whose untouched workspace was scored."""
    rubrics_not_asked: int
    """Tasks whose rubric nobody was asked about."""
    untouched_s: float
    """How long that took."""
    places: dict[str, str]
    """Task id -> the verifier's script on the host, or the set that the task is in."""

    @property
    def problems(self) -> tuple[str, ...]:
        """A line for each thing that must be mended: what is wrong, and in which file and key."""
        return tuple(chain.from_iterable(self.kinds))

    @property
    def kinds(self) -> list[list[str]]:
        """The same, with those together that say the same of several tasks."""
        failures: dict[str, list[str]] = defaultdict(list)
        for one in self.untouched:
            if one.reward is None:
                why = " ".join(one.failure.split())
                failures[re.sub(rf"(?<!\w){re.escape(one.task_id)}(?!\w)", "", why)].append(
                    f"{self.places[one.task_id]}: the verifier of {one.task_id!r} fails on the untouched workspace: "
                    f"{why}"
                )
        shared = [f"{self.places[task_id]}: task_id {task_id!r} is in another set too" for task_id in self.shared_ids]
        free = [
            f"{self.places[one.task_id]}: the untouched workspace of {one.task_id!r} earns all there is"
            for one in self.untouched
            if one.reward is not None and one.reward >= FULL
        ]
        faults = by_kind(fault for one in self.sets for fault in one.faults)
        return [kind for kind in (*faults, shared, *failures.values(), free) if kind]


def report(findings: Findings, limits: Limits) -> Iterator[str]:
    """Lines for a person. `limits`: those of the run."""
    for one in findings.sets:
        yield from _set_lines(one, limits)
        yield ""
    if lines := list(_untouched_lines(findings, limits)):
        yield from (*lines, "")
    yield from _fault_lines(findings.kinds)


def _fault_lines(kinds: Sequence[Sequence[str]]) -> Iterator[str]:
    count = sum(map(len, kinds))
    if not count:
        yield "No faults."
        return
    yield f"{count} faults" + (f", of {len(kinds)} kinds" if len(kinds) < count else "")
    for first, *alike in kinds:
        yield f"  {len(alike) + 1} times: {first}" if alike else f"  {first}"
        if alike:
            files = ", ".join(fault.partition(": ")[0] for fault in alike[:SHOWN_ALIKE])
            more = len(alike) - SHOWN_ALIKE
            yield f"    also {files}" + (f" and {more} more" if more > 0 else "")


def _set_lines(one: Survey, limits: Limits) -> Iterator[str]:
    yield f"{one.folder}: {one.num_tasks} tasks of {one.format}, {len(one.faults)} faulty"
    yield _row("verifiers", ", ".join(f"{name}: {count}" for name, count in sorted(one.verifiers.items())) or "none")
    size = f"{one.input_files} files, {in_units(one.input_bytes)}"
    yield _row("inputs", f"in {one.with_inputs} tasks; {size} in all workspaces together")
    if one.with_image:
        yield _row(
            "images", f"{one.num_images}, of {one.with_image} tasks; what they have in workspaces is not counted above"
        )
    leave = f"; in {one.with_mcp_host} on the host, which needs tasks.mcp.allow_host=true" if one.with_mcp_host else ""
    yield _row("MCP servers", f"in {one.with_mcp} tasks{leave}")
    yield _row("instructions", f"{_span(one.instruction_chars)} characters")
    if one.run_s is not None:
        cut = f"; limits.deadline_s leaves {limits.harness_s:g} s" if one.run_s.most > limits.harness_s else ""
        yield _row("time", f"{_span(one.run_s)} s for the harness{cut}")
    yield from (_row("note", f"in {count} tasks: {note}") for note, count in one.notes.items())
    yield from _named("same task", [" = ".join(ids) for ids in one.duplicates])


def _untouched_lines(findings: Findings, limits: Limits) -> Iterator[str]:
    scored = [one for one in findings.untouched if one.reward is not None]
    free = sorted((one for one in scored if one.reward), key=lambda one: -(one.reward or 0.0))
    if findings.untouched:
        yield (
            f"The untouched workspace, in {len(findings.untouched)} tasks, {findings.untouched_s:.0f} s: nothing in "
            f"{len(scored) - len(free)}, points in {len(free)}, no verdict in {len(findings.untouched) - len(scored)}"
        )
        if took := spread([round(one.verify_s, 1) for one in scored]):
            short = f"; limits.reserve_s leaves {limits.verify_s:g} s" if took.most > limits.verify_s else ""
            yield _row("time", f"{_span(took)} s for the verifier{short}")
        yield from _named("lacking", list(_lacking_lines(scored)))
        yield from _named("free", [f"{one.reward:.3g}  {one.task_id}{_parts(one)}" for one in free])
    if findings.rubrics_not_asked:
        yield f"The rubrics of {findings.rubrics_not_asked} tasks were not asked about: no judge is set (verify.judge)"


def _lacking_lines(scored: Sequence[Untouched]) -> Iterator[str]:
    tasks: dict[str, list[str]] = defaultdict(list)
    for one in scored:
        for what in one.lacking:
            tasks[what].append(one.task_id)
    for what, ids in sorted(tasks.items(), key=lambda item: -len(item[1])):
        more = f" and {len(ids) - SHOWN_ALIKE} more" if len(ids) > SHOWN_ALIKE else ""
        yield f"{what}, which the verifiers of {len(ids)} tasks looked for: {', '.join(ids[:SHOWN_ALIKE])}{more}"


def _named(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield from (_row(title, line) for line in lines[:SHOWN])
    if len(lines) > SHOWN:
        yield _row(title, f"and {len(lines) - SHOWN} more")


def _parts(one: Untouched) -> str:
    named = ", ".join(f"{name} {value:.3g}" for name, value in one.breakdown.items() if value)
    return f"  ({named})" if named else ""


def _row(title: str, text: str) -> str:
    return f"  {title:<14}{text}"


def _span(numbers: Spread | None) -> str:
    if numbers is None:
        return "no"
    return f"{numbers.least:g} to {numbers.most:g} (median {numbers.median:g})"


def in_units(num_bytes: int) -> str:
    """With three digits."""
    size, units = float(num_bytes), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.3g} {units[0]}"
