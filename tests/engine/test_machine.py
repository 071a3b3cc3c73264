"""Memory and cores of a container are limited by the container, not by the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from quire.engine import machine

CPU = torch.device("cpu")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_GROUPS", tmp_path)
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    write(tmp_path, {"own": "5:memory:/a/b\n4:cpu,cpuacct:/c\n0::/a\n"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine, "_meminfo_available", lambda: 1000)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({}, 1000),
        ({"memory.max": "max\n", "memory.current": "10\n"}, 1000),
        ({"memory.max": "300\n", "memory.current": "100\n"}, 200),
        ({"memory.max": "300\n", "memory.current": "400\n"}, 0),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "5"}, 1000),
        ({"memory/memory.limit_in_bytes": "700", "memory/memory.usage_in_bytes": "100"}, 600),
        # Groups inside the container count too, and cached files can be dropped.
        ({"a/memory.max": "300\n", "a/memory.current": "100\n", "memory.max": "max\n"}, 200),
        ({"a/memory.max": "300", "a/memory.current": "290", "a/memory.stat": "anon 100\ninactive_file 50\n"}, 60),
        ({"memory/a/b/memory.limit_in_bytes": "500", "memory/a/b/memory.usage_in_bytes": "100"}, 400),
        ({"memory/c/memory.limit_in_bytes": "1", "memory/c/memory.usage_in_bytes": "0"}, 1000),
    ],
)
def test_memory(groups: Path, files: dict[str, str], memory: int) -> None:
    write(groups, files)
    assert machine.available_memory(CPU) == memory


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
)
def test_cores(groups: Path, files: dict[str, str], cores: int) -> None:
    write(groups, files)
    assert machine.usable_cores() == cores


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
