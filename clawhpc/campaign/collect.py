"""Have plans collected by workers, and watch it.

Learner and workers meet in files only, so the end of a collection can only be looked for, again and again.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from clawhpc.errors import LaunchError
from clawhpc.launch.pool import WorkerPool
from clawhpc.paths import RunPaths
from clawhpc.records import RolloutRecord, StepPlan
from clawhpc.store import count_rollouts, publish_plan, read_step, release_claims, set_aside, unsealed_groups

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Between two looks at the store."""
LOG_EVERY_S = 30.0
"""Between two lines about a collection that goes on, where there is no terminal to draw a bar on."""


class Collector:
    """Has plans collected by the workers of a pool."""

    def __init__(self, paths: RunPaths, pool: WorkerPool, stall_min: float, poll_s: float = POLL_S) -> None:
        self._paths = paths
        self._pool = pool
        self._stall_s = 60 * stall_min
        self._poll_s = poll_s

    def begin(self, plan: StepPlan) -> None:
        """Workers may collect `plan` from now on; `collect` waits for them later, and says what went wrong."""
        self._free_claims(publish_plan(self._paths, plan))

    def collect(self, plan: StepPlan) -> list[RolloutRecord]:
        """The rollouts of `plan`, in planned order; of one that was collected before, those.

        LaunchError when the workers die, when they do nothing, and when every rollout has failed; those are set aside,
        so that the same command collects them again.
        """
        plan = publish_plan(self._paths, plan)
        title = f"{plan.phase} {plan.step}"
        with Watch(title, plan.num_rollouts) as watch:
            while not self._is_whole(plan):
                at_work = self._free_claims(plan)
                if watch.show(count_rollouts(self._paths, plan), resting=not at_work) > self._stall_s:
                    raise LaunchError(f"{title}: no rollout has ended for {self._stall_s:.0f} s; {self._pool.logs()}")
                time.sleep(self._poll_s)
        records = read_step(self._paths, plan)
        try:
            check_verdicts(title, records)
        except LaunchError:
            log.info("%s: these rollouts are now in %s", title, set_aside(self._paths, plan))
            raise
        return records

    def _is_whole(self, plan: StepPlan) -> bool:
        """All can be read: what one host wrote may be seen here later than the manifest in which another names it."""
        return not unsealed_groups(self._paths, plan) and count_rollouts(self._paths, plan) == plan.num_rollouts

    def _free_claims(self, plan: StepPlan) -> frozenset[str]:
        """Free what dead workers have claimed of `plan`; those that are at work."""
        at_work = self._pool.check()
        if released := release_claims(self._paths, plan, at_work):
            log.info("%s %d: %d groups of dead workers are free again", plan.phase, plan.step, released)
        return at_work


class Watch:
    """Shows a collection: a bar on a terminal, else now and then a line in the log."""

    def __init__(self, title: str, num_rollouts: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, transient=True, disable=not sys.stdout.isatty())
        self._task = self._bar.add_task(f"collect {title}", total=num_rollouts)
        self._title, self._total = title, num_rollouts
        self._done = -1
        self._changed = self._logged = self._began = time.monotonic()

    def __enter__(self) -> Watch:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def show(self, num_done: int, *, resting: bool) -> float:
        """Say how far it is; seconds since it last went on.

        `resting`: nothing can, all workers being in the queue of a cluster. This is no time without progress.
        """
        now = time.monotonic()
        if num_done != self._done or resting:
            self._done, self._changed = num_done, now
            self._bar.update(self._task, completed=num_done)
        if self._bar.disable and now - self._logged > LOG_EVERY_S:
            self._logged = now
            why = "; no worker is at work" if resting else ""
            log.info("%s: %d/%d rollouts in %.0f s%s", self._title, num_done, self._total, now - self._began, why)
        return now - self._changed


def check_verdicts(title: str, records: Sequence[RolloutRecord]) -> None:
    """LaunchError when not one of `records` has a verdict: the machine is at fault, and going on would waste it."""
    if records and not any(record.verdict is not None for record in records):
        (outcome, detail), count = Counter((record.outcome, record.detail) for record in records).most_common(1)[0]
        raise LaunchError(f"{title}: all {len(records)} rollouts failed; {count} of them with {outcome}: {detail}")
