"""Fixtures of prefixes on a disk."""

from tests.disk_folders import fetched

__all__ = ["fetched"]
