"""Where the Pythons of a verifier that starts in the workspace find their modules, and a pytest its settings.

Each of them imports this as `sitecustomize`, by way of PYTHONPATH: standard library only, Python 3.6 or newer. Those of
the verifier may take no module of the workspace for one of theirs; programs of the workspace, which it may run too,
must find their own, or a right solution would earn nothing. Who starts a Python does not tell the two apart (a shell
starts both), nor does where its file lies (a verifier may put a check there, and run it). So:

- what lies among the tests, or starts there, has the modules of that folder before all others, as ever;
- all else has those beside its file, or for `-c`, `-m` and standard input those of the folder that it starts in, last:
  where nothing of that name is installed or of the standard library, and only when the command line asks, the tests,
  or what lies in that folder itself. Installed modules look for more that is not there (`org.python.core`), and find
  nothing, unless for a program by the name that it gave them (`importlib.import_module`);
- so `-m NAME` is a program of that folder where no NAME is installed, nor one of the tools that an image may lack;
- a pytest is the workspace's own, with the settings that lie there, where none of the tests it is given are ours.

The first three need PYTHONSAFEPATH (Python 3.11 or newer); an older Python does as it always did.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

NAME = "sitecustomize"
TESTS_VARIABLE = "CLAWHPC_TESTS"
"""Environment variable: the folder of the tests."""
NO_FILE = ("-c", "-m", "-", "")
"""What `sys.argv` begins with where Python runs no file."""
TOOLS = frozenset(
    {
        *("bandit", "behave", "black", "build", "coverage", "flake8", "hypothesis", "isort", "mypy", "nose"),
        *("nose2", "nox", "pip", "pipx", "pre_commit", "pycodestyle", "pyflakes", "pylint", "pyright", "pytest"),
        *("ruff", "setuptools", "tox", "unittest2", "uv", "virtualenv", "wheel", "yamllint"),
    }
)
"""What a verifier may ask for with `-m` in vain: it means those that are installed, and none that was planted."""
PASSED_ON = ("runpy", "pkgutil", "pydoc")
"""Modules that import what their caller has named."""
ASKED = ("unittest.loader", "unittest.mock")
"""Modules that import what the tests have named."""
PYTESTS = frozenset({"pytest", "py.test"})
VALUED = frozenset(
    {
        *("-c", "-k", "-m", "-n", "-o", "-p", "-r", "-W", "--basetemp", "--confcutdir", "--config-file", "--cov"),
        *("--ctrf", "--deselect", "--ignore", "--ignore-glob", "--junit-xml", "--junitxml", "--log-file"),
        *("--override-ini", "--rootdir"),
    }
)
"""Options of pytest after which a word is no place of tests."""


def guard(argv: list) -> None:
    """Put these rules into force in this process, which runs `argv`."""
    if not os.environ.get(TESTS_VARIABLE):
        return  # whoever has cleaned the environment has what Python does
    tests, module = os.path.realpath(os.environ[TESTS_VARIABLE]), module_of(argv)
    if getattr(sys.flags, "safe_path", False):
        no_file = argv[0] in NO_FILE
        folder = os.getcwd() if no_file else os.path.dirname(os.path.realpath(argv[0]))
        if is_in(folder, tests):
            sys.path.insert(0, folder)
        else:
            asked = ASKED if no_file else (*ASKED, "importlib")
            sys.meta_path.append(LastResort(folder, tests, asked, "" if module in TOOLS else module))
    if PYTESTS.intersection((module, os.path.basename(argv[0]))) and are_elsewhere(argv[1:], tests):
        os.environ.pop("PYTEST_ADDOPTS", None)


def module_of(argv: list) -> str:
    """The top of what `-m` names; empty where Python runs no module."""
    if argv[0] != "-m":
        return ""
    word = sys.orig_argv[-len(argv)] if hasattr(sys, "orig_argv") else ""
    return (word.partition("m")[2] if word.startswith("-") else word).partition(".")[0]


def are_elsewhere(words: list, tests: str) -> bool:
    """Whether the paths among the `words` of a command line, or else this folder, have nothing to do with `tests`."""
    said = (word for at, word in enumerate(words) if not word.startswith("-") and words[max(at - 1, 0)] not in VALUED)
    paths = (os.path.realpath(word.partition("::")[0]) for word in said)
    places = [path for path in paths if os.path.exists(path)] or [os.getcwd()]
    return not any(is_in(place, tests) or is_in(tests, place) for place in places) and not is_in(os.getcwd(), tests)


def is_in(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies in it; both are absolute."""
    return os.path.commonpath([path, folder]) == folder


class LastResort:
    """Finds in `folder` what no other finder has found, for those who may have it from there."""

    def __init__(self, folder: str, tests: str, asked: tuple, module: str) -> None:
        """`asked`: modules that import only what they are told to; `module`: what `-m` may find here."""
        self.folder, self.tests, self.asked, self.module = folder, tests, asked, module

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """See `importlib.abc.MetaPathFinder`."""
        if path is not None or name in sys.stdlib_module_names or not self.serves(name, importer(self.asked)):
            return None
        return PathFinder.find_spec(name, [self.folder])

    def serves(self, name: str, names: dict) -> bool:
        """Whether the module with these global `names` may import `name`."""
        who, file = names.get("__name__"), names.get("__file__")
        if who == "runpy":  # that of `-m`; else who has called it asks
            return name == self.module
        if not file:
            return who == "__main__"
        if who == "__mp_main__":  # the program of a parent that started somewhere else
            self.folder = os.path.dirname(os.path.realpath(file))
        paths = (os.path.abspath(file), os.path.realpath(file))
        return who in self.asked or any(is_in(path, place) for path in paths for place in (self.folder, self.tests))


def importer(asked: tuple) -> dict:
    """The global names of who imports, past the import system's own frames; of one of `asked`, its own."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        who = str(frame.f_globals.get("__name__"))
        if who in asked or who.partition(".")[0] not in (NAME, "importlib", *PASSED_ON):
            break
        frame = frame.f_back
    return frame.f_globals


def pass_on() -> None:
    """Run the `sitecustomize` of the distribution or the environment, which this one hides."""
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
    ours = sys.modules.pop(NAME)
    try:
        __import__(NAME)
    except ImportError as error:
        if error.name != NAME:
            raise
    finally:
        sys.modules.setdefault(NAME, ours)


if __name__ == NAME:
    try:
        pass_on()
    finally:
        guard(getattr(sys, "argv", None) or [""])
