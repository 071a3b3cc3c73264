"""The activations of a block's micro-batches between two layers: on the computing device, or in a file. With a GPU, the
host's memory replaces the file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quire.kernels.memory import memory_on
from quire.offload.mover import NOTHING, IoRequest, IoTicket, Mover
from quire.offload.units import NONE, Share
from quire.stores.direct import BLOCK_BYTES, padded

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.shape import ModelShape
    from quire.offload.host import HostMemory

    State = tuple[Tensor, ...]

CPU = torch.device("cpu")


@dataclass
class _Far:
    """A state in the file.

    alike   shapes and types of its tensors
    offset  its offset in the file
    moved   the ticket of the last write or read
    buffer  the buffer into which it is read
    """

    alike: list[tuple[torch.Size, torch.dtype]]
    offset: int
    moved: IoTicket = NOTHING
    buffer: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(_bytes_of(*each) for each in self.alike)


def states_bytes(shape: ModelShape, dtype: torch.dtype, rows: int, count: int) -> int:
    """Most bytes of the states of `count` micro-batches that have `rows` rows together."""
    tensors = [shape.hidden_size * dtype.itemsize] * (1 + shape.is_fused) + [8] * shape.reads_positions
    return rows * sum(tensors) + len(tensors) * count * BLOCK_BYTES


class HiddenStates:
    """The states of micro-batches by index.

    far     share of the micro-batches whose states are in the file; that of a single micro-batch stays on the device
    device  the computing device
    """

    def __init__(self, mover: Mover | HostMemory | None = None, far: Share = NONE, device: torch.device = CPU) -> None:
        assert mover is not None or not far, "a share of the states is on the disk, and there is no file"
        self.far = far
        self._mover = mover
        self._device = device
        self._near: dict[int, State] = {}
        self._away: dict[int, _Far] = {}
        self._offsets: dict[int, int] = {}
        self._end = 0  # end of the used part of the file
        self._is_far: list[bool] = []
        self._num_far = self._num_all = 0  # numbers of states, summed over all steps
        # Two buffers to read into and two to write from, each used in turn.
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        self._memory = {"read": [nothing] * 2, "write": [nothing] * 2}
        self._turns = {"read": 0, "write": 0}
        self._written: list[IoTicket] = [NOTHING, NOTHING]

    @property
    def far_share(self) -> float:
        """The share of all steps' micro-batches whose states were in the file."""
        return self._num_far / max(1, self._num_all)

    def stats(self) -> dict[str, float]:
        """See `LLM.stats`."""
        mover = self._mover
        return {
            "hidden_near": 1 - self.far_share,
            "hidden_bytes_read": 0 if mover is None else mover.bytes_read,
            "hidden_bytes_written": 0 if mover is None else mover.bytes_written,
        }

    def begin(self, count: int) -> None:
        """Begins a step with `count` micro-batches. Drops the states of the last step, which may have failed."""
        self.settle()
        self._written = [NOTHING, NOTHING]
        self._near.clear()
        self._away.clear()
        self._offsets.clear()
        self._end = 0
        share = self.far if count > 1 else NONE
        self._is_far = [
            math.floor((index + 1) * share + 1e-9) > math.floor(index * share + 1e-9) for index in range(count)
        ]
        self._num_far, self._num_all = self._num_far + sum(self._is_far), self._num_all + count

    def put(self, index: int, state: State) -> None:
        """Keeps a state. Its tensors may be overwritten afterwards if it goes to the file."""
        if not self._is_far[index]:
            self._near[index] = state
            return
        assert self._mover is not None
        far = _Far([(each.shape, each.dtype) for each in state], self._offsets.setdefault(index, self._end))
        self._end = max(self._end, far.offset + far.num_bytes)
        turn = self._turns["write"]
        self._written[turn].wait()
        buffer = self._buffer("write", far.num_bytes)
        for part, each in zip(_views(buffer, far.alike), state, strict=True):
            part.copy_(each)
        far.moved = self._written[turn] = self._mover.write([IoRequest(far.offset, buffer)])
        self._away[index] = far

    def settle(self) -> None:
        """Waits until nothing moves."""
        if self._mover is not None:
            self._mover.settle()

    def load(self, index: int) -> IoTicket:
        """Starts to read a state from the file."""
        far = self._away.get(index)
        if far is None:
            return NOTHING
        assert self._mover is not None
        far.buffer = self._buffer("read", far.num_bytes)
        far.moved = self._mover.read([IoRequest(far.offset, far.buffer)], far.moved)
        return far.moved

    def get(self, index: int) -> State:
        """A state that is in memory, or that has been loaded."""
        far = self._away.pop(index, None)
        if far is None:
            return self._near.pop(index)
        assert far.buffer is not None, "the state was not loaded"
        return tuple(_views(far.buffer, far.alike))

    def last(self, index: int) -> State:
        """A state after the last layer. It stays valid when other states are loaded."""
        self.load(index).wait()
        state = self.get(index)
        return tuple(each.clone() for each in state) if self._is_far[index] else state

    def _buffer(self, use: str, num_bytes: int) -> Tensor:
        turn = self._turns[use]
        self._turns[use] = 1 - turn
        if len(self._memory[use][turn]) < num_bytes:
            self._memory[use][turn] = memory_on(self._device, num_bytes)
        return self._memory[use][turn][:num_bytes]


def _bytes_of(shape: torch.Size, dtype: torch.dtype) -> int:
    return padded(math.prod(shape) * dtype.itemsize)


def _views(buffer: Tensor, alike: list[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    """The tensors in a buffer, one after the other."""
    found, at = [], 0
    for shape, dtype in alike:
        size = math.prod(shape) * dtype.itemsize
        found.append(buffer[at : at + size].view(dtype).view(shape))
        at += _bytes_of(shape, dtype)
    return found
