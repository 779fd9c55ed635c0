"""Images: built once, whole or again; copied to the host's own disk once, and gone with those who use them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from clawhpc.errors import UserError
from clawhpc.ledger import Ledger
from clawhpc.sandbox.image import build_image
from clawhpc.sandbox.staging import fingerprint, is_far, stage_image
from tests.sandbox_parts import running, seconds_until_gone

LAST_TWO = "while [ $# -gt 2 ]; do shift; done; target=$1 recipe=$2"


def fake_apptainer(folder: Path, script: str) -> str:
    """A program that, called as `apptainer build --sandbox … TARGET RECIPE`, runs `script` with both set."""
    program = folder / "apptainer"
    program.write_text(f"#!/bin/sh\necho once >> {folder}/calls\n{LAST_TWO}\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_an_image_is_built_once_for_each_content_of_its_recipe(tmp_path: Path, ledger: Ledger) -> None:
    recipe = tmp_path / "base.def"
    recipe.write_text("Bootstrap: docker")
    apptainer = fake_apptainer(tmp_path, "mkdir $target")
    first = build_image(recipe, apptainer=apptainer, cache_dir=tmp_path, ledger=ledger)
    assert build_image(recipe, apptainer=apptainer, cache_dir=tmp_path, ledger=ledger) == first
    assert (tmp_path / "calls").read_text() == "once\n"
    recipe.write_text("Bootstrap: docker\n# changed")
    assert build_image(recipe, apptainer=apptainer, cache_dir=tmp_path, ledger=ledger) != first


def test_images_of_recipes_that_differ_after_a_dot_leave_each_other_whole(tmp_path: Path, ledger: Ledger) -> None:
    apptainer = fake_apptainer(tmp_path, "mkdir $target; cp $recipe $target")
    recipes = [tmp_path / "python3.11.def", tmp_path / "python3.12.def"]
    for recipe, content in zip(recipes, ("short", "not so short"), strict=True):
        recipe.write_text(content)
    for recipe in (*recipes, *recipes):
        build_image(recipe, apptainer=apptainer, cache_dir=tmp_path, ledger=ledger)
    assert (tmp_path / "calls").read_text() == "once\n" * 2
    assert len(list((tmp_path / "images").glob("*.lock"))) == 2, "nor does one wait for the other"


def test_a_build_that_fails_tells_why_and_leaves_nothing_half_written(tmp_path: Path, ledger: Ledger) -> None:
    recipe = tmp_path / "base.def"
    recipe.write_text("Bootstrap: docker")
    apptainer = fake_apptainer(tmp_path, "mkdir $target; echo no such registry >&2; exit 1")
    with pytest.raises(UserError, match=r"base.def: cannot be built: no such registry"):
        build_image(recipe, apptainer=apptainer, cache_dir=tmp_path, ledger=ledger)
    assert [path.suffix for path in (tmp_path / "images").iterdir()] == [".lock"]


def test_what_a_killed_build_has_left_goes_with_the_next(tmp_path: Path, ledger: Ledger) -> None:
    recipe = tmp_path / "base.def"
    recipe.write_text("Bootstrap: docker")
    image = build_image(recipe, apptainer=fake_apptainer(tmp_path, "mkdir $target"), cache_dir=tmp_path, ledger=ledger)
    image.rename(image.with_name(f"{image.name}.cut_off"))
    apptainer = fake_apptainer(tmp_path, "mkdir $target")
    assert build_image(recipe, apptainer=apptainer, cache_dir=tmp_path, ledger=ledger) == image
    assert sorted(path.name for path in image.parent.iterdir()) == [
        image.name,
        f"{image.name}.lock",
        f"{image.name}.whole",
    ]


def test_of_many_that_ask_at_the_same_time_one_builds(tmp_path: Path, ledger: Ledger) -> None:
    """The lock is one of the file system: where it binds all hosts, of many hosts too."""
    recipe = tmp_path / "base.def"
    recipe.write_text("Bootstrap: docker")
    apptainer = fake_apptainer(tmp_path, "sleep 0.2; mkdir $target")

    def build(_: int) -> Path:
        return build_image(recipe, apptainer=apptainer, cache_dir=tmp_path, ledger=ledger)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(build, range(4)))) == 1
    assert (tmp_path / "calls").read_text() == "once\n"


def test_an_image_in_which_files_are_missing_is_built_again(tmp_path: Path, ledger: Ledger) -> None:
    recipe = tmp_path / "base.def"
    recipe.write_text("Bootstrap: docker")
    apptainer = fake_apptainer(tmp_path, "mkdir -p $target/usr; echo a > $target/usr/a; echo b > $target/usr/b")
    image = build_image(recipe, apptainer=apptainer, cache_dir=tmp_path, ledger=ledger)
    (image / "usr/a").unlink()
    assert build_image(recipe, apptainer=apptainer, cache_dir=tmp_path, ledger=ledger) == image
    assert (image / "usr/a").read_text() == "a\n"
    assert (tmp_path / "calls").read_text() == "once\nonce\n"


BUILD = """
import sys
from pathlib import Path
from clawhpc.ledger import Ledger
from clawhpc.sandbox.image import build_image
folder = Path(sys.argv[1])
with Ledger.open(Path(sys.argv[2])) as ledger:
    build_image(folder / "base.def", apptainer=str(folder / "apptainer"), cache_dir=folder, ledger=ledger)
