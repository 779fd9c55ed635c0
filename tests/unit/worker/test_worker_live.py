"""A worker's start and end, as its job sees them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

from clawhpc.errors import HostError
from clawhpc.ledger import Ledger
from clawhpc.sandbox.base import Sandbox
from clawhpc.worker.run import live
from tests.fakes.slurm_worker import stub_spec


def test_a_signal_that_ends_the_trial_of_a_sandbox_and_the_worker_is_no_fault_of_the_host(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended(*_: object, **__: object) -> Sandbox:
        await anyio.wait_all_tasks_blocked()  # it listens by now
        os.kill(os.getpid(), signal.SIGTERM)
        raise HostError("no sandbox works here")

    monkeypatch.setattr("clawhpc.worker.run.open_sandbox", ended)
    assert anyio.run(live, stub_spec(tmp_path), "w0", ledger) is signal.SIGTERM
