#!/bin/sh
# Checks what cannot be installed from here; prints the Python to use, or one sentence per problem.
# usage: prerequisites.sh     (PYTHON=... chooses the interpreter)
set -u
cd "$(dirname "$0")/.." || exit 1
failed=0
fail() {
    echo "prerequisite: $1" >&2
    failed=1
}

[ "$(uname -sm)" = "Linux x86_64" ] || fail "LakeCache is built and tested on Linux x86_64 only."

for tool in gcc make git; do
    command -v "$tool" >/dev/null 2>&1 || fail "$tool was not found: install it (Debian: apt-get install $tool)."
done

# The newest language level that the workspace asks for.
wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
if ! have=$(cargo --version 2>/dev/null | cut -d' ' -f2) || [ -z "$have" ]; then
    fail "cargo was not found: install stable Rust with rustup (https://rustup.rs)."
elif [ "$(printf '%s\n' "$wanted" "$have" | sort -V | head -n 1)" != "$wanted" ]; then
    fail "cargo $have is too old, $wanted or newer is needed: run 'rustup update stable'."
else
    for part in clippy fmt; do
        cargo "$part" --version >/dev/null 2>&1 ||
            fail "cargo $part was not found: run 'rustup component add clippy rustfmt'."
    done
fi

python=
for candidate in ${PYTHON:-python3.11 python3.12 python3 "$HOME"/.pyenv/versions/3.1[12]*/bin/python3}; do
    # Executed, not only found: a version manager's stub may exist without its interpreter.
    if "$candidate" -c '
import sys, venv, ensurepip, ctypes
sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1; then
        # Not a virtual environment's: that one may be about to be made anew.
        python=$("$candidate" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))')
        break
    fi
done
[ -n "$python" ] ||
    fail "Python 3.11 or 3.12 with venv was not found: install it (Debian: apt-get install python3-venv) or name it with PYTHON=."

[ "$failed" -eq 0 ] || exit 1
echo "$python"
