"""Reads a text through an engine's own cache, and says what the model then predicts: what evaluations and the check of
a codec share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from quire.engine.runner import LOGIT_ROWS
from quire.models.plan import Model


def read_window(engine: Engine, tokens: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Runs all tokens but the last as a request's prompt, as any other but that nothing of it is found in the cache.

    returns  the last norm's output [len(tokens) - 1, E] in the model's dtype, whose row i predicts token i + 1; and the
             bytes that the request has taken in the cache when its prompt is done
    """
    rows = len(tokens) - 1
    collected = torch.empty(0)

    def collect(sequence_id: int, start: int, hidden: torch.Tensor) -> None:
        nonlocal collected
        if not len(collected):
            collected = hidden.new_empty(rows, hidden.shape[1])
        collected[start : start + len(hidden)] = hidden

    assert engine.runner.observer is None and not engine.has_work, "an engine that evaluates does nothing else"
    engine.runner.observer = collect
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, prompt_logprobs=0)
    try:
        request = engine.add("window", None, list(tokens[:-1]), params)
        # A second token is never computed, so it needs no room: the request is ended when its prompt is done, and not
        # in that very step, so that its pages can be counted.
        request.sequences[0].max_tokens += 1
        while not engine.step():
            pass
        num_bytes = int(engine.stats()["cache"]["bytes_used"])
    finally:
        engine.abort("window")
        engine.runner.observer = None
    return collected, num_bytes


def log_probabilities(model: Model, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """The logarithms of what the model predicts from hidden [n, E]: one float32 [up to LOGIT_ROWS, V] after another."""
    for start in range(0, len(hidden), LOGIT_ROWS):
        yield torch.log_softmax(model.head(hidden[start : start + LOGIT_ROWS])[:, : model.shape.vocab_size], -1)
