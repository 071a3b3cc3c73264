"""Fixtures of commands: a fake engine, what a disk has, and a server that answers them."""

from tests.disk_folders import fetched
from tests.generating import failing, fake, files, stdin
from tests.server.conftest import anyio_backend, folder

__all__ = ["anyio_backend", "failing", "fake", "fetched", "files", "folder", "stdin"]
