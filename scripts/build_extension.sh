#!/bin/sh
# Builds the extension module (release profile) and installs the package, editable, into .venv.
set -eu
cd "$(dirname "$0")/.."
: "${VIRTUAL_ENV:=$PWD/.venv}"
export VIRTUAL_ENV PYO3_PYTHON="$VIRTUAL_ENV/bin/python"
if [ -z "${SSL_CERT_FILE:-}" ] && [ -e /etc/ssl/certs/ca-certificates.crt ]; then
    export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# maturin and cargo say much; it is shown only when something is wrong.
if ! PATH="$VIRTUAL_ENV/bin:$PATH" maturin develop --uv --release --locked >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
fi
"$VIRTUAL_ENV/bin/python" -c 'import lakecache._core'
