"""Servers that a run adds to its tasks, and the leave that a task needs to start programs on the hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clawhpc.errors import UserError
from clawhpc.records import McpServer
from clawhpc.tasks.servers import McpSettings, RunServer, equip
from tests.fakes.records import make_task

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
