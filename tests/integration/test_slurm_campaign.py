"""A campaign as a job of a real Slurm: submitted, followed, left, found again, cancelled, put back into the queue."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from clawhpc.command import EXIT_INTERRUPTED, EXIT_USER
from clawhpc.launch.campaign import SubmittedCampaign, submit_campaign
from clawhpc.launch.follow import follow
from clawhpc.launch.settings import CampaignJobSettings
from clawhpc.launch.states import look_up
from tests.campaign_parts import Desk
from tests.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.slurm

SMALL = CampaignJobSettings(cpus_per_task=1, mem_gb=0.2)
LONG_S = 180.0
"""For what Slurm does when it comes to it, on a busy machine."""
END_S = 60.0
"""For a command to end."""
REPOSITORY = Path(__file__).parents[2]

# What `python -m clawhpc.train launch=slurm` does, with a command of the test's in place of the campaign.
COMMAND = """
import sys
from pathlib import Path
from clawhpc.command import one_line_errors, prepare_process, start_log
from clawhpc.job import follow_to_the_end
from clawhpc.launch.campaign import submit_campaign
from clawhpc.launch.settings import CampaignJobSettings
small = CampaignJobSettings(cpus_per_task=1, mem_gb=0.2)
with one_line_errors():
    prepare_process()
    start_log()
    follow_to_the_end(submit_campaign(small, 1, Path(sys.argv[1]), sys.argv[2:]), watch_s=0.3)
"""

# A campaign with two workers, one of which waits in the queue. Its lease would keep them for ten minutes.
CAMPAIGN = """
import sys, time
from pathlib import Path
from clawhpc.campaign.run import open_run
from clawhpc.command import one_line_errors, prepare_process
from clawhpc.config import former_turn_s
from clawhpc.launch.turn import this_job
from clawhpc.launch.pool import WorkerPool
from clawhpc.ledger import Ledger
from tests.fakes.slurm_worker import StubWorker, stub_spec
from tests.integration.test_slurm_pool import settings_of
root = Path(sys.argv[1])
settings = settings_of(num_workers=2, array_parallelism=1, lease_s=600.0)
with one_line_errors():
    prepare_process()
    with (
        open_run(root / "runs", b"the configuration", wait_s=former_turn_s()) as paths,
        Ledger.open(root / "ledger", job=this_job()) as ledger,
        WorkerPool(settings, stub_spec(paths.root), ledger, StubWorker),
    ):
        time.sleep(600)
"""

GOES_ON = """
if [ -n "$SLURM_RESTART_COUNT" ]; then echo second turn; exit 0; fi
trap 'echo first turn has ended; exit 130' TERM
echo first turn
sleep 100 & wait
"""

SCRIPTS_PYTHON = """
trap 'echo turn ${SLURM_RESTART_COUNT:-0} has ended; exit 130' TERM
echo turn ${SLURM_RESTART_COUNT:-0}
sleep 200 & wait
"""
SMALL_JOB = {"cpus_per_task": 1, "mem_gb": 1}


@dataclass
class Terminal:
    """A command, as a person at a terminal has it."""

    process: subprocess.Popen[str]
    output: Path

    def text(self) -> str:
        """All that it has said."""
        return self.output.read_text()

    def says(self, what: str) -> bool:
        """It has said it."""
        return what in self.text()

    def end(self) -> tuple[int, str]:
        """Its exit code and its last line."""
        code = self.process.wait(END_S)
        return code, self.text().splitlines()[-1]


@pytest.fixture
def terminal(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Opens terminals; none outlives the test."""
    opened: list[Terminal] = []

    def begin(*command: object) -> Terminal:
        output = tmp_path / f"terminal-{len(opened)}"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*map(str, command)], cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT, text=True
            )
        opened.append(Terminal(process, output))
        return opened[-1]

    yield begin
    for one in opened:
        one.process.kill()
        one.process.wait(END_S)


