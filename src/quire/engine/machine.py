"""The memory and cores that this process may use, container limits included."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from quire.config import RuntimeConfig
from quire.errors import ConfigError
from quire.kernels import runtime

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def device_type_of(wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The type of device that `runtime.device` names; auto: a GPU if there is one. Raises ConfigError for a GPU that is
    not there.
    """
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise ConfigError("runtime.device is cuda, but torch sees no GPU here; use cpu")
    return "cuda" if has_gpu and wanted != "cpu" else "cpu"


def available_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate on the device."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        # Memory that torch has reserved for later tensors is free for us.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = _meminfo_available()
    for folder, limit, used, cached in _memory_groups():
        most, now = _number(folder / limit), _number(folder / used)
        if most is not None and now is not None:
            # The system drops cached files of a group at its limit.
            free = min(free, max(0, most - now + _entry(folder / "memory.stat", cached)))
    return free


def _memory_groups() -> Iterator[tuple[Path, str, str, str]]:
    """The memory groups of this process, its own first, then all above it.

    Each is a folder, the files with its limit and its usage, and the entry of its cached files.
    """
    for line in _lines(_OWN_GROUPS):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _GROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _GROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = root / path.lstrip("/")
        yield from ((folder, *names) for folder in (own, *own.parents) if folder.is_relative_to(root))


def processor_name() -> str:
    """The processor's name, as the system reports it."""
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware_of(config: RuntimeConfig) -> dict[str, str | None]:
    """What the steps of an engine on this machine run on: the name of the `processor`, and the `level` of the CPU's
    kernels, which is None on a GPU.
    """
    if device_type_of(config.device) == "cuda":
        return {"processor": torch.cuda.get_device_name(), "level": None}
    return {"processor": processor_name(), "level": config.level or runtime.level()}


def usable_cores() -> int:
    """Cores that this process may use, rounded up: the smaller of its affinity and its container's share."""
    cores = len(os.sched_getaffinity(0))
    quota = _words("cpu.max") or [*_words("cpu/cpu.cfs_quota_us"), *_words("cpu/cpu.cfs_period_us")]
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        cores = min(cores, max(1, -(-int(quota[0]) // int(quota[1]))))
    return cores


def _meminfo_available() -> int:
    free = _entry(Path("/proc/meminfo"), "MemAvailable:") * 1024
    return free or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _lines(path: Path) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(name: str) -> list[str]:
    return " ".join(_lines(_GROUPS / name)).split()


def _number(path: Path) -> int | None:
    """A limit in bytes; None if there is none."""
    words = " ".join(_lines(path)).split()
    return int(words[0]) if words and words[0].isdigit() else None


def _entry(path: Path, name: str) -> int:
    """A number of a file with a name and a number in each line; 0 if it is not there."""
    return next((int(line.split()[1]) for line in _lines(path) if line.startswith(f"{name} ")), 0)
