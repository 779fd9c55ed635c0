import os
from pathlib import Path

import pytest

from clawhpc.records import McpServer, TaskSpec
from clawhpc.tasks import harbor
from clawhpc.tasks.faults import LoadedTasks
from clawhpc.tasks.layout import Layout
from tests.fakes.task_sets import TASK_TOML, lay_harbor


def load(folder: Path, *, assume_image: bool = False) -> LoadedTasks:
    return harbor.load_tasks(folder / "set", Layout(folder / "cache"), assume_image=assume_image)


def only_task(folder: Path, *, assume_image: bool = False) -> TaskSpec:
    loaded = load(folder, assume_image=assume_image)
    assert loaded.faults == ()
    (task,) = loaded.tasks
    return task


def only_fault(folder: Path) -> str:
    lay_harbor(folder / "set", "zz_sound")
    loaded = load(folder)
    assert [task.task_id for task in loaded.tasks] == ["ours/zz_sound"]
    (fault,) = loaded.faults
    return fault


def test_a_task_as_the_format_has_it(tmp_path: Path) -> None:
    root = lay_harbor(tmp_path / "set")
    task = only_task(tmp_path)
    script = task.verifier.script
    assert script is not None
    assert (task.task_id, task.instruction) == ("ours/sum", "Write the sum of numbers.txt to sum.txt.\n")
    assert (task.workspace_mount, task.run_s, task.metadata) == ("/app", 60.0, {"difficulty": "easy"})
    assert (script.folder, script.script, script.mount) == (str(root / "tests"), "test.sh", "/tests")
    assert (script.reward_folder, script.cwd, script.timeout_s) == ("/logs/verifier", "/app", 30.0)
    assert task.input_dir is not None
    assert {path.name: path.read_text() for path in Path(task.input_dir).iterdir()} == {"numbers.txt": "1\n2\n"}


def test_neither_tests_nor_solution_lie_where_the_harness_can_read(tmp_path: Path) -> None:
    lay_harbor(tmp_path / "set", dockerfile="FROM debian:12\nWORKDIR /app\nCOPY . .\n")
    task = only_task(tmp_path)
    assert task.input_dir is not None
    assert sorted(os.listdir(task.input_dir)) == ["Dockerfile", "numbers.txt"]
    assert task.mcp_dir is None


def test_what_is_done_otherwise_is_noted_with_the_number_of_tasks(tmp_path: Path) -> None:
    lay_harbor(tmp_path / "set", "a")
    lay_harbor(tmp_path / "set", "b", toml=TASK_TOML.replace("allow_internet = false", "") + "[solution]\nenv = {}\n")
    assert load(tmp_path).notes == {harbor.OUR_IMAGE: 2, harbor.OUR_LIMITS: 2, harbor.NO_NETWORK: 1}


def test_the_mark_that_keeps_a_file_out_of_training_data_is_not_shown(tmp_path: Path) -> None:
    lay_harbor(tmp_path / "set", instruction="<!-- our-canary GUID 1 -->\n# canary\n\nDo it.\n# canary\n")
    assert only_task(tmp_path).instruction == "Do it.\n# canary\n"


def test_variables_and_a_folder_of_the_config_go_before_the_dockerfile(tmp_path: Path) -> None:
    config = TASK_TOML + 'workdir = "/work"\nenv = { MODE = "fast" }\n'
    lay_harbor(tmp_path / "set", toml=config, dockerfile="FROM x\nWORKDIR /app\nENV MODE=slow LANG=C\n")
    task = only_task(tmp_path)
    assert (task.workspace_mount, task.env) == ("/work", {"MODE": "fast", "LANG": "C"})


def test_a_program_that_speaks_mcp_is_taken_over(tmp_path: Path) -> None:
    server = '[[environment.mcp_servers]]\nname = "lab"\ntransport = "stdio"\ncommand = "lab"\nargs = ["-v"]\n'
    lay_harbor(tmp_path / "set", toml=TASK_TOML + server)
    assert only_task(tmp_path).mcp_servers == (McpServer(name="lab", argv=("lab", "-v")),)


CONFIG_FAULTS = [
    ("[environment", "Expected ']'"),
    ('schema_version = "2.0"', "schema_version '2.0': only 1.x is known"),
    ("[[steps]]\nname = 'one'", "steps: tasks of several steps are not supported"),
    ("[surprise]\na = 1", "Object contains unknown field `surprise`"),
    ("[agent]\ntimeout_sec = 'long'", "Expected `float | null`, got `str` - at `agent.timeout_sec`"),
    ("[agent]\ntimeout_sec = 0", "agent.timeout_sec 0.0: must be more than 0"),
    ("[agent]\nuser = 'bob'", "agent.user 'bob': there is one user"),
    ("[verifier]\nenv = { KEY = '${SECRET}' }", "verifier.env: ${…} would take a variable of the host"),
    ("[verifier]\nenv = { PYTEST_ADDOPTS = '-x' }", "verifier.env.PYTEST_ADDOPTS: is set by the sandbox"),
    ("[verifier]\nenvironment_mode = 'separate'", "verifier.environment_mode: only 'shared'"),
    ("[environment]\nos = 'windows'", "environment.os 'windows': only linux"),
    ("[environment]\ngpus = 1", "environment.gpus"),
    ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.b']", "allowed_hosts"),
    ("[environment]\nskills_dir = '/skills'", "environment.skills_dir"),
    ("[environment.healthcheck]\ncommand = 'true'", "environment.healthcheck"),
    ("[environment]\nworkdir = '/usr/src/app'", "environment.workdir /usr/src/app: a workspace cannot stand there"),
    ("[environment]\nworkdir = '/root'", "environment.workdir /root: a workspace cannot stand there"),
    ("[environment]\nworkdir = '/'", "environment.workdir /: a workspace cannot stand there"),
    ("[environment]\nworkdir = '/tests/x'", "environment.workdir /tests/x: is taken"),
    ("[environment]\nworkdir = 'app'", "environment.workdir 'app': must be an absolute path"),
    (
        "[[environment.mcp_servers]]\nname = 'web'\nurl = 'http://web:80/mcp'",
        "environment.mcp_servers[0].transport 'sse': only 'stdio'",
    ),
    ("[[environment.mcp_servers]]\nname = 'a b'\ntransport = 'stdio'\ncommand = 'x'", "mcp_servers[0].name 'a b'"),
    ("[[environment.mcp_servers]]\nname = 'a'\ntransport = 'stdio'", "mcp_servers[0].command is empty"),
]


