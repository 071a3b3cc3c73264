"""A model in numbers: a list of layers, each with a mixer and a feed-forward part, and the shape of every tensor.

Imports neither torch nor a file format, so that `quire inspect` and the planners can count bytes without loading
anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from quire.errors import ModelError
from quire.models.ffn.gated import GatedShape
from quire.models.ffn.plain import PlainShape
from quire.models.mixers.attention import AttentionShape
from quire.models.norms import NormShape
from quire.models.rope import MAX_SIZE, Rope

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of each supported dtype."""

OPT_POSITION_OFFSET = 2
"""OPT's table of learned positions starts with two padding rows: position p is row p + 2."""


@dataclass(frozen=True)
class NormPlaces:
    """Where a layer has norms.

    inputs    before the mixer and before the feed-forward part
    outputs   after each of them, before the sum with the residual stream
    sums      after each sum with the residual stream, which then goes on normalised; instead of `inputs`
    parallel  both parts read the same normalised input, and their outputs are added together
    """

    inputs: bool = True
    outputs: bool = False
    sums: bool = False
    parallel: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of a layer's norms."""
        before = ("attn_norm",) if self.parallel else ("attn_norm", "mlp_norm")
        after = ("attn_out_norm", "mlp_out_norm")
        return (before if self.inputs or self.sums else ()) + (after if self.outputs else ())


USUAL_NORMS = NormPlaces()
"""Norms before both parts."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One layer in numbers.

    residual_scale  factor of the outputs of both parts, before the sum with the residual stream
    """

    mixer: AttentionShape
    ffn: GatedShape | PlainShape
    norms: NormPlaces = USUAL_NORMS
    residual_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """All numbers that determine how a checkpoint runs; equal shapes run the same code."""

    architecture: str
    """The family, as in `model_type` of config.json."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerShape, ...]
    max_context: int
    """Positions the checkpoint serves without further stretching."""
    norm: NormShape
    tied_embeddings: bool = False
    dtype: str = "bfloat16"
    """The checkpoint's own dtype; bfloat16 for quantized files."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    embed_size: int | None = None
    """OPT-350m: width of the embedding where it differs from hidden_size. None: the same."""
    learned_positions: bool = False
    """Whether a learned vector of the position is added to the embedding (OPT)."""
    embed_scale: float = 1.0
    """Factor of the embedding, rounded to the model's dtype."""
    final_norm: bool = True
    """A norm before the output head."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    logit_cap: float | None = None
    """c: a logit x becomes c * tanh(x / c); None: it stays as it is."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "max_context"):
            if not 1 <= getattr(self, name) <= MAX_SIZE:
                raise ModelError(f"{name} is {getattr(self, name)}; it must lie between 1 and {MAX_SIZE}")
        if not all(1 <= layer.ffn.ffn_size <= MAX_SIZE for layer in self.layers):
            raise ModelError(f"ffn_size must lie between 1 and {MAX_SIZE}")
        if self.dtype not in ITEM_BYTES:
            raise ModelError(f"dtype {self.dtype!r} is not supported (only {', '.join(ITEM_BYTES)})")

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def is_fused(self) -> bool:
        """Whether each norm before a layer is fused with the sum before it, so that two streams lie between layers."""
        return self.norm.kind == "rms" and all(layer.norms.inputs for layer in self.layers) and self.final_norm

    @property
    def has_gates(self) -> bool:
        """Whether any feed-forward part is gated."""
        return any(isinstance(layer.ffn, GatedShape) for layer in self.layers)

    @property
    def reads_positions(self) -> bool:
        """Whether a layer reads the positions of its rows."""
        return any(layer.mixer.position_scale is not None for layer in self.layers)

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotations of its layers, in the order of their first layers."""
        return tuple(dict.fromkeys(layer.mixer.rope for layer in self.layers if layer.mixer.rope is not None))

    @property
    def context_limit(self) -> int:
        """The largest valid max_context of an engine: only `dynamic` rope stretches beyond `max_context`."""
        stretched = (int(rope.original_context * rope.factor) for rope in self.ropes if rope.kind == "dynamic")
        return max(self.max_context, *stretched, 0)

    def least_window(self, context: int) -> int:
        """The fewest tokens that a layer sees, of `context`."""
        return min(layer.mixer.window or context for layer in self.layers)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token over all layers, at `itemsize` bytes per element."""
        return 2 * sum(layer.mixer.kv_size for layer in self.layers) * itemsize

    @cached_property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every tensor that a checkpoint of this shape must have (matrices [out, in])."""
        width = self.hidden_size
        embed = self.embed_size or width
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, embed)}
        for index, layer in enumerate(self.layers):
            parts = layer.mixer.tensor_shapes(width) | layer.ffn.tensor_shapes(width)
            for name in layer.norms.names:
                parts |= self.norm.tensor_shapes(name, width)
            shapes.update((f"layers.{index}.{name}", size) for name, size in parts.items())
        if self.final_norm:
            shapes |= self.norm.tensor_shapes("norm", width)
        if self.learned_positions:
            shapes["positions.weight"] = (self.max_context + OPT_POSITION_OFFSET, width)
        if embed != width:
            shapes["project_in.weight"] = (width, embed)
            shapes["project_out.weight"] = (embed, width)
        if not self.tied_embeddings:
            shapes["head.weight"] = (self.vocab_size, embed)
        return shapes

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors; tied embeddings count once."""
        return sum(math.prod(size) for size in self.tensor_shapes.values())

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all tensors in `dtype` (float32, bfloat16, float16)."""
        return self.num_parameters * ITEM_BYTES[dtype]

    # ---- models whose layers are alike: for code that does not know layers of kinds yet

    @property
    def first(self) -> AttentionShape:
        """The attention of the first layer."""
        return self.layers[0].mixer

    @property
    def sliding_window(self) -> int | None:
        """The window that all layers have; None if some layer sees all tokens."""
        windows = [layer.mixer.window for layer in self.layers]
        return None if None in windows else max(window for window in windows if window is not None)

    @property
    def num_q_heads(self) -> int:
        """Query heads of a layer."""
        return self.first.num_q_heads

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of a layer."""
        return self.first.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.first.head_dim

    @property
    def q_size(self) -> int:
        """Width of all query heads of a layer."""
        return self.first.q_size

    @property
    def kv_size(self) -> int:
        """Width of all key heads of a layer."""
        return self.first.kv_size

    @property
    def ffn_size(self) -> int:
        """Inner channels of the feed-forward part of a layer."""
        return max(layer.ffn.ffn_size for layer in self.layers)
