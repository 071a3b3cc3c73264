"""A decode step of layers with a window advances the last plan, until a row's first chunk leaves the window."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention
from quire.cache.ledger import PAGE_TOKENS

from .harness import Shape, make_spec, relative_rms, run_plan, slices_of

STARTS = (70, 130, 199)
STEPS = 140


@pytest.mark.parametrize("window", [1, 20, 64, 100, 200])
def test_a_plan_with_a_window_is_rebuilt_only_where_a_first_chunk_leaves_it(window: int) -> None:
    outputs, built = [], []
    for make in (ReferenceAttention, CpuAttention):
        spec = make_spec(Shape(window=window, layers=1), 20)
        backend, generator = make(spec), torch.Generator().manual_seed(1)
        final = slices_of(spec, [(start + STEPS, 1) for start in STARTS])
        past = [replace(piece, start=0, num_rows=start) for piece, start in zip(final, STARTS, strict=True)]
        run_plan(backend.plan(past), spec, sum(STARTS), generator)
        found = []
        for step in range(STEPS):
            slices = [
                replace(piece, start=start + step, chunks=piece.chunks[: (start + step) // PAGE_TOKENS + 1])
                for piece, start in zip(final, STARTS, strict=True)
            ]
            moved = [row for row, piece in enumerate(slices) if piece.start % PAGE_TOKENS == 0]
            before = getattr(backend, "plans_built", 0)
            plan = backend.plan(slices, moved if step else None)
            found.append(run_plan(plan, spec, len(slices), generator))
            if make is CpuAttention:
                built.append(backend.plans_built - before)
        outputs.append(torch.stack(found))
    assert relative_rms(outputs[1], outputs[0]) < 2e-6
    leaves = [any(_first(at + step, window) != _first(at + step - 1, window) for at in STARTS) for step in range(STEPS)]
    fills = [any((at + step) % PAGE_TOKENS == 0 for at in STARTS) for step in range(STEPS)]
    for step in range(1, STEPS):
        assert leaves[step] <= built[step] <= (leaves[step] or fills[step]), f"step {step}"
    assert any(fills[step] and not leaves[step] and not built[step] for step in range(1, STEPS)) or window in (1, 64)


def _first(position: int, window: int) -> int:
    return max(0, position + 1 - window) // PAGE_TOKENS
