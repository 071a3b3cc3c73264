"""Shared by the GPU benchmarks: copy bandwidth, timing with CUDA graphs, and the exit without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from common import median


def require_gpu() -> str:
    """The device's name. Without a device, ends the program with a message and exit code 0."""
    if not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device on this machine")
        sys.exit(0)
    import triton

    name: str = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
    return name


def copy_bandwidth(num_bytes: int = 4 << 30) -> float:
    """Bytes read and written per second by a copy on the device."""
    source, target = (torch.empty(num_bytes, dtype=torch.uint8, device="cuda").zero_() for _ in range(2))
    return 2 * num_bytes / event_seconds(lambda: target.copy_(source), 10)


def event_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median device seconds of one call."""
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


def graph_seconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median device seconds of the launches of `run` as one graph, so that the host's speed does not count."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return event_seconds(graph.replay, repeats)
