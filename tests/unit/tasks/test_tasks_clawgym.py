import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from clawhpc.records import WORKSPACE_MOUNT, McpServer, TaskSpec
from clawhpc.tasks.clawgym import load_tasks
from clawhpc.tasks.generate import GenerateSettings, generate_tasks
from tests.fakes.records import script_verifier


def lay_task(folder: Path, name: str, *, inputs: dict[str, str] | None = None, **entry: Any) -> Path:
    """A sound task, but for the keys of data_entry.json in `entry`; None removes a key."""
    root = folder / name
    (root / "reward").mkdir(parents=True)
    (root / "reward" / "reward.sh").write_text("echo 1\n")
    for path, content in (inputs or {}).items():
        target = root / "input_files" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    keys = {"task_id": name, "user_query": "Do it.", "metadata": {"category": ""}} | entry
    (root / "data_entry.json").write_text(json.dumps({key: value for key, value in keys.items() if value is not None}))
    return root


def only_task(folder: Path) -> TaskSpec:
    loaded = load_tasks(folder)
    assert loaded.faults == ()
    (task,) = loaded.tasks
    return task


def only_fault(folder: Path) -> str:
    lay_task(folder, "sound")
    loaded = load_tasks(folder)
    assert [task.task_id for task in loaded.tasks] == ["sound"]
    (fault,) = loaded.faults
    return fault


def test_a_task_as_the_published_data_set_has_it(tmp_path: Path) -> None:
    root = lay_task(
        tmp_path, "task_0001", inputs={"input/data.csv": "1\n"}, input_mount_dir=WORKSPACE_MOUNT, source="ignored"
    )
    task = only_task(tmp_path)
    assert task == TaskSpec(
        task_id="task_0001",
        instruction="Do it.",
        input_dir=str(root / "input_files"),
        verifier=script_verifier(root / "reward"),
        metadata={"category": ""},
    )


def test_inputs_and_metadata_are_optional(tmp_path: Path) -> None:
    lay_task(tmp_path, "bare", metadata=None)
    task = only_task(tmp_path)
    assert task.input_dir is None
    assert task.metadata == {}


def test_a_mount_below_the_workspace_moves_the_inputs_not_the_workspace(tmp_path: Path) -> None:
    lay_task(tmp_path, "deep", inputs={"a.txt": "a"}, input_mount_dir=f"{WORKSPACE_MOUNT}/in/put")
    task = only_task(tmp_path)
    assert task.input_subdir == "in/put"
    assert task.workspace_mount == WORKSPACE_MOUNT


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ({"task_id": None}, "data_entry.json: Object missing required field `task_id`"),
        ({"task_id": "  "}, "data_entry.json: task_id is empty"),
        ({"task_id": 7}, "data_entry.json: Expected `str`, got `int` - at `$.task_id`"),
        ({"user_query": None}, "data_entry.json: Object missing required field `user_query`"),
        ({"metadata": []}, "data_entry.json: Expected `object`, got `array` - at `$.metadata`"),
        (
            {"rubric": [{"name": "Tone"}]},
            "rubric: a task in this format is scored by its reward.sh alone; PinchBench's",
        ),
        ({"input_mount_dir": WORKSPACE_MOUNT}, "input_mount_dir is set, but there is no folder input_files"),
        ({"input_mount_dir": "/etc"}, f"input_mount_dir '/etc' is neither {WORKSPACE_MOUNT} nor a folder in it"),
        ({"task_id": "a\x1b[2J"}, r"task_id has the control character '\x1b'"),
        ({"user_query": "Do\0it"}, r"user_query has the control character '\x00'"),
        ({"input_mount_dir": f"{WORKSPACE_MOUNT}/a\0"}, r"input_mount_dir has the control character '\x00'"),
    ],
)
def test_a_malformed_entry_names_file_and_key_and_the_others_load(
    tmp_path: Path, entry: dict[str, Any], fault: str
) -> None:
    lay_task(tmp_path, "broken", **entry)
    found = only_fault(tmp_path)
    assert found.startswith(f"{tmp_path}/broken/data_entry.json: ")
    assert fault in found


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def write_entry(root: Path, key: str, value: str) -> None:
    """A data_entry.json with one key more, in JSON: `json.dumps` does not write one so deep."""
    (root / "data_entry.json").write_text(f'{{"task_id": "deep", "user_query": "Do it.", "{key}": {value}}}')


@pytest.mark.parametrize(
    ("key", "value"),
    [("ignored", nested(200_000)), ("metadata", f'{{"a": {nested(5000)}}}'), ("metadata", f'{{"a": {nested(100)}}}')],
)
def test_an_entry_nested_too_deep_to_be_passed_on_is_a_fault(tmp_path: Path, key: str, value: str) -> None:
    write_entry(lay_task(tmp_path, "broken"), key, value)
    assert only_fault(tmp_path).startswith(f"{tmp_path}/broken/data_entry.json: nested more than 100 levels deep")


