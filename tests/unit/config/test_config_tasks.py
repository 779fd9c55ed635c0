"""What a run says of its tasks before it begins."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from clawhpc.config import RunConfig, check_tasks
from tests.fakes.records import make_task


@pytest.mark.parametrize(("times", "said"), [((None, 60.0, 100.0), ()), ((60.0, 101.0, 900.0), ("2 tasks",))])
def test_tasks_that_the_limits_cut_short_are_counted(
    times: tuple[float | None, ...], said: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    config = RunConfig()
    assert config.limits.harness_s == 100.0
    with caplog.at_level(logging.WARNING):
        check_tasks(config, [replace(make_task(), run_s=seconds) for seconds in times])
    expected = tuple(f"{count} would give a harness more than limits.deadline_s leaves it, 100 s" for count in said)
    assert tuple(record.getMessage() for record in caplog.records) == expected
