"""The entry point of an instance's process, before its slow imports: `python -m quire.cluster.start NUMBER`.

NUMBER is a file descriptor of a pipe. Until the instance is ready, it ends when the process that started it ends. Later
it notices that by its connection to the router, and shuts down in order.
"""

from __future__ import annotations

import functools
import signal
import sys

from quire import parent_watch


def ignore_terminal() -> None:
    """Ignores Ctrl-C and the end of the terminal, which reach all processes of a terminal. The router ends its
    instances when their requests are done.
    """
    for each in (signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)


def main() -> int:
    """Runs the instance that the standard input describes. Returns the exit code."""
    number = int(sys.argv[-1])
    parent_watch.exit_with_parent(number)
    ignore_terminal()
    from quire.cluster.instance import run

    return run(functools.partial(parent_watch.outlive_parent, number))


if __name__ == "__main__":
    sys.exit(main())