"""


def test_of_a_builder_that_is_killed_nothing_is_left_and_the_next_builds(
    tmp_path: Path, ledger: Ledger, ledger_root: Path, needle: str
) -> None:
    recipe = tmp_path / "base.def"
    recipe.write_text("Bootstrap: docker")
    fake_apptainer(tmp_path, f"mkdir $target; touch $APPTAINER_TMPDIR/layer; (setsid sleep {needle} &); sleep {needle}")
    with subprocess.Popen([sys.executable, "-c", BUILD, str(tmp_path), str(ledger_root)]) as builder:
        wait_until(lambda: len(running(f"sleep {needle}")) >= 2)
        builder.send_signal(signal.SIGKILL)
    seconds_until_gone(f"sleep {needle}", within_s=10)
    wait_until(lambda: [path.name for path in ledger_root.iterdir() if path.is_dir()] == [ledger.scratch.name])
    image = build_image(recipe, apptainer=fake_apptainer(tmp_path, "mkdir $target"), cache_dir=tmp_path, ledger=ledger)
    assert [path.name for path in image.parent.iterdir() if path.is_dir()] == [image.name]


def wait_until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.02)


def test_a_build_that_takes_too_long_is_given_up(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawhpc.sandbox.image.BUILD_S", 0.2)
    recipe = tmp_path / "base.def"
    recipe.write_text("Bootstrap: docker")
    with pytest.raises(UserError, match=r"base\.def: has been building for .* build it by hand"):
        build_image(recipe, apptainer=fake_apptainer(tmp_path, "exec sleep 60"), cache_dir=tmp_path, ledger=ledger)
    assert [path.suffix for path in (tmp_path / "images").iterdir()] == [".lock"]


# ---- on the host's own disk -----------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "folder"])
def shared_image(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    image = tmp_path / "shared/base"
    image.parent.mkdir()
    if request.param == "file":
        image.write_bytes(b"squashfs" * 1000)
    else:
        (image / "usr/bin").mkdir(parents=True)
        (image / "usr/bin/python3").write_text("program")
        (image / "bin").symlink_to("usr/bin")
        (image / "usr/locked").mkdir(mode=0o500)
    return image


@pytest.fixture
def other(ledger_root: Path) -> Iterator[Ledger]:
    """Another worker on the same host."""
    with Ledger.open(ledger_root) as other:
        yield other


def one_file(image: Path) -> Path:
    return image if image.is_file() else image / "usr/bin/python3"


def test_a_copy_is_whole_and_lies_in_scratch(shared_image: Path, ledger: Ledger) -> None:
    copy = stage_image(shared_image, ledger)
    assert copy.is_relative_to(ledger.scratch)
    assert fingerprint(copy) == fingerprint(shared_image)
    assert one_file(copy).read_bytes() == one_file(shared_image).read_bytes()
    assert one_file(copy).stat().st_ino != one_file(shared_image).stat().st_ino
    assert stage_image(shared_image, ledger) == copy


def test_workers_on_one_host_have_one_copy_which_goes_with_the_last_of_them(
    shared_image: Path, ledger_root: Path, ledger: Ledger
) -> None:
    with Ledger.open(ledger_root) as first:
        one = one_file(stage_image(shared_image, first)).stat().st_ino
        copy = stage_image(shared_image, ledger)
        assert one_file(copy).stat().st_ino == one
    assert one_file(copy).stat().st_nlink == 1
    assert fingerprint(copy) == fingerprint(shared_image)


def test_of_many_that_ask_at_the_same_time_one_copies(shared_image: Path, ledger_root: Path) -> None:
    with ExitStack() as stack:
        ledgers = [stack.enter_context(Ledger.open(ledger_root)) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            copies = list(pool.map(lambda ledger: stage_image(shared_image, ledger), ledgers))
        assert len(set(copies)) == 4
        assert len({one_file(copy).stat().st_ino for copy in copies}) == 1
    assert list(ledger_root.iterdir()) == []


def test_a_copy_that_is_broken_is_not_taken(shared_image: Path, ledger: Ledger, other: Ledger) -> None:
    broken = one_file(stage_image(shared_image, other))
    broken.unlink()
    broken.write_text("half")
    assert fingerprint(stage_image(shared_image, ledger)) == fingerprint(shared_image)


def test_an_image_that_has_changed_is_another_one(tmp_path: Path, ledger: Ledger) -> None:
    image = tmp_path / "base.sif"
    image.write_text("old")
    before = stage_image(image, ledger)
    image.write_text("newer")
    assert stage_image(image, ledger).read_text() == "newer"
    assert before.read_text() == "old"


def test_where_there_is_no_room_the_image_is_used_where_it_lies(
    shared_image: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("clawhpc.sandbox.staging.SPARE_BYTES", 1 << 60)
    with caplog.at_level(logging.WARNING):
        assert stage_image(shared_image, ledger) == shared_image
    assert "used where it lies, not from this host's disk" in caplog.text
    assert "MiB free, and the copy takes 0" in caplog.text


def test_a_copy_that_fails_leaves_nothing_and_the_image_is_used_where_it_lies(
    shared_image: Path,
    ledger: Ledger,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "cp").write_text(
        '#!/bin/sh\nfor target; do :; done; echo half > "$target"; echo disk full >&2; exit 1\n'
    )
    (tmp_path / "cp").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with caplog.at_level(logging.WARNING):
        assert stage_image(shared_image, ledger) == shared_image
    assert "disk full" in caplog.text
    assert [path for path in ledger.scratch.rglob("*") if path.is_file()] == []


MOUNTS = """/dev/sda1 / ext4 rw 0 0
home:/export /home nfs4 rw 0 0
/dev/nvme /scratch xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("image", "scratch", "far"),
    [("/home/base.sif", "/scratch/x", True), ("/opt/base", "/scratch/x", False), ("/home/base", "/home/x", False)],
)
def test_an_image_is_far_where_hosts_share_it_and_scratch_is_near(image: str, scratch: str, far: bool) -> None:
    assert is_far(Path(image), Path(scratch), MOUNTS) is far
