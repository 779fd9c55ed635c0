"""The command that builds the images of tasks: what is missing is built, and what cannot be is told."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clawhpc import images
from clawhpc.lock import alone
from tests.fakes.task_sets import lay_harbor

FAKE = """\
#!/bin/sh
while [ $# -gt 2 ]; do shift; done; target=$1 staged=$(dirname $2)/staged
echo once >> {folder}/calls
grep '^From' $2 >> {folder}/calls
mkdir -p $target/.clawhpc && cd $target/.clawhpc
printf 'PATH=/bin\\0' > env; echo /usr/bin/python3 > python; : > home
echo 'clawhpc: line 2: WORKDIR /app'
if grep -q 'make fail' $staged/build.sh; then echo 'clawhpc: line 3: RUN make fail'; echo broken >&2; exit 1; fi
"""
DOCKERFILE = "FROM python:3.12\nWORKDIR /app\nRUN make {}\n"

Build = Callable[..., int]


@pytest.fixture
def build(tmp_path: Path, ledger_root: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Calls the command with an Apptainer that is none; its exit code."""
    program = tmp_path / "bin/apptainer"
    program.parent.mkdir()
    program.write_text(FAKE.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")

    def call(*arguments: str) -> int:
        places = [f"tasks.folder={tmp_path}/set", f"tasks.images={tmp_path}/images", f"cache_dir={tmp_path}/cache"]
        more = [f"scratch_dir={ledger_root}", f"hydra.run.dir={tmp_path}/hydra"]
        monkeypatch.setattr(sys, "argv", ["images", *places, *more, *arguments])
        with pytest.raises(SystemExit) as ended:
            images.main()
        return int(ended.value.code or 0)

    return call


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().split("\n")[:-1]


def test_what_is_missing_is_built_once_for_all_that_want_it(
    build: Build, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        lay_harbor(tmp_path / "set", name, dockerfile=DOCKERFILE.format("all"))
    lay_harbor(tmp_path / "set", "plain")
    assert build() == 0
    assert calls(tmp_path) == ["once", "From: python:3.12"]
    lay_harbor(tmp_path / "set", "c", dockerfile=DOCKERFILE.format("more"))
    assert build("tasks.bases={python\\:3.12: docker://mirror.example/python:3}", "at_once=1") == 0
    assert calls(tmp_path)[2:] == ["once", "From: mirror.example/python:3"] * 2, "of another base they are others"
    said, _ = capfd.readouterr()
    assert "2 tasks have an image of their own, 1 images in all\n" in said
    assert f"2 of 2 images are in {tmp_path}/images\n" in said
    assert build() == 0
    assert len(calls(tmp_path)) == 8, "one of the first two is there"


def test_one_that_cannot_be_built_is_told_with_its_line_and_its_log_and_the_others_are_built(
    build: Build, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, what in (("a", "fail"), ("b", "all"), ("c", "fail")):
        lay_harbor(tmp_path / "set", name, dockerfile=DOCKERFILE.format(what))
    lay_harbor(tmp_path / "set", "d", dockerfile="FROM x\nENTRYPOINT y\n")
    assert build("at_once=1") == 1
    said, _ = capfd.readouterr()
    assert f"\n{tmp_path}/set/a/environment/Dockerfile:3: RUN make fail\n" in said
    assert "    broken\n" in said
    log = re.search(r"the whole log: (\S+)\n", said)
    assert log is not None
    assert Path(log[1]).read_text().endswith("broken\n")
    assert f"    the same image: {tmp_path}/set/c/environment/Dockerfile\n" in said
    assert f"left out: {tmp_path}/set/d/environment/Dockerfile:2: ENTRYPOINT is not carried out" in said
    assert said.endswith(f"1 of 2 images are in {tmp_path}/images\n")
    assert len([path for path in (tmp_path / "images").iterdir() if path.is_dir()]) == 1
    lay_harbor(tmp_path / "set", "a", dockerfile=DOCKERFILE.format("better"))
    assert build() == 1, "that of c is still missing"
    assert calls(tmp_path).count("once") == 4


def test_one_that_another_process_builds_is_told_by_that_and_not_by_an_older_log(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lay_harbor(tmp_path / "set", dockerfile=DOCKERFILE.format("fail"))
    assert build() == 1
    assert "    cannot be built\n" in capfd.readouterr().out
    (log,) = (tmp_path / "images").glob("*.log")
    monkeypatch.setattr("clawhpc.sandbox.image.BUILD_S", 0.2)
    with alone(log.with_suffix(".lock"), "the image"):
        assert build() == 1
    said, _ = capfd.readouterr()
    assert f"/environment/Dockerfile: {log.with_suffix('')} is in use by process " in said
    assert "RUN make fail" not in said
    assert "broken" not in said


def test_one_that_takes_too_long_is_told_with_the_line_that_it_came_to(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lay_harbor(tmp_path / "set", dockerfile=DOCKERFILE.format("all"))
    program = tmp_path / "bin/apptainer"
    program.write_text("#!/bin/sh\necho 'clawhpc: line 3: RUN make all'\nexec sleep 20\n")
    monkeypatch.setattr("clawhpc.sandbox.image.BUILD_S", 1.0)
    assert build() == 1
    assert "/Dockerfile:3: RUN make all\n    has been building for 1 s" in capfd.readouterr().out


def test_an_image_in_which_files_are_missing_is_built_again(build: Build, tmp_path: Path) -> None:
    lay_harbor(tmp_path / "set", dockerfile=DOCKERFILE.format("all"))
    assert build() == 0
    next((tmp_path / "images").glob("*/.clawhpc/home")).unlink()
    assert build() == 0
    assert calls(tmp_path).count("once") == 2


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("tasks.images=null", "tasks.images is null: name the folder that takes the images"),
        ("tasks.folder=null", "no set of tasks: name it"),
        ("at_once=0", "at_once=0: must be a number of builds"),
        ("tasks.bases={a: b}", "bases.a=b: must be the absolute path of an image"),
    ],
)
def test_what_a_person_can_mend_is_one_line(
    build: Build, tmp_path: Path, argument: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lay_harbor(tmp_path / "set")
    assert build(argument) == 2
    _, errors = capfd.readouterr()
    assert said in errors
    assert errors.count("\n") == 1


def test_without_apptainer_it_says_so(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lay_harbor(tmp_path / "set", dockerfile=DOCKERFILE.format("all"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert build() == 2
    assert "Apptainer is not installed" in capfd.readouterr().err
