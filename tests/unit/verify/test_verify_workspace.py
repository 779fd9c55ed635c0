from __future__ import annotations

import os
import shutil
import socket
import tempfile
from itertools import product
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.records import WORKSPACE_MOUNT
from clawhpc.verify.workspace import LONGEST_PATH, MOST_HOLES_BYTES, is_harmless, make_safe

REWARD = f"{WORKSPACE_MOUNT}/reward"


def harmless(target: str) -> bool:
    """For a link in a folder of the workspace, in which the verifier's folder is to stand."""
    return is_harmless(
        PurePosixPath(WORKSPACE_MOUNT, "sub/link"), target, PurePosixPath(WORKSPACE_MOUNT), PurePosixPath(REWARD)
    )


@pytest.mark.parametrize(
    "target",
    [
        "x",
        "./x",
        "../x",
        "../sub/x/",
        ".../x",
        "sub/link",
        "../rewards",
        "reward",
        f"{WORKSPACE_MOUNT}/x",
        f"/{WORKSPACE_MOUNT}//sub/./x",
        "/usr/bin/python3",
        "/lib64",
        "../../../../usr/bin/python3",
        "../../../../../../bin/sh",
        "/opt/conda/bin/python",
        "/../usr/bin/python3",
    ],
)
def test_a_link_to_another_place_of_the_workspace_or_to_programs_is_harmless(target: str) -> None:
    assert harmless(target)


@pytest.mark.parametrize(
    "target",
    [
        "../reward",
        "../reward/expected",
        ".././/reward/expected",
        f"{WORKSPACE_MOUNT}/reward/expected",
        f"/{WORKSPACE_MOUNT}//reward",
        "../../workspace/reward",
        "x/../../reward/expected",
        "x/../y",
        "..",
        "../.",
        "../..",
        WORKSPACE_MOUNT,
        "/root",
        "/",
        "/.",
        "../../../..",
        "../../../../../..",
        "/proc",
        "/proc/12/cwd/expected",
        "/proc/self/cwd/../expected",
        "/proc/self/fd/0",
        f"/proc/12/root{WORKSPACE_MOUNT}/reward/expected",
        "../../../../proc/12/cwd/expected",
        "/usr/../proc/12/cwd/expected",
        "/../proc/12/cwd/expected",
        ".../../../../../../proc/12/cwd/expected",
        "/dev/stdin",
        "/dev/fd/0",
        "/tmp/expected",
        "/var/tmp/expected",
        "/root/expected",
        "/run/x",
        "/user/x",
        "../../../../user",
    ],
)
def test_a_link_to_anywhere_else_is_not(target: str) -> None:
    assert not harmless(target)


def test_among_programs_the_folder_that_a_workspace_lies_in_is_no_harmless_place() -> None:
    workspace = PurePosixPath("/opt/tasks/workspace")
    assert not is_harmless(workspace / "link", "/opt", workspace, None)
    assert not is_harmless(workspace / "link", "../..", workspace, None)
    assert is_harmless(workspace / "link", "/opt/conda", workspace, None)


def test_a_verifier_that_stands_elsewhere_is_no_place_to_lead_to_and_a_folder_reward_is_the_harness_s_own(
    tmp_path: Path,
) -> None:
    workspace = tmp_path / "workspace"
    (workspace / "reward").mkdir(parents=True)
    (workspace / "reward" / "gold.txt").touch()
    (workspace / "answer").symlink_to("/tests/expected")
    (workspace / "prize").symlink_to("reward/gold.txt")
    make_safe(workspace, "/app", "/tests")
    assert sorted(path.name for path in workspace.rglob("*")) == ["gold.txt", "prize", "reward"]


NAMES = ("a", "b", "reward")
TARGETS = st.builds(
    lambda start, parts: start + "/".join(parts) or ".",
    st.sampled_from(("", "", "/", "{}/", "/proc/self/cwd/")),
    st.lists(st.sampled_from(("..", "..", ".", "reward", "a", "b", "...", "proc")), max_size=6),
)
PLACES = ("a", "b", "...", "d/a", "d/b", "d/...", "d/d/a", "d/d/b", "d/reward")


@given(st.dictionaries(st.sampled_from(PLACES), TARGETS, min_size=1))
def test_no_path_by_a_link_that_stayed_leads_out_or_to_the_verifier(links: dict[str, str]) -> None:
    top = Path(os.path.realpath(tempfile.mkdtemp()))
    try:
        workspace = top / "workspace"
        (workspace / "d/d").mkdir(parents=True)
        for place, target in links.items():
            (workspace / place).symlink_to(target.format(workspace))
        make_safe(workspace, str(workspace), f"{workspace}/reward")
        (workspace / "reward/a").mkdir(parents=True)
        stayed = [workspace / place for place in links if (workspace / place).is_symlink()]
        for path in (Path(link, *names) for link in stayed for n in range(3) for names in product(NAMES, repeat=n)):
            end = Path(os.path.realpath(path))
            assert end.is_relative_to(workspace)
            assert not end.is_relative_to(workspace / "reward")
    finally:
        shutil.rmtree(top)


