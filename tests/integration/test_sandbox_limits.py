"""What a command may take of its host, and that it ends where it takes more, with all that it has started."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clawhpc.errors import UserError, VerifierError
from clawhpc.harness.claude_code import ClaudeCodeSettings
from clawhpc.harness.registry import make_harness
from clawhpc.ledger import Ledger
from clawhpc.proxy.respond import ScriptedResponder
from clawhpc.records import Conversation, ExecResult, Limits, Outcome, Reply
from clawhpc.rollout.run import RolloutParts, RolloutPlan, run_rollout
from clawhpc.sandbox.base import Mount, Sandbox
from clawhpc.sandbox.settings import SandboxLimits, SandboxSettings
from clawhpc.tasks.families import ShellStep
from clawhpc.tasks.oracle import shell_call
from clawhpc.verify.script import verify_workspace
from tests.fakes.records import make_group, make_task, script_verifier
from tests.sandbox_parts import WORKSPACE, missing, python, run, running, shell, working_sandbox

pytestmark = pytest.mark.anyio

BUBBLEWRAP = pytest.param("bubblewrap", marks=pytest.mark.sandbox)
APPTAINER = pytest.param("apptainer", marks=[pytest.mark.sandbox, pytest.mark.apptainer])
APPTAINER_SLOW = pytest.param("apptainer", marks=[pytest.mark.sandbox, pytest.mark.apptainer, pytest.mark.slow])
EITHER = pytest.mark.parametrize("kind", [BUBBLEWRAP, APPTAINER_SLOW])
MB = 1 / 1024
"""In gigabytes."""

OpenLimited = Callable[..., Awaitable[Sandbox]]


@pytest.fixture
def limited(arena: Ledger, cache_dir: Path) -> OpenLimited:
    """`limited(kind, memory_gb=..., ...)`: a sandbox with these limits."""

    async def open_limited(kind: str, image: Path | None = None, **limits: float) -> Sandbox:
        settings = SandboxSettings(
            kind=kind,  # type: ignore[arg-type]
            image=None if image is None else str(image),
            limits=SandboxLimits(**limits),  # type: ignore[arg-type]
        )
        return await working_sandbox(settings, arena, cache_dir)

    return open_limited


def check_ended(result: ExecResult, what: str) -> None:
    """By the limit on `what`, and by nothing else."""
    assert result.exceeded.startswith(f"{what}: "), result
    assert "; the limit is " in result.exceeded
    assert (result.exit_code, result.timed_out) == (137, False)


# ---- memory ---------------------------------------------------------------------------------------------------------

HOG = """
    import os, signal
    for _ in range(6):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            taken = b"x" * (40 << 20)
            signal.pause()  # NEEDLE
    signal.pause()  # NEEDLE
