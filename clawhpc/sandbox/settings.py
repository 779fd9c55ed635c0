"""Which sandbox to use, and its limits. Light to import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from clawhpc.errors import at_least

Kind = Literal["auto", "apptainer", "bubblewrap"]


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one command in a container may take of its host. One that takes more is ended with all that it started.

    No cgroup is needed: watch.py measures. Two of them the kernel refuses to go beyond, which ends nobody: what
    a program may have open, and the size of a file.
    """

    memory_gb: float = 4.0
    """Of all processes together, shared pages counted once. Ten times what the largest harness takes; a laptop survives
    one that goes mad."""
    max_processes: int = 1024
    """At a time, threads among them, as the kernel counts: some libraries start a thread for each core of the host."""
    disk_gb: float = 4.0
    """Added to the workspace, HOME and /tmp, where a file costs 16 kB besides its content; also the size of any one
    file. There is no network to fetch more from.
    """
    max_open_files: int = 4096
    """In one process, where the host itself allows so many."""
    output_mb: float = 64.0
    """Of each output stream. A harness prints kilobytes, and the worker that reads them works for all rollouts."""

    def __post_init__(self) -> None:
        at_least(self, memory_gb=0.05, max_processes=32, disk_gb=0.01, max_open_files=64, output_mb=0.1)


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """Which containers to use, and what each may take."""

    kind: Kind = "auto"
    """`auto`: Apptainer if it works here, else bubblewrap."""
    image: str | None = None
    """None: the host's own programs, read-only. Else a folder with a root file system, a .sif file (Apptainer only), or
    a recipe (.def), from which Apptainer builds a folder, once, in the cache."""
    stage: bool | None = None
    """Containers start from a copy of the image on the host's own disk, in `scratch_dir`. None: if the image lies where
    other hosts may see it.
    """
    writable: bool = False
    """Programs may write anywhere in the image: into a layer of each container's own, on the host's disk. Takes
    Apptainer and an image. What is written there is gone with the container; the verifier never sees it.
    """
    limits: SandboxLimits = field(default_factory=SandboxLimits)
