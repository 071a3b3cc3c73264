"""Fixtures of commands: a fake engine, and what a disk has."""

from tests.disk_folders import fetched
from tests.generating import failing, fake, files, stdin

__all__ = ["failing", "fake", "fetched", "files", "stdin"]
