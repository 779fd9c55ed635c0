"""How watch.py measures what a command takes, on files and processes of the host."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from clawhpc.sandbox import watch
from clawhpc.sandbox.settings import SandboxLimits

MB = 1 << 20


def test_what_is_written_counts_once_where_it_lies_and_as_much_as_it_takes(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside / "deep/deeper", outside):
        folder.mkdir(parents=True)
    (outside / "large").write_bytes(bytes(8 * MB))
    (inside / "to_outside").symlink_to(outside)
    (inside / "deep/deeper/file").write_bytes(b"x" * MB)
    (inside / "same").hardlink_to(inside / "deep/deeper/file")
    with (inside / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert MB <= watch.written([str(inside)]) < 2 * MB
    assert watch.written([str(inside), str(outside)]) >= 9 * MB


def test_a_folder_that_has_gone_is_no_error_and_one_that_cannot_be_seen_is_one(tmp_path: Path) -> None:
    assert watch.written([str(tmp_path / "gone")]) == 0
    with pytest.raises(OSError, match="File name too long"):
        watch.written([str(tmp_path) + "/x" * 3000])


def test_who_cannot_look_says_so() -> None:
    def look() -> str:
        raise OSError(24, "Too many open files")

    assert watch.told_by(look) == "files: what it takes cannot be measured any more: Too many open files"


def test_a_deleted_file_counts_as_long_as_a_process_has_it_open(tmp_path: Path) -> None:
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(bytes(3 * MB))
        file.flush()
        sizes = [
            size
            for device, size in watch.open_deleted({f"/proc/{os.getpid()}": (1, 0, 0)})
            if device == os.stat(tmp_path).st_dev
        ]
        assert any(3 * MB <= size < 4 * MB for size in sizes)


def test_a_process_is_seen_with_its_threads_and_its_memory_and_is_gone_when_it_ends() -> None:
    script = "import threading; threading.Thread(target=input).start(); x = b'x' * (20 << 20); print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = watch.usage([process.pid])
        (threads, mapped, tables) = found[f"/proc/{process.pid}"]
        assert threads == 2
        assert process.pid in watch.other_processes()
        assert os.getpid() not in watch.other_processes()
        total, shared = watch.exact_memory(found)
        assert 20 * MB <= total <= mapped + tables
        assert shared < MB
        process.communicate(b"\n")
    assert process.pid not in watch.other_processes()
    assert watch.usage([process.pid]) == {}
    assert watch.exact_memory(found) == (tables, 0)


def test_what_is_too_much_is_told_with_the_figures() -> None:
    assert watch.beyond("memory", 3 << 30, 4 << 30) == ""
    assert watch.beyond("memory", (4 << 30) + (1 << 28), 4 << 30) == "memory: 4.25 GB; the limit is 4.00 GB"


@pytest.mark.parametrize("field", ["memory_gb", "max_processes", "disk_gb", "max_open_files", "output_mb"])
def test_a_limit_under_which_nothing_could_run_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0: must be at least"):
        SandboxLimits(**{field: 0})
