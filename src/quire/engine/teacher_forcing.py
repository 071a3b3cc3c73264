"""Reads a text through an engine's own cache and computes the model's predictions. Evaluations and the check of a codec
share this.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch

from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from quire.engine.runner import LOGIT_ROWS
from quire.engine.sampler import Sampler, SamplerOutput, SampleRow
from quire.models.plan import Model


def window_hidden_states(engine: Engine, tokens: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Runs all tokens but the last as the prompt of an ordinary request, without cached chunks.

    returns  the last norm's output [len(tokens) - 1, E] in the model's dtype, where row i predicts token i + 1; and the
             bytes that the request takes in the cache at the end of its prompt
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
        request = engine.add("window", list(tokens[:-1]), params)
        # With room for a second token, the request still lives after the step that ends its prompt, so that its pages
        # can be counted. It is aborted before that token is computed.
        request.sequences[0].max_tokens += 1
        while not engine.step():
            pass
        num_bytes = cache_bytes_used(engine)
    finally:
        engine.abort("window")
        engine.runner.observer = None
    return collected, num_bytes


def teacher_forced_logprobs(engine: Engine, tokens: Sequence[int], prompt_tokens: int) -> Generator[torch.Tensor]:
    """Runs the first tokens as a prompt without cached chunks, and the others as an answer, one step each.

    With retention the prompt is thinned before the first step of the answer, which reads only the kept tokens. The
    prompt itself predicts the answer's first token; that row is left out.

    Yields the log-probabilities of the tokens from prompt_tokens + 1 on, float32 [up to LOGIT_ROWS, V] at a time. The
    request lives until the generator is closed or resumed after the last of them.
    """
    assert engine.runner.observer is None and not engine.has_work, "an engine that evaluates does nothing else"
    sampler, forced = engine.runner.sampler, _ForcedSampler(tokens[prompt_tokens:], engine.vocab_size)
    engine.runner.sampler, engine.runner.observer = forced, lambda *_: None
    params = SamplingParams(
        max_tokens=len(forced.token_ids), temperature=0.0, ignore_eos=True, detokenize=False, prompt_logprobs=0
    )
    try:
        request = engine.add("window", list(tokens[:prompt_tokens]), params)
        request.sequences[0].max_tokens += 1  # as in window_hidden_states
        while forced.num_steps < len(forced.token_ids):
            engine.step()
            if len(forced.found) == LOGIT_ROWS or (forced.found and forced.num_steps == len(forced.token_ids)):
                yield forced.take()
    finally:
        engine.abort("window")
        engine.runner.sampler, engine.runner.observer = sampler, None


class _ForcedSampler(Sampler):
    """A sampler for one sequence: returns the given tokens, and keeps the log-probabilities of each step but the first,
    [V], until they are taken.
    """

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self.token_ids = list(token_ids)
        self.vocab_size = vocab_size
        self.num_steps = 0
        self.found: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        rows = torch.stack(self.found)
        self.found.clear()
        return rows

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> SamplerOutput:
        (row,) = rows
        assert row.step == self.num_steps, f"step {row.step} follows {self.num_steps} others"
        if self.num_steps:
            self.found.append(torch.log_softmax(logits[0, : self.vocab_size].float(), -1))
        self.num_steps += 1
        return SamplerOutput(torch.tensor([self.token_ids[row.step]]), [None], {})


def cache_bytes_used(engine: Engine) -> int:
    """The bytes that the engine's requests take in the cache."""
    return int(engine.stats()["cache"]["bytes_used"])


def log_probabilities(model: Model, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the log-probabilities of the next tokens of hidden [n, E], float32 [up to LOGIT_ROWS, V] at a time."""
    for start in range(0, len(hidden), LOGIT_ROWS):
        yield torch.log_softmax(model.head(hidden[start : start + LOGIT_ROWS])[:, : model.shape.vocab_size], -1)
