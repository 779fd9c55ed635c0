"""The sandboxes of one worker: that of the run, and one for each image that a task has of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import anyio
from anyio import to_thread

from clawhpc.errors import HostError, boundary
from clawhpc.ledger import Ledger
from clawhpc.records import TaskImage
from clawhpc.sandbox.base import Sandbox
from clawhpc.sandbox.container import Container
from clawhpc.sandbox.root import image_root
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.sandbox.staging import stage_image


class Sandboxes:
    """Those of images are opened when they are first asked for, and kept: a few small files each.

    An image that is gone, or from which no container starts, fails those who run something there, with a SandboxError
    that names it.
    """

    def __init__(self, own: Sandbox, open_image: Callable[[TaskImage], Sandbox] | None = None) -> None:
        """`own`: that of the run. `open_image`: may take long; None where no task has an image of its own."""
        self.own = own
        self._open_image = open_image
        self._opened: dict[TaskImage, Sandbox] = {}
        self._opening = anyio.Lock()
        """One after the other: each may be a copy over the network."""

    async def of(self, image: TaskImage | None) -> Sandbox:
        """The one that stands on `image`; None: on that of the run. HostError where this host does not take it."""
        if image is None:
            return self.own
        assert self._open_image is not None, "whoever has such tasks says how their images are opened"
        if image not in self._opened:
            async with self._opening:
                if image not in self._opened:
                    with boundary(HostError, f"image {image.folder}"):
                        self._opened[image] = await to_thread.run_sync(self._open_image, image, abandon_on_cancel=True)
        return self._opened[image]


def check_seen(image: TaskImage) -> None:
    """HostError where this host does not see the folder that tasks' images lie in: all of them would fail here."""
    folder = Path(image.folder).parent
    with boundary(HostError, str(folder)):
        if not folder.is_dir():
            raise HostError(f"{folder}: no such folder here; all hosts must see that of tasks.images")


def open_images(own: Sandbox, settings: SandboxSettings, ledger: Ledger) -> Sandboxes:
    """Containers of the kind that `own` is.

    They start from images where these lie, unless `sandbox.stage` is true: a host's disk has no room for hundreds.
    """

    def open_image(image: TaskImage) -> Sandbox:
        assert isinstance(own, Container), "open_sandbox gives one"
        check_seen(image)
        place = stage_image(Path(image.folder), ledger) if settings.stage else Path(image.folder)
        accounts = Path(tempfile.mkdtemp(prefix="root-", dir=ledger.scratch))
        root = image_root(place, accounts, python=image.python, writable=settings.writable)
        return Container(backend=own.backend, root=root, ledger=ledger, limits=settings.limits)

    return Sandboxes(own, open_image)
