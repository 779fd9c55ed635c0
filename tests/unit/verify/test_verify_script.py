from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.errors import SandboxError, VerifierError
from clawhpc.records import WORKSPACE_MOUNT, ExecResult, ScriptCheck, TaskSpec, Verdict, Verifier
from clawhpc.sandbox.base import Mount, SandboxCommand
from clawhpc.verify.reward import read_reward
from clawhpc.verify.script import script_environment, verify_workspace
from tests.fakes.records import script_verifier
from tests.fakes.sandbox import HostSandbox, ScriptedSandbox, result

pytestmark = pytest.mark.anyio


class Bench:
    """A task, a workspace as a harness may have left it, and a fake sandbox to verify it in."""

    def __init__(self, root: Path) -> None:
        self.workspace = root / "workspace"
        self.reward = root / "task" / "reward"
        self.home = root / "home"
        for folder in (self.workspace, self.reward, self.home):
            folder.mkdir(parents=True)
        self.task = TaskSpec(task_id="t", instruction="Do it.", input_dir=None, verifier=script_verifier(self.reward))
        self.sandbox = HostSandbox(self.home)

    async def verify(self, script: str, timeout_s: float = 10.0) -> float:
        (self.reward / "reward.sh").write_text(script)
        verdict = await verify_workspace(self.task, self.workspace, self.sandbox, sandbox_id="v", timeout_s=timeout_s)
        return verdict.reward


@dataclass
class WritingSandbox(ScriptedSandbox):
    """Writes reward.json where the command may, and remembers what it was told to run."""

    writes: str = ""

    async def run(self, command: SandboxCommand, *, timeout_s: float) -> ExecResult:
        self.command, self.timeout_s = command, timeout_s
        (command.mounts[-1].source / "reward.json").write_text(self.writes)
        return self.says


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_the_last_line_of_standard_output_is_the_reward(bench: Bench) -> None:
    assert await bench.verify("echo checking\necho 0.25\n") == 0.25


async def test_the_script_sees_the_workspace_and_its_helpers(bench: Bench) -> None:
    (bench.workspace / "answer.txt").write_text("42\n")
    (bench.reward / "expected").write_text("42\n")
    assert await bench.verify('cmp -s "$(dirname "$0")/../answer.txt" "$(dirname "$0")/expected" && echo 1') == 1.0


async def test_the_script_runs_with_bash_as_published_scripts_expect(bench: Bench) -> None:
    assert await bench.verify('set -o pipefail; [[ -n "$BASH_VERSION" ]] && echo 1') == 1.0


async def test_the_command_shows_workspace_and_reward_at_their_paths_and_nothing_else(bench: Bench) -> None:
    await bench.verify("echo 1")
    (command,) = bench.sandbox.commands
    assert command.mounts == (
        Mount(source=bench.workspace, target=WORKSPACE_MOUNT, writable=True),
        Mount(source=bench.reward, target=f"{WORKSPACE_MOUNT}/reward", writable=False),
    )
    assert command.home is None
    assert command.proxy_socket is None


async def test_a_check_of_its_own_places_starts_where_it_says_and_writes_its_reward(bench: Bench) -> None:
    check = ScriptCheck(
        folder=str(bench.reward),
        script="test.sh",
        mount="/tests",
        reward_folder="/logs/verifier",
        cwd="/app",
        env={"MODE": "fast", "PYTEST_ADDOPTS": "-p planted"},
        timeout_s=3.0,
    )
    task = TaskSpec(
        task_id="t",
        instruction="Do it.",
        input_dir=None,
        verifier=Verifier(script=check),
        workspace_mount="/app",
        env={"MODE": "slow", "PYTHONPATH": "/app/src"},
    )
    sandbox = WritingSandbox(result(exit_code=1), writes='{"reward": 0.5, "speed": 2}')
    verdict = await verify_workspace(task, bench.workspace, sandbox, sandbox_id="v", timeout_s=9.0)
    assert verdict == Verdict(reward=0.5, breakdown={"speed": 2.0})
    assert sandbox.timeout_s == 3.0
    assert sandbox.command.argv == ("bash", "/tests/test.sh")
    assert sandbox.command.cwd == "/app"
    assert {mount.target: mount.writable for mount in sandbox.command.mounts} == {
        "/app": True,
        "/tests": False,
        "/run/clawhpc/guard/sitecustomize.py": False,
        "/logs/verifier": True,
    }
    assert sandbox.command.env["MODE"] == "fast"
    assert sandbox.command.env["PYTHONSAFEPATH"] == "1"
    assert sandbox.command.env["PYTHONPATH"] == "/run/clawhpc/guard:/app/src"
    assert "planted" not in sandbox.command.env["PYTEST_ADDOPTS"]
    assert "--rootdir=/tests" in sandbox.command.env["PYTEST_ADDOPTS"]


