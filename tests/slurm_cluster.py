"""A real Slurm for the tests, of virtual nodes on this machine: munge, MariaDB, slurmdbd, slurmctld, a slurmd per node.

`containers/install_parts.sh` installs the programs. Each cluster has a folder, a munge key and ports of its own, so
that several may run at once; nothing of the configuration of the machine is read or written. Its daemons belong to a
ledger: after a SIGKILL of the tests nothing of them is left either, their jobs included.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clawhpc.ledger import Ledger, kill_marked
from tests.sandbox_parts import missing

PROGRAMS = ("munged", "mariadb-install-db", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "sbatch", "sacctmgr")
NODES = ("n1", "n2", "n3")
CPUS_PER_NODE = 8
GPUS_PER_NODE = 4
START_S = 60.0
"""For one daemon to answer, on a machine that is busy."""
COMMAND_S = 60.0
"""For one command of Slurm."""
STOP_S = 20.0
"""For one daemon to end."""
POLL_S = 0.05

# What differs from Slurm's defaults, and why:
#   cred_expire          also delays a requeued job: of the default, 120 s
#   AccountingStoragePass else sacct looks for munge's usual socket, for minutes
#   config_overrides     a node may have more CPUs than this machine
#   SlurmdTimeout        how soon a node that is silent is down; KillWait: how long SIGTERM has before SIGKILL
#   low_warned           its jobs are told some time before they are preempted
#   sched_*, bf_*        a job starts when it can, not at the next look
SLURM_CONF = """\
ClusterName=claw
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/{accounting}
{accounting_host}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1,bf_continue
SlurmdParameters=config_overrides
GresTypes=gpu
JobRequeue=1
ReturnToService=2
KillWait=3
MaxArraySize=10001
SlurmctldTimeout=10
SlurmdTimeout=10
TreeWidth=2
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=low_warned Nodes=ALL DefaultTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=ALL MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""
NODE_CONF = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=8000 "
    "Gres=gpu:h200:{gpus} State=UNKNOWN\n"
)
ACCOUNTING_HOST = """\
AccountingStorageHost=localhost
AccountingStoragePort={dbd_port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageTRES=gres/gpu
"""
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdPort={dbd_port}
SlurmUser={user}
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm_acct_db
"""


def until(what: Callable[[], bool], within_s: float = START_S, say: Callable[[], str] = str) -> None:
    """Return when `what` is true; fail with what `say` returns after `within_s`."""
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, say()
        time.sleep(POLL_S)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody has at this moment, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@dataclass
class SlurmCluster:
    """One cluster; its commands work with `environment`."""

    ledger: Ledger
    accounting: bool = True
    nodes: Sequence[str] = NODES
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """All of its files."""
        return self.ledger.scratch

    @property
    def environment(self) -> dict[str, str]:
        """What differs from this process's own; jobs that are submitted with it carry the ledger's marker."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), **self.ledger.environment}

    def start(self) -> None:
        """Every node is idle when this returns."""
        self._write_configuration()
        self._start("munged", *self._munged(), ready=(self.folder / "munge.socket").exists)
        if self.accounting:
            self._start_accounting()
        self._start("slurmctld", "slurmctld", "-D", ready=lambda: self._answers("sinfo"))
        for node in self.nodes:
            self.start_node(node)
        self.until(lambda: self.node_states() == dict.fromkeys(self.nodes, "idle"))

    def stop(self) -> None:
        """End its jobs, then its daemons, the last one first."""
        if "slurmctld" in self.daemons:
            with suppress(AssertionError):
                self.clear()
        for name in reversed(list(self.daemons)):
            self._stop(name)

    def start_node(self, node: str) -> None:
        """The slurmd of `node`, new or again; it registers by itself."""
        self._start(node, "slurmd", "-D", "-N", node, marker=self._node_marker(node))

    def kill_node(self, node: str) -> None:
        """As a power cut: its slurmd, and every step and process of its jobs, at once and by SIGKILL."""
        assert kill_marked(self._node_marker(node), deadline_s=STOP_S) == []
        self.daemons.pop(node).wait(STOP_S)

    def run(self, *command: object, within_s: float = COMMAND_S) -> str:
        """What a command of Slurm prints. AssertionError, with what it said, if it fails."""
        done = subprocess.run(
            list(map(str, command)),
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=within_s,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def node_states(self) -> dict[str, str]:
        """Of every node in the partition `main`, by name: idle, mixed, allocated, down*, …"""
        rows = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T").splitlines()
        return dict(row.split() for row in rows)

    def queue(self) -> dict[str, str]:
        """The state of every job and array element that is pending, runs or is ending, by its id."""
        rows = self.run("squeue", "--noheader", "--array", "--format=%i %T").splitlines()
        return dict(row.split() for row in rows)

    def state(self, job_id: str) -> str:
        """The last state of a job by the accounting: COMPLETED, FAILED, CANCELLED by 0, TIMEOUT, NODE_FAIL, …"""
        return self.run("sacct", "--noheader", "--allocations", "--parsable2", "--format=State", "-j", job_id).strip()

    def clear(self) -> None:
        """No job is left when this returns."""
        self.run("scancel", f"--user={getpass.getuser()}")
        self.until(lambda: not self.queue())

    def until(self, what: Callable[[], bool], within_s: float = START_S) -> None:
        """Return when `what` is true; fail, with the state of the cluster, after `within_s`."""
        until(what, within_s, lambda: f"{self.queue()} {self.node_states()} {self.logs()}")

    def logs(self) -> str:
        """The last lines of each daemon's log."""
        return "\n".join(f"{path.name}: {path.read_text()[-500:]}" for path in sorted(self.folder.glob("*.log")))

    def _write_configuration(self) -> None:
        ctld_port, dbd_port, *node_ports = free_ports(2 + len(self.nodes))
        host, user = socket.gethostname().partition(".")[0], getpass.getuser()
        values = {"folder": self.folder, "host": host, "user": user, "ctld_port": ctld_port, "dbd_port": dbd_port}
        values["accounting"] = "slurmdbd" if self.accounting else "none"
        values["accounting_host"] = ACCOUNTING_HOST.format(**values) if self.accounting else ""
        node_lines = [
            NODE_CONF.format(name=name, host=host, port=port, cpus=CPUS_PER_NODE, gpus=GPUS_PER_NODE)
            for name, port in zip(self.nodes, node_ports, strict=True)
        ]
        self._write("slurm.conf", SLURM_CONF.format(**values) + "".join(node_lines))
        self._write("slurmdbd.conf", SLURMDBD_CONF.format(**values))
        self._write("munge.key", os.urandom(64).hex())
        self._write("gres.conf", f"Name=gpu Type=h200 File={self.folder}/gpu[0-{GPUS_PER_NODE - 1}]\n")
        for gpu in range(GPUS_PER_NODE):
            (self.folder / f"gpu{gpu}").symlink_to("/dev/null")
        for folder in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / folder).mkdir()

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o600)

    def _munged(self) -> list[str]:
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        files["log-file"] = "munged.messages"
        return ["munged", "--foreground", "--force", *(f"--{key}={self.folder / name}" for key, name in files.items())]

    def _start_accounting(self) -> None:
        data, database_socket, user = self.folder / "mysql", self.folder / "mysql.socket", getpass.getuser()
        data.mkdir()
        common = ("--no-defaults", f"--user={user}", f"--datadir={data}")
        self.run("mariadb-install-db", *common, "--auth-root-authentication-method=socket", "--skip-test-db")
        small = ("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=0")
        network = ("--skip-networking", f"--socket={database_socket}", f"--pid-file={self.folder / 'mysql.pid'}")
        self._start("mariadbd", "mariadbd", *common, *small, *network, ready=database_socket.exists)
        self._start("slurmdbd", "slurmdbd", "-D", ready=lambda: self._answers("sacctmgr", "show", "cluster"))

    def _start(self, name: str, *command: str, ready: Callable[[], bool] = lambda: True, marker: str = "") -> None:
        """A daemon in the foreground, and so our child."""
        environment = {**os.environ, **self.environment, "MYSQL_UNIX_PORT": str(self.folder / "mysql.socket")}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command,
                env={**environment, "CLAWHPC_NODE": marker},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not ready():
            assert self.daemons[name].poll() is None, f"{name} has ended: {self.logs()}"
            assert time.monotonic() < deadline, f"{name} does not answer: {self.logs()}"
            time.sleep(POLL_S)

    def _stop(self, name: str) -> None:
        daemon = self.daemons.pop(name)
        daemon.terminate()
        try:
            daemon.wait(STOP_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(STOP_S)

    def _answers(self, *command: str) -> bool:
        try:
            self.run(*command)
        except AssertionError:
            return False
        return True

    def _node_marker(self, node: str) -> str:
        return f"{self.folder.name}-{node}-"


@pytest.fixture(scope="session")
def slurm_programs() -> None:
    """The programs are there."""
    absent = [program for program in PROGRAMS if not shutil.which(program)]
    if absent:
        missing(f"Slurm with accounting: no {', '.join(absent)} on PATH")


@pytest.fixture(scope="session")
def slurm_cluster(slurm_programs: None) -> Iterator[SlurmCluster]:
    """One cluster for all tests of a run."""
    with Ledger.open(Path(f"/tmp/clawhpc-slurm-{os.getuid()}")) as ledger:
        cluster = SlurmCluster(ledger)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The cluster, known to this process and what it starts; no job of a test outlives it."""
    for key, value in slurm_cluster.environment.items():
        monkeypatch.setenv(key, value)
    yield slurm_cluster
    slurm_cluster.clear()
