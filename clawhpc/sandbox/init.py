"""The first program in every container: it starts the one command, forwards its model calls, ends it where it takes too
much of the host, and leaves nobody behind.

Run as `python3 -I -S init.py FD MARKERS` by whatever interpreter there is inside (3.9 or newer), with watch.py and no
other module of ours, as the first process: nobody inside can kill, stop or trace it, and orphans become its children,
so that their CPU time counts too. By the markers it is known outside, where its environment cannot be read.
Standard input brings the command as JSON. The file behind FD takes the report, over whatever stands there, and not
before every other process of the container is dead: the command has no last word. The report is a line of JSON, and
after it the end of what the command printed on its standard output.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
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
PR_SET_DUMPABLE = 4
"""From <sys/prctl.h>."""
COUNTS_PER_CONTAINER = (5, 14)
"""The kernel since which RLIMIT_NPROC counts in a user namespace by itself; before, all that the user runs."""


def main() -> None:
    """Run the command that standard input describes, and report how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # for a first process that is to be deaf; Python's own would raise
    sys.path.append(os.path.dirname(__file__))  # where watch.py is, as clawhpc/sandbox/watch.py
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
    from clawhpc.sandbox.watch import Watch

    shared = [kind for kind, link in command["host_namespaces"].items() if os.readlink(f"/proc/self/ns/{kind}") == link]
    for kind in NAMESPACES:
        if kind in shared:  # some clusters switch namespaces off, and say nothing
            return {"error": f"{command['argv'][0]}: the container has no {kind} namespace of its own"}, b""
    if command["proxy_socket"]:
        forward(command["proxy_port"], command["proxy_socket"])
    bound(command["limits"], own_users="user" not in shared)
    hide_ourselves()
    watch = Watch(command["limits"], command["writable"])
    watch.start()
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


def hide_ourselves() -> None:
    """Who runs inside has our user, and could trace us, write to our memory, and open our files through /proc."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


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