async def test_what_lies_in_the_workspace_is_not_on_the_path_of_a_helper(bench: Bench) -> None:
    (bench.workspace / "json.py").write_text("print(1); raise SystemExit")
    assert await bench.verify("python3 -c 'import json; print(json.dumps(0))'") == 0.0


@pytest.mark.parametrize("planted", ["folder", "closed folder", "file", "link", "dangling link"])
async def test_what_the_harness_put_in_the_place_of_the_verifier_is_not_seen(bench: Bench, planted: str) -> None:
    place = bench.workspace / "reward"
    match planted:
        case "folder" | "closed folder":
            place.mkdir()
            (place / "reward.sh").write_text("echo 1\n")
            (place / "cheat").touch()
            place.chmod(0 if planted == "closed folder" else 0o755)
        case "file":
            place.touch()
        case "link":
            outside = bench.home / "outside"
            outside.mkdir()
            place.symlink_to(outside)
        case "dangling link":
            place.symlink_to("/nowhere")
    assert await bench.verify('[ -e "$(dirname "$0")/cheat" ] && echo 1 || echo 0') == 0.0
    assert place.is_dir()
    assert not place.is_symlink()
    assert not (bench.home / "outside" / "reward.sh").exists()


async def test_a_link_into_the_folder_of_the_verifier_is_gone(bench: Bench) -> None:
    (bench.reward / "expected").write_text("42\n")
    (bench.workspace / "answer.txt").symlink_to("reward/expected")
    assert await bench.verify('cat "$(dirname "$0")/../answer.txt" >/dev/null 2>&1 && echo 1 || echo 0') == 0.0


async def test_other_links_stay(bench: Bench) -> None:
    (bench.workspace / "real.txt").write_text("42\n")
    (bench.workspace / "answer.txt").symlink_to("real.txt")
    (bench.workspace / "python").symlink_to("/usr/bin/env")
    (bench.workspace / "loop").symlink_to("loop")
    assert (
        await bench.verify('cd "$(dirname "$0")/.." && [ -L answer.txt ] && [ -L python ] && [ -L loop ] && echo 1')
        == 1.0
    )


@pytest.mark.parametrize("mode", [0o000, 0o555])
async def test_a_workspace_that_the_harness_locked_is_verified(bench: Bench, mode: int) -> None:
    bench.workspace.chmod(mode)
    assert await bench.verify("echo 0") == 0.0


async def test_what_the_harness_locked_is_open_to_the_script(bench: Bench) -> None:
    inner = bench.workspace / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "answer.txt").write_text("42\n")
    for path in (inner / "answer.txt", inner, inner.parent):
        path.chmod(0)
    assert await bench.verify('grep -q 42 "$(dirname "$0")/../a/b/answer.txt" && echo 1') == 1.0


async def test_a_link_into_the_folder_of_the_verifier_is_gone_from_a_locked_folder_too(bench: Bench) -> None:
    (bench.reward / "expected").write_text("42\n")
    (bench.workspace / "sub").mkdir()
    (bench.workspace / "sub" / "answer.txt").symlink_to("../reward/expected")
    (bench.workspace / "sub").chmod(0o500)
    assert await bench.verify('cat "$(dirname "$0")/../sub/answer.txt" >/dev/null 2>&1 && echo 1 || echo 0') == 0.0


