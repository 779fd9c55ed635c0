"""What the Pythons of a verifier that starts in the workspace import: programs of the workspace find their own modules,
and no module of the workspace is taken for one of the verifier's.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from clawhpc.records import ScriptCheck, TaskSpec, Verifier
from clawhpc.sandbox.base import SANDBOX_PATH
from clawhpc.verify import guard
from clawhpc.verify.script import GUARD_FOLDER, script_environment
from tests.fakes.task_sets import write_files

CHEAT = "open('{place}/cheated', 'w').close()\n"
"""What no planted module may come to do."""


@dataclass
class Bench:
    """A workspace with a program, and folders of tests and of the guard, all at their places on the host."""

    place: Path

    def __post_init__(self) -> None:
        for name in ("app", "tests", "guard"):
            (self.place / name).mkdir()
        (self.place / f"guard/{guard.NAME}.py").write_text(Path(guard.__file__).read_text())

    @property
    def app(self) -> Path:
        return self.place / "app"

    @property
    def tests(self) -> Path:
        return self.place / "tests"

    def write(self, files: dict[str, str]) -> None:
        """By their paths below `place`."""
        write_files(self.place, files)

    def plant(self, *names: str) -> None:
        """Files of the workspace that say when they are run."""
        write_files(self.app, dict.fromkeys(names, CHEAT.format(place=self.place)))

    @property
    def cheated(self) -> bool:
        return (self.place / "cheated").exists()

    def run(self, *words: str, stdin: str = "", cwd: Path | None = None, **env: str) -> str:
        """What a Python says that runs `words` as the script of a task would run it."""
        check = ScriptCheck(folder=str(self.tests), mount=str(self.tests), cwd=str(self.app))
        task = TaskSpec(task_id="t", instruction="Do it.", input_dir=None, verifier=Verifier(script=check), env=env)
        found = script_environment(task)
        found["PYTHONPATH"] = found["PYTHONPATH"].replace(GUARD_FOLDER, str(self.place / "guard"))
        done = subprocess.run(
            [sys.executable, *words],
            cwd=cwd or self.app,
            env={"PATH": SANDBOX_PATH, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **found},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout + done.stderr


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


SAYS = "from tools import WORD; print(WORD)\n"
RIGHT = "WORD = 'right'\n"
RUN = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True)\n"
WAYS = {
    "a file": ("main.py",),
    "a file by its path": ("{app}/main.py",),
    "a link to a file": ("{place}/main",),
    "a file from elsewhere": ("../app/main.py",),
    "a folder": ("folder",),
    "a package": ("-m", "package"),
    "a module of a package": ("-Bm", "package.inner", "-m"),
    "a module, in one word": ("-mmain",),
    "a command": ("-c", SAYS),
    "standard input": (),
    "a dash": ("-",),
    "a command that runs a module": ("-c", "import runpy; runpy.run_module('main')"),
    "a command that imports by a name": ("-c", "import importlib as i; print(i.import_module('tools').WORD)"),
    "a command that looks one up": ("-c", "import pydoc; print(pydoc.locate('tools.WORD'))"),
    "a command that puts another in its place": (
        "-c",
        "from unittest import mock\nwith mock.patch('tools.WORD', 'right') as word: print(word)",
    ),
}


@pytest.mark.parametrize("words", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("below", [False, True], ids=["of the shell", "of a Python of the tests"])
def test_a_program_of_the_workspace_finds_its_own_modules(bench: Bench, words: tuple[str, ...], below: bool) -> None:
    bench.write({"app/main.py": SAYS, "app/tools.py": RIGHT, "tests/tools.py": "WORD = 'of the tests'\n"})
    bench.write({"app/folder/__main__.py": SAYS, "app/folder/tools.py": RIGHT, "app/package/__main__.py": SAYS})
    bench.write({"app/package/inner.py": SAYS, "tests/run.py": RUN})
    (bench.place / "main").symlink_to("app/main.py")
    words = tuple(word.format(app=bench.app, place=bench.place) for word in words)
    if below:
        words = (f"{bench.tests}/run.py", *words)
    assert bench.run(*words, stdin=SAYS) == "right\n"


def test_a_file_of_the_tests_finds_those_beside_it_and_none_of_the_workspace(bench: Bench) -> None:
    bench.write({"tests/check.py": SAYS, "tests/tools.py": RIGHT, "tests/lost.py": "import alone\n"})
    bench.write({"app/alone.py": RIGHT})
    bench.plant("tools.py")
    assert bench.run(f"{bench.tests}/check.py") == "right\n"
    assert "No module named 'alone'" in bench.run(f"{bench.tests}/lost.py")
    assert not bench.cheated


def test_a_program_that_has_its_modules_named_to_an_installed_one_finds_them(bench: Bench) -> None:
    """As Django has its settings."""
    bench.write({"there/frame/work.py": "import importlib\ndef load(name): return importlib.import_module(name)\n"})
    bench.write({"app/main.py": "from frame.work import load\nprint(load('tools').WORD)\n", "app/tools.py": RIGHT})
    assert bench.run("main.py", PYTHONPATH=f"{bench.place}/there") == "right\n"


@pytest.mark.parametrize("below", ["", "folder/"])
def test_a_process_that_a_program_starts_finds_its_modules_too(bench: Bench, below: str) -> None:
    program = """\
