"""Plans are laid out, and copied to a device, only when the tree or a tail changes (ChunkAttention's lazy context
copy). The CPU's plan also advances over the ends of chunks. Counted in the real engine for both fast backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed")

from quire.attention.cpu import CpuAttention
from quire.attention.rows import RowSlice
from quire.attention.triton import TritonAttention
from quire.cache.ledger import PAGE_TOKENS
from quire.engine.params import SamplingParams

from ..engines import make_engine

DECODE_STEPS = 200


class Both:
    """The CPU backend, with the plans of the Triton backend made beside its own."""

    def __init__(self, cpu: CpuAttention) -> None:
        self.cpu, self.triton = cpu, TritonAttention(cpu.spec)
        self.steps_that_share = 0

    def plan(self, slices: Sequence[RowSlice], moved: Sequence[int] | None = None, ready: Any = None) -> Any:
        beside = self.triton.plan(slices, moved, ready)
        positions = [position for piece in slices for position in range(piece.start, piece.start + piece.num_rows)]
        assert beside.positions[: len(positions)].tolist() == positions
        self.steps_that_share += beside.shares
        return self.cpu.plan(slices, moved, ready)

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.cpu.plans_built, self.triton.plans_built, self.triton.copies


def test_a_plan_is_built_where_something_joins_leaves_or_crosses_a_boundary_and_nowhere_else() -> None:
    engine = make_engine(chunks=64, **{"cache.share": True})
    assert isinstance(engine.runner.attention, CpuAttention)
    both = engine.runner.attention = Both(engine.runner.attention)
    batches: list[list[tuple[int, int, int]]] = []
    next_step = engine.scheduler.next_step

    def recorded() -> Any:
        batch = next_step()
        if batch is not None:
            batches.append([(piece.sequence_id, piece.start, piece.num_rows) for piece in batch.slices])
        return batch

    engine.scheduler.next_step = recorded  # type: ignore[method-assign]
    random = np.random.default_rng(1)
    prefix = random.integers(0, 256, 130).tolist()
    for number in range(8):
        prompt = prefix + random.integers(0, 256, 5 + 7 * number).tolist()
        tokens = 90 if number == 3 else DECODE_STEPS + 40
        engine.add(str(number), prompt, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
    events = decode_steps = 0
    decoding: set[int] = set()
    while decode_steps < DECODE_STEPS:
        if decode_steps == 60:
            engine.abort("5")
        if decode_steps in (75, 120):
            prompt = prefix + random.integers(0, 256, 9).tolist()
            name = f"late {decode_steps}"
            if name not in engine._requests:
                engine.add(name, prompt, SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True))
        before = both.counts
        engine.step()
        batch = batches[-1]
        now = {sequence for sequence, _, count in batch if count == 1}
        prefills = len(now) < len(batch)
        is_other = prefills or now != decoding
        changes = is_other or any(start % PAGE_TOKENS == 0 for _, start, _ in batch)
        decoding = now
        events += changes
        decode_steps += not prefills
        built = [after - count for after, count in zip(both.counts, before, strict=True)]
        assert is_other <= built[0] <= changes and built[1] == changes, f"step {len(batches)}: {batch}"
        # One copy of the plan, and one of page ids where there are new chunks.
        assert changes <= built[2] <= 2 * changes, f"step {len(batches)}: {batch}"
    assert both.counts[1] == events and both.counts[0] <= events - 10
    # Eight sequences cross a boundary every 64 steps, at most one at a time.
    assert 20 < events < 60 < DECODE_STEPS <= both.steps_that_share
