"""The script that runs the tests for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run_gpu_tests.sh"


def test_a_python_without_vllm_is_refused_in_one_sentence(tmp_path):
    bare = tmp_path / "python"
    # Without its packages.
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = subprocess.run(
        [str(SCRIPT)],
        env={**os.environ, "PYTHON": str(bare)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"{bare} has no torch vllm pytest: ")
    assert done.stderr.count("\n") == 1
