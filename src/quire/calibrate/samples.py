"""Gathers a model's keys and values, and the cost of an error in each, window by window.

The cost of a squared error is the squared gradient of the loss with respect to that element, the diagonal of the Fisher
information. Layers run a second time for their gradients, one at a time, so that memory holds the graph of one layer
and the input of each layer.

Source: KVQuant, arXiv 2401.18079, equation 1 and section 4.1.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.models.layers import TorchOps
from quire.models.quants import read

if TYPE_CHECKING:
    from quire.models.layers import Linear
    from quire.models.plan import Model
    from quire.models.quants import Weight
    from quire.models.shape import ModelShape

HEAD_ROWS = 256
"""Number of rows per block of logits."""


class _Widened(torch.autograd.Function):
    """A product with a frozen 16-bit weight, and its gradient, in float32. Both widen the weight anew, so that autograd
    keeps no copy.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        context.save_for_backward(weight)
        return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,), (grad,) = context.saved_tensors, grads
        return (grad.float() @ weight.float()).to(grad.dtype), None, None


def _multiplies(weight: Tensor) -> bool:
    """Whether the machine has products of the weight's dtype; without them torch computes number by number."""
    if weight.device.type != "cpu" or weight.dtype == torch.float32:
        return True
    supported: dict[torch.dtype, Callable[[], bool]] = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return torch.backends.mkldnn.is_available() and supported[weight.dtype]()


class GradientOps(TorchOps):
    """TorchOps for autograd: no operation overwrites a tensor that a gradient needs."""

    def linear(self, parts: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """In float32 on CPUs without 16-bit products: without AVX-512 bfloat16 takes four times as long."""
        if len(parts) > 1:
            return super().linear(parts, bias, dtype)
        weight = read(parts[0])
        if not isinstance(weight, Tensor) or _multiplies(weight):
            return super().linear([weight], bias, dtype)
        apply: Callable[..., Tensor] = _Widened.apply
        return lambda x: apply(x, weight, bias)

    def head(self, weight: Weight, dtype: torch.dtype) -> Linear:
        """A product in the model's dtype, like its gradient. In float32 autograd would keep a copy of the matrix with
        twice its bytes.
        """
        return self.linear([weight], None, dtype)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See TorchOps. Later layers update the residual in place, so the norm keeps a copy."""
        return functional.rms_norm(residual.add_(x).clone(), weight.shape, weight, eps)

    def gated(self, gate_up: Tensor) -> Tensor:
        """See TorchOps."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


class TappedPlan:
    """Causal attention over one whole window with torch. It remembers each layer's un-rotated keys and values [T, H,
    D].
    """

    def __init__(self, shape: ModelShape, num_tokens: int, device: torch.device | str) -> None:
        self._groups = shape.num_q_heads // shape.num_kv_heads
        self._window = shape.sliding_window
        self._tables: tuple[Tensor, Tensor] | None = None
        if shape.rope is not None:
            cos, sin = (torch.from_numpy(part)[:, None].to(device) for part in shape.rope.tables(num_tokens))
            self._tables = cos, sin
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See StepPlan."""
        self.keys, self.values = k, v

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See StepPlan."""
        assert self.keys is not None and self.values is not None
        q, k = (self._rotate(x).transpose(0, 1) for x in (q, self.keys))
        v = self.values.transpose(0, 1)
        mask = None
        if self._window is not None and self._window < len(self.keys):
            at = torch.arange(len(self.keys), device=q.device)
            behind = at[:, None] - at
            mask = (behind >= 0) & (behind < self._window)
        out = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], mask, is_causal=mask is None, enable_gqa=self._groups > 1
        )
        return out[0].transpose(0, 1).flatten(1)

    def _rotate(self, x: Tensor) -> Tensor:
        if self._tables is None:
            return x
        cos, sin = (table.to(x.dtype) for table in self._tables)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def gather(model: Model, tokens: Tensor) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yields for every layer, from the last to the first: keys, values [T, H, D], and the gradients of the summed loss
    of one window with respect to both.

    model   built with GradientOps
    tokens  int64 [T]
    """
    shape, device = model.shape, tokens.device
    positions = torch.arange(len(tokens), device=device)
    plan = TappedPlan(shape, len(tokens), device)
    with torch.no_grad():
        states = [model.begin(tokens, positions)]
        for index in range(shape.num_layers):
            states.append(model.layer(index, tuple(part.clone() for part in states[-1]), plan))
    top = tuple(part.detach().requires_grad_() for part in states.pop())
    hidden = model.finish(top)
    given = torch.autograd.grad(hidden, top, _loss_gradient(model, hidden.detach(), tokens), allow_unused=True)
    for index in reversed(range(shape.num_layers)):
        inputs = tuple(part.detach().requires_grad_() for part in states.pop())
        outputs = model.layer(index, tuple(part.clone() for part in inputs), plan)
        keys, values = plan.keys, plan.values
        assert keys is not None and values is not None
        pairs = [(out, grad) for out, grad in zip(outputs, given, strict=True) if grad is not None]
        *given_list, key_grad, value_grad = torch.autograd.grad(
            [out for out, _ in pairs], [*inputs, keys, values], [grad for _, grad in pairs], allow_unused=True
        )
        given = tuple(given_list)
        found = {"keys": keys, "values": values, "key_grads": key_grad, "value_grads": value_grad}
        yield index, {name: tensor.detach() for name, tensor in found.items()}


def _loss_gradient(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Gradient of the summed loss of every next token with respect to the last hidden states, by blocks of rows."""
    gradient = torch.zeros_like(hidden)
    for start in range(0, len(tokens) - 1, HEAD_ROWS):
        rows = slice(start, min(start + HEAD_ROWS, len(tokens) - 1))
        block = hidden[rows].clone().requires_grad_()
        targets = tokens[rows.start + 1 : rows.stop + 1]
        loss = functional.cross_entropy(model.head(block).float(), targets, reduction="sum")
        (gradient[rows],) = torch.autograd.grad(loss, block)
    return gradient


