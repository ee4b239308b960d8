#!/bin/sh
# Compares python/lakecache/_core.pyi with the extension module that was built.
set -eu
cd "$(dirname "$0")/.."
if [ ! -e python/lakecache/_core.pyi ]; then
    echo "stubtest: skipped, there is no python/lakecache/_core.pyi yet"
    exit 0
fi
exec "${VIRTUAL_ENV:-$PWD/.venv}/bin/python" -m mypy.stubtest lakecache._core \
    --concise --ignore-disjoint-bases
