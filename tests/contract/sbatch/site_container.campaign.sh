#!/bin/bash

# Parameters
#SBATCH --account=mine
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=1
#SBATCH --job-name=clawhpc-campaign
#SBATCH --mem=64GB
#SBATCH --nodes=2
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/%j_0_log.out
#SBATCH --partition=batch
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=1440
#SBATCH --wckey=submitit

# setup
export SUBMITIT_LOG_LEVEL=ERROR

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output FOLDER/%j_%t_log.out --nodes=1 --ntasks=1 --relative=0 --cpus-per-task=16 --container-image=/images/clawhpc.sqsh --container-mounts=/home,/scratch --no-container-mount-home PYTHON -u -m submitit.core._submit FOLDER


# teardown
code=$?
PYTHON -m clawhpc.ledger "$SLURM_JOB_ID.$SLURMD_NODENAME.${SLURM_RESTART_COUNT:-0}" ''
exit $code