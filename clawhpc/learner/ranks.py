"""The processes that learn together: rank 0 is the one that was started, the others are started by it.

 rank 0 ──starts──▶ rank 1 … size - 1        `lead_ranks`: rank 0 says where they meet; `join_ranks`: another one comes
   ├── scatter, broadcast ──▶ rows, credit   `Ranks`: what they say to one another, in the memory of the CPU
   ├── gather, add ◀───────── values, sums
   └── dismisses ──▶ its end                 so does the end of rank 0, on whatever host

Ranks are numbered host by host, the first host being rank 0's.

What a network says to its shards is FSDP's affair (`sharding.py`), in the same group of processes.
"""

from __future__ import annotations

import atexit
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
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from clawhpc.errors import LaunchError
from clawhpc.learner.hosts import LOOPBACK, THIS_HOST, Host

T = TypeVar("T")

READY = b"ready\n"
"""What a rank says once its imports are done and it is about to join."""
DISMISSAL = "dismissal"
"""What rank 0 puts into the store when the others are to end."""
START_S = 600.0
"""For a rank to say so: a cold file system that many share takes minutes to read torch."""
REACH = timedelta(seconds=30)
"""For a rank to reach rank 0, which is waiting, or gone."""
MEET = timedelta(minutes=10)
"""For the ranks to find one another once all have said that they are ready."""
SILENCE = timedelta(days=7)
"""Longest wait for another rank. A collection may take hours; the end of a process is noticed at once in other ways."""
NOTICE_S = 20.0
"""After a call to the others has failed, for the one that is gone to have ended: an interpreter takes its time."""
FOLLOW_S = 10.0
"""For rank 0 to notice the end of one rank before another one fails for it; less than NOTICE_S."""
END_S = 5.0
"""For the starter of a rank on another host to end, once the rank is dismissed; and again, once the starter is told."""
TAIL_BYTES = 2000
PIPE_BYTES = 4096
ABORTING = threading.Lock()
"""Whoever aborts the group has it: where one rank ends, so do the others, each noticed in a thread of its own."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that learn together. Of size 1, which costs nothing, it is by itself.

    All ranks make the same calls in the same order. RuntimeError or ValueError where another one is gone.
    """

    rank: int = 0
    size: int = 1
    per_host: int = 1
    """Ranks of a host, the same for all."""

    @property
    def num_hosts(self) -> int:
        """Hosts that have ranks."""
        return self.size // self.per_host

    @property
    def host_rank(self) -> int:
        """The number of this rank's host."""
        return self.rank // self.per_host

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its host; that of its GPU."""
        return self.rank % self.per_host

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
    """Which rank one is, and where it finds the others."""

    ranks: Ranks
    address: str
    """Of rank 0's host."""
    port: int


