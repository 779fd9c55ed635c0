"""The real sandboxes of this machine, a ledger for them, commands to run, and a look at the host's processes.

`containers/install_parts.sh` puts what is missing into the cache folder. A part that is still missing fails the test
when CLAWHPC_REQUIRE_ALL=1, and skips it otherwise.
"""

from __future__ import annotations

import os
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from clawhpc.errors import HostError
from clawhpc.ledger import Ledger, remove_tree
from clawhpc.records import ExecResult
from clawhpc.sandbox.apptainer import find_apptainer
from clawhpc.sandbox.base import Sandbox, SandboxCommand
from clawhpc.sandbox.image import build_image
from clawhpc.sandbox.open import open_sandbox
from clawhpc.sandbox.settings import SandboxSettings

RECIPE = Path(__file__).parents[1] / "containers/base.def"
KINDS = [
    pytest.param("bubblewrap", marks=pytest.mark.sandbox),
    pytest.param("apptainer", marks=[pytest.mark.sandbox, pytest.mark.apptainer]),
]


WORKSPACE = "/root/.openclaw/workspace"


def missing(what: str) -> NoReturn:
    if os.environ.get("CLAWHPC_REQUIRE_ALL") == "1":
        pytest.fail(f"required part is missing: {what}")
    pytest.skip(what)


def running(needle: str) -> list[int]:
    """Processes of the host, zombies aside, whose command line contains `needle`."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if needle in command and pid != os.getpid():
                found.append(pid)
    return found


def seconds_until_gone(needle: str, *, within_s: float) -> float:
    """How long it takes until no process matches `needle`; fails after `within_s`."""
    started = time.monotonic()
    while left := running(needle):
        assert time.monotonic() < started + within_s, f"{left} still run after {within_s} s"
        time.sleep(0.02)
    return time.monotonic() - started


def known_to_the_kernel(root: Path) -> list[str]:
    """Mounts and unix sockets below `root`."""
    tables = ("/proc/self/mounts", "/proc/net/unix")
    rows = [row for table in tables for row in Path(table).read_text(errors="replace").splitlines()]
    return [row for row in rows if str(root) in row]


def holders(root: Path) -> list[int]:
    """Other processes that have a file below `root` open."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(file).startswith(f"{root}/"):
                found.add(int(file.parts[2]))
    return sorted(found - {os.getpid()})


def traces(root: Path) -> list[str]:
    """What there is of `root`: mounts, sockets, processes that name it, and what lies in it."""
    processes = [f"process {pid}" for pid in (*running(str(root)), *holders(root))]
    return [*known_to_the_kernel(root), *processes, *map(str, root.iterdir())]


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


@pytest.fixture
def needle() -> str:
    """An argument of `sleep` by which the processes of one test are known on the host."""
    return f"987{uuid.uuid4().int % 10**9}"


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    return Path(os.environ.get("CLAWHPC_CACHE") or Path.home() / ".cache/clawhpc")


@pytest.fixture
def ledger_root() -> Iterator[Path]:
    """A folder whose path is short enough for unix sockets."""
    root = Path(tempfile.mkdtemp(prefix="claw-", dir="/tmp"))
    yield root
    remove_tree(root)


@pytest.fixture
def ledger(ledger_root: Path) -> Iterator[Ledger]:
    with Ledger.open(ledger_root) as ledger:
        yield ledger


@pytest.fixture(params=KINDS)
async def sandbox(request: pytest.FixtureRequest, ledger: Ledger, cache_dir: Path) -> Sandbox:
    """Each kind of sandbox in turn, on the host's own programs."""
    return await working_sandbox(SandboxSettings(kind=request.param), ledger, cache_dir)


async def working_sandbox(settings: SandboxSettings, ledger: Ledger, cache_dir: Path) -> Sandbox:
    try:
        return await open_sandbox(settings, ledger=ledger, cache_dir=cache_dir)
    except HostError as error:
        missing(str(error))


@pytest.fixture(scope="session")
def image(cache_dir: Path) -> Path:
    """The base image, built from its recipe on the root file system that Debian's packages gave."""
    apptainer = find_apptainer(cache_dir) or missing("Apptainer")
    base = cache_dir / "images/debian-base"
    if not base.is_dir():
        missing(f"{base}: see containers/debian_base.sh")
    root = Path(tempfile.mkdtemp(prefix="claw-", dir="/tmp"))
    with Ledger.open(root) as ledger:
        built = build_image(RECIPE, apptainer=apptainer, cache_dir=cache_dir, ledger=ledger, base=base)
    remove_tree(root)
    return built


@pytest.fixture(scope="module")
def arena() -> Iterator[Ledger]:
    """One for all tests of a file."""
    root = Path(tempfile.mkdtemp(prefix="claw-", dir="/tmp"))
    with Ledger.open(root) as ledger:
        yield ledger
    remove_tree(root)
