import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from clawhpc.errors import UserError
from clawhpc.tasks.faults import Fault
from clawhpc.tasks.layout import Layout, files_below


def test_the_same_files_are_written_once_and_others_elsewhere(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "cache")
    first = layout.lay_out("t", {"a/b": "text", "c": "more"})
    before = Path(first, "a/b").stat()
    assert layout.lay_out("t", {"c": "more", "a/b": "text"}) == first
    assert Path(first, "a/b").stat() == before
    assert layout.lay_out("t", {"a/b": "text", "c": "less"}) != first
    assert layout.lay_out("t", {"a/b": "tex", "tc": "more"}) != first
    assert len(os.listdir(tmp_path / "cache")) == 3


def test_files_of_the_host_are_copied_with_their_mode_and_links_stay_links(tmp_path: Path) -> None:
    program, link = tmp_path / "run", tmp_path / "link"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o750)
    link.symlink_to("elsewhere")
    folder = Path(Layout(tmp_path / "cache").lay_out("t", {"run": program, "bin/link": link}))
    assert (folder / "run").stat().st_mode & 0o777 == 0o750
    assert os.readlink(folder / "bin/link") == "elsewhere"


def test_a_file_that_has_changed_gives_another_folder(tmp_path: Path) -> None:
    layout, file = Layout(tmp_path / "cache"), tmp_path / "a"
    file.write_text("one")
    first = layout.lay_out("t", {"a": file})
    file.write_text("three")
    assert Path(layout.lay_out("t", {"a": file}), "a").read_text() == "three"
    assert Path(first, "a").read_text() == "one"


def test_what_is_no_file_is_a_fault(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "gone"):
        with pytest.raises(Fault, match=str(path)):
            Layout(tmp_path / "cache").lay_out("t", {"a": path})


def test_a_file_in_the_place_of_a_folder_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(Fault, match=r"^t: a/b is to be a file, and a folder with other files"):
        Layout(tmp_path / "cache").lay_out("t", {"a/b": "", "a/b/c/d": ""})


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match=f"cannot write tasks to {tmp_path}/cache"):
        Layout(tmp_path / "cache").lay_out("t", {"a": "b"})


def test_links_to_folders_are_files_below_and_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").touch()
    (tmp_path / "up").symlink_to(tmp_path)
    assert dict(files_below(tmp_path)) == {"a/b/c": tmp_path / "a/b/c", "up": tmp_path / "up"}


def test_who_comes_second_finds_the_folder_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, files, mkdtemp = Layout(tmp_path / "cache"), {"a/b": "text"}, tempfile.mkdtemp

    def another_is_faster(**where: Any) -> str:
        monkeypatch.undo()
        layout.lay_out("t", files)
        return mkdtemp(**where)

    monkeypatch.setattr(tempfile, "mkdtemp", another_is_faster)
    folder = Path(layout.lay_out("t", files))
    assert (folder / "a/b").read_text() == "text"
    assert list(folder.parent.iterdir()) == [folder]


def test_a_file_that_was_written_anew_is_another(tmp_path: Path) -> None:
    layout, source = Layout(tmp_path / "cache"), tmp_path / "source"
    source.write_text("old")
    os.utime(source, (1, 1))
    old = layout.lay_out("t", {"a": source})
    source.write_text("new")
    assert Path(layout.lay_out("t", {"a": source}), "a").read_text() == "new"
    assert Path(old, "a").read_text() == "old"


def test_files_of_one_size_and_one_time_are_told_apart_by_their_content(tmp_path: Path) -> None:
    layout, sources = Layout(tmp_path / "cache"), [tmp_path / name for name in ("one", "two", "same")]
    for source, content in zip(sources, ("1111\n", "2222\n", "1111\n"), strict=True):
        source.write_text(content)
        os.utime(source, (1, 1))
    one, two, same = (Path(layout.lay_out("t", {"data.csv": source})) for source in sources)
    assert [(one / "data.csv").read_text(), (two / "data.csv").read_text()] == ["1111\n", "2222\n"]
    assert same == one


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 256])
def test_a_name_that_no_file_can_have_is_a_fault_of_who_asks(tmp_path: Path, name: str) -> None:
    with pytest.raises(Fault, match=r"^t: .* can be no name of a file"):
        Layout(tmp_path / "cache").lay_out("t", {f"a/{name}": "text"})


def test_a_name_that_is_no_utf_8_can_be_that_of_a_file(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    assert os.listdir(Layout(tmp_path / "cache").lay_out("t", {name: "text"})) == [name]


def test_a_folder_that_somebody_has_cleaned_is_not_taken_for_whole(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "cache")
    (Path(layout.lay_out("t", {"a": "1", "b": "2"})) / "b").unlink()
    with pytest.raises(UserError, match=rf"/b is gone.*: remove {tmp_path}/cache"):
        layout.lay_out("t", {"a": "1", "b": "2"})
