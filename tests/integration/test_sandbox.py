"""What a sandbox promises, held by both kinds."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from clawhpc.errors import SandboxError
from clawhpc.ledger import Ledger
from clawhpc.records import ExecResult
from clawhpc.sandbox.apptainer import Apptainer, find_apptainer
from clawhpc.sandbox.base import PROXY_PORT, Mount, Sandbox, SandboxCommand
from clawhpc.sandbox.container import TAIL_BYTES, Container
from clawhpc.sandbox.root import Root, host_root
from clawhpc.sandbox.settings import SandboxSettings
from tests.sandbox_parts import KINDS, missing, running, working_sandbox

pytestmark = pytest.mark.anyio
WORKSPACE = "/root/.openclaw/workspace"


@pytest.fixture
def needle() -> str:
    """An argument of `sleep` by which the processes of one test are known on the host."""
    return f"987{uuid.uuid4().int % 10**9}"


def shell(script: str, **fields: object) -> SandboxCommand:
    return SandboxCommand(
        sandbox_id="test",
        argv=("/bin/bash", "-c", script),
        **{"env": {}, "cwd": "/root", **fields},  # type: ignore[arg-type]
    )


def python(script: str, **fields: object) -> SandboxCommand:
    argv = ("/usr/bin/python3", "-c", textwrap.dedent(script))
    return SandboxCommand(sandbox_id="test", argv=argv, **{"env": {}, "cwd": "/root", **fields})  # type: ignore[arg-type]


async def run(sandbox: Sandbox, command: SandboxCommand, timeout_s: float = 30) -> ExecResult:
    return await sandbox.run(command, timeout_s=timeout_s)


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
        sandbox, shell("head -c 300000000 /dev/zero | tr '\\0' x; echo end; head -c 300000 /dev/zero >&2")
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


async def test_a_command_that_kills_its_parent_harms_only_itself(sandbox: Sandbox) -> None:
    result = await run(sandbox, shell("kill -KILL $PPID; sleep 0.2; exit 5"))
    assert result.exit_code == {"bubblewrap": 5, "apptainer": 137}[sandbox.name]


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


# ---- the network ----------------------------------------------------------------------------------------------------


@contextmanager
def serving(family: int, address: object, answer: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    """A server on the host that gives each connection to `answer`, in a thread of its own."""
    with socket.socket(family) as listener:
        listener.bind(address)
        listener.listen(64)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=finish, args=(connection,), daemon=True).start()

        def finish(connection: socket.socket) -> None:
            with connection:
                answer(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def echo(connection: socket.socket) -> None:
    while data := connection.recv(1000):
        connection.sendall(data)
    connection.sendall(b" after your end")


async def test_the_hosts_loopback_and_the_world_are_out_of_reach(sandbox: Sandbox) -> None:
    script = """
        import socket, sys
        for address in (("127.0.0.1", int(sys.argv[1])), ("192.0.2.1", 80), ("127.0.0.1", 8377)):
            try:
                socket.create_connection(address, timeout=2)
                print("connected", address)
            except OSError as error:
                print(type(error).__name__)
    """
    with serving(socket.AF_INET, ("127.0.0.1", 0), echo) as listener:
        command = python(script)
        port = str(listener.getsockname()[1])
        result = await run(sandbox, SandboxCommand(sandbox_id="test", argv=(*command.argv, port), env={}, cwd="/"))
    assert result.stdout_tail.split() == ["ConnectionRefusedError", "OSError", "ConnectionRefusedError"]


async def test_the_proxy_is_reached_without_delay_in_both_directions_and_by_many(
    sandbox: Sandbox, ledger: Ledger
) -> None:
    script = f"""
        import socket, threading, time
        def talk(number):
            with socket.create_connection(("127.0.0.1", {PROXY_PORT})) as connection:
                for turn in range(20):  # each byte is answered before the next is sent: nothing may wait in a buffer
                    connection.sendall(b"%d" % (turn % 10))
                    assert connection.recv(10) == b"%d" % (turn % 10)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(100) == b" after your end"
                done.append(number)
        done = []
        started = time.monotonic()
        threads = [threading.Thread(target=talk, args=(n,)) for n in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(len(done), time.monotonic() - started < 5)
    """
    path = ledger.scratch / "proxy.sock"
    with serving(socket.AF_UNIX, str(path), echo):
        result = await run(sandbox, python(script, proxy_socket=path))
    assert (result.stdout_tail, result.stderr_tail) == ("16 True\n", "")


async def test_large_bodies_pass_the_forwarder_whole(sandbox: Sandbox, ledger: Ledger) -> None:
    script = f"""
        import hashlib, socket
        body = bytes(range(256)) * 40000
        with socket.create_connection(("127.0.0.1", {PROXY_PORT})) as connection:
            connection.sendall(body)
            connection.shutdown(socket.SHUT_WR)
            print(connection.makefile("rb").read().decode() == hashlib.sha256(body).hexdigest())
    """

    def digest(connection: socket.socket) -> None:
        import hashlib

        connection.sendall(hashlib.sha256(connection.makefile("rb").read()).hexdigest().encode())

    path = ledger.scratch / "proxy.sock"
    with serving(socket.AF_UNIX, str(path), digest):
        assert (await run(sandbox, python(script, proxy_socket=path))).stdout_tail == "True\n"


async def test_a_proxy_that_has_gone_closes_the_connection(sandbox: Sandbox, ledger: Ledger) -> None:
    path = ledger.scratch / "proxy.sock"
    with socket.socket(socket.AF_UNIX) as nobody:
        nobody.bind(str(path))
    script = f"import socket; print(socket.create_connection(('127.0.0.1', {PROXY_PORT}), timeout=5).recv(10))"
    assert (await run(sandbox, python(script, proxy_socket=path))).stdout_tail == "b''\n"


async def test_the_proxy_learns_that_a_client_has_gone(sandbox: Sandbox, ledger: Ledger) -> None:
    ended = threading.Event()

    def stream(connection: socket.socket) -> None:
        connection.recv(100)
        try:
            while True:
                connection.sendall(b"x" * 1000)
        except OSError:
            ended.set()

    script = f"""
        import socket, time
        connection = socket.create_connection(("127.0.0.1", {PROXY_PORT}))
        connection.sendall(b"go")
        connection.recv(10)
        connection.close()
        time.sleep(0.5)
    """
    path = ledger.scratch / "proxy.sock"
    with serving(socket.AF_UNIX, str(path), stream):
        await run(sandbox, python(script, proxy_socket=path))
        assert await anyio.to_thread.run_sync(ended.wait, 5)


# ---- images ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_an_image_has_its_own_programs_and_the_same_rules(
    kind: str, image: Path, ledger: Ledger, cache_dir: Path, tmp_path: Path
) -> None:
    settings = SandboxSettings(kind=kind, image=str(image))  # type: ignore[arg-type]
    sandbox = await working_sandbox(settings, ledger, cache_dir)
    workspace = Mount(source=tmp_path, target=WORKSPACE, writable=True)
    script = "cat /etc/debian_version; git --version; id -un; : > mine; touch /usr/x /x; ls /usr/bin/gcc"
    result = await run(sandbox, shell(script, mounts=(workspace,), cwd=WORKSPACE))
    version, git, user = result.stdout_tail.splitlines()
    assert version.startswith("12.")
    assert git.startswith("git version")
    assert user == ("root" if os.getuid() == 0 else "user")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert result.stderr_tail.count("Read-only file system") == 2


@pytest.mark.sandbox
async def test_the_packaged_bubblewrap_serves_where_none_is_installed(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox = await working_sandbox(SandboxSettings(), ledger, tmp_path)
    assert sandbox.name == "bubblewrap"
    assert (await run(sandbox, shell("exit 6"))).exit_code == 6


@pytest.mark.parametrize("kind", KINDS)
async def test_our_own_interpreter_serves_where_the_hosts_is_missing(
    kind: str, ledger: Ledger, cache_dir: Path
) -> None:
    working = await working_sandbox(SandboxSettings(kind=kind), ledger, cache_dir)  # type: ignore[arg-type]
    assert isinstance(working, Container)
    root = host_root(ledger.scratch / "top", python="/usr/bin/no-python")
    sandbox = Container(backend=working.backend, root=root, ledger=ledger)
    result = await run(sandbox, shell("tr '\\0' ' ' < /proc/$PPID/cmdline; ls -A /root"))
    assert result.stdout_tail.startswith(f"/run/clawhpc/python/bin/python3.{sys.version_info.minor} ")
    assert result.stdout_tail.count("\n") == 0


@pytest.fixture
def file_image_sandbox(ledger: Ledger, cache_dir: Path) -> Container:
    """Apptainer on an image that is a file, which it mounts through a FUSE process."""
    program = find_apptainer(cache_dir) or missing("Apptainer")
    host = host_root(ledger.scratch / "top")
    file = ledger.scratch / "top.sqfs"
    subprocess.run(["mksquashfs", str(host.base), str(file), "-quiet", "-no-progress"], check=True, capture_output=True)
    backend = Apptainer(program=program, config_dir=ledger.scratch / "apptainer")
    return Container(backend=backend, root=Root(base=file, mounts=host.mounts, python=host.python), ledger=ledger)


@pytest.mark.apptainer
async def test_no_fuse_process_outlives_a_container(file_image_sandbox: Container, needle: str) -> None:
    before = set(running("squashfuse"))
    async with anyio.create_task_group() as group:
        group.start_soon(run, file_image_sandbox, shell(f"setsid sleep {needle} & sleep {needle}"))
        with anyio.fail_after(10):
            while len(running(needle)) < 3:
                await anyio.sleep(0.02)
        assert set(running("squashfuse")) > before
        group.cancel_scope.cancel()
    assert running(needle) == []
    assert set(running("squashfuse")) <= before
    assert (await run(file_image_sandbox, shell("exit 4"))).exit_code == 4
    assert set(running("squashfuse")) <= before


@pytest.mark.apptainer
@pytest.mark.parametrize("timeout_s", [0.02, 0.05, 0.1, 0.15, 0.2])
async def test_no_fuse_process_outlives_a_start_that_is_cut_off(
    timeout_s: float, file_image_sandbox: Container, ledger: Ledger, needle: str
) -> None:
    before = set(running("squashfuse"))
    assert (await run(file_image_sandbox, shell(f"sleep {needle}"), timeout_s=timeout_s)).timed_out
    assert running(needle) == running(str(ledger.scratch)) == []
    assert set(running("squashfuse")) <= before
