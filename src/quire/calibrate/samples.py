"""Gathers a model's keys and values, and the cost of an error in each, window by window.

The cost of a squared error is the squared gradient of the loss with respect to that element, the diagonal of the Fisher
information. Memory holds the graph of one segment of layers, and the input of each segment: layers of all segments but
the last run a second time for their gradients.

Source: KVQuant, arXiv 2401.18079, equation 1 and section 4.1.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from quire.calibrate.gradients import has_matmul
from quire.kernels.memory import trim_heap
from quire.safe_io import atomic_write

if TYPE_CHECKING:
    from quire.models.plan import Model
    from quire.models.rope import Rope
    from quire.models.shape import ModelShape

HEAD_ROWS = 128
"""Number of rows per block of logits: 74 MiB in float32 for a vocabulary of 151,936, three times. The gradient of each
block decodes the whole head.
"""

GRAPH_BYTES = 1 << 30
"""Maximum bytes of a segment's graph. That of 512 tokens of Qwen2.5-1.5B in bfloat16 takes 0.7 GiB, so that all its
layers are one segment, and none runs twice.
"""


class CapturePlan:
    """Causal attention over one whole window with torch. It keeps each layer's un-rotated keys and values [T, H, D].

    tell  called in each layer, in the forward and in the backward pass
    """

    def __init__(
        self, shape: ModelShape, num_tokens: int, device: torch.device | str, tell: Callable[[], None] = lambda: None
    ) -> None:
        self._layers = [layer.mixer for layer in shape.layers]
        self._tables = {
            rope: [torch.from_numpy(part)[:, None].to(device) for part in rope.tables(num_tokens)]
            for rope in shape.ropes
        }
        self._tell = tell
        self.captured: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See StepPlan."""
        tell = self._tell
        tell()
        if k.requires_grad:
            k.register_hook(lambda grad: tell())  # not of self: a circle of references would keep the window
        self.captured[layer] = k, v

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See StepPlan."""
        keys, values = self.captured[layer]
        mixer = self._layers[layer]
        q, k = (self._rotate(x, mixer.rope).transpose(0, 1) for x in (q, keys))
        v = values.transpose(0, 1)
        dtype = q.dtype
        if not has_matmul(dtype, q.device):
            q, k, v = q.float(), k.float(), v.float()
        mask = None
        if mixer.soft_cap is not None or (mixer.window or len(keys)) < len(keys):
            at = torch.arange(len(keys), device=q.device)
            behind = at[:, None] - at
            mask = (behind >= 0) & (behind < (mixer.window or len(keys)))
        groups = mixer.num_q_heads // mixer.num_kv_heads
        if mixer.soft_cap is None or mask is None:
            out = functional.scaled_dot_product_attention(
                q[None], k[None], v[None], mask, is_causal=mask is None, scale=mixer.score_scale, enable_gqa=groups > 1
            )[0]
        else:
            k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
            scale = mixer.head_dim**-0.5 if mixer.score_scale is None else mixer.score_scale
            scores = mixer.soft_cap * torch.tanh(q @ k.transpose(1, 2) * (scale / mixer.soft_cap))
            out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        return out.transpose(0, 1).flatten(1).to(dtype)

    def _rotate(self, x: Tensor, rope: Rope | None) -> Tensor:
        if rope is None:
            return x
        cos, sin = (table.to(x.dtype) for table in self._tables[rope])
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def gather(
    model: Model, tokens: Tensor, tell: Callable[[], None] = lambda: None
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yields for every layer, from the last to the first: keys, values [T, H, D], and the gradients of the summed loss
    of one window with respect to both.

    model   built with the operations of `gradients`
    tokens  int64 [T]
    tell    called several times per layer; an exception that it raises ends the work
    """
    shape, device = model.shape, tokens.device
    positions = torch.arange(len(tokens), device=device)
    plan = CapturePlan(shape, len(tokens), device, tell)

    def run(state: tuple[Tensor, ...], layers: range) -> tuple[Tensor, ...]:
        state = tuple(part.clone() for part in state)
        for index in layers:
            state = model.layer(index, state, plan)
        return state

    with torch.no_grad():
        states = [model.begin(tokens, positions)]
        segments = _segments(shape, len(tokens), states[0][0].element_size())
        for layers in segments[:-1]:
            states.append(run(states[-1], layers))
    given: tuple[Tensor | None, ...] | None = None
    for layers in reversed(segments):
        plan.captured = {}
        inputs = tuple(part.detach().requires_grad_() for part in states.pop())
        outputs = run(inputs, layers)
        if given is None:
            outputs = (model.finish(outputs),)
            given = (_loss_gradient(model, outputs[0].detach(), tokens),)
        captured = [part for index in layers for part in plan.captured[index]]
        pairs = [(out, grad) for out, grad in zip(outputs, given, strict=True) if grad is not None]
        grads = torch.autograd.grad(
            [out for out, _ in pairs], [*inputs, *captured], [grad for _, grad in pairs], allow_unused=True
        )
        given, of_captured = grads[: len(inputs)], grads[len(inputs) :]
        for index in reversed(layers):
            at = 2 * (index - layers.start)
            names = ("keys", "values", "key_grads", "value_grads")
            found = zip(names, (*captured[at : at + 2], *of_captured[at : at + 2]), strict=True)
            yield index, {name: tensor.detach() for name, tensor in found}


def _segments(shape: ModelShape, num_tokens: int, itemsize: int) -> list[range]:
    """The layers, in segments of equal length whose graphs take at most GRAPH_BYTES each, if one layer's does."""
    heads = shape.num_q_heads + 2 * shape.num_kv_heads
    # A layer keeps the inputs of the gate, norms and products, and keys, values and queries, rotated and not.
    kept = 2 * shape.ffn_size + 4 * shape.hidden_size + 3 * heads * shape.head_dim
    most = max(1, GRAPH_BYTES // (kept * num_tokens * itemsize))
    count = -(-shape.num_layers // most)
    length = -(-shape.num_layers // count)
    return [range(start, min(start + length, shape.num_layers)) for start in range(0, shape.num_layers, length)]


def _loss_gradient(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Gradient of the summed loss of every next token with respect to the last hidden states, by blocks of rows."""
    gradient = torch.zeros_like(hidden)
    for start in range(0, len(tokens) - 1, HEAD_ROWS):
        rows = slice(start, min(start + HEAD_ROWS, len(tokens) - 1))
        block = hidden[rows].clone().requires_grad_()
        targets = tokens[rows.start + 1 : rows.stop + 1]
        logits = model.head(block)
        # The gradient of the summed cross entropy: the probabilities, less one at the targets.
        of_logits = torch.softmax(logits.detach(), -1, torch.float32)
        of_logits[torch.arange(len(targets), device=tokens.device), targets] -= 1
        (gradient[rows],) = torch.autograd.grad(logits, block, of_logits.to(logits.dtype))
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
        found: dict[str, Tensor] = {}
        layers: list[int] = []
        for layer, parts in gather(model, tokens, lambda: progress(len(layers))):
            for name, tensor in parts.items():
                found[f"{layer}.{name}"] = tensor[self.skip :].to("cpu", torch.bfloat16).contiguous()
            layers.append(layer)
            progress(len(layers))
        trim_heap()
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

        try:
            with atomic_write(path) as draft:
                save_file(tensors, draft)
        except SafetensorError as error:  # the library raises this for every error of the system
            raise OSError(errno.EIO, str(error), str(path)) from error


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
