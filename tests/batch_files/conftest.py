"""Fixtures of commands that run a fake engine."""

from tests.generating import failing, fake, files, stdin

__all__ = ["failing", "fake", "files", "stdin"]
