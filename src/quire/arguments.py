"""Arguments of a command line, with a list of them: argparse keeps one, but not in public."""

from __future__ import annotations

import argparse
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
        """As argparse."""
        self.added.append(self._target.add_argument(*names, **settings))

    def add_argument_group(self, title: str) -> Arguments:
        """A group with a title of its own in the help."""
        return Arguments(self._target.add_argument_group(title), self.added)

    def add_mutually_exclusive_group(self) -> Arguments:
        """A group of which a command line has one argument at most."""
        return Arguments(self._target.add_mutually_exclusive_group(), self.added)
