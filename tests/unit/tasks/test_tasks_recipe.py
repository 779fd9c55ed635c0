"""What an image of a task's own is built by, and by what it is known."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest

from clawhpc.tasks.dockerfile import read_dockerfile
from clawhpc.tasks.faults import Fault
from clawhpc.tasks.recipe import INSIDE, MARK, Base, Recipe, check_bases, find_base, make_recipe
from tests.fakes.task_sets import write_files

APP = PurePosixPath("/app")
LINES = "FROM python:3.12\nWORKDIR /app\nCOPY req.txt /tmp/\nRUN pip install -r /tmp/req.txt\nCOPY src .\n"


def made(
    folder: Path, lines: str = LINES, *, bases: Mapping[str, str] | None = None, **files: str
) -> tuple[Recipe, dict[str, str]]:
    """The recipe, and where in the context lies what is not in it."""
    content = {"Dockerfile": lines, "req.txt": "numpy\n", "src/a.py": "1\n"}
    write_files(folder, content | {name.replace("__", "/"): text for name, text in files.items()})
    path = folder / "Dockerfile"
    recipe, rest = make_recipe(str(path), read_dockerfile(path, builds=True), APP, bases or {})
    return recipe, {str(target): str(file.relative_to(folder)) for target, file in rest.items()}


def test_what_the_last_lines_copy_into_the_workspace_is_no_part_of_the_image(tmp_path: Path) -> None:
    recipe, rest = made(tmp_path)
    assert [step.shown for step in recipe.steps] == [
        "WORKDIR /app",
        "COPY req.txt /tmp/",
        "RUN pip install -r /tmp/req.txt",
    ]
    assert rest == {"/app/a.py": "src/a.py"}


def test_of_two_such_lines_the_last_counts_and_one_that_leads_elsewhere_is_a_part(tmp_path: Path) -> None:
    recipe, rest = made(tmp_path, f"{LINES}COPY other/a.py ./\nCOPY req.txt /data/\n", **{"other/a.py": "2"})
    assert [step.shown for step in recipe.steps][-1] == "COPY req.txt /data/"
    assert rest == {"/app/a.py": "other/a.py"}


@pytest.mark.parametrize(
    ("last", "kept", "rest"),
    [
        ("COPY req.txt data", [".", "data"], {}),
        ("COPY req.txt data\nCOPY src .", [".", "data"], {"/app/a.py": "src/a.py"}),
        ("COPY req.txt data\nCOPY src/a.py data", [".", "data", "data"], {}),
        ("COPY req.txt data/", [".", "data/"], {}),
        ("COPY src src", [".", "src"], {}),
        ("COPY req.txt /app", [], {"/app/a.py": "src/a.py", "/app/req.txt": "req.txt"}),
        ("COPY src/a.py src/", [".", "src/"], {}),
        ("COPY top /", [".", "/"], {}),
        ("RUN x\nCOPY src/a.py a.py", [".", "RUN", "a.py"], {}),
    ],
)
def test_what_is_not_copied_to_the_workspace_itself_is_left_to_the_image_which_may_have_a_folder_or_a_link_there(
    tmp_path: Path, last: str, kept: list[str], rest: dict[str, str]
) -> None:
    recipe, found = made(tmp_path, f"{LINES}{last}\n", top__app__x="")
    shown = [step.shown.split() for step in recipe.steps[3:]]
    assert ([words[-1] if words[0] == "COPY" else words[0] for words in shown], found) == (kept, rest)
    assert not kept or "RUN" in kept or "cp /.clawhpc/" in recipe.script


def test_a_file_that_is_copied_to_the_workspace_before_that_is_known_as_one_is_left_to_the_image(
    tmp_path: Path,
) -> None:
    lines = "FROM x\nRUN mkdir /app\nCOPY req.txt /app\nCOPY other /app\nWORKDIR /app\nCOPY src .\n"
    recipe, rest = made(tmp_path, lines, other="")
    assert [step.shown for step in recipe.steps][1:3] == ["COPY req.txt /app", "COPY other /app"]
    assert rest == {"/app/a.py": "src/a.py"}


@pytest.mark.parametrize(
    ("lines", "files", "is_same"),
    [
        (f"# a comment\n\n{LINES}CMD x\nLABEL a=b\n", {}, True),
        (LINES, {"src__a.py": "2\n"}, True),
        (LINES, {"req.txt": "scipy\n"}, False),
        (LINES.replace("3.12", "3.11"), {}, False),
        (LINES.replace("-r", "-q -r"), {}, False),
        (LINES.replace("RUN", "ENV A=1\nRUN"), {}, False),
        (LINES.replace("COPY req.txt /tmp/\n", ""), {}, False),
    ],
)
def test_equal_images_have_one_name_and_others_another(
    tmp_path: Path, lines: str, files: dict[str, str], is_same: bool
) -> None:
    first, _ = made(tmp_path / "a")
    second, _ = made(tmp_path / "b", lines, **files)
    assert (first.digest == second.digest) is is_same
    assert re.fullmatch(r"[0-9a-f]{20}", first.digest)


def test_the_time_of_a_file_names_no_image_and_whether_it_can_be_run_does(tmp_path: Path) -> None:
    before, _ = made(tmp_path)
    os.utime(tmp_path / "req.txt", (1, 1))
    assert made(tmp_path)[0].digest == before.digest
    (tmp_path / "req.txt").chmod(0o755)
    assert made(tmp_path)[0].digest != before.digest


def test_folders_and_modes_of_what_is_copied_name_an_image_as_far_as_they_are_in_it(tmp_path: Path) -> None:
    lines = f"{LINES}RUN x\n"
    digests = [made(tmp_path, lines)[0].digest]
    (tmp_path / "src/empty").mkdir()
    digests.append(made(tmp_path, lines)[0].digest)
    (tmp_path / "src/empty").chmod(0o700)
    digests.append(made(tmp_path, lines)[0].digest)
    (tmp_path / "src/a.py").chmod(0o600)
    digests.append(made(tmp_path, lines)[0].digest)
    assert len(set(digests)) == 4
    (tmp_path / "src/a.py").chmod(0o620)
    assert made(tmp_path, lines)[0].digest == digests[-1], "the umask of a build takes it"


def test_the_recipe_of_apptainer_and_what_it_copies_in(tmp_path: Path) -> None:
    context, folder = tmp_path / "context", tmp_path / "out it"
    folder.mkdir()
    recipe, _ = made(context, f"{LINES}COPY src '/opt/my src'\nRUN echo '%post {{{{ x }}}}'\n")
    text = recipe.write(folder).read_text()
    staged = folder / "staged"
    assert text.startswith("Bootstrap: docker\nFrom: python:3.12\n\n%setup\n")
    assert f"cp -dR --preserve=mode,timestamps '{staged}' \"${{APPTAINER_ROOTFS}}/.clawhpc\"" in text
    assert "{{" not in text, "Apptainer would put something in"
    files = {str(path.relative_to(staged)): path.read_text() for path in staged.rglob("*") if path.is_file()}
    script = files.pop("build.sh")
    assert files == {"0/req.txt": "numpy\n", "1/a.py": "1\n", "2/a.py": "1\n"}
    expected = """\
