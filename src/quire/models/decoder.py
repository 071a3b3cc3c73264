"""The dense decoder of Llama, Mistral, SmolLM2, Qwen2 and Qwen3, and the function that builds any model.

    x = norm(embed[token]);  per layer:  x = o(attend(qkv(x)));  x = down(silu(gate(x)) * up(x));  logits =
    head(norm(x))

with a separate residual stream. The families differ only by data: biases, norms on q and k, tied embeddings. Knows
rows, not requests; neither rotates nor masks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from quire.models.layers import GatedLayer
from quire.models.loading import WeightSource
from quire.models.opt import OptDecoder
from quire.models.plan import Model

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.layers import Ops
    from quire.models.loading import Form
    from quire.models.plan import StepPlan
    from quire.models.shape import ModelShape
    from quire.models.weights import Checkpoint

# A smaller model loads with one thread in about a second. More threads are a risk: loading is thousands of short
# operations, and on a busy machine each waits until all threads are scheduled. Embedded model, two cores: 0.25 s with
# one thread, 0.18 s with two; with four other processes running 0.6 s and 20 s.
_ONE_THREAD_PARAMETERS = 500_000_000


class Decoder(Model):
    """A gated decoder. `ops` packs its weights once; they never change."""

    def __init__(self, shape: ModelShape, weights: WeightSource, ops: Ops) -> None:
        self.shape = shape
        self._ops = ops
        self._heads = shape.num_q_heads + 2 * shape.num_kv_heads
        self._split = (shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads)
        self._embed, head = weights.embedding("embed", tied=shape.tied_embeddings)
        norms = [weights.tensor(f"layers.{index}.attn_norm.weight") for index in range(shape.num_layers)]
        self._first_norm, *next_norms = [*norms, weights.tensor("norm.weight")]
        self._layers = [self._load_layer(f"layers.{index}", weights, norm) for index, norm in enumerate(next_norms)]
        self.key_bias = weights.key_bias(shape)
        self._stack = ops.stack(self._layers, shape.norm_eps)
        self._head = head or weights.head("head")

    def _load_layer(self, at: str, weights: WeightSource, next_norm: Tensor) -> GatedLayer:
        shape = self.shape
        return GatedLayer(
            qkv=weights.linear(f"{at}.q", f"{at}.k", f"{at}.v", bias=shape.qkv_bias),
            q_norm=weights.tensor(f"{at}.q_norm.weight") if shape.qk_norm else None,
            k_norm=weights.tensor(f"{at}.k_norm.weight") if shape.qk_norm else None,
            o=weights.linear(f"{at}.o", bias=shape.o_bias),
            mlp_norm=weights.tensor(f"{at}.mlp_norm.weight"),
            gate_up=weights.linear(f"{at}.gate", f"{at}.up", bias=shape.mlp_bias, gated=True),
            down=weights.linear(f"{at}.down", bias=shape.mlp_bias),
            next_norm=next_norm,
        )

    def hidden(self, tokens: Tensor, positions: Tensor, plan: StepPlan) -> Tensor:
        """See `plan.Model.hidden`. Positions are not read here; the plan has them."""
        address = getattr(plan, "address", None)
        if self._stack is not None and address is not None:
            return self._stack(*self.begin(tokens, positions), address)
        return super().hidden(tokens, positions, plan)

    def begin(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The first norm's output and the residual stream, [R, E] each."""
        residual = self._embed(tokens)
        return self._ops.norm(residual, self._first_norm, self.shape.norm_eps), residual

    def layer(self, index: int, state: tuple[Tensor, ...], plan: StepPlan) -> tuple[Tensor, Tensor]:
        """One layer: the next norm's output and the residual stream, which is updated in place."""
        x, residual = state
        ops, eps = self._ops, self.shape.norm_eps
        qkv, q_norm, k_norm, o, mlp_norm, gate_up, down, next_norm = self._layers[index]
        q, k, v = qkv(x).view(-1, self._heads, self.shape.head_dim).split_with_sizes(self._split, 1)
        if q_norm is not None and k_norm is not None:
            q = ops.norm(q, q_norm, eps)
            k = ops.norm(k, k_norm, eps)
        plan.write(index, k, v)
        x = ops.add_norm(o(plan.attend(index, q)), residual, mlp_norm, eps)
        return ops.add_norm(down(gate_up(x)), residual, next_norm, eps), residual

    def finish(self, state: tuple[Tensor, ...]) -> Tensor:
        """The last norm's output, [R, E]: that of the last layer."""
        return state[0]

    def head(self, hidden: Tensor) -> Tensor:
        """See `plan.Model.head`."""
        return self._head(hidden)


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
        model = OptDecoder(shape, source, ops) if shape.architecture == "opt" else Decoder(shape, source, ops)
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
