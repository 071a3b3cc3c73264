"""Steps in micro-batches: attention's plans for each, and the order in which layers and micro-batches are computed.

    for layer:  for micro-batch:  load the next one's cache | compute this one | store the chunks it filled

A layer's weights are thus loaded once for all micro-batches (FlexGen's zig-zag block). Each micro-batch has a plan and
scratch of its own.

Source: FlexGen, arXiv 2303.06865, section 4.1 and Algorithm 1. Ours differs: a step is made by the scheduler, so that
prompts have any length, finished sequences are replaced, and shared prefixes are computed and loaded once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from quire.attention.plan import AttentionPlan
from quire.cache.ledger import PAGE_TOKENS
from quire.offload.attended import NearFarPlan, host_attention, split_near_far
from quire.offload.mover import NOTHING, IoTicket
from quire.offload.table import OffloadedTable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from quire.attention.cpu import CpuAttention
    from quire.attention.rows import RowSlice
    from quire.attention.triton import TritonAttention
    from quire.models.plan import Model
    from quire.offload.device import CopyStream
    from quire.offload.hidden import HiddenStates
    from quire.offload.paged import Pager
    from quire.offload.stream import WeightStream


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a step.

    rows   the rows of the step that belong to it
    plan   the attention plan of its slices
    """

    rows: slice
    plan: AttentionPlan


class BlockPlan:
    """See AttentionPlan: the plans of a step's micro-batches. `run` computes all layers with them.

    padded_rows  rows of a micro-batch -> rows that are computed
    """

    def __init__(
        self,
        batches: Sequence[MicroBatch],
        starts: Sequence[int],
        padded_rows: Callable[[int], int],
        table: OffloadedTable | Pager | None,
        placed: tuple[list[Any], Any],
        refresh: Callable[[NDArray[np.int32]], None],
    ) -> None:
        """starts: the first slice of each micro-batch. placed: the result of the table's `place`. refresh: the method
        of the plans' backend.
        """
        self.batches = batches
        self.padded_rows = padded_rows
        self._starts = starts
        self._table = table
        self._placed = placed
        self._refresh = refresh

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Not called: each micro-batch has a plan."""
        raise AssertionError("a block is computed by `run`")

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Not called, as `write`."""
        raise AssertionError("a block is computed by `run`")

    def recovered(self, slice_index: int, kept: NDArray[np.uint64], local: NDArray[np.int64]) -> NDArray[np.float64]:
        """See AttentionPlan."""
        batch = max(index for index, start in enumerate(self._starts) if start <= slice_index)
        with contextlib.nullcontext() if self._table is None else self._table.loaded_path(slice_index):
            return self.batches[batch].plan.recovered(slice_index - self._starts[batch], kept, local)

    def load(self, layer: int, batch: int, *after: IoTicket) -> tuple[IoTicket, ...]:
        """Starts to load the chunks that a micro-batch reads in a layer, and with the first one the shared chunks."""
        if self._table is None:
            return ()
        common = self._table.load_shared(layer, self._placed[1]) if batch == 0 else NOTHING
        return common, self._table.load(layer, batch, len(self.batches), self._placed[0][batch], *after)

    def begin_batch(self, layer: int, batch: int) -> None:
        """Must be called before a micro-batch is computed in a layer."""
        if self._table is not None:
            renamed = self._table.begin_batch(layer, batch, len(self.batches), self._placed[0][batch])
            if len(renamed):
                self._refresh(renamed)

    def store(self, layer: int, batch: int) -> IoTicket:
        """Starts to store the chunks that a micro-batch has filled in a layer."""
        if self._table is None:
            return NOTHING
        return self._table.store(layer, batch, len(self.batches), self._placed[0][batch])


