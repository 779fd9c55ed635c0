"""A campaign as a job of a real Slurm: submitted, followed, left, found again, cancelled, put back into the queue."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from clawhpc.config import EXIT_INTERRUPTED, EXIT_USER
from clawhpc.launch.campaign import submit_campaign
from clawhpc.launch.follow import follow
from clawhpc.launch.settings import CampaignJobSettings
from tests.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.slurm

SMALL = CampaignJobSettings(cpus_per_task=1, mem_gb=0.2)
END_S = 60.0
"""For a command to end."""
REPOSITORY = Path(__file__).parents[2]

# What `python -m clawhpc.train launch=slurm` does, with a command of the test's in place of the campaign.
COMMAND = """
import sys
from pathlib import Path
from clawhpc.config import one_line_errors, prepare_process, start_log
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
from clawhpc.config import one_line_errors, prepare_process
from clawhpc.launch.pool import WorkerPool
from clawhpc.ledger import Ledger
from tests.fakes.slurm_worker import StubWorker, stub_spec
from tests.integration.test_slurm_pool import settings_of
root = Path(sys.argv[1])
settings = settings_of(num_workers=2, array_parallelism=1, lease_s=600.0)
with one_line_errors():
    prepare_process()
    with Ledger.open(root / "ledger") as ledger, WorkerPool(settings, stub_spec(root / "run"), ledger, StubWorker):
        (root / "ready").touch()
        time.sleep(600)
"""

GOES_ON = """
if [ -n "$SLURM_RESTART_COUNT" ]; then echo second turn; exit 0; fi
trap 'echo first turn has ended; exit 130' TERM
echo first turn
sleep 100 & wait
"""


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


def test_what_ends_a_campaign_in_its_job_ends_the_command_with_the_same_line_and_exit_code(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    asked = (
        "launch=slurm_cpu",
        "launch.campaign.cpus_per_task=1",
        "launch.campaign.mem_gb=1",
        "launch.slurm.watch_s=0.3",
    )
    folders = (f"cache_dir={tmp_path}/cache", f"run.root={tmp_path}/runs", f"policy.folder={tmp_path}/nowhere")
    code, last_line = terminal(sys.executable, "-m", "clawhpc.train", *asked, *folders).end()
    assert code == EXIT_USER
    assert re.fullmatch(
        r"clawhpc: \S+/nowhere: no such policy folder.*: job \d+: FAILED on n\d; its log is .*", last_line
    )
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["jobs"]


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
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit_campaign(SMALL, 1, tmp_path / "job", ("bash", "-c", GOES_ON))
    until(lambda: job.log.exists() and "first turn\n" in job.log.read_text())
    slurm.run("scancel", "--signal=USR2", job.job_id)
    status, last_line = follow(job, watch_s=0.3)
    assert (status.state, last_line) == ("COMPLETED", "second turn")
    said = [line for line in capsys.readouterr().out.splitlines() if "turn" in line]
    assert said[0] == "first turn"
    assert said[1].endswith("goes on in the next turn of its job")
    assert said[2:] == ["first turn has ended", "second turn"]


def submit_script(slurm: SlurmCluster, folder: Path, *command: str, options: tuple[str, ...] = ()) -> tuple[str, Path]:
    """`sbatch jobs/campaign.sh`, small; the job, and its log."""
    small = ("--cpus-per-task=1", "--mem=200M", f"--chdir={REPOSITORY}", f"--output={folder}/%j.log", *options)
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    said = slurm.run("env", path, "sbatch", "--parsable", *small, str(REPOSITORY / "jobs/campaign.sh"), *command)
    return said.strip(), folder / f"{said.strip()}.log"


def test_in_a_job_of_the_users_own_script_the_campaign_runs_right_there(slurm: SlurmCluster, tmp_path: Path) -> None:
    folders = (f"cache_dir={tmp_path}/cache", f"run.root={tmp_path}/runs", f"policy.folder={tmp_path}/nowhere")
    job_id, log = submit_script(slurm, tmp_path, "train", "launch=slurm_cpu", *folders)
    slurm.until(lambda: slurm.state(job_id) == "FAILED")
    assert log.read_text().splitlines()[-1].startswith(f"clawhpc: {tmp_path}/nowhere: no such policy folder")
    assert not (tmp_path / "runs").exists()
