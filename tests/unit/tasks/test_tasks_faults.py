"""What every format shares: a fault costs one task, and many alike are one kind."""

from __future__ import annotations

from pathlib import Path

from clawhpc.tasks.faults import Gathering, by_kind, read_text, task_folders


def test_faults_are_alike_that_differ_in_paths_line_quoted_value_and_number_alone() -> None:
    alike = ["/s/a b/task.toml: x[0].name 'a': must be 1 of 2", "/s/c/other.toml:12: x[3].name '': must be 4 of 2"]
    other = "/s/a b/task.toml: y[0].name 'a': must be 1 of 2"
    assert by_kind([alike[0], other, alike[1]]) == [alike, [other]]
    links = [f"/s/{name}/mcp: is a link that leads out, to /x/{name}.d/mcp; copy what is there" for name in "ab"]
    assert by_kind(links) == [links]


def test_no_faults_are_of_no_kind() -> None:
    assert by_kind([]) == []


def only_fault(path: Path) -> str:
    found = Gathering("Ours")
    with found.one():
        read_text(path)
    (fault,) = found.loaded().faults
    return fault


def test_links_in_a_circle_are_a_fault(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert only_fault(tmp_path / "a") == f"{tmp_path}/a: links lead round in a circle"


def test_a_link_that_leads_nowhere_is_no_folder_of_a_task(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "gone").symlink_to("nothing")
    assert task_folders(tmp_path) == [tmp_path / "a", tmp_path / "b"]


def test_whatever_cannot_be_looked_at_costs_one_task(tmp_path: Path) -> None:
    found = Gathering("Ours")
    with found.one():
        (tmp_path / ("x" * 300)).stat()
    assert found.loaded().faults == (f"{tmp_path}/{'x' * 300}: File name too long",)


def test_a_text_is_read_as_python_reads_it_with_its_line_ends_and_without_its_mark(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("\ufeffone\r\ntwo\n".encode())
    assert read_text(tmp_path / "a") == "one\ntwo\n"