printf '\\n%s\\n' 'clawhpc: line 2: WORKDIR /app'
mkdir -p /app
cd /app
printf '\\n%s\\n' 'clawhpc: line 3: COPY req.txt /tmp/'
mkdir -p /tmp/
rm -f /tmp/req.txt
cp /.clawhpc/0/req.txt /tmp/
printf '\\n%s\\n' 'clawhpc: line 4: RUN pip install -r /tmp/req.txt'
env /bin/sh -c 'pip install -r /tmp/req.txt'
printf '\\n%s\\n' 'clawhpc: line 5: COPY src .'
mkdir -p /app/
rm -f /app/a.py
cp -dR /.clawhpc/1/. /app/
"""
    assert expected in script
    assert "cp -dR /.clawhpc/2/. '/opt/my src/'\n" in script
    assert "workdir=/app\n" in script


@pytest.mark.parametrize("line", ["COPY src .", "COPY src/a.py .", "COPY src/a.py {}", "COPY src/a.py it"])
def test_a_file_that_is_copied_takes_the_place_of_what_is_there(tmp_path: Path, line: str) -> None:
    app = tmp_path / "app"
    context = write_files(tmp_path / "context", {"src/a.py": "new", "Dockerfile": ""})
    (context / "src/a.py").chmod(0o755)
    for number, command in enumerate(("ln -s ../other {}", "ln ../other {}", ": > {}")):
        place = app / str(number)
        write_files(place, {"other": "old"})
        run = f"mkdir it; cd it; {command.format('a.py')}; cd ..; {command.replace('../', '').format('a.py')}"
        (context / "Dockerfile").write_text(f"FROM x\nWORKDIR {place}\nRUN {run}\n{line.format(place / 'a.py')}\n")
        made_of = read_dockerfile(context / "Dockerfile", builds=True)
        recipe, _ = make_recipe("Dockerfile", made_of, PurePosixPath("/elsewhere"), {})
        staged = tmp_path / f"recipe{number}"
        staged.mkdir()
        recipe.write(staged)
        body = recipe.script.partition("cd /\n")[2].partition(f"printf '\\n%s\\n' '{MARK}end'")[0]
        script = f"set -e\numask 022\n{body.replace(INSIDE, str(staged / 'staged'))}"
        subprocess.run(["sh", "-c", script], check=True, capture_output=True, timeout=20)
        copied = place / "it/a.py" if line.endswith("it") else place / "a.py"
        assert not copied.is_symlink()
        assert (copied.read_text(), copied.stat().st_mode & 0o777) == ("new", 0o755)
        assert (place / "other").read_text() == "old"


def test_what_the_builder_has_of_a_proxy_is_neither_in_the_log_nor_in_the_image(tmp_path: Path) -> None:
    recipe, _ = made(tmp_path)
    _, post = recipe.definition(tmp_path).split("%post\n")
    assert post.startswith("    set +x\n    exec env -i HOME=/root ")
    (said,) = (line for line in recipe.script.splitlines() if line.startswith("passed="))
    (kept,) = (line for line in recipe.script.splitlines() if "env -0" in line)
    script = f"set -e\n{said}\n{kept.replace(INSIDE, str(tmp_path))}\necho $https_proxy"
    proxies = {"https_proxy": "http://me:secret@proxy", "HTTP_PROXY": "secret", "A": "b"}
    done = subprocess.run(
        ["sh", "-c", script], env={"PATH": os.environ["PATH"]} | proxies, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("http://me:secret@proxy\n", "")
    found = (tmp_path / "env").read_text()
    assert "A=b\0" in found
    assert "secret" not in found


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ("export A=base", "base"),
        ("export A=base; [ -f /nowhere ] && . /nowhere", "base"),
        ("export A=base; exit 0", "none"),
        ("A=(1 2", "none"),
    ],
)
def test_a_base_has_its_variables_in_a_build_which_no_fault_in_them_ends(
    tmp_path: Path, settings: str, value: str
) -> None:
    write_files(tmp_path / "base", {"env/90-environment.sh": settings})
    head, _, _ = made(tmp_path / "context")[0].script.partition("cd /\n")
    script = f"{head.replace('/.singularity.d', str(tmp_path / 'base'))}echo ${{A:-none}}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (0, f"{value}\n")


def test_links_of_a_folder_that_is_copied_stay_links(tmp_path: Path) -> None:
    context, folder = write_files(tmp_path / "context", {"src/a.py": ""}), tmp_path / "out"
    (context / "src/link").symlink_to("a.py")
    folder.mkdir()
    recipe, _ = made(context, f"{LINES}RUN x\n")
    recipe.write(folder)
    assert os.readlink(folder / "staged/1/link") == "a.py"


def test_an_empty_folder_is_copied_too(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    recipe, rest = made(tmp_path, f"{LINES}COPY empty /data/\n")
    assert [step.shown for step in recipe.steps][-1] == "COPY empty /data/"
    assert rest == {"/app/a.py": "src/a.py"}
    recipe, rest = made(tmp_path, f"{LINES}RUN x\nCOPY empty src .\nCOPY src .\n")
    assert [step.shown for step in recipe.steps][-1] == "COPY empty src ."
    assert rest == {"/app/a.py": "src/a.py"}, "an empty folder is no file, so that the image alone can have it"


BASES = {"python:3.12": "/images/python", "node": "docker://mirror.example/node:20", "any": "oras://mirror.example/*"}


@pytest.mark.parametrize(
    ("name", "bases", "base"),
    [
        ("python:3.12", {}, Base(bootstrap="docker", place="python:3.12")),
        ("python:3.12", BASES, Base(bootstrap="localimage", place="/images/python")),
        ("node", BASES, Base(bootstrap="docker", place="mirror.example/node:20")),
        ("ghcr.io/a/b:1", BASES, Base(bootstrap="oras", place="mirror.example/ghcr.io/a/b:1")),
        ("a", {"a": "docker-archive:/images/a.tar"}, Base(bootstrap="docker-archive", place="/images/a.tar")),
    ],
)
def test_a_base_is_what_the_configuration_says_it_is(name: str, bases: dict[str, str], base: Base) -> None:
    check_bases(bases)
    assert find_base(name, bases) == base


@pytest.mark.parametrize("place", ["images/python", "ftp://a/b", ""])
def test_a_base_that_can_be_nothing_is_named(place: str) -> None:
    with pytest.raises(
        ValueError, match=rf"bases\.python={place}: must be the absolute path of an image, or begin with"
    ):
        check_bases({"python": place})


def test_another_base_is_another_image(tmp_path: Path) -> None:
    assert made(tmp_path)[0].digest != made(tmp_path, bases=BASES)[0].digest


@pytest.mark.parametrize("lines", ["FROM scratch\n", "WORKDIR /app\n"])
def test_nothing_to_build_on_is_a_fault(tmp_path: Path, lines: str) -> None:
    with pytest.raises(Fault, match="there are no programs to build with"):
        made(tmp_path, lines)


def test_what_is_copied_and_is_no_file_is_a_fault(tmp_path: Path) -> None:
    context = write_files(tmp_path, {"src/a.py": ""})
    os.mkfifo(context / "src/pipe")
    with pytest.raises(Fault, match="pipe: neither a file nor a link"):
        _ = made(tmp_path, f"{LINES}RUN x\n")[0].digest
