"""The folder for Quire's own files."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """The user's cache folder: quire under XDG_CACHE_HOME, or under ~/.cache. Ignores a relative XDG_CACHE_HOME, as the
    XDG Base Directory Specification demands. Raises RuntimeError without a home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "quire"
