"""The hosts of the Slurm job that this process is in, for the ranks of the learner.

The job is there, and holds what it has asked for; a rank on another of its hosts is a step of it that shares all of
that with whatever else runs there.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence

from clawhpc.errors import LaunchError, UserError
from clawhpc.launch.executor import ALSO_OF_OTHERS
from clawhpc.launch.states import run
from clawhpc.learner.hosts import LOOPBACK, THIS_HOST, Host

STEP = (
    *("srun", "--overlap", "--nodes=1", "--ntasks=1"),
    *("--cpu-bind=none", "--mpi=none", "--input=none", "--export=ALL"),
)
"""Starts a command in the job, but for where. A step that did not overlap would wait for the others to end."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK_NET = "127."


def learner_hosts(num_nodes: int, srun: Sequence[str] = ()) -> tuple[Host, ...]:
    """This host, then others of this job in Slurm's order, `num_nodes` in all; `srun` has more options for its steps.

    UserError where this is no job, or one that has not as many; LaunchError where Slurm does not answer.
    """
    if num_nodes == 1:
        return (THIS_HOST,)
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        raise UserError(
            f"learner.num_nodes={num_nodes}: the learner's hosts are those of a Slurm job, and this is none; "
            f"with launch=slurm it becomes one, and so it does in sbatch --nodes={num_nodes} --ntasks-per-node=1"
        )
    nodes = ask("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    names = choose_nodes(nodes, os.environ.get("SLURMD_NODENAME", ""), num_nodes)
    addresses = read_addresses(ask("scontrol", "--oneliner", "show", "node", ",".join(names)))
    check_own_name(socket.gethostname(), addresses[names[0]], socket.gethostbyname, os.environ)
    step = (*STEP, f"--jobid={job_id}", *srun)
    return make_hosts({name: addresses[name] for name in names}, step, os.environ)


def choose_nodes(nodes: list[str], here: str, num_nodes: int) -> list[str]:
    """`here`, then the first of the other `nodes`. UserError where they are too few, or `here` is none of them."""
    if len(nodes) < num_nodes:
        raise UserError(
            f"learner.num_nodes={num_nodes}: this Slurm job has {len(nodes)} ({', '.join(nodes)}); "
            f"ask for --nodes={num_nodes} --ntasks-per-node=1"
        )
    if here not in nodes:
        raise UserError(
            f"learner.num_nodes={num_nodes}: this process must run on a node of its Slurm job ({', '.join(nodes)}), "
            "as that of a batch script does; within salloc, put srun --overlap --nodes=1 --ntasks=1 before the command"
        )
    return [here, *(node for node in nodes if node != here)][:num_nodes]


def read_addresses(text: str) -> dict[str, str]:
    """The address of each node, by name, in what `scontrol --oneliner show node` prints."""
    return dict(re.findall(r"^NodeName=(\S+) .*?\bNodeAddr=(\S+)", text, re.MULTILINE))


def make_hosts(addresses: Mapping[str, str], step: Sequence[str], environment: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts with these names and addresses. Only the first, which is this one, is reached without a `step`."""
    first, *others = addresses
    plain = without_own_job(environment)
    return (
        Host(name=first, address=addresses[first]),
        *(
            Host(name=name, address=addresses[name], starter=(*step, f"--nodelist={name}"), environment=plain)
            for name in others
        ),
    )


def without_own_job(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment`, less what says how this process was started: srun would take it for what is wanted of it."""
    return {
        key: value
        for key, value in environment.items()
        if not key.startswith(("SLURM", "SRUN")) or key in ALSO_OF_OTHERS
    }


def check_own_name(name: str, address: str, resolve: Callable[[str], str], environment: Mapping[str, str]) -> None:
    """UserError where gloo would listen at the loopback address, though other hosts go to `address`.

    It goes by what the `name` of its own host resolves to, unless its variable names an interface (torch's
    ProcessGroupGloo::createDefaultDevice); 127.0.1.1 is what Debian's installer writes into /etc/hosts.
    """
    if GLOO_INTERFACE in environment or address.startswith(LOOPBACK_NET):
        return
    try:
        own = resolve(name)
    except OSError:
        own = LOOPBACK  # gloo's choice then
    if own.startswith(LOOPBACK_NET):
        raise UserError(
            f"this host's own name, {name}, resolves to {own}, where ranks on other hosts would not find it; "
            f"name the network interface in the environment: {GLOO_INTERFACE}=eth0, say"
        )


def ask(*command: str) -> str:
    """What Slurm says."""
    try:
        answer = run([*command])
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"{command[0]}: {error}") from error
    if answer.returncode:
        raise LaunchError(f"{' '.join(command)}: {answer.stderr.strip()}")
    return answer.stdout
