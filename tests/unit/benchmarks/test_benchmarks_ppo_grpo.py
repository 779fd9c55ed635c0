"""The page of PPO and GRPO from made-up runs: every judgement on it follows from their numbers."""

from __future__ import annotations

import csv
import math
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.kept import write_kept
from benchmarks.page import NOTES
from benchmarks.ppo_grpo import page, write_page
from benchmarks.ppo_grpo_runs import ALGORITHMS, Arm, Study, find, make_runs, read_result, run_arm
from clawhpc.paths import RunPaths
from clawhpc.store import publish_rollout
from tests.fakes.records import make_group, make_record

NUM_STEPS = 40
Curve = Callable[[int], float]


def rises(step: int) -> float:
    return 0.4 + 0.4 * step / NUM_STEPS


def collapses(step: int) -> float:
    return rises(step) if step < 30 else 0.1


def lay_run(study: Study, arm: Arm, reward: Curve, *, skipped: int = 0) -> None:
    paths, chance = RunPaths(study.runs(arm) / "001"), random.Random(arm.name)
    for step, num_passed in ((0, 2), (NUM_STEPS, 3)):
        for task in range(4):
            group = make_group(f"t{task}", phase="eval", step=step, harness="whitebox", num_samples=1)
            publish_rollout(paths, make_record(group, reward=float(task < num_passed)))
    paths.metrics.mkdir(parents=True)
    rows = []
    for step in range(NUM_STEPS):
        row = {
            "step": step,
            "train/reward": reward(step) + chance.gauss(0, 0.02),
            "train/entropy": 0.5 * math.exp(-step / 30),
            "train/clip_share": 0.02,
            "train/truncated_share": 0.0,
            "train/grad_norm": abs(chance.gauss(1, 0.2)),
            "train/update_kl": 2e-3,
            "train/sampling_gap_max": 2e-5,
            "train/no_credit_share": 0.2,
            "train/skipped_updates": float(skipped if step == 5 else 0),
            "time/collect_s": 15.0,
            "time/learn_s": 3.0,
        }
        if arm.algorithm == "ppo":
            row["credit/explained_variance"] = step / 100
        rows.append(row)
    with paths.metrics_csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    paths.config.write_text(
        "campaign: {groups_per_step: 8, samples_per_group: 8}\nlearner: {epochs: 4, lr: 0.0002, schedule: linear}\n"
    )
    paths.finished.write_text("{}")
    cold_start = RunPaths(study.cold_starts(arm.seed) / "001")
    cold_start.root.mkdir(parents=True, exist_ok=True)
    cold_start.finished.touch()


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(steps=((0, NUM_STEPS),), root=tmp_path / "runs", page=tmp_path / "docs" / "ppo_grpo.md", window=5)


def rows_after(text: str, heading: str) -> list[str]:
    return [line for line in text.split(f"## {heading}")[1].split("\n## ")[0].splitlines() if line.startswith("| ")]


def test_the_page_shows_both_and_the_picture_their_curves(study: Study) -> None:
    for arm in study.arms:
        lay_run(study, arm, rises)
    make_runs(study)
    write_page(study)
    text = study.page.read_text()
    assert re.search(
        r"^\d{4}-\d\d-\d\d, \d+ cores \(\w+\), no GPU\. Made by `python -m benchmarks\.ppo_grpo`\.$", text, re.MULTILINE
    )
    assert study.page.with_suffix(".png").stat().st_size > 10_000
    grpo, ppo = rows_after(text, "What was learned")[1:]
    assert grpo.startswith("| GRPO, seed 0 | 40 | 0.500 [0.000, 1.000] | 0.750 ")
    assert "| 0.250 [0.000, 0.750] | 4, 4 |" in ppo
    assert "- Seed 0: pass@1 of PPO minus that of GRPO after training, paired by task: 0.000 [0.000, 0.000]." in text
    grpo, ppo = rows_after(text, "Curves in numbers")[1:]
    assert grpo.endswith("| – → – |")
    assert ppo.endswith("| 0.02 → 0.37 |")
    assert "8 tasks × 8 rollouts a step, 4 updates, learning rate 0.0002, schedule linear" in text
    assert "| 10.0 | 2.0 | 18.0 | completed 8 |" in text


def test_a_run_is_called_stable_by_the_rule_that_the_page_states(study: Study) -> None:
    grpo, ppo = study.arms
    lay_run(study, grpo, rises, skipped=1)
    lay_run(study, ppo, collapses)
    make_runs(study)
    results = [read_result(study, arm) for arm in study.arms]
    text = "\n".join(page(study, results))
    rising, falling = rows_after(text, "Stability")[1:]
    assert rising.startswith("| GRPO, seed 0 | **no** | 0.0")
    assert "| 1 |" in rising
    assert falling.startswith("| PPO, seed 0 | **no** | 0.5")
    assert "| 29 → " in falling
    assert "never falls by more than 0.1 below an earlier one" in text


def test_a_steady_run_is_stable_and_a_fall_is_measured_from_the_highest_mean_before_it(study: Study) -> None:
    arm = study.arms[0]
    lay_run(study, arm, lambda step: 0.5 if step % 20 < 15 else 0.44)
    write_kept(study.kept(arm), find(study, arm))
    result = read_result(study, arm)
    assert result.stable
    assert result.fall[0] == pytest.approx(0.06, abs=0.03)
    assert result.fall[1] < result.fall[2]


def test_the_page_is_made_from_what_is_kept_and_the_notes_of_a_person_stay(study: Study) -> None:
    for arm in study.arms:
        lay_run(study, arm, rises)
    make_runs(study)
    write_page(study)
    written = study.page.read_text()
    shutil.rmtree(study.root)
    study.page.write_text(f"{written}\n{NOTES}\n\nSeen.\n")
    make_runs(study)  # both are kept: nothing is left to do
    write_page(study)
    assert study.page.read_text() == f"{written}\n{NOTES}\n\nSeen.\n"


PROGRAM = """#!{python}
import sys
from pathlib import Path
given = dict(one.split("=", 1) for one in sys.argv[3:])
name = sys.argv[2].removeprefix("clawhpc.")
with open("{log}", "a") as log:
    print(name, given["run.name"], given.get("algorithm", ""), given.get("campaign.num_steps", ""), file=log)
run = Path(given["run.root"], "cold_starts" if name == "sft" else "", given["run.name"], "001")
run.mkdir(parents=True)
(run / "finished.json").touch()
"""


def test_both_begin_with_one_policy_and_what_has_finished_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(PROGRAM.format(python=sys.executable, log=log))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    study = Study(steps=((0, 200), (1, 60)), root=tmp_path / "runs")
    for arm in study.arms:
        run_arm(study, arm)
    assert log.read_text().splitlines() == [
        *("sft start_0  ", "train grpo_0 dapo 200", "train ppo_0 ppo 200"),
        *("sft start_1  ", "train grpo_1 dapo 60", "train ppo_1 ppo 60"),
    ]
    for arm in study.arms:
        run_arm(study, arm)
    assert len(log.read_text().splitlines()) == 6
    for seed in (0, 1):
        starts = {
            word for arm in study.arms if arm.seed == seed for word in study.train(arm) if "policy.folder" in word
        }
        assert starts == {f"policy.folder={study.start(seed)}"}
    assert {arm.algorithm for arm in study.arms} == set(ALGORITHMS)
