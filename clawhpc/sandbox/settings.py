"""Which sandbox to use. Light to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["auto", "apptainer", "bubblewrap"]


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """Which containers to use."""

    kind: Kind = "auto"
    """`auto`: Apptainer if it works here, else bubblewrap."""
    image: str | None = None
    """None: the host's own programs, read-only. Else a folder with a root file system, a .sif file (Apptainer only), or
    a recipe (.def), from which Apptainer builds a folder, once, in the cache."""
