#!/bin/bash
# install_apptainer.sh PREFIX
#
# Installs a real, rootless Apptainer below PREFIX on Debian 12 (x86-64), as root. Debian has it in sid only, so its package is
# taken from there with package lists of its own: the machine's sources and installed packages stay on their release.
# The package wants glibc 2.38 for two functions only; lower_glibc.py points them at those of Debian 12.
# A second call does nothing. On a cluster, use the cluster's Apptainer instead (>= 1.2, found on PATH).
set -euo pipefail
prefix=${1:?usage: install_apptainer.sh PREFIX}
here=$(cd "$(dirname "$0")" && pwd)

if "$prefix/bin/apptainer" --version 2>/dev/null; then exit 0; fi

helpers=(squashfs-tools squashfuse fuse-overlayfs fuse2fs fuse3 uidmap e2fsprogs libseccomp2 libsqlite3-0 ca-certificates)
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${helpers[@]}" >/dev/null

work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sed -n 1p)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:?apt knows no Debian mirror} sid main" >"$work/sid.list"
from_sid=(-o Dir::Etc::SourceList="$work/sid.list" -o Dir::Etc::SourceParts=/dev/null
  -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root)
apt-get "${from_sid[@]}" -qq update
(cd "$work" && apt-get "${from_sid[@]}" -qq download apptainer)
dpkg-deb -x "$work"/apptainer_*.deb "$work/package"

# Laid out beside the prefix and renamed, so that an interrupted install leaves nothing half-written.
mkdir -p "$(dirname "$prefix")"
new=$(mktemp -d "$prefix.XXXXXX"); trap 'rm -rf "$work" "$new"' EXIT
chmod 755 "$new"
cp -a "$work/package/usr/." "$work/package/etc" "$work/package/var" "$new/"
python3 "$here/lower_glibc.py" "$new/bin/apptainer" "$new/lib/x86_64-linux-gnu/apptainer/bin/starter"
for folder in etc var bin; do ln -sfn "../$folder" "$new/lib/$folder"; done # a moved starter looks for them below lib
rm -rf "$prefix"; mv "$new" "$prefix"

[ -e /dev/fuse ] || mknod /dev/fuse c 10 229
chmod 666 /dev/fuse # often 0600: then only root can mount a .sif
"$prefix/bin/apptainer" --version
