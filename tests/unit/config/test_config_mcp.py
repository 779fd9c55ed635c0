"""MCP servers in a configuration, and harnesses that have none."""

from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from clawhpc.config import CONF_DIR, HarnessChoice, RunConfig, check_tasks, open_campaign, register_defaults, typed
from clawhpc.errors import UserError
from clawhpc.records import McpServer, TaskSpec
from clawhpc.tasks.servers import RunServer
from clawhpc.tasks.sets import TaskSets, load_task_sets
from tests.fakes.records import script_verifier

PLAIN = TaskSpec(task_id="plain", instruction="Do it.", input_dir=None, verifier=script_verifier("/r"))
WITH_LAB = replace(PLAIN, task_id="with_lab", mcp_servers=(McpServer(name="lab", argv=("lab",)),))


@pytest.mark.parametrize(
    "tasks", [TaskSets(train=(PLAIN, WITH_LAB), heldout=()), TaskSets(train=(), heldout=(WITH_LAB,))]
)
def test_a_task_that_a_harness_cannot_run_ends_the_campaign_before_there_is_a_run(
    tmp_path: Path, tasks: TaskSets
) -> None:
    config = RunConfig(cache_dir=str(tmp_path), harness=HarnessChoice(names=("claude_code", "pi")))
    refused = pytest.raises(UserError, match="harness pi has no MCP, but task with_lab has servers: lab")
    with refused, open_campaign(config, tasks, tmp_path / "runs"):
        pytest.fail("the campaign is open")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("key", ["tasks.folder", "run.root", "cache_dir", "scratch_dir"])
def test_programs_of_the_run_lie_in_no_folder_that_holds_tasks_or_runs(tmp_path: Path, key: str) -> None:
    folders = {"run.root": "/runs", "cache_dir": "/cache", "scratch_dir": "/scratch", "tasks.folder": "/tasks"}
    config = configured(*(f"{name}={folder}" for name, folder in (folders | {key: f"{tmp_path}/within"}).items()))
    shown = replace(PLAIN, run_mcp_dir=str(tmp_path))
    with pytest.raises(UserError, match=rf"^tasks\.mcp\.folder=.*: a harness would see {tmp_path}/within \({key}\)"):
        check_tasks(config, [shown])


def configured(*overrides: str) -> RunConfig:
    register_defaults()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return typed(compose("config", overrides=list(overrides)))


def test_servers_of_a_run_are_given_on_the_command_line_and_every_task_has_them(tmp_path: Path) -> None:
    config = configured(
        "tasks.mcp.servers.web.command=[python3,/opt/web.py]",
        "tasks.mcp.servers.web.env.KEY_FILE=/keys/web",
        "tasks.mcp.servers.web.host=true",
        "tasks.generate.num_train=2",
        "tasks.generate.num_heldout=1",
    )
    web = RunServer(command=("python3", "/opt/web.py"), env={"KEY_FILE": "/keys/web"}, host=True)
    assert config.tasks.mcp.servers == {"web": web}
    sets = load_task_sets(config.tasks, tmp_path)
    found = {
        (server.name, server.argv, server.on_host)
        for task in (*sets.train, *sets.heldout)
        for server in task.mcp_servers
    }
    assert found == {("web", ("python3", "/opt/web.py"), True)}


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("tasks.mcp.servers.web.url=x", "unknown key tasks.mcp.servers.web.url; allowed are command, env, host"),
        ("tasks.mcp.servers.web.host=true", "required field `command`"),
        ("tasks.mcp.folder=''", "tasks.mcp.folder is empty"),
    ],
)
def test_a_wrong_key_of_a_server_is_named(override: str, fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        configured(override)
