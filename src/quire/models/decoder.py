"""The decoder of all models: an embedding, a list of layers, and an output head.

    r = embed[token];  per layer:  r += mixer(norm(r));  r += ffn(norm(r));  logits = head(norm(r))

r is the residual stream. Families differ by data: the kinds of their layers, the places of their norms, factors.
Knows rows, not requests; neither rotates nor masks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from quire.models.layers import Layer
from quire.models.loading import WeightSource
from quire.models.mixers.attention import Attention
from quire.models.plan import Model
from quire.models.shape import OPT_POSITION_OFFSET

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.layers import Ops
    from quire.models.loading import Form
    from quire.models.norms import Norm
    from quire.models.plan import StepPlan
    from quire.models.shape import LayerShape, ModelShape
    from quire.models.weights import Checkpoint

# A smaller model loads with one thread in about a second. More threads are a risk: loading is thousands of short
# operations, and on a busy machine each waits until all threads are scheduled. Embedded model, two cores: 0.25 s with
# one thread, 0.18 s with two; with four other processes running 0.6 s and 20 s.
_ONE_THREAD_PARAMETERS = 500_000_000


class Decoder(Model):
    """A list of layers between an embedding and an output head. `ops` packs its weights once; they never change.

    The state between layers is the residual stream, [R, E]. Where a norm can be fused with the sum before it, the state
    has the next layer's normalised input before the residual stream. Where a layer reads positions, they follow.
    """

    def __init__(self, shape: ModelShape, weights: WeightSource, ops: Ops) -> None:
        self.shape = shape
        self._embed, head = weights.embedding("embed", tied=shape.tied_embeddings)
        # Cuts off the two padding rows once, so that a position is the index of its row.
        self._positions = weights.tensor("positions.weight")[OPT_POSITION_OFFSET:] if shape.learned_positions else None
        is_projected = "project_in.weight" in shape.tensor_shapes
        self._project_in = weights.linear("project_in", bias=False) if is_projected else None
        self._project_out = weights.linear("project_out", bias=False) if is_projected else None
        self._embed_scale = weights.constant([shape.embed_scale]).item()
        self._last_norm = shape.norm.load("norm", weights, ops) if shape.final_norm else None
        self._layers = self._load_layers(weights, ops)
        self._first_norm = self._layers[0].norms.get("attn_norm") if shape.is_fused else None
        self.key_bias = weights.key_bias(shape)
        self._stack = ops.stack(self._layers, shape)
        self._head = head or weights.head("head")

    def _load_layers(self, weights: WeightSource, ops: Ops) -> list[Layer]:
        shape = self.shape
        norms = [
            {name: shape.norm.load(f"layers.{index}.{name}", weights, ops) for name in layer.norms.names}
            for index, layer in enumerate(shape.layers)
        ]
        next_norms: list[Norm | None] = [None] * shape.num_layers
        if shape.is_fused:
            next_norms = [*(each["attn_norm"] for each in norms[1:]), self._last_norm]
        return [
            Layer(
                layer,
                Attention(layer.mixer, f"layers.{index}", weights, ops, shape.norm.eps),
                layer.ffn.load(f"layers.{index}", weights),
                norms[index],
                next_norms[index],
            )
            for index, layer in enumerate(shape.layers)
        ]

    def hidden(self, tokens: Tensor, positions: Tensor, plan: StepPlan) -> Tensor:
        """See `plan.Model.hidden`."""
        address = getattr(plan, "address", None)
        if self._stack is not None and address is not None:
            return self.finish(self._stack(self.begin(tokens, positions), address))
        return super().hidden(tokens, positions, plan)

    def begin(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """The state before the first layer."""
        residual = self._embed(tokens)
        if self._project_in is not None:
            residual = self._project_in(residual)
        if self._embed_scale != 1:
            residual = residual * self._embed_scale
        if self._positions is not None:
            residual = residual + functional.embedding(positions, self._positions)
        x = None if self._first_norm is None else self._first_norm(residual)
        return self._state(x, residual, positions if self.shape.reads_positions else None)

    def layer(self, index: int, state: tuple[Tensor, ...], plan: StepPlan) -> tuple[Tensor, ...]:
        """The state after one layer. The residual stream may be updated in place."""
        streams = state[:-1] if self.shape.reads_positions else state
        positions = state[-1] if self.shape.reads_positions else None
        x, residual = streams[0], streams[-1]
        shape, mixer, ffn, norms, next_norm = self._layers[index]
        if shape.norms.inputs and len(streams) == 1:
            x = norms["attn_norm"](residual)
        out = mixer(index, x, positions, plan)
        if shape.norms.parallel:
            out = out.add_(ffn(x))
        else:
            in_norm = norms["mlp_norm"] if shape.norms.inputs else None
            x = _add(out, residual, shape, norms.get("attn_out_norm"), in_norm)
            if shape.norms.sums:
                x = residual = norms["attn_norm"](residual)
            out = ffn(x)
        x = _add(out, residual, shape, norms.get("mlp_out_norm"), next_norm)
        if shape.norms.sums:
            residual = norms["mlp_norm"](residual)
        return self._state(None if next_norm is None else x, residual, positions)

    def finish(self, state: tuple[Tensor, ...]) -> Tensor:
        """The last norm's output, if there is one, [R, E]."""
        if self._last_norm is None or self.shape.is_fused:
            return state[0]
        return self._last_norm(state[0])

    def head(self, hidden: Tensor) -> Tensor:
        """See `plan.Model.head`."""
        logits = self._head(hidden if self._project_out is None else self._project_out(hidden))
        if self.shape.logit_scale != 1:
            logits = logits.mul_(self.shape.logit_scale)
        if (cap := self.shape.logit_cap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits

    @staticmethod
    def _state(x: Tensor | None, residual: Tensor, positions: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(each for each in (x, residual, positions) if each is not None)


def _add(out: Tensor, residual: Tensor, shape: LayerShape, out_norm: Norm | None, in_norm: Norm | None) -> Tensor:
    """Adds the output of a part to the residual stream, in place. Returns the input of the next part."""
    if out_norm is not None:
        out = out_norm(out)
    if shape.residual_scale != 1:
        out = out.mul_(shape.residual_scale)
    return residual.add_(out) if in_norm is None else in_norm.of_sum(out, residual)


def build_model(
    shape: ModelShape,
    weights: Checkpoint,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    form: Form = "dequantized",
) -> Model:
    """Loads every tensor once, converts it to `dtype`, moves it to `device` and packs it. The checkpoint may be closed
    afterwards.

    Loads one weight at a time, so that at most one of them exists both plain and packed. `form` is the type of matrices
    in memory; see WeightSource.
    """
    source = WeightSource(weights, ops, dtype, device, form)
    with _load_threads(shape.num_parameters):
        model = Decoder(shape, source, ops)
    source.warn_about_dequantized()
    return model


@contextlib.contextmanager
def _load_threads(num_parameters: int) -> Iterator[None]:
    """Uses one torch thread while a small model loads, and restores the caller's number afterwards."""
    threads = torch.get_num_threads()
    if num_parameters < _ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