def test_metadata_may_be_nested(tmp_path: Path) -> None:
    write_entry(lay_task(tmp_path, "deep"), "metadata", f'{{"a": {nested(99)}, "b": {{"c": [1]}}}}')
    assert only_task(tmp_path).metadata["b"] == {"c": [1]}


def test_line_breaks_and_tabs_in_a_query_are_text(tmp_path: Path) -> None:
    lay_task(tmp_path, "task", user_query="a\r\n\tb")
    assert only_task(tmp_path).instruction == "a\r\n\tb"


def test_an_entry_that_is_no_file_is_a_fault_and_is_not_waited_for(tmp_path: Path) -> None:
    path = lay_task(tmp_path, "broken") / "data_entry.json"
    path.unlink()
    os.mkfifo(path)
    assert only_fault(tmp_path) == f"{path}: not a regular file"


def test_a_fault_is_one_line_that_a_terminal_can_print(tmp_path: Path) -> None:
    (lay_task(tmp_path, "a\nb\x1b[2J") / "data_entry.json").unlink()
    assert only_fault(tmp_path) == rf"{tmp_path}/a\nb\x1b[2J/data_entry.json: No such file or directory"


def test_a_folder_whose_name_no_record_can_hold_is_a_fault(tmp_path: Path) -> None:
    lay_task(tmp_path, "gr\u00f6\u00dfe")
    lay_task(tmp_path, os.fsdecode(b"caf\xe9"), task_id="cafe")
    loaded = load_tasks(tmp_path)
    assert [task.task_id for task in loaded.tasks] == ["gr\u00f6\u00dfe"]
    assert loaded.faults == (rf"{tmp_path}/caf\udce9: its path is not UTF-8; give it another name",)


@pytest.mark.parametrize("mount", ["/data", "workspace", f"{WORKSPACE_MOUNT}/../x", f"{WORKSPACE_MOUNT}-2"])
def test_a_mount_outside_the_workspace_is_a_fault(tmp_path: Path, mount: str) -> None:
    lay_task(tmp_path, "broken", inputs={"a": "a"}, input_mount_dir=mount)
    assert f"is neither {WORKSPACE_MOUNT} nor a folder in it" in only_fault(tmp_path)


@pytest.mark.parametrize(("inputs", "mount"), [("reward/x", WORKSPACE_MOUNT), ("x", f"{WORKSPACE_MOUNT}/reward/y")])
def test_inputs_at_the_place_of_the_verifier_are_a_fault(tmp_path: Path, inputs: str, mount: str) -> None:
    lay_task(tmp_path, "broken", inputs={inputs: "a"}, input_mount_dir=mount)
    assert "the verifier's own place" in only_fault(tmp_path)


def test_broken_json_a_missing_entry_and_a_missing_script_are_faults(tmp_path: Path) -> None:
    (lay_task(tmp_path, "a") / "data_entry.json").write_text("{")
    (lay_task(tmp_path, "b") / "data_entry.json").unlink()
    (lay_task(tmp_path, "c") / "reward" / "reward.sh").unlink()
    lay_task(tmp_path, "d")
    loaded = load_tasks(tmp_path)
    assert [task.task_id for task in loaded.tasks] == ["d"]
    broken, missing, unscored = loaded.faults
    assert broken.startswith(f"{tmp_path}/a/data_entry.json: ")
    assert missing == f"{tmp_path}/b/data_entry.json: No such file or directory"
    assert unscored == f"{tmp_path}/c/reward/reward.sh: missing"


def test_of_two_tasks_with_one_id_the_first_by_name_stays(tmp_path: Path) -> None:
    lay_task(tmp_path, "one", task_id="same")
    lay_task(tmp_path, "two", task_id="same")
    loaded = load_tasks(tmp_path)
    assert len(loaded.tasks) == 1
    assert loaded.faults == (f"{tmp_path}/two/data_entry.json: task_id 'same' is that of 'one' already",)


def test_files_and_hidden_folders_beside_the_tasks_are_no_faults(tmp_path: Path) -> None:
    lay_task(tmp_path, "task")
    (tmp_path / "README.md").touch()
    (tmp_path / ".cache").mkdir()
    only_task(tmp_path)


def test_two_thousand_tasks_load_in_seconds(tmp_path: Path) -> None:
    tasks = generate_tasks(
        GenerateSettings(num_train=2000, num_heldout=0, families=("create", "append")), tmp_path / "many"
    )
    started = time.monotonic()
    assert len(load_tasks(tasks.split("train")).tasks) == 2000
    assert time.monotonic() - started < 10


# ---------------------------------------------------------------------------------------------------------------------
# MCP servers
# ---------------------------------------------------------------------------------------------------------------------


