"""The engine's side of attempts: begins, exports, adopts and ends sequences, and notes their progress.

Everything except `EngineAttempts.prepare` runs on the engine's thread. The agent gets the events as notices.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np

from quire.cache.exports import shared_pages
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.run import HeldPages, RunIdentity
from quire.cache.table import ChunkTable
from quire.cluster.bodies import (
    CacheState,
    ComputeJob,
    InstanceLoad,
    ManifestMessage,
    PrefillProgress,
    PullRequest,
    ReceiveJob,
    RemotePrefix,
    SequenceJob,
    cache_state_of,
    swapped_of,
)
from quire.cluster.messages import (
    Ack,
    Attempt,
    Cancel,
    Compute,
    Failed,
    FirstTokenInfo,
    Manifest,
    ManifestRequest,
    Receive,
    Token,
    TokenSampled,
)
from quire.cluster.outgoing_pages import OutgoingExport, OutgoingPages
from quire.cluster.peer_store import PeerStore, Pull
from quire.engine.admission import AdmittedRequest
from quire.engine.engine import Engine
from quire.engine.handover import Handover
from quire.engine.outputs import RequestOutput
from quire.engine.request import Request, Sequence, SequenceState
from quire.errors import QuireError
from quire.stores.headers import common_digest
from quire.stores.signer import ExtentSigner

log = logging.getLogger("quire")


class EngineAttemptPhase(Enum):
    """The engine's work on an attempt.

    ALONE     computes and decodes
    SOURCE    computes the prompt and a token
    PLANNED   will receive; its chunks may be fetched already
    ADOPTED   waits for room
    PULLING   waits for its chunks
    DECODING  decodes what a source computed
    """

    ALONE = "alone"
    SOURCE = "source"
    PLANNED = "planned"
    ADOPTED = "adopted"
    PULLING = "pulling"
    DECODING = "decoding"


@dataclass(eq=False)
class EngineAttempt:
    """An attempt at the engine.

    sequence         None while it is planned
    ahead            stands in for the sequence while chunks are prefetched
    outgoing_export  the exported sequence of a source; None before the export
    admitted         time of admission, on the engine's clock; None before, and at a receiver
    num_reported     number of shared chunks already reported to the receiver
    wants_progress   whether the receiver wants reports of computed chunks
    has_begun        whether a token was sampled
    source           at a receiver: the instance that has the cache
    """

    attempt: Attempt
    job: SequenceJob
    phase: EngineAttemptPhase
    sequence: Sequence | None = None
    ahead: Sequence | None = None
    outgoing_export: OutgoingExport | None = None
    admitted: float | None = None
    num_reported: int = 0
    wants_progress: bool = False
    has_begun: bool = False
    source: str = ""

    @property
    def request_id(self) -> str:
        """The engine's id of the request."""
        return f"{self.job.name}#{self.attempt.request}.{self.attempt.number}"

    @property
    def described(self) -> str:
        """The attempt in logs."""
        return self.job.described(self.attempt.number)


@dataclass(frozen=True)
class AdmittedNotice:
    """A sequence is admitted. pull: at a receiver, the pull to request from its source; None: nothing."""

    attempt: Attempt
    pull: Pull | None = None


@dataclass(frozen=True, eq=False)
class ExportedCache:
    """The cache that an exported sequence leaves with its token: its description, and the bytes of its parts."""

    sampled: TokenSampled
    state: CacheState
    outgoing_export: OutgoingExport


Notice = TokenSampled | Pull | AdmittedNotice | Ack | ExportedCache | PrefillProgress | Failed
"""The engine's notices to the agent: events of the protocol, and messages.

Pull             request chunks from another instance, outside the protocol
Ack              a receiver has everything it needs
PrefillProgress  the first chunks of a source's prompt are computed
Failed           the engine cannot continue an attempt
"""

Command = ComputeJob | ReceiveJob | PrefillProgress | ManifestMessage | ManifestRequest | Cancel
"""Messages that the engine carries out: see `EngineAttempts.run`."""


