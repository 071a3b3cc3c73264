#!/usr/bin/env python3
"""Runs the test suite: most tests side by side, a process for each core, then those that measure time or memory.

    scripts/tests.py [PYTEST ARGUMENT...]

QUIRE_EFFORT says how much is tried: quick (the default), full or night. Arguments go to pytest in both groups, for
example `-k name`, `--seed N` or paths. Exit status 0 if nothing failed.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTHING_RAN = 5
"""pytest's exit status when its arguments chose no test."""


def main() -> int:
    """Both groups, one after the other, and what they took."""
    begun = time.monotonic()
    arguments = sys.argv[1:]
    pytest = [sys.executable, "-m", "pytest", "--durations=25"]
    cores = len(os.sched_getaffinity(0))
    alone = ["--alone=only"]
    if not any((ROOT / word.partition("::")[0]).exists() for word in arguments):
        # Only their files: importing all others takes as long as these tests do.
        alone += [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.alone" in file.read_text()]
    groups = (["--alone=without", f"--numprocesses={cores}", "--dist=worksteal"], alone)
    codes = [subprocess.run([*pytest, *arguments, *group], cwd=ROOT).returncode for group in groups]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{os.environ.get('QUIRE_EFFORT', 'quick')} suite: {time.monotonic() - begun:.0f} s,"
        f" {used.ru_utime + used.ru_stime:.0f} s of processor time, load {os.getloadavg()[0]:.1f}"
    )
    if all(code == NOTHING_RAN for code in codes):
        return NOTHING_RAN
    return max(code for code in codes if code != NOTHING_RAN)


if __name__ == "__main__":
    sys.exit(main())
