#!/bin/bash

# Parameters
#SBATCH --account=mine
#SBATCH --array=0-2%3
#SBATCH --constraint=h200
#SBATCH --cpus-per-task=16
#SBATCH --error=FOLDER/%A_%a_0_log.err
#SBATCH --gres=gpu:h200:1
#SBATCH --job-name=clawhpc
#SBATCH --mem=64GB
#SBATCH --nice=100
#SBATCH --nodes=1
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/%A_%a_0_log.out
#SBATCH --partition=gpu
#SBATCH --qos=normal
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=720
#SBATCH --wckey=submitit

# setup
module load cuda

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output FOLDER/%A_%a_%t_log.out --error FOLDER/%A_%a_%t_log.err --cpus-per-task=16 PYTHON -u -m submitit.core._submit FOLDER


# teardown
code=$?
PYTHON -m clawhpc.ledger "$SLURM_JOB_ID.$SLURMD_NODENAME.${SLURM_RESTART_COUNT:-0}" ''
exit $code