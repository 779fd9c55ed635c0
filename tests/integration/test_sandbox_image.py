"""What a sandbox stands on: an image, as a folder or a file, or the host's own programs."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from clawhpc.ledger import Ledger
from clawhpc.sandbox.apptainer import find_apptainer
from clawhpc.sandbox.base import Mount
from clawhpc.sandbox.container import Container
from clawhpc.sandbox.root import host_root
from clawhpc.sandbox.settings import SandboxLimits, SandboxSettings
from tests.fakes.owner import sandbox_of
from tests.sandbox_parts import KINDS, WORKSPACE, missing, run, running, shell, working_sandbox

pytestmark = pytest.mark.anyio


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


@pytest.mark.apptainer
async def test_an_image_that_may_be_written_has_a_layer_of_each_containers_own(
    image: Path, ledger: Ledger, cache_dir: Path
) -> None:
    settings = SandboxSettings(kind="apptainer", image=str(image), writable=True, limits=SandboxLimits(disk_gb=0.05))
    sandbox = await working_sandbox(settings, ledger, cache_dir)
    places = "/usr/local/bin/mine /etc/mine /opt/mine /mine"
    write = f"echo mine | tee {places} > /dev/null && echo 127.0.0.1 mine >> /etc/hosts && ls {places}"
    assert (await run(sandbox, shell(write))).stdout_tail.split() == sorted(places.split())
    assert (await run(sandbox, shell(f"ls {places}; grep mine /etc/hosts"))).stdout_tail == ""
    assert not (image / "opt/mine").exists()
    too_much = await run(sandbox, shell("head -c 40000000 /dev/zero | tee /opt/one > /opt/two; sleep 20"))
    assert too_much.exceeded.startswith("disk: ")
    assert list(ledger.scratch.glob("run-*")) == []


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


@pytest.mark.sandbox
async def test_bubblewrap_shows_folders_of_an_image_that_no_distribution_has(
    ledger: Ledger, cache_dir: Path, tmp_path: Path
) -> None:
    working = await working_sandbox(SandboxSettings(kind="bubblewrap"), ledger, cache_dir)
    assert isinstance(working, Container)
    root = host_root(ledger.scratch / "top")
    for name in ("venv/bin/tool", "data/models/one", "home/user/notes"):
        (root.base / name).parent.mkdir(parents=True)
        (root.base / name).write_text(name)
    (root.base / "conda").symlink_to("/venv")
    sandbox = Container(backend=working.backend, root=root, ledger=ledger)
    workspace = Mount(source=tmp_path, target="/data/work", writable=True)
    script = "cat /conda/bin/tool /data/models/one /home/user/notes; ls /data; : > mine; touch /venv/x /data/x"
    result = await run(sandbox, shell(script, mounts=(workspace,), cwd="/data/work"))
    assert result.stdout_tail == "venv/bin/tooldata/models/onehome/user/notesmodels\nwork\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert result.stderr_tail.count("Read-only file system") == 2


@pytest.fixture
async def file_image_sandbox(ledger: Ledger, cache_dir: Path) -> Container:
    """Apptainer on an image that is a file, which it mounts through a FUSE process."""
    if find_apptainer(cache_dir) is None:
        missing("Apptainer")
    sandbox = await sandbox_of("sif", ledger, cache_dir)
    assert isinstance(sandbox, Container)
    return sandbox


def mounters(ledger: Ledger) -> list[int]:
    """What serves this ledger's image file as a file system; other tests, at the same time, have their own."""
    found = []
    for pid in running("squashfuse"):
        with suppress(OSError):
            if any(file.readlink().is_relative_to(ledger.scratch) for file in Path(f"/proc/{pid}/fd").iterdir()):
                found.append(pid)
    return found


@pytest.mark.apptainer
async def test_no_fuse_process_outlives_a_container(file_image_sandbox: Container, ledger: Ledger, needle: str) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(run, file_image_sandbox, shell(f"setsid sleep {needle} & sleep {needle}"))
        with anyio.fail_after(10):
            while len(running(needle)) < 3:
                await anyio.sleep(0.02)
        assert mounters(ledger) != []
        group.cancel_scope.cancel()
    assert running(needle) == mounters(ledger) == []
    assert (await run(file_image_sandbox, shell("exit 4"))).exit_code == 4
    assert mounters(ledger) == []


@pytest.mark.apptainer
@pytest.mark.parametrize("timeout_s", [0.02, 0.05, 0.1, 0.15, 0.2])
async def test_no_fuse_process_outlives_a_start_that_is_cut_off(
    timeout_s: float, file_image_sandbox: Container, ledger: Ledger, needle: str
) -> None:
    assert (await run(file_image_sandbox, shell(f"sleep {needle}"), timeout_s=timeout_s)).timed_out
    assert running(needle) == running(str(ledger.scratch)) == mounters(ledger) == []
