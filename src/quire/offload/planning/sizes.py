"""The inputs of the cost model that follow from a model's shape: stored bytes, operations, working memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.models.shape import ITEM_BYTES
from quire.offload.planning.costs import Sizes

if TYPE_CHECKING:
    from quire.models.shape import ModelShape

_PRODUCTS = ("q", "k", "v"), ("gate", "up")
"""Matrices of a layer that are multiplied together."""

MatrixBytes = Callable[[str, tuple[int, ...]], float]
"""(canonical name, shape) -> bytes of a tensor in memory."""


def matrices_of(
    shape: ModelShape, tensor_bytes: MatrixBytes, kind_of: Callable[[str], str | None]
) -> tuple[tuple[float, ...], ...]:
    """Bytes of the placeable units of each layer: all matrices of one product and one type are one unit.

    kind_of  canonical name -> type of its blocks in memory; None: plain numbers
    """
    layers: list[dict[tuple[str, str | None], float]] = [{} for _ in range(shape.num_layers)]
    for name, size in shape.tensor_shapes.items():
        if not name.startswith("layers.") or len(size) != 2:
            continue
        _, index, part, *_ = name.split(".")
        product = next((joined for joined in _PRODUCTS if part in joined), (part,))
        found = layers[int(index)]
        key = product[0], kind_of(name)
        found[key] = found.get(key, 0.0) + tensor_bytes(name, size)
    return tuple(tuple(found.values()) for found in layers)


def sizes_of(
    shape: ModelShape,
    dtype: str,
    tensor_bytes: MatrixBytes,
    cache_bytes: float,
    *,
    gates_inside: bool = False,
) -> Sizes:
    """The numbers of a model, without the scratch of prompts, which depends on their length.

    dtype         dtype of activations
    tensor_bytes  bytes of a tensor as it is held: packed, or in the dtype
    cache_bytes   bytes of a cached token in one layer
    gates_inside  whether the product of a gated layer's first matrices applies the gate, as the CPU's does
    """
    item = ITEM_BYTES[dtype]
    in_layers, outside, multiplied = 0.0, 0.0, 0.0
    for name, size in shape.tensor_shapes.items():
        if name.startswith("layers."):
            in_layers += tensor_bytes(name, size)
            multiplied += math.prod(size) if len(size) == 2 else 0
        else:
            outside += tensor_bytes(name, size)
    layers = shape.num_layers
    # A gated decoder passes on the normalised rows in addition to the residual stream.
    streams = 1 + shape.is_fused
    stages = _stages(shape, item, 1 if gates_inside or not shape.has_gates else 3)
    head = 2.0 * shape.vocab_size * (shape.embed_size or shape.hidden_size)
    return Sizes(
        num_layers=layers,
        layer_bytes=in_layers / layers,
        cache_bytes=cache_bytes,
        hidden_bytes=float(streams * shape.hidden_size * item),
        layer_flops=2.0 * multiplied / layers,
        pair_flops=4.0 * shape.q_size,
        score_bytes=4.0 * shape.num_q_heads,
        decode=stages,
        head_flops=head,
        fixed_bytes=outside,
    )


def _stages(shape: ModelShape, item: int, inner: int) -> tuple[float, ...]:
    """Bytes per token of the buffers of a layer's products; attention keeps no matrix of scores. inner: those of the
    size of the MLP.
    """
    qkv = shape.q_size + 2 * shape.kv_size
    inner *= shape.ffn_size
    return (
        float(item * (shape.hidden_size + qkv)),
        float(item * (qkv + shape.q_size)),
        float(item * (2 * shape.hidden_size + inner)),
    )
