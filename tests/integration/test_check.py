"""The check of task sets in a real sandbox: points for nothing, and a verifier that fails, are seen."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from clawhpc.check import __main__ as check
from tests.fakes.task_sets import lay_harbor, lay_pinchbench
from tests.sandbox_parts import missing

pytestmark = pytest.mark.sandbox

FREE = "echo 1 > /logs/verifier/reward.txt\n"
CRASH = "#!/bin/bash\necho broken >&2\nexit 3\n"


def test_a_free_task_and_one_whose_verifier_crashes_are_found_among_sound_ones(
    tmp_path: Path, ledger_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lay_harbor(tmp_path / "set", "sound")
    lay_harbor(tmp_path / "set", "free", script=FREE, instruction="Do nothing.\n")
    lay_harbor(tmp_path / "set", "crash", script=CRASH, instruction="Crash.\n")
    lay_pinchbench(tmp_path / "notes", grading_type="automated")
    out = tmp_path / "out.json"
    sets = (f"tasks={tmp_path}/set", f"tasks={tmp_path}/notes")
    where = (f"cache_dir={tmp_path}/cache", f"scratch_dir={ledger_root}", f"hydra.run.dir={tmp_path}/hydra")
    monkeypatch.setattr(sys, "argv", ["check", *sets, f"json={out}", "sandbox.kind=bubblewrap", *where])
    with pytest.raises(SystemExit) as ended:
        check.main()
    shown, errors = capfd.readouterr()
    if "no sandbox works here" in errors:
        missing(errors)
    assert ended.value.code == 2
    assert "in 4 tasks" in shown
    assert "nothing in 2, points in 1, no verdict in 1" in shown
    found = msgspec.json.decode(out.read_bytes())
    assert {one["task_id"]: one["reward"] for one in found["untouched"]} == {
        "ours/sound": 0.0,
        "ours/free": 1.0,
        "ours/crash": None,
        "task_note": 0.0,
    }
    crash, free = found["problems"]
    assert crash.startswith(f"{tmp_path}/set/crash/tests/test.sh: the verifier of 'ours/crash' fails")
    assert "stderr: 'broken" in crash
    assert free == f"{tmp_path}/set/free/tests/test.sh: the untouched workspace of 'ours/free' earns all there is"
    assert os.listdir(ledger_root) == []
