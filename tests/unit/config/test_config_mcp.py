from dataclasses import replace
from pathlib import Path

import pytest

from clawhpc.config import HarnessChoice, RunConfig, open_campaign
from clawhpc.errors import UserError
from clawhpc.records import McpServer, TaskSpec
from clawhpc.tasks.sets import TaskSets
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
    refused = pytest.raises(UserError, match="harness pi has no MCP, but task with_lab declares servers: lab")
    with refused, open_campaign(config, tasks, tmp_path / "runs"):
        pytest.fail("the campaign is open")
    assert not (tmp_path / "runs").exists()
