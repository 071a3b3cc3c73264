"""A model in numbers: sizes, rotation, and the name and shape of every tensor.

Imports neither torch nor a file format, so that `quire inspect` and the planners can count bytes without loading
anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from quire.errors import ModelError

if TYPE_CHECKING:
    from numpy import float32, float64
    from numpy.typing import NDArray

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of each supported dtype."""

OPT_POSITION_OFFSET = 2
"""OPT's table of learned positions starts with two padding rows: position p is row p + 2."""

MAX_SIZE = 2**31 - 1
"""Upper bound of a model's sizes and counts; a larger number means that the file is damaged."""

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "factors")

# Angles are computed in float64, this many positions at a time: 131,072 positions at once would temporarily need 200
# MB.
_TABLE_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of one model: pairs channel i with channel i + dim/2 (rotate-half).

    `dynamic` is NTK scaling. Its base would depend on the length of the current sequence, but keys in a shared cache
    must not depend on a request. So the engine's `max_context` takes the place of that length. If it is at most
    `original_context`, frequencies are unscaled. Otherwise all positions of all requests have the frequencies of a
    sequence of `max_context` tokens.
    """

    theta: float
    """Base of the frequencies."""
    dim: int
    """Rotated channels of a head; all of them."""
    kind: str = "default"
    """One of ROPE_KINDS. `factors` divides each frequency by its own number (how GGUF stores `llama3`)."""
    factor: float = 1.0
    """linear, dynamic, llama3: the factor by which the context is stretched."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_context / low_freq_factor are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_context / high_freq_factor are not stretched."""
    original_context: int = 0
    """llama3, dynamic: positions of the pre-training, before stretching."""
    factors: tuple[float, ...] = ()
    """factors: dim/2 divisors."""

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ModelError(f"rope scaling {self.kind!r} is not supported (only {', '.join(ROPE_KINDS)})")
        # Below `least` frequencies overflow. There is no upper bound on theta: models with 1e11 exist.
        least = 1 / MAX_SIZE
        if self.dim <= 0 or self.dim % 2 or not (least < self.theta < math.inf and least < self.factor <= MAX_SIZE):
            raise ModelError(
                f"rope needs an even dim, a finite theta > 0 and a factor from above 0 to {MAX_SIZE}; "
                f"got {self.dim}, {self.theta}, {self.factor}"
            )
        if self.kind == "dynamic" and self.dim == 2:
            raise ModelError("rope scaling 'dynamic' needs heads of more than 2 channels")
        if self.kind in ("dynamic", "llama3") and self.original_context <= 0:
            raise ModelError(f"rope scaling {self.kind!r} needs the original context length")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                "rope scaling 'llama3' needs low_freq_factor < high_freq_factor; "
                f"got {self.low_freq_factor:g} and {self.high_freq_factor:g}"
            )
        if self.kind == "factors" and len(self.factors) != self.dim // 2:
            raise ModelError(f"rope has {len(self.factors)} frequency factors for {self.dim // 2} channel pairs")
        if not all(0 < factor < math.inf for factor in self.factors):
            raise ModelError("rope has a frequency factor that is not a positive number")

    def frequencies(self, max_context: int) -> NDArray[float64]:
        """Radians per position of each channel pair, f64 [dim/2]; only `dynamic` uses max_context (tokens)."""
        import numpy as np

        exponents = np.arange(0, self.dim, 2, dtype=np.float64) / self.dim
        theta = self.theta
        if self.kind == "dynamic" and max_context > self.original_context:
            stretch = self.factor * max_context / self.original_context - (self.factor - 1)
            theta *= stretch ** (self.dim / (self.dim - 2))
        plain: NDArray[float64] = theta**-exponents
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "factors":
            return plain / np.asarray(self.factors, dtype=np.float64)
        if self.kind == "llama3":
            # The number of turns of a pair over the original context decides: few turns are stretched, many are not,
            # and between them the two are blended linearly.
            turns = self.original_context * plain / (2 * math.pi)
            kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
            return kept * plain + (1 - kept) * plain / self.factor
        return plain

    def tables(self, max_context: int) -> tuple[NDArray[float32], NDArray[float32]]:
        """(cos, sin) of positions 0 .. max_context-1, f32 [max_context, dim/2] each, rounded once from f64."""
        import numpy as np

        frequencies = self.frequencies(max_context)
        cos = np.empty((max_context, self.dim // 2), dtype=np.float32)
        sin = np.empty_like(cos)
        for first in range(0, max_context, _TABLE_ROWS):
            positions = np.arange(first, min(first + _TABLE_ROWS, max_context), dtype=np.float64)
            angles = np.outer(positions, frequencies)
            cos[first : first + len(positions)] = np.cos(angles)
            sin[first : first + len(positions)] = np.sin(angles)
        return cos, sin


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """All numbers that determine how a checkpoint runs; equal shapes run the same code."""

    architecture: str
    """llama, mistral, qwen2, qwen3 or opt."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_context: int
    """Positions the checkpoint serves without further stretching."""
    norm_eps: float
    rope: Rope | None
    """None: learned positions (OPT). The decoder adds them itself, and the plan rotates nothing."""
    sliding_window: int | None = None
    """Number of tokens a query sees, itself included: key j is visible to query i if i - window < j <= i. None: all."""
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of q and k, before rotation."""
    activation: str = "silu"
    dtype: str = "bfloat16"
    """The checkpoint's own dtype; bfloat16 for quantized files."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    embed_size: int | None = None
    """OPT-350m: width of the embedding where it differs from hidden_size. None: the same."""
    norm_first: bool = True
    """OPT: norms before the sublayers (True) or after the residual sum (False, 350m)."""
    final_norm: bool = True
    """A norm before the output head."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_q_heads",
            "num_kv_heads",
            "head_dim",
            "ffn_size",
            "max_context",
        ):
            if not 1 <= getattr(self, name) <= MAX_SIZE:
                raise ModelError(f"{name} is {getattr(self, name)}; it must lie between 1 and {MAX_SIZE}")
        if self.num_q_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_q_heads} query heads cannot be shared among {self.num_kv_heads} key-value heads"
            )
        if self.rope is not None and self.rope.dim != self.head_dim:
            raise ModelError(
                f"rope rotates {self.rope.dim} of {self.head_dim} channels; only whole heads are supported"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ModelError(f"sliding_window is {self.sliding_window}; it must be positive")
        if self.dtype not in ITEM_BYTES:
            raise ModelError(f"dtype {self.dtype!r} is not supported (only {', '.join(ITEM_BYTES)})")

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (or all value heads) together."""
        return self.num_kv_heads * self.head_dim

    @property
    def context_limit(self) -> int:
        """The largest valid max_context of an engine: only `dynamic` rope stretches beyond `max_context`."""
        if self.rope is not None and self.rope.kind == "dynamic":
            return max(self.max_context, int(self.rope.original_context * self.rope.factor))
        return self.max_context

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token over all layers, at `itemsize` bytes per element."""
        return 2 * self.num_layers * self.kv_size * itemsize

    @cached_property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every tensor that a checkpoint of this shape must have (matrices [out, in])."""
        embed = self.embed_size or self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, embed)}
        layer = self._layer()
        for index in range(self.num_layers):
            shapes.update((f"layers.{index}.{name}", size) for name, size in layer.items())
        if self.final_norm:
            shapes["norm.weight"] = (self.hidden_size,)
        if self.architecture == "opt":
            shapes["positions.weight"] = (self.max_context + OPT_POSITION_OFFSET, self.hidden_size)
            if self.final_norm:
                shapes["norm.bias"] = (self.hidden_size,)
            if embed != self.hidden_size:
                shapes["project_in.weight"] = (self.hidden_size, embed)
                shapes["project_out.weight"] = (embed, self.hidden_size)
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

    def _layer(self) -> dict[str, tuple[int, ...]]:
        """The tensors of a layer. OPT's norms have a bias, and its MLP has no gate."""
        is_opt, channels = self.architecture == "opt", self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "q.weight": (self.q_size, channels),
            "k.weight": (self.kv_size, channels),
            "v.weight": (self.kv_size, channels),
            "o.weight": (channels, self.q_size),
        }
        if self.qkv_bias:
            shapes |= {"q.bias": (self.q_size,), "k.bias": (self.kv_size,), "v.bias": (self.kv_size,)}
        if self.o_bias:
            shapes["o.bias"] = (channels,)
        for norm in ("attn_norm", "mlp_norm"):
            shapes |= {f"{norm}.{part}": (channels,) for part in (("weight", "bias") if is_opt else ("weight",))}
        widening = ("up",) if is_opt else ("gate", "up")
        shapes |= {f"{name}.weight": (self.ffn_size, channels) for name in widening}
        shapes["down.weight"] = (channels, self.ffn_size)
        if self.mlp_bias:
            shapes |= {f"{name}.bias": (self.ffn_size,) for name in widening} | {"down.bias": (channels,)}
        if self.qk_norm:
            shapes |= {"q_norm.weight": (self.head_dim,), "k_norm.weight": (self.head_dim,)}
        return shapes
