"""The processes that learn together: rank 0 is the one that was started, the others are started by it.

 rank 0 ──starts──▶ rank 1 … size - 1        `lead_ranks`: rank 0 says where they meet; `join_ranks`: another one comes
   ├── scatter, broadcast ──▶ rows, credit   `Ranks`: what they say to one another, in the memory of the CPU
   └── gather, add ◀───────── values, sums

What a network says to its shards is FSDP's affair (`sharding.py`), in the same group of processes.
"""

from __future__ import annotations

import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from clawhpc.errors import LaunchError

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
READY = b"ready\n"
"""What a rank says once its imports are done and it is about to join."""
START_S = 600.0
"""For a rank to say so: a cold file system that many share takes minutes to read torch."""
MEET_S = 600.0
"""For the ranks to find one another once all have said so."""
SILENCE = timedelta(days=7)
"""Longest wait for another rank. A collection may take hours; the end of a process is noticed at once in other ways."""
NOTICE_S = 20.0
"""After a call to the others has failed, for the one that is gone to have ended: an interpreter takes its time."""
TAIL_BYTES = 2000


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that learn together. Of size 1, which costs nothing, it is by itself.

    All ranks make the same calls in the same order. RuntimeError where another one is gone.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """This is rank 0, which alone knows of records, policies and logs."""
        return self.rank == 0

    def scatter(self, shares: Sequence[T] | None) -> T:
        """This rank's of the shares that rank 0 gives, one for each; the others give None."""
        mine: list[T] = [None]  # type: ignore[list-item]
        if self.size > 1:
            dist.scatter_object_list(mine, None if shares is None else [None, *shares[1:]], src=0)
        return mine[0] if shares is None else shares[0]  # rank 0's own is not sent: it need not be fit for that

    def broadcast(self, value: T | None) -> T:
        """What rank 0 gives; what the others give is left out."""
        value_of_first: list[T] = [value]  # type: ignore[list-item]
        if self.size > 1:
            dist.broadcast_object_list(value_of_first, src=0)
        return value_of_first[0]

    def gather(self, mine: T) -> list[T]:
        """On rank 0, what each rank gives, in their order; nothing on the others."""
        if self.size == 1:
            return [mine]
        everyones: list[T] | None = [mine] * self.size if self.first else None
        dist.gather_object(mine, everyones, dst=0)
        return everyones or []

    def add(self, mine: Tensor) -> Tensor:
        """`mine` becomes the sum over all ranks. Exact where no two of them give the same element other than 0."""
        if self.size > 1:
            dist.all_reduce(mine)
        return mine


ALONE = Ranks()


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where a rank finds the others."""

    rank: int
    size: int
    address: str
    """Of rank 0's host."""
    port: int


@contextmanager
def lead_ranks(
    size: int, command: Sequence[str], *, logs: Path, environment: Mapping[str, str], cuda: bool
) -> Iterator[Ranks]:
    """Rank 0 of `size`, the others started on this host: `command`, with a `Meeting` in JSON as its last argument.

    What rank r writes to its standard error is in `logs / rank-r.log`; `environment` is added to ours. They are ended
    with the block, whatever they are about. LaunchError, which names the log, within seconds of a bad end of one.
    """
    if size == 1:
        yield ALONE
        return
    listener = socket.create_server((LOOPBACK, 0))  # the store takes it over: no port is looked up and lost again
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        LOOPBACK,
        port,
        size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=MEET_S),
        master_listen_fd=listener.detach(),
    )
    with _Followers(command, logs, environment) as followers:
        for rank in range(1, size):
            followers.start(Meeting(rank=rank, size=size, address=LOOPBACK, port=port))
        followers.wait_until_ready()
        followers.watch(abort=cuda)
        with followers.named(), _joined(Ranks(size=size), store, cuda=cuda) as ranks:
            yield ranks


@contextmanager
def group_of_one(*, cuda: bool) -> Iterator[Ranks]:
    """This process by itself, in a group all the same, which FSDP asks for."""
    with _joined(ALONE, dist.HashStore(), cuda=cuda) as ranks:
        yield ranks


