"""KIVI-style quantization of the same model, and plain integers for comparison: a simulation with real packed tensors.

KIVI quantizes keys (after RoPE) per channel in groups of tokens, and values per token in groups of channels, uniformly
and asymmetrically, with float16 scales and zero points. New tokens stay exact. Keys are quantized all at once when the
residual is full, so at the end of a window none is exact. Of values, the last tokens, up to the residual's size, always
stay exact. The variant "steady" also keeps the last keys exact always, at more bytes. "int" has one group per token and
head for keys and values, and keeps nothing exact.

Reads decode packed codes. The decoded copies that are kept as well are not counted.

Source: KIVI, arXiv 2402.02750, section 3; written from the paper.
"""

import argparse
from dataclasses import dataclass, replace

import torch
import transformers
from torch import Tensor
from torch_model import ExactCache, HalfCache, Model
from transformers import DynamicLayer
from windows import Cache, Engine, Score, Windows, serve


@dataclass(frozen=True)
class Kivi:
    """Settings of the quantization.

    bits          bits of a code
    group         numbers that share a scale
    residual      tokens kept exact; 0 or a multiple of `group`
    by_token      whether keys are quantized per token, like values
    steady        whether keys leave the residual group by group, not all at once
    """

    bits: int
    group: int = 32
    residual: int = 128
    by_token: bool = False
    steady: bool = False


VARIANTS = {
    "kivi-{} g32 r128": Kivi(0),
    "kivi-{} g32 r128 steady": Kivi(0, steady=True),
    "kivi-{} g32 r32": Kivi(0, residual=32),
    "kivi-{} g64 r64": Kivi(0, group=64, residual=64),
    "int{}": Kivi(0, group=64, residual=0, by_token=True),
}
CACHES: dict[str, Cache[Kivi | None]] = {"f16": Cache(16, None)} | {
    name.format(bits): Cache(bits, replace(variant, bits=bits))
    for bits in (4, 3, 2)
    for name, variant in VARIANTS.items()
}


@dataclass
class Packed:
    """Groups of codes; eight codes of n bits take n bytes.

    codes        u8 [..., groups, group * bits / 8]
    scale, zero  f16 [..., groups, 1]
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor


def encode(groups: Tensor, bits: int) -> Packed:
    """Quantizes the last dimension of [..., groups, group] uniformly between its minimum and maximum."""
    groups = groups.float()
    levels = 2**bits - 1
    zero = groups.amin(-1, keepdim=True).half()
    scale = ((groups.amax(-1, keepdim=True) - zero.float()) / levels).half()
    # A group of equal numbers has scale 0 and codes 0.
    divisor = torch.where(scale == 0, 1, scale).float()
    codes = ((groups - zero.float()) / divisor).round().clamp(0, levels).to(torch.int64)
    words = (codes.unflatten(-1, (-1, 8)) << bits * torch.arange(8)).sum(-1, keepdim=True)
    packed = (words >> 8 * torch.arange(bits)) & 255
    return Packed(packed.flatten(-2).to(torch.uint8), scale, zero)


def decode(packed: Packed, bits: int) -> Tensor:
    """[..., groups, group] in float32."""
    words = (packed.codes.unflatten(-1, (-1, bits)).to(torch.int64) << 8 * torch.arange(bits)).sum(-1, keepdim=True)
    codes = (words >> bits * torch.arange(8)) & 2**bits - 1
    return codes.flatten(-2) * packed.scale.float() + packed.zero.float()


class Half:
    """The keys or the values of one layer: packed blocks, then exact tokens.

    packed   the blocks as they would be stored
    exact    f16 [1, H, tokens, D], the tokens after the blocks
    """

    def __init__(self, settings: Kivi, by_channel: bool) -> None:
        """Empty."""
        self.settings, self.by_channel = settings, by_channel
        self.packed: list[Packed] = []
        self.exact = torch.empty(0)
        self._decoded = torch.empty(0)

    def append(self, states: Tensor) -> Tensor:
        """Appends a slice, f16 [1, H, tokens, D]. Returns what it reads: earlier tokens as stored, its own exact."""
        self.exact = states if self.exact.numel() == 0 else torch.cat([self.exact, states], dim=-2)
        read = self.exact.float()
        if self._decoded.numel():
            read = torch.cat([self._decoded, read], dim=-2)
        if leaving := self._leaving():
            self._quantize(leaving)
        return read

    def _leaving(self) -> int:
        """The number of exact tokens to quantize now."""
        tokens, residual = self.exact.shape[-2], self.settings.residual
        if not self.by_channel:
            return max(0, tokens - residual)
        kept = residual if self.settings.steady or tokens < residual else 0
        whole_groups = max(0, tokens - kept) // self.settings.group
        return whole_groups * self.settings.group

    def _quantize(self, tokens: int) -> None:
        leaving = self.exact[..., :tokens, :]
        self.exact = self.exact[..., tokens:, :].clone()
        # Groups run along the tokens of a channel, or along the channels of a token.
        rows = leaving.transpose(-1, -2) if self.by_channel else leaving
        packed = encode(rows.unflatten(-1, (-1, self.settings.group)), self.settings.bits)
        self.packed.append(packed)
        decoded = decode(packed, self.settings.bits).flatten(-2)
        decoded = decoded.transpose(-1, -2) if self.by_channel else decoded
        self._decoded = torch.cat([self._decoded, decoded], dim=-2) if self._decoded.numel() else decoded


class KiviLayer(DynamicLayer):
    """One layer's cache."""

    def __init__(self, settings: Kivi) -> None:
        """Empty."""
        super().__init__()
        self.halves = [Half(settings, by_channel=not settings.by_token), Half(settings, by_channel=False)]
        self.tokens = 0

    def update(self, key_states: Tensor, value_states: Tensor, *rest: object, **named: object) -> tuple[Tensor, Tensor]:
        """Appends a slice. Returns what it attends to."""
        self.tokens += key_states.shape[-2]
        keys, values = (half.append(new) for half, new in zip(self.halves, (key_states, value_states), strict=True))
        return keys, values

    def get_seq_length(self) -> int:
        """Number of stored tokens."""
        return self.tokens


def held(cache: HalfCache) -> list[object]:
    """The tensors that would be stored."""
    return [(half.packed, half.exact) for layer in cache.layers for half in layer.halves]


def start(given: argparse.Namespace) -> Engine[Kivi | None]:
    """The checkpoint and its caches."""
    model = Model(given.model, given.threads)

    def measure(settings: Kivi | None, windows: Windows) -> Score:
        if settings is None:
            return model.score(lambda: ExactCache(config=model.config), windows)
        layers = model.config.num_hidden_layers
        return model.score(lambda: HalfCache([KiviLayer(settings) for _ in range(layers)]), windows, held)

    return Engine(f"in transformers {transformers.__version__}", CACHES, measure)


if __name__ == "__main__":
    serve(start)
