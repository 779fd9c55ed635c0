"""The smoke run as a user starts it: one step of everything, from a policy that does not exist yet to the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clawhpc.paths import RunPaths
from clawhpc.store import published_steps, read_policy, read_rollouts
from tests.campaign_parts import Desk, attempts, cut_off

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.sandbox]

START_S = 400.0
"""For one command, on a busy machine with two cores."""


def test_the_smoke_run_makes_a_policy_and_trains_it_for_one_step_and_looks_for_no_network(desk: Desk) -> None:
    overrides = {"debug": "one_step", "policy.folder": desk.folder / "policy"}
    for name in ("sft", "train"):
        command = desk.start_plain(name, overrides, network=False)
        assert command.wait(START_S) == 0, command.text()
        assert attempts(command.counts) == {}
        assert desk.left() == []
    paths = RunPaths(desk.folder / "runs/debug/001")
    assert published_steps(paths) == [0, 1]
    assert json.loads(paths.finished.read_bytes())["steps"] == 1
    phases = [record.key.phase for record in read_rollouts(paths)]
    assert (phases.count("eval"), phases.count("train")) == (8, 16)
    assert list(paths.metrics.glob("wandb/offline-run-*/*.wandb"))
    assert read_policy(paths.policy(1)).digest != read_policy(paths.policy(0)).digest, "no group had a spread"
    again = desk.start_plain("sft", overrides)
    assert again.wait(START_S) == 0, again.text()
    assert "is there already" in again.text()


LOOK = """
import contextlib, socket
with contextlib.suppress(OSError):
    socket.create_connection(("192.0.2.1", 443), timeout=5)
"""


def test_who_looks_for_a_network_that_is_not_there_is_found_out(tmp_path: Path) -> None:
    subprocess.run(cut_off([sys.executable, "-c", LOOK], tmp_path / "counts"), check=True, timeout=60)
    assert attempts(tmp_path / "counts") == {"Ip: OutNoRoutes": 1}
