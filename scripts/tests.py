#!/usr/bin/env python3
"""Runs the test suite: most tests in parallel, one process per core, then the tests that measure time or memory.

    scripts/tests.py [--seconds N] [PYTEST ARGUMENT...]

QUIRE_EFFORT sets the effort: quick (the default), full or night. Arguments go to pytest in both groups, for example
`-k name`, `--seed N` or paths. --seconds skips tests that have not begun by then, over both groups. Exit status 0 if
nothing failed.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTHING_RAN = 5
"""pytest's exit status when its arguments chose no test."""

ALONE_SHARE = 0.2
"""Share of --seconds reserved for the tests that run alone; otherwise the first group would use all."""


def main() -> int:
    """Runs both groups, one after the other, and prints their time."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--seconds", type=float)
    given, arguments = parser.parse_known_args()
    pytest = [sys.executable, "-m", "pytest", "--durations=25"]
    cores = len(os.sched_getaffinity(0))
    alone = ["--alone=only"]
    if not any((ROOT / word.partition("::")[0]).exists() for word in arguments):
        # Only their files: importing all others would take as long as these tests.
        alone += [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.alone" in file.read_text()]
    groups = (["--alone=without", f"--numprocesses={cores}", "--dist=worksteal"], alone)
    codes, failed = [], []
    for group, share in zip(groups, (1 - ALONE_SHARE, 1), strict=True):
        if given.seconds is not None:
            group.append(f"--seconds={max(0.0, given.seconds * share - (time.monotonic() - begun)):.0f}")
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder, "record.xml")
            group.append(f"--junitxml={record}")
            codes.append(subprocess.run([*pytest, *arguments, *group], cwd=ROOT).returncode)
            failed += failures(record)
    for name in failed:
        print(f"failed: {name}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{os.environ.get('QUIRE_EFFORT', 'quick')} suite: {time.monotonic() - begun:.0f} s,"
        f" {used.ru_utime + used.ru_stime:.0f} s of processor time, load {os.getloadavg()[0]:.1f}"
    )
    return exit_status(codes)


def failures(record: Path) -> list[str]:
    """The failed tests from a run's JUnit record; empty without a record, as after a crash.

    Printed last, because a CI service may keep only the last lines.
    """
    try:
        cases = ElementTree.parse(record).iter("testcase")
    except (OSError, ElementTree.ParseError):
        return []
    return [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]


def exit_status(codes: Sequence[int]) -> int:
    """The exit status of a run from those of its groups. A signal (below 0) is a failure; a group without tests is
    not.
    """
    failed = [abs(code) for code in codes if code not in (0, NOTHING_RAN)]
    return max(failed) if failed else 0 if 0 in codes else NOTHING_RAN


if __name__ == "__main__":
    sys.exit(main())
