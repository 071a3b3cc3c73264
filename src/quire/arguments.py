"""Arguments of a command line, beyond argparse: a public list of a parser's arguments, and functions for the kinds of
arguments that many commands have.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


class Arguments:
    """Adds arguments to a parser, or to a group of its arguments.

    added  all arguments of the parser, whatever group they are in
    """

    def __init__(self, target: Any, added: list[argparse.Action]) -> None:
        """target: a parser of argparse, or a group of one."""
        self._target = target
        self.added = added

    def add_argument(self, *names: str, **settings: Any) -> None:
        """Adds an argument, as in argparse."""
        self.added.append(self._target.add_argument(*names, **settings))

    def add_file(self, *names: str, text: str, **settings: Any) -> None:
        """Adds a flag with a path. text: its help."""
        self.add_argument(*names, **{"type": Path, "metavar": "FILE", "help": text} | settings)

    def add_count(self, *names: str, text: str, default: int | None = None, **settings: Any) -> None:
        """Adds a flag with a whole number of at least 1. text: its help, to which the default is added."""
        if default is not None:
            text += f" (default: {default})"
        self.add_argument(*names, **{"type": count, "default": default, "metavar": "N", "help": text} | settings)

    def add_switch(self, *names: str, text: str) -> None:
        """Adds a flag without a value. text: its help."""
        self.add_argument(*names, action="store_true", help=text)

    def add_argument_group(self, title: str) -> Arguments:
        """A group with a title of its own in the help."""
        return Arguments(self._target.add_argument_group(title), self.added)

    def add_mutually_exclusive_group(self) -> Arguments:
        """A group of arguments that exclude each other."""
        return Arguments(self._target.add_mutually_exclusive_group(), self.added)


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number
