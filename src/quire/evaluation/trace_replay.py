"""Replays a trace with shared prefixes and counts the cached tokens of each request.

The expected number (`quire.planning.traces`) is computed from the hash ids, without the engine. It is exact for the
prompts sent: equal ids at equal places are equal tokens, and chunks of different ids differ. Every generated token is
forced to be one that no prompt has, so a cached answer never matches a prompt.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.cache.codecs import DENSE
from quire.config import EngineConfig, format_bytes
from quire.engine.build import resolve
from quire.engine.params import SamplingParams
from quire.engine.sizes import slab_bytes
from quire.errors import ConfigError, ModelError, QuireError
from quire.models.resolve import resolve_model
from quire.models.weights import open_model
from quire.planning import traces
from quire.planning.traces import TraceRequest

if TYPE_CHECKING:
    from quire.llm import LLM

FORCE = 100.0
"""Bias on the logit of the forced token: the largest valid one."""


@dataclass(eq=False)
class InFlightRequest:
    """A request in flight. Times are seconds since the replay began. `matched` is the engine's number of cached
    tokens.
    """

    request: TraceRequest
    prompt: list[int]
    expected: int
    begun: float = 0.0
    first_token: float = math.nan
    matched: int = 0
    answer: list[int] = dataclasses.field(default_factory=list)


class TraceReplay:
    """The first requests of a trace, scaled down, for one model.

    options    settings of an engine that replays them: its cache holds the whole trace unless its size is given
    holds_all  whether the cache of these settings holds the whole trace
    """

    def __init__(
        self,
        trace: Path,
        model: str,
        options: Mapping[str, Any],
        file: Path | None = None,
        *,
        num_requests: int = 500,
        block_tokens: int = 32,
        output_tokens: int | None = None,
        concurrency: int = 1,
        speed: float | None = None,
    ) -> None:
        """Reads the trace and the model's headers.

        options, file  settings of the engine by key, and a TOML file
        block_tokens   tokens per 512 of the trace
        output_tokens  tokens per answer; None: those of the trace, scaled
        concurrency    requests in flight, without a speed
        speed          of the trace's timestamps; None: as fast as requests end
        Raises ConfigError if sharing is off, if a request is longer than the context, or if a cache for the whole trace
        does not fit the machine.
        """
        given = EngineConfig.from_options(options, file)
        if not given.cache.share:
            raise ConfigError("cache.share is false; leave it true, because quire bench trace measures sharing")
        self._trace, self._block_tokens, self._concurrency, self._speed = trace, block_tokens, concurrency, speed
        self._requests = traces.scaled(traces.read_trace(trace, num_requests), block_tokens, output_tokens)
        is_dense = given.cache.codec == DENSE and not given.retain.is_on
        self._expected = traces.count_matches(self._requests, block_tokens, is_dense=is_dense)
        with open_model(resolve_model(model)) as checkpoint:
            shape = checkpoint.shape
            config, fits = resolve(given, shape, checkpoint)
        is_auto = given.cache.memory == "auto"
        self._check_lengths(fits.model_context if is_auto else fits.max_context)
        at_once = concurrency if speed is None else config.scheduler.max_running
        # One more chunk for each running request: its open chunk.
        kept = traces.count_chunks(self._requests, self._expected)
        chunks = max(2, kept + min(at_once, len(self._requests)))
        memory = chunks * fits.chunk_bytes
        # The arena is rounded down to whole slabs; whole mebibytes print exactly.
        memory += 2 * slab_bytes(fits.chunk_bytes // (shape.num_layers * shape.num_kv_heads), memory)
        self._needed_bytes = memory = -(-memory // 2**20) * 2**20
        self._chunk_bytes = fits.chunk_bytes
        self.holds_all = is_auto or fits.num_chunks >= chunks
        self.options = dict(options)
        if is_auto:
            if not dataclasses.replace(fits, cache_bytes=memory).fit_the_machine:
                raise ConfigError(
                    f"the {len(self._requests)} requests of {trace} need cache.memory {memory >> 20}MiB"
                    f" beside {format_bytes(fits.weight_bytes)} of weights, and"
                    f" {format_bytes(fits.available_bytes or 0)} are free; lower --requests or --block-tokens, or set a"
                    " smaller cache.memory, which evicts"
                )
            self.options["cache.memory"] = memory

    def measure(
        self, llm: LLM, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[dict[str, Any], list[InFlightRequest]]:
        """Replays the trace. Returns the numbers, and the requests that differ from what must be."""
        # Ids from the middle of the vocabulary, which are not special tokens. The id after them is the forced token.
        ids = range(llm.shape.vocab_size // 4, llm.shape.vocab_size // 2)
        prompts = traces.make_prompts(self._requests, self._block_tokens, ids)
        work = [InFlightRequest(*each) for each in zip(self._requests, prompts, self._expected, strict=True)]
        _warm(llm, ids)
        before = llm.stats()
        seconds = self._replay(llm, work, ids.stop, progress)
        row = self._row(work, seconds, before, llm)
        return row, [sent for sent in work if row["is_exact"] and sent.matched != sent.expected]

    def _check_lengths(self, context: int) -> None:
        for request in self._requests:
            if request.input_tokens + request.output_tokens > context:
                raise ConfigError(
                    f"{self._trace} line {request.line}: {request.input_tokens} prompt tokens and"
                    f" {request.output_tokens} output tokens exceed the context of {context}; lower --block-tokens"
                )

    def _replay(
        self, llm: LLM, work: list[InFlightRequest], forced: int, progress: Callable[[int, int], None]
    ) -> float:
        """Sends all requests and records the results in `work`. Returns the seconds. Raises ModelError or QuireError if
        an answer is not the requested number of forced tokens.
        """
        speed, engine = self._speed, llm.engine
        at_once = self._concurrency if speed is None else len(work)
        due = [0.0 if speed is None else (each.request.seconds - work[0].request.seconds) / speed for each in work]
        todo = deque(zip(due, work, strict=True))
        running: dict[str, InFlightRequest] = {}
        begun = time.perf_counter()
        while todo or running:
            now = time.perf_counter() - begun
            while todo and todo[0][0] <= now and len(running) < at_once and engine.scheduler.has_room(1):
                at, sent = todo.popleft()
                sent.begun = now if speed is None else at
                name = f"line {sent.request.line}"
                engine.add(name, sent.prompt, _params(forced, sent.request.output_tokens))
                running[name] = sent
            if not running:
                time.sleep(max(0.0, todo[0][0] - now))
                continue
            for news in engine.step():
                sent = running[news.request_id]
                (output,) = news.outputs
                if output.finish_reason == "error":
                    raise ModelError(f"{llm.model_name} cannot be measured: {output.stop_reason}")
                if not sent.answer:
                    sent.first_token = time.perf_counter() - begun
                    sent.matched = news.num_cached_tokens
                sent.answer += output.token_ids
                if news.finished:
                    del running[news.request_id]
                    progress(len(work) - len(todo) - len(running), len(work))
        seconds = time.perf_counter() - begun
        for sent in work:
            if sent.answer != [forced] * sent.request.output_tokens:
                raise QuireError(
                    f"the answer to line {sent.request.line} of the trace is not {sent.request.output_tokens} times"
                    f" the forced token {forced}"
                )
        return seconds

    def _row(self, work: list[InFlightRequest], seconds: float, before: dict[str, Any], llm: LLM) -> dict[str, Any]:
        """The results. before: the engine's counters at the start of the replay."""
        stats, config = llm.stats(), llm.config.cache
        prompt_tokens = sum(len(sent.prompt) for sent in work)
        output_tokens = sum(len(sent.answer) for sent in work)
        matched = sum(sent.matched for sent in work)
        delays = [sent.first_token - sent.begun for sent in work]
        evicted = stats["cache"]["bytes_evicted"]
        is_sequential = self._speed is None and self._concurrency == 1
        # Eviction excuses a difference only if the cache could not hold everything.
        keeps_all = self.holds_all and config.pin is None
        return {
            "trace": str(self._trace),
            "block_tokens": self._block_tokens,
            "concurrency": self._concurrency if self._speed is None else None,
            "speed": self._speed,
            "lifetime": config.lifetime,
            "requests": len(work),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "matched_tokens": matched,
            "expected_tokens": sum(self._expected),
            "differing_requests": sum(sent.matched != sent.expected for sent in work),
            "is_exact": is_sequential and config.lifetime is None and (keeps_all or not evicted),
            "hit_rate": matched / prompt_tokens,
            "computed_tokens": stats["prefill_tokens_computed"] - before["prefill_tokens_computed"],
            "seconds": seconds,
            "ttft_p50": float(np.percentile(delays, 50)),
            "ttft_p99": float(np.percentile(delays, 99)),
            "prompt_tokens_per_second": prompt_tokens / seconds,
            "output_tokens_per_second": output_tokens / seconds,
            "cache_bytes": stats["cache"]["bytes_total"],
            "needed_bytes": self._needed_bytes,
            "cached_bytes": stats["cache"]["bytes_cached"],
            "peak_bytes": stats["cache"]["bytes_peak"],
            "evicted_bytes": evicted,
            "saved_bytes": matched // traces.CHUNK_TOKENS * self._chunk_bytes,
        }


def _params(forced: int, output_tokens: int) -> SamplingParams:
    bias = {forced: FORCE}
    return SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False, logit_bias=bias)


def _warm(llm: LLM, ids: range) -> None:
    """Warms caches and compiles late kernels. The prompt is shorter than a chunk, so nothing of it stays cached."""
    tokens = list(ids)[: min(traces.CHUNK_TOKENS, llm.max_context) // 2]
    llm.generate({"prompt_token_ids": tokens}, _params(ids.stop, 2), use_tqdm=False)
