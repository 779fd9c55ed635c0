#!/bin/bash

# Parameters
#SBATCH --account=mine
#SBATCH --array=0-2%3
#SBATCH --cpus-per-task=96
#SBATCH --error=FOLDER/%A_%a_0_log.err
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=clawhpc
#SBATCH --mem=1024GB
#SBATCH --nodes=1
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/%A_%a_0_log.out
#SBATCH --partition=batch
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=1440
#SBATCH --wckey=submitit

# setup

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output FOLDER/%A_%a_%t_log.out --error FOLDER/%A_%a_%t_log.err --cpus-per-task=96 PYTHON -u -m submitit.core._submit FOLDER


# teardown
code=$?
PYTHON -m clawhpc.ledger "$SLURM_JOB_ID.$SLURMD_NODENAME.${SLURM_RESTART_COUNT:-0}" ''
exit $code