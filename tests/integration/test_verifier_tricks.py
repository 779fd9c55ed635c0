"""What a policy may do in its sandbox so that the verifier, in its own, finds an answer that is not there.

Each trick is a script that runs as a harness does: in a real sandbox, with the workspace and a HOME. It leaves no right
answer, so anything but a reward of 0 is a trick that works; and so is no reward at all, for a rollout without one is
left out, as if it had not been.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest

from clawhpc.ledger import Ledger, remove_tree
from clawhpc.records import WORKSPACE_MOUNT, ScriptCheck, TaskSpec, Verifier
from clawhpc.sandbox.base import Mount, Sandbox
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.verify.script import verify_workspace
from tests.fakes.records import reward_folder, script_verifier
from tests.sandbox_parts import shell, working_sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

REWARD = f"{WORKSPACE_MOUNT}/reward"
CHEAT = f"""\
#!/bin/sh
cp {REWARD}/expected {WORKSPACE_MOUNT}/answer.txt
touch {WORKSPACE_MOUNT}/ran
echo 1
"""
"""What a policy would have the verifier run."""
PYTHON_CHEAT = f"""\
import posix as p; p.open("{WORKSPACE_MOUNT}/ran", 64); right = p.read(p.open("{REWARD}/expected", 0), 9); \
p.write(p.open("{WORKSPACE_MOUNT}/answer.txt", 577), right); p.write(1, b"1\\n"); p._exit(0)
"""
"""The same for Python, on one line, by the only module that needs no other."""

SCRIPT = """\
#!/usr/bin/env bash
set -euo pipefail
python3 "$(dirname "$0")/check.py" "$(dirname "$0")/.." > /tmp/scores.json
python3 -c 'import json, sys; print(min(json.load(sys.stdin).values()))' < /tmp/scores.json > /tmp/reward.txt
cat /tmp/reward.txt
"""
CHECK = """\
import json, os, sys
from helper import read
top = sys.argv[1]
for folder, _, names in os.walk(top):
    for name in names:
        read(os.path.join(folder, name))
answer, expected = read(os.path.join(top, "answer.txt")), read(os.path.join(os.path.dirname(__file__), "expected"))
print(json.dumps({"right": float(answer == expected)}))
"""
HELPER = """\
def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None
"""
"""It reads every file of the workspace, as a thorough verifier does, and has a module of its own."""
GIT_SCRIPT = f"""\
for command in status log 'checkout -q -f HEAD'; do git -C {WORKSPACE_MOUNT} $command >&2; done
{SCRIPT}"""
PYTEST_SCRIPT = f"PYTHONPATH={REWARD}/packages python3 -m pytest -q . >&2; echo $((1 - $?))"
TESTS, REWARDS = "/tests", "/logs/verifier"
"""Where the formats have them whose scripts start in the workspace."""
STARTED_THERE_SCRIPT = f"""\
python3 -c 'import copy, json, pickle, subprocess'
python3 -m json.tool <<< 1
echo 'import copy, json, pickle, subprocess' > check_it.py
python3 check_it.py
python3 -m check_it
python3 -m mypy --strict check_it.py
python3 <<< 'import json'
PYTHONPATH=$PYTHONPATH:{TESTS}/packages python3 -m pytest -q {TESTS}/test_answer.py >&2
echo $((1 - $?)) > {REWARDS}/reward.txt
"""
PYTEST_CHECK = f"""\
def test_answer(expected):
    assert open("{WORKSPACE_MOUNT}/answer.txt").read() == expected
"""
PYTEST_FIXTURES = f"""\
import pytest

@pytest.fixture
def expected():
    return open("{REWARD}/expected").read()
