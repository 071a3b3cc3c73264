"""The progress display of a calibration."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

log = logging.getLogger("quire")

WAITING = "waiting for another calibration of this model"

PLAIN_SECONDS = 10.0
"""Interval between two lines about the same phase."""


@contextlib.contextmanager
def progress_display(show: bool | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """Yields a progress function for `calibrate`. It shows a bar per phase on stderr, or log lines: one at the start of
    a phase, then one every ten seconds.

    show  whether to show bars; None: only if stderr is a terminal
    """
    if not (sys.stderr.isatty() if show is None else show):
        phases: set[str] = set()
        last = 0.0

        def told(what: str, done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if what not in phases:
                phases.add(what)
                last = now
                # A warning, because otherwise the user would see no reason for the wait.
                log.log(logging.WARNING if what == WAITING else logging.INFO, "calibration: %s", what)
            elif now - last >= PLAIN_SECONDS and what != WAITING:
                last = now
                log.info("calibration: %s, %.0f %% done", what, 100 * done / max(1, total))

        yield told
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done, total=total)

        yield report
