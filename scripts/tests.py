#!/usr/bin/env python3
"""Runs the test suite: most tests in parallel, one process per core, then the tests that measure time or memory.

    scripts/tests.py [--seconds N] [PYTEST ARGUMENT...]

QUIRE_EFFORT sets the effort: quick (the default), full or night. Arguments go to pytest in both groups, for example
`-k name`, `--seed N` or paths. --seconds skips tests that have not begun by then, over both groups. Exit status 0 if
nothing failed. Ctrl-C ends it within seconds, with all processes of pytest, and exit status 130.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
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

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

END_SECONDS = 3.0
"""How long interrupted processes may take to end, before they are killed. A process of pytest-xdist that collects reads
no message until it has imported all tests, which takes up to half a minute."""

TYPED = ("--pdb", "--trace", "-s", "--capture=no")
"""Arguments with which pytest may read what is typed. It must then be in the terminal's own group of processes."""

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
            try:
                codes.append(run([*pytest, *arguments, *group], is_typed=not set(TYPED).isdisjoint(arguments)))
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                return INTERRUPTED
            failed += failures(record)
    for name in failed:
        print(f"failed: {name}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{os.environ.get('QUIRE_EFFORT', 'quick')} suite: {time.monotonic() - begun:.0f} s,"
        f" {used.ru_utime + used.ru_stime:.0f} s of processor time, load {os.getloadavg()[0]:.1f}"
    )
    return exit_status(codes)


def run(command: Sequence[str], *, is_typed: bool = False) -> int:
    """The exit status of a command. If this process is interrupted or ended, so are the command and what it started.

    is_typed  whether the command may read what is typed; then Ctrl-C reaches it without us
    """
    signal.signal(signal.SIGTERM, _interrupt)
    process = subprocess.Popen(command, cwd=ROOT, process_group=None if is_typed else 0)
    try:
        return process.wait()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not is_typed:
            end(process)
        raise


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a group of processes, by force if need be."""
    for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, 0.0)):
        last = time.monotonic() + seconds
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            while time.monotonic() < last:
                process.poll()  # so that the first one of the group is gone once it has ended
                os.killpg(process.pid, 0)
                time.sleep(0.05)
    process.wait()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


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
