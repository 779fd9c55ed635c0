"""Where the Pythons of a verifier that starts in the workspace find their modules, and a pytest its settings.

Each of them imports this as `sitecustomize`, by way of PYTHONPATH: standard library only, Python 3.6 or newer. Those of
the verifier may take no module of the workspace for one of theirs; programs of the workspace, which it may run too,
must find their own, or a right solution would earn nothing. Who starts a Python does not tell the two apart (a shell
starts both), but what it runs does:

- a file has the modules beside it, as ever: the verifier's lies among the tests, a program of the workspace there;
- `-c`, `-m` and standard input would have those of the folder that they start in, before all others. They have them
  last, where nothing of that name is installed, and only when the command line asks, the tests, or what lies in that
  folder itself: installed modules look for more that is not there (`msvcrt`, `org.python.core`), and find nothing;
- `-m NAME` is a program of that folder where no NAME is installed, nor one of the tools that an image may lack;
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
TOOLS = frozenset({"coverage", "ensurepip", "nox", "pip", "pipx", "pytest", "tox", "uv", "venv", "virtualenv"})
"""What a verifier may ask for with `-m` in vain: it means those that are installed, and none that was planted."""
PYTESTS = frozenset({"pytest", "py.test"})


def guard(argv: list) -> None:
    """Put these rules into force in this process, which runs `argv`."""
    module = module_of(argv)
    if getattr(sys.flags, "safe_path", False):
        if argv[0] not in NO_FILE:
            if os.path.isfile(argv[0]):  # else a folder or an archive, which Python itself puts there
                sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
        elif module and module not in TOOLS and PathFinder.find_spec(module) is None:
            sys.path.insert(0, os.getcwd())
        else:
            sys.meta_path.append(LastResort(os.getcwd(), os.environ.get(TESTS_VARIABLE, os.getcwd())))
    if PYTESTS.intersection((module, os.path.basename(argv[0]))) and are_elsewhere(argv[1:]):
        os.environ.pop("PYTEST_ADDOPTS", None)


def module_of(argv: list) -> str:
    """The top of what `-m` names; empty where Python runs no module."""
    if argv[0] != "-m":
        return ""
    word = sys.orig_argv[-len(argv)] if hasattr(sys, "orig_argv") else ""
    return (word.partition("m")[2] if word.startswith("-") else word).partition(".")[0]


def are_elsewhere(words: list) -> bool:
    """Whether the paths among the `words` of a command line, or else this folder, have nothing to do with the tests."""
    tests = os.path.realpath(os.environ.get(TESTS_VARIABLE, "/"))
    paths = (os.path.realpath(word.partition("::")[0]) for word in words if not word.startswith("-"))
    places = [path for path in paths if os.path.exists(path)] or [os.getcwd()]
    return not any(is_in(place, tests) or is_in(tests, place) for place in places)


def is_in(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies in it; both are absolute."""
    return os.path.commonpath([path, folder]) == folder


class LastResort:
    """Finds in `folder` what no other finder has found, for those who may have it from there."""

    def __init__(self, folder: str, tests: str) -> None:
        self.folder, self.places = folder, (folder, tests)

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """See `importlib.abc.MetaPathFinder`."""
        return PathFinder.find_spec(name, [self.folder]) if path is None and self.serves(importer()) else None

    def serves(self, names: dict) -> bool:
        """Whether the module with these global `names` is the command line, its tests, or of the folder itself."""
        who, file = names.get("__name__"), names.get("__file__")
        if not file:
            return who == "__main__"
        return who == "unittest.loader" or any(is_in(os.path.abspath(file), place) for place in self.places)


def importer() -> dict:
    """The global names of who imports, past the import system's own frames."""
    frame = sys._getframe(1)
    while str(frame.f_globals.get("__name__")).partition(".")[0] in (NAME, "importlib") and frame.f_back is not None:
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
