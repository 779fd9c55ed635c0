"""The first program in every container: it starts the one command, forwards its model calls, ends it where it takes too
much of the host, and leaves nobody behind.

Run as `python3 -I -S init.py FD` by whatever interpreter there is inside (3.9 or newer), without other modules, as the
first process: nobody inside can kill or stop it, and orphans become its children, so that their CPU time counts too.
Standard input brings the command as JSON. The file behind FD takes the report, over whatever stands there, and not
before every other process of the container is dead: the command has no last word. The report is a line of JSON, and
after it the end of what the command printed on its standard output.
"""

import json
import os
import resource
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections import deque
from contextlib import suppress

CHUNK_BYTES = 65536
STARTED = b"started"
KEPT_BYTES = 65536
"""Of what the command printed, in the report."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group that wrote to a socket (unix(7))."""
NAMESPACES = ("pid", "net", "mnt")
"""Those without which a container is none."""
LOOK_S = 0.25
"""Between two looks at memory and processes, 0.3 ms each: a process can take a gigabyte meanwhile, hardly more."""
WALK_S = 1.0
"""Between two walks through what was written, at least: a millisecond each, where there are a few hundred files."""
WALK_SHARE = 0.1
"""Of the time that walks may take, however many files there are."""
GB = 2**30
FILE_BYTES = 4096
"""A file costs, besides its content: a million empty ones are a burden too."""
NUM_THREADS, RSS_PAGES = 17, 21
"""Where `/proc/PID/stat` has them, counted from the state."""
COUNTS_PER_CONTAINER = (5, 14)
"""The kernel since which RLIMIT_NPROC counts in a user namespace by itself; before, all that the user runs."""


def main() -> None:
    """Run the command that standard input describes, and report how it ended."""
    report = int(sys.argv[1])
    os.pwrite(report, STARTED, 0)
    keep_files_to_ourselves()
    outcome, printed = run(json.load(sys.stdin))
    os.ftruncate(report, 0)
    os.pwrite(report, json.dumps(outcome).encode() + b"\n" + printed, 0)


def keep_files_to_ourselves() -> None:
    """The command inherits standard output and error, and no other file."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # the listing's own is closed by now
                os.set_inheritable(int(name), False)


def run(command: dict) -> tuple[dict, bytes]:
    """Start the command, wait for it, end all that it left. What those printed whom it left does not count."""
    shared = [kind for kind, link in command["host_namespaces"].items() if os.readlink(f"/proc/self/ns/{kind}") == link]
    for kind in NAMESPACES:
        if kind in shared:  # some clusters switch namespaces off, and say nothing
            return {"error": f"{command['argv'][0]}: the container has no {kind} namespace of its own"}, b""
    if command["proxy_socket"]:
        forward(command["proxy_port"], command["proxy_socket"])
    bound(command["limits"], own_users="user" not in shared)
    watch = Watch(command["limits"], command["writable"])
    threading.Thread(target=watch.look_on, daemon=True).start()
    os.setpriority(os.PRIO_PROCESS, 0, command["nice"])  # of this thread, and of what it starts: not of the others
    output = Output()
    try:
        child = start(command["argv"], command["env"], command["cwd"], output.sink)
    except OSError as error:
        return {"error": f"{error.filename or command['argv'][0]}: {error.strerror}"}, b""
    status = wait_for(child)
    left = kill_others()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome = {"exit_code": exit_code(status), "cpu_s": used.ru_utime + used.ru_stime, "exceeded": watch.end()}
    return outcome, output.end_without(left)


def bound(limits: dict, own_users: bool) -> None:
    """What the kernel itself holds us and all that we start to. Where the host's memory runs out, it takes us first."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    values = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: limits["disk_bytes"],
        resource.RLIMIT_NOFILE: limits["max_open_files"],
    }
    release = tuple(map(int, os.uname().release.split(".")[:2]))
    if own_users and release >= COUNTS_PER_CONTAINER:  # a bomb stops there until we look; that of a real root does not
        values[resource.RLIMIT_NPROC] = 2 * limits["max_processes"]
    for kind, most in values.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


