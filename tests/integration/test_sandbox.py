"""What a sandbox promises of the command that it runs, held by both kinds."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import anyio
import pytest

from clawhpc.errors import SandboxError
from clawhpc.ledger import Ledger
from clawhpc.sandbox.base import Mount, Sandbox, SandboxCommand
from clawhpc.sandbox.container import TAIL_BYTES
from tests.sandbox_parts import WORKSPACE, python, run, running, shell

pytestmark = pytest.mark.anyio


def run_folders(ledger: Ledger) -> list[Path]:
    return list(ledger.scratch.glob("run-*"))


# ---- how a command ends ---------------------------------------------------------------------------------------------


async def test_exit_code_and_both_tails_come_back(sandbox: Sandbox, ledger: Ledger) -> None:
    result = await run(sandbox, shell("echo out; echo err >&2; exit 7"))
    assert (result.exit_code, result.stdout_tail, result.stderr_tail) == (7, "out\n", "err\n")
    assert not result.timed_out
    assert run_folders(ledger) == []


async def test_death_by_a_signal_is_128_and_its_number(sandbox: Sandbox) -> None:
    assert (await run(sandbox, shell("kill -TERM $$"))).exit_code == 128 + 15


async def test_a_timeout_ends_everything_and_keeps_what_was_printed(
    sandbox: Sandbox, ledger: Ledger, needle: str
) -> None:
    script = f"setsid sleep {needle} & (setsid nohup sleep {needle} &) ; trap '' TERM; echo ready; sleep {needle}"
    result = await run(sandbox, shell(script), timeout_s=3)
    assert running(needle) == []
    assert (result.timed_out, result.exit_code, result.stdout_tail) == (True, 124, "ready\n")
    assert 3 <= result.wall_s < 6
    assert run_folders(ledger) == []


async def test_a_cancelled_run_leaves_nothing(sandbox: Sandbox, ledger: Ledger, needle: str) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(run, sandbox, shell(f"setsid sleep {needle} & sleep {needle}"))
        with anyio.fail_after(10):
            while len(running(needle)) < 3:  # bash and two sleeps
                await anyio.sleep(0.02)
        group.cancel_scope.cancel()
    assert running(needle) == []
    assert run_folders(ledger) == []


async def test_a_start_that_is_cancelled_leaves_nothing(sandbox: Sandbox, ledger: Ledger, needle: str) -> None:
    for delay_s in (0.0, 0.01, 0.03, 0.1):
        with anyio.move_on_after(delay_s):
            await run(sandbox, shell(f"sleep {needle}"))
        assert running(needle) == []
        assert running(str(ledger.scratch)) == []
        assert run_folders(ledger) == []


async def test_a_planted_background_process_is_dead_before_run_returns(
    sandbox: Sandbox, tmp_path: Path, needle: str
) -> None:
    script = f"(setsid sh -c 'trap \"\" HUP TERM; sleep {needle}; echo late > late' &) ; setsid sleep {needle} & exit 0"
    workspace = Mount(source=tmp_path, target=WORKSPACE, writable=True)
    result = await run(sandbox, shell(script, mounts=(workspace,), cwd=WORKSPACE))
    assert running(needle) == []
    assert result.exit_code == 0
    assert list(tmp_path.iterdir()) == []


async def test_cpu_seconds_include_those_of_orphans(sandbox: Sandbox) -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    script = f'(python3 -c "{burn}" && touch done) & disown; until [ -e done ]; do sleep 0.05; done'
    result = await run(sandbox, shell(f"({script})"))
    assert 0.3 <= result.cpu_s < 3


async def test_a_flood_of_output_keeps_its_tail_and_takes_no_memory(sandbox: Sandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await run(
        sandbox, shell("head -c 60000000 /dev/zero | tr '\\0' x; echo end; head -c 300000 /dev/zero >&2")
    )
    assert result.exit_code == 0
    assert len(result.stdout_tail) == len(result.stderr_tail) == TAIL_BYTES
    assert result.stdout_tail.endswith("xend\n")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kB


async def test_many_run_at_once(sandbox: Sandbox, ledger: Ledger) -> None:
    results: list[int] = []

    async def one(number: int) -> None:
        results.append((await run(sandbox, shell(f"exit {number}"), timeout_s=60)).exit_code)

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(one, number)
    assert sorted(results) == list(range(8))
    assert run_folders(ledger) == []


# ---- what fails -----------------------------------------------------------------------------------------------------


async def test_a_missing_program_is_an_error_that_names_it(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match=r"test: cannot start /opt/nothing: No such file"):
        await run(sandbox, SandboxCommand(sandbox_id="test", argv=("/opt/nothing",), env={}, cwd="/"))


async def test_a_missing_mount_is_an_error_that_names_it(sandbox: Sandbox, ledger: Ledger) -> None:
    with pytest.raises(SandboxError, match=r"did not start: .*/nowhere"):
        await run(sandbox, shell("true", mounts=(Mount(source=Path("/nowhere"), target="/opt/x"),)))
    assert run_folders(ledger) == []


async def test_the_command_cannot_forge_its_report(sandbox: Sandbox) -> None:
    script = """
        import glob, os, sys
        for path in glob.glob("/proc/[0-9]*/fd/*"):
            try:
                if os.path.isfile(path):
                    os.write(os.open(path, os.O_WRONLY), b'{"exit_code": 0, "cpu_s": 99}' + b" " * 9999)
            except OSError:
                pass
        sys.exit(3)
    """
    result = await run(sandbox, python(script))
    assert result.exit_code == 3
    assert result.cpu_s < 10


async def test_the_command_cannot_trace_the_first_process_nor_open_its_memory_and_files(sandbox: Sandbox) -> None:
    script = """
        import ctypes, os
        for path in ["/proc/1/mem", *(f"/proc/1/fd/{number}" for number in range(12))]:
            try:
                print(path, os.open(path, os.O_RDWR))
            except (PermissionError, FileNotFoundError):
                pass
        libc, seize = ctypes.CDLL(None), 0x4206
        print([thread for thread in os.listdir("/proc/1/task") if libc.ptrace(seize, int(thread), 0, 0) == 0])
    """
    assert (await run(sandbox, python(script))).stdout_tail == "[]\n"


async def test_no_signal_of_a_command_reaches_its_parent(sandbox: Sandbox) -> None:
    result = await run(sandbox, shell("for number in {1..64}; do kill -$number $PPID; done; sleep 0.2; exit 5"))
    assert result.exit_code == 5


# ---- what it sees ---------------------------------------------------------------------------------------------------


async def test_the_environment_is_what_was_given(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "1")
    result = await run(sandbox, python("import json, os; print(json.dumps(dict(os.environ)))", env={"A": "b c"}))
    seen = eval(result.stdout_tail)
    assert seen.pop("PATH").endswith("/usr/bin:/sbin:/bin")
    assert {name: value for name, value in seen.items() if name != "LC_CTYPE"} == {"A": "b c", "HOME": "/root"}


async def test_standard_input_is_empty_and_no_other_file_is_open(sandbox: Sandbox) -> None:
    script = """
        import os, sys
        print(repr(sys.stdin.read()), [n for n in range(300) if os.path.lexists(f"/proc/self/fd/{n}")])
    """
    assert (await run(sandbox, python(script))).stdout_tail == "'' [0, 1, 2]\n"


async def test_it_has_a_process_table_of_its_own(sandbox: Sandbox) -> None:
    result = await run(sandbox, shell("ps -e -o pid= | wc -l; kill -0 " + str(os.getpid())))
    assert int(result.stdout_tail) < 8
    assert "No such process" in result.stderr_tail


async def test_files_of_the_host_are_invisible(sandbox: Sandbox, ledger: Ledger, tmp_path: Path) -> None:
    (ledger.scratch / "other-rollout").mkdir()
    hidden = [Path(__file__), tmp_path, ledger.scratch / "other-rollout", Path("/etc/shadow"), Path("/etc/apt")]
    result = await run(sandbox, shell(f"ls -d {' '.join(map(str, hidden))}; ls -A /home /root /tmp /mnt /srv"))
    assert "/home:" not in result.stdout_tail or "/home:\n\n" in result.stdout_tail
    for path in hidden:
        assert f"{path}\n" not in result.stdout_tail
    assert "/root:\n\n" in result.stdout_tail
    assert result.stdout_tail.endswith("/tmp:\n")


async def test_the_root_file_system_cannot_be_written(sandbox: Sandbox) -> None:
    places = "/x /usr/x /etc/x /opt/x /run/x /etc/passwd /run/clawhpc/init.py /proc/sys/vm/swappiness"
    result = await run(sandbox, shell(f"for f in {places}; do (: >> $f) 2>/dev/null && echo $f; done; true"))
    assert result.stdout_tail == ""


async def test_the_settings_of_the_kernel_cannot_be_written(sandbox: Sandbox) -> None:
    """Nothing is printed for an ordinary user in any case; a real root needs no capability for some of them."""
    result = await run(sandbox, shell("find /proc/sys /proc/irq /proc/bus /proc/sysrq-trigger -writable 2>/dev/null"))
    assert result.stdout_tail == ""


async def test_home_and_writable_mounts_reach_the_host_and_nothing_else_does(sandbox: Sandbox, tmp_path: Path) -> None:
    home, workspace, tools = tmp_path / "home", tmp_path / "a,b", tmp_path / "tools"
    for folder in (home, workspace, tools):
        folder.mkdir()
    mounts = (
        Mount(source=tools, target="/opt/tools"),
        Mount(source=workspace, target=WORKSPACE, writable=True),
        Mount(source=tools, target=f"{WORKSPACE}/tools"),
    )
    script = (
        "echo 1 > $HOME/mine; echo 2 > mine; for f in tools/x /opt/tools/x; do echo 3 > $f; done; echo 4 > /tmp/mine"
    )
    await run(sandbox, shell(script, home=home, mounts=mounts, cwd=WORKSPACE))
    assert (home / "mine").read_text() == "1\n"
    assert (workspace / "mine").read_text() == "2\n"
    assert list(tools.iterdir()) == []
    assert (await run(sandbox, shell("ls -A /tmp /var/tmp $HOME"))).stdout_tail.count("mine") == 0