def job_in(terminal: Terminal) -> str:
    """Id of the job that it follows."""
    until(lambda: terminal.says(" its log is "), say=terminal.text)
    found = re.search(r"job (\d+) ", terminal.text())
    assert found
    return found[1]


def test_a_job_on_two_nodes_runs_the_command_once_on_the_first_and_ends_as_it_does(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say = 'echo "$SLURMD_NODENAME of $SLURM_JOB_NODELIST, $SLURM_CPUS_PER_TASK CPU"; echo why >&2; exit 3'
    job = submit_campaign(SMALL, 2, tmp_path / "job", ("sh", "-c", say))
    status, last_line = follow(job, watch_s=0.3)
    assert (status.state, status.exit_code, last_line) == ("FAILED", 3, "why")
    assert capsys.readouterr().out.splitlines()[:2] == ["n1 of n[1-2], 1 CPU", "why"]


def submit_script(
    slurm: SlurmCluster, folder: Path, *command: str, python: Path | None = None, options: tuple[str, ...] = ()
) -> tuple[str, Path]:
    """`sbatch jobs/campaign.sh`, small, where `python` is in that folder; the job, and its log."""
    small = ("--cpus-per-task=1", "--mem=200M", f"--chdir={REPOSITORY}", f"--output={folder}/%j.log", *options)
    path = f"PATH={python or Path(sys.executable).parent}:{os.environ['PATH']}"
    said = slurm.run("env", path, "sbatch", "--parsable", *small, str(REPOSITORY / "jobs/campaign.sh"), *command)
    return said.strip(), folder / f"{said.strip()}.log"


def without_policy(folder: Path) -> tuple[str, ...]:
    """A small campaign that ends as soon as it begins."""
    small = ("launch=slurm_cpu", "launch.campaign.cpus_per_task=1", "launch.campaign.mem_gb=1")
    folders = (f"cache_dir={folder}/cache", f"run.root={folder}/runs", f"policy.folder={folder}/nowhere")
    return (*small, "launch.slurm.watch_s=0.3", *folders)


def test_what_ends_a_campaign_ends_its_job_with_the_same_line(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    code, last_line = terminal(sys.executable, "-m", "clawhpc.train", *without_policy(tmp_path)).end()
    said = f"clawhpc: {tmp_path}/nowhere: no such policy folder"
    assert (code, last_line[: len(said)]) == (EXIT_USER, said)
    assert re.search(r": job \d+: FAILED on n\d; its log is ", last_line)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["jobs"], "no run"


@pytest.mark.slow
def test_what_ends_a_campaign_ends_the_users_own_script_which_is_the_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    job_id, log = submit_script(slurm, tmp_path, "train", *without_policy(tmp_path))
    slurm.until(lambda: slurm.state(job_id) == "FAILED")
    assert log.read_text().splitlines()[-1].startswith(f"clawhpc: {tmp_path}/nowhere: no such policy folder")
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_leaves_a_job_alone_the_same_command_finds_it_and_scancel_ends_it(
    slurm: SlurmCluster, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    command = (sys.executable, "-c", COMMAND, tmp_path / "job", "sh", "-c", "echo at work; exec sleep 600")
    first = terminal(*command)
    until(lambda: first.says("at work\n"), say=first.text)
    second = terminal(*command)
    assert job_in(second) == job_in(first)
    assert slurm.queue() == {job_in(first): "RUNNING"}
    first.process.send_signal(signal.SIGINT)
    code, last_line = first.end()
    assert (code, last_line.partition(" goes on: ")[0]) == (EXIT_INTERRUPTED, f"clawhpc: job {job_in(first)}")
    until(lambda: second.says("at work\n"), say=second.text)
    slurm.run("scancel", job_in(first))
    code, last_line = second.end()
    assert code != 0
    assert last_line.startswith(f"clawhpc: job {job_in(first)}: CANCELLED")
    job = submit_campaign(SMALL, 1, tmp_path / "job", ("true",))
    assert job.is_new
    assert job.job_id != job_in(first)


def test_a_job_that_is_to_make_room_ends_its_command_first_and_begins_it_again_in_its_next_turn(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    job = submit_campaign(SMALL, 1, tmp_path / "job", ("bash", "-c", GOES_ON))
    until(lambda: job.log.exists() and "first turn\n" in job.log.read_text())
    slurm.run("scancel", "--signal=USR2", job.job_id)
    status, last_line = follow(job, watch_s=0.3)
    assert (status.state, last_line) == ("COMPLETED", "second turn")
    said = [line for line in capsys.readouterr().out.splitlines() if "turn" in line]
    assert said[0] == "first turn"
    assert said[1].endswith("goes on in the next turn of its job")
    assert said[2:] == ["first turn has ended", "second turn"]
    assert f"job {job.job_id}: PENDING (BeginTime)" in caplog.text


def begin_campaign(slurm: SlurmCluster, folder: Path, **changes: object) -> SubmittedCampaign:
    """A campaign whose two workers are in the queue."""
    settings = replace(SMALL, **changes)  # type: ignore[arg-type]
    command = (sys.executable, "-c", CAMPAIGN, str(folder))
    job = submit_campaign(settings, 1, folder / "job", command, scratch_root=str(folder / "ledger"))
    slurm.until(lambda: has_workers(slurm, job))
    return job


def has_workers(slurm: SlurmCluster, job: SubmittedCampaign) -> bool:
    """The job runs, and besides it there are its workers, one at work and one that waits."""
    states = slurm.queue()
    return states.pop(job.job_id, "") == "RUNNING" and sorted(states.values()) == ["PENDING", "RUNNING"]


def test_of_a_campaign_that_is_cancelled_no_worker_is_left(slurm: SlurmCluster, ledger_root: Path) -> None:
    job = begin_campaign(slurm, ledger_root)
    slurm.run("scancel", job.job_id)
    slurm.until(lambda: not slurm.queue())
    assert [*(ledger_root / "ledger").iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [("scancel", "--signal=USR2"), ("scontrol", "requeue")], ids=["told", "taken"])
def test_a_campaign_that_is_put_back_into_the_queue_takes_its_workers_with_it_and_has_new_ones_later(
    slurm: SlurmCluster, ledger_root: Path, how: tuple[str, ...]
) -> None:
    job = begin_campaign(slurm, ledger_root)
    slurm.run(*how, job.job_id)
    slurm.until(lambda: slurm.queue() == {job.job_id: "PENDING"})
    slurm.until(lambda: has_workers(slurm, job), within_s=LONG_S)
    assert [path.name for path in (ledger_root / "runs").iterdir()] == ["001"], "the same run"
    slurm.run("scancel", job.job_id)
    slurm.until(lambda: not slurm.queue())


@pytest.mark.slow
def test_a_campaign_whose_node_is_lost_goes_on_elsewhere(slurm: SlurmCluster, ledger_root: Path) -> None:
    job = begin_campaign(slurm, ledger_root)
    node = look_up(job.job_id).nodes
    slurm.kill_node(node)
    try:
        slurm.until(lambda: look_up(job.job_id).nodes not in (node, "") and has_workers(slurm, job), within_s=LONG_S)
    finally:
        slurm.start_node(node)
        slurm.until(lambda: slurm.node_states()[node] in ("idle", "mixed"))


@pytest.mark.slow
def test_a_campaign_whose_node_only_seems_to_be_lost_ends_there_before_it_goes_on_elsewhere(
    slurm: SlurmCluster, ledger_root: Path
) -> None:
    job = begin_campaign(slurm, ledger_root)
    node = look_up(job.job_id).nodes
    slurm.daemons[node].kill()
    try:
        slurm.until(lambda: look_up(job.job_id).nodes not in (node, "") and has_workers(slurm, job), within_s=LONG_S)
        assert [path.name for path in (ledger_root / "runs").iterdir()] == ["001"], "the same run"
        until(lambda: len([*(ledger_root / "ledger").glob("*.lock")]) == 1, say=job.log.read_text)
    finally:
        slurm.daemons.pop(node).wait(END_S)
        slurm.start_node(node)
        slurm.until(lambda: slurm.node_states()[node] in ("idle", "mixed"))


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["low", "low_warned"])
def test_a_campaign_that_is_preempted_goes_on_when_there_is_room_again(
    slurm: SlurmCluster, ledger_root: Path, partition: str
) -> None:
    job = begin_campaign(slurm, ledger_root, partition=partition, nodelist="n1", cpus_per_task=8)
    other = ("--partition=high", "--nodelist=n1", "--cpus-per-task=8", "--mem=100", "--output=/dev/null")
    slurm.run("sbatch", *other, "--wrap=sleep 3")
    slurm.until(lambda: slurm.queue().get(job.job_id) == "PENDING")
    slurm.until(lambda: has_workers(slurm, job), within_s=LONG_S)
    assert ("about to be preempted" in job.log.read_text()) == (partition == "low_warned")


@pytest.mark.slow
def test_a_job_whose_time_is_up_goes_on_in_its_next_turn(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(SMALL, timeout_min=1, signal_delay_s=40)
    job = submit_campaign(settings, 1, tmp_path / "job", ("bash", "-c", GOES_ON))
    status, last_line = follow(job, watch_s=0.3)
    assert (status.state, last_line) == ("COMPLETED", "second turn")
    assert "first turn has ended" in capsys.readouterr().out


@pytest.mark.slow
def test_the_users_own_script_goes_back_into_the_queue_when_its_time_is_up_and_ends_its_campaign_when_cancelled(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "python").write_text(f"#!/bin/bash\n{SCRIPTS_PYTHON}")
    (tmp_path / "python").chmod(0o755)
    job_id, log = submit_script(slurm, tmp_path, "train", python=tmp_path, options=("--time=1",))
    slurm.until(lambda: "turn 1" in log.read_text() if log.exists() else False, within_s=LONG_S)
    slurm.run("scancel", job_id)
    slurm.until(lambda: not slurm.queue())
    assert [line for line in log.read_text().splitlines() if "turn" in line] == [
        "turn 0",
        "turn 0 has ended",
        "turn 1",
        "turn 1 has ended",
    ]


@pytest.mark.slow
@pytest.mark.harness
@pytest.mark.sandbox
def test_a_whole_campaign_is_submitted_with_one_command(slurm: SlurmCluster, desk: Desk) -> None:
    small = {f"launch.{job}.{key}": value for job in ("slurm", "campaign") for key, value in SMALL_JOB.items()}
    nothing_to_do = {"campaign.num_steps": 0, "campaign.eval_tasks": 0}
    command = desk.start(**{"launch": "slurm_cpu", "launch.slurm.watch_s": 1, **small, **nothing_to_do})
    assert command.wait(300) == 0, command.text()
    assert desk.run_paths().finished.exists()
    assert "finished; the trained policy is" in command.text()
    assert not slurm.queue()


@pytest.mark.slow
def test_an_element_of_a_sweep_runs_right_there(
    slurm: SlurmCluster, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    small = ("hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=1", f"hydra.sweep.dir={tmp_path}/sweep")
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    swept = terminal("env", path, "bash", "jobs/sweep.sh", "seed=0,1", *without_policy(tmp_path), *small)
    assert swept.process.wait(END_S) != 0
    assert swept.says(f"{tmp_path}/nowhere: no such policy folder")
    assert len([*(tmp_path / "sweep").glob("**/*_log.err")]) == 2
    assert not (tmp_path / "runs").exists()