class Watch:
    """Ends all that runs in the container once it takes more than `limits`, by looking again and again.

    Not seen: what lies in folders that their maker may not read, and memory that neither a process nor an open file
    holds (a tmpfs that is mounted in yet another namespace).
    """

    def __init__(self, limits: dict, folders: list) -> None:
        """`folders`: those that can be written. What lies there now does not count."""
        self.limits = limits
        self.folders = folders
        self.disks = {os.stat(folder).st_dev for folder in folders}
        self.tmpfs = {device: folder for device, folder in writable_tmpfs().items() if device not in self.disks}
        self.written_before = written(folders)
        self.walk_at = time.monotonic() + WALK_S
        self.memory_in_files = 0
        self.exceeded = ""
        self.ended = threading.Event()

    def end(self) -> str:
        """The command is dead: look a last time at what it has written. What was too much, or nothing."""
        self.ended.set()
        return self.exceeded or self.disk({})

    def look_on(self) -> None:
        """Until there is too much, or an end."""
        while not self.ended.wait(LOOK_S):
            try:
                self.exceeded = self.look()
            except OSError as error:  # no file can be opened any more, or there is no memory for it
                self.exceeded = f"files: the host has no more, or we may have no more: {error.strerror}"
            if self.exceeded:
                with suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
                return

    def look(self) -> str:
        """What there is too much of, in words; empty if nothing."""
        pids = other_processes()
        if len(pids) > self.limits["max_processes"]:  # a bomb is not looked at any closer
            return self.too_many(len(pids))
        found = usage(pids)
        exceeded = self.too_many(sum(threads for threads, _ in found.values())) or self.memory(found)
        return exceeded or ("" if time.monotonic() < self.walk_at else self.disk(found))

    def too_many(self, number: int) -> str:
        """Whether there are more processes than there may be."""
        most = self.limits["max_processes"]
        return f"processes: {number} at a time, threads among them; the limit is {most}" if number > most else ""

    def memory(self, found: dict) -> str:
        """Whether they take too much memory; shared pages are told apart only where it matters.

        Files in memory may be mapped too. Which are is not known, so of both kinds of shared memory the larger counts.
        """
        most = self.limits["memory_bytes"]
        in_files = self.memory_in_files + sum(map(used_bytes, self.tmpfs.values()))
        if in_files + sum(mapped for _, mapped in found.values()) <= most:
            return ""
        mapped, shared = exact_memory(found)
        return beyond("memory", mapped - shared + max(shared, in_files), most)

    def disk(self, found: dict) -> str:
        """Whether too much was written."""
        began = time.monotonic()
        deleted = open_deleted(found)
        taken = written(self.folders) + sum(size for device, size in deleted if device in self.disks)
        self.memory_in_files = sum(size for device, size in deleted if device not in {*self.disks, *self.tmpfs})
        now = time.monotonic()
        self.walk_at = now + max(WALK_S, (now - began) / WALK_SHARE)
        return beyond("disk", taken - self.written_before, self.limits["disk_bytes"])


def beyond(what: str, taken: int, most: int) -> str:
    """For a person, if more than `most` bytes are taken; else nothing."""
    return f"{what}: {taken / GB:.2f} GB; the limit is {most / GB:.2f} GB" if taken > most else ""


def other_processes() -> list:
    """Of the container, all but ourselves."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def usage(pids: list) -> dict:
    """Process -> the number of its threads, and the bytes of memory that it maps."""
    found = {}
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            found[pid] = int(fields[NUM_THREADS]), int(fields[RSS_PAGES]) * resource.getpagesize()
    return found


def exact_memory(found: dict) -> tuple:
    """Bytes that the processes take together, and those of them that are shared memory; a shared page counts once."""
    total = shared = 0
    for pid, (_, mapped) in found.items():
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                kb = {line.split()[0]: int(line.split()[1]) for line in file.readlines()[1:]}
            total += 1024 * kb[b"Pss:"]
            shared += 1024 * kb.get(b"Pss_Shmem:", 0)
        except PermissionError:
            total += mapped
        except OSError:  # it is gone
            pass
    return total, shared


def written(folders: list) -> int:
    """Bytes on disk of all that lies in `folders`; no link is followed, and a file with several names counts once."""
    total, linked, todo = 0, set(), list(folders)
    while todo:
        for path, status in listed(todo.pop()):
            if stat.S_ISDIR(status.st_mode):
                todo.append(path)
            elif status.st_nlink > 1:
                if (status.st_dev, status.st_ino) in linked:
                    continue
                linked.add((status.st_dev, status.st_ino))
            total += FILE_BYTES + 512 * status.st_blocks
    return total


def listed(folder: str) -> list:
    """Path and status of what lies in `folder`, as far as it is still there."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                found.append((entry.path, entry.stat(follow_symlinks=False)))
    return found