import multiprocessing, tools
def say(): print(tools.WORD, flush=True)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=say)
    process.start()
    process.join()
"""
    bench.write({f"app/{below}main.py": program, f"app/{below}tools.py": "from more import WORD\n"})
    bench.write({f"app/{below}more.py": RIGHT})
    assert bench.run(f"{below}main.py") == "right\n"


def test_unittest_finds_the_tests_that_it_is_given(bench: Bench) -> None:
    case = "import tools, unittest\nclass T(unittest.TestCase):\n  def test(self): pass\n"
    bench.write({"app/tools.py": RIGHT, "app/test_it.py": case})
    assert "OK" in bench.run("-m", "unittest", "test_it")


def test_a_pytest_of_the_tests_can_import_what_the_workspace_has(bench: Bench) -> None:
    test = "from tools import WORD\ndef test(): assert WORD == 'right'\n"
    bench.write({"app/tools.py": RIGHT, "tests/test_it.py": test})
    assert "1 passed" in bench.run("-m", "pytest", f"{bench.tests}/test_it.py")


TAKEN = (
    *("json.py", "msvcrt.py", "org/python/core.py", "sitecustomize.py", "usercustomize.py"),
    *("runpy.py", "encodings.py", "winreg.py"),
)
"""Modules that Python has, and some that it looks for and has not."""
USES = "import copy, json, pickle, subprocess"


@pytest.mark.parametrize(
    "words",
    [
        ("-c", USES),
        ("check.py",),
        ("{app}/check.py",),
        ("../app/check.py",),
        ("-m", "check"),
        ("check.zip",),
        ("-m", "json.tool", "/dev/null"),
        ("-",),
        ("-m", "pytest", "--version"),
        ("-c", "import multiprocessing as m; m.get_context('spawn').Pool(1).close()"),
    ],
    ids=lambda words: " ".join(words)[:16],
)
def test_no_module_of_the_workspace_is_taken_for_an_installed_one(bench: Bench, words: tuple[str, ...]) -> None:
    """Not for a file either that the verifier has put into the workspace, to run it there."""
    bench.plant(*TAKEN)
    bench.write({"app/check.py": f"{USES}\nprint('right')\n"})
    with zipfile.ZipFile(bench.app / "check.zip", "w") as archive:
        archive.write(bench.app / "check.py", "__main__.py")
    said = bench.run(*(word.format(app=bench.app) for word in words), stdin=USES)
    assert not bench.cheated
    assert "Error" not in said


def test_a_program_of_the_workspace_has_the_installed_module_rather_than_its_own_of_that_name(bench: Bench) -> None:
    bench.write({"app/pluggy.py": "WORD = 'its own'\n", "app/main.py": "import pluggy; print(pluggy.__file__)\n"})
    for words in (["main.py"], ["-m", "main"]):
        assert bench.run(*words).endswith("site-packages/pluggy/__init__.py\n")


def test_who_has_cleaned_the_environment_has_what_python_does(bench: Bench) -> None:
    bench.write({"tests/run.py": f"import os\ndel os.environ[{guard.TESTS_VARIABLE!r}]\n{RUN}"})
    assert bench.run(f"{bench.tests}/run.py", "-c", "print('right')") == "right\n"


@pytest.mark.parametrize("tool", [*(one for one in sorted(guard.TOOLS) if find_spec(one) is None), "winreg", "planted"])
def test_a_tool_that_is_not_installed_is_not_taken_from_the_workspace(bench: Bench, tool: str) -> None:
    bench.plant(f"{tool}.py")
    bench.run("-m", tool, "--version")
    assert bench.cheated is (tool == "planted")


SETTINGS = {"pytest.ini": "[pytest]\naddopts = -p evil\npythonpath = .\n"}
PLUGIN = {
    "evil.dist-info/entry_points.txt": "[pytest11]\nevil = evil\n",
    "evil.dist-info/METADATA": "Name: evil\nVersion: 1\n",
}
ASKING = {
    "by its path": ("{tests}/test_it.py",),
    "by one of its functions": ("{tests}/test_it.py::test",),
    "by the way from the workspace": ("../tests", "-k", "test"),
    "beside one of the workspace": ("{tests}", "test_own.py"),
    "among all that there is": ("..",),
    "after a flag": ("-q", "{tests}"),
}


@pytest.mark.parametrize("words", ASKING.values(), ids=ASKING)
def test_a_pytest_of_the_tests_takes_no_orders_from_the_workspace(bench: Bench, words: tuple[str, ...]) -> None:
    write_files(bench.app, SETTINGS)
    bench.plant("evil.py", "pytest.py", "_pytest/__init__.py")
    bench.write({"tests/test_it.py": "def test(): pass\n", "app/test_own.py": "def test_own(): pass\n"})
    words = tuple(word.format(tests=bench.tests) for word in words)
    assert " passed" in bench.run("-m", "pytest", *words)
    assert not bench.cheated


def test_nor_plugins(bench: Bench) -> None:
    write_files(bench.app, PLUGIN)
    bench.plant("evil.py")
    bench.write({"tests/test_it.py": "def test(): pass\n"})
    assert "1 passed" in bench.run("-m", "pytest", "../tests", PYTEST_DISABLE_PLUGIN_AUTOLOAD="")
    assert not bench.cheated


def test_nor_does_one_that_starts_among_the_tests(bench: Bench) -> None:
    write_files(bench.place, SETTINGS)
    evil = CHEAT.format(place=bench.place)
    bench.write({"tests/test_it.py": "def test(): pass\n", "evil.py": evil, "conftest.py": evil})
    bench.plant("log")
    for words in ([], ["--junitxml", str(bench.app / "log")], ["test_it.py", str(bench.app)]):
        assert "1 passed" in bench.run("-m", "pytest", *words, cwd=bench.tests)
    assert not bench.cheated


@pytest.mark.parametrize(
    "words",
    [(), ("test_it.py",), ("{app}",), ("--ignore", "{tests}")],
    ids=["all", "a file", "a folder", "an option's value"],
)
def test_the_suite_of_the_workspace_has_its_own_settings(bench: Bench, words: tuple[str, ...]) -> None:
    """As sets have it whose test.sh runs the tests of a repository."""
    write_files(bench.app, {"pytest.ini": "[pytest]\npythonpath = src\n"})
    fixture = "import pytest\n@pytest.fixture\ndef word(): return 'right'\n"
    bench.write({"app/src/tools.py": RIGHT, "app/conftest.py": fixture, "tests/run.py": RUN})
    bench.write({"app/test_it.py": "from tools import WORD\ndef test(word): assert WORD == word\n"})
    words = tuple(word.format(app=bench.app, tests=bench.tests) for word in words)
    assert "1 passed" in bench.run("-m", "pytest", *words)
    assert "1 passed" in bench.run(f"{bench.tests}/run.py", "-m", "pytest", *words)


def test_the_sitecustomize_of_the_environment_is_run_too(bench: Bench) -> None:
    bench.write({"there/sitecustomize.py": "print('mine')\n"})
    assert bench.run("-c", "import sitecustomize as s; print(s.__file__)", PYTHONPATH=f"{bench.place}/there") == (
        f"mine\n{bench.place}/there/sitecustomize.py\n"
    )


def test_one_that_fails_leaves_the_guard_in_force(bench: Bench) -> None:
    bench.write({"there/sitecustomize.py": "import nothing_of_that_name\n"})
    bench.write({"app/main.py": SAYS, "app/tools.py": RIGHT})
    said = bench.run("main.py", PYTHONPATH=f"{bench.place}/there")
    assert "nothing_of_that_name" in said
    assert said.startswith("right\n")


def test_the_guard_is_on_no_path(bench: Bench) -> None:
    said = bench.run("-c", "import sys; print(sys.path)")
    assert f"{bench.place}/guard" not in said
