"""The engine: requests in, deltas out, one step at a time. Not thread-safe: one thread owns it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from quire.cache.exports import ExportedSequence
from quire.cache.namespace import Namespace
from quire.engine.admission import AdmittedRequest, PinLimits, RequestLimits
from quire.engine.batch import SchedulerCounters
from quire.engine.handover import Handover
from quire.engine.output_processor import OutputProcessor, TokenDecoder, TokenTexts
from quire.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from quire.engine.params import CacheHints, SamplingParams
from quire.engine.request import DEFAULT_NAMESPACE, NO_HINTS, Request, Sequence, SequenceState
from quire.engine.runner import LocalRunner
from quire.engine.sampler import sequence_seed
from quire.engine.scheduler import SampledToken, Scheduler
from quire.engine.step import NO_TOKEN, Result, Runner, Step, Wait
from quire.engine.stops import StopStrings
from quire.engine.tiering import Tiering
from quire.errors import RequestError
from quire.stores.tiers import Tiers
from quire.structured.grammar_compiler import GrammarCompiler
from quire.structured.guide import Guide

log = logging.getLogger("quire")


WAIT_SECONDS = 0.02
"""Longest time that a step waits for chunks in transfer, before the engine looks for new requests."""

LIFETIME_SECONDS = 1.0
"""Interval at which an idle engine checks for expired prefixes."""


class Engine:
    """Drives the scheduler and a runner. Invariant between steps: every live sequence is in the scheduler. `check`
    proves the other invariants.

    namespace      what must be equal, besides a salt, for two requests to share pages
    any_runner     computes steps; with a model it is `runner`
    tiers          stores of the cache, which the engine closes; None: there are none
    offloaded      returns the counters of offloading; None: nothing is offloaded
    context_limit  the origin of max_context, for messages: a setting, or the model's own limit
    exports        by request id, the sequences that another engine continues
    is_blocked     whether the last step did nothing, because exports hold the room that requests wait for
    clock          seconds, monotonic; measures latencies, and ends pins and lifetimes
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: TokenDecoder,
        scheduler: Scheduler,
        *,
        max_context: int,
        eos_token_ids: tuple[int, ...],
        namespace: Namespace = DEFAULT_NAMESPACE,
        tiers: Tiers | None = None,
        offloaded: Callable[[], dict[str, Any]] | None = None,
        context_limit: str = "model.max_context",
        grammars: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.any_runner = runner
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.max_context = max_context
        self.offloaded = offloaded
        self.context_limit = context_limit
        self.grammars = grammars
        self.eos_token_ids = eos_token_ids
        self.namespace = namespace
        self.tiering = Tiering(scheduler.manager, tiers)
        self.clock = clock
        self.names = TokenTexts(tokenizer)
        self.exports: dict[str, ExportedSequence] = {}
        self.is_blocked = False
        self._requests: dict[str, Request] = {}
        self._answers: dict[Sequence, OutputProcessor] = {}
        self._next_seed = np.random.SeedSequence().generate_state(1, np.uint64).item()

    @property
    def runner(self) -> LocalRunner:
        """The runner of an engine that has a model."""
        assert isinstance(self.any_runner, LocalRunner), "a simulated engine has no model"
        return self.any_runner

    @property
    def vocab_size(self) -> int:
        """Valid token ids are below it."""
        return self.any_runner.vocab_size

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests)

    @property
    def limits(self) -> RequestLimits:
        """The limits of requests that the engine accepts now."""
        manager, tiers = self.scheduler.manager, self.tiering.tiers
        pins = PinLimits(
            manager.pins.most if manager.tree.shares else None, has_disk=tiers is not None and tiers.is_persistent
        )
        return RequestLimits(self.vocab_size, self.max_context, self.context_limit, self.scheduler.max_queue, pins)

    def compile_grammar(self, request: AdmittedRequest) -> None:
        """Compiles the grammar of a request's constraint, if it has one. Raises RequestError."""
        wanted = request.params.structured_outputs
        if wanted is None:
            return
        if self.grammars is None:
            raise RequestError("structured_outputs: this engine has no tokenizer for grammars", "structured_outputs")
        request.grammar = self.grammars.compile(wanted, request.hints.cache_salt)

    def add(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        hints: CacheHints = NO_HINTS,
        guide: Callable[[], Guide] | None = None,
    ) -> Request:
        """Admits and queues a request of the engine's own thread. Raises RequestError if it can never run,
        QueueFullError if it cannot wait now.
        """
        self.limits.check(prompt_ids, params, hints)
        request = AdmittedRequest(None, prompt_ids, params, hints)
        if guide is None:
            self.compile_grammar(request)
        return self.queue(request_id, request, guide=guide)

    def queue(
        self,
        request_id: str,
        admitted: AdmittedRequest,
        guide: Callable[[], Guide] | None = None,
        continued: Handover | None = None,
    ) -> Request:
        """Queues an admitted request. Raises RequestError if its id is in use, QueueFullError if it cannot wait now.

        guide      makes a guide for each sequence; None: one of the grammar, if there is one
        continued  the handover of a one-sequence request that another engine began or will continue; None: neither
        """
        prompt_ids, params, hints = admitted.prompt_ids, admitted.params, admitted.hints
        if request_id in self._requests:
            raise RequestError(f"a request with id {request_id!r} is already running", "request_id")
        manager = self.scheduler.manager
        namespace = self.namespace_of(hints)
        has_guide = guide is not None or admitted.grammar is not None
        assert has_guide or params.structured_outputs is None, "the grammar of a constraint is not compiled"
        if guide is None and admitted.grammar is not None:
            assert self.grammars is not None
            guide = partial(self.grammars.guide, admitted.grammar, len(prompt_ids))
        request = Request(request_id, admitted.text, prompt_ids, params, self.clock(), hints)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        room = self.max_context - len(prompt_ids)
        if room < 1:  # another engine has taken the place of the one that admitted it
            raise RequestError(f"the context holds {self.max_context} tokens now; send the request again", "prompt")
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.seed is None:
            self._next_seed += 1
        seed = self._next_seed if params.seed is None else params.seed
        for index in range(params.n):
            own, made = sequence_seed(seed, index), None if guide is None else guide()
            request.sequences.append(Sequence(request, index, list(prompt_ids), max_tokens, namespace, own, made))
        if continued is not None:
            _continue(request, continued)
        self.scheduler.add(request.sequences, is_counted=continued is not None)
        self._requests[request_id] = request
        if hints.cache_pin == 0:
            manager.tick(request.arrival)  # the unpinned prefix counts as used now, not at the last step
            manager.pins.end(request.sequences[0].keys)
            self.tiering.unpin(request.sequences[0].keys, len(prompt_ids))
            request.num_pinned_tokens = 0
        strings = StopStrings(params)
        for sequence in request.sequences:
            self._answers[sequence] = OutputProcessor(sequence, self.tokenizer, self.names, self.eos_token_ids, strings)
            if continued is not None:
                self._answers[sequence].resume(continued.token_ids, continued.cumulative)
        return request

    def namespace_of(self, hints: CacheHints) -> Namespace:
        """The namespace of a request's chunks."""
        return replace(self.namespace, salt=hints.cache_salt) if hints.cache_salt else self.namespace

    @property
    def longest_request(self) -> int:
        """The most tokens that any current request may reach; 0 without requests."""
        every = (sequence for request in self._requests.values() for sequence in request.sequences)
        return max((sequence.num_prompt + sequence.max_tokens for sequence in every), default=0)

    def take_over(self, other: Engine) -> None:
        """Takes all requests and counters of another engine over the same model. Running requests are preempted: they
        lose their pages, and are computed again here. `other` has no requests afterwards.
        """
        assert not self.has_work and not other.exports and self.tiering.tiers is other.tiering.tiers is None
        scheduler = other.scheduler
        # The youngest first, because each is put before all others.
        for sequence in sorted(scheduler.running, key=lambda each: each.sequence_id, reverse=True):
            if sequence.state is SequenceState.RUNNING:
                scheduler.preempt(sequence)
        waiting, self.scheduler.batch.counters = list(scheduler.waiting), scheduler.counters
        scheduler.waiting.clear()
        for sequence in waiting:
            scheduler.manager.swapping.forget(sequence)
            sequence.move(self.namespace_of(sequence.request.hints))
        self.scheduler.add(waiting, is_counted=True)
        self._requests, other._requests = other._requests, {}
        self._answers, other._answers = other._answers, {}
        self._next_seed, self.grammars = other._next_seed, other.grammars

    def end_export(self, request_id: str) -> None:
        """Frees the exported chunks of a request, after another engine has fetched them or if none will."""
        self.scheduler.manager.exports.end(self.exports.pop(request_id))

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request in any state and frees its memory. Returns None if it is not running."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        live = [sequence for sequence in request.sequences if sequence.state is not SequenceState.FINISHED]
        return self._output(request, [self._end(sequence, "abort") for sequence in live])

    def step(self) -> list[RequestOutput]:
        """Runs one step. Returns one output for each request that has new deltas."""
        self.scheduler.manager.tick(self.clock())
        step = self.scheduler.next_step()
        self.is_blocked = step is None and self.has_work
        if step is None:
            return []
        if isinstance(step, Wait):
            step.sleep(WAIT_SECONDS)
            return []
        begun = self.clock()
        result = self.any_runner.run(step)
        self.tiering.record_step(step, self.clock() - begun)
        deltas: dict[Request, list[CompletionOutput]] = {}
        if result.errors or result.prompt_logprobs:
            for index, entries in result.prompt_logprobs.items():
                request = self.scheduler.sequence_of(index).request
                for named in request.add_prompt_logprobs(step.slices[index].start, entries):
                    self.names.fill(named)
            self._end_failed(step, result, deltas, of_drafts=False)
        if result.pooled:
            for index, part in result.pooled.items():
                self.scheduler.sequence_of(index).request.add_pooled(step.slices[index].start, part)
        self._answer(self.scheduler.commit(step, result), deltas)
        if result.errors:
            self._end_failed(step, result, deltas, of_drafts=True)
        return [self._output(request, outputs) for request, outputs in deltas.items()]

    def stats(self) -> dict[str, Any]:
        """Counters since start, and the cache's current bytes; see `LLM.stats`."""
        scheduler = self.scheduler
        return {
            **asdict(scheduler.counters),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "cache": scheduler.manager.stats(),
            **self.tiering.stats(),
            **({} if self.offloaded is None else {"offload": self.offloaded()}),
        }

    def idle(self) -> float | None:
        """Does background work while there are no requests. Returns the seconds until more work is due; None: nothing
        is due before the next request.
        """
        seconds = self.tiering.idle()
        return LIFETIME_SECONDS if seconds is None and self.forgets else seconds

    @contextmanager
    def leaving_nothing(self) -> Iterator[None]:
        """For measurements: requests inside leave no chunks in the cache or its stores, and nothing in the counters."""
        manager = self.scheduler.manager
        was_on, manager.demotion.is_on = manager.demotion.is_on, False
        yield
        manager.eviction.evict(manager.tree.num_chunks)
        manager.demotion.is_on = was_on
        manager.statistics.restart()
        manager.retention.bytes_freed = 0
        self.scheduler.batch.counters = SchedulerCounters()

    @property
    def forgets(self) -> bool:
        """Whether time alone may change the cache. If so, even an idle engine must be stepped now and then."""
        manager = self.scheduler.manager
        return manager.tree.has_ending or manager.pins.has_ending

    @property
    def holds_nothing(self) -> bool:
        """Whether there are no requests, no answers and no bytes in use, except exports and chunks that are prefetched
        or copied. If this detects a leak, `check` locates it.
        """
        manager = self.scheduler.manager
        is_lent = bool(self.exports or manager.fetching.prefetches or manager.table.ledger.has_holds)
        is_in_use = manager.stats()["bytes_used"] > 0 and not is_lent
        return not self._requests and not self._answers and not is_in_use

    def check(self) -> None:
        """Proves that nothing is leaked: scheduler, manager, table, ledger."""
        self.scheduler.check()
        assert self._requests or not self._answers, "answers of finished requests are kept"
        self.any_runner.check(self.scheduler.batch.begun)

    def _end_failed(
        self, step: Step, result: Result, deltas: dict[Request, list[CompletionOutput]], *, of_drafts: bool
    ) -> None:
        """Ends failed sequences. If a prompt failed, all sequences of its request end. A sequence that failed at a
        draft keeps the tokens before that.
        """
        for index, (reason, is_of_prompt) in sorted(result.errors.items()):
            if (step.slices[index].draft != NO_TOKEN) != of_drafts:
                continue
            failed = self.scheduler.sequence_of(index)
            log.error("request %s: %s", failed.request.request_id, reason)
            ended = failed.request.sequences if is_of_prompt else [failed]
            for sequence in ended:
                if sequence.state is not SequenceState.FINISHED:
                    _tell(deltas, failed.request, self._end(sequence, "error", reason))

    def _answer(self, sampled: list[SampledToken], deltas: dict[Request, list[CompletionOutput]]) -> None:
        """Turns the tokens of a step into deltas."""
        now = self.clock()
        for sequence, token_id, ended, logprobs in sampled:
            answer = self._answers.get(sequence)
            if answer is None:  # the sequence ended with an earlier token of this step
                continue
            request = sequence.request
            if request.first_token_at is None:
                request.first_token_at = now
                if request.hints.cache_pin and request.hints.pin_tier == "disk":
                    num_tokens = len(request.prompt_ids)
                    request.num_pinned_tokens = self.tiering.pin(sequence.keys, num_tokens, request.hints.cache_pin)
            delta = answer.push(token_id, logprobs, ended)
            if delta.finish_reason is not None:
                self.scheduler.finish(sequence)
                del self._answers[sequence]
            elif sequence.will_hand_over:
                self.exports[request.request_id] = self.scheduler.export(sequence)
                del self._answers[sequence]
            _tell(deltas, request, delta)

    def _end(self, sequence: Sequence, reason: FinishReason, explanation: str | None = None) -> CompletionOutput:
        self.scheduler.finish(sequence)
        return self._answers.pop(sequence).end(reason, explanation)

    def _output(self, request: Request, outputs: list[CompletionOutput]) -> RequestOutput:
        finished = request.finished
        if finished:
            del self._requests[request.request_id]
        # Reported once and not kept: 200 bytes each, and answers may be long.
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        embedding = request.take_embedding() if request.pooled and request.first_token_at is not None else None
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_ids,
            prompt_logprobs,
            outputs,
            finished,
            request.sequences[0].num_cached_tokens,
            request.sequences[0].cached_by_tier,
            request.num_pinned_tokens,
            request.sequences[0].kept_fraction,
            embedding,
        )


def _tell(deltas: dict[Request, list[CompletionOutput]], request: Request, delta: CompletionOutput) -> None:
    """Adds a delta to those of its step. Deltas of one sequence, from drafts, are merged."""
    found = deltas.setdefault(request, [])
    if found and found[-1].index == delta.index:
        found[-1].add(delta)
    else:
        found.append(delta)


def _continue(request: Request, continued: Handover) -> None:
    """Applies a handover to the sequence of a request. Tokens that another engine has computed are treated as computed
    before a preemption.
    """
    (sequence,) = request.sequences
    sequence.seed, sequence.swapped = continued.seed, continued.swapped
    sequence.will_hand_over = continued.will_hand_over
    if continued.token_ids:
        sequence.token_ids += continued.token_ids
        sequence.high_water = len(sequence.token_ids) - 1
        sequence.num_preemptions = 1
