"""Removal that nobody has to wait for."""

from __future__ import annotations

from pathlib import Path

import anyio
from anyio import to_thread

from clawhpc.ledger.reap import remove_tree


async def discard(folder: Path, *, within_s: float) -> None:
    """Remove `folder`, and return within `within_s` even if that takes longer or the caller is cancelled.

    A thread goes on in the background then, REMOVE_S at most, for whoever fills a folder decides how long it takes. It
    lies in an owner's scratch, so what is still there at the end is the ledger's to remove.
    """
    with anyio.move_on_after(within_s, shield=True):
        await to_thread.run_sync(remove_tree, folder, abandon_on_cancel=True)
