#!/bin/bash
# Several campaigns as the elements of one Slurm array, from a login node:
#   bash jobs/sweep.sh experiment=mix_harness launch=slurm
#   bash jobs/sweep.sh experiment=quickstart launch=slurm_cpu campaign.seed=0,1 'run.name=seed_${campaign.seed}'
# Their policies must be there before: `python -m clawhpc.sft` with the same settings (`seed=`, unlike `campaign.seed=`, asks
# for another policy).
# Each element is a campaign of its own, in a run of its own; with launch=slurm its workers are jobs of their own. What
# an element asks for is hydra.launcher.*; edit it here.
set -euo pipefail

echo "an array of jobs, clawhpc-sweep in squeue; this waits for all of them, without a word: Ctrl-C leaves them in the queue"
echo "what they say: multirun/DATE/TIME/.submitit/JOBID/*.out"
exec python -m clawhpc.train --multirun \
  hydra/launcher=submitit_slurm \
  hydra.launcher.name=clawhpc-sweep \
  hydra.launcher.cpus_per_task=8 \
  hydra.launcher.mem_gb=16 \
  hydra.launcher.timeout_min=1440 \
  hydra.launcher.max_num_timeout=100 \
  hydra.launcher.array_parallelism=4 \
  "$@"