@contextmanager
def lead_ranks(
    per_host: int,
    command: Sequence[str],
    *,
    hosts: Sequence[Host] = (THIS_HOST,),
    logs: Path,
    environment: Mapping[str, str],
    cuda: bool,
) -> Iterator[Ranks]:
    """Rank 0 of `per_host` ranks on each of `hosts`, of which the first is this one.

    The others are started: `command`, with a `Meeting` in JSON as its last argument. What rank r writes to its standard
    error is in `logs / rank-r.log`; `environment` is added to that of its host. They are ended with the block, whatever
    they are about. LaunchError, which names host and log, where one has come to a bad end: within seconds if rank 0 is
    at work with it, else as soon as it turns to the others again.
    """
    first = Ranks(size=per_host * len(hosts), per_host=per_host)
    if first.size == 1:
        yield ALONE
        return
    # The store takes the listener over: no port is looked up and lost again.
    listener = socket.create_server((LOOPBACK if len(hosts) == 1 else "", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=MEET,
        master_listen_fd=listener.detach(),
    )
    with _Followers(command, logs, environment, store) as followers:
        for rank in range(1, first.size):
            ranks = replace(first, rank=rank)
            followers.start(Meeting(ranks=ranks, address=hosts[0].address, port=port), hosts[ranks.host_rank])
        followers.wait_until_ready()
        followers.watch(abort=cuda)
        with followers.named(), _joined(first, store, cuda=cuda):
            yield first


@contextmanager
def group_of_one(*, cuda: bool) -> Iterator[Ranks]:
    """This process by itself, in a group all the same, which FSDP asks for."""
    with _joined(ALONE, dist.HashStore(), cuda=cuda):
        yield ALONE


@contextmanager
def join_ranks(meeting: Meeting, *, cuda: bool) -> Iterator[Ranks]:
    """Another rank than 0, whose standard output rank 0 reads. The process never outlives rank 0.

    What ends it after a block that has ended well is rank 0.
    """
    store = dist.TCPStore(meeting.address, meeting.port, is_master=False, timeout=REACH)
    store.set_timeout(MEET)
    end = threading.Thread(target=_end_with_first, args=(_connected_again(store),), name="end", daemon=True)
    end.start()
    atexit.register(os._exit, 1)  # after an error: an interpreter that ends would crash the thread that waits in torch
    os.write(sys.stdout.fileno(), READY)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads on
    with _joined(meeting.ranks, store, cuda=cuda):
        try:
            yield meeting.ranks
        except RuntimeError:  # if because another one is gone, rank 0 is to hear of that one first, and dismisses us
            end.join(FOLLOW_S)
            raise
    end.join()


def _connected_again(store: dist.TCPStore) -> dist.TCPStore:
    """The same store: who waits for it on one connection holds up nobody on the other."""
    return store.clone()  # type: ignore[attr-defined] # torch's stubs lack it


def _end_with_first(store: dist.Store) -> None:
    """End this process when rank 0 dismisses it, or is gone: its store then closes the connection."""
    while True:
        try:
            store.wait([DISMISSAL], SILENCE)
        except dist.DistNetworkError:
            os._exit(1)
        except dist.DistStoreError:  # time is up
            continue
        os._exit(0)


@contextmanager
def _joined(ranks: Ranks, store: dist.Store, *, cuda: bool) -> Iterator[None]:
    """In one group of processes, in which tensors on GPUs go by NCCL, and all else by gloo."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=MEET,
        device_id=torch.device("cuda", ranks.local_rank) if cuda else None,
    )
    dist.distributed_c10d._set_pg_timeout(SILENCE)  # they have met
    finished = False
    try:
        yield
        finished = True
    finally:
        _leave(abort=cuda and not finished)


def _leave(*, abort: bool) -> None:
    """End the group of processes. `abort`: NCCL would else wait for those that are not about to leave, or are gone."""
    with ABORTING if abort else nullcontext():
        if not dist.is_initialized():  # aborted already
            return
        if abort:
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


class _Followers:
    """The other ranks. None is left when the block ends."""

    def __init__(
        self, command: Sequence[str], logs: Path, environment: Mapping[str, str], store: dist.TCPStore
    ) -> None:
        self._command = command
        self._logs = logs
        self._environment = environment
        self._store = _connected_again(store)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        """By rank; that of its starter, where it is on another host."""
        self._hosts: dict[int, Host] = {}
        """By rank."""
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        """Rank and exit code of each that has ended and should not have, in that order: the others follow the first."""
        self._dismissed = threading.Event()

    def start(self, meeting: Meeting, host: Host) -> None:
        """The process of one rank."""
        rank = meeting.ranks.rank
        self._logs.mkdir(parents=True, exist_ok=True)
        self._hosts[rank] = host
        with self._log(rank).open("wb") as errors:
            self._processes[rank] = subprocess.Popen(
                [*host.starter, *self._command, msgspec.json.encode(meeting).decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**(os.environ if host.environment is None else host.environment), **self._environment},
                start_new_session=True,  # Ctrl-C is for rank 0 alone
            )

    def wait_until_ready(self) -> None:
        """Until each is about to join. LaunchError where one ends before that, or is not in START_S."""
        until = time.monotonic() + START_S
        for rank, process in self._processes.items():
            ready = _is_ready(process, until)
            if ready is None:
                log = self._log(rank)
                raise LaunchError(f"{self._name(rank)} does not start within {START_S:.0f} s; its log is {log}")
            if not ready:
                raise self._error(rank, process.wait(NOTICE_S))

    def watch(self, *, abort: bool) -> None:
        """Notice the end of each, and end all. gloo then fails; NCCL would wait on, unless told to `abort`."""
        for rank in self._processes:
            threading.Thread(target=self._notice, args=(rank, abort), daemon=True).start()

    def _notice(self, rank: int, abort: bool) -> None:
        code = self._processes[rank].wait()
        if not self._dismissed.is_set():
            self._ended.put((rank, code))
            self._store.set(DISMISSAL, "")  # a starter may have ended alone
            if abort:
                _leave(abort=True)

    @contextmanager
    def named(self) -> Iterator[None]:
        """The error by which torch says that a rank is gone becomes a LaunchError that says which, and why.

        It is a RuntimeError; where the group was aborted before rank 0 turned to it, a ValueError: there is none.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:
            try:
                ended = self._ended.get(timeout=NOTICE_S if isinstance(error, RuntimeError) else 0.0)
            except queue.Empty:
                raise error from None  # our own
            raise self._error(*ended) from error

    def _error(self, rank: int, code: int) -> LaunchError:
        log = self._log(rank)
        lines = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip().splitlines()
        said = _last_words(lines, self._hosts[rank]).removeprefix(f"[rank{rank}]: ")  # the prefix is torch's
        return LaunchError(f"{self._name(rank)} {_how_it_ended(code)}: {said}; its log is {log}")

    def _name(self, rank: int) -> str:
        host = self._hosts[rank]
        return f"rank {rank} of the learner" + (f" on {host.name}" if host.starter else "")

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"

    def __enter__(self) -> _Followers:
        return self

    def __exit__(self, *_: object) -> None:
        self._dismissed.set()
        self._store.set(DISMISSAL, "")
        for rank, process in self._processes.items():
            if not self._hosts[rank].starter:
                process.kill()  # it writes nothing
        for tell in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in self._still_there(END_S):
                tell(process)
        for process in self._processes.values():
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def _still_there(self, within_s: float) -> list[subprocess.Popen[bytes]]:
        """The processes that do not end in that time."""
        until = time.monotonic() + within_s
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        return [process for process in self._processes.values() if process.poll() is None]


def _how_it_ended(code: int) -> str:
    number = -code if code < 0 else code - 128  # a starter's way to say it
    if number in set(signal.Signals):
        return f"was killed by {signal.Signals(number).name}"
    return f"has ended with exit code {code}"


def _last_words(lines: Sequence[str], host: Host) -> str:
    """The last line of a rank, or what its starter said, if it never came to speak."""
    starter = tuple(f"{Path(program).name}: " for program in host.starter[:1])
    own = [line for line in lines if not line.startswith(starter)]
    return (own or lines or ["it said nothing"])[-1]


def _is_ready(process: subprocess.Popen[bytes], until: float) -> bool | None:
    """The process says that it is, after whatever a site has others say first; False if it ends; None if it is late."""
    assert process.stdout is not None
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not said.endswith(READY):
            if not selector.select(max(0.0, until - time.monotonic())):
                return None
            more = os.read(process.stdout.fileno(), PIPE_BYTES)
            if not more:
                return False
            said += more
    return True
