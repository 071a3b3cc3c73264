"""A decode scenario for graphs: sequences join, leave and cross chunk boundaries.

The padded batch size changes and returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quire.attention.plan import AttentionBackend, AttentionSpec, RowSlice
from quire.cache.codecs.dense import DenseCodec
from quire.cache.page import PAGE_TOKENS, PagePool
from quire.cache.segment import ChunkTable
from quire.models.decoder import build_model
from quire.models.layers import Ops
from quire.models.plan import Model
from quire.models.shape import ModelShape

from ..tiny_models import RandomWeights

Step = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""tokens, positions (int64 [n] on the host), plan -> logits [n, vocab]."""


def decode(
    shape: ModelShape,
    ops: Ops,
    make_backend: Callable[[AttentionSpec], AttentionBackend],
    make_step: Callable[[Model, Any], Step],
    *,
    seed: int,
    steps: int = 10,
    starts: tuple[int, ...] = (0, 7, 60),
    device: str = "cpu",
) -> tuple[list[torch.Tensor], list[int]]:
    """Logits and the number of rows of every decode step, in float32. Two runs with one seed are the same scenario."""
    random = np.random.default_rng(seed)
    codec = DenseCodec(shape.head_dim, torch.float32)
    pool = PagePool(codec.page_bytes * shape.num_layers * shape.num_kv_heads * 60, device, slab_bytes=codec.page_bytes)
    pool.arena.fill_(0xFF)
    table = ChunkTable(pool, shape.num_layers, shape.num_kv_heads, codec)
    cos = sin = None
    if shape.rope is not None:
        cos, sin = (torch.from_numpy(part).to(device) for part in shape.rope.tables(shape.max_context))
    group = shape.num_q_heads // shape.num_kv_heads
    spec = AttentionSpec(
        table,
        shape.num_layers,
        shape.num_kv_heads,
        group,
        shape.head_dim,
        torch.float32,
        cos,
        sin,
        shape.sliding_window,
    )
    model = build_model(shape, RandomWeights(shape), ops, torch.float32, device)
    backend = make_backend(spec)
    run = make_step(model, backend)
    running: list[list[Any]] = []
    logits, rows = [], []
    for step in range(steps):
        if step % 10 in (0, 1, 3, 4, 9):
            start = int(random.choice(starts))
            chunks = table.take((start + steps + 1) // PAGE_TOKENS + 1, codec)
            prompt = torch.from_numpy(random.integers(0, shape.vocab_size, start)).to(device)
            if start:
                model.hidden(prompt, torch.arange(start, device=device), backend.plan([RowSlice(0, start, chunks)]))
            running.append([start, chunks])
        if step % 10 in (6, 7, 8) or (step > 10 and step % 10 in (2, 5)):
            table.give(running.pop(0)[1])
        tokens = torch.from_numpy(random.integers(0, shape.vocab_size, len(running)))
        positions = torch.tensor([position for position, _ in running])
        plan = backend.plan([RowSlice(position, 1, chunks) for position, chunks in running])
        logits.append(run(tokens, positions, plan).clone())
        rows.append(len(running))
        for sequence in running:
            sequence[0] += 1
    return logits, rows


def eager(model: Model, backend: AttentionBackend) -> Step:
    """Every step as it comes."""

    def run(tokens: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        device = plan.positions.device
        return model.head(model.hidden(tokens.to(device), positions.to(device), plan))

    return run
