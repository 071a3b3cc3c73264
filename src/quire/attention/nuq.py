"""The tables of a non-uniform codec as the CPU kernels read them."""

from __future__ import annotations

import ctypes

import torch

from quire.cache.codecs.nuq import CODEBOOK_SIZE, NuqCodec
from quire.kernels import runtime

_POINTERS = (
    "order", "bits", "key_edges", "key_codebooks", "key_weight", "value_edges", "value_codebooks", "key_lookup",
    "value_lookup",
)  # fmt: skip
_NUMBERS = (
    "key_slots", "value_bits", "value_slots", "at_key_slots", "at_values", "at_ranges", "at_value_slots", "page_bytes",
)  # fmt: skip


class NuqHead(ctypes.Structure):
    """Mirror of `NuqHead` in kernels/nuq.h."""

    _fields_ = (*((name, ctypes.c_void_p) for name in _POINTERS), *((name, ctypes.c_int32) for name in _NUMBERS))


class NuqHeads:
    """One structure for each layer and head, and the tensors they point into.

    address  address of the first structure; they are in the order [L, H]
    """

    def __init__(self, codec: NuqCodec) -> None:
        runtime.check_mirrors(NuqHead)
        tables = codec.tables
        self._tensors = {
            "order": tables.key_order.contiguous(),
            "bits": tables.key_bits.contiguous(),
            "key_edges": tables.key_edges.contiguous(),
            "key_codebooks": tables.key_books.contiguous(),
            "key_weight": tables.key_weight.contiguous(),
            "value_edges": tables.value_edges.contiguous(),
            "value_codebooks": tables.value_books.contiguous(),
            "key_lookup": _repeated(tables.key_books, _channel_bits(codec)),
            "value_lookup": _repeated(tables.value_books, tables.value_bits),
        }
        num_layers, num_heads = tables.key_slots.shape
        self._array = (NuqHead * (num_layers * num_heads))()
        for index, head in enumerate(self._array):
            layer, kv_head = divmod(index, num_heads)
            for name, tensor in self._tensors.items():
                setattr(head, name, tensor[layer, kv_head].data_ptr())
            layout = codec.heads[layer][kv_head].layout
            head.key_slots = int(tables.key_slots[layer, kv_head])
            head.value_bits = int(tables.value_bits[layer, kv_head])
            head.value_slots = int(tables.value_slots[layer, kv_head])
            head.at_key_slots, head.at_values = layout.key_slots, layout.values
            head.at_ranges, head.at_value_slots = layout.ranges, layout.value_slots
            head.page_bytes = layout.page_bytes
        self.address = ctypes.addressof(self._array)

    def at(self, layer: int, head: int) -> int:
        """Address of the structure of one head."""
        return self.address + (layer * self._tensors["bits"].shape[1] + head) * ctypes.sizeof(NuqHead)


def _channel_bits(codec: NuqCodec) -> torch.Tensor:
    """The width of every key channel, int64 [L, H, D]."""
    tables = codec.tables
    of_ordered = tables.key_bits.long().repeat_interleave(4, -1)  # [L, H, D / 2]
    of_pair = torch.empty_like(of_ordered).scatter_(-1, tables.key_order.long(), of_ordered)
    return torch.cat((of_pair, of_pair), -1)


def _repeated(codebooks: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Codebooks [..., 32] in bfloat16, filled with repetitions of their 2^bits entries, so that a lookup need not mask
    the bits above a code in its index.
    """
    index = torch.arange(CODEBOOK_SIZE) & ((1 << bits.long()[..., None]) - 1)
    return codebooks.gather(-1, index).to(torch.bfloat16).contiguous()
