"""The engine: requests in, deltas out, one step at a time. Not thread-safe: one thread owns it."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Protocol

import numpy as np
import torch

from quire.attention.plan import AttentionBackend, AttentionPlan, Profiled, RowSlice
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.manager import PINNED_SHARE
from quire.cache.namespace import Namespace
from quire.cache.retention.decisions import Decided
from quire.cache.retention.retainer import Profiling
from quire.engine.answers import Answer, Names, Tokenizer
from quire.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from quire.engine.params import CacheHints, SamplingParams
from quire.engine.prefixes import Prefix, prefixes
from quire.engine.request import NO_HINTS, NOBODY, Request, Sequence, State
from quire.engine.retention_report import summary_of
from quire.engine.sampler import Sampler, SampleRow, sequence_seed
from quire.engine.scheduler import Batch, Scheduler, Slice
from quire.errors import QuireError, RequestError
from quire.models.plan import Model

log = logging.getLogger("quire")


class Decode(Protocol):
    """Runs a step in which every row decodes."""

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        """tokens, positions int64 [R], plan the backend's newest; returns logits [R, V]."""
        ...


class Observer(Protocol):
    """Takes rows of prompts for which log-probabilities were asked, in place of what would compute these."""

    def __call__(self, sequence: Sequence, start: int, hidden: torch.Tensor) -> None:
        """Takes hidden [rows, E], valid during the call, of the tokens from `start` on; again after a preemption."""
        ...


NOT_FINITE = "the logits of the prompt hold NaN or infinity"

LOGIT_ROWS = 32
"""Prompt rows whose logits are computed at once: 19 MB in float32 at a vocabulary of 152,064. More are no faster."""


def row_slice(piece: Slice, looks: Profiling | None = None) -> RowSlice:
    """The rows of a sequence in a step, as attention sees them."""
    path = piece.sequence.path
    profiled = None if looks is None else Profiled(path.sums, *looks)
    return RowSlice(piece.start, piece.count, path.chunks, piece.shared, path.filled, profiled, path.num_dropped)


