"""Decoder operations with gradients for rows. Weights are frozen, so an operation keeps only what its gradient needs.

`GradientOps` multiplies with plain tensors on any device. `PanelGradientOps` multiplies with the panels that the CPU
engine serves from, and decodes some rows of a matrix at a time for a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.models.cpu_ops import CpuOps
from quire.models.cpu_panels import GATE_LANES, Panels, has_panels
from quire.models.layers import Embedding, Linear, TorchLinear, TorchOps, gate_activation
from quire.models.quants import Blocks, read

if TYPE_CHECKING:
    from quire.models.ffn.gated import GateActivation
    from quire.models.quants import Weight

DECODED_ROWS = 4096
"""Rows of a matrix that are decoded at once: 24 MiB of float32 for 1,536 inputs."""


class _Norm(torch.autograd.Function):
    """RMS norm over the last dimension. It keeps only its input; torch's own norm keeps three tensors in float32."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        context.save_for_backward(x, weight)
        context.eps = eps
        return functional.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x, weight), (grad,) = context.saved_tensors, grads
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + context.eps).rsqrt()
        scaled = grad.float() * weight.float()
        along = (scaled * wide).mean(-1, keepdim=True)
        return scaled.sub_(wide * (along * scale.square())).mul_(scale).to(grad.dtype), None, None


class _Gated(torch.autograd.Function):
    """act(gate) * up of two tensors of one shape. It keeps only these two."""

    @staticmethod
    def forward(context: Any, gate: Tensor, up: Tensor, activation: GateActivation) -> Tensor:
        context.save_for_backward(gate, up)
        context.activation = activation
        return gate_activation(gate, activation).mul_(up)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (gate, up), (grad,), activation = context.saved_tensors, grads, context.activation
        if activation == "gelu-tanh":
            of_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        else:
            of_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return of_gate, gate_activation(gate, activation).mul_(grad), None


class _Product(torch.autograd.Function):
    """A product with a matrix in panels. It keeps no tensors: its gradient decodes the matrix again."""

    @staticmethod
    def forward(context: Any, x: Tensor, panels: Panels) -> Tensor:
        context.panels, context.dtype = panels, x.dtype
        return panels(x if x.stride(-1) == 1 else x.contiguous())

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad, panels = grads[0], context.panels
        found, at = torch.zeros(len(grad), panels.shape[1]), 0
        narrow = has_matmul(context.dtype, grad.device)
        for rows in panels.decoded(DECODED_ROWS, context.dtype if narrow else torch.float32):
            part = grad[:, at : at + len(rows)]
            at += len(rows)
            if narrow:
                found += part.to(rows.dtype) @ rows
            else:
                found.addmm_(part.float(), rows.float())
        return found.to(context.dtype), None


def has_matmul(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device has fast products of a dtype; otherwise torch computes them element by element."""
    if device.type != "cpu" or dtype == torch.float32:
        return True
    supported: dict[torch.dtype, Callable[[], bool]] = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return torch.backends.mkldnn.is_available() and supported[dtype]()


def _applied(function: type[torch.autograd.Function], *given: Any) -> Tensor:
    found: Tensor = function.apply(*given)
    return found


class _Norms:
    """The operations over rows, for both backends."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See TorchOps."""
        return _applied(_Norm, x, weight, eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See TorchOps. Later layers update the residual in place, so the norm keeps a copy."""
        return _applied(_Norm, residual.add_(x).clone(), weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """See TorchOps. Its input may be the residual stream, so the norm keeps a copy."""
        return functional.layer_norm(x.clone(), weight.shape, weight, bias, eps)

    def gated(self, gate_up: Tensor, activation: GateActivation) -> Tensor:
        """See TorchOps."""
        return _applied(_Gated, *gate_up.chunk(2, dim=-1), activation)

    def stack(self, layers: object, shape: object) -> None:
        """None: layers run one by one."""


class GradientOps(_Norms, TorchOps):
    """Operations with gradients over plain tensors."""

    def head(self, weight: Weight, dtype: torch.dtype) -> Linear:
        """A product in the model's dtype, like its gradient. In float32 autograd would keep a copy of the matrix with
        twice its bytes.
        """
        return self.linear([weight], None, dtype)


class PanelGradientOps(_Norms, CpuOps):
    """Operations with gradients over panels, in the layout of `CpuOps`, so that both can map the same layer image."""

    def panels(  # type: ignore[override]
        self, parts: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype, *, gated: GateActivation | None = None
    ) -> Linear:
        """See CpuOps."""
        made = super().panels(parts, bias, dtype, gated=gated)
        return _gated_product(made, gated) if gated else _product(made)

    def plain(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """The tensor itself: oneDNN's layout has no gradient."""
        found = read(weight)
        assert not isinstance(found, Blocks), f"there are no panels of {found.kind}"
        return TorchLinear(found, bias)

    def head(self, weight: Weight, dtype: torch.dtype) -> Linear:
        """See TorchOps."""
        if not has_panels(weight, dtype):
            return self.plain(weight, None, dtype)
        return _product(Panels([weight], None, dtype, self._memory, wide=True))

    def tied(self, weight: Weight, dtype: torch.dtype) -> tuple[Embedding, Linear]:
        """One matrix serves both."""
        if not has_panels(weight, dtype):
            return TorchOps().embedding(found := read(weight), dtype), self.plain(found, None, dtype)
        panels = Panels([weight], None, dtype, self._memory, wide=True)
        return panels.rows, _product(panels)


def _product(panels: Panels) -> Linear:
    return lambda x: _applied(_Product, x, panels)


def _gated_product(panels: Panels, activation: GateActivation) -> Linear:
    """The product followed by the gate. The kernel's fused gate discards the sums, which the gradient needs."""
    both, width = panels.without_gate(), panels.shape[0]

    def multiply(x: Tensor) -> Tensor:
        sums = _applied(_Product, x, both)
        gate, up = sums.view(len(x), -1, 2, GATE_LANES).unbind(2)
        return _applied(_Gated, gate, up, activation).flatten(1)[:, :width]

    return multiply
