"""What the tables and charts say of runs that are laid side by side."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from clawhpc.paths import RunPaths
from clawhpc.records import Judgement, Outcome, Usage, Verdict
from clawhpc.store import publish_rollout, read_rollouts
from clawhpc.view.compare import (
    Table,
    compare_curves,
    compare_other_curves,
    compare_tables,
    config_table,
    cost_table,
    difference_table,
    evaluation_table,
    outcome_table,
)
from clawhpc.view.compared import ComparedRun, read_run
from clawhpc.view.report_page import build_report
from tests.fakes.records import make_group, make_record, make_task
from tests.fakes.run import HOSTILE, write_run

Rewards = Mapping[str, float | None]
"""Task -> reward."""


def compared(
    folder: Path, evaluations: Mapping[int, Rewards], *, harnesses: Iterable[str] = ("pi",), config: str = "a: 1\n"
) -> ComparedRun:
    """A run with evaluations after so many steps."""
    paths = RunPaths(folder)
    for step, rewards in evaluations.items():
        for harness in harnesses:
            for task, reward in rewards.items():
                group = make_group(task, phase="eval", step=step, harness=harness)
                publish_rollout(paths, make_record(group, 0, reward))
    paths.root.mkdir(exist_ok=True)
    paths.config.write_text(config)
    return read_run(folder.name, paths)


def cells(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.heads, row, strict=True)) for row in table.rows]


def test_the_last_evaluation_is_shown_with_intervals_and_each_harness_by_itself(tmp_path: Path) -> None:
    run = compared(tmp_path / "r", {0: {"a": 0.0}, 3: {"a": 1.0, "b": 0.5, "c": None}}, harnesses=("pi", "codex"))
    rows = cells(evaluation_table([run]))
    assert [row["harness"] for row in rows] == ["all", "codex", "pi"]
    assert rows[0] | {"pass@1": "", "reward": ""} == {
        **{"run": "r", "harness": "all", "after step": "3", "tasks": "2", "rollouts": "4", "failed": "2"},
        **{"reward": "", "pass@1": ""},
    }
    assert rows[0]["pass@1"] == "0.500 [0.000, 1.000]"
    assert rows[1]["reward"] == "0.750 [0.500, 1.000]"


def test_differences_are_paired_over_what_two_evaluations_share(tmp_path: Path) -> None:
    tasks = "abcd"
    first = compared(tmp_path / "first", {0: dict.fromkeys(tasks, 0.0), 9: dict.fromkeys(tasks, 1.0)})
    second = compared(tmp_path / "second", {9: dict.fromkeys("abx", 0.0)})
    other = compared(tmp_path / "other", {9: {"y": 1.0}})
    rows = cells(difference_table([first, second, other]))
    assert [row["run"] for row in rows] == ["first", "second"]  # nothing to say of the other one
    assert rows[0]["since its first evaluation"] == "+1.000 [+1.000, +1.000]"
    assert rows[0]["against first"] == ""
    assert rows[1]["since its first evaluation"] == "–"
    assert rows[1]["against first"] == "-1.000 [-1.000, -1.000]"


def test_tasks_of_one_id_are_not_compared_where_they_ask_for_different_things(tmp_path: Path) -> None:
    runs = []
    for name, number in (("one", 1), ("two", 2), ("again", 2)):
        paths = RunPaths(tmp_path / name)
        task = replace(make_task("t"), instruction=f"Write {number}.")
        publish_rollout(paths, make_record(make_group("t", phase="eval", step=9, task=task), 0, 1.0))
        paths.config.write_text("a: 1\n")
        runs.append(read_run(name, paths))
    (row,) = cells(difference_table(runs))
    assert (row["run"], row["against one"], row["against two"]) == ("again", "–", "+0.000 [+0.000, +0.000]")


def test_of_an_evaluation_each_policy_is_compared_by_its_name(tmp_path: Path) -> None:
    compared(tmp_path / "e", {0: dict.fromkeys("ab", 0.0), 1: dict.fromkeys("ab", 1.0), 2: {"a": 1.0}})
    paths = RunPaths(tmp_path / "e")
    paths.policies.mkdir()
    paths.policy_numbers.write_text("{}")
    assert [row["run"] for row in cells(evaluation_table([read_run("e", paths)]))] == [
        f"e: evaluation {step}" for step in range(3)
    ]
    told = [(0, "start", "s"), (1, "trained", "s"), (2, "start", "t")]
    done = [
        {"step": step, "policy": policy, "set": name, "harness": "pi", "table": {"policy_usd": usd}}
        for (step, policy, name), usd in zip(told, (None, 1.25, 0.5), strict=True)
    ]
    paths.finished.write_text(json.dumps({"cells": done, "cpu_s": {"engine": 1.0}}))
    run = read_run("e", paths)
    rows = cells(difference_table([run]))
    assert [row["run"] for row in rows] == ["e: trained on s", "e: start on t"]
    assert rows[0]["against e: start on s"] == "+1.000 [+1.000, +1.000]"
    assert not [chart for chart in compare_curves([run]) if chart.title == "Evaluation"]
    assert cells(cost_table([run]))[0]["USD, API"] == "1.75"


def test_what_judges_cost_is_summed_as_far_as_they_say_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "judged")
    for sample, usd in enumerate((0.25, None, 0.5)):
        judged = Judgement(
            opinions=(),
            score=1.0,
            agreement=None,
            spread={},
            prompt_digest="",
            num_requests=1,
            usage=Usage(input_tokens=1, output_tokens=1),
            cost_usd=usd,
        )
        record = make_record(make_group(num_samples=3), sample)
        publish_rollout(paths, replace(record, verdict=Verdict(reward=1.0, judgement=judged)))
    paths.config.write_text("a: 1\n")
    run = read_run("judged", paths)
    assert cells(cost_table([run]))[0]["USD, judge"] == "0.75"
    assert "there may be more" in cost_table([run]).note
    free = cost_table([compared(tmp_path / "other", {0: {"a": 1.0}})])
    assert "USD, judge" not in free.heads
    assert "USD" not in free.note


def test_only_keys_that_differ_are_listed_and_one_that_a_run_lacks_is_no_value(tmp_path: Path) -> None:
    one = compared(tmp_path / "one", {}, config="run: {name: x}\nlr: 0.1\nnames: [a, b]\nempty: {}\n")
    two = compared(tmp_path / "two", {}, config="run: {name: x}\nlr: 0.2\nnames: [a]\nmore: {deep: null}\nempty: {}\n")
    assert cells(config_table([one, two])) == [
        {"key": "lr", "one": "0.1", "two": "0.2"},
        {"key": "names", "one": '["a", "b"]', "two": '["a"]'},
        {"key": "more.deep", "one": "–", "two": "null"},
    ]
    assert config_table([one, one]).rows == []


def test_outcomes_and_costs_are_those_of_all_rollouts(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "run", steps=2)
    run = read_run("run", paths)
    assert sum(run.outcomes.values()) == run.totals.rollouts == 36
    (row,) = cells(outcome_table([run]))
    count = run.outcomes[Outcome.COMPLETED]
    assert row["completed"] == f"{count} ({count / 36:.1%})"
    (cost,) = cells(cost_table([run]))
    assert (cost["state"], cost["steps"]) == ("not finished", "2")
    times = [record.timings for record in read_rollouts(paths)]
    wall_s = max(one.started_at + one.wall_s for one in times) - min(one.started_at for one in times)
    assert cost["wall clock"] == f"{wall_s:.0f} s"
    paths.finished.write_text('{"cpu_s": {"learner": 7.0}}')
    (cost,) = cells(cost_table([read_run("run", paths)]))
    assert (cost["state"], cost["CPU, learner"]) == ("finished", "7 s")


def test_every_run_is_a_line_of_its_own_colour_in_every_chart_whatever_it_has_logged(tmp_path: Path) -> None:
    whole, bare = read_run("whole", write_run(tmp_path / "whole")), compared(tmp_path / "bare", {0: {"a": 1.0}})
    charts = {chart.title: chart for chart in compare_curves([bare, whole])}
    assert {"Reward", "Evaluation", "Entropy", "Clip share", "Truncated share", "Time per step"} <= charts.keys()
    assert all([one.name for one in chart.series] == ["bare", "whole"] for chart in charts.values())
    assert charts["Entropy"].series[0].points == []
    assert [step for step, _ in charts["Evaluation"].series[1].points] == [0.0, 4.0]
    step_time = charts["Time per step"].series[1].points[0][1]
    assert step_time == pytest.approx(
        sum(whole.metrics[f"time/{part}_s"][0][1] for part in ("collect", "build", "learn"))
    )
    others = {chart.title for chart in compare_other_curves([bare, whole])}
    assert "train/pi/reward" in others
    assert "train/entropy" not in others


def test_nine_runs_and_more_have_a_page_though_colours_come_again(tmp_path: Path) -> None:
    run = read_run("run", write_run(tmp_path / "run", steps=1))
    page = build_report([run] * 9)
    assert set(re.findall(r"slot-(\d+)", page.split("</style>")[1])) == set("01234567")


def test_the_page_fetches_nothing_and_says_what_there_is_not(tmp_path: Path) -> None:
    empty = compared(tmp_path / "<img src=x>", {}, config=f"text: {json.dumps(HOSTILE)}\n")
    page = build_report([empty, compared(tmp_path / "b", {})])
    assert "None of the runs has logged a step." in page
    assert "Last evaluation" not in page
    body = page.split("</style>")[1]
    assert "<img" not in body
    assert "&lt;script&gt;" in body  # the key that differs, as a text
    assert not re.search(r"<[a-z]+[^>]*\s(src|href|action|data)=|@import|url\(", body)
    assert not re.search(r"https?:|fetch\(|import\(|innerHTML|eval\(", body)
    assert "default-src 'none'" in page


def test_no_table_has_a_row_whose_cells_are_not_those_of_its_heads(tmp_path: Path) -> None:
    runs = [read_run(name, write_run(tmp_path / name, steps=2, seed=seed)) for seed, name in enumerate("abc")]
    for table in (*compare_tables(runs), config_table(runs)):
        assert {len(row) for row in table.rows} <= {len(table.heads)}
