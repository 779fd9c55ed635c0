# The last lines of a task image's build.sh, with set -e, $workdir, and $passed, variables of the builder, who may have
# a password in their proxy's: what sandboxes need, and what loaders ask for.
mkdir -p /.clawhpc
(for name in $passed; do unset "$name"; done; exec env -0) > /.clawhpc/env
ls -A /root > /.clawhpc/home 2> /dev/null || :
is_original() { # of a distribution
  for its in "/usr/share/base-files/dot$1" "/etc/skel/$1"; do
    if [ -f "$its" ] && [ "$(cat "$its")" = "$(cat "/root/$1")" ]; then return 0; fi
  done
  return 1
}
for name in .bashrc .profile; do # a base or a RUN may have added to them, as conda does
  if [ -f "/root/$name" ] && ! is_original "$name"; then echo "$name changed" >> /.clawhpc/home; fi
done

if [ "$(readlink -f "$workdir")" != "$workdir" ]; then
  echo "clawhpc: the workspace, $workdir, is a link, or lies in one: name the folder itself" >&2
  exit 1
fi

usable() {
  # A sandbox has a HOME, a /tmp and a workspace of its own, so that no interpreter can be in these.
  case "$(readlink -f "$1")" in ''|/root/*|/tmp/*|/home/*|"$workdir"/*) return 1 ;; esac
  "$1" -I -S -c "import ctypes, json, resource, socket, sys, threading; sys.exit(not $2)" 2> /dev/null
}
find_python() { # 3.11 first, which harnesses from PyPI are installed for
  for fits in 'sys.version_info[:2] == (3, 11)' 'sys.version_info >= (3, 9)'; do
    for path in /usr/bin/python3 /usr/local/bin/python3 /opt/*/bin/python3 /usr/bin/python3.*; do
      if [ -x "$path" ] && usable "$path" "$fits"; then echo "$path" > /.clawhpc/python; return 0; fi
    done
  done
  return 1
}
ready() { find_python && command -v bash > /dev/null; }

if ! ready; then
  echo "clawhpc: a sandbox needs bash and a Python of 3.9 or newer: they are installed from the image's distribution"
  if command -v apt-get; then apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends bash python3
  elif command -v apk; then apk add --no-cache bash python3
  elif command -v dnf; then dnf install -y bash python3
  elif command -v microdnf; then microdnf install -y bash python3
  elif command -v zypper; then zypper --non-interactive install bash python3
  fi || :
  if ! ready; then
    echo "clawhpc: the image has no bash, or no Python of 3.9 or newer with ctypes outside /root, /home, /tmp and the workspace" >&2
    exit 1
  fi
fi

# All that is in an image belongs to who builds it, and can be read by them.
if command -v find > /dev/null; then find / -xdev ! -user 0 -exec chown -h 0:0 {} + 2> /dev/null || :; fi
chmod -R u+rX "$workdir" 2> /dev/null || :
for path in /.clawhpc/*; do
  case "$path" in */env|*/home|*/python) ;; *) rm -rf "$path" ;; esac
done