def test_a_task_declares_mcp_servers_and_brings_their_programs(tmp_path: Path) -> None:
    lab = {"name": "lab", "command": ["python3", "/mcp/server.py"], "env": {"ROUNDS": "3"}}
    root = lay_task(tmp_path, "with_lab", mcp_servers=[lab, {"name": "web", "command": ["web", "5$", "$1", "{x}"]}])
    (root / "mcp").mkdir()
    task = only_task(tmp_path)
    assert task.mcp_servers == (
        McpServer(name="lab", argv=("python3", "/mcp/server.py"), env={"ROUNDS": "3"}),
        McpServer(name="web", argv=("web", "5$", "$1", "{x}")),
    )
    assert task.mcp_dir == str(root / "mcp")


def test_a_server_on_the_host_is_started_from_a_folder_that_no_sandbox_sees(tmp_path: Path) -> None:
    web = {"name": "web", "command": ["python3", "./web.py", "$1", "/x"], "env": {"A": "$B"}, "host": True}
    root = lay_task(tmp_path, "with_web", mcp_servers=[web])
    (root / "mcp_host").mkdir()
    (root / "mcp_host/web.py").touch()
    task = only_task(tmp_path)
    argv = ("python3", f"{root}/mcp_host/web.py", "$1", "/x")
    assert task.mcp_servers == (McpServer(name="web", argv=argv, env={"A": "$B"}, on_host=True),)
    assert task.mcp_dir is None


EXPANDED = "harnesses would expand it; put it into a file of the server's own"


@pytest.mark.parametrize(
    ("server", "fault"),
    [
        ({"name": "a b"}, "mcp_servers[1].name 'a b': must be letters, digits, _ and -, 32 at most"),
        ({"name": "lab"}, "mcp_servers[1].name 'lab' is that of another already"),
        ({"command": []}, "mcp_servers[1].command is empty"),
        ({"command": [""]}, "mcp_servers[1].command is empty"),
        ({"command": "web"}, "Expected `array`, got `str` - at `$.mcp_servers[1].command`"),
        ({"command": ["web", "a\0b"]}, "mcp_servers[1] has a NUL"),
        ({"command": ["web", "$HOME/x"]}, f"mcp_servers[1] has '$H': {EXPANDED}"),
        ({"command": ["web", "${1}"]}, f"mcp_servers[1] has '${{': {EXPANDED}"),
        ({"env": {"A": "$_"}}, f"mcp_servers[1] has '$_': {EXPANDED}"),
        ({"env": {"A": "a {env:HOME}"}}, f"mcp_servers[1] has '{{env:': {EXPANDED}"),
        ({"command": ["web", "{file:/etc/passwd}"]}, f"mcp_servers[1] has '{{file:': {EXPANDED}"),
        ({"env": {"A=B": "c"}}, "mcp_servers[1].env: the name of a variable is empty or has a ="),
        ({"env": {"A": 1}}, "Expected `str`, got `int` - at `$.mcp_servers[1].env[...]`"),
        ({"command": ["./web"], "host": True}, "mcp_servers[1].command: './web' is no file of mcp_host/"),
        ({"command": ["./../up"], "host": True}, "mcp_servers[1].command: './../up' is no file of mcp_host/"),
        ({"command": ["./a\0b"], "host": True}, "mcp_servers[1].command: './a\\x00b' is no file of mcp_host/"),
        ({"url": "http://x"}, "Object contains unknown field `url` - at `$.mcp_servers[1]`"),
    ],
)
def test_a_faulty_mcp_server_is_named_by_file_and_key(tmp_path: Path, server: dict[str, Any], fault: str) -> None:
    servers = [{"name": "lab", "command": ["lab"]}, {"name": "web", "command": ["web"]} | server]
    root = lay_task(tmp_path, "faulty", mcp_servers=servers)
    (root / "mcp_host").mkdir()
    (root / "up").touch()
    assert only_fault(tmp_path) == f"{tmp_path}/faulty/data_entry.json: {fault}"


@pytest.mark.parametrize("name", ["input_files", "reward", "mcp", "mcp_host", "data_entry.json"])
def test_a_link_of_a_task_may_lead_to_its_neighbours_and_no_further(tmp_path: Path, name: str) -> None:
    root = lay_task(tmp_path / "set", "linked", inputs={"a.txt": "a"})
    for folder in ("mcp", "mcp_host"):
        (root / folder).mkdir()
    (root / name).rename(tmp_path / "set" / f".{name}")
    (root / name).symlink_to(f"../.{name}")
    only_task(tmp_path / "set")
    (tmp_path / "set" / f".{name}").rename(tmp_path / name)
    (root / name).unlink()
    (root / name).symlink_to(f"../../{name}")
    expected = f"{root}/{name}: is a link that leads out, to {tmp_path}/{name}; copy what is there"
    assert only_fault(tmp_path / "set") == expected


def test_a_task_itself_may_be_a_link_to_another_set_s(tmp_path: Path) -> None:
    root = lay_task(tmp_path / "all", "one", inputs={"a.txt": "a"})
    (tmp_path / "some").mkdir()
    (tmp_path / "some/one").symlink_to(root)
    assert only_task(tmp_path / "some").input_dir == str(root / "input_files")