class BlockAttention:
    """See AttentionBackend. Divides steps into micro-batches.

    micro_batch  most sequences of one
    table        the cache, if it is offloaded; its buffers bound micro-batches too
    padded_rows  see BlockPlan
    """

    def __init__(
        self,
        attention: CpuAttention | TritonAttention,
        micro_batch: int,
        table: OffloadedTable | Pager | None,
        padded_rows: Callable[[int], int] = lambda rows: rows,
    ) -> None:
        self.micro_batch = micro_batch
        self._padded_rows = padded_rows
        self._table = table
        self._backends = [attention]
        self._far: CpuAttention | None = None
        if table is not None:
            attention.encodes_by_layer = True  # a layer is stored before the next one is computed
        if isinstance(table, OffloadedTable) and table.attends:
            assert table.host is not None
            attention.keeps_lse = True
            self._far = host_attention(attention.spec, table.host)
        self._starts: list[int] = []

    def plan(
        self, slices: Sequence[RowSlice], moved: Sequence[int] | None = None, ready: NDArray[np.int32] | None = None
    ) -> BlockPlan:
        """See AttentionBackend."""
        assert ready is None or self._table is None, "a cache on the disk has no transfers"
        starts = self._divided(slices)
        if starts != self._starts:
            moved = None
        self._starts = starts
        bounds = list(itertools.pairwise([*starts, len(slices)]))
        placed: tuple[list[Any], Any] = [], None
        if self._table is not None:
            placed = self._table.place([slices[low:high] for low, high in bounds])
        while len(self._backends) < len(bounds):
            self._backends.append(self._backends[0].clone())
        batches, row = [], 0
        for backend, (low, high) in zip(self._backends, bounds, strict=False):
            part = slices[low:high]
            count = sum(piece.num_rows for piece in part)
            own = None if moved is None else [index - low for index in moved if low <= index < high]
            plan = backend.plan(part, own, ready) if self._far is None else self._divided_plan(backend, part)
            batches.append(MicroBatch(slice(row, row + count), plan))
            row += count
        return BlockPlan(batches, starts, self._padded_rows, self._table, placed, self._backends[0].refresh)

    def _divided_plan(self, backend: CpuAttention | TritonAttention, slices: Sequence[RowSlice]) -> AttentionPlan:
        """A plan whose single rows attend to far chunks on the host. Each step needs a new one, because chunks move
        between near and far.
        """
        table = self._table
        assert isinstance(table, OffloadedTable) and table.host is not None and self._far is not None
        near, far, rows, row = [], [], [], 0
        for piece in slices:
            if piece.num_rows == 1:
                is_far = table.is_far(piece.chunks[: piece.start // PAGE_TOKENS])
                if is_far.any():
                    piece, beyond = split_near_far(piece, is_far)
                    far.append(beyond)
                    rows.append(row)
            near.append(piece)
            row += piece.num_rows
        plan = backend.plan(near)
        if not far:
            return plan
        return NearFarPlan(plan, self._far.read_only_plan(far), rows, table.host.memory)

    def _divided(self, slices: Sequence[RowSlice]) -> list[int]:
        """The first slice of each micro-batch. Neighbours share prefixes, so they stay together."""
        starts, count, num_chunks = [0], 0, 0
        for index, piece in enumerate(slices):
            chunks = -(-(piece.start + piece.num_rows) // PAGE_TOKENS)
            most = None if self._table is None else self._table.max_batch_chunks
            if count == self.micro_batch or (count and most is not None and num_chunks + chunks > most):
                starts.append(index)
                count = num_chunks = 0
            count, num_chunks = count + 1, num_chunks + chunks
        return starts


def run(
    model: Model,
    tokens: Tensor,
    positions: Tensor,
    plan: BlockPlan,
    stream: WeightStream | CopyStream,
    states: HiddenStates,
    *,
    overlaps: bool,
) -> Tensor:
    """The result of `Model.hidden`: all layers of all micro-batches.

    stream    brings the weights of each layer
    states    keeps the micro-batches' activations between layers
    overlaps  whether the next micro-batch's bytes are loaded, and the last one's stored, while one is computed
    """
    batches = plan.batches
    states.begin(len(batches))
    for index, each in enumerate(batches):
        count = each.rows.stop - each.rows.start
        inputs = tokens.new_zeros(2, plan.padded_rows(count))
        inputs[0, :count], inputs[1, :count] = tokens[each.rows], positions[each.rows]
        states.put(index, model.begin(inputs[0], inputs[1]))
    order = list(itertools.product(range(model.shape.num_layers), range(len(batches))))
    loads: dict[tuple[int, int], tuple[IoTicket, ...]] = {}
    stores: list[IoTicket] = []

    def load(layer: int, batch: int) -> None:
        # Two micro-batches share a buffer in turn: the earlier one is computed, and the chunks it filled are stored.
        loads[layer, batch] = *plan.load(layer, batch, *stores[-1:]), states.load(batch)

    for number, (layer, batch) in enumerate(order):
        if batch == 0:
            stream.take(layer)
        if number == 0 or not overlaps:
            load(layer, batch)
        if overlaps and number + 1 < len(order):
            load(*order[number + 1])
        for ticket in (*stores[:-1], *loads.pop((layer, batch))):
            ticket.wait()
        plan.begin_batch(layer, batch)
        states.put(batch, model.layer(layer, states.get(batch), batches[batch].plan))
        stores = [*stores[-1:], plan.store(layer, batch)]
        if not overlaps:
            stores[-1].wait()
            states.settle()
        if batch == len(batches) - 1:
            stream.give(layer)
    for ticket in stores:
        ticket.wait()
    ends = [each.rows.stop - each.rows.start for each in batches]
    return torch.cat([model.finish(states.last(index))[:count] for index, count in enumerate(ends)])