async def test_many_links_do_not_use_up_the_time_of_the_script(bench: Bench) -> None:
    (bench.reward / "expected").write_text("42\n")
    for number in range(10_000):
        (bench.workspace / f"{number}").symlink_to("reward/expected" if number % 2 else "nowhere")
    assert (
        await bench.verify('cd "$(dirname "$0")/.." && find . -type l | wc -l >&2; [ -L 0 ] && [ ! -L 1 ] && echo 1')
        == 1
    )


async def test_a_script_that_hangs_is_a_failure_that_says_how_long_it_had(bench: Bench) -> None:
    with pytest.raises(VerifierError, match=r"reward.sh of t was stopped after 0 s"):
        await bench.verify("sleep 60", timeout_s=0.2)


async def test_a_script_that_fails_is_a_failure_with_the_tail_of_its_output(bench: Bench) -> None:
    with pytest.raises(VerifierError, match=r"ended with exit code 3; stdout: '1\\n'; stderr: 'no answer\\n'"):
        await bench.verify("echo 1; echo no answer >&2; exit 3")


async def test_a_sandbox_that_fails_stays_the_failure_of_the_sandbox(bench: Bench) -> None:
    class Broken:
        name = "broken"

        async def run(self, command: SandboxCommand, *, timeout_s: float) -> ExecResult:
            raise SandboxError("no namespaces")

    with pytest.raises(SandboxError, match="no namespaces"):
        await verify_workspace(bench.task, bench.workspace, Broken(), sandbox_id="v", timeout_s=1.0)


async def test_a_workspace_that_is_gone_is_a_verifier_failure(bench: Bench) -> None:
    bench.workspace.rmdir()
    with pytest.raises(VerifierError, match="verifier of t: FileNotFoundError"):
        await bench.verify("echo 1")


@pytest.mark.parametrize(
    "stdout",
    [
        "",
        "\n\n",
        "nan",
        "inf",
        "-inf",
        "1.01",
        "-0.1",
        "1e3",
        "yes",
        "0.5 of 1",
        "0_1",
        "0x1",
        "0,5",
        "reward: 1",
        "١",
        "1\nDone.",
    ],
)
def test_what_is_no_number_from_0_to_1_is_a_failure_never_0(stdout: str) -> None:
    with pytest.raises(VerifierError, match=r"reward\.sh of t printed"):
        read_reward("reward.sh", "t", result(stdout=stdout))


@given(st.floats(0, 1))
def test_every_number_from_0_to_1_is_read_back(reward: float) -> None:
    assert read_reward("reward.sh", "t", result(stdout=f"noise\n{reward!r}\n")) == reward


@pytest.mark.parametrize(
    ("stdout", "reward"), [("1", 1.0), (" 0.5 \n\n", 0.5), (".5", 0.5), ("1.", 1.0), ("+1", 1.0), ("5e-1", 0.5)]
)
def test_plain_spellings_of_numbers_are_read(stdout: str, reward: float) -> None:
    assert read_reward("reward.sh", "t", result(stdout=stdout)) == reward


async def test_a_long_output_is_cut_in_the_message(bench: Bench) -> None:
    sandbox = ScriptedSandbox(result(stdout="x" * 100_000, exit_code=1))
    with pytest.raises(VerifierError) as caught:
        await verify_workspace(bench.task, bench.workspace, sandbox, sandbox_id="v", timeout_s=1.0)
    assert len(str(caught.value)) < 1500


async def test_the_path_of_an_image_is_that_of_the_script_but_for_what_the_policy_may_write(bench: Bench) -> None:
    path = "/app/.venv/bin:/opt/conda/bin::bin:/opt/../app/bin:/usr/bin"
    task = replace(bench.task, workspace_mount="/app", env={"PATH": path})
    assert script_environment(task)["PATH"] == "/opt/conda/bin:/usr/bin:/app/.venv/bin:/app/bin"
    assert "PATH" not in script_environment(bench.task)
