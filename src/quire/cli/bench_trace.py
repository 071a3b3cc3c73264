"""`quire bench trace`: replays a trace with shared prefixes and checks the number of cached tokens of each request.

The expected number (`quire.planning.traces`) is computed from the hash ids, without the engine. It is exact for the
prompts sent: equal ids at equal places are equal tokens, and chunks of different ids differ. Every generated token is
forced to be one that no prompt has, so a cached answer never matches a prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from quire.arguments import Arguments
from quire.cache.codecs import DENSE
from quire.cli import shared
from quire.config import EngineConfig, format_bytes, options_from
from quire.errors import ConfigError, ModelError, QuireError
from quire.planning import traces
from quire.planning.traces import TraceRequest

if TYPE_CHECKING:
    from rich.console import Console

    from quire.llm import LLM

SHOWN_DIFFERENCES = 5
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


class TraceBenchmark:
    """The benchmark; see the module's docstring."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "trace": None,
        "requests": 500,
        "block_tokens": 32,
        "concurrency": 1,
        "speed": None,
        "output_tokens": None,
    }

    @staticmethod
    def add_arguments(group: Arguments) -> None:
        """The flags that only this benchmark has."""

        def add(flag: str, kind: Any, metavar: str, text: str, to: Any = group) -> None:
            to.add_argument(flag, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=text)

        add("--trace", Path, "FILE", "the trace; required")
        add("--requests", shared.count, "N", "requests replayed, from the first (default: 500)")
        add("--block-tokens", shared.count, "N", "tokens per 512 of the trace, a multiple of 4 (default: 32)")
        pace = group.add_mutually_exclusive_group()
        add("--concurrency", shared.count, "N", "number of requests in flight (default: 1)", pace)
        add("--speed", float, "X", "follow the trace's timestamps, X times as fast", pace)

    def __init__(self, args: argparse.Namespace) -> None:
        """Reads the trace. Raises ConfigError for invalid arguments, or if sharing is off."""
        if args.trace is None:
            raise ConfigError("quire bench trace needs --trace FILE")
        if args.block_tokens % traces.TELLING_TOKENS:
            raise ConfigError(
                f"--block-tokens is {args.block_tokens}; it must be a multiple of {traces.TELLING_TOKENS}"
            )
        if args.speed is not None and not 0 < args.speed < math.inf:
            raise ConfigError(f"--speed is {args.speed}; it must be above 0")
        if args.output_tokens is not None and args.output_tokens < 1:
            raise ConfigError(f"--output-tokens is {args.output_tokens}; it must be at least 1")
        config = EngineConfig.from_options(options_from(args, shared.ENGINE_SECTIONS), args.config)
        if not config.cache.share:
            raise ConfigError("cache.share is false; leave it true, because quire bench trace measures sharing")
        self._args = args
        read = traces.read_trace(args.trace, args.requests)
        self._requests = traces.scaled(read, args.block_tokens, args.output_tokens)
        is_dense = config.cache.codec == DENSE and not config.retain.is_on
        self._expected = traces.count_matches(self._requests, args.block_tokens, is_dense=is_dense)

    def options(self) -> dict[str, Any]:
        """Settings of the engine to measure. The cache holds the whole trace unless its size is set.

        Raises ConfigError if a request is longer than the context, or if such a cache does not fit the machine.
        """
        from quire.engine.build import resolve
        from quire.engine.sizes import slab_bytes
        from quire.models.resolve import resolve_model
        from quire.models.weights import open_model

        options = options_from(self._args, shared.ENGINE_SECTIONS)
        given = EngineConfig.from_options(options, self._args.config)
        with open_model(resolve_model(self._args.model)) as checkpoint:
            shape = checkpoint.shape
            config, fits = resolve(given, shape, checkpoint)
        is_auto = given.cache.memory == "auto"
        self._check_lengths(fits.model_context if is_auto else fits.max_context)
        at_once = self._args.concurrency if self._args.speed is None else config.scheduler.max_running
        # One more chunk for each running request: its open chunk.
        kept = traces.count_chunks(self._requests, self._expected)
        chunks = max(2, kept + min(at_once, len(self._requests)))
        memory = chunks * fits.chunk_bytes
        # The arena is rounded down to whole slabs; whole mebibytes print exactly.
        memory += 2 * slab_bytes(fits.chunk_bytes // (shape.num_layers * shape.num_kv_heads), memory)
        self._needed_bytes = memory = -(-memory // 2**20) * 2**20
        self._chunk_bytes = fits.chunk_bytes
        self._holds_all = is_auto or fits.num_chunks >= chunks
        if not is_auto:
            return options
        if not dataclasses.replace(fits, cache_bytes=memory).fit_the_machine:
            raise ConfigError(
                f"the {len(self._requests)} requests of {self._args.trace} need cache.memory {memory >> 20}MiB"
                f" beside {format_bytes(fits.weight_bytes)} of weights, and {format_bytes(fits.available_bytes or 0)}"
                " are free; lower --requests or --block-tokens, or set a smaller cache.memory, which evicts"
            )
        return options | {"cache.memory": memory}

    def measure(self, llm: LLM, console: Console) -> tuple[list[dict[str, Any]], bool]:
        """Replays the trace and prints a table. Returns it as one row, and whether the numbers agree where they
        must.
        """
        from rich.table import Table

        # Ids from the middle of the vocabulary, which are not special tokens. The id after them is the forced token.
        ids = range(llm.shape.vocab_size // 4, llm.shape.vocab_size // 2)
        prompts = traces.make_prompts(self._requests, self._args.block_tokens, ids)
        work = [InFlightRequest(*each) for each in zip(self._requests, prompts, self._expected, strict=True)]
        _warm(llm, ids)
        before = llm.stats()
        seconds = self._replay(llm, work, ids.stop)
        row = self._row(work, seconds, before, llm)
        table = Table.grid(padding=(0, 3))
        for words in self._table(row):
            table.add_row(*words)
        console.print(table)
        if not row["is_exact"]:
            return [row], True
        wrong = [sent for sent in work if sent.matched != sent.expected]
        for sent in wrong[:SHOWN_DIFFERENCES]:
            console.print(f"line {sent.request.line}: {sent.matched} tokens matched, {sent.expected} expected")
        return [row], not wrong

    def _check_lengths(self, context: int) -> None:
        for request in self._requests:
            if request.input_tokens + request.output_tokens > context:
                raise ConfigError(
                    f"{self._args.trace} line {request.line}: {request.input_tokens} prompt tokens and"
                    f" {request.output_tokens} output tokens exceed the context of {context}; lower --block-tokens"
                )

    def _replay(self, llm: LLM, work: list[InFlightRequest], forced: int) -> float:
        """Sends all requests and records the results in `work`. Returns the seconds. Raises ModelError or QuireError if
        an answer is not the requested number of forced tokens.
        """
        from rich.console import Console
        from rich.progress import Progress

        speed, engine = self._args.speed, llm.engine
        at_once = self._args.concurrency if speed is None else len(work)
        due = [0.0 if speed is None else (each.request.seconds - work[0].request.seconds) / speed for each in work]
        todo = deque(zip(due, work, strict=True))
        running: dict[str, InFlightRequest] = {}
        begun = time.perf_counter()
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("replaying", total=len(work))
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
                        progress.advance(task)
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
        import numpy as np

        stats, config = llm.stats(), llm.config.cache
        prompt_tokens = sum(len(sent.prompt) for sent in work)
        output_tokens = sum(len(sent.answer) for sent in work)
        matched = sum(sent.matched for sent in work)
        delays = [sent.first_token - sent.begun for sent in work]
        evicted = stats["cache"]["bytes_evicted"]
        is_sequential = self._args.speed is None and self._args.concurrency == 1
        # Eviction excuses a difference only if the cache could not hold everything.
        keeps_all = self._holds_all and config.pin is None
        return {
            "trace": str(self._args.trace),
            "block_tokens": self._args.block_tokens,
            "concurrency": self._args.concurrency if self._args.speed is None else None,
            "speed": self._args.speed,
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

    def _table(self, row: dict[str, Any]) -> list[tuple[str, str, str]]:
        if row["is_exact"]:
            note = "must equal the matched tokens, in every request"
        elif row["evicted_bytes"] or row["lifetime"] is not None:
            note = "may differ from the matched tokens: prefixes were dropped"
        else:
            note = "may exceed the matched tokens: prefixes were still being computed"
        room = "holds the whole trace" if self._holds_all else f"{row['needed_bytes'] >> 20}MiB would hold it all"
        return [
            ("requests", f"{row['requests']:,}", f"blocks of {row['block_tokens']} tokens"),
            ("prompt tokens", f"{row['prompt_tokens']:,}", f"{row['prompt_tokens_per_second']:,.0f} a second"),
            ("output tokens", f"{row['output_tokens']:,}", f"{row['output_tokens_per_second']:,.0f} a second"),
            ("matched tokens", f"{row['matched_tokens']:,}", f"hit rate {row['hit_rate']:.1%}"),
            ("expected tokens", f"{row['expected_tokens']:,}", note),
            ("requests that differ", f"{row['differing_requests']:,}", ""),
            ("computed tokens", f"{row['computed_tokens']:,}", "of prompts"),
            ("seconds", f"{row['seconds']:,.1f}", ""),
            ("first token, p50", f"{row['ttft_p50'] * 1000:,.1f} ms", f"p99 {row['ttft_p99'] * 1000:,.1f} ms"),
            ("cache", format_bytes(row["cache_bytes"]), room),
            ("cached at the end", format_bytes(row["cached_bytes"]), ""),
            ("peak use", format_bytes(row["peak_bytes"]), "by running requests"),
            ("evicted", format_bytes(row["evicted_bytes"]), ""),
            ("saved", format_bytes(row["saved_bytes"]), "of keys and values"),
        ]


def _params(forced: int, output_tokens: int) -> Any:
    from quire.engine.params import SamplingParams

    bias = {forced: FORCE}
    return SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False, logit_bias=bias)


def _warm(llm: LLM, ids: range) -> None:
    """Warms caches and compiles late kernels. The prompt is shorter than a chunk, so nothing of it stays cached."""
    tokens = list(ids)[: min(traces.CHUNK_TOKENS, llm.max_context) // 2]
    llm.generate({"prompt_token_ids": tokens}, _params(ids.stop, 2), use_tqdm=False)
