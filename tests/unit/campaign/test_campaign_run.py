"""The same command goes on with its unfinished run, and is alone there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from clawhpc.campaign.run import find_run, finished_before, open_run
from clawhpc.config import former_turn_s
from clawhpc.errors import UserError
from clawhpc.launch.turn import Turn
from clawhpc.paths import RunPaths
from tests.fakes.disk import largest_file


def test_the_same_configuration_goes_on_with_its_unfinished_run(tmp_path: Path) -> None:
    with open_run(tmp_path, b"a: 1") as first:
        pass
    with open_run(tmp_path, b"a: 2") as other:
        pass
    with open_run(tmp_path, b"a: 1") as again:
        pass
    assert (first.root.name, other.root.name, again.root.name) == ("001", "002", "001")


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    with open_run(tmp_path, b"a: 1") as first:
        first.finished.touch()
    with open_run(tmp_path, b"a: 1") as second:
        assert second.root.name == "002"


def test_a_finished_run_goes_on_where_it_may_be_opened_again(tmp_path: Path) -> None:
    with open_run(tmp_path, b"a: 1", reopen=True) as first:
        first.finished.touch()
    with open_run(tmp_path, b"a: 1", reopen=True) as again:
        assert again.root == first.root


def test_the_thousandth_run_is_a_run_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "999").mkdir()
    for _ in range(2):
        with open_run(tmp_path, b"a: 1") as paths:
            assert paths.root.name == "1000"


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from clawhpc.campaign.run import open_run\n"
    code += "with open_run(Path(sys.argv[1]), b'a: 1'): print('in', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "in\n"
        with pytest.raises(UserError, match=f"in use by process {owner.pid}"), open_run(tmp_path, b"a: 1"):
            pass
        owner.communicate("", timeout=30)
    with open_run(tmp_path, b"a: 1") as paths:
        assert paths.root.name == "001"


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[AbstractContextManager[RunPaths]], None]]:
    """Enters a block, for as long as the test, when somebody has looked for a run and found none."""
    with ExitStack() as rivals:

        def begin(rival: AbstractContextManager[RunPaths]) -> None:
            def look(*asked: Any, **how: Any) -> RunPaths | None:
                monkeypatch.setattr("clawhpc.campaign.run.find_run", find_run)
                found = find_run(*asked, **how)
                rivals.enter_context(rival)
                return found

            monkeypatch.setattr("clawhpc.campaign.run.find_run", look)

        yield begin


def test_of_two_same_commands_that_begin_at_once_the_second_is_refused(
    tmp_path: Path, between: Callable[[AbstractContextManager[RunPaths]], None]
) -> None:
    between(open_run(tmp_path, b"a: 1"))
    with pytest.raises(UserError, match=r"001 is in use by"), open_run(tmp_path, b"a: 1"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["001"]


def test_of_two_other_commands_that_begin_at_once_each_has_its_run(
    tmp_path: Path, between: Callable[[AbstractContextManager[RunPaths]], None]
) -> None:
    between(open_run(tmp_path, b"a: 2"))
    with open_run(tmp_path, b"a: 1") as paths:
        assert paths.root.name == "002"
    assert {path.name: (path / "config.yaml").read_bytes() for path in tmp_path.iterdir()} == {
        "001": b"a: 2",
        "002": b"a: 1",
    }


def test_a_run_is_there_with_its_configuration_or_not_at_all(tmp_path: Path) -> None:
    with (
        largest_file(0),
        pytest.raises(OSError, match=r"File too large: '.*config\.yaml'"),
        open_run(tmp_path, b"a: 1"),
    ):
        pass
    assert [*tmp_path.iterdir()] == []
    with open_run(tmp_path, b"a: 1") as paths:
        assert paths.root.name == "001"


def test_the_next_turn_of_a_job_waits_for_the_process_of_its_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys, time; from pathlib import Path; from clawhpc.campaign.run import open_run\n"
    code += "with open_run(Path(sys.argv[1]), b'a: 1'): print('in', flush=True); time.sleep(0.5)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as former:
        assert former.stdout is not None
        assert former.stdout.readline() == "in\n"
        with pytest.raises(UserError, match="in use by"), open_run(tmp_path, b"a: 1", wait_s=former_turn_s()):
            pass
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        with open_run(tmp_path, b"a: 1", wait_s=former_turn_s()) as paths:
            assert paths.root.name == "001"


def begin_in(folder: Path, turn: Turn | None, *, finish: bool = True) -> str:
    """The number of the run that a command in this turn of a job opens; empty where it has nothing to do."""
    if finished_before(folder, b"a: 1", turn):
        return ""
    with open_run(folder, b"a: 1", turn=turn) as paths:
        if finish:
            paths.finished.touch()
    return paths.root.name


def test_a_job_that_is_queued_again_after_its_run_has_finished_begins_no_other(tmp_path: Path) -> None:
    first, second = Turn(job_id="7", number=0), Turn(job_id="7", number=1)
    assert begin_in(tmp_path, first, finish=False) == "001"
    assert begin_in(tmp_path, second) == "001", "it goes on"
    assert begin_in(tmp_path, Turn(job_id="7", number=2)) == ""
    assert begin_in(tmp_path, Turn(job_id="8", number=3)) == "002", "another job, another run"
    assert begin_in(tmp_path, None) == "003", "so it is outside of any job"


def test_each_of_several_same_commands_in_a_job_has_its_run_however_often_the_job_is_queued_again(
    tmp_path: Path,
) -> None:
    turns = [Turn(job_id="7", number=number) for number in range(2)]
    assert [begin_in(tmp_path, turns[0]) for _ in range(2)] == ["001", "002"]
    assert [begin_in(tmp_path, turns[1]) for _ in range(3)] == ["", "", "003"]
