"""The compiled CPU kernels: finds or compiles the library for this processor.

Does not know the functions of the library; quire.kernels.runtime declares them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

from quire.errors import ConfigError, QuireError
from quire.folders import user_cache
from quire.kernels.levels import supported_levels

log = logging.getLogger("quire")


def load(level: str | None = None) -> ctypes.CDLL:
    """The kernels for this processor, or for a lower level that it also runs.

    Uses the library in the package. If there is none, or if the sources beside it have changed, compiles one into the
    user's cache folder. Raises ConfigError for a level that this processor lacks, and QuireError if compilation fails.
    """
    if level is not None and level not in supported_levels():
        raise ConfigError(f"CPU level {level!r} does not run on this processor; it has {', '.join(supported_levels())}")
    return _load(level or supported_levels()[0], level is None)


@functools.cache
def _load(level: str, lower_will_do: bool) -> ctypes.CDLL:
    return ctypes.CDLL(str(_find(level, lower_will_do)))


def _find(level: str, lower_will_do: bool) -> Path:
    # Imported here, so that `python -m quire.kernels.build` is not imported twice.
    from quire.kernels.build import SOURCE_DIR, build, is_current, library_name, source_hash

    if is_current(SOURCE_DIR, level):
        return SOURCE_DIR / library_name(level)
    cache = user_cache() / "kernels" / source_hash()
    try:
        return build([level], cache)[0]
    except QuireError as error:
        packaged = [lower for lower in supported_levels() if is_current(SOURCE_DIR, lower)]
        if not lower_will_do or not packaged:
            raise
        log.warning("CPU kernels of level %s instead of %s: %s", packaged[0], level, error)
        return SOURCE_DIR / library_name(packaged[0])
    except OSError as error:
        raise QuireError(
            f"cannot write compiled CPU kernels to {cache}: {error}; set XDG_CACHE_HOME to a writable folder"
        ) from error
