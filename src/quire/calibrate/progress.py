"""What a calibration shows while it works."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

log = logging.getLogger("quire")

WAITING = "waiting for another calibration of this model"


@contextlib.contextmanager
def shown(show: bool | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """For each phase a progress bar on stderr, or a line of the log; gives what `calibrate` reports to.

    show  whether there are bars; None: only when stderr is a terminal
    """
    if not (sys.stderr.isatty() if show is None else show):
        phases: set[str] = set()

        def told(what: str, done: int, total: int) -> None:
            if what not in phases:
                phases.add(what)
                # Whoever only waits would wonder, whatever the level of the log.
                log.log(logging.WARNING if what == WAITING else logging.INFO, "calibration: %s", what)

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
