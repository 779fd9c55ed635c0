"""What is shown of a log that grows."""

from __future__ import annotations

from pathlib import Path

from clawhpc.launch.follow import Tail


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def test_lines_are_shown_whole_and_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = Tail(log)
    assert tail.read() == ""
    append(log, "eins\nzwö".encode()[:-1])
    assert tail.read() == "eins\n"
    append(log, "ö".encode()[1:] + b"lf\ndrei")
    assert (tail.read(), tail.read()) == ("zwölf\n", "")
    append(log, b"\n\nsrun: error: n1: task 0: Exited")
    assert tail.read(to_the_end=True) == "drei\n\nsrun: error: n1: task 0: Exited"
    assert tail.last_line == "drei"


def test_who_comes_back_to_a_long_log_sees_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    append(log, b"one\ntwo\nthree\n")
    tail = Tail(log, back_bytes=8)
    assert tail.read() == "three\n"
    append(log, b"four\n")
    assert tail.read() == "four\n"
    assert Tail(log, back_bytes=100).read() == "one\ntwo\nthree\nfour\n"
