"""Train a policy inside its harnesses: python -m clawhpc.train experiment=quickstart"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from clawhpc.config import RunConfig, entry_point

log = logging.getLogger(__name__)


def train(config: RunConfig) -> None:
    """Evaluate, train, evaluate; the run's folder holds everything, and is gone on with by the same command."""
    from clawhpc.campaign.collect import Collector
    from clawhpc.campaign.loop import Campaign
    from clawhpc.campaign.run import open_run
    from clawhpc.launch.pool import WorkerPool
    from clawhpc.ledger import Ledger
    from clawhpc.tasks.sets import load_task_sets

    policy = config.policy_folder()
    tasks = load_task_sets(config.tasks, Path(config.cache_dir))
    with (
        open_run(Path(config.run.root) / config.run.name, msgspec.yaml.encode(config)) as paths,
        Ledger.open(config.scratch_root()) as ledger,
        WorkerPool(config.launch, config.worker_spec(paths.root), ledger) as pool,
    ):
        log.info("run %s: %d tasks to train on, %d held out", paths.root, len(tasks.train), len(tasks.heldout))
        campaign = Campaign(
            config.campaign,
            paths=paths,
            collector=Collector(paths, pool, config.campaign.stall_min),
            tasks=tasks,
            harnesses=config.harness.names,
        )
        campaign.run(config.learner, config.credit, policy)
        log.info("run %s has finished", paths.root)


main = entry_point(train)

if __name__ == "__main__":
    main()
