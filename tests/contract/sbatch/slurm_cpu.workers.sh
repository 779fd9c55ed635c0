#!/bin/bash

# Parameters
#SBATCH --account=mine
#SBATCH --array=0-2%3
#SBATCH --cpus-per-task=8
#SBATCH --error=FOLDER/%A_%a_0_log.err
#SBATCH --job-name=clawhpc
#SBATCH --mem=16GB
#SBATCH --nodes=1
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/%A_%a_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=1440
#SBATCH --wckey=submitit

# setup

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output FOLDER/%A_%a_%t_log.out --error FOLDER/%A_%a_%t_log.err --cpus-per-task=8 PYTHON -u -m submitit.core._submit FOLDER


# teardown
code=$?
PYTHON -m clawhpc.ledger "$SLURM_JOB_ID.$SLURMD_NODENAME.${SLURM_RESTART_COUNT:-0}" ''
exit $code