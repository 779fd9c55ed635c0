"""Train a policy inside its harnesses: python -m clawhpc.train experiment=quickstart"""

from __future__ import annotations

from pathlib import Path

import msgspec

from clawhpc.campaign.run import finished_before
from clawhpc.config import RunConfig, entry_point, open_campaign
from clawhpc.job import as_campaign
from clawhpc.launch.allocation import learner_hosts
from clawhpc.launch.turn import this_turn
from clawhpc.tasks.sets import load_task_sets


def train(config: RunConfig) -> None:
    """Evaluate, train, evaluate. The run's folder holds everything; after a kill the same command goes on."""
    folder = Path(config.run.root) / config.run.name
    if finished_before(folder, msgspec.yaml.encode(config), this_turn()):
        return
    policy = config.policy_source()
    hosts = learner_hosts(config.learner.num_nodes, srun=config.launch.campaign.srun)
    tasks = load_task_sets(config.tasks, Path(config.cache_dir))
    with open_campaign(config, tasks, folder) as campaign:
        campaign.run(config.learner_settings(), config.credit, policy, hosts)


main = entry_point(as_campaign(train))

if __name__ == "__main__":
    main()