"""
"""Six times 40 MB, each in a process of its own session whose parent is gone."""


@pytest.mark.parametrize("kind", [BUBBLEWRAP, APPTAINER])
async def test_processes_that_together_take_too_much_memory_are_ended(
    kind: str, limited: OpenLimited, needle: str
) -> None:
    sandbox = await limited(kind, memory_gb=128 * MB)
    result = await run(sandbox, python(HOG.replace("NEEDLE", needle)))
    check_ended(result, "memory")
    assert running(needle) == []
    assert result.cpu_s > 0


NOBODYS = {
    "mapped": "memory = mmap.mmap(-1, 2 * size); memory.write(b'x' * 2 * size)",
    "in files": """
        os.write(os.memfd_create('x'), b'x' * size)
        open('/dev/shm/x', 'wb').write(b'x' * size)""",
    "segments that nobody has attached": """
        for number in range(8):
            place = libc.shmat(libc.shmget(0, size // 4, 0o1600), None, 0)
            ctypes.memset(place, 1, size // 4)
            libc.shmdt(place)""",
    "page tables": """
        memory = mmap.mmap(-1, 1 << 37, mmap.MAP_PRIVATE | 0x4000)  # MAP_NORESERVE: nothing but zeros, read
        memory.madvise(15)  # MADV_NOHUGEPAGE
        for place in range(0, 1 << 37, 1 << 21):
            memory[place]""",
    "a process's whose first thread has ended": """
        threading.Thread(target=lambda: (time.sleep(0.1), b'x' * 2 * size, time.sleep(60))).start()
        libc.syscall(60, 0)  # exit(2) of a thread""",
}


@EITHER
@pytest.mark.parametrize("way", NOBODYS)
async def test_memory_that_is_no_processs_own_counts(kind: str, way: str, limited: OpenLimited) -> None:
    script = f"""
        import ctypes, mmap, os, threading, time
        libc = ctypes.CDLL(None)
        libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
        libc.shmdt.argtypes = [ctypes.c_void_p]
        size = 80 << 20
        {NOBODYS[way]}
        time.sleep(60)
    """
    check_ended(await run(await limited(kind, memory_gb=128 * MB), python(script)), "memory")


@EITHER
async def test_memory_that_processes_share_counts_once(kind: str, limited: OpenLimited) -> None:
    script = """
        import mmap, os, time
        own, file = b"x" * (40 << 20), open("/dev/shm/x", "w+b")
        file.truncate(20 << 20)
        mmap.mmap(file.fileno(), 0).write(b"x" * (20 << 20))
        for _ in range(5):
            if os.fork() == 0:
                assert sum(own[::4096])
                os._exit(time.sleep(1.5))
        time.sleep(1.5)
    """
    result = await run(await limited(kind, memory_gb=128 * MB), python(script))
    assert (result.exit_code, result.exceeded) == (0, "")


# ---- processes ------------------------------------------------------------------------------------------------------

BOMBS = {
    "both kinds": """
        import os, signal, threading
        for _ in range(40):
            if os.fork() == 0:
                os.setsid()
                signal.pause()  # NEEDLE
        for _ in range(40):
            threading.Thread(target=signal.pause).start()
    """,
    "bomb": """
        import os, signal
        for _ in range(11):
            os.fork()
        signal.pause()  # NEEDLE
    """,
}


@EITHER
@pytest.mark.parametrize("way", BOMBS)
async def test_too_many_processes_are_ended(kind: str, way: str, limited: OpenLimited, needle: str) -> None:
    result = await run(await limited(kind, max_processes=64), python(BOMBS[way].replace("NEEDLE", needle)))
    check_ended(result, "processes")
    assert running(needle) == []


# ---- disk -----------------------------------------------------------------------------------------------------------

FILLERS = {
    "everywhere": (
        "for name in x ~/x /tmp/x /var/tmp/x; do head -c 2800K /dev/zero > $name; done;"
        "exec 3> y; rm y; head -c 2800K /dev/zero >&3; sleep 60"
    ),
    "empty files": "python3 -c 'for n in range(800): open(str(n), \"w\")'; sleep 60",
    "locked": "mkdir d; cd d; mkdir in; cd in; chmod 0 ..; for n in 1 2; do head -c 8M /dev/zero > $n; done; sleep 60",
    "at the end": "head -c 8M /dev/zero > x; head -c 8M /dev/zero > y",
}


@EITHER
@pytest.mark.parametrize("way", FILLERS)
async def test_who_fills_the_disk_is_ended(kind: str, way: str, limited: OpenLimited, tmp_path: Path) -> None:
    workspace = Mount(source=tmp_path, target=WORKSPACE, writable=True)
    sandbox = await limited(kind, disk_gb=12 * MB)
    result = await run(sandbox, shell(FILLERS[way], mounts=(workspace,), cwd=WORKSPACE))
    assert result.exceeded.startswith("disk: 0.0")
    assert result.exceeded.endswith(" GB; the limit is 0.01 GB")
    assert result.exit_code == (0 if way == "at the end" else 137)


@EITHER
async def test_who_writes_where_nobody_can_look_is_ended(kind: str, limited: OpenLimited) -> None:
    script = "name=$(printf %0250d); for _ in {1..20}; do mkdir $name; cd $name; done; sleep 60"
    result = await run(await limited(kind), shell(script))
    assert result.exceeded == "files: what it takes cannot be measured any more: File name too long"
    assert result.exit_code == 137


@EITHER
async def test_a_file_beyond_the_limit_is_refused_and_what_was_there_before_does_not_count(
    kind: str, limited: OpenLimited, tmp_path: Path
) -> None:
    (tmp_path / "before").write_bytes(bytes(20 << 20))
    workspace = Mount(source=tmp_path, target=WORKSPACE, writable=True)
    script = "truncate -s 1T sparse; truncate -s 10M small; cp before /dev/null; head -c 9M /dev/zero > x; ls -s x"
    result = await run(await limited(kind, disk_gb=16 * MB), shell(script, mounts=(workspace,), cwd=WORKSPACE))
    assert "File size limit exceeded" in result.stderr_tail
    assert sorted((path.name, path.stat().st_size >> 20) for path in tmp_path.iterdir() if path.name != "before") == [
        ("small", 10),
        ("sparse", 0),
        ("x", 9),
    ]
    assert (result.exit_code, result.exceeded) == (0, "")


# ---- the rest -------------------------------------------------------------------------------------------------------


@EITHER
@pytest.mark.parametrize("stream", [1, 2])
async def test_endless_output_is_ended(kind: str, stream: int, limited: OpenLimited, needle: str) -> None:
    sandbox = await limited(kind, output_mb=2)
    result = await run(sandbox, shell(f"echo first; setsid yes {needle} >&{stream}"))
    check_ended(result, "output")
    assert running(needle) == []
    assert needle in (result.stdout_tail, result.stderr_tail)[stream - 1]


@EITHER
async def test_what_the_kernel_itself_holds_it_to(kind: str, limited: OpenLimited) -> None:
    script = "ulimit -n; ulimit -u; ulimit -Hc; cat /proc/self/oom_score_adj; nice"
    result = await run(await limited(kind, max_open_files=100, max_processes=200), shell(script))
    assert result.stdout_tail.split() == ["100", "400", "0", "1000", str(os.getpriority(os.PRIO_PROCESS, 0))]


@pytest.mark.parametrize(
    "script",
    [
        f"python3 {WORKSPACE}/solve.py",
        f"python3 -c \"said = open('{WORKSPACE}/answer.txt').read(); import time; time.sleep(60)\"",
    ],
    ids=["a program", "an answer"],
)
@EITHER
async def test_a_workspace_that_makes_the_verifier_explode_gives_no_reward(
    kind: str, script: str, limited: OpenLimited, tmp_path: Path
) -> None:
    workspace, reward_dir = tmp_path / "workspace", tmp_path / "reward"
    for folder in (workspace, reward_dir):
        folder.mkdir()
    (workspace / "solve.py").write_text("taken = b'x' * (200 << 20)\nimport time; time.sleep(60)\n")
    (workspace / "answer.txt").write_bytes(b"x" * (200 << 20))
    (reward_dir / "reward.sh").write_text(f"{script}; echo 1\n")
    task = replace(make_task(), verifier=script_verifier(reward_dir))
    sandbox = await limited(kind, memory_gb=128 * MB)
    with pytest.raises(VerifierError, match=r"took more of the host than a sandbox may: memory: "):
        await verify_workspace(task, workspace, sandbox, sandbox_id="test", timeout_s=30)


@pytest.mark.harness
@EITHER
async def test_a_real_harness_whose_command_takes_too_much_has_its_limit_and_is_verified_as_it_stands(
    kind: str, limited: OpenLimited, cache_dir: Path, arena: Ledger, tmp_path: Path, needle: str
) -> None:
    """Claude Code leaves what the model started to itself, in a session of its own; it is ended all the same."""

    def fill(conversation: Conversation) -> Reply:
        command = f"setsid nohup bash -c 'head -c 40M /dev/zero > x; sleep {needle}' & sleep 25"
        call = shell_call(conversation.tools, ShellStep(command=command), call_id="call_0")
        return Reply(tool_calls=(call,), finish_reason="tool_calls")

    (tmp_path / "reward.sh").write_text("head -c 5M /dev/zero > ../y; [ $(stat -c %s ../x) -gt 30000000 ] && echo 1\n")
    task = replace(make_task(), verifier=script_verifier(tmp_path))
    harness = make_harness("claude_code", ClaudeCodeSettings(), cache_dir / "harness")
    try:
        harness.check_install()
    except UserError as error:
        missing(str(error))
    parts = RolloutParts(
        sandbox=await limited(kind, disk_gb=30 * MB),
        harness=harness,
        responder=ScriptedResponder(script=fill),
        scratch=arena.scratch,
        limits=Limits(deadline_s=90.0, reserve_s=30.0),
        model="policy",
        context_window=32_000,
        max_output_tokens=256,
        worker_id="test",
        now=time.time,
    )
    plan = RolloutPlan(group=make_group(task=task, harness="claude_code"), sample=0, temperature=1.0)
    record = await run_rollout(plan, parts)
    assert record.outcome is Outcome.LIMIT, record.detail
    assert record.detail.startswith("disk: 0.0")
    assert record.verdict is not None
    assert record.verdict.reward == 1.0
    assert record.trains
    assert running(needle) == []


@pytest.mark.slow
@pytest.mark.apptainer
async def test_limits_hold_on_an_image(image: Path, limited: OpenLimited, needle: str) -> None:
    sandbox = await limited("apptainer", image, memory_gb=128 * MB)
    check_ended(await run(sandbox, python(HOG.replace("NEEDLE", needle))), "memory")
    assert running(needle) == []
