"""Exact token-level perplexity through an engine's own cache, and the divergence of a codec's predictions from dense
ones.

Knows engines and token ids, and nothing of codecs. docs/guide/quality.md has the definitions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from quire.cache.ledger import PAGE_TOKENS
from quire.config import EngineConfig
from quire.engine.candidates import best_ids
from quire.engine.engine import Engine
from quire.engine.runner import LOGIT_ROWS
from quire.engine.teacher_forcing import (
    cache_bytes_used,
    log_probabilities,
    teacher_forced_logprobs,
    window_hidden_states,
)
from quire.errors import ConfigError, ModelError
from quire.measure.engines import REFERENCE, Progress, load_engines

CONTINUATION = 256
"""Scored tokens of a window with retention or sparse values, as in benchmarks/retention_quality.py."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The result of one codec. Fields that need a reference are None without one.

    codec             name of the codec, and the settings of retention and sparse values: `nuq3, retain.budget 0.5`
    context           tokens per window
    num_windows       number of scored windows
    num_tokens        number of scored tokens: all of a window but its first, or its continuation
    nll               mean negative log-likelihood of a token, in nats
    nll_error         standard error of that mean, over windows; None for a single window
    bytes_per_token   bytes that the request holds at the end of a window (sealed chunks, the last chunk, sidecars),
                      divided by the computed tokens. Cached chunks that no request reads, such as the prompt's
                      original pages after retention, can be evicted and are not counted
    bits_per_element  bits per key or value element in all chunks but the last; None if there is only one chunk, or with
                      a continuation
    kl_mean           mean over tokens of KL(reference || codec) of the distributions of the next token, in nats
    kl_p99            its 99th percentile over tokens
    agreement         share of tokens for which both have the same most probable token
    ratio             perplexity divided by the reference's
    ratio_error       standard error of the ratio, from the differences of both within each window
    continuation      scored tokens at the end of each window, one step each after a prompt; None: all, as a prompt
    window_nll        `nll` of each window, from the text's beginning on
    """

    codec: str
    context: int
    num_windows: int
    num_tokens: int
    nll: float
    nll_error: float | None
    bytes_per_token: float
    bits_per_element: float | None
    kl_mean: float | None = None
    kl_p99: float | None = None
    agreement: float | None = None
    ratio: float | None = None
    ratio_error: float | None = None
    continuation: int | None = None
    window_nll: tuple[float, ...] = ()

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll)

    @property
    def perplexity_error(self) -> float | None:
        """The standard error of the perplexity, to first order."""
        return None if self.nll_error is None else self.nll_error * self.perplexity

    def facts(self) -> dict[str, Any]:
        """All of it by name, for JSON."""
        return {**asdict(self), "perplexity": self.perplexity, "perplexity_error": self.perplexity_error}


def perplexity(
    model: str,
    text: str,
    *,
    config: EngineConfig | None = None,
    codecs: Sequence[str] = (),
    context: int = 2048,
    continuation: int | None = None,
    max_tokens: int | None = None,
    max_windows: int | None = None,
    kl: bool = True,
    progress: Progress = lambda done, total: None,
) -> list[Perplexity]:
    """The perplexity of a text for each codec, each with its own cache, in the given order.

    model        a folder, a .gguf file, a hub id, or `smollm2`; loaded once
    config       settings of the engines, see `configs_of`; None: the defaults
    codecs       values of cache.codec; empty: the codec of the configuration
    context      tokens per window
    continuation score only this number of last tokens of a window. They are computed one at a time, after a prompt of
                 the tokens before them, so they read what retention keeps of it, or few values. None: 256 with
                 retention or sparse values; without them the whole window is a prompt and is scored
    max_tokens   use only this number of first tokens
    max_windows  use only this number of first windows
    kl           whether to compare with a dense cache without retention. It is then among the results: first, if it
                 was not given
    progress     called with (windows done, number of windows)
    Raises ConfigError if the model or the cache cannot hold the context, or if the text is shorter; ModelError.
    """
    if context < 2:
        raise ConfigError(f"a window of {context} tokens has no token to score; it needs at least 2")
    config = config or EngineConfig()
    if continuation is None and (config.retain.is_on or config.cache.sparse_values < 1):
        continuation = CONTINUATION
    if continuation is not None and not 1 <= continuation <= context - 2:
        raise ConfigError(
            f"a window of {context} tokens has no room for a prompt, a token that it predicts and a continuation of"
            f" {continuation}; give a context of at least {max(continuation, 1) + 2}, or another continuation"
        )
    engines, tokenizer = load_engines(model, config, context, codecs, compares=kl)
    windows = cut_windows(tokenizer.encode(text)[:max_tokens], context)[:max_windows]
    return measure(engines, windows, REFERENCE if kl else None, progress, continuation)


def cut_windows(token_ids: Sequence[int], context: int) -> list[list[int]]:
    """Consecutive windows of `context` tokens. Drops the incomplete window at the end.

    Raises ConfigError if there are fewer tokens than one window.
    """
    if len(token_ids) < context:
        raise ConfigError(
            f"the text has {len(token_ids)} tokens, fewer than a window of {context}; give more, or a smaller context"
        )
    return [list(token_ids[at : at + context]) for at in range(0, len(token_ids) - context + 1, context)]


@torch.inference_mode()
def measure(
    engines: Mapping[str, Engine],
    windows: Sequence[Sequence[int]],
    reference: str | None = None,
    progress: Progress = lambda done, total: None,
    continuation: int | None = None,
) -> list[Perplexity]:
    """The perplexity of windows of equal length (at least 2 tokens) for each engine.

    engines       idle engines by name (see `load_engines`)
    reference     the engine with which all are compared; None: no comparison
    continuation  as in `perplexity`, but None scores whole windows even with retention
    Raises ModelError if logits are not finite.
    """
    context = len(windows[0])
    rows = context - 1 if continuation is None else continuation
    tallies = {
        name: _Tally(np.empty(rows), np.zeros(len(windows) * rows * (reference is not None))) for name in engines
    }
    progress(0, len(windows))
    for number, tokens in enumerate(windows):
        blocks: dict[str, Iterator[torch.Tensor]] = {}
        with contextlib.ExitStack() as stack:
            for name, engine in engines.items():
                if continuation is None:
                    hidden, num_bytes = window_hidden_states(engine, tokens)
                    tallies[name].bytes.append(num_bytes)
                    blocks[name] = log_probabilities(engine.runner.model, hidden)
                else:
                    reading = teacher_forced_logprobs(engine, tokens, context - 1 - continuation)
                    blocks[name] = stack.enter_context(contextlib.closing(reading))
            _score(blocks, torch.tensor(tokens[-rows:]), tallies, reference, number * rows)
            if continuation is not None:
                for name, engine in engines.items():
                    tallies[name].bytes.append(cache_bytes_used(engine))
        for name, tally in tallies.items():
            tally.nll.append(float(tally.losses.mean()))
            if not math.isfinite(tally.nll[-1]):
                raise ModelError(f"codec {name}: the logits of window {number} hold NaN or infinity")
        progress(number + 1, len(windows))
    dense = None if reference is None else np.array(tallies[reference].nll)
    results = []
    for name, tally in tallies.items():
        bits = _bits_per_element(engines[name], windows[0], tally.bytes[0]) if continuation is None else None
        results.append(tally.result(name, context, continuation, bits, dense))
    return results


def _bits_per_element(engine: Engine, tokens: Sequence[int], num_bytes: int) -> float | None:
    """Bits per element in the chunks before the last: from the bytes of a window minus the bytes of a prompt as long as
    the last chunk.
    """
    last = (len(tokens) - 2) % PAGE_TOKENS + 1
    before = len(tokens) - 1 - last
    if not before:
        return None
    _, last_bytes = window_hidden_states(engine, tokens[: last + 1])
    return 8 * (num_bytes - last_bytes) / (before * engine.runner.model.shape.kv_bytes_per_token(1))


def _score(
    blocks: Mapping[str, Iterator[torch.Tensor]],
    targets: torch.Tensor,
    tallies: Mapping[str, _Tally],
    reference: str | None,
    first: int,
) -> None:
    """Adds a window's tokens to the tallies, some rows of logits at a time. `first` tokens came before this window.

    blocks  log-probabilities of each engine by its name, float32 [up to LOGIT_ROWS, V] at a time
    """
    order = sorted(tallies, key=lambda name: name != reference)  # stable: the reference comes first
    for start in range(0, len(targets), LOGIT_ROWS):
        block = slice(start, start + LOGIT_ROWS)
        for name in order:
            tally, found = tallies[name], next(blocks[name])
            wanted = targets[block].to(found.device)[:, None]
            tally.losses[block] = -found.gather(1, wanted)[:, 0].double().cpu().numpy()
            if reference is None:
                continue
            if name == reference:
                dense, p, best = found, found.exp(), best_ids(found)
                tally.agreeing += len(found)
            else:
                kl = (dense - found).mul_(p).sum(-1)
                tally.kl[first + start : first + start + len(found)] = kl.double().cpu().numpy()
                tally.agreeing += int((best_ids(found) == best).sum())


@dataclass(slots=True)
class _Tally:
    """The results of one engine so far.

    losses    -log p of the tokens of the current window
    nll       mean loss of each window
    kl        KL of each token of all windows. Allocated in full at the start: pieces kept between two blocks of logits
              would fragment memory, which would then grow with every block
    agreeing  number of tokens with the same most probable token as the reference
    bytes     cache bytes of each window
    """

    losses: np.ndarray[Any, np.dtype[np.float64]]
    kl: np.ndarray[Any, np.dtype[np.float64]]
    nll: list[float] = field(default_factory=list)
    agreeing: int = 0
    bytes: list[int] = field(default_factory=list)

    def result(
        self,
        codec: str,
        context: int,
        continuation: int | None,
        bits: float | None,
        reference: np.ndarray[Any, np.dtype[np.float64]] | None,
    ) -> Perplexity:
        """reference: the mean losses of the reference's windows."""
        nll = np.array(self.nll)
        compared: dict[str, float | None] = {}
        if reference is not None:
            # Both read the same tokens, so their losses are correlated within a window.
            difference = nll - reference
            ratio, error = math.exp(difference.mean()), _standard_error(difference)
            compared = {
                "kl_mean": float(self.kl.mean()),
                "kl_p99": float(np.quantile(self.kl, 0.99)),
                "agreement": self.agreeing / len(self.kl),
                "ratio": ratio,
                "ratio_error": None if error is None else ratio * error,
            }
        return Perplexity(
            codec,
            context,
            num_windows=len(nll),
            num_tokens=len(nll) * len(self.losses),
            nll=float(nll.mean()),
            nll_error=_standard_error(nll),
            bytes_per_token=sum(self.bytes) / (len(nll) * (context - 1)),
            bits_per_element=bits,
            **compared,
            continuation=continuation,
            window_nll=tuple(self.nll),
        )


def _standard_error(values: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
