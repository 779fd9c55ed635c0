"""Train a policy inside its harnesses: python -m clawhpc.train experiment=quickstart"""

from __future__ import annotations

from pathlib import Path

from clawhpc.config import RunConfig, entry_point, open_campaign
from clawhpc.job import as_campaign
from clawhpc.tasks.sets import load_task_sets


def train(config: RunConfig) -> None:
    """Evaluate, train, evaluate. The run's folder holds everything; after a kill the same command goes on."""
    policy = config.policy_source()
    tasks = load_task_sets(config.tasks, Path(config.cache_dir))
    with open_campaign(config, tasks, Path(config.run.root) / config.run.name) as campaign:
        campaign.run(config.learner_settings(), config.credit, policy)


main = entry_point(as_campaign(train))

if __name__ == "__main__":
    main()