@contextmanager
def join_ranks(meeting: Meeting, *, cuda: bool) -> Iterator[Ranks]:
    """Another rank than 0, whose standard output rank 0 reads."""
    os.write(sys.stdout.fileno(), READY)
    timeout = timedelta(seconds=MEET_S)
    store = dist.TCPStore(meeting.address, meeting.port, meeting.size, is_master=False, timeout=timeout)
    with _joined(Ranks(rank=meeting.rank, size=meeting.size), store, cuda=cuda) as ranks:
        yield ranks


@contextmanager
def _joined(ranks: Ranks, store: dist.Store, *, cuda: bool) -> Iterator[Ranks]:
    """In one group of processes, in which tensors on GPUs go by NCCL, and all else by gloo."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=SILENCE,
        device_id=torch.device("cuda", ranks.rank) if cuda else None,
    )
    finished = False
    try:
        yield ranks
        finished = True
    finally:
        _leave(abort=cuda and not finished)


def _leave(*, abort: bool) -> None:
    """End the group of processes. `abort`: NCCL would else wait for those that are not about to leave, or are gone."""
    if not dist.is_initialized():  # aborted already
        return
    if abort:
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


class _Followers:
    """The other ranks of this host. None is left when the block ends: they are killed, for they write nothing."""

    def __init__(self, command: Sequence[str], logs: Path, environment: Mapping[str, str]) -> None:
        self._command = command
        self._logs = logs
        self._environment = environment
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        """By rank."""
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        """Rank and exit code of each that has ended and should not have, in that order: the others follow the first."""
        self._dismissed = threading.Event()

    def start(self, meeting: Meeting) -> None:
        """The process of one rank."""
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._log(meeting.rank).open("wb") as errors:
            self._processes[meeting.rank] = subprocess.Popen(
                [*self._command, msgspec.json.encode(meeting).decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **self._environment},
                start_new_session=True,  # Ctrl-C is for rank 0 alone
            )

    def wait_until_ready(self) -> None:
        """Until each is about to join. LaunchError where one ends before that, or is not in START_S."""
        until = time.monotonic() + START_S
        for rank, process in self._processes.items():
            said = _read_until(process, until)
            if said is None:
                log = self._log(rank)
                raise LaunchError(f"rank {rank} of the learner does not start within {START_S:.0f} s; its log is {log}")
            if said != READY:
                raise self._error(rank, process.wait(NOTICE_S))

    def watch(self, *, abort: bool) -> None:
        """Notice a bad end of each. gloo then fails by itself; NCCL would wait on, unless told to `abort`."""
        for rank in self._processes:
            threading.Thread(target=self._notice, args=(rank, abort), daemon=True).start()

    def _notice(self, rank: int, abort: bool) -> None:
        code = self._processes[rank].wait()
        if code and not self._dismissed.is_set():
            self._ended.put((rank, code))
            if abort:
                _leave(abort=True)

    @contextmanager
    def named(self) -> Iterator[None]:
        """The RuntimeError by which torch says that a rank is gone becomes a LaunchError that says which, and why."""
        try:
            yield
        except RuntimeError as error:
            try:
                ended = self._ended.get(timeout=NOTICE_S)
            except queue.Empty:
                raise error from None  # our own
            raise self._error(*ended) from error

    def _error(self, rank: int, code: int) -> LaunchError:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
        log = self._log(rank)
        lines = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip().splitlines()
        said = lines[-1].removeprefix(f"[rank{rank}]: ") if lines else "it said nothing"  # the prefix is torch's
        return LaunchError(f"rank {rank} of the learner {how}: {said}; its log is {log}")

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"

    def __enter__(self) -> _Followers:
        return self

    def __exit__(self, *_: object) -> None:
        self._dismissed.set()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _read_until(process: subprocess.Popen[bytes], until: float) -> bytes | None:
    """What the process says next; nothing if it has ended; None if it says nothing in time."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        ready = selector.select(max(0.0, until - time.monotonic()))
    return os.read(process.stdout.fileno(), len(READY)) if ready else None
