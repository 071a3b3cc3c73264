"""The package's build backend: setuptools, with the CPU kernels compiled first.

A wheel carries every CPU level, a development install those of the machine at hand. Where no C++ compiler is
installed, `ziglang`, which is one, is asked for as a build requirement.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta as _setuptools

_ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(_ROOT / "src"))

from quire.kernels.build import SOURCE_DIR, build, find_compiler  # noqa: E402 - needs the path above
from quire.kernels.levels import LEVELS, editable_levels  # noqa: E402

Settings = Mapping[str, Any] | None

build_sdist = _setuptools.build_sdist
get_requires_for_build_sdist = _setuptools.get_requires_for_build_sdist
prepare_metadata_for_build_wheel = _setuptools.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _setuptools.prepare_metadata_for_build_editable


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What setuptools needs, and a compiler where there is none."""
    return [*_setuptools.get_requires_for_build_wheel(config_settings), *_missing_compiler()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """What setuptools needs, and a compiler where there is none."""
    return [*_setuptools.get_requires_for_build_editable(config_settings), *_missing_compiler()]


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """A wheel with the kernels of every level."""
    build(LEVELS, SOURCE_DIR)
    return _setuptools.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """A development install; the kernels are compiled into the source tree."""
    build(editable_levels(), SOURCE_DIR)
    return _setuptools.build_editable(wheel_directory, config_settings, metadata_directory)


def _missing_compiler() -> list[str]:
    if find_compiler() is not None:
        return []
    pins = re.findall(r"^ziglang==\S+", (_ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return pins or ["ziglang"]
