"""`python -m clawhpc.report`: which runs are compared under which names, and what it says when they cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawhpc.report import main
from tests.fakes.run import write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs in it."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("ppo/001", "grpo/001", "other/grpo/001"):
        write_run(folder / name, steps=2, tasks=1, samples=2)
    return folder


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    """Exit code, and what is said."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code, capsys.readouterr().err


def names_on(page: Path) -> list[str]:
    title = page.read_text().split("<title>")[1].split("</title>")[0]
    return title.removesuffix(" · clawhpc").split(" · ")


def test_it_writes_one_page_and_says_where(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    main([str(runs / "ppo/001"), str(runs / "grpo/001"), "-o", str(page)])
    assert capsys.readouterr().out == f"{page}\n"
    assert names_on(page) == ["ppo/001", "grpo/001"]
    assert list(tmp_path.iterdir()) == [page]


def test_a_run_may_be_given_a_name_and_runs_of_one_name_are_told_apart_by_their_folders(
    runs: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    given = [f"first={runs / 'ppo/001'}", str(runs / "grpo/001"), str(runs / "other/grpo/001")]
    main([*given, "-o", str(page)])
    assert names_on(page) == ["first", str(runs / "grpo/001"), str(runs / "other/grpo/001")]


def test_what_is_no_run_and_a_name_that_is_given_twice_end_it_with_one_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, page = runs / "ppo/001", tmp_path / "page.html"
    faults = {
        f"{tmp_path}/nothing": f"{tmp_path}/nothing: no such run folder\n",
        str(tmp_path): f"{tmp_path}: no run here; a run's folder has a config.yaml\n",
        f"a={tmp_path}/nothing": f"{tmp_path}/nothing: no such run folder\n",
        str(run): f"{run}: there are two runs of this name; as NAME=FOLDER each can have its own\n",
    }
    for fault, message in faults.items():
        assert refusal(capsys, str(run), fault, "-o", str(page)) == (2, f"clawhpc: {message}")
    assert not page.exists()


def test_a_configuration_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("a: [1")
    code, line = refusal(capsys, str(tmp_path), "-o", str(tmp_path / "page.html"))
    assert code == 2
    assert line.startswith(f"clawhpc: {tmp_path}/config.yaml: not a configuration: ")


def test_a_page_that_cannot_be_written_is_said_in_one_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(runs / "ppo/001")
    assert refusal(capsys, run, "-o", str(tmp_path)) == (2, f"clawhpc: {tmp_path}: is a folder; name a file\n")
    code, said = refusal(capsys, run, "-o", "/proc/page.html")
    (line,) = said.splitlines()
    assert code == 1
    assert ": /proc/" in line
