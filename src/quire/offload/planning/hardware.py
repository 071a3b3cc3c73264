"""Measures a machine: reads and writes of its disk, copies in memory and to a GPU, and the stages of a layer.

Products and the output head are those of the model, packed as they are while it runs. Attention is the backend's, on
pages of the engine's own cache; beside a GPU also the host's, on pages of the host. Knows no requests;
`quire.measure.offload_profile` has whole generations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.attention.cpu import CpuAttention, CpuPlan
from quire.attention.plan import AttentionBackend
from quire.attention.rows import RowSlice
from quire.attention.spec import AttentionSpec
from quire.cache.arena import Arena
from quire.cache.counts import ChunkCounts
from quire.cache.ledger import PAGE_TOKENS, UNIT, PageLedger
from quire.cache.table import ChunkTable
from quire.config import format_bytes
from quire.errors import CacheFullError, QuireError
from quire.kernels.memory import HugePageAllocator, huge_pages
from quire.models.decoder import build_model
from quire.offload.host import HostMemory, pinned
from quire.offload.mover import IoRequest, Mover
from quire.offload.ops import RelocatableOps
from quire.offload.planning.profile import AttentionTimes, DiskSpeeds, Rate, Read, SecondsCurve
from quire.offload.planning.quiet import quietest, spread
from quire.offload.stream import NUM_READERS
from quire.stores.direct import BLOCK_BYTES, REQUEST_BYTES, AlignedBuffer, DirectFile, allows_direct, measured_file
from quire.stores.throttle import Throttle

if TYPE_CHECKING:
    from quire.models.layers import Ops
    from quire.models.loading import Form
    from quire.models.weights import Checkpoint

READ_SIZES = tuple(64 << shift for shift in range(10, 18))
"""Bytes of a request: 64 KiB to 8 MiB."""
READ_THREADS = (1, 2, 4)
READ_SECONDS = 0.2
"""Of one measurement of reads."""
FILE_BYTES = 256 << 20
"""Of the file that is written and read."""
COPY_BYTES = 128 << 20
NUM_REQUESTS = 50
"""Of a measurement of a small read's seconds."""
SAMPLE_SECONDS = 0.1
"""Of a sample of products or attention."""

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DEVICE_ROWS = (1024, 2048, 4096, 8192)
"""Of products on a GPU, beside these."""
HEAD_ROWS = ROWS[:8]
ATTENTION_ROWS = (1, 8, 32)
CONTEXTS = (32, 480, 2016)
"""Tokens that a decoding row attends to. No row fills a chunk, which would encode it."""
PROMPTS = (32, 112, 480, 992)
"""Tokens of a prompt whose attention is measured."""
CPU = torch.device("cpu")
COLD_BYTES = 256 << 20
"""Bytes of layers that are used in turn, so that weights come from memory and not from the processor's caches."""


def median_rate(rates: list[float]) -> Rate:
    """The median of bytes per second, and their spread."""
    return Rate(statistics.median(rates), spread(rates))


def measure_disk(folder: Path, bandwidth: float | None, rounds: int) -> DiskSpeeds:
    """Speeds of a folder's disk, under a limit of bytes per second if there is one.

    The file is removed at the end. Its bytes are random. A virtual machine's host may keep a copy of them,
    which reads then come from.
    Raises QuireError if the folder cannot be written or has no room.
    """
    try:
        status, is_direct = os.statvfs(folder), allows_direct(folder)
        if status.f_bavail * status.f_frsize < 2 * FILE_BYTES:
            raise QuireError(f"measuring the disk of {folder} needs {format_bytes(2 * FILE_BYTES)}")
        with measured_file(folder, is_direct=is_direct) as file:
            writes = quietest(lambda: _write(file, Throttle(bandwidth)), rounds)
            cells = [(size, threads) for size in READ_SIZES for threads in READ_THREADS]
            wanted = (REQUEST_BYTES, NUM_READERS)
            found: dict[tuple[int, int], list[float]] = {cell: [] for cell in dict.fromkeys([*cells, wanted])}
            for _ in range(rounds):
                for (size, threads), rates in found.items():
                    rates.append(read_rate(file.path, is_direct, size, threads, bandwidth, READ_SECONDS))
        request = statistics.median(quietest(functools.partial(_request_seconds, folder), rounds))
    except OSError as error:
        raise QuireError(f"the disk of {folder} cannot be measured: {error.strerror or error}") from error
    reads = tuple(Read(size, threads, median_rate(found[size, threads])) for size, threads in cells)
    return DiskSpeeds(str(folder), is_direct, reads, median_rate(found[wanted]), median_rate(writes), request)


def _request_seconds(folder: Path) -> float:
    """Seconds of a small read by the threads that move caches and activations, the median of some."""
    part = IoRequest(0, huge_pages(BLOCK_BYTES))
    with contextlib.closing(Mover(folder, Throttle(None))) as mover:
        mover.write([part]).wait()

        def read() -> float:
            begun = time.perf_counter()
            mover.read([part]).wait()
            return time.perf_counter() - begun

        return statistics.median(read() for _ in range(NUM_REQUESTS))