@dataclass(frozen=True)
class LayerSamples:
    """Keys and values of one layer, float32 [T, H, D], and the cost of a squared error in each element."""

    keys: Tensor
    values: Tensor
    key_cost: Tensor
    value_cost: Tensor

    def split(self, first: int) -> tuple[LayerSamples, LayerSamples]:
        """Splits them into the first `first` tokens and the others."""
        parts = (self.keys, self.values, self.key_cost, self.value_cost)
        return LayerSamples(*(part[:first] for part in parts)), LayerSamples(*(part[first:] for part in parts))


class SampleStore:
    """The samples of all windows in a folder, one file per window, so that an interrupted calibration can resume.

    folder  the folder of one model, text and settings
    skip    number of first tokens to leave out of each window
    """

    def __init__(self, folder: Path, skip: int) -> None:
        self.folder = folder
        self.skip = skip
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, window: int) -> Path:
        return self.folder / f"window-{window}.safetensors"

    def tokens(self) -> Tensor | None:
        """The windows to gather, int64 [windows, T]; None before they are put."""
        from safetensors.torch import load_file

        path = self.folder / "tokens.safetensors"
        return load_file(path)["tokens"] if _is_whole(path) else None

    def put_tokens(self, tokens: Tensor) -> None:
        """Stores the windows to gather."""
        self._save({"tokens": tokens}, self.folder / "tokens.safetensors")

    def has(self, window: int) -> bool:
        """Whether a window has been gathered completely."""
        return _is_whole(self._path(window))

    def put(self, window: int, model: Model, tokens: Tensor, progress: Callable[[int], None]) -> None:
        """Gathers a window. Calls progress with the number of layers done."""
        found = {}
        for done, (layer, parts) in enumerate(gather(model, tokens), 1):
            for name, tensor in parts.items():
                found[f"{layer}.{name}"] = tensor[self.skip :].to("cpu", torch.bfloat16).contiguous()
            progress(done)
        self._save(found, self._path(window))

    def layer(self, layer: int, windows: int) -> LayerSamples:
        """The samples of one layer, concatenated over all windows."""
        from safetensors import safe_open

        parts: dict[str, list[Tensor]] = {"keys": [], "values": [], "key_grads": [], "value_grads": []}
        for window in range(windows):
            with safe_open(self._path(window), "pt") as file:
                for name, tensors in parts.items():
                    tensors.append(file.get_tensor(f"{layer}.{name}").float())
        keys, values, key_grads, value_grads = (torch.cat(tensors) for tensors in parts.values())
        return LayerSamples(keys, values, key_grads.square(), value_grads.square())

    def clear(self) -> None:
        """Deletes the folder."""
        shutil.rmtree(self.folder)

    def _save(self, tensors: dict[str, Tensor], path: Path) -> None:
        """Writes a file atomically. Raises OSError, also for a full disk."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file(tensors, unfinished)
            unfinished.replace(path)
        except SafetensorError as error:  # the library raises this for every error of the system
            raise OSError(errno.EIO, str(error), str(path)) from error
        finally:
            unfinished.unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    """Whether a safetensors file is there and can be read."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return False
    try:
        with safe_open(path, "pt"):
            return True
    except SafetensorError:
        return False
