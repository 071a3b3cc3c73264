"""Runs the tests of `triton_interpreter/` in a process of their own.

Triton decides between interpreter and compiler when a kernel is decorated, its own library's included, so one process
has either. This one keeps the compiler, for `test_triton_compile.py` and for GPUs. The interpreter is one thread of
Python, so as many run side by side as there are cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton_interpreter"


@pytest.mark.timeout(900)
def test_the_kernels_pass_in_the_interpreter(seed: int) -> None:
    pytest.importorskip("triton", reason="the interpreter comes with triton, which is not installed")
    settings = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--numprocesses=auto",
        "--maxprocesses=4",
        "--seed",
        str(seed),
        "--durations=5",
        str(FOLDER),
    ]
    done = subprocess.run(command, env=settings, cwd=FOLDER.parents[2], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, (
        f"repeat with TRITON_INTERPRET=1 pytest {FOLDER}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    )
