#!/bin/bash
# debian_base.sh DIR
#
# Makes DIR a Debian 12 root file system with the packages of base.def, from Debian's own packages, as root on Debian. For machines
# that reach no image registry: it is the BOOTSTRAP=localimage of base.def, and works as sandbox.image by itself. A second call
# does nothing.
set -euo pipefail
target=${1:?usage: debian_base.sh DIR}
if [ -d "$target" ]; then exit 0; fi

command -v mmdebstrap >/dev/null || { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends mmdebstrap >/dev/null; }
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sed -n 1p)

mkdir -p "$(dirname "$target")"
new=$(mktemp -d "$target.XXXXXX"); trap 'rm -rf "$new"' EXIT
mmdebstrap --quiet --variant=minbase --include=python3,git,curl,procps,ca-certificates \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt=force-unsafe-io bookworm "$new/root" "${mirror:?apt knows no Debian mirror}"
rm -rf "$new"/root/dev/*     # Apptainer and bubblewrap make their own, and may not copy these
chown -R 0:0 "$new/root"     # a user namespace knows one user
mv "$new/root" "$target"
