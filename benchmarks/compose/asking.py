"""The requests that all configurations get: made up, with shared prefixes, or those of a trace."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from systems import Load

from quire.errors import ConfigError
from quire.workload.traces import read_workload, tokens
from quire.workload.workload import Workload

TRACE_REQUESTS = 2000
"""Of a trace, its first ones."""


class Asked(NamedTuple):
    """A request."""

    prompt: list[int]
    num_out: int


def asked(load: Load, vocab_size: int, seed: int = 0) -> Iterator[Asked]:
    """The requests of a load, without end: the same ones each time. Raises ConfigError for a trace without any."""
    # Ids from the middle of the vocabulary are not special tokens.
    vocabulary = range(vocab_size // 4, vocab_size // 2)
    return _made_up(load, vocabulary, seed) if load.trace is None else _of_trace(load, vocabulary, seed)


def _made_up(load: Load, vocabulary: range, seed: int) -> Iterator[Asked]:
    draw = random.Random(seed)
    prefixes = [draw.choices(vocabulary, k=load.shared) for _ in range(load.prefixes)]
    for prefix in itertools.cycle(prefixes):
        yield Asked(prefix + draw.choices(vocabulary, k=load.prompt - load.shared), load.output)


def _of_trace(load: Load, vocabulary: range, seed: int) -> Iterator[Asked]:
    """The trace's requests in its order, again and again. Requests that follow others in a conversation are left out:
    what they begin with depends on answers.
    """
    assert load.trace is not None
    read = read_workload(Path(load.trace), TRACE_REQUESTS)
    fits = [each for each in read.arrivals if each.after < 0 and each.num_in + each.num_out <= load.longest]
    if not fits:
        raise ConfigError(
            f"{load.trace} has no request of at most {load.longest} tokens among its first {TRACE_REQUESTS}; raise"
            " --input-tokens"
        )
    prompts = tokens(Workload(read.name, fits), vocabulary, seed)
    # An answer of one token has no time per token.
    return itertools.cycle([Asked(prompt, max(2, each.num_out)) for prompt, each in zip(prompts, fits, strict=True)])
