"""The memory and cores that this process may use, container limits included."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_GROUPS = Path("/sys/fs/cgroup")


def available_memory(device: torch.device) -> int:
    """Bytes this process can still have on the device."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        # Memory that torch has reserved for later tensors is free for us.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = _meminfo_available()
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        most, now = _number(limit), _number(used)
        if most is not None and now is not None:
            free = min(free, max(0, most - now))
    return free


def usable_cores() -> int:
    """Cores that this process may use, rounded up: the smaller of its affinity and its container's share."""
    cores = len(os.sched_getaffinity(0))
    quota = _words("cpu.max") or [*_words("cpu/cpu.cfs_quota_us"), *_words("cpu/cpu.cfs_period_us")]
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        cores = min(cores, max(1, -(-int(quota[0]) // int(quota[1]))))
    return cores


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _words(name: str) -> list[str]:
    try:
        return (_GROUPS / name).read_text().split()
    except OSError:
        return []


def _number(name: str) -> int | None:
    """A limit in bytes; None if there is none."""
    words = _words(name)
    return int(words[0]) if words and words[0].isdigit() else None
