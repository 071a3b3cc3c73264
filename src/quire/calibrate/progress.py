"""What a calibration shows on a terminal while it works."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def shown(show: bool | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr for each phase, or nothing; gives what `calibrate` reports to.

    show  None: only when stderr is a terminal
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda what, done, total: None
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