def _write(file: DirectFile, throttle: Throttle) -> float:
    view = AlignedBuffer().view(min(FILE_BYTES, 32 << 20))
    view[:] = np.random.default_rng().bytes(len(view))
    begun = time.perf_counter()
    for offset in range(0, FILE_BYTES, len(view)):
        file.write([view], offset, throttle.take)
    file.sync()
    return FILE_BYTES / (time.perf_counter() - begun)


def read_rate(
    path: Path, is_direct: bool, request_bytes: int, num_threads: int, bandwidth: float | None, seconds: float
) -> float:
    """Bytes per second of threads that read a file from its start, again and again, past the page cache.

    bandwidth  limit of bytes per second; None: none
    seconds    after which no further request begins
    Raises OSError.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0))
    throttle, numbers, size = Throttle(bandwidth), itertools.count(), os.fstat(file).st_size // request_bytes
    begun = time.perf_counter()

    def read(_: int) -> int:
        """Bytes that one thread has read."""
        buffer, done = AlignedBuffer().view(request_bytes), 0
        while time.perf_counter() < begun + seconds:
            offset = next(numbers) % size * request_bytes
            throttle.take(request_bytes)
            done += os.preadv(file, [buffer], offset)
            if not is_direct:
                os.posix_fadvise(file, offset, request_bytes, os.POSIX_FADV_DONTNEED)
        return done

    try:
        with ThreadPoolExecutor(num_threads, "quire-measure") as threads:
            total = sum(threads.map(read, range(num_threads)))
        return total / (time.perf_counter() - begun)
    finally:
        os.close(file)


def _copy_rate(target: torch.Tensor, source: torch.Tensor, device: torch.device, rounds: int) -> Rate:
    """Bytes per second of a copy that a device takes part in. The first one is a warm-up."""

    def copy() -> float:
        begun = finished(device)
        target.copy_(source, non_blocking=True)
        return COPY_BYTES / (finished(device) - begun)

    copy()
    return median_rate(quietest(copy, rounds))


def measure_copy(rounds: int) -> Rate:
    """Bytes per second that torch's threads copy from memory to memory. Each is read once and written once."""
    source, target = (torch.ones(COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    return _copy_rate(target, source, CPU, rounds)


def measure_bus(device: torch.device, rounds: int) -> tuple[Rate, Rate]:
    """Bytes per second that a GPU copies from pinned memory of the host, and to it."""
    there = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    host = pinned(COPY_BYTES, device, there)
    return _copy_rate(there, host, device, rounds), _copy_rate(host, there, device, rounds)


def finished(device: torch.device) -> float:
    """The time once a device has done everything that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure_curve(seconds_of: Callable[[int], float], counts: Sequence[int], rounds: int) -> SecondsCurve:
    """The median seconds of each count, over the quietest samples. The first call of each is a warm-up."""
    found = []
    for count in counts:
        seconds_of(count)
        found.append(quietest(lambda count=count: _sample(seconds_of, count), rounds))  # type: ignore[misc]
    spreads = statistics.median(spread(times) for times in found)
    return SecondsCurve(tuple(counts), tuple(statistics.median(times) for times in found), spreads)


def _sample(seconds_of: Callable[[int], float], count: int) -> float:
    """The median of calls that take long enough for the clock of other programs' load."""
    times: list[float] = []
    end = time.perf_counter() + SAMPLE_SECONDS
    while not times or time.perf_counter() < end:
        times.append(seconds_of(count))
    return statistics.median(times)


class _NoAttention:
    """A plan whose attention costs nothing."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._out = torch.zeros(rows, width, dtype=dtype, device=device)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See StepPlan."""

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """See StepPlan."""
        return self._out


class LayerTimer:
    """Times a model's layers without attention, and its output head. Holds its first layers, packed."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        form: Form,
        layer_bytes: float,
        *,
        ops: Ops | None = None,
        device: torch.device = CPU,
    ) -> None:
        """layer_bytes: bytes of a layer as it is stored. ops: of the device; None: those that offloading has on a CPU.
        The checkpoint may be closed afterwards.
        """
        shape, enough = checkpoint.shape, max(2, round(COLD_BYTES / layer_bytes))
        self._shape = dataclasses.replace(shape, layers=shape.layers[:enough])
        self._dtype = dtype
        self._device = device
        self._model = build_model(
            self._shape, checkpoint, ops or RelocatableOps(HugePageAllocator()), dtype, device, form
        )

    @property
    def num_layers(self) -> int:
        """Layers in memory, which take turns."""
        return self._shape.num_layers

    @torch.inference_mode()
    def products(self, rows: int) -> float:
        """Seconds of one layer: products, norms and the calls from Python."""
        plan: Any = _NoAttention(rows, self._shape.q_size, self._dtype, self._device)
        positions = torch.arange(rows, device=self._device)
        state = self._model.begin(positions % self._shape.vocab_size, positions)
        begun = finished(self._device)
        for index in range(self._shape.num_layers):
            state = self._model.layer(index, state, plan)
        return (finished(self._device) - begun) / self._shape.num_layers

    @torch.inference_mode()
    def head(self, rows: int) -> float:
        """Seconds of the output head."""
        hidden = torch.ones(rows, self._shape.hidden_size, dtype=self._dtype, device=self._device)
        begun = finished(self._device)
        self._model.head(hidden)
        return finished(self._device) - begun


class AttentionTimer:
    """Times attention on free pages of a cache, in its codec, while nothing else uses it.

    beside  where rows come from and outputs go to, if that is another memory than the one of the pages
    """

    def __init__(
        self, attention: AttentionBackend, spec: AttentionSpec, max_context: int, beside: HostMemory | None = None
    ) -> None:
        """attention: the backend of the spec. max_context: longest sequence."""
        assert isinstance(spec.table, ChunkCounts), "a table that gives no chunks out"
        self._spec, self._table, self._backend = spec, spec.table, attention
        self._max_context = max_context
        self._beside = beside

    def decoding(self, rounds: int) -> AttentionTimes:
        """Seconds of a layer of rows that decode."""
        contexts = [each for each in CONTEXTS if each < self._max_context]
        lines: list[SecondsCurve] = []
        with contextlib.suppress(CacheFullError):
            for rows in ATTENTION_ROWS:
                lines.append(measure_curve(functools.partial(self.decode, rows), contexts, rounds))
        if not lines:
            raise QuireError(f"cache.memory holds no sequence of {contexts[-1]} tokens")
        return AttentionTimes(ATTENTION_ROWS[: len(lines)], tuple(contexts), tuple(line.seconds for line in lines))

    def prompts(self, rounds: int) -> SecondsCurve:
        """Seconds of a layer of a prompt."""
        return measure_curve(self.prompt, [each for each in PROMPTS if each < self._max_context], rounds)

    def decode(self, rows: int, context: int) -> float:
        """Seconds of one layer for rows of different sequences that each attend to `context` tokens."""
        return self._seconds([(context - 1, 1)] * rows)

    def prompt(self, tokens: int) -> float:
        """Seconds of one layer for a prompt."""
        return self._seconds([(0, tokens)])

    @torch.inference_mode()
    def _seconds(self, slices: Sequence[tuple[int, int]]) -> float:
        """Slices: first position and number of rows of each sequence."""
        spec, table = self._spec, self._table
        taken: list[NDArray[np.int32]] = []
        made: list[RowSlice] = []
        try:
            for start, count in slices:
                chunks = -(-(start + count) // PAGE_TOKENS)
                if chunks > 1:
                    taken.append(table.take(chunks - 1, table.sealed_codec, sidecar=table.sinks is not None))
                taken.append(table.take(1, table.open_codec))
                path = np.concatenate(taken[-2:] if chunks > 1 else taken[-1:])
                made.append(RowSlice(start, count, path))
            plan = self._backend.plan(made)
            rows = sum(count for _, count in slices)
            here, beside = spec.table.arena.device, self._beside
            device = here if beside is None else beside.device
            most = max(each.num_heads * each.head_dim for each in spec.layers)
            zeros = torch.zeros(rows * most, dtype=spec.dtype, device=here)
            queries = zeros.to(device)
            begun = finished(device)
            for layer, of in enumerate(spec.layers):
                k = zeros[: rows * of.num_kv_heads * of.head_dim].view(rows, of.num_kv_heads, of.head_dim)
                q = queries[: rows * of.num_heads * of.head_dim].view(rows, of.num_heads, of.head_dim)
                plan.write(layer, k, k)
                if beside is None:
                    plan.attend(layer, q)
                    continue
                crossed = beside.to_host(q)
                beside.arrived()
                beside.to_device(plan.attend(layer, crossed))
                assert isinstance(plan, CpuPlan) and plan.lse is not None
                beside.to_device(plan.lse)
            return (finished(device) - begun) / spec.num_layers
        finally:
            for each in taken:
                table.free(each)


def host_timer(spec: AttentionSpec, max_context: int, num_bytes: int) -> AttentionTimer:
    """Times attention on the host of rows that a device has.

    spec       that of the device
    num_bytes  of the host's memory for chunks
    """
    table = spec.table
    assert isinstance(table, ChunkCounts), "a table that gives no chunks out"
    # Slabs as large as the device's, which hold whole pages of every size.
    ledger = PageLedger(num_bytes // table.ledger.slab_bytes * table.ledger.slab_bytes, table.ledger.slab_bytes)
    sealed = (table.sealed_codec,) if table.encodes else ()
    pages = ChunkTable(
        ledger, *table.shape, table.open_codec, *sealed, sinks=table.sinks,
        arena=Arena(ledger.num_bytes),
    )  # fmt: skip
    spec = spec.on_host(pages)
    attention = CpuAttention(spec)
    attention.keeps_lse = True
    return AttentionTimer(attention, spec, max_context, HostMemory(UNIT, table.arena.device))