def test_folders_too_deep_for_a_path_are_moved_out_and_hide_no_link(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    here = os.open(workspace, os.O_RDONLY)
    for _ in range(30):
        os.symlink("/proc/self/cwd", "link", dir_fd=here)
        os.mkdir("f" * 200, dir_fd=here)
        below = os.open("f" * 200, os.O_RDONLY, dir_fd=here)
        os.chmod("f" * 200, 0, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    make_safe(workspace, WORKSPACE_MOUNT, REWARD)
    found = [(folder, names) for folder, names, files in os.walk(workspace) if not files]
    assert max(len(folder) for folder, _ in found) <= LONGEST_PATH
    assert len(list(os.walk(workspace))) == len(found) > 5
    assert len(list(tmp_path.glob("planted-*/*"))) == 1
    assert not any(names for _, names in found[-1:])
    shutil.rmtree(tmp_path)


def test_sound_files_are_left_as_they_are(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "file").touch(mode=0o644)
    (workspace / "run").touch(mode=0o100)
    with (workspace / "disk.img").open("w") as file:
        file.truncate(MOST_HOLES_BYTES)
    make_safe(workspace, WORKSPACE_MOUNT, REWARD)
    modes = {path.name: path.stat().st_mode & 0o777 for path in workspace.iterdir() if path.name != "reward"}
    assert modes == {"file": 0o644, "run": 0o500, "disk.img": 0o644}


def test_what_keeps_a_reader_waiting_for_ever_is_gone(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    (workspace / "sub").mkdir(parents=True)
    os.mkfifo(workspace / "sub" / "pipe", 0o600)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(workspace / "socket"))
    with (workspace / "zeros").open("w") as file:
        file.truncate(MOST_HOLES_BYTES + 1)
    make_safe(workspace, WORKSPACE_MOUNT, REWARD)
    assert sorted(path.name for path in workspace.rglob("*")) == ["reward", "sub"]


OF_IMAGE = {
    "models": "/data/models",
    "deep/models": "../../data/models",
    "home": "/home/author",
    "out": "/opt/out",
}
"""Links of a task's image that stay where they are."""
NOT_OF_IMAGE = {
    "top": "/",
    "var": "/var",
    "tests": "/tests/expected",
    "logs": "../logs/verifier/reward.txt",
    "tmp": "/tmp/x",
    "proc": "/proc/self/cwd",
    "up": "deep/../../tests",
}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "image/app/deep").mkdir(parents=True)
    for name, target in (OF_IMAGE | NOT_OF_IMAGE).items():
        (tmp_path / "image/app" / name).symlink_to(target)
    return tmp_path / "image"


def links_in(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): os.readlink(path) for path in folder.rglob("*") if path.is_symlink()}


def test_a_link_of_the_image_to_what_is_in_the_image_stays(image: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    shutil.copytree(image / "app", workspace, symlinks=True)
    make_safe(workspace, "/app", "/tests", image)
    assert links_in(workspace) == OF_IMAGE


@pytest.mark.parametrize(("hidden", "stays"), [("/tests", True), ("/app/tests", False)])
def test_a_link_of_the_image_to_the_workspace_itself_stays_where_nothing_in_it_is_hidden(
    hidden: str, stays: bool, tmp_path: Path
) -> None:
    workspace, links = tmp_path / "workspace", {"pkg/self": "..", "me": ".", "whole": "/app"}
    for folder in (tmp_path / "image/app", workspace):
        (folder / "pkg").mkdir(parents=True)
        for name, target in links.items():
            (folder / name).symlink_to(target)
    (workspace / "planted").symlink_to(".")
    make_safe(workspace, "/app", hidden, tmp_path / "image")
    assert links_in(workspace) == (links if stays else {})


def test_a_link_that_the_image_has_not_there_or_not_so_goes(image: Path, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "host/in").symlink_to("/data/models")
    (image / "app/linked").symlink_to(tmp_path / "host")
    workspace = tmp_path / "workspace"
    (workspace / "linked").mkdir(parents=True)
    for name, target in {"models": "/data/other", "copy": "/data/models", "linked/in": "/data/models"}.items():
        (workspace / name).symlink_to(target)
    make_safe(workspace, "/app", "/tests", image)
    assert links_in(workspace) == {}
