"""A decode scenario for graphs: sequences join, leave and cross chunk boundaries.

The padded batch size changes and returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.attention.plan import AttentionBackend
from quire.attention.rows import RowSlice
from quire.attention.spec import Angles, AttentionSpec, Scoring, equal_layers
from quire.cache.arena import Arena
from quire.cache.codecs import Codec
from quire.cache.codecs.dense import DenseCodec
from quire.cache.ledger import PAGE_TOKENS, PageLedger
from quire.cache.table import ChunkTable
from quire.models.decoder import build_model
from quire.models.layers import Ops
from quire.models.plan import Model
from quire.models.shape import ModelShape

from ..tiny_models import RandomWeights
from .encoded import Sequences, bytes_of_sealed, encoded_spec, sealed_bytes
from .harness import Shape

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
    shared_chunks: int = 0,
    device: str = "cpu",
) -> tuple[list[torch.Tensor], list[int]]:
    """Logits and the number of rows of every decode step, in float32. Two runs with one seed are the same scenario.

    shared_chunks  what every second sequence begins with; its start comes on top
    """
    random = np.random.default_rng(seed)
    codec = DenseCodec(shape.head_dim, torch.float32)
    ledger = PageLedger(codec.page_bytes * shape.num_layers * shape.num_kv_heads * 60, codec.page_bytes)
    arena = Arena(ledger.num_bytes, device)
    arena.data.fill_(0xFF)
    table = ChunkTable(ledger, shape.num_layers, shape.num_kv_heads, codec, arena=arena)
    rotations: tuple[Angles, ...] = ()
    if shape.first.rope is not None:
        cos, sin = (torch.from_numpy(part).to(device) for part in shape.first.rope.tables(shape.max_context))
        rotations = ((cos, sin),)
    layers = equal_layers(
        shape.num_layers,
        shape.num_kv_heads,
        shape.num_q_heads // shape.num_kv_heads,
        shape.head_dim,
        rotation=0 if rotations else None,
        scoring=Scoring(shape.sliding_window),
    )
    spec = AttentionSpec(table, layers, torch.float32, rotations)
    model = build_model(shape, RandomWeights(shape), ops, torch.float32, device)
    backend = make_backend(spec)
    run = make_step(model, backend)

    def prefill(first: int, count: int, chunks: NDArray[np.int32]) -> None:
        prompt = torch.from_numpy(random.integers(0, shape.vocab_size, count)).to(device)
        if count:
            positions = torch.arange(first, first + count, device=device)
            model.hidden(prompt, positions, backend.plan([RowSlice(first, count, chunks)]))

    common = table.take(shared_chunks, codec)
    prefill(0, shared_chunks * PAGE_TOKENS, common)
    running: list[list[Any]] = []  # [position, path as a view, chunks of its own, what it shares]
    logits, rows = [], []
    for step in range(steps):
        if step % 10 in (0, 1, 3, 4, 9):
            shares = shared_chunks > 0 and step % 2 == 0
            prefix = common if shares else common[:0]
            start, count = len(prefix) * PAGE_TOKENS, int(random.choice(starts))
            own = table.take((count + steps + 1) // PAGE_TOKENS + 1, codec)
            path = np.append(prefix, own)
            prefill(start, count, path)
            running.append([start + count, path, own, ((1, shared_chunks),) if shares else ()])
        if step % 10 in (6, 7, 8) or (step > 10 and step % 10 in (2, 5)):
            table.free(running.pop(0)[2])
        running.sort(key=lambda sequence: sequence[3])
        tokens = torch.from_numpy(random.integers(0, shape.vocab_size, len(running)))
        positions = torch.tensor([position for position, *_ in running])
        plan = backend.plan([RowSlice(position, 1, path[:], shared) for position, path, _, shared in running])
        logits.append(run(tokens, positions, plan).clone())
        rows.append(len(running))
        for sequence in running:
            sequence[0] += 1
    return logits, rows


def decode_encoded(
    shape: ModelShape,
    ops: Ops,
    make_backend: Callable[[AttentionSpec], AttentionBackend],
    make_step: Callable[[Model, Any], Step],
    codec_of: Callable[[Shape], Codec],
    *,
    seed: int,
    codes: list[torch.Tensor] | None = None,
    device: str = "cpu",
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of decode steps whose rows fill chunks, and the images of what they filled, in the order in which they
    did, where sealed chunks are encoded. Two runs with one seed are the same scenario.

    codes  images of another run, which take the place of this one's own once these are noted
    """
    random = np.random.default_rng(seed)
    group = shape.num_q_heads // shape.num_kv_heads
    heads = Shape(shape.num_kv_heads, group, shape.head_dim, layers=shape.num_layers)
    spec = encoded_spec(heads, codec_of(heads), sinks=1, device=device)
    assert shape.first.rope is not None
    cos, sin = (torch.from_numpy(part).to(device) for part in shape.first.rope.tables(shape.max_context))
    spec = replace(spec, rotations=((cos, sin),))
    model = build_model(shape, RandomWeights(shape), ops, torch.float32, device)
    backend = make_backend(spec)
    run = make_step(model, backend)
    sequences = Sequences(spec)
    logits, images = [], list[torch.Tensor]()
    noted: dict[int, int] = {}

    def note() -> None:
        for name, chunks in sequences.chunks.items():
            for index in range(noted.get(name, 0), sequences.lengths[name] // PAGE_TOKENS):
                chunk = chunks[index : index + 1]
                images.append(sealed_bytes(spec, chunk))
                if codes is not None:
                    image = codes[len(images) - 1].to(device)
                    spec.table.arena.data[bytes_of_sealed(spec, chunk).to(device)] = image
                noted[name] = index + 1

    for number in range(9):
        if number in (0, 1, 4):
            count = (62, 126, 5)[len(sequences.lengths)]
            positions = torch.arange(count, device=device)
            prompt = torch.from_numpy(random.integers(0, shape.vocab_size, count)).to(device)
            model.hidden(prompt, positions, backend.plan(sequences.step([(len(sequences.lengths), count)])))
            note()
        names = [name for name in sequences.lengths if number < 6 or name != 1]
        tokens = torch.from_numpy(random.integers(0, shape.vocab_size, len(names)))
        positions = torch.tensor([sequences.lengths[name] for name in names])
        plan = backend.plan(sequences.step([(name, 1) for name in names]))
        logits.append(run(tokens, positions, plan).clone())
        note()
    assert noted == {0: 1, 1: 2}
    return logits, images


def eager(model: Model, backend: AttentionBackend) -> Step:
    """Every step as it comes."""

    def run(tokens: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        device = plan.positions.device
        return model.head(model.hidden(tokens.to(device), positions.to(device), plan))

    return run
