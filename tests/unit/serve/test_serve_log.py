from __future__ import annotations

from pathlib import Path

import pytest

from clawhpc.serve.log import EngineLog, last_error

PREFIX = "(EngineCore pid=7004) ERROR 11-29 20:12:33 [core.py:1512] "


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", "nothing was logged"),
        ("one\n\n  two  \n", "two"),
        (f"{PREFIX}ValueError: no memory\nINFO: bye\n", "ValueError: no memory"),
        (f"{PREFIX}  File 'x', line 3\n{PREFIX}\n", "File 'x', line 3"),
        ("(APIServer pid=3) ModuleNotFoundError: No module named 'x'\n", "ModuleNotFoundError: No module named 'x'"),
        (f"{PREFIX}torch.OutOfMemoryError: 3 GiB\n", "torch.OutOfMemoryError: 3 GiB"),
        (
            "extension.py: error: argument --dtype: invalid choice\n",
            "extension.py: error: argument --dtype: invalid choice",
        ),
        (
            f"{PREFIX}ValueError: no memory\nRuntimeError: Engine core initialization failed. See root cause above.\n",
            "ValueError: no memory",
        ),
        ("RuntimeError: Engine core initialization failed.\nbye", "RuntimeError: Engine core initialization failed."),
    ],
)
def test_the_line_that_names_the_cause_is_found(log: str, line: str) -> None:
    assert last_error(log) == line


def test_a_long_line_is_shortened() -> None:
    assert len(last_error("ValueError: " + "x" * 5000)) == 300


def test_earlier_engines_in_the_same_file_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "engine.log"
    first = EngineLog(path)
    path.write_text("ValueError: of the first\n")
    second = EngineLog(path)
    with path.open("a") as file:
        file.write("second is well\n")
    assert first.last_error() == f"ValueError: of the first (log: {path})"
    assert second.last_error() == f"second is well (log: {path})"


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    log = EngineLog(path)
    path.write_text("ValueError: long ago\n" + "fine\n" * 100_000)
    assert log.last_error().startswith("fine")
