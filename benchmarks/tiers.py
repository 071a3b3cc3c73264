"""Shared by the benchmarks of the disk tier: folders, arena sizes, counters, the page cache, and marks.

Knows settings and files, not requests.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import math
import mmap
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import arguments, commit, format_table, hardware, hardware_line, median
from turns import busy_seconds

from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.load import calibration_for
from quire.models.resolve import resolve_model
from quire.models.weights import open_model

DROPPING = "dropping"
"""The side without the tier: evicted chunks are lost."""

SPARE_BYTES = 1 << 30
"""Room in a folder besides its chunks: padding, the index, and files that are still being written."""

QUIET_CORES = 0.1
"""Cores that other processes may use on a quiet machine, as in contest.py."""

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def tier_arguments(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """The arguments of every benchmark of the tier."""
    parser = arguments(doc, rounds)
    parser.add_argument("--model", default="smollm2")
    # As in peers.py. Prompts are computed faster than with packed weights, so fetching them has more to beat.
    parser.add_argument("--weights", default="dequantized", help="model.weights (default: dequantized)")
    parser.add_argument("--folder", type=Path, help="where folders of the tier are made (default: that of tempfile)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and their order")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    parser.add_argument("--quick", action="store_true", help="a small load and one round; marks mean nothing then")
    return parser


def parse_tier(parser: argparse.ArgumentParser, words: Sequence[str] | None, **quick: object) -> argparse.Namespace:
    """Parses the command line. With --quick, `quick` and one round replace the defaults, not what is given."""
    if parser.parse_args(words).quick:
        parser.set_defaults(rounds=1, **quick)
    return parser.parse_args(words)


def read_sides(parser: argparse.ArgumentParser, given: argparse.Namespace, known: Sequence[str]) -> list[str]:
    """The sides of --sides, comma-separated."""
    sides: list[str] = given.sides.split(",")
    if unknown := set(sides) - set(known):
        parser.error(f"--sides: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    return sides


def engine_options(given: argparse.Namespace, **more: object) -> dict[str, Any]:
    """Settings of every engine here, and `more`, whose keys have _ for their dot: cache_codec."""
    options: dict[str, Any] = {"runtime.threads": given.threads, "model.weights": given.weights}
    return options | {key.replace("_", ".", 1): value for key, value in more.items()}


def disk_options(folder: Path, num_bytes: int, bandwidth: str | None = None) -> dict[str, str]:
    """Settings of a tier with room for `num_bytes` of chunks. bandwidth: bytes per second; None: not throttled."""
    options = {"tiers.disk": f"{folder}:{-(-cap_of(num_bytes) // 2**20)}MiB"}
    return options if bandwidth is None else options | {"tiers.disk_bandwidth": bandwidth}


def cap_of(num_bytes: int) -> int:
    """The cap of a folder that never has to drop any of `num_bytes` of chunks."""
    return num_bytes + num_bytes // 8 + SPARE_BYTES


def disk_counters(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The disk tier's part of an engine's `stats()`, and what moved, in tokens and chunks; empty without the tier."""
    found: dict[str, Any] = stats.get("tiers", {}).get("disk") or {}
    if not found:
        return {}
    moves = stats.get("moves", {})
    return found | {"fetched_tokens": moves.get("fetched", 0) * 64, "wasted_chunks": moves.get("wasted", 0)}


