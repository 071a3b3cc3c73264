"""Replays a trace whose prompts share beginnings, and compares the cached tokens of each request with a count.

    python benchmarks/trace_replay.py --data DIR                      # 500 requests, one after the other
    python benchmarks/trace_replay.py --trace FILE --speed 10         # by the times of the trace, 10 times as fast

DIR has mooncake_conversation.jsonl. The requests of a Mooncake trace are scaled down: 512 of its tokens become
--block-tokens. The expected number of cached tokens is counted from the trace's hash ids, without the engine, and it is
exact for the prompts that are sent: equal ids at equal places are equal tokens, and chunks of different ids differ.
Every generated token is forced to be one that no prompt has, so a cached answer never matches a prompt.

By default the cache is large enough for the whole trace. If requests run one after the other and nothing is evicted,
any difference ends the script with exit status 1. All settings of an engine are flags, such as --cache.codec.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import append_record, format_table

from quire.arguments import Arguments, count
from quire.cache.codecs import DENSE
from quire.cache.ledger import PAGE_TOKENS
from quire.cli.shared import progress
from quire.config import ENGINE_SECTIONS, EngineConfig, add_flags, format_bytes, options_from
from quire.engine.build import resolve
from quire.engine.params import SamplingParams
from quire.engine.sizes import slab_bytes
from quire.errors import ConfigError, ModelError, QuireError
from quire.models.resolve import resolve_model
from quire.models.weights import open_model
from quire.workload.traces import HASHED_TOKENS, TELLING_TOKENS, read_trace
from quire.workload.workload import Arrival, Span

if TYPE_CHECKING:
    from quire.llm import LLM

TRACE = "mooncake_conversation.jsonl"

SHOWN_DIFFERENCES = 5

FORCE = 100.0
"""Bias on the logit of the forced token: the largest valid one."""

Row = dict[str, Any]

Progress = Callable[[int, int], None]
"""Called with (done, total)."""


# ---- the count -------------------------------------------------------------------------------------------------------


def scaled(requests: Sequence[Arrival], block_tokens: int, output_tokens: int | None) -> list[Arrival]:
    """Scales the requests to blocks of `block_tokens` instead of 512. All lengths shrink in proportion, rounded up.

    The number of blocks of a prompt stays the same; rounding may complete a partial last block.
    output_tokens  length of every answer; None: in proportion too
    """

    def shorter(count: int) -> int:
        return -(-count * block_tokens // HASHED_TOKENS)

    return [
        dataclasses.replace(
            each,
            prompt=tuple(Span(span.id, shorter(span.num_tokens)) for span in each.prompt),
            num_out=output_tokens or shorter(each.num_out),
        )
        for each in requests
    ]


def make_prompts(requests: Sequence[Arrival], block_tokens: int, ids: range) -> list[list[int]]:
    """Token ids of the prompts. The tokens of a block depend only on its number. A partial block is the beginning of
    the whole one. Its first TELLING_TOKENS tokens identify it, and its length is a multiple of them: no chunk ends
    after fewer tokens of a block, so chunks are equal only if their blocks are.

    ids  token ids to use
    """
    count = 1 + max(span.id for each in requests for span in each.prompt)
    assert block_tokens % TELLING_TOKENS == 0 and count <= len(ids) ** TELLING_TOKENS, f"{count} blocks, {ids} to tell"
    blocks: list[list[int]] = []
    for number in range(count):
        telling = [ids[number // len(ids) ** place % len(ids)] for place in range(TELLING_TOKENS)]
        blocks.append(telling + random.Random(number).choices(ids, k=block_tokens - TELLING_TOKENS))
    return [[token for span in each.prompt for token in blocks[span.id][: span.num_tokens]] for each in requests]


def count_matches(requests: Sequence[Arrival], block_tokens: int, *, is_dense: bool) -> list[int]:
    """Expected number of cached tokens of each prompt, in a cache without eviction that holds all earlier prompts.

    This is the longest common prefix with any earlier prompt, in whole chunks. The last token must be computed: if all
    s tokens are cached, a dense cache finds s - 1, and another one the chunks before the last. The common prefix of two
    prompts is their common first blocks; if the last of these is partial in one prompt, only its tokens count.
    Generated tokens do not count, because no prompt has them.

    block_tokens  tokens of a whole block of these requests
    is_dense      whether the cache is dense and keeps every token
    """
    nodes: dict[tuple[int, int], int] = {}  # a trie: (node, block) -> node; 0 is the root
    held = [0]  # by node: most tokens of its block that any prompt so far has
    matches = []
    for request in requests:
        node = common = 0
        for depth, (block, own) in enumerate(request.prompt):
            child = nodes.setdefault((node, block), len(held))
            if child == len(held):
                held.append(0)
            if held[child]:
                common = depth * block_tokens + min(held[child], own)
            held[child] = max(held[child], own)
            node = child
        common, most = common // PAGE_TOKENS * PAGE_TOKENS, request.num_in - 1
        matches.append(min(common, most if is_dense else most // PAGE_TOKENS * PAGE_TOKENS))
    return matches


def count_chunks(requests: Sequence[Arrival], matches: Sequence[int]) -> int:
    """Number of chunks in a cache without eviction after all these requests. Each request adds the chunks that its
    prompt and answer fill, minus the cached ones. The last token of an answer is never computed.
    """
    filled = (each.num_in + each.num_out - 1 for each in requests)
    return sum(tokens // PAGE_TOKENS - -(-found // PAGE_TOKENS) for tokens, found in zip(filled, matches, strict=True))


# ---- the replay ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class InFlightRequest:
    """A request in flight. Times are seconds since the replay began. `number` is its place in the trace, from 1,
    `matched` the engine's number of cached tokens.
    """

    number: int
    request: Arrival
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
        num_requests: int,
        block_tokens: int,
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
            raise ConfigError("cache.share is false; leave it true: the replay measures sharing")
        self._trace, self._block_tokens, self._concurrency, self._speed = trace, block_tokens, concurrency, speed
        self._requests = scaled(read_trace(trace, num_requests), block_tokens, output_tokens)
        is_dense = given.cache.codec == DENSE and not given.retain.is_on
        self._expected = count_matches(self._requests, block_tokens, is_dense=is_dense)
        with open_model(resolve_model(model)) as checkpoint:
            shape = checkpoint.shape
            config, fits = resolve(given, shape, checkpoint)
        is_auto = given.cache.memory == "auto"
        self._check_lengths(fits.model_context if is_auto else fits.max_context)
        at_once = concurrency if speed is None else config.scheduler.max_running
        # One more chunk for each running request: its open chunk.
        kept = count_chunks(self._requests, self._expected)
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

    def measure(self, llm: LLM, progress: Progress = lambda done, total: None) -> tuple[Row, list[InFlightRequest]]:
        """Replays the trace. Returns the numbers, and the requests that differ from what must be."""
        # Ids from the middle of the vocabulary, which are not special tokens. The id after them is the forced token.
        ids = range(llm.shape.vocab_size // 4, llm.shape.vocab_size // 2)
        prompts = make_prompts(self._requests, self._block_tokens, ids)
        parts = zip(self._requests, prompts, self._expected, strict=True)
        work = [InFlightRequest(number, *each) for number, each in enumerate(parts, 1)]
        _warm(llm, ids)
        before = llm.stats()
        seconds = self._replay(llm, work, ids.stop, progress)
        row = self._row(work, seconds, before, llm)
        return row, [sent for sent in work if row["is_exact"] and sent.matched != sent.expected]

    def _check_lengths(self, context: int) -> None:
        for number, request in enumerate(self._requests, 1):
            if request.num_in + request.num_out > context:
                raise ConfigError(
                    f"{self._trace} request {number}: {request.num_in} prompt tokens and"
                    f" {request.num_out} output tokens exceed the context of {context}; lower --block-tokens"
                )

    def _replay(self, llm: LLM, work: list[InFlightRequest], forced: int, progress: Progress) -> float:
        """Sends all requests and records the results in `work`. Returns the seconds. Raises ModelError or QuireError if
        an answer is not the requested number of forced tokens.
        """
        speed, engine = self._speed, llm.engine
        at_once = self._concurrency if speed is None else len(work)
        due = [0.0 if speed is None else (each.request.at - work[0].request.at) / speed for each in work]
        todo = deque(zip(due, work, strict=True))
        running: dict[str, InFlightRequest] = {}
        begun = time.perf_counter()
        while todo or running:
            now = time.perf_counter() - begun
            while todo and todo[0][0] <= now and len(running) < at_once and engine.scheduler.has_room(1):
                at, sent = todo.popleft()
                sent.begun = now if speed is None else at
                name = f"request {sent.number}"
                engine.add(name, sent.prompt, _params(forced, sent.request.num_out))
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
            if sent.answer != [forced] * sent.request.num_out:
                raise QuireError(
                    f"the answer to request {sent.number} of the trace is not {sent.request.num_out} times"
                    f" the forced token {forced}"
                )
        return seconds

    def _row(self, work: list[InFlightRequest], seconds: float, before: dict[str, Any], llm: LLM) -> Row:
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
            "model": llm.model_name,
            "dtype": llm.config.model.dtype,
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
            "saved_bytes": matched // PAGE_TOKENS * self._chunk_bytes,
        }


def _params(forced: int, output_tokens: int) -> SamplingParams:
    bias = {forced: FORCE}
    return SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False, logit_bias=bias)


def _warm(llm: LLM, ids: range) -> None:
    """Warms caches and compiles late kernels. The prompt is shorter than a chunk, so nothing of it stays cached."""
    tokens = list(ids)[: min(PAGE_TOKENS, llm.max_context) // 2]
    llm.generate({"prompt_token_ids": tokens}, _params(ids.stop, 2), use_tqdm=False)


# ---- the script ------------------------------------------------------------------------------------------------------


def add_trace(parser: argparse.ArgumentParser, requests: int) -> None:
    """Adds the flags that say which requests are replayed. requests: how many by default."""
    parser.add_argument("--data", type=Path, metavar="DIR", help=f"folder with {TRACE}, or traces/{TRACE}")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="another trace of the same format")
    text = f"replayed, from the first (default: {requests})"
    parser.add_argument("--requests", type=count, default=requests, metavar="N", help=text)
    text = f"tokens per 512 of the trace, a multiple of {TELLING_TOKENS} (default: 32)"
    parser.add_argument("--block-tokens", type=count, default=32, metavar="N", help=text)


def find_trace(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Sets `given.trace`, and ends the script if there is none or if blocks cannot have that length."""
    if given.block_tokens % TELLING_TOKENS:
        parser.error(f"--block-tokens is {given.block_tokens}; it must be a multiple of {TELLING_TOKENS}")
    if given.trace is None:
        if given.data is None:
            parser.error("--data or --trace is needed")
        places = [given.data / TRACE, given.data / "traces" / TRACE]
        given.trace = next((path for path in places if path.exists()), places[0])


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_trace(parser, requests=500)
    text = "tokens per answer (default: the trace's, scaled)"
    parser.add_argument("--output-tokens", type=count, metavar="N", help=text)
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=count, default=1, metavar="N", help="requests in flight (default: 1)")
    text = "follow the trace's timestamps, X times as fast"
    pace.add_argument("--speed", type=float, metavar="X", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the results as JSON lines")
    parser.add_argument("--model", default="smollm2", help="of the engine (default: smollm2)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings; flags override it")
    add_flags(Arguments(parser, []), ENGINE_SECTIONS)
    given = parser.parse_args(words)
    find_trace(parser, given)
    if given.speed is not None and not 0 < given.speed < math.inf:
        parser.error(f"--speed is {given.speed}; it must be above 0")
    return given


def table(row: Row, *, holds_all: bool) -> str:
    """The results, with notes. holds_all: whether the cache can hold the whole trace."""
    if row["is_exact"]:
        note = "must equal the matched tokens, in every request"
    elif row["evicted_bytes"] or row["lifetime"] is not None:
        note = "may differ from the matched tokens: prefixes were dropped"
    else:
        note = "may exceed the matched tokens: prefixes were still being computed"
    room = "holds the whole trace" if holds_all else f"{row['needed_bytes'] >> 20}MiB would hold it all"
    rows = [
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
    return format_table(("replay", "value", "note"), rows)


def main(words: Sequence[str] | None = None) -> int:
    """Replays, and prints the results."""
    from quire.llm import LLM

    given = arguments(words)
    try:
        replay = TraceReplay(
            given.trace,
            given.model,
            options_from(given),
            given.config,
            num_requests=given.requests,
            block_tokens=given.block_tokens,
            output_tokens=given.output_tokens,
            concurrency=given.concurrency,
            speed=given.speed,
        )
        with LLM(given.model, replay.options, given.config) as llm, progress("requests") as told:
            row, wrong = replay.measure(llm, told)
    except QuireError as error:
        sys.exit(f"trace_replay.py: {error}")
    print(table(row, holds_all=replay.holds_all))
    for sent in wrong[:SHOWN_DIFFERENCES]:
        print(f"request {sent.number}: {sent.matched} tokens matched, {sent.expected} expected")
    if given.json:
        append_record(given.json, {"benchmark": "trace_replay", **row})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
