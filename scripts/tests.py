#!/usr/bin/env python3
"""Runs the test suite: most tests in parallel, one process per core, then the tests that measure time or memory.

    scripts/tests.py [--seconds N] [--all | --since REVISION] [PYTEST ARGUMENT...]

QUIRE_EFFORT sets the effort: short (the default), quick, full or night. Arguments go to pytest in both groups, for
example `-k name`, `--seed N` or paths. --seconds skips tests that have not begun by then, over both groups. Exit status
0 if nothing failed. Ctrl-C ends it within seconds, with all processes of pytest, and exit status 130.

A short run without paths leaves out the folders of `tests/touched.json` whose files are unchanged since REVISION: the
commit where this branch left its upstream branch or, without one, the last commit but one. --all runs them, too.

Prints seconds and processor time of each folder of tests beside its budget.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOUCHED = ROOT / "tests" / "touched.json"
"""Groups of tests, and the sources that they run. `scripts/touching.py` measures it."""

EVERYTHING = ("constraints.txt", "pyproject.toml", "tests/touched.json")
"""Files that every test depends on. So does any file of tests that is no test: fixtures, oracles, doubles."""

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


BUDGETS = {
    "engine": 105, "server": 105, "kernels": 60, "cache": 50, "cluster": 50, "structured": 35, "models": 35, "cli": 22,
    "offload": 25, "calibrate": 20, "root": 20, "stores": 20, "scripts": 20, "tools": 15,
    "attention": 2, "batch_files": 3, "prefixes": 7,
    "workload": 10, "timing": 10, "placement": 2, "measure": 8, "planning": 35, "simulation": 20, "evaluation": 15,
    "benchmarks": 55,
}  # fmt: skip
"""Processor seconds that the tests of each folder may take in a short run. Without the last row they add up to ten
minutes, which two cores do in five. root: tests of modules outside packages."""


@dataclass
class Cost:
    """The cost of a folder's tests.

    seconds            from the begin to the end of each test, its fixtures included
    processor_seconds  of the test and of the child processes that ended during it
    """

    num_tests: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0


def main() -> int:
    """Runs both groups, one after the other, and prints their time."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--since")
    given, arguments = parser.parse_known_args()
    # Processes share their byte code: without it, each compiles all tests and sources, which takes half a minute.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    pytest = [sys.executable, "-m", "pytest", "--durations=25"]
    cores = len(os.sched_getaffinity(0))
    alone, effort = ["--alone=only"], os.environ.get("QUIRE_EFFORT", "short")
    if not any((ROOT / word.partition("::")[0]).exists() for word in arguments):
        if effort == "short" and not given.all:
            for path in untouched(json.loads(TOUCHED.read_text()), changed_files(given.since)):
                arguments.append(f"--ignore={path}")
                print(f"left out, because nothing that they test has changed: {path} (--all runs them)")
        # Only their files: importing all others would take as long as these tests.
        alone += [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.alone" in file.read_text()]
    # One more than there are cores: a third of the time of these tests is waiting.
    groups = (["--alone=without", f"--numprocesses={cores + 1}", "--dist=worksteal"], alone)
    codes, failed, costs = list[int](), list[str](), defaultdict[str, Cost](Cost)
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
            add_costs(record, costs)
    if effort in ("short", "quick"):
        print(*cost_table(costs, BUDGETS if effort == "short" else {}), sep="\n")
    for name in failed:
        print(f"failed: {name}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{effort} suite: {time.monotonic() - begun:.0f} s,"
        f" {used.ru_utime + used.ru_stime:.0f} s of processor time, load {os.getloadavg()[0]:.1f}"
    )
    return exit_status(codes)


def changed_files(since: str | None) -> set[str] | None:
    """The files that differ from a commit, those that are not committed included; None if the commit is unknown.

    since  by default the commit where this branch left its upstream branch or, without one, the last commit but one
    """
    if since is None:
        since = (_git("merge-base", "HEAD", "@{upstream}") or ["HEAD~1"])[0]
    changed, untracked = _git("diff", "--name-only", since), _git("ls-files", "--others", "--exclude-standard")
    return None if changed is None or untracked is None else {*changed, *untracked}


def _git(*arguments: str) -> list[str] | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def untouched(touched: Mapping[str, Mapping[str, Sequence[str]]], changed: Iterable[str] | None) -> list[str]:
    """The paths of tests that need not run, because no changed file touches them.

    touched  by name of a group: "tests", its files and folders, and "sources", the files and folders that these run
    changed  None: unknown, so all tests run
    """
    if changed is None:
        return []
    known = list(changed)
    if any(file in EVERYTHING or _is_shared_by_tests(file) for file in known):
        return []
    return [
        path
        for group in touched.values()
        if not any(_is_below(file, (*group["tests"], *group["sources"])) for file in known)
        for path in group["tests"]
    ]


def _is_shared_by_tests(file: str) -> bool:
    folder, _, name = file.rpartition("/")
    return folder.split("/")[0] == "tests" and name.endswith(".py") and not name.startswith("test_")


def _is_below(file: str, paths: Iterable[str]) -> bool:
    return any(file == path or file.startswith(f"{path}/") for path in paths)


def add_costs(record: Path, costs: dict[str, Cost]) -> None:
    """Adds the tests of a JUnit record to the costs of their folders; adds nothing without a record."""
    for case in _cases(record):
        folder, *inner = case.get("classname", "").split(".")[1:]
        cost = costs[folder if inner and not inner[0].startswith("Test") else "root"]
        cost.num_tests += 1
        cost.seconds += float(case.get("time", 0))
        cost.processor_seconds += sum(
            float(each.get("value", 0)) for each in case.iter("property") if each.get("name") == "processor_seconds"
        )


def cost_table(costs: Mapping[str, Cost], budgets: Mapping[str, int]) -> Iterator[str]:
    """Lines with the cost of each folder and its budget, the most expensive first."""
    yield f"{'folder':24}{'tests':>8}{'seconds':>10}{'processor':>11}{'budget':>8}"
    for folder, cost in sorted(costs.items(), key=lambda each: -each[1].processor_seconds):
        budget = budgets.get(folder)
        mark = "  over" if budget is not None and cost.processor_seconds > budget else ""
        seconds = f"{cost.seconds:10.0f}{cost.processor_seconds:11.0f}"
        yield f"{folder:24}{cost.num_tests:8}{seconds}{'' if budget is None else budget:>8}{mark}"


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
    return [
        f"{case.get('classname')}::{case.get('name')}"
        for case in _cases(record)
        if case.find("failure") is not None or case.find("error") is not None
    ]


def _cases(record: Path) -> list[ElementTree.Element]:
    try:
        return list(ElementTree.parse(record).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return []


def exit_status(codes: Sequence[int]) -> int:
    """The exit status of a run from those of its groups. A signal (below 0) is a failure; a group without tests is
    not.
    """
    failed = [abs(code) for code in codes if code not in (0, NOTHING_RAN)]
    return max(failed) if failed else 0 if 0 in codes else NOTHING_RAN


if __name__ == "__main__":
    sys.exit(main())
