"""The verifier in each real sandbox, against a workspace that cheats."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawhpc.errors import VerifierError
from clawhpc.records import WORKSPACE_MOUNT, TaskSpec
from clawhpc.sandbox.base import Sandbox
from clawhpc.verify.script import verify_workspace

pytestmark = pytest.mark.anyio

PUBLISHED_WRAPPER = f"""\
#!/usr/bin/env bash
set -euo pipefail
python3 {WORKSPACE_MOUNT}/reward/check.py {WORKSPACE_MOUNT} | python3 -c 'import json, sys
scores = json.loads(sys.stdin.read())
print(sum(map(float, scores.values())) / len(scores))'
"""
"""The form that published tasks have: absolute paths, a helper, and Python reading its JSON."""
CHECK = """\
import json, sys
from pathlib import Path
answer = Path(sys.argv[1], "answer.txt")
expected = Path(__file__).with_name("expected").read_text()
print(json.dumps({"there": answer.is_file(), "right": answer.is_file() and answer.read_text() == expected}))
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


def lay_reward(tmp_path: Path, script: str) -> TaskSpec:
    reward = tmp_path / "reward"
    reward.mkdir()
    (reward / "reward.sh").write_text(script)
    (reward / "check.py").write_text(CHECK)
    (reward / "expected").write_text("42\n")
    return TaskSpec(task_id="t", instruction="Do it.", input_dir=None, reward_dir=str(reward))


async def verify(task: TaskSpec, workspace: Path, sandbox: Sandbox, timeout_s: float = 30.0) -> float:
    verdict = await verify_workspace(task, workspace, sandbox, sandbox_id="verify", timeout_s=timeout_s)
    return verdict.reward


async def test_a_published_script_finds_workspace_and_helpers_at_the_paths_that_it_names(
    sandbox: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    (workspace / "answer.txt").write_text("41\n")
    assert await verify(lay_reward(tmp_path, PUBLISHED_WRAPPER), workspace, sandbox) == 0.5


@pytest.mark.parametrize("way", [f"{WORKSPACE_MOUNT}/reward/expected", "/proc/self/cwd/expected"])
async def test_a_workspace_that_cheats_gets_nothing(
    sandbox: Sandbox, workspace: Path, tmp_path: Path, way: str
) -> None:
    (workspace / "answer.txt").symlink_to(way)
    (workspace / "json.py").write_text("print(1); raise SystemExit")
    (workspace / "reward").mkdir()
    (workspace / "reward" / "expected").write_text("41\n")
    assert await verify(lay_reward(tmp_path, PUBLISHED_WRAPPER), workspace, sandbox) == 0.0


async def test_the_script_has_an_empty_home_no_proxy_and_cannot_change_its_own_folder(
    sandbox: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    script = f"""
cd "$HOME" && [ "$(find . ! -path './.openclaw*')" = . ] || echo "HOME is not empty" >&2
[ ! -e /run/clawhpc/proxy.sock ] || echo "there is a proxy" >&2
! touch {WORKSPACE_MOUNT}/reward/changed || echo "reward can be changed" >&2
echo 1; exit 3
"""
    with pytest.raises(VerifierError) as caught:
        await verify(lay_reward(tmp_path, script), workspace, sandbox)
    for complaint in ("HOME is not empty", "there is a proxy", "reward can be changed"):
        assert complaint not in str(caught.value)
    assert "ended with exit code 3" in str(caught.value)


async def test_a_script_that_hangs_is_stopped(sandbox: Sandbox, workspace: Path, tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match=r"was stopped after \d s"):
        await verify(lay_reward(tmp_path, "sleep 600"), workspace, sandbox, timeout_s=2.0)