def disk_change(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> float:
    """How much a counter of the disk tier grew between two `stats()`; 0 without the tier."""
    return float(disk_counters(after).get(name, 0) - disk_counters(before).get(name, 0))


@contextmanager
def fresh_folder(parent: Path | None, num_bytes: int) -> Iterator[Path]:
    """An empty folder for `num_bytes` of chunks, removed at the end. Ends the script if the disk is too full, or none.

    A folder in RAM would measure nothing.
    """
    with tempfile.TemporaryDirectory(prefix="quire-tier-", dir=parent) as name:
        kind, free = file_system(Path(name)), shutil.disk_usage(name).free
        if kind in ("tmpfs", "ramfs"):
            sys.exit(f"{Path(name).parent} is in RAM ({kind}); choose a folder on a disk with --folder")
        if free < cap_of(num_bytes):
            sys.exit(f"{Path(name).parent} has {free >> 20} MiB free, {cap_of(num_bytes) >> 20} MiB are needed")
        yield Path(name)


def file_system(path: Path) -> str:
    """The type of the file system of a path (Linux); "unknown" elsewhere."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    path, found = path.resolve(), {}
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split(" ")
        if path.is_relative_to(point.replace("\\040", " ")):
            found[len(point)] = kind
    return found[max(found)]


@dataclass(frozen=True)
class Need:
    """What prompts need in an arena. Bytes are the engine's own sizes, page padding and slabs included.

    chunk_bytes  of one sealed chunk
    num_bytes    of the smallest cache.memory that holds everything at once, in whole MiB
    """

    chunk_bytes: int
    num_bytes: int


def arena_need(model: str, options: Mapping[str, Any], num_chunks: int, num_open: int, num_prompts: int) -> Need:
    """What sealed chunks of some prompts need, beside open chunks of running requests. Calibrates if the codec asks."""
    config = EngineConfig.from_options({**options, "cache.memory": 1 << 30})
    path = resolve_model(model)
    calibration = calibration_for(path, config)
    with open_model(path) as checkpoint:

        def fits(mebibytes: int) -> bool:
            cache = dataclasses.replace(config.cache, memory=mebibytes << 20)
            arena = resolve(dataclasses.replace(config, cache=cache), checkpoint.shape, checkpoint, calibration)[
                1
            ].arena
            # Where no codec encodes them, open chunks are pages like all others.
            return arena.fits(num_chunks + (0 if arena.open else num_open), num_open, num_prompts)

        chunk_bytes = resolve(config, checkpoint.shape, checkpoint, calibration)[1].chunk_bytes
        low = num_chunks * chunk_bytes >> 20
        high = max(1, low)
        while not fits(high):
            low, high = high, high + high // 16 + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
    return Need(chunk_bytes, high << 20)


def drop_page_cache(*folders: Path) -> str:
    """Writes the files in folders back to disk and drops them from the page cache. Returns how, and how much stayed.

    The host of a virtual machine may keep its own copies: nothing here reaches those.
    """
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # pages that are not written yet would stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    how = "posix_fadvise"
    with suppress(OSError):
        DROP_CACHES.write_text("3\n")
        how = "posix_fadvise and drop_caches"
    left = sum(map(resident_bytes, files))
    return f"{how}, {left >> 20} MiB stayed"


def resident_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache (Linux)."""
    size, page = path.stat().st_size, mmap.PAGESIZE
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=3) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        pages = ctypes.create_string_buffer(-(-size // page))
        failed = libc.mincore(ctypes.addressof(first), size, pages)
        del first
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path} failed")
    return page * sum(byte & 1 for byte in pages.raw[: -(-size // page)])


class OtherLoad:
    """The cores that other programs than this script and its ended children kept busy since construction."""

    def __init__(self) -> None:
        """Starts counting."""
        self._begun, self._before = time.monotonic(), self._foreign_seconds()

    def cores(self) -> float:
        """Average number of cores."""
        return max(0.0, (self._foreign_seconds() - self._before) / (time.monotonic() - self._begun))

    def _foreign_seconds(self) -> float:
        return busy_seconds() - sum(os.times()[:4])


@dataclass(frozen=True)
class Mark:
    """A claim about a number that each round gives: the median must reach the bound."""

    name: str
    values: Sequence[float]
    bound: float
    at_most: bool = False

    @property
    def reached(self) -> bool | None:
        """None if nothing was measured."""
        value = median(self.values)
        if math.isnan(value):
            return None
        return bool(value <= self.bound if self.at_most else value >= self.bound)  # of numpy.float64, too


def marks_table(marks: Sequence[Mark], markdown: bool = False) -> str:
    """A table of claims. A claim whose sides did not both run has a dash."""
    rows = []
    for mark in marks:
        known = sorted(value for value in mark.values if not math.isnan(value))
        numbers = [f"{median(known):.3f}", f"{known[0]:.3f} to {known[-1]:.3f}"] if known else ["-", "-"]
        reached = {None: "-", True: "yes", False: "NO"}[mark.reached]
        rows.append([mark.name, *numbers, f"{'at most' if mark.at_most else 'at least'} {mark.bound:g}", reached])
    return format_table(["mark", "median", "rounds", "wanted", "reached"], rows, markdown)


def exit_status(given: argparse.Namespace, marks: Sequence[Mark]) -> int:
    """1 if a measured mark was missed. A quick run misses none."""
    return int(not given.quick and any(mark.reached is False for mark in marks))


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The ratio within each round; NaN where one of the two is missing."""
    return [top / bottom if bottom else math.nan for top, bottom in zip(over, under, strict=False)]


def conditions(given: argparse.Namespace, load: OtherLoad) -> str:
    """The machine, the folder's file system, and the foreign load."""
    where, others = given.folder or Path(tempfile.gettempdir()), load.cores()
    text = (
        f"{hardware_line(hardware())}; {given.threads} threads; {file_system(where)}; commit {commit()};"
        f" {time.strftime('%Y-%m-%d')}; rounds: {given.rounds}, medians shown.\n"
        f"Other processes kept {others:.2f} cores busy."
    )
    if others > QUIET_CORES:
        text += "\nTHE MACHINE WAS NOT QUIET: these numbers are not for publication."
    return text


def token_ids(model: str) -> range:
    """Ids from the middle of a model's vocabulary: none of them is a special token."""
    with open_model(resolve_model(model)) as checkpoint:
        size = checkpoint.shape.vocab_size
    return range(size // 4, size // 2)


def random_prompts(ids: range, count: int, length: int, seed: object) -> list[list[int]]:
    """Prompts of random tokens, the same for the same seed."""
    draw = random.Random(repr(seed))
    return [draw.choices(ids, k=length) for _ in range(count)]