@pytest.mark.parametrize(("toml", "fault"), CONFIG_FAULTS)
def test_what_cannot_be_had_is_a_fault_that_names_file_and_key(tmp_path: Path, toml: str, fault: str) -> None:
    lay_harbor(tmp_path / "set", toml=toml)
    found = only_fault(tmp_path)
    assert found.startswith(f"{tmp_path}/set/sum/task.toml: ")
    assert fault in found


@pytest.mark.parametrize(
    ("files", "place", "fault"),
    [
        ({"instruction": " \n"}, "instruction.md", "is empty"),
        ({"instruction": "a\0"}, "instruction.md", "control character"),
        ({"dockerfile": "FROM x\n"}, "environment/Dockerfile", "WORKDIR is missing"),
        ({"dockerfile": "FROM x\nWORKDIR /app\nENV BASH_ENV=x\n"}, "environment/Dockerfile", "ENV.BASH_ENV: is set by"),
        ({"dockerfile": "FROM x\nWORKDIR /app\nENV HOME=/x\n"}, "environment/Dockerfile", "ENV.HOME: is set by"),
        ({"dockerfile": "FROM x\nWORKDIR /app\nCOPY numbers.txt /data/\n"}, "environment/Dockerfile", "COPY to /data/"),
        ({"script": "#!/usr/bin/env python3\n"}, "tests/test.sh", "is run with bash"),
        ({"script": "#!/bin/bash\n\nset -e; apt-get install -y x\n"}, "tests/test.sh:3", "apt-get needs a network"),
        ({"script": "uvx pytest /tests/test.py\n"}, "tests/test.sh:1", "uvx needs a network"),
        ({"script": "A=1 B= apt-get install x\n"}, "tests/test.sh:1", "apt-get needs a network"),
    ],
)
def test_a_faulty_file_is_named(tmp_path: Path, files: dict[str, str], place: str, fault: str) -> None:
    lay_harbor(tmp_path / "set", **files)
    found = only_fault(tmp_path)
    assert found.startswith(f"{tmp_path}/set/sum/{place}")
    assert fault in found


@pytest.mark.parametrize("name", ["instruction.md", "environment/Dockerfile", "tests/test.sh", "task.toml"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (lay_harbor(tmp_path / "set") / name).unlink()
    assert f"{tmp_path}/set/sum/{name}: " in only_fault(tmp_path)


@pytest.mark.parametrize(
    ("name", "why"), [("docker-compose.yaml", "services beside the harness"), (".dockerignore", "is not followed")]
)
def test_what_changes_the_meaning_of_a_dockerfile_is_a_fault(tmp_path: Path, name: str, why: str) -> None:
    path = lay_harbor(tmp_path / "set") / "environment" / name
    path.touch()
    assert only_fault(tmp_path).startswith(f"{path}: {why}")


def test_what_an_image_would_have_is_believed_if_the_user_says_so(tmp_path: Path) -> None:
    script = "# curl is not needed\napt-get update\ncurl -s localhost:80\necho 1\n"
    lay_harbor(tmp_path / "set", "a", dockerfile="FROM x\nRUN apt-get install y\nWORKDIR /app\n", script=script)
    named = lay_harbor(tmp_path / "set", "b", toml='[environment]\ndocker_image = "x"\nworkdir = "/app"\n')
    (named / "environment/Dockerfile").unlink()
    loaded = load(tmp_path, assume_image=True)
    assert [task.task_id for task in loaded.tasks] == ["ours/a", "b"]
    assert loaded.notes[harbor.ASSUMED] == 2
    fault, missing = load(tmp_path).faults
    assert fault.startswith(f"{tmp_path}/set/a/environment/Dockerfile:2: RUN is not carried out here")
    assert "set tasks.assume_image=true" in fault
    assert "Dockerfile: missing; what is in an image that is only named cannot be had" in missing


def test_of_two_tasks_with_one_name_the_first_stays(tmp_path: Path) -> None:
    for name in ("a", "b"):
        lay_harbor(tmp_path / "set", name, toml='[task]\nname = "ours/same"\n')
    loaded = load(tmp_path)
    assert len(loaded.tasks) == 1
    assert loaded.faults == (f"{tmp_path}/set/b/task.toml: task.name 'ours/same' is that of 'a' already",)
