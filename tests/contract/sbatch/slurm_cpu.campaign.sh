#!/bin/bash

# Parameters
#SBATCH --account=mine
#SBATCH --cpus-per-task=8
#SBATCH --job-name=clawhpc-campaign
#SBATCH --mem=16GB
#SBATCH --nodes=2
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=1440
#SBATCH --wckey=submitit

# setup
export SUBMITIT_LOG_LEVEL=ERROR

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output FOLDER/%j_%t_log.out --nodes=1 --ntasks=1 --relative=0 --cpus-per-task=8 PYTHON -u -m submitit.core._submit FOLDER


# teardown
code=$?
PYTHON -m clawhpc.ledger "$SLURM_JOB_ID.$SLURMD_NODENAME.${SLURM_RESTART_COUNT:-0}" ''
exit $code