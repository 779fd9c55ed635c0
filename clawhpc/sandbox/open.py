"""Choose the sandbox that works on this machine."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import get_args

import anyio
from anyio import to_thread

from clawhpc.errors import HostError, SandboxError, UserError
from clawhpc.ledger import Ledger
from clawhpc.sandbox.apptainer import Apptainer, find_apptainer
from clawhpc.sandbox.base import Sandbox, SandboxCommand
from clawhpc.sandbox.bubblewrap import Bubblewrap, find_bubblewrap
from clawhpc.sandbox.container import Backend, Container
from clawhpc.sandbox.image import build_image
from clawhpc.sandbox.root import Root, host_root, image_root
from clawhpc.sandbox.settings import Kind, SandboxSettings
from clawhpc.sandbox.staging import is_far, stage_image

CHECK_S = 60.0
"""For the first start, tried again or not: programs and image may come over the network."""
CHECKS = 3
"""Starts that are tried: one that something kills says nothing of the host."""


async def open_sandbox(settings: SandboxSettings, *, ledger: Ledger, cache_dir: Path) -> Sandbox:
    """A sandbox that has just run a command. Raises HostError, with the reason for each kind, where none can.

    UserError for an unknown kind, and for an image that is not there.
    """
    if settings.kind not in get_args(Kind):
        raise UserError(f"sandbox.kind={settings.kind}: must be one of {', '.join(get_args(Kind))}")
    folder = Path(tempfile.mkdtemp(prefix="root-", dir=ledger.scratch))
    root = await to_thread.run_sync(_root, settings, folder, ledger, cache_dir, abandon_on_cancel=True)
    reasons = []
    for kind in ("apptainer", "bubblewrap") if settings.kind == "auto" else (settings.kind,):
        try:
            backend = _backend(kind, settings, root, ledger, cache_dir)
            sandbox = Container(backend=backend, root=root, ledger=ledger, limits=settings.limits)
            await check_sandbox(sandbox)
        except (UserError, SandboxError) as error:
            reasons.append(f"{kind}: {error}")
        else:
            sandbox.check_hidden(ledger.scratch)
            return sandbox
    raise HostError(f"no sandbox works here. {'; '.join(reasons)}")


def _root(settings: SandboxSettings, folder: Path, ledger: Ledger, cache_dir: Path) -> Root:
    """The root file system that the settings name, on this host; `folder` takes what must be written for it."""
    if settings.image is None:
        if settings.writable:
            raise UserError("sandbox.writable: needs sandbox.image, for no sandbox writes to the host's own programs")
        return host_root(folder)
    image = Path(settings.image).absolute()
    if not image.exists():
        raise UserError(f"sandbox.image={settings.image}: no such image")
    if image.suffix == ".def":
        image = build_image(image, apptainer=_apptainer(cache_dir), cache_dir=cache_dir, ledger=ledger)
    mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape")
    if settings.kind == "bubblewrap":
        _check_folder(image)
    if settings.stage or (settings.stage is None and is_far(image, ledger.scratch, mounts)):
        image = stage_image(image, ledger)
    return image_root(image, folder, writable=settings.writable)


def _check_folder(image: Path) -> None:
    """Raise UserError where bubblewrap cannot start from it."""
    if not image.is_dir():
        raise UserError("sandbox.image: bubblewrap takes an image as a folder; Apptainer takes a .sif")


def _backend(kind: str, settings: SandboxSettings, root: Root, ledger: Ledger, cache_dir: Path) -> Backend:
    if kind == "apptainer":
        return Apptainer(program=_apptainer(cache_dir), config_dir=ledger.scratch / "apptainer")
    if settings.writable:
        raise UserError("sandbox.writable takes Apptainer")
    _check_folder(root.base)
    return Bubblewrap(program=find_bubblewrap())


def _apptainer(cache_dir: Path) -> str:
    found = find_apptainer(cache_dir)
    if found is None:
        raise UserError("not installed; ask your cluster for it, or see containers/README.md")
    return found


async def check_sandbox(sandbox: Sandbox) -> None:
    """Raise SandboxError unless it can run the smallest of commands."""
    until = anyio.current_time() + CHECK_S
    for _ in range(CHECKS - 1):
        with suppress(SandboxError):
            return await _check_once(sandbox, until)
    await _check_once(sandbox, until)


async def _check_once(sandbox: Sandbox, until: float) -> None:
    command = SandboxCommand(sandbox_id="check", argv=("/bin/true",), env={}, cwd="/")
    result = await sandbox.run(command, timeout_s=max(1.0, until - anyio.current_time()))
    if result.exit_code != 0:
        raise SandboxError(f"/bin/true ended with exit code {result.exit_code}: {result.stderr_tail}")
