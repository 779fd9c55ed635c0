#!/bin/bash
# A campaign as a plain batch job, for who wants the script in their own hands. Edit the lines below, then:
#   sbatch jobs/campaign.sh train experiment=quickstart launch=slurm
# The first word is the command (sft, train or evaluate), the rest is handed to it; its workers are jobs of their own.
# Submit it where `python` is that of clawhpc (source .venv-gpu/bin/activate, say), in a folder that all nodes see.
# Out of time, preempted without a warning, or on a node that fails, it goes on with its run in its next turn, if conf/
# is still the same. `python -m clawhpc.train launch=slurm …` keeps the configuration, knows warnings, and shows the log.
#SBATCH --job-name=clawhpc-campaign
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=16G
#SBATCH --time=1-00:00:00
#SBATCH --output=campaign-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
# For a learner on GPUs, and where your site asks for them:
##SBATCH --gres=gpu:1
##SBATCH --partition=gpu
##SBATCH --account=my_project
set -euo pipefail

end() { # the campaign, and with it all that it has started; it takes some seconds
  kill -TERM "$campaign" || true
  wait "$campaign" || true
}
trap 'end; exit 143' TERM
trap 'end; scontrol requeue "$SLURM_JOB_ID"; exit 143' USR2

python -u -m "clawhpc.$1" "${@:2}" &
campaign=$!
wait "$campaign"
