"""The CPU levels of the kernels, and the levels that this machine runs. Knows processors, not compilers."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Level:
    """One instruction set to compile for.

    architecture  the compilers' name of the base; empty for their default
    extensions    instruction sets beyond the base
    cpu_flags     flags in /proc/cpuinfo that the code needs, beyond those of the lower levels
    slower        the work that takes longer than on the best level, and why; empty for the best
    """

    architecture: str
    extensions: tuple[str, ...]
    cpu_flags: frozenset[str]
    slower: str = ""


_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

# Best first. v2 runs on every x86-64 machine torch supports, so it needs no check.
X86_LEVELS: dict[str, Level] = {
    "v4bf16": Level(
        "x86-64-v4", ("avx512bf16", "avx512vbmi", "avx512vnni"), _V4 | {"avx512_bf16", "avx512vbmi", "avx512_vnni"}
    ),
    "v4": Level("x86-64-v4", (), _V4, "prompts and full batches are slower without bfloat16 dot products"),
    "v3": Level("x86-64-v3", (), _V3, "prompts and full batches are slower without AVX-512"),
    "v2": Level("x86-64-v2", (), frozenset(), "everything is slower without AVX2"),
}
OTHER_LEVELS: dict[str, Level] = {"generic": Level("", (), frozenset(), "nothing is tuned for this processor")}

LEVELS = X86_LEVELS if platform.machine().lower() in ("x86_64", "amd64") else OTHER_LEVELS


@functools.cache
def supported_levels() -> tuple[str, ...]:
    """The levels this processor can run, best first; never empty."""
    flags = _cpu_flags()
    return tuple(name for name, level in LEVELS.items() if level.cpu_flags <= flags)


def editable_levels() -> tuple[str, ...]:
    """The levels of a development install: the level of this machine, and v3, which most machines run."""
    return tuple(dict.fromkeys(name for name in (supported_levels()[0], "v3") if name in LEVELS))


def _cpu_flags() -> frozenset[str]:
    # Systems without this file (macOS) get the lowest level.
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    return frozenset(next((value.split() for key, _, value in lines if key.strip() == "flags"), []))
