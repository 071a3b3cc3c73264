"""Vectors to fill pages with: ordinary ones, and those that break a codec."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import load, runtime
from quire.kernels.levels import editable_levels, supported_levels
from tests.effort import whole

LEVELS = whole(
    [
        *(level for level in editable_levels() if level in supported_levels()),
        *(level for level in supported_levels() if level not in editable_levels()),
    ],
    len(editable_levels()),
)
"""Levels to test on this processor; in a quick run those that an installation has compiled: others take a minute."""

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = ["normal", "heavy", "constant", "outlier", "zeros", "huge", "tiny", "subnormal", "ties", "mixed"]

_SUBNORMAL = {torch.bfloat16: 1e-39, torch.float32: 1e-42, torch.float16: 3e-6}


def use_level(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the kernels of a CPU level called in place of this CPU's own."""
    library = runtime.prepare(load(level))
    monkeypatch.setattr(runtime, "kernels", lambda: library)


def vectors(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random numbers of a kind in a shape [..., D], finite in the type:

    normal, heavy  tails like a normal number's, or like its inverse's
    constant       all of a vector equal
    outlier        a constant vector with one other number
    huge           around 1e5, float16 6e4
    tiny           around 1e-30, float16 zero
    subnormal      below what the type has with all its digits
    ties           halves up to 2, so that numbers, distances and costs are often equal
    mixed          vectors of all these kinds
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    one = torch.randn(*shape[:-1], 1, generator=generator).expand(shape)
    at = torch.randint(shape[-1], (*shape[:-1], 1), generator=generator)
    if kind == "mixed":
        which = torch.randint(len(KINDS) - 1, (*shape[:-1], 1), generator=generator)
        all_kinds = torch.stack([vectors(other, shape, dtype, seed + 1) for other in KINDS[:-1]])
        return all_kinds.gather(0, which.expand(shape)[None])[0]
    largest = 3e4 if dtype == torch.float16 else 1e5
    found = {
        "normal": lambda: normal,
        "heavy": lambda: (normal / torch.randn(shape, generator=generator)).clamp(-largest, largest),
        "constant": lambda: one,
        "outlier": lambda: one.scatter(-1, at, 100 * torch.rand(*shape[:-1], 1, generator=generator)),
        "zeros": lambda: torch.zeros(shape),
        "huge": lambda: (normal.sign() * largest + normal * largest / 10).clamp(-2 * largest, 2 * largest),
        "tiny": lambda: 1e-30 * normal,
        "subnormal": lambda: _SUBNORMAL[dtype] * normal,
        "ties": lambda: (2 * normal).round().clamp(-4, 4) / 2,
    }[kind]()
    found = found.to(dtype).contiguous()
    assert found.isfinite().all()
    return found
