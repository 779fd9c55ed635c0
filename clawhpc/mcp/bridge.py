"""Stands inside a sandbox for an MCP server outside it: joins standard input and output to the server's socket.

Run as `python3 -I -S bridge.py SOCKET` by whatever interpreter there is inside (3.9 or newer). It ends when the server
does, with exit code 1, or after whoever started it has closed its input and the server has ended too, with 0.
"""

import os
import socket
import sys
import threading
from contextlib import suppress

CHUNK_BYTES = 65536


def main() -> int:
    """Carry bytes both ways until the server's end."""
    path = sys.argv[1]
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(path)
        except OSError as error:
            sys.stderr.write(f"no MCP server behind {path}: {error.strerror}\n")
            return 1
        asked_all = threading.Event()
        threading.Thread(target=ask, args=(server, asked_all), daemon=True).start()
        with suppress(OSError):  # nobody reads any more, or the server's side was cut off
            while answer := server.recv(CHUNK_BYTES):
                hand_on(answer)
    return 0 if asked_all.is_set() else 1


def ask(server: socket.socket, asked_all: threading.Event) -> None:
    """Hand on what comes on standard input, and its end."""
    with suppress(OSError):
        while request := os.read(0, CHUNK_BYTES):
            server.sendall(request)
        asked_all.set()
        server.shutdown(socket.SHUT_WR)


def hand_on(answer: bytes) -> None:
    """Write to standard output, all of it."""
    while answer:
        answer = answer[os.write(1, answer) :]


if __name__ == "__main__":
    sys.exit(main())
