"""The memory of a whole process, estimated before anything is loaded: weights, cache, a step's activations, and the
interpreter with its libraries.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.cache.ledger import PAGE_TOKENS
from quire.config import EngineConfig, format_bytes
from quire.engine.sizes import EngineSizes
from quire.models.shape import ModelShape

RUNTIME_BYTES = 256 << 20
"""Interpreter, libraries and tokenizer. Measured with SmolLM2 on two cores: 230 to 250 MiB of a server beside weights
and cache, 210 MiB and 63 MiB of shared memory of an instance, 206 MiB of a router.
"""

FLOAT_BYTES = 4
"""Bytes of an activation or logit: both pass through float32."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of a process, once its cache is full and its largest step has run.

    weights  `EngineSizes.weight_bytes`
    cache    the part that is in memory
    step     activations of a step with all its rows, and logits of all sequences that can run
    runtime  everything else
    """

    weights: int
    cache: int
    step: int
    runtime: int = RUNTIME_BYTES

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return self.weights + self.cache + self.beside

    @property
    def beside(self) -> int:
        """Bytes beside weights and cache."""
        return self.step + self.runtime

    def __str__(self) -> str:
        """`about 1.46GiB in all: weights 1.05GiB, cache 160MiB, steps 120MiB, the process 256MiB`."""
        return (
            f"about {format_bytes(self.total)} in all once the cache is full: weights {format_bytes(self.weights)},"
            f" cache {format_bytes(self.cache)}, steps {format_bytes(self.step)}, the process"
            f" {format_bytes(self.runtime)}"
        )


def footprint(shape: ModelShape, config: EngineConfig, sizes: EngineSizes) -> Footprint:
    """The memory of a process with a resolved configuration. The memory of a GPU is not included."""
    assert config.scheduler.token_budget is not None, "a configuration with automatic values"
    queries = (shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
    widths = 4 * shape.hidden_size + queries + 2 * shape.ffn_size
    rows = min(config.scheduler.token_budget, sizes.max_context + config.scheduler.max_running)
    running = min(config.scheduler.max_running, rows, max(1, sizes.tokens // PAGE_TOKENS))  # each has an open chunk
    logits = running * shape.vocab_size
    return Footprint(sizes.weight_bytes, sizes.cache_bytes - sizes.disk_bytes, FLOAT_BYTES * (rows * widths + logits))
