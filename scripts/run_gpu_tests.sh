#!/bin/sh
# Run the tests that need an NVIDIA GPU with the Python that has vLLM, torch and pytest:
#
#     scripts/run_gpu_tests.sh [LOGS] [pytest's arguments]
#
# The compiled module must lie in python/lakecache (scripts/build_extension.sh). PYTHON names the
# interpreter (default: python3); LOGS is a file for the engines' logs.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
lacking=$("$python" -c '
from importlib.util import find_spec
print(*(name for name in ("torch", "vllm", "pytest") if find_spec(name) is None))')
if [ -n "$lacking" ]; then
    echo "$python has no $lacking: name the Python that has vLLM for CUDA, and pytest, with PYTHON=." >&2
    exit 1
fi
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    export LAKECACHE_GPU_TESTS_LOGS="$1"
    shift
fi
export PYTHONPATH="$PWD/python:$PWD/scripts:$PWD/tests:$PWD/tests/gpu:$PWD/benches${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m pytest -m gpu -p no:cacheprovider --continue-on-collection-errors \
    --tb=short --durations=15 "$@"
