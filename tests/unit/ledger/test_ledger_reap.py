"""Who is found by a marker."""

from __future__ import annotations

import os
import subprocess
import sys

MARKER = f"clawhpc-owner-test-{os.getpid()}"
HIDE = "import ctypes, sys; ctypes.CDLL(None).prctl(4, 0); print(flush=True); sys.stdin.read()"
FIND = "import sys; from clawhpc.ledger.reap import find_marked; print(*find_marked(sys.argv[1], set()))"
AS_ORDINARY = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.getuid() == 0 else ()
"""Root may read everything; without capabilities it is as others are."""


def test_a_process_that_hides_its_environment_is_known_by_its_command_line() -> None:
    hiding = [sys.executable, "-c", HIDE, MARKER]
    with subprocess.Popen(hiding, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = subprocess.run(
            [*AS_ORDINARY, sys.executable, "-c", FIND, MARKER], capture_output=True, text=True, check=True
        )
        process.communicate()
    assert found.stdout.split() == [str(process.pid)]
