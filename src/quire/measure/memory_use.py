"""The memory that this process takes for itself."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

SECONDS = 0.02
"""Between two looks."""


def anonymous_bytes() -> int:
    """Anonymous memory of this process: what no file backs. 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10


def free_memory() -> None:
    """Gives memory that nothing uses back to the system, as far as the C library can. What is kept would count as
    memory of the process, and be used again unseen.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def memory_of(device: torch.device) -> int:
    """Bytes that this process has: of a GPU, or anonymous memory."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else anonymous_bytes()


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """A list that gets the largest `memory_of` inside."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        of_device = list[int]()
        yield of_device
        of_device.append(torch.cuda.max_memory_allocated(device))
        return
    ended, most, found = threading.Event(), [anonymous_bytes()], list[int]()

    def watch() -> None:
        while not ended.wait(SECONDS):
            most.append(anonymous_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        found.append(max(*most, anonymous_bytes()))