class Engine:
    """Drives scheduler, attention, model and sampler. Invariant between steps: every live sequence is in the
    scheduler, `check` proves the rest.

    namespace    what must be equal, besides a salt, for two requests to share pages
    decode       runs a step of decode rows alone in place of the model, as captured graphs do
    padded_rows  rows a step of so many is run in: what is added computes token 0 and is thrown away
    context_limit  what sets max_context: a setting, or what the model was made for
    clock        seconds, monotonic; measures, and ends pins and lifetimes
    observer     sees the prompts of evaluations; None: nobody does
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        attention: AttentionBackend,
        scheduler: Scheduler,
        sampler: Sampler,
        *,
        max_context: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        namespace: Namespace = NOBODY,
        decode: Decode | None = None,
        padded_rows: Callable[[int], int] = lambda rows: rows,
        context_limit: str = "model.max_context",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.attention = attention
        self.scheduler = scheduler
        self.sampler = sampler
        self.max_context = max_context
        self.context_limit = context_limit
        self.eos_token_ids = eos_token_ids
        self.device = device
        self.namespace = namespace
        self.decode = decode
        self.padded_rows = padded_rows
        self.clock = clock
        self.names = Names(tokenizer)
        self.observer: Observer | None = None
        self._requests: dict[str, Request] = {}
        self._answers: dict[Sequence, Answer] = {}
        self._rows: dict[Sequence, SampleRow] = {}
        self._next_seed = np.random.SeedSequence().generate_state(1, np.uint64).item()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests)

    def check_request(self, prompt_ids: list[int], params: SamplingParams, hints: CacheHints = NO_HINTS) -> None:
        """Raises RequestError, naming the value and the limit, for a request that could never run."""
        if not prompt_ids:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        vocab_size = self.model.shape.vocab_size
        low, high = min(prompt_ids), max(prompt_ids)
        if low < 0 or high >= vocab_size:
            raise RequestError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}", "prompt"
            )
        if len(prompt_ids) >= self.max_context:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens and the context holds {self.max_context}"
                f" ({self.context_limit}), one of which must be generated",
                "prompt",
            )
        params.check_vocabulary(vocab_size)
        if params.n > self.scheduler.max_queue:
            raise RequestError(
                f"n is {params.n} and at most {self.scheduler.max_queue} sequences may wait (scheduler.max_queue)", "n"
            )
        if hints.cache_pin:
            self._check_pin(len(prompt_ids))

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        hints: CacheHints = NO_HINTS,
    ) -> Request:
        """Queues a request. Raises RequestError if it can never run, QueueFullError if it cannot wait now."""
        self.check_request(prompt_ids, params, hints)
        if request_id in self._requests:
            raise RequestError(f"a request with id {request_id!r} is already running", "request_id")
        manager = self.scheduler.manager
        namespace = replace(self.namespace, salt=hints.cache_salt) if hints.cache_salt else self.namespace
        request = Request(request_id, prompt, prompt_ids, params, self.clock(), hints)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        room = self.max_context - len(prompt_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.seed is None:
            self._next_seed += 1
        seed = self._next_seed if params.seed is None else params.seed
        for index in range(params.n):
            token_ids = list(prompt_ids)
            request.sequences.append(Sequence(request, index, token_ids, max_tokens, namespace))
        self.scheduler.add(request.sequences)
        self._requests[request_id] = request
        if hints.cache_pin == 0:
            manager.tick(request.arrival)  # what it kept counts as used now, not when the last step was
            manager.unpin(request.sequences[0].keys)
            request.num_pinned_tokens = 0
        for sequence in request.sequences:
            self._answers[sequence] = Answer(sequence, self.tokenizer, self.names, self.eos_token_ids)
            self._rows[sequence] = SampleRow(params, prompt_ids, [], sequence_seed(seed, sequence.index))
        return request

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request wherever it stands and frees what it holds; None if it is not running."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        live = [sequence for sequence in request.sequences if sequence.state is not State.FINISHED]
        return self._output(request, [self._end(sequence, "abort") for sequence in live])

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Runs one step; one output of deltas for every request that has news."""
        self.scheduler.manager.tick(self.clock())
        batch = self.scheduler.next_batch()
        if batch is None:
            return []
        manager = self.scheduler.manager
        if manager.retainer is None:
            slices = [row_slice(piece) for piece in batch.slices]
        else:
            slices = [row_slice(piece, manager.looks(piece.sequence, piece.last_rows)) for piece in batch.slices]
        tokens, positions, last_rows = self._inputs(batch)
        plan = self.attention.plan(slices)
        decided: dict[Sequence, Decided] = {}
        sampling = [(piece.sequence, row) for piece, row in zip(batch.slices, last_rows, strict=True) if piece.samples]
        decides = any(piece.last_rows for piece in batch.slices)
        wants_prompts = any(piece.sequence.wants_prompt_logprobs for piece in batch.slices)
        is_decode = len(sampling) == len(last_rows) == len(tokens) and not decides and not wants_prompts
        if self.decode is not None and is_decode:
            logits = self.decode(tokens, positions, plan)
        else:
            hidden = self.model.hidden(tokens, positions, plan)
            if wants_prompts and (failed := self._prompt_logprobs(batch, hidden)):
                return self._fail(batch, slices, failed)
            if decides:
                decided = self._decide(batch, slices, plan)
            if not sampling:
                self.scheduler.commit(batch, (), decided)
                return []
            logits = self._logits(hidden, [row for _, row in sampling])
        sampled = self.sampler.sample(logits, [self._rows[sequence] for sequence, _ in sampling])
        return self._deliver(batch, sampled.token_ids.tolist(), sampled.logprobs, sampled.errors, decided)

    def stats(self) -> dict[str, Any]:
        """Counters since start, and bytes of the cache now; see `LLM.stats`."""
        scheduler = self.scheduler
        return {
            **asdict(scheduler.counters),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "cache": scheduler.manager.stats(),
        }

    def may_pin(self, prompt_ids: list[int], salt: str = "") -> bool:
        """Whether pins have room for a prompt."""
        keys = ChunkKeys(replace(self.namespace, salt=salt), prompt_ids)
        return self.scheduler.manager.may_pin(keys, len(prompt_ids) // PAGE_TOKENS)

    def protect(self, prompt_ids: list[int], salt: str = "") -> None:
        """Makes the pin of a prompt, which it has, one that nothing ends; requests may from then on be as long as the
        rest of the cache. Raises QuireError while there are requests: they were promised more.
        """
        manager = self.scheduler.manager
        assert manager.pins is not None
        if self._requests:
            raise QuireError("prefixes are protected before there are requests")
        manager.pins.protect(ChunkKeys(replace(self.namespace, salt=salt), prompt_ids))
        left = manager.unprotected * PAGE_TOKENS
        if left < self.max_context:
            self.max_context, self.context_limit = left, "what cache.pin leaves of cache.memory"

    def prefixes(self, visible: Callable[[str], bool] = lambda salt: True) -> list[Prefix]:
        """What the prefix tree holds of the salts that are visible, parents first."""
        manager = self.scheduler.manager
        if manager.tree is None:
            return []
        manager.tick(self.clock())
        return prefixes(manager.tree, manager.chunk_bytes, lambda namespace: visible(namespace.salt))

    @property
    def forgets(self) -> bool:
        """Whether time alone may change what is cached: then an idle engine is stepped now and again."""
        manager = self.scheduler.manager
        tree, pins = manager.tree, manager.pins
        has_lifetime = manager.lifetime is not None and tree is not None and tree.num_chunks > 0
        return has_lifetime or (pins is not None and pins.has_ending)

    @property
    def holds_nothing(self) -> bool:
        """Whether an idle engine's counters say so: a leak shows here at once, and `check` then says where."""
        cache = self.scheduler.manager.stats()
        return not self._requests and not self._answers and cache["bytes_used"] == 0

    def check(self) -> None:
        """Proves that nothing is leaked: scheduler, manager, table, ledger."""
        self.scheduler.check()
        if not self._requests:
            assert not self._answers and not self._rows, "answers of finished requests are kept"

    def _check_pin(self, num_tokens: int) -> None:
        manager = self.scheduler.manager
        if manager.tree is None:
            raise RequestError("cache_pin needs cache.share, which is off", "cache_pin")
        if num_tokens < PAGE_TOKENS:
            raise RequestError(
                f"cache_pin: the prompt has {num_tokens} tokens; what is kept are whole chunks of {PAGE_TOKENS}",
                "cache_pin",
            )
        most = manager.max_pinned
        if num_tokens // PAGE_TOKENS > most:
            raise RequestError(
                f"cache_pin: the prompt has {num_tokens} tokens; at most {most * PAGE_TOKENS}, {PINNED_SHARE:.0%}"
                " of the cache (cache.memory), may be pinned",
                "cache_pin",
            )

    def _inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Token ids and positions of all rows and the padding, int64 each, and the index of each slice's last row."""
        tokens: list[int] = []
        last_rows = []
        positions = []
        for piece in batch.slices:
            if piece.count == 1:
                tokens.append(piece.sequence.token_ids[piece.start])
                positions.append(piece.start)
            else:
                tokens.extend(piece.sequence.token_ids[piece.start : piece.start + piece.count])
                positions.extend(range(piece.start, piece.start + piece.count))
            last_rows.append(len(tokens) - 1)
        padding = [0] * (self.padded_rows(len(tokens)) - len(tokens))
        tokens += padding
        positions += padding
        both = torch.from_numpy(np.array([tokens, positions], np.int64))
        if self.device.type != "cpu":
            both = both.pin_memory().to(self.device, non_blocking=True)
        return both[0], both[1], last_rows

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Logits [len(rows), V] of some rows of `hidden`."""
        padded = rows + rows[:1] * (self.padded_rows(len(rows)) - len(rows))
        if padded != list(range(len(hidden))):
            hidden = hidden.index_select(0, torch.tensor(padded, device=self.device))
        return self.model.head(hidden)[: len(rows)]

    def _prompt_logprobs(self, batch: Batch, hidden: torch.Tensor) -> list[Request]:
        """Collects what was asked for of the prompts; returns the requests whose logits are not finite."""
        row = 0
        failed = []
        for piece in batch.slices:
            sequence = piece.sequence
            if sequence.wants_prompt_logprobs and self.observer is not None:
                self.observer(sequence, piece.start, hidden[row : row + piece.count])
            elif sequence.wants_prompt_logprobs:
                request = sequence.request
                assert request.prompt_logprobs is not None
                del request.prompt_logprobs[piece.start + 1 :]  # what a preemption makes it compute again
                stop = min(piece.start + piece.count, len(request.prompt_ids) - 1)
                for start in range(piece.start, stop, LOGIT_ROWS):
                    end = min(start + LOGIT_ROWS, stop)
                    logits = self._logits(hidden, list(range(row + start - piece.start, row + end - piece.start)))
                    found = self.sampler.prompt_logprobs(
                        logits, request.prompt_ids[start + 1 : end + 1], request.params.prompt_logprobs or 0
                    )
                    del logits  # before the next ones are made
                    request.prompt_logprobs.extend(found)
                    if any(math.isnan(next(iter(entry.values())).logprob) for entry in found):
                        failed.append(request)
                        break
                if stop == len(request.prompt_ids) - 1:
                    for named in request.prompt_logprobs[1:]:
                        assert named is not None
                        self.names.fill(named)
            row += piece.count
        return failed

    def _fail(self, batch: Batch, slices: list[RowSlice], failed: list[Request]) -> list[RequestOutput]:
        """Ends requests whose prompt gives no finite logits; the step is done again without them."""
        outputs = []
        for piece, looks in zip(reversed(batch.slices), (each.profiled for each in reversed(slices)), strict=True):
            # What its rows look at is in its sums already, and would be there twice.
            if looks is not None and not looks.peaks and piece.sequence.request not in failed:
                self.scheduler.preempt(piece.sequence)
        for request in failed:
            log.error("request %s: %s", request.request_id, NOT_FINITE)
            live = [sequence for sequence in request.sequences if sequence.state is not State.FINISHED]
            outputs.append(self._output(request, [self._end(sequence, "error", NOT_FINITE) for sequence in live]))
        return outputs

    def _decide(self, batch: Batch, slices: list[RowSlice], plan: AttentionPlan) -> dict[Sequence, Decided]:
        """What sequences keep of the prompts whose last rows are computed now."""
        manager = self.scheduler.manager
        found: dict[Sequence, Decided] = {}
        for index, piece in enumerate(batch.slices):
            if piece.last_rows:
                sequence, looks = piece.sequence, slices[index].profiled
                assert manager.retainer is not None and looks is not None
                found[sequence] = manager.retainer.retention.decide(
                    sequence.request.prompt_ids,
                    manager.sums_of(sequence),
                    functools.partial(plan.recovered, index) if looks.last_rows else None,
                    manager.retainer.page_bytes,
                )
                if log.isEnabledFor(logging.DEBUG):
                    log.debug("request %s: %s", sequence.name, summary_of(found[sequence]))
        return found

    def _deliver(
        self,
        batch: Batch,
        token_ids: list[int],
        logprobs: list[dict[int, Any] | None],
        errors: dict[int, str],
        decided: dict[Sequence, Decided],
    ) -> list[RequestOutput]:
        """Commits the step and turns its tokens into deltas."""
        deltas: dict[Request, list[CompletionOutput]] = {}
        extras: dict[Sequence, dict[int, Any]] = {}
        if errors or any(logprobs):
            sampling = [piece.sequence for piece in batch.slices if piece.samples]
            extras = {sequence: entry for sequence, entry in zip(sampling, logprobs, strict=True) if entry}
            for row, reason in sorted(errors.items()):
                failed = sampling[row]
                log.error("request %s: %s", failed.request.request_id, reason)
                deltas.setdefault(failed.request, []).append(self._end(failed, "error", reason))
        now = self.clock()
        for sampled in self.scheduler.commit(batch, token_ids, decided):
            sequence = sampled.sequence
            request = sequence.request
            self._rows[sequence].output_ids.append(sampled.token_id)
            if request.first_token_at is None:
                request.first_token_at = now
            delta = self._answers[sequence].push(sampled.token_id, extras.get(sequence), sampled.finished_by_length)
            if delta.finish_reason is not None:
                self.scheduler.finish(sequence)
                del self._answers[sequence], self._rows[sequence]
            deltas.setdefault(request, []).append(delta)
        return [self._output(request, outputs) for request, outputs in deltas.items()]

    def _end(self, sequence: Sequence, reason: FinishReason, explanation: str | None = None) -> CompletionOutput:
        self.scheduler.finish(sequence)
        del self._rows[sequence]
        return self._answers.pop(sequence).end(reason, explanation)

    def _output(self, request: Request, outputs: list[CompletionOutput]) -> RequestOutput:
        finished = request.finished
        if finished:
            del self._requests[request.request_id]
        # Told once and not kept: 200 bytes each, and the answers may be long.
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_ids,
            prompt_logprobs,
            outputs,
            finished,
            request.sequences[0].num_cached_tokens,
            request.num_pinned_tokens,
            request.sequences[0].kept_fraction,
        )
