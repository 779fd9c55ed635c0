"""Tasks of Harbor that have an image of their own: which these are, what they are without it, and what it brings."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from clawhpc.records import TaskImage, TaskSpec
from clawhpc.tasks import harbor
from clawhpc.tasks.faults import LoadedTasks
from clawhpc.tasks.images import TaskImages
from clawhpc.tasks.layout import Layout
from tests.fakes.built_image import lay_image
from tests.fakes.task_sets import TASK_TOML, lay_harbor, write_files

DOCKERFILE = "FROM python:3.12\nWORKDIR /app\nRUN make\nCOPY numbers.txt .\n"
FAKE_PYTHON = f"""\
#!{sys.executable}
import sys
sys.version_info = {{}}
exec(sys.argv[-1])
"""
PREBUILT = TASK_TOML + 'docker_image = "ours/sum:1"\nworkdir = "/app"\n'


class Shelf:
    """A set of tasks, and their images."""

    def __init__(self, folder: Path) -> None:
        self.set, self.folder, self._cache = folder / "set", folder / "images", folder / "cache"

    def load(self, *, assume_image: bool = False) -> LoadedTasks:
        self.images = TaskImages(folder=self.folder)
        return harbor.load_tasks(self.set, Layout(self._cache), assume_image=assume_image, images=self.images)

    def build(self, **fields: str) -> Path:
        """The image that is wanted."""
        self.load()
        (digest,) = self.images.wanted
        return lay_image(self.folder / digest, **fields)

    def task(self) -> TaskSpec:
        loaded = self.load()
        assert loaded.faults == ()
        (task,) = loaded.tasks
        return task


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_a_task_whose_image_is_not_built_is_a_fault_that_says_what_builds_it(shelf: Shelf) -> None:
    root = lay_harbor(shelf.set, dockerfile=DOCKERFILE)
    (fault,) = shelf.load().faults
    command = f"python -m clawhpc.images tasks.folder={shelf.set} tasks.images={shelf.folder}"
    assert fault.startswith(f"{root}/environment/Dockerfile: its image is not built: `{command}`")


def test_a_task_begins_with_its_image_and_the_files_that_are_not_in_it(shelf: Shelf) -> None:
    lay_harbor(shelf.set, dockerfile=DOCKERFILE)
    image = shelf.build(python="/usr/local/bin/python3", env="PATH=/opt/bin:/bin\0LANG=C.UTF-8\0LONG=a\nb=c\0")
    task = shelf.task()
    assert task.image == TaskImage(folder=str(image), python="/usr/local/bin/python3")
    assert task.env == {"PATH": "/opt/bin:/bin", "LANG": "C.UTF-8", "LONG": "a\nb=c"}
    assert task.input_dir is not None
    assert [path.name for path in Path(task.input_dir).iterdir()] == ["numbers.txt"]
    notes = shelf.load().notes
    assert notes[harbor.OWN_IMAGE] == 1
    assert harbor.OUR_IMAGE not in notes


def test_a_link_in_the_image_where_a_task_has_a_folder_is_a_fault(shelf: Shelf) -> None:
    root = lay_harbor(shelf.set, dockerfile="FROM x\nWORKDIR /app\nRUN make\nCOPY inputs .\n")
    write_files(root / "environment/inputs", {"data/deep/a": "", "b": ""})
    image = shelf.build()
    (image / "app").mkdir()
    (image / "app/data").symlink_to("/srv")
    (fault,) = shelf.load().faults
    assert fault.startswith(f"{root}/environment/Dockerfile: COPY to /app/data: is a link in the image")


def test_where_work_begins_on_an_image_that_is_only_named_must_be_said(shelf: Shelf) -> None:
    root = lay_harbor(shelf.set, toml=PREBUILT.replace('workdir = "/app"\n', ""))
    (root / "environment/Dockerfile").unlink(missing_ok=True)
    (fault,) = shelf.load().faults
    assert fault.startswith(f"{root}/task.toml: environment.workdir is missing")


def test_an_image_whose_build_did_not_come_to_its_end_is_not_built(shelf: Shelf) -> None:
    lay_harbor(shelf.set, dockerfile=DOCKERFILE)
    image = shelf.build()
    image.with_name(f"{image.name}.whole").unlink()
    (fault,) = shelf.load().faults
    assert harbor.NOT_BUILT in fault


def test_tasks_that_agree_share_an_image_and_have_files_of_their_own(shelf: Shelf) -> None:
    lay_harbor(shelf.set, "a", dockerfile=DOCKERFILE)
    (lay_harbor(shelf.set, "b", dockerfile=f"# b\n{DOCKERFILE}") / "environment/numbers.txt").write_text("7\n")
    shelf.build()
    first, second = shelf.load().tasks
    assert first.image == second.image
    assert first.input_dir != second.input_dir


@pytest.mark.parametrize(
    ("dockerfile", "wants"),
    [
        ("FROM debian:12\nWORKDIR /app\nENV A=1\nCOPY numbers.txt .\n", False),
        ("FROM docker.io/library/ubuntu@sha256:1\nWORKDIR /app\n", False),
        ("FROM debian:12\nRUN make\nWORKDIR /app\n", True),
        ("FROM debian:12\nWORKDIR /app\nCOPY numbers.txt /data/\n", True),
        ("FROM debian:12\nWORKDIR /app\nENV PATH=/app/bin:$PATH\n", True),
        ("FROM ubuntu.example/x\nWORKDIR /app\n", True),
        ("FROM node:20\nWORKDIR /app\n", True),
        ("FROM debian:12\nWORKDIR /app\nVOLUME /data\n", True),
        ("FROM debian:12\nWORKDIR /app\nCOPY empty /data/\n", True),
        ("FROM debian:12\nWORKDIR /app\nCOPY empty data/\n", False),
        ("FROM debian:12\nWORKDIR /app\nCOPY top /\n", False),
    ],
)
def test_a_task_that_wants_no_more_than_files_goes_on_with_the_image_of_the_run(
    shelf: Shelf, dockerfile: str, wants: bool
) -> None:
    context = lay_harbor(shelf.set, dockerfile=dockerfile) / "environment"
    (context / "empty").mkdir()
    (context / "top/app").mkdir(parents=True)
    (context / "top/app/file").touch()
    loaded = shelf.load()
    assert (len(shelf.images.wanted), len(loaded.faults), len(loaded.tasks)) == (wants, wants, not wants)
    assert all(task.image is None for task in loaded.tasks)


@pytest.mark.parametrize("dockerfile", [None, "FROM a AS b\nFROM c\nWORKDIR /else\nENTRYPOINT x\nCOPY --from=b y z\n"])
def test_an_image_that_is_named_has_all_that_its_dockerfile_says(shelf: Shelf, dockerfile: str | None) -> None:
    root = lay_harbor(shelf.set, toml=PREBUILT, dockerfile=dockerfile or "")
    if dockerfile is None:
        (root / "environment/Dockerfile").unlink()
    (root / "environment/.dockerignore").touch()
    (fault,) = shelf.load().faults
    assert fault.startswith(f"{root}/task.toml: its image is not built")
    ((recipe,),) = shelf.images.wanted.values()
    assert (recipe.base.place, recipe.steps) == ("ours/sum:1", ())
    shelf.build()
    assert (shelf.task().workspace_mount, shelf.task().input_dir) == ("/app", None)


def test_the_folder_of_an_image_that_is_named_is_not_asked_for_where_the_task_says_it(shelf: Shelf) -> None:
    lay_harbor(shelf.set, toml=PREBUILT, dockerfile="FROM a\nWORKDIR b\n")
    assert "its image is not built" in shelf.load().faults[0]


def test_a_task_that_is_faulty_besides_wants_no_image(shelf: Shelf) -> None:
    lay_harbor(shelf.set, "a", dockerfile=DOCKERFILE, script="uvx pytest\n")
    lay_harbor(shelf.set, "b", dockerfile=DOCKERFILE.replace("RUN", "ENTRYPOINT x\nRUN"))
    assert len(shelf.load().faults) == 2
    assert shelf.images.wanted == {}


def test_what_a_test_installs_is_still_believed_only_if_the_user_says_so(shelf: Shelf) -> None:
    lay_harbor(shelf.set, dockerfile=DOCKERFILE, script="apt-get install -y x\n")
    loaded = shelf.load(assume_image=True)
    assert "its image is not built" in loaded.faults[0]
    (digest,) = shelf.images.wanted
    lay_image(shelf.folder / digest)
    loaded = shelf.load(assume_image=True)
    assert loaded.notes[harbor.ASSUMED] == 1
    assert loaded.tasks[0].image is not None


def test_variables_that_the_sandbox_sets_are_not_taken_from_a_base(shelf: Shelf) -> None:
    lay_harbor(
        shelf.set, dockerfile=DOCKERFILE.replace("RUN", "ENV MODE=slow\nRUN"), toml=f'{TASK_TOML}env = {{ A = "1" }}\n'
    )
    builder = "HOME=/x\0LD_PRELOAD=a\0http_proxy=p\0CLAWHPC_OWNER=o\0PWD=/app\0_=x\0"
    shelf.build(env=f"{builder}PATH=/bin\0MODE=slow\0A=0\0")
    assert shelf.task().env == {"PATH": "/bin", "MODE": "slow", "A": "1"}


@pytest.mark.parametrize("name", ["LD_PRELOAD", "BASH_ENV", "HOME"])
def test_variables_that_the_sandbox_sets_cannot_be_set_by_env(shelf: Shelf, name: str) -> None:
    lay_harbor(shelf.set, dockerfile=f"FROM x\nWORKDIR /app\nENV {name}=/x:${name}\n")
    (fault,) = shelf.load().faults
    assert f"ENV.{name}: is set by the sandbox" in fault


@pytest.mark.parametrize(("home", "times"), [(".bashrc\n.profile\n.cache\n", 0), (".bashrc\n.local\n", 1)])
def test_what_an_image_has_in_the_home_that_no_sandbox_shows_is_noted(shelf: Shelf, home: str, times: int) -> None:
    lay_harbor(shelf.set, dockerfile=DOCKERFILE)
    shelf.build(home=home)
    assert shelf.load().notes.get(harbor.NO_HOME, 0) == times


def home_of(folder: Path, root: dict[str, str], originals: dict[str, str]) -> list[str]:
    """What finish.sh says of a /root, in an image whose distribution has these `originals`."""
    text = resources.files("clawhpc.tasks").joinpath("finish.sh").read_text().partition("\n\n")[0]
    for place in ("/.clawhpc", "/root", "/usr", "/etc"):
        text = text.replace(place, f"{folder}{place}")
    write_files(folder, {f"root/{name}": content for name, content in root.items()} | originals)
    subprocess.run(["sh", "-e", "-c", text], check=True, timeout=20)
    return sorted((folder / ".clawhpc/home").read_text().splitlines())


ORIGINALS = {"usr/share/base-files/dot.bashrc": "# a\n", "etc/skel/.bashrc": "# b\n", "etc/skel/.profile": "# c\n"}


@pytest.mark.parametrize(
    ("bashrc", "profile", "changed"),
    [
        ("# a\n", "# c\n", []),
        ("# b\n", "# c\n", []),
        ("# a\nconda activate x\n", "# c\n", [".bashrc changed"]),
        ("# a\n", ". ~/.cargo/env\n", [".profile changed"]),
    ],
)
def test_of_settings_of_shells_in_the_home_those_count_that_are_not_a_distributions_own(
    tmp_path: Path, bashrc: str, profile: str, changed: list[str]
) -> None:
    found = home_of(tmp_path, {".bashrc": bashrc, ".profile": profile}, ORIGINALS)
    assert found == sorted([".bashrc", ".profile", *changed])


def test_a_home_without_settings_of_shells_has_none_that_are_changed(tmp_path: Path) -> None:
    assert home_of(tmp_path, {".cache/x": ""}, {}) == [".cache"]


@pytest.mark.parametrize(
    ("pythons", "found"),
    [
        ({"usr/bin/python3": "3.13", "usr/local/bin/python3": "3.11"}, "usr/local/bin/python3"),
        ({"usr/bin/python3": "3.9", "usr/local/bin/python3": "3.12"}, "usr/bin/python3"),
        ({"usr/bin/python3": "3.8", "usr/bin/python3.12": "3.12"}, "usr/bin/python3.12"),
        ({"usr/bin/python3": "3.8"}, None),
    ],
)
def test_the_python_of_an_image_is_one_of_3_11_or_else_the_first_that_is_new_enough(
    tmp_path: Path, pythons: dict[str, str], found: str | None
) -> None:
    text = resources.files("clawhpc.tasks").joinpath("finish.sh").read_text()
    text = text[text.index("usable() {") : text.index("ready() {")]
    for place in ("/.clawhpc", "/usr/", "/opt/"):
        text = text.replace(f" {place}", f" {tmp_path}{place}")
    (tmp_path / ".clawhpc").mkdir()
    for name, version in pythons.items():
        program = write_files(tmp_path, {name: FAKE_PYTHON.format(tuple(map(int, version.split("."))))}) / name
        program.chmod(0o755)
    script = f"set -e\nworkdir=/app\n{text.replace('/tmp/*|', '')}\nfind_python || exit 3"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=20)
    assert done.returncode == (0 if found else 3), done.stderr
    assert not found or (tmp_path / ".clawhpc/python").read_text() == f"{tmp_path}/{found}\n"


@pytest.mark.parametrize(("path", "times"), [("/opt/x:/app/src", 1), ("src", 1), ("/opt/app:", 0)])
def test_a_path_of_python_that_leads_into_the_workspace_is_noted(shelf: Shelf, path: str, times: int) -> None:
    lay_harbor(shelf.set, dockerfile=DOCKERFILE)
    shelf.build(env=f"PYTHONPATH={path}\0")
    assert shelf.load().notes.get(harbor.LEADS_IN, 0) == times


def test_changed_settings_of_shells_are_noted(shelf: Shelf) -> None:
    lay_harbor(shelf.set, dockerfile=DOCKERFILE)
    shelf.build(home=".bashrc\n.profile\n.bashrc changed\n")
    assert shelf.load().notes[harbor.NO_HOME] == 1
