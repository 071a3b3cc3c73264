"""The folder for Quire's own files, and paths that people write."""

from __future__ import annotations

import os
from pathlib import Path

from quire.errors import ConfigError


def user_cache() -> Path:
    """The user's cache folder: quire under XDG_CACHE_HOME, or under ~/.cache. Ignores a relative XDG_CACHE_HOME, as the
    XDG Base Directory Specification demands. Raises RuntimeError without a home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "quire"


def user_path(name: str | Path) -> Path:
    """A path that a user wrote, with the home folder in place of `~`. Raises ConfigError if there is none."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        home = Path(name).parts[0]
        raise ConfigError(f"{name}: the home folder of {home} is not known; give the whole path") from None
