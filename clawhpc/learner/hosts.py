"""The hosts that the learner runs on. Imports no torch: whoever knows a job's hosts says them in these words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host, and how rank 0 starts a command there."""

    name: str
    address: str
    """At which the other hosts reach it."""
    starter: tuple[str, ...] = ()
    """Goes before the command. What that writes comes to the starter's own outputs. The starter ends when it does, with
    its exit code, or 128 and the number of the signal that killed it. A line that the starter adds begins with its
    name.
    """
    environment: Mapping[str, str] | None = None
    """Of the starter, which hands it on; None for that of rank 0."""


THIS_HOST = Host(name="this host", address=LOOPBACK)
"""By itself: nobody comes from elsewhere."""
