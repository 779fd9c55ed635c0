"""Several processes that learn together say the same as one, and none is left or waited for when one is gone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from clawhpc.errors import LaunchError
from clawhpc.learner.ranks import NOTICE_S, Ranks, lead_ranks

ROOT = Path(__file__).parents[3]


def lead(command: Sequence[str], logs: Path, size: int = 2) -> AbstractContextManager[Ranks]:
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return lead_ranks(size, command, logs=logs, environment=environment, cuda=False)


def rank(script: str) -> list[str]:
    return [sys.executable, "-m", "tests.fakes.rank", script]


def test_one_rank_by_itself_says_things_to_itself() -> None:
    ranks = Ranks()
    assert ranks.first
    assert ranks.scatter(["mine"]) == "mine"
    assert ranks.gather("mine") == ["mine"]
    assert ranks.broadcast("mine") == "mine"
    assert ranks.add(torch.ones(2)).tolist() == [1.0, 1.0]


def test_ranks_scatter_gather_broadcast_and_add(tmp_path: Path) -> None:
    with lead(rank("exchange"), tmp_path, size=3) as ranks:
        assert ranks.scatter([1, 2, 3]) == 1
        assert ranks.gather(10) == [10, 20, 30]
        assert ranks.broadcast("all") == "all"
        sums = ranks.gather(ranks.add(torch.tensor([5.0, 0.0])))
        assert [each.tolist() for each in sums] == [[5.0, 3.0]] * 3
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("script", "how"),
    [("die", "rank 1 of the learner was killed by SIGKILL"), ("fail", "exit code 1: ValueError: a reason; ")],
)
def test_a_rank_that_is_gone_is_named_with_its_log_and_not_waited_for(script: str, how: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=how) as caught, lead(rank(script), tmp_path) as ranks:  # noqa: PT012
        began = time.monotonic()
        ranks.gather(0)
    assert str(tmp_path / "rank-1.log") in str(caught.value)
    assert time.monotonic() - began < NOTICE_S


def test_a_rank_that_does_not_come_is_named_with_what_it_said(tmp_path: Path) -> None:
    absent = [sys.executable, "-c", "import sys; sys.exit('no GPU here')"]
    with pytest.raises(LaunchError, match="exit code 1: no GPU here; its log"), lead(absent, tmp_path):
        pytest.fail("nobody has met")


def test_an_error_of_rank_0_ends_the_others_and_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), lead(rank("wait"), tmp_path) as ranks:  # noqa: PT012
        pid = ranks.gather(0)[1]
        raise KeyError("mine")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
