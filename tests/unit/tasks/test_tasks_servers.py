"""Servers that a run adds to its tasks, and the leave that a task needs to start programs on the hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clawhpc.errors import UserError
from clawhpc.records import McpServer, TaskSpec
from clawhpc.tasks.servers import McpSettings, RunServer, check_shown, equip
from tests.fakes.records import make_task, script_verifier

LAB = McpServer(name="lab", argv=("lab",))
PLAIN, WITH_LAB = make_task("plain"), replace(make_task("with_lab"), mcp_servers=(LAB,), mcp_dir="/tasks/mcp")


def test_every_task_has_the_servers_of_the_run_after_its_own(tmp_path: Path) -> None:
    servers = {
        "web": RunServer(command=("/opt/web", "$HOME"), host=True),
        "files": RunServer(command=("python3", "/mcp_run/files.py"), env={"A": "1"}),
    }
    plain, with_lab = equip((PLAIN, WITH_LAB), McpSettings(servers=servers, folder=str(tmp_path)))
    web = McpServer(name="web", argv=("/opt/web", "$HOME"), on_host=True)
    files = McpServer(name="files", argv=("python3", "/mcp_run/files.py"), env={"A": "1"})
    assert plain.mcp_servers == (web, files)
    assert with_lab.mcp_servers == (LAB, web, files)
    assert (with_lab.mcp_dir, with_lab.run_mcp_dir) == ("/tasks/mcp", str(tmp_path))


def test_without_servers_of_the_run_the_tasks_are_as_they_were() -> None:
    assert equip((PLAIN, WITH_LAB), McpSettings()) == (PLAIN, WITH_LAB)


@pytest.mark.parametrize(
    ("servers", "fault"),
    [
        ({"lab": RunServer(command=("x",))}, "tasks.mcp.servers.lab: task with_lab has a server of that name already"),
        ({"a b": RunServer(command=("x",))}, "tasks.mcp.servers.a b.name 'a b': must be letters"),
        ({"web": RunServer(command=())}, "tasks.mcp.servers.web.command is empty"),
        ({"web": RunServer(command=("x", "$HOME"))}, "tasks.mcp.servers.web has '$H': harnesses would expand it"),
        ({"web": RunServer(command=("./x",), host=True)}, "tasks.mcp.servers.web.command: a path of the host must be"),
    ],
)
def test_a_server_of_the_run_that_cannot_be_had_is_named_by_its_key(servers: dict[str, RunServer], fault: str) -> None:
    with pytest.raises(UserError) as raised:
        equip((PLAIN, WITH_LAB), McpSettings(servers=servers))
    assert str(raised.value).startswith(fault)


def test_a_folder_of_programs_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tasks\.mcp\.folder=.*: no such folder"):
        equip((PLAIN,), McpSettings(folder=str(tmp_path / "none")))


def test_a_task_starts_nothing_on_the_hosts_without_leave() -> None:
    hosted = replace(PLAIN, mcp_servers=(LAB, McpServer(name="web", argv=("/t/web", "now"), on_host=True)))
    assert equip((hosted,), McpSettings(allow_host=True)) == (hosted,)
    with pytest.raises(UserError) as raised:
        equip((hosted,), McpSettings())
    assert str(raised.value) == (
        "task plain would start its MCP server web on the workers' hosts, outside any sandbox: /t/web now; "
        "look at its programs, and then set tasks.mcp.allow_host=true"
    )


def task_at(root: Path, **folders: str) -> TaskSpec:
    """With a verifier, a server on the host and a server in the sandbox; `folders` are below `root`."""
    places = {"mcp_dir": "set/one/mcp", "mcp_host_dir": "set/one/mcp_host", **folders}
    fields: dict[str, Any] = {name: str(root / place) for name, place in places.items()}
    return replace(make_task("one"), verifier=script_verifier(root / "set/one/reward"), **fields)


def test_folders_beside_what_is_hidden_may_be_shown_and_in_what_is_kept(tmp_path: Path) -> None:
    fine = task_at(tmp_path, run_mcp_dir="servers", input_dir="set/one/input_files")
    check_shown([fine, PLAIN], {"tasks.folder": str(tmp_path / "set"), "run.root": str(tmp_path / "runs")})


@pytest.mark.parametrize(
    ("folders", "fault"),
    [
        ({"run_mcp_dir": "."}, "tasks.mcp.folder={root}: a harness would see {root}/"),
        ({"run_mcp_dir": "set"}, "tasks.mcp.folder={root}/set: a harness would see {root}/set (tasks.folder)"),
        ({"run_mcp_dir": "runs"}, "tasks.mcp.folder={root}/runs: a harness would see {root}/runs/mine (run.root)"),
        ({"run_mcp_dir": "set/one/mcp_host/in"}, "tasks.mcp.folder={root}/set/one/mcp_host/in: a harness would see "),
        ({"mcp_dir": "set/one/reward"}, "the MCP programs of task one: a harness would see {root}/set/one/reward"),
        (
            {"mcp_dir": "set/two"},
            "the MCP programs of task one: a harness would see {root}/set/two/reward (the verifier's, or",
        ),
        ({"mcp_dir": "link"}, "the MCP programs of task one: a harness would see {root}/set (tasks.folder)"),
        ({"input_dir": "set/one"}, "the inputs of task one: a harness would see {root}/set/one/"),
    ],
)
def test_what_would_show_a_harness_what_it_must_not_see_is_refused(
    tmp_path: Path, folders: dict[str, str], fault: str
) -> None:
    (tmp_path / "link").symlink_to("set")
    two = replace(make_task("two"), verifier=script_verifier(tmp_path / "set/two/reward"))
    kept = {"run.root": str(tmp_path / "runs/mine"), "tasks.folder": str(tmp_path / "set"), "tasks.heldout": None}
    with pytest.raises(UserError) as refused:
        check_shown([task_at(tmp_path, **folders), two], kept)
    assert str(refused.value).startswith(fault.format(root=tmp_path))
    assert str(refused.value).endswith("; choose a folder with nothing else in it")
