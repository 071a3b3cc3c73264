"""What fits, before anything starts: bytes of weights and cache, tokens and sequences. Arithmetic on a model's shape
alone; touches no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.cache.page import PAGE_TOKENS
from quire.options import format_bytes


@dataclass(frozen=True)
class Sizes:
    """Bytes and counts of one model on one cache.

    weight_bytes         all weights in the chosen dtype, as often as the backend holds them
    cache_bytes          the arena, whole slabs
    bytes_per_token      keys and values of one token in all layers and heads, page padding included
    chunk_bytes          64 tokens of them: what is taken and given back at once
    num_chunks           chunks the arena holds
    max_context          tokens one sequence may have: the model's limit or the arena's, whichever is smaller
    model_context        the model's own limit
    available_bytes      memory of the machine that is free now, or None if it is not known
    """

    weight_bytes: int
    cache_bytes: int
    bytes_per_token: float
    chunk_bytes: int
    num_chunks: int
    max_context: int
    model_context: int
    available_bytes: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens that fit, if every chunk is full."""
        return self.num_chunks * PAGE_TOKENS

    def sequences(self, length: int) -> int:
        """Sequences of `length` tokens that fit at once."""
        return self.num_chunks // -(-length // PAGE_TOKENS)

    @property
    def fit_the_machine(self) -> bool:
        """Whether weights and arena fit what is free now."""
        return self.available_bytes is None or self.weight_bytes + self.cache_bytes <= self.available_bytes

    @property
    def fails_first(self) -> str:
        """What runs out first as load grows, in one sentence."""
        need = self.weight_bytes + self.cache_bytes
        if self.available_bytes is not None and not self.fit_the_machine:
            return (
                f"memory: weights and cache need {format_bytes(need)}, and {format_bytes(self.available_bytes)}"
                " are free; lower cache.memory"
            )
        if self.num_chunks * PAGE_TOKENS < self.model_context:
            return (
                f"long requests: the cache holds {self.tokens} tokens and the model could use {self.model_context};"
                f" prompts beyond {self.max_context} tokens"
                " are refused"
            )
        full = self.sequences(self.model_context)
        return (
            f"concurrency: beyond {full} sequence{'s' if full != 1 else ''} of {self.model_context} tokens,"
            " new requests wait and the youngest running one is preempted"
        )


def sizes(
    *,
    chunk_bytes: int,
    model_context: int,
    weight_bytes: int,
    cache_bytes: int,
    available_bytes: int | None = None,
) -> Sizes:
    """The sizes of a model whose chunks take `chunk_bytes` in an arena of `cache_bytes`."""
    num_chunks = cache_bytes // chunk_bytes
    return Sizes(
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes,
        bytes_per_token=chunk_bytes / PAGE_TOKENS,
        chunk_bytes=chunk_bytes,
        num_chunks=num_chunks,
        max_context=min(model_context, num_chunks * PAGE_TOKENS),
        model_context=model_context,
        available_bytes=available_bytes,
    )
