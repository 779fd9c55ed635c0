"""Which hosts a Slurm job has, by what Slurm says. The commands here are scripts that say what Slurm 22.05 says."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from clawhpc.errors import LaunchError, UserError
from clawhpc.launch.allocation import check_own_name, choose_nodes, learner_hosts, make_hosts, read_addresses
from clawhpc.learner.hosts import THIS_HOST

NODES = """\
NodeName=gpu03 Arch=x86_64 CoresPerSocket=32 NodeAddr=10.0.0.3 NodeHostName=gpu03 Version=22.05.8 Comment=a b
NodeName=gpu04 CoresPerSocket=32 NodeAddr=gpu04.cluster NodeHostName=gpu04 Version=22.05.8
"""


def test_one_host_is_this_one_and_slurm_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert learner_hosts(1) == (THIS_HOST,)


def test_more_hosts_than_one_are_those_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UserError, match=r"learner\.num_nodes=2: .*sbatch --nodes=2 --ntasks-per-node=1"):
        learner_hosts(2)


def test_this_node_comes_first_and_the_others_in_slurms_order() -> None:
    assert choose_nodes(["n1", "n2", "n3"], "n2", 2) == ["n2", "n1"]
    assert choose_nodes(["n1", "n2", "n3"], "n1", 3) == ["n1", "n2", "n3"]


def test_a_job_with_too_few_nodes_is_told_with_what_to_ask_for() -> None:
    with pytest.raises(UserError, match=r"num_nodes=3: this Slurm job has 2 \(n1, n2\); ask for --nodes=3"):
        choose_nodes(["n1", "n2"], "n1", 3)


@pytest.mark.parametrize("here", ["", "login"])
def test_a_process_beside_its_job_is_told_how_to_start_in_it(here: str) -> None:
    with pytest.raises(UserError, match=r"on a node of its Slurm job \(n1, n2\).*srun --overlap"):
        choose_nodes(["n1", "n2"], here, 2)


def test_addresses_are_those_by_which_slurm_reaches_the_nodes() -> None:
    assert read_addresses(NODES) == {"gpu03": "10.0.0.3", "gpu04": "gpu04.cluster"}


def test_another_host_is_reached_by_a_step_that_knows_nothing_of_ours() -> None:
    ours = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SLURM_NTASKS": "4", "SRUN_CPUS_PER_TASK": "8"}
    addresses = {"gpu03": "10.0.0.3", "gpu04": "gpu04.cluster"}
    first, second = make_hosts(addresses, ("srun", "--overlap", "--jobid=7"), ours)
    assert (first.name, first.address, first.starter, first.environment) == ("gpu03", "10.0.0.3", (), None)
    assert (second.name, second.address) == ("gpu04", "gpu04.cluster")
    assert second.starter == ("srun", "--overlap", "--jobid=7", "--nodelist=gpu04")
    assert second.environment == {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}


def test_slurm_that_does_not_answer_is_told_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"scontrol show hostnames n\[1-2\]: Unable to contact"):
        learner_hosts(2)
    (tmp_path / "scontrol").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"scontrol: .*No such file"):
        learner_hosts(2)


def test_a_host_whose_own_name_leads_others_astray_is_told_what_to_set() -> None:
    names = {"node": "127.0.1.1", "good": "10.0.0.3"}
    check_own_name("good", "10.0.0.3", names.__getitem__, {})
    check_own_name("node", "127.0.0.1", names.__getitem__, {})
    check_own_name("node", "10.0.0.3", names.__getitem__, {"GLOO_SOCKET_IFNAME": "eth0"})
    with pytest.raises(UserError, match=r"own name, node, resolves to 127\.0\.1\.1.*GLOO_SOCKET_IFNAME"):
        check_own_name("node", "10.0.0.3", names.__getitem__, {})


def test_nor_does_one_without_a_name_that_resolves_lead_anybody_to_it() -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(name)

    with pytest.raises(UserError, match=r"own name, node, resolves to 127\.0\.0\.1"):
        check_own_name("node", "10.0.0.3", unknown, {})
