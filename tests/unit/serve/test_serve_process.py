"""A process and all that it has started are gone when the block ends."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest

from clawhpc.serve.process import running

pytestmark = pytest.mark.anyio
STUBBORN = "trap '' TERM; (trap '' TERM; echo $BASHPID; sleep 1000) & echo $BASHPID; wait; wait"
"""Prints two process ids, and neither of them heeds SIGTERM."""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def printed(log: Path, lines: int) -> list[str]:
    with anyio.fail_after(10):
        while len(log.read_text().splitlines()) < lines:
            await anyio.sleep(0.01)
    return log.read_text().splitlines()


async def test_a_stubborn_family_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with anyio.fail_after(5):
        async with running(
            ["bash", "-c", STUBBORN], environment={}, folder=tmp_path, log=log, stop_timeout_s=0.2
        ) as process:
            pids = [int(line) for line in await printed(log, 2)]
            assert process.pid in pids
            assert all(map(is_running, pids))
    with anyio.fail_after(5):
        while any(map(is_running, pids)):
            await anyio.sleep(0.01)


async def test_a_family_whose_head_has_died_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["bash", "-c", "sleep 1000 & echo $!; exec true"]
    async with running(command, environment={}, folder=tmp_path, log=log, stop_timeout_s=5) as process:
        (pid,) = map(int, await printed(log, 1))
        await process.wait()
        assert is_running(pid)
    with anyio.fail_after(5):
        while is_running(pid):
            await anyio.sleep(0.01)


async def test_a_process_that_has_said_so_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "from clawhpc.ledger.parent import *; import os; die_with_parent(); print(os.getpid(), flush=1); os.read(0, 1)"
    )
    log = tmp_path / "log"
    command = ["bash", "-c", f'sleep 1000 | "{sys.executable}" -c "{program}"; true']
    async with running(command, environment={}, folder=tmp_path, log=log, stop_timeout_s=5) as process:
        (pid,) = map(int, await printed(log, 1))
        process.kill()
        with anyio.fail_after(5):
            while is_running(pid):
                await anyio.sleep(0.01)


async def test_it_is_stopped_also_when_the_block_is_cancelled(tmp_path: Path) -> None:
    with anyio.move_on_after(0.1):
        async with running(
            ["sleep", "1000"], environment={}, folder=tmp_path, log=tmp_path / "log", stop_timeout_s=5
        ) as process:
            await anyio.sleep_forever()
    assert process.returncode is not None


async def test_it_runs_in_its_folder_and_environment_and_its_output_is_added(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    async with running(
        ["bash", "-c", "echo $MARK $PWD; echo wrong >&2"],
        environment={"MARK": "ours"},
        folder=tmp_path,
        log=log,
        stop_timeout_s=5,
    ) as process:
        assert await process.wait() == 0
    assert log.read_text() == f"before\nours {tmp_path}\nwrong\n"
