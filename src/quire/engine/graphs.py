"""Decode steps as CUDA graphs, captured once per `GraphKey` and replayed with one launch per step. GPU only.

    fixed     the addresses of tokens, positions and logits (here), of plan arrays, page-id mirror and partials (in the
              backend), of the arena and of the weights
    changing  only their contents

A replayed graph reads the present contents of its addresses. So a step is: plan (one copy, or an addition on the
device), inputs (two copies), replay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.attention.triton import TritonAttention
from quire.attention.triton_plan import GraphKey, TritonPlan
from quire.models.plan import Model


class DecodeGraphs:
    """Replays decode steps of a model. Invariant: memory that a captured kernel addresses is owned here or by the
    backend, and never moves.

    batch_sizes  the padded sizes to capture, a subset of the backend's; each is captured at its first use
    """

    def __init__(self, model: Model, backend: TritonAttention, batch_sizes: Sequence[int]) -> None:
        unknown = set(batch_sizes) - set(backend.batch_sizes)
        assert not unknown, f"the backend does not pad to {sorted(unknown)}, only to {backend.batch_sizes}"
        self._model = model
        self._device = backend.device
        self._batch_sizes = frozenset(batch_sizes)
        self._tokens, self._positions = torch.zeros(2, max(batch_sizes), dtype=torch.int64, device=self._device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @torch.no_grad()
    def replay(self, tokens: Tensor, positions: Tensor, plan: TritonPlan) -> Tensor:
        """Runs one decode step. The host does not wait for it.

        tokens, positions  int64 [n] on the device; or on the host, in pinned memory so that the host does not wait
        plan               the backend's newest plan, of the same n rows
        returns            logits [n, vocab] on the device, overwritten by a later replay
        """
        rows, key = plan.num_rows, plan.graph_key
        assert plan.is_decode and tokens.shape == positions.shape == (rows,), (
            f"{tuple(tokens.shape)} tokens for a plan of {rows} rows"
        )
        if key is None or key.batch_size not in self._batch_sizes:
            tokens, positions = (
                tokens.to(self._device, non_blocking=True),
                positions.to(self._device, non_blocking=True),
            )
            return self._model.head(self._model.hidden(tokens, positions, plan))
        # Padded rows keep older tokens and positions. These are valid, and their results are not read.
        self._tokens[:rows].copy_(tokens, non_blocking=True)
        self._positions[:rows].copy_(positions, non_blocking=True)
        if key not in self._graphs:
            with plan.profiling_suspended():
                self._graphs[key] = self._capture(key.batch_size, plan)
        graph, logits = self._graphs[key]
        graph.replay()
        plan.seal()
        return logits[:rows]

    def _capture(self, size: int, plan: TritonPlan) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Records the model's kernels over the padded rows. The first run writes the same keys and values that the
        replay writes again.
        """
        tokens, positions = self._tokens[:size], self._positions[:size]
        # One run outside the capture, also on a stream of its own: kernels are compiled and loaded, and libraries
        # choose their kernels and allocate.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._model.head(self._model.hidden(tokens, positions, plan))
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of a server may allocate while this one captures.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._model.head(self._model.hidden(tokens, positions, plan))
        return graph, logits