"""
PYTEST_PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")

TRICKS = {
    "nothing": "",
    "the expected answer, by its paths": r"""
        for folder in $REWARD $REWARD_ON_HOST /proc/1/root$REWARD_ON_HOST /proc/1/cwd; do
            cp $folder/expected answer.txt
        done""",
    "a module of the standard library": r"cat /evil/evil.py | tee json.py os.py io.py > encodings.py",
    "modules that Python looks for and has not": r"""
        mkdir -p org/python; cat /evil/evil.py | tee org/python/core.py _winapi.py msvcrt.py winreg.py > nt.py""",
    "a module of the verifier's": r"mkdir reward; cat /evil/evil.py | tee helper.py reward/helper.py > reward/check.py",
    "the verifier's own files": r"mkdir reward; echo 42 > reward/expected; cp /evil/evil.sh reward/reward.sh",
    "compiled modules": r"""
        mkdir -p reward/__pycache__ __pycache__; cp /evil/evil.py helper.py; python3 -m compileall -q -b helper.py
        tag=$(python3 -c 'import sys; print(sys.implementation.cache_tag)')
        for folder in . reward reward/__pycache__ __pycache__; do
            cp helper.pyc $folder/; cp helper.pyc $folder/helper.$tag.pyc
        done; touch -d 2099-01-01 reward/*.pyc reward/__pycache__/*""",
    "sitecustomize, usercustomize and a .pth": r"""
        site=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $site
        for folder in . $site; do
            cat /evil/evil.py | tee $folder/sitecustomize.py $folder/usercustomize.py > $folder/evil.pth
        done""",
    "programs in the workspace and in HOME": r"""
        for folder in . bin .venv/bin ~/bin ~/.local/bin /usr/local/bin /tmp; do
            mkdir -p $folder
            for name in python3 python bash sh cat env dirname git pytest; do cp /evil/evil.sh $folder/$name; done
        done""",
    "dotfiles": r"""
        for file in .bashrc .bash_profile .profile .bash_login .bash_env .inputrc .env .envrc; do
            echo ". $PWD/evil.sh; export BASH_ENV=$PWD/evil.sh PYTHONSTARTUP=$PWD/evil.py" > $file
            echo "export PATH=$PWD:$PATH PYTHONPATH=$PWD" >> $file; cp $file ~/
        done; cp /evil/* .""",
    "a reward": r"""
        for file in /tmp/reward.txt ~/reward.txt reward.txt /tmp/scores.json; do echo 1 > $file; done
        mkdir reward; echo 1 > reward/reward.txt; echo 1""",
    "a file in the place of the verifier": "touch reward",
    "a link in the place of the verifier": "mkdir ~/mine; cp /evil/evil.sh ~/mine/reward.sh; ln -s ~/mine reward",
    "a link to the verifier": "ln -s . x; ln -s reward/expected answer.txt",
    "a link to the verifier, by its path": "ln -s $REWARD/expected answer.txt",
    "a link to the verifier, by its place on the host": "ln -s $REWARD_ON_HOST/expected answer.txt",
    "a link through a process": "ln -s /proc/self/cwd/expected answer.txt",
    "links out": "ln -s /etc/passwd answer.txt; ln -s /etc etc; ln -s / root; ln -s .. up",
    "a link to nowhere": "ln -s /nowhere answer.txt",
    "links in a circle": "ln -s answer.txt answer.txt; ln -s b a; ln -s a b; ln -s . here",
    "a link in the place of the workspace": r"""
        mkdir ~/other; cd ~; mv .openclaw/workspace ~/was; rmdir .openclaw/workspace; mv .openclaw was
        ln -sfn ~/other .openclaw/workspace; ln -sfn ~/other .openclaw""",
    "a mount in the place of the verifier": r"""
        mkdir reward ~/mine; cp /evil/evil.sh ~/mine/reward.sh; mount --bind ~/mine reward
        unshare -Urm mount --bind ~/mine reward""",
    "hard links": r"""
        mkdir reward; echo 41 > reward/expected; ln reward/expected extra; ln /usr/bin/python3 python3
        ln /etc/passwd answer.txt; ln ~/.openclaw x""",
    "a pipe for an answer": "mkfifo answer.txt pipe",
    "a socket for an answer": r"""python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("answer.txt")'""",
    "a device for an answer": "mknod answer.txt c 1 5; mknod answer.txt c 0 0",
    "a folder for an answer": "mkdir answer.txt",
    "setuid programs": "cp /bin/dash sh; chmod 6755 sh; cp /bin/dash answer.txt; chmod 7777 answer.txt",
    "what may not be read": r"""
        mkdir -p locked/in; echo 41 | tee locked/in/file > answer.txt; chmod 0 locked/in/* locked/in locked answer.txt
        mkdir reward; chmod 0 reward .""",
    "names that are no text": r"""
        echo 41 | tee $'answer\n.txt' $'\xff\xfe' ' ' '-rf' '*' '$(touch ran)' '; touch ran' > answer.txt
        mkdir $'folder\n'; ln -s $'\xff' $'folder\n/\x01'""",
    "folders of any depth": r"""
        
        for _ in {1..600}; do mkdir folder_in_folder; ln -s /proc/self/cwd link; cd -P folder_in_folder; done""",
    "very many files": r"""
        python3 -c '
import os
for number in range(100_000):
    os.close(os.open(str(number), os.O_CREAT))'""",
    "files without an end": "truncate -s 3G answer.txt zeros",
    "files from the future": "echo 41 > answer.txt; touch -d 2199-01-01 answer.txt . ..",
    "processes that stay": r"""
        stay() { trap '' HUP TERM; while sleep 0.01; do [ -e reward/expected ] && . /evil/evil.sh; done; }
        stay & (setsid bash -c "$(declare -f stay); stay" &)
        python3 -c 'import os; os.fork() or os.setsid(); os.fork() or os.execlp("sleep", "sleep", "600")' &
        sleep 0.1""",
    "the end of the sandbox's first process": "kill -9 1 $PPID",
}
"""By name, what runs in the workspace; it may fail."""
GIT_TRICKS = {
    "hooks and monitors of git": r"""
        git init -q; git config user.name me; git config user.email me@localhost
        echo 41 > answer.txt; git add answer.txt; git commit -q -m answer; cp /evil/evil.sh .
        for hook in post-checkout post-index-change reference-transaction; do cp evil.sh .git/hooks/$hook; done
        for name in core.fsmonitor core.pager core.editor; do git config $name $PWD/evil.sh; done
        git config core.hooksPath $PWD/.git/hooks; git config alias.status '!evil.sh'""",
}
PYTEST_TRICKS = {
    "conftest.py": "mkdir reward; cat /evil/evil.py | tee conftest.py > reward/conftest.py",
    "settings of pytest": r"""
        cp /evil/evil.py .
        printf '[pytest]\naddopts = -p evil\npythonpath = ..\n' | tee pytest.ini .pytest.ini > tox.ini
        printf '[tool:pytest]\naddopts = -p evil\npythonpath = ..\n' > setup.cfg
        printf '[tool.pytest.ini_options]\naddopts = "-p evil"\npythonpath = ["..", "."]\n' > pyproject.toml""",
    "tests and modules for pytest": r"""
        mkdir _pytest evil.dist-info; cat /evil/evil.py | tee test_answer.py pytest.py evil.py > _pytest/__init__.py
        printf '[pytest11]\nevil = evil\n' > evil.dist-info/entry_points.txt""",
}
TOOL_TRICKS = {
    "tools that an image may lack": "mkdir mypy; cat /evil/evil.py | tee mypy/__init__.py mypy/__main__.py > ruff.py"
}
STARTED_THERE_TRICKS = (
    PYTEST_TRICKS
    | TOOL_TRICKS
    | {
        name: TRICKS[name]
        for name in (
            *("a module of the standard library", "modules that Python looks for and has not"),
            *("sitecustomize, usercustomize and a .pth", "programs in the workspace and in HOME", "dotfiles"),
        )
    }
)
KINDS = ["bubblewrap", pytest.param("apptainer", marks=[pytest.mark.apptainer, pytest.mark.slow])]
ALWAYS = {
    *("nothing", "a module of the standard library", "sitecustomize, usercustomize and a .pth", "a reward"),
    *("programs in the workspace and in HOME", "dotfiles", "a link in the place of the verifier"),
    *("a link to the verifier", "a link through a process", "links out", "a pipe for an answer", "processes that stay"),
    *GIT_TRICKS,
    *("conftest.py", "settings of pytest", "modules that Python looks for and has not", *TOOL_TRICKS),
}
"""The rest takes a minute, and is played all at once as well."""
LONG = {"very many files", "folders of any depth"}


def each(tricks: Iterable[str]) -> list[object]:
    return [pytest.param(trick, marks=() if trick in ALWAYS else pytest.mark.slow) for trick in tricks]


@pytest.fixture(scope="module", params=KINDS)
def shared_sandbox(request: pytest.FixtureRequest, arena: Ledger, cache_dir: Path) -> Sandbox:
    return anyio.run(partial(working_sandbox, SandboxSettings(kind=request.param), arena, cache_dir))


@pytest.fixture
def place(arena: Ledger) -> Iterator[Path]:
    """Where a rollout has its folders, and nothing is left of very many files."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir=arena.scratch))
    for name in ("workspace", "home", "evil", "reward"):
        (folder / name).mkdir()
    write(folder / "evil", {"evil.sh": CHEAT, "evil.py": PYTHON_CHEAT})
    (folder / "evil/evil.sh").chmod(0o755)
    yield folder
    remove_tree(folder)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


def lay_reward(folder: Path, script: str, **more: str) -> TaskSpec:
    files = {"reward.sh": script, "check.py": CHECK, "helper.py": HELPER, "expected": "42\n"}
    write(folder, files | more)
    return TaskSpec(task_id="t", instruction="Do it.", input_dir=None, verifier=script_verifier(folder))


def lay_pytest(folder: Path) -> TaskSpec:
    """The packages as they are installed here, compiled too."""
    for name in PYTEST_PACKAGES:
        source = Path(__import__(name).__file__ or "").parent
        shutil.copytree(source, folder / "packages" / name)
    shutil.copy2(Path(pytest.__file__).parents[1] / "py.py", folder / "packages")
    return lay_reward(folder, PYTEST_SCRIPT, **{"test_answer.py": PYTEST_CHECK, "conftest.py": PYTEST_FIXTURES})


def lay_started_there(folder: Path) -> TaskSpec:
    """As `lay_pytest`, in a format whose scripts start in the workspace, and lie elsewhere."""
    task = lay_pytest(folder)
    for path in (folder / "test_answer.py", folder / "conftest.py"):
        path.write_text(path.read_text().replace(REWARD, TESTS))
    (folder / "reward.sh").write_text(STARTED_THERE_SCRIPT)
    check = ScriptCheck(folder=str(folder), mount=TESTS, reward_folder=REWARDS, cwd=WORKSPACE_MOUNT)
    return replace(task, verifier=Verifier(script=check))


async def play(trick: str, place: Path, task: TaskSpec, sandbox: Sandbox) -> float:
    """The reward of a policy that does `trick`."""
    mounts = (
        Mount(source=place / "workspace", target=WORKSPACE_MOUNT, writable=True),
        Mount(source=place / "evil", target="/evil"),
    )
    paths = {"REWARD": REWARD, "REWARD_ON_HOST": reward_folder(task)}
    harness = shell(trick, env=paths, cwd=WORKSPACE_MOUNT, mounts=mounts, home=place / "home")
    await sandbox.run(harness, timeout_s=30)
    verdict = await verify_workspace(task, place / "workspace", sandbox, sandbox_id="verify", timeout_s=30)
    return verdict.reward


@pytest.mark.parametrize("trick", each(TRICKS))
async def test_it_gains_nothing(trick: str, place: Path, shared_sandbox: Sandbox) -> None:
    assert await play(TRICKS[trick], place, lay_reward(place / "reward", SCRIPT), shared_sandbox) == 0.0
    assert not (place / "workspace/ran").exists()


@pytest.mark.parametrize("trick", GIT_TRICKS)
async def test_nor_where_the_verifier_asks_git(trick: str, place: Path, shared_sandbox: Sandbox) -> None:
    assert await play(GIT_TRICKS[trick], place, lay_reward(place / "reward", GIT_SCRIPT), shared_sandbox) == 0.0
    assert not (place / "workspace/ran").exists()


@pytest.mark.parametrize("trick", each(PYTEST_TRICKS))
async def test_nor_where_the_verifier_is_a_pytest(trick: str, place: Path, shared_sandbox: Sandbox) -> None:
    assert await play(PYTEST_TRICKS[trick], place, lay_pytest(place / "reward"), shared_sandbox) == 0.0
    assert not (place / "workspace/ran").exists()


@pytest.mark.parametrize("trick", each(STARTED_THERE_TRICKS))
async def test_nor_where_the_verifier_starts_in_the_workspace(trick: str, place: Path, shared_sandbox: Sandbox) -> None:
    assert await play(STARTED_THERE_TRICKS[trick], place, lay_started_there(place / "reward"), shared_sandbox) == 0.0
    assert not (place / "workspace/ran").exists()


HONEST = "echo 42 > answer.txt"
HONESTLY = {"script": partial(lay_reward, script=SCRIPT), "pytest": lay_pytest, "started there": lay_started_there}


@pytest.mark.parametrize("lay", HONESTLY.values(), ids=HONESTLY)
async def test_a_right_answer_has_its_reward(lay: object, place: Path, shared_sandbox: Sandbox) -> None:
    assert await play(HONEST, place, lay(place / "reward"), shared_sandbox) == 1.0  # type: ignore[operator]


@pytest.mark.apptainer
async def test_all_of_it_at_once_gains_nothing_in_apptainer_either(place: Path, arena: Ledger, cache_dir: Path) -> None:
    sandbox = await working_sandbox(SandboxSettings(kind="apptainer"), arena, cache_dir)
    tricks = PYTEST_TRICKS | GIT_TRICKS | {name: trick for name, trick in TRICKS.items() if name not in LONG}
    everything = "\n".join(f"(\n{trick}\n); chmod 700 ." for trick in tricks.values())
    assert await play(everything, place, lay_pytest(place / "reward"), sandbox) == 0.0