def open_deleted(found: dict) -> list:
    """Device and bytes of each file that no folder shows any more, or ever has, but that a process has open."""
    sizes = {}
    for pid in found:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        sizes[status.st_dev, status.st_ino] = 512 * status.st_blocks
    return [(device, size) for (device, _), size in sizes.items()]


def writable_tmpfs() -> dict:
    """Device -> mount point of every file system in memory that can be written."""
    found = {}
    with open("/proc/self/mountinfo") as file:
        for _, _, device, _, point, options, *more in map(str.split, file):
            if more[more.index("-") + 1] == "tmpfs" and "rw" in options.split(","):
                number = os.makedev(*map(int, device.split(":")))
                with suppress(OSError):
                    if os.stat(point).st_dev == number:  # else another one lies over it
                        found[number] = point
    return found


def used_bytes(folder: str) -> int:
    """Of the file system of `folder`."""
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


class Output:
    """The command's standard output: handed on as it comes, and its end kept together with who wrote what.

    It is a socket, for which the kernel tells the writer, and which nobody can open through /proc/PID/fd as they can a
    pipe: what a process was not given, it cannot write to.
    """

    def __init__(self) -> None:
        self.source, self.sink = socket.socketpair()
        self.source.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.pieces: deque[tuple[int, bytes]] = deque()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        """Until nobody has it open any more. The kernel does not join what two processes wrote."""
        num_kept = 0
        while True:
            piece, notes, _, _ = self.source.recvmsg(CHUNK_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
            if not piece:
                return
            hand_on(piece)
            writer, _, _ = CREDENTIALS.unpack(notes[0][2])
            self.pieces.append((writer, piece))
            num_kept += len(piece)
            while num_kept - len(self.pieces[0][1]) >= KEPT_BYTES:
                num_kept -= len(self.pieces.popleft()[1])

    def end_without(self, writers: set[int]) -> bytes:
        """The end of what was printed, once all others are dead, without what `writers` wrote."""
        self.sink.close()
        self.reader.join()
        return b"".join(piece for writer, piece in self.pieces if writer not in writers)[-KEPT_BYTES:]


def hand_on(piece: bytes) -> None:
    """Write to our own standard output, all of it."""
    while piece:
        piece = piece[os.write(1, piece) :]


def start(argv: list[str], env: dict[str, str], cwd: str, output: socket.socket) -> int:
    """The command in a process group of its own (it may signal its group), with signals as a shell would leave them."""
    os.chdir(cwd)
    os.environ["PATH"] = env["PATH"]
    files = ((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, output.fileno(), 1))
    ignored_by_python = (signal.SIGPIPE, signal.SIGXFSZ)
    return os.posix_spawnp(argv[0], argv, env, file_actions=files, setpgroup=0, setsigdef=ignored_by_python)


def wait_for(child: int) -> int:
    """The wait status of `child`; orphans that end before it are waited for too."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def kill_others() -> set[int]:
    """End every other process of the container, and say which they were.

    `kill(-1)` spares process 1 and the caller, and no fork slips by it.
    """
    killed = set()
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
            killed.add(os.waitpid(-1, 0)[0])
        except (ProcessLookupError, ChildProcessError):
            return killed


def exit_code(status: int) -> int:
    """As a shell gives it: 128 + n for signal n."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def forward(port: int, path: str) -> None:
    """Carry each connection to 127.0.0.1:`port` over to the unix socket `path`, until the container ends."""
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    threading.Thread(target=accept, args=(listener, path), daemon=True).start()


def accept(listener: socket.socket, path: str) -> None:
    """One pair of threads per connection: harnesses hold a handful."""
    while True:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=connect, args=(client, path), daemon=True).start()


def connect(client: socket.socket, path: str) -> None:
    """Join `client` to a new connection to `path`; where there is none, the client's connection closes."""
    with client, socket.socket(socket.AF_UNIX) as proxy:
        try:
            proxy.connect(path)
        except OSError:
            return
        requests = threading.Thread(target=copy, args=(client, proxy), daemon=True)
        requests.start()
        copy(proxy, client)
        requests.join()


def copy(source: socket.socket, sink: socket.socket) -> None:
    """Hand on what comes as soon as it comes; at its end, close that direction; when either side fails, both."""
    ending = socket.SHUT_WR
    try:
        while data := source.recv(CHUNK_BYTES):
            sink.sendall(data)
    except OSError:
        ending = socket.SHUT_RDWR
        shut(source, ending)
    shut(sink, ending)


def shut(end: socket.socket, how: int) -> None:
    """Shut a connection down that may be down already."""
    with suppress(OSError):
        end.shutdown(how)


if __name__ == "__main__":
    main()
