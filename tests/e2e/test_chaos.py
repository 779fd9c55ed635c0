"""Campaigns of real commands, workers, proxies, harnesses, sandboxes, verifiers and learners, in which things die.

Every few seconds something is killed, in an order that a seed decides. Whatever it was, in the end each planned rollout
has exactly one record, and nothing is left but the run's folder.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.chaos_parts import Chaos, chaos_in, write_policy
from tests.chaos_store import Tally, check_store
from tests.chaos_strikes import LOCAL, SLURM, Strike, in_turns
from tests.sandbox_parts import missing
from tests.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.sandbox]

BRIEF: dict[str, Any] = {"between_s": (1.0, 2.5), "limit_s": 400.0, "rounds": 1}
LONG: dict[str, Any] = {"between_s": (1.5, 4.0), "limit_s": 1800.0, "rounds": 3}
"""Between two strikes, and for a campaign, on a busy machine with two cores. Each kind strikes once, and most do again:
how often is the machine's matter, for the campaign is over in its own time."""
BRIEF_LOCAL = (
    *("harness", "sandbox", "engine", "watchdog of a ledger"),
    *("worker, with its proxy", "second campaign, refused", "campaign, with its learner"),
)
BRIEF_SLURM = ("step daemon", "slurmd, and back", "element cancelled")


@pytest.fixture(scope="session")
def chaos_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("chaos"))


@pytest.fixture
def chaos_parts(chaos_policy: Path, cache_dir: Path) -> dict[str, Path]:
    if not list((cache_dir / "harness").glob("claude_code-*")):
        missing("Claude Code (containers/install_harness.sh claude_code CACHE_DIR)")
    return {"policy": chaos_policy, "cache_dir": cache_dir}


def survive(
    chaos: Chaos, strikes: dict[str, Strike], *, between_s: tuple[float, float], rounds: int, limit_s: float
) -> Tally:
    """The campaign finishes, whatever is done to it: in one round, most of it; in several, each kind at least once."""
    account = chaos.run(in_turns(strikes, chaos.seed, rounds), between_s=between_s, limit_s=limit_s)
    gone_s = chaos.wait_until_nothing_is_left()
    tally = check_store(chaos.paths, chaos.journal)
    print(f"\n{account}\nnothing left after {gone_s:.1f} s\n{tally}")
    share = len(account.strikes) / len(strikes)
    assert share == 1 if rounds > 1 else share > 0.5, f"it was over too soon: {account}"
    return tally


def test_of_a_campaign_in_which_everything_dies_once_each_rollout_is_there_once_and_nothing_is_left(
    ledger_root: Path, chaos_parts: dict[str, Path]
) -> None:
    few = {"campaign.groups_per_step": 3}
    with chaos_in(ledger_root, few, **chaos_parts, num_steps=2, seed=1) as chaos:
        tally = survive(chaos, {name: LOCAL[name] for name in BRIEF_LOCAL}, **BRIEF)
        assert {code for _, code, _ in chaos.account.endings} == {-signal.SIGKILL}
        assert (tally.groups, tally.rollouts) == (6, 12)


@pytest.mark.slurm
def test_of_a_campaign_on_slurm_whose_daemons_die_each_rollout_is_there_once_and_nothing_is_left(
    slurm: SlurmCluster, ledger_root: Path, chaos_parts: dict[str, Path]
) -> None:
    few = {"campaign.groups_per_step": 5}
    with chaos_in(ledger_root, few, **chaos_parts, num_steps=1, seed=1, cluster=slurm) as chaos:
        tally = survive(chaos, {name: SLURM[name] for name in BRIEF_SLURM}, **BRIEF)
        assert (tally.groups, tally.rollouts) == (5, 10)


@pytest.mark.slow
def test_a_campaign_of_forty_groups_survives_every_death_on_one_machine(
    ledger_root: Path, chaos_parts: dict[str, Path]
) -> None:
    with chaos_in(ledger_root, {}, **chaos_parts, num_steps=5, num_heldout=4, seed=2) as chaos:
        assert survive(chaos, LOCAL, **LONG).groups == 48


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.apptainer
def test_a_campaign_of_forty_groups_survives_every_death_on_slurm(
    slurm: SlurmCluster, ledger_root: Path, chaos_parts: dict[str, Path]
) -> None:
    kind = {"sandbox": "apptainer"}
    with chaos_in(ledger_root, kind, **chaos_parts, num_steps=5, num_heldout=4, seed=3, cluster=slurm) as chaos:
        assert survive(chaos, SLURM, **LONG).groups == 48
