"""The first program in every container: it starts the one command, forwards its model calls, and leaves nobody behind.

Run as `python3 -I -S init.py FD` by whatever interpreter there is inside (3.9 or newer), without other modules.
Standard input brings the command as JSON. The file behind FD takes the report, over whatever stands there, and not
before every other process of the container is dead: the command has no last word.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import threading
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36
"""Orphans become our children, also where we are not process 1: their CPU time counts, and they can be waited for."""
CHUNK_BYTES = 65536
STARTED = b"started"


def main() -> None:
    """Run the command that standard input describes, and report how it ended."""
    report = int(sys.argv[1])
    os.pwrite(report, STARTED, 0)
    keep_files_to_ourselves()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    outcome = json.dumps(run(json.load(sys.stdin)))
    os.ftruncate(report, 0)
    os.pwrite(report, outcome.encode(), 0)


def keep_files_to_ourselves() -> None:
    """The command inherits standard output and error, and no other file."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # the listing's own is closed by now
                os.set_inheritable(int(name), False)


def run(command: dict) -> dict:
    """Start the command, wait for it, end all that it left."""
    for kind, of_host in command["host_namespaces"].items():
        if os.readlink(f"/proc/self/ns/{kind}") == of_host:  # some clusters switch namespaces off, and say nothing
            return {"error": f"{command['argv'][0]}: the container has no {kind} namespace of its own"}
    if command["proxy_socket"]:
        forward(command["proxy_port"], command["proxy_socket"])
    try:
        child = start(command["argv"], command["env"], command["cwd"])
    except OSError as error:
        return {"error": f"{error.filename or command['argv'][0]}: {error.strerror}"}
    status = wait_for(child)
    kill_others()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"exit_code": exit_code(status), "cpu_s": used.ru_utime + used.ru_stime}


def start(argv: list[str], env: dict[str, str], cwd: str) -> int:
    """The command in a process group of its own (it may signal its group), with signals as a shell would leave them."""
    os.chdir(cwd)
    os.environ["PATH"] = env["PATH"]
    no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    ignored_by_python = (signal.SIGPIPE, signal.SIGXFSZ)
    return os.posix_spawnp(argv[0], argv, env, file_actions=[no_input], setpgroup=0, setsigdef=ignored_by_python)


def wait_for(child: int) -> int:
    """The wait status of `child`; orphans that end before it are waited for too."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def kill_others() -> None:
    """End every other process of the container. `kill(-1)` spares process 1 and the caller, and no fork slips by it."""
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
            os.waitpid(-1, 0)
        except (ProcessLookupError, ChildProcessError):
            return


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
