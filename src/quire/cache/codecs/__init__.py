"""Codecs: 64 tokens of one head <-> page bytes. What a codec does, and the registry of all codecs.

Importing this module loads neither torch nor numpy: a row of the registry names its class and functions as text.
docs/design/codecs.md explains how to add a codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from quire.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


class PageFormat(Protocol):
    """What pages hold, as far as the chunk table has to know.

    name       what messages call it
    kernel_id  what fast backends know it by
    """

    name: str
    kernel_id: int

    @property
    def page_bytes(self) -> int | NDArray[np.int32]:
        """Bytes of one page: 64 slots of one head of one layer, a multiple of 128. [L, H] where they differ."""


@dataclass(frozen=True)
class SlotMoves:
    """Token slots that other slots are overwritten with.

    layers, heads  int32 [m]
    pages, slots   int32 [2, m]: source first, then target. Both are pages of one codec, by id, and of the same layer
                   and head if sizes differ between heads. No target slot occurs twice or is a source
    """

    layers: NDArray[np.int32]
    heads: NDArray[np.int32]
    pages: NDArray[np.int32]
    slots: NDArray[np.int32]


@runtime_checkable
class Codec(PageFormat, Protocol):
    """Bytes of a page <-> keys and values. Nobody above a codec sees its bits.

    Fast backends know a codec by `kernel_id` and carry their own inline load-K and load-V for it; `encode` and `decode`
    are the definition. Keys are taken and given as pages hold them: whoever reads a page of an engine whose sealed
    codec encodes rotates them.
    """

    def encode(self, layer: int, head: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keys and values [n, P, D] of a head as page images, uint8 [n, page_bytes]."""

    def decode(self, layer: int, head: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page images uint8 [n, page_bytes] as keys and values, float32 [n, P, D] each."""

    def move(self, arena: torch.Tensor, moves: SlotMoves) -> None:
        """Overwrites token slots of pages in an arena, uint8 [bytes], with other ones, in place: bit for bit what
        encoding these tokens in their new slots would give. On a GPU, enqueued on the current stream.
        """


@dataclass(frozen=True)
class CodecInputs:
    """The arguments from which a codec of sealed pages is made.

    codec     value of cache.codec
    head_dim  D
    tables    tables of the calibration, for a calibrated codec
    key_bias  float32 [L, H, D]: the constant that the model adds to all keys of a head. None: there is none, or only
              page sizes are needed
    """

    codec: str
    head_dim: int
    tables: Any = None
    key_bias: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class CodecRow:
    """One codec as configuration, engine, backends, docs and tests see it. A place is `module:name`.

    name           value of cache.codec
    about          description on the reference page, one sentence without a full stop
    place          of the class; its `of(CodecInputs)` makes a Codec. Empty: sealed pages stay dense. A calibrated class
                   also has `nominal_page_bytes(head_dim, bits, outlier_slots)`, the mean size that calibration aims at
    bits           of a stored number, without ranges and slots
    head_dims      the head sizes that the codec can store
    is_calibrated  whether the codec needs the tables of a calibration
    has_sinks      whether the first tokens of a sequence stay exact beside its pages (cache.sink_tokens). The fast
                   backends' kernels do this for nuq alone
    cases          by attention.backend, the place of the function that builds the tables of the backend's kernels; the
                   place is "" for a codec without tables. The reference backend needs no case. Any other backend
                   without a case refuses the codec
    """

    name: str
    about: str
    place: str = ""
    bits: int = 16
    head_dims: range = range(1, 1 << 16)
    is_calibrated: bool = False
    has_sinks: bool = False
    cases: Mapping[str, str] = field(default_factory=dict)

    def runs(self, head_dim: int, backend: str) -> bool:
        """Whether the codec can store heads of this size, and the backend has a case for it."""
        has_case = not self.place or backend == "reference" or backend in self.cases
        return head_dim in self.head_dims and has_case

    def check(self, head_dim: int, backend: str = "reference") -> None:
        """Raises ConfigError if the codec does not run here, naming the codec with the nearest width that does."""
        if self.runs(head_dim, backend):
            return
        others = [row for row in CODECS.values() if row.runs(head_dim, backend)]
        use = f"cache.codec {min(others, key=lambda row: abs(row.bits - self.bits)).name}"
        if head_dim in self.head_dims:
            raise ConfigError(
                f"attention.backend {backend} has no kernels for cache.codec {self.name}; use attention.backend"
                f" reference, or {use}"
            )
        raise ConfigError(
            f"{self.name} stores heads whose size is a multiple of {self.head_dims.step} up to {self.head_dims[-1]},"
            f" not {head_dim}; use {use}"
        )


def load(place: str) -> Any:
    """The object at a place, `module:name`."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


DENSE = "dense"
"""The codec of open pages, and of sealed pages that are not encoded."""


def _nuq(bits: int) -> CodecRow:
    return CodecRow(
        name=f"nuq{bits}",
        about=f"non-uniform codes of {bits} bits on average, calibrated for the model",
        place="quire.cache.codecs.nuq:NuqCodec",
        bits=bits,
        head_dims=range(16, 257, 16),
        is_calibrated=True,
        has_sinks=True,
        cases={"cpu": "quire.attention.nuq:NuqHeads", "triton": "quire.attention.encoded:nuq_tables"},
    )


CODECS: dict[str, CodecRow] = {
    row.name: row
    for row in (
        CodecRow(name=DENSE, about="keys and values as they are, in `model.dtype`"),
        _nuq(4),
        _nuq(3),
        _nuq(2),
        CodecRow(
            name="g4",
            about="4 bits in groups of 64, without calibration",
            place="quire.cache.codecs.group:GroupCodec",
            bits=4,
            head_dims=range(2, 513, 2),
            cases={"cpu": "quire.attention.group:KeyBiases", "triton": "quire.attention.encoded:group_tables"},
        ),
    )
}
"""The registry, by name, in the order of the documentation."""