class EngineAttempts:
    """An engine's attempts.

    notify  called after a step with its notices
    submit  runs a command on the engine's thread
    """

    def __init__(
        self,
        engine: Engine,
        peer_store: PeerStore,
        signer: ExtentSigner,
        notify: Callable[[list[Notice]], None],
        submit: Callable[[Callable[[], object]], None],
    ) -> None:
        self.engine = engine
        self.attempts: dict[Attempt, EngineAttempt] = {}
        self._notify, self._submit = notify, submit
        self._signer = signer
        self._peer_store = peer_store
        self._by_id: dict[str, EngineAttempt] = {}
        self._prepared: dict[Attempt, AdmittedRequest] = {}  # requests with a grammar, before their attempts begin
        self._changing: dict[Attempt, EngineAttempt] = {}  # attempts whose phase a step may change
        self._new_pulls: list[Pull] = []
        self._notices: list[Notice] = []
        table = engine.scheduler.manager.table
        assert isinstance(table, ChunkTable), "a cache that cannot travel"
        self._table = table
        self._digest = common_digest(engine.namespace)
        peer_store.table = table
        peer_store.ask = self._new_pulls.append

    # ---- commands --------------------------------------------------------------------------------------------------

    def prepare(self, attempt: Attempt, job: SequenceJob) -> None:
        """Compiles the grammar of a job, on any thread. An error is raised only when the attempt begins."""
        if job.params.get("structured_outputs") is not None:
            with contextlib.suppress(QuireError):
                self._prepared[attempt] = self._admitted(job)

    def _admitted(self, job: SequenceJob) -> AdmittedRequest:
        """Admits a job, which the router has checked. Raises RequestError if its grammar cannot be compiled."""
        request = AdmittedRequest(None, job.prompt_ids, job.sampling(), job.cache_hints())
        self.engine.compile_grammar(request)
        return request

    def run(self, command: Command) -> None:
        """Carries out a message. Raises TypeError for a message that is no command."""
        match command:
            case ComputeJob(Compute(attempt), job, remote_prefix):
                self._compute(EngineAttempt(attempt, job, EngineAttemptPhase.SOURCE), remote_prefix)
            case ReceiveJob(Receive(attempt, ""), job, remote_prefix):
                self._compute(EngineAttempt(attempt, job, EngineAttemptPhase.ALONE), remote_prefix)
            case ReceiveJob(Receive(attempt, source), job):  # the attempt is planned until its manifest comes
                self.attempts[attempt] = EngineAttempt(attempt, job, EngineAttemptPhase.PLANNED, source=source)
            case PrefillProgress(attempt, num_chunks):
                if (work := self._planned(attempt)) is not None:
                    self._prefetch(work, num_chunks)
            case ManifestMessage(Manifest(attempt, _, token), state):
                if (work := self._planned(attempt)) is not None:
                    self._adopt(work, state, token)
            case ManifestRequest(attempt):  # the receiver may now prefetch computed chunks
                if (work := self.attempts.get(attempt)) is not None:
                    work.wants_progress = self.engine.scheduler.manager.tree.shares and not self._retains
            case Cancel(attempt):
                self.end(attempt)
            case _:
                raise TypeError(f"{type(command).__name__} is no command of an engine")

    def _planned(self, attempt: Attempt) -> EngineAttempt | None:
        work = self.attempts.get(attempt)
        return work if work is not None and work.phase is EngineAttemptPhase.PLANNED else None

    def _compute(self, work: EngineAttempt, remote_prefix: RemotePrefix | None) -> None:
        """Queues a sequence whose prompt is computed here. Chunks cached on other instances are found like chunks on a
        disk, and fetched if that is faster.
        """
        job, will_hand_over = work.job, work.phase is EngineAttemptPhase.SOURCE
        sequence = self._begin(work, Handover(job.seed, tuple(job.token_ids), job.cumulative, will_hand_over))
        if sequence is not None and remote_prefix is not None and not self._retains:
            num_chunks = min(remote_prefix.num_chunks, len(sequence.token_ids) // PAGE_TOKENS)
            self._peer_store.offer(work.attempt, remote_prefix.instance, sequence.keys, num_chunks, is_cached=True)

    def _prefetch(self, work: EngineAttempt, num_chunks: int) -> None:
        """Prefetches chunks that a source has computed, into unreserved room."""
        if work.ahead is None:
            params, hints = work.job.sampling(), work.job.cache_hints()
            request = Request(work.request_id, None, work.job.prompt_ids, params, self.engine.clock(), hints)
            namespace = self.engine.namespace_of(hints)
            work.ahead = Sequence(request, 0, [*work.job.prompt_ids, *work.job.token_ids], 1, namespace)
        self._peer_store.offer(work.attempt, work.source, work.ahead.keys, num_chunks)
        self.engine.scheduler.manager.prefetch(work.ahead)

    def _adopt(self, work: EngineAttempt, state: CacheState, token: Token) -> None:
        """Queues the sequence that a manifest describes. token: the token that the source has sampled."""
        tokens = (*work.job.token_ids, *token.output.token_ids)
        num_tokens = len(work.job.prompt_ids) + len(tokens) - 1
        cumulative = token.output.cumulative_logprob or 0.0
        work.phase = EngineAttemptPhase.ADOPTED
        try:
            swapped = swapped_of(state, num_tokens, self._table.shape, len(self._table.sizes), self._digest)
        except QuireError as error:
            self._fail(work, str(error))
            return
        sequence = self._begin(work, Handover(work.job.seed, tokens, cumulative, swapped=swapped))
        if sequence is not None:
            self._peer_store.offer(work.attempt, work.source, sequence.keys, state.num_shared, swapped.run)
            self._peer_store.note_state(state.num_bytes)

    def end(self, attempt: Attempt) -> None:
        """Ends an attempt in any phase, and frees its resources. Does nothing for an ended attempt."""
        self._prepared.pop(attempt, None)
        work = self.attempts.pop(attempt, None)
        if work is None:
            return
        log.debug("%s: ended while %s", work.described, work.phase.value)
        if work.ahead is not None:
            self.engine.scheduler.manager.fetching.cancel_prefetch(work.ahead)
        self._peer_store.withdraw(attempt)
        self._changing.pop(attempt, None)
        if self._by_id.pop(work.request_id, None) is None:
            return
        if work.outgoing_export is not None:
            work.outgoing_export.close()
        else:
            self.engine.abort(work.request_id)

    def find_pages(self, wanted: PullRequest, release: Callable[[list[HeldPages]], None]) -> OutgoingPages | None:
        """The pages that another instance requests; None if some of them are not here.

        release  see OutgoingPages
        """
        if wanted.names:
            pages = self._cached_pages(wanted.names, wanted.groups)
        else:
            work = self.attempts.get(wanted.attempt)
            if work is not None and work.outgoing_export is not None:
                return work.outgoing_export.outgoing_pages(wanted.groups)  # the prompt's last step has ended meanwhile
            pages = None if work is None or work.sequence is None else self._prompt_pages(work.sequence, wanted.groups)
        return None if pages is None else OutgoingPages(pages, self._table.shape[0], self._signer, release)

    def _prompt_pages(self, sequence: Sequence, groups: list[list[int]]) -> list[HeldPages] | None:
        """Chunks of a prompt that is still being computed."""
        path = sequence.path
        if not self._has_all(groups, path.num_shared):
            return None
        return [shared_pages(self._table, sequence.keys, path, sorted(group)) for group in groups]

    def _cached_pages(self, names: list[bytes], groups: list[list[int]]) -> list[HeldPages] | None:
        """Chunks of the prefix tree, by index in a prefix."""
        manager = self.engine.scheduler.manager
        found = list(manager.tree.match(names))
        num_found = sum(count for _, count in found)
        if not self._has_all(groups, num_found):
            return None
        rows = np.concatenate([segment.chunks[:count] for segment, count in found])
        tokens = np.concatenate([segment.tokens[: count * PAGE_TOKENS] for segment, count in found])
        whole = RunIdentity(tuple(names[:num_found]), tokens, found[0][0].namespace)
        return [HeldPages(self._table, whole.subset(sorted(group)), rows[sorted(group)]) for group in groups]

    def _has_all(self, groups: list[list[int]], num_chunks: int) -> bool:
        """Whether all groups lie in the first `num_chunks` chunks, and these are complete."""
        chunks = set(range(num_chunks))
        return bool(groups) and not self._retains and all(group and set(group) <= chunks for group in groups)

    def load(self, instance: str, *, with_stats: bool) -> InstanceLoad:
        """The current load."""
        scheduler, manager = self.engine.scheduler, self.engine.scheduler.manager
        rows = sum(max(0, each.num_prompt - each.num_computed) for each in scheduler.running)
        rows += sum(len(each.token_ids) for each in scheduler.waiting if each.swapped is None)
        cache = manager.stats()
        free = cache["bytes_free"] + cache["bytes_cached"]
        return InstanceLoad(
            instance, rows, len(scheduler.running), len(scheduler.waiting), len(self.engine.exports), free,
            cache["bytes_total"], tuple(each.attempt for each in self.attempts.values() if self._is_at_work(each)),
            self.engine.stats() if with_stats else None,
        )  # fmt: skip

    def _is_at_work(self, work: EngineAttempt) -> bool:
        """Whether the other instance and the router should keep waiting for the next event of an attempt.

        A receiver that waits for room is at work while other sequences run, because they will free their room. If none
        runs, exports hold the room: two instances may block each other like this, and the deadlines end such attempts.
        """
        if work.sequence is None:
            return False
        is_waiting = work.sequence.state is SequenceState.WAITING
        match work.phase:
            case EngineAttemptPhase.ADOPTED if is_waiting:
                return bool(self.engine.scheduler.running)
            case EngineAttemptPhase.ALONE | EngineAttemptPhase.DECODING if work.has_begun:
                return is_waiting or work.sequence.num_pending > 1  # a preempted sequence is computed again
            case EngineAttemptPhase.SOURCE:
                return work.outgoing_export is None
        return True

    # ---- after a step ----------------------------------------------------------------------------------------------

    def has_stepped(self, outputs: list[RequestOutput]) -> None:
        """Notes what a step has changed, and notifies the agent."""
        for work in list(self._changing.values()):
            assert work.sequence is not None
            if not self._look_at(work, work.sequence):
                del self._changing[work.attempt]
        self._notices += self._new_pulls
        self._new_pulls.clear()
        for output in outputs:
            found = self._by_id.get(output.request_id)
            if found is not None:
                self._note(found, output)
        if self._notices:
            notices, self._notices = self._notices, []
            self._notify(notices)

    def _look_at(self, work: EngineAttempt, sequence: Sequence) -> bool:
        """Notes the progress of an attempt. Returns whether later steps may change it again."""
        is_new = work.phase in (EngineAttemptPhase.SOURCE, EngineAttemptPhase.ALONE) and work.admitted is None
        if is_new and sequence.state is not SequenceState.WAITING:
            work.admitted = self.engine.scheduler.manager.tree.now  # start of the step
            if work.phase is EngineAttemptPhase.SOURCE:
                self._notices.append(AdmittedNotice(work.attempt))
        if work.phase is EngineAttemptPhase.SOURCE:
            if work.wants_progress and sequence.path.num_shared > work.num_reported:
                work.num_reported = sequence.path.num_shared
                self._notices.append(PrefillProgress(work.attempt, work.num_reported))
        elif work.phase is EngineAttemptPhase.ADOPTED and sequence.state is not SequenceState.WAITING:
            work.phase = EngineAttemptPhase.PULLING
            transfer = sequence.path.transfer
            pulls = (each for each in self._new_pulls if each.transfer is transfer and each.attempt == work.attempt)
            own = next(pulls, None)
            self._notices.append(AdmittedNotice(work.attempt, own))
            if own is None:
                work.phase = EngineAttemptPhase.DECODING
            else:
                self._new_pulls.remove(own)
        if work.phase is EngineAttemptPhase.PULLING and sequence.path.transfer is None:
            # The chunks have arrived, or the engine computes them.
            work.phase = EngineAttemptPhase.DECODING
            self._notices.append(Ack(work.attempt))
        match work.phase:
            case EngineAttemptPhase.ALONE:
                return work.admitted is None
            case EngineAttemptPhase.SOURCE:
                return work.outgoing_export is None
        return work.phase is not EngineAttemptPhase.DECODING

    def _note(self, work: EngineAttempt, output: RequestOutput) -> None:
        (completion,) = output.outputs
        export, first = self.engine.exports.get(output.request_id), None
        if not work.has_begun and work.phase in (EngineAttemptPhase.SOURCE, EngineAttemptPhase.ALONE):
            first = FirstTokenInfo(
                output.prompt_logprobs, output.num_cached_tokens, output.cached_by_tier, output.num_pinned_tokens,
                output.kept_fraction, 0.0 if work.admitted is None else max(0.0, self.engine.clock() - work.admitted),
                output.embedding,
            )  # fmt: skip
        work.has_begun = True
        is_last = export is None and completion.finish_reason is not None
        token = Token(work.attempt, completion, is_last=is_last, first=first)
        if work.phase is EngineAttemptPhase.PULLING:
            work.phase = EngineAttemptPhase.DECODING
            self._notices.append(Ack(work.attempt))
        if export is None:
            self._notices.append(TokenSampled(token))
            if token.is_last:
                self.end(work.attempt)
            return
        release = partial(self._submit, partial(self.engine.end_export, work.request_id))
        work.outgoing_export = OutgoingExport(export, self._table.shape[0], self._signer, release)
        state = cache_state_of(export.swapped, self._table.shape, self._digest)
        self._notices.append(ExportedCache(TokenSampled(token, export.parts), state, work.outgoing_export))

    # ---- sequences -------------------------------------------------------------------------------------------------

    @property
    def _retains(self) -> bool:
        return self.engine.scheduler.manager.retainer is not None

    def _begin(self, work: EngineAttempt, continued: Handover) -> Sequence | None:
        try:
            admitted = self._prepared.pop(work.attempt, None) or self._admitted(work.job)
            request = self.engine.queue(work.request_id, admitted, continued=continued)
        except QuireError as error:
            self._fail(work, str(error))
            return None
        self.attempts[work.attempt] = self._by_id[work.request_id] = self._changing[work.attempt] = work
        (work.sequence,) = request.sequences
        log.debug("%s: %s, %d tokens", work.described, work.phase.value, len(work.sequence.token_ids))
        return work.sequence

    def _fail(self, work: EngineAttempt, reason: str) -> None:
        self.end(work.attempt)
        log.warning("%s: %s", work.described, reason)
        self._notices.append(Failed(work.attempt, reason))
