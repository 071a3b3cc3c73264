"""One part of a server by itself: what a placement is searched with.

PromptRun   an instance that computes prompts: only the time to the first token counts
DecodeRun   an instance that decodes, where prompts arrive computed: only the time per token counts
PairRun     one of each, as a tandem: what the first one has computed arrives at the second one
MixedRun    an instance that does both

No router runs, and steps in which nothing happens are skipped where that is possible: these runs are many times as fast
as a cluster. Messages take their time all the same. Placements are simulated again as a whole, for these runs differ
from a cluster:

- A receiver without room does not hold up the prompts of its source.
- Transfers wait for each other at the receiver, but not at a source that feeds several receivers. These waits delay the
  tokens, but not the step in which a sequence joins the batch.
- An instance that decodes has no tiers. A sequence that it preempts is computed again in no time, as if a tier without
  limits had kept it.

Source: DistServe, arXiv 2401.09670, Algorithms 1 and 2: simu_prefill, simu_decode and simulate. Ours differ: the time
until the receiver has a cache counts per token, and both of a pair get the same requests.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from quire.planning.latency import Latency, Origin, StepWork
from quire.planning.queueing import waits
from quire.planning.workload import Arrivals, Floats, Ints, Span, Workload
from quire.simulation.bulk import simulate_bulk
from quire.simulation.load import Load, Progress, Simulation, run_of
from quire.simulation.outcome import Outcome
from quire.simulation.setup import Replicas, Setup, Ways

NO_TIME = 1e-6
"""Seconds of a step without decoding sequences where prompts arrive computed."""

WIDE = 1 << 20
"""Rows of a step there: a prompt joins in one step, however long it is."""


@dataclass(frozen=True)
class OnlyDecoding:
    """Latencies of steps whose prompts take no time."""

    latency: Latency

    @property
    def origin(self) -> Origin:
        """See Latency."""
        return self.latency.origin

    def seconds(self, work: StepWork) -> float:
        """See Latency."""
        return self.latency.seconds(_decoding(work)) if work.decode_rows else NO_TIME

    def occupancy(self, work: StepWork) -> float:
        """See Latency."""
        return self.latency.occupancy(_decoding(work)) if work.decode_rows else NO_TIME

    def quiet(self, work: StepWork, count: int) -> float:
        """See Latency."""
        return self.latency.quiet(work, count)

    def covers(self, work: StepWork) -> bool:
        """See Latency."""
        return not work.decode_rows or self.latency.covers(_decoding(work))


def _decoding(work: StepWork) -> StepWork:
    return StepWork(0, 0.0, work.decode_rows, work.context, work.unique, 0)


def prompts_of(workload: Workload, tpot: float) -> Workload:
    """The same requests with answers of one token.

    Of what follows in a conversation, the prompt is as long as before: the rest of the answer is a span of its own,
    which nothing has cached. It comes as late as if each token had taken `tpot` seconds.
    """
    source = workload.columns
    before = np.maximum(source.after, 0)
    rest = np.where(source.after >= 0, source.num_out[before] - 1, 0)
    has_rest = rest > 0
    places = source.start[:-1][has_rest]
    new_ids = int(source.ids.max()) + 1 + np.flatnonzero(has_rest)
    return Workload(
        workload.name,
        Arrivals(
            source.at,
            source.pause + tpot * rest,
            np.ones_like(source.num_out),
            source.after,
            np.concatenate(([0], np.cumsum(np.diff(source.start) + has_rest))),
            np.insert(source.ids, places, new_ids),
            np.insert(source.sizes, places, rest[has_rest]),
        ),
    )


def arriving(workload: Workload, at: Floats) -> Workload:
    """The same requests at other times, in their order. None follows another: whole conversations are their prompts."""
    columns = workload.columns
    following = int(columns.ids.max()) + 1
    whole: list[tuple[Span, ...]] = []
    for index, each in enumerate(columns):
        earlier = (*whole[each.after], Span(following + each.after, columns[each.after].num_out)) if index else ()
        whole.append((*(earlier if each.after >= 0 else ()), *each.prompt))
    order = np.argsort(at, kind="stable")
    lengths = [len(whole[index]) for index in order]
    spans = np.array([span for index in order for span in whole[index]], np.int64)
    nothing = np.zeros(len(at))
    return Workload(
        workload.name,
        Arrivals(
            at[order], nothing, columns.num_out[order], np.full(len(at), -1), np.cumsum([0, *lengths]),
            spans[:, 0].copy(), spans[:, 1].copy(),
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class PromptRun:
    """An instance that computes prompts.

    tpot  seconds per token that answers take, for what follows them in a conversation
    """

    replicas: Replicas
    ways: Ways
    load: Load
    tpot: float
    rate: float
    seed: int

    def __post_init__(self) -> None:
        _ = self.replicas.capacity  # before other processes get copies

    @property
    def count(self) -> int:
        """See Simulation."""
        return self.load.count

    def outcome(self, progress: Progress = lambda done, total: None) -> Outcome:
        """See Simulation."""
        workload = self.load.drawn(self.rate, self.seed)
        return self.of(workload, progress).counting(workload.counted)

    def of(self, workload: Workload, progress: Progress = lambda done, total: None) -> Outcome:
        """What comes of a workload."""
        return _skipping_or_alone(self.replicas, self.ways, prompts_of(workload, self.tpot), self.seed, progress)


@dataclass(frozen=True)
class MixedRun:
    """An instance that computes prompts and decodes."""

    replicas: Replicas
    ways: Ways
    load: Load
    rate: float
    seed: int

    @property
    def count(self) -> int:
        """See Simulation."""
        return self.load.count

    def outcome(self, progress: Progress = lambda done, total: None) -> Outcome:
        """See Simulation."""
        workload = self.load.drawn(self.rate, self.seed)
        found = _skipping_or_alone(self.replicas, self.ways, workload, self.seed, progress)
        return found.counting(workload.counted)


@dataclass(frozen=True)
class DecodeRun:
    """An instance that decodes. Of a request in its outcome, the first token comes when its transfer is asked for."""

    replicas: Replicas
    ways: Ways
    load: Load
    rate: float
    seed: int

    @property
    def count(self) -> int:
        """See Simulation."""
        return self.load.count

    def outcome(self, progress: Progress = lambda done, total: None) -> Outcome:
        """See Simulation."""
        return self.of(self.load.drawn(self.rate, self.seed), progress)

    def of(self, workload: Workload, progress: Progress = lambda done, total: None) -> Outcome:
        """What comes of a workload."""
        replicas = computed(self.replicas)
        if may_skip(replicas):
            found = skipping(replicas, workload, 0.0, progress)
        else:
            found = _alone(replicas, Ways(server=0.0, hop=0.0), workload, self.seed, progress)
        # A prompt joins in a step of its own. So does a cache: the receiver makes room for it between two steps, and
        # decodes it between two later ones.
        num_sent = np.where(found.num_out > 1, found.num_in - found.num_cached, 0)
        order = np.argsort(found.arrived, kind="stable")
        waited = np.zeros(len(order))
        waited[order] = waits(found.arrived[order], self._bulk_seconds(num_sent)[order])
        with np.errstate(invalid="ignore"):
            seconds = found.last - found.arrived + waited + self.transfer_seconds(num_sent)
            first = found.last - np.where(found.num_out > 1, seconds, 0.0)
        is_ended = np.isfinite(found.last)
        made = dataclasses.replace(
            found, arrived=np.where(is_ended, first, found.arrived), first=np.where(is_ended, first, np.inf)
        )
        return made.only(found.within(workload.counted))

    def transfer_seconds(self, num_tokens: Ints) -> Floats:
        """Until so many tokens of a prompt are there, without others before them: f64 [n]."""
        return 2 * self.ways.hop + self.ways.bulk.latency + self._bulk_seconds(num_tokens)

    def _bulk_seconds(self, num_tokens: Ints) -> Floats:
        return np.asarray(num_tokens * seconds_per_token(self.replicas, self.ways), np.float64)


@dataclass(frozen=True)
class PairRun:
    """An instance that computes prompts and one that decodes them."""

    prompts: PromptRun
    decoding: DecodeRun

    @property
    def load(self) -> Load:
        """See Simulation."""
        return self.prompts.load

    @property
    def count(self) -> int:
        """See Simulation."""
        return self.load.count

    def outcome(self, progress: Progress = lambda done, total: None) -> Outcome:
        """See Simulation."""
        workload = self.prompts.load.drawn(self.prompts.rate, self.prompts.seed)
        begun = self.prompts.of(workload)
        is_begun = np.isfinite(begun.first)
        num_in, num_out = workload.prompt_tokens, workload.columns.num_out
        ways = self.decoding.ways
        num_sent = num_in - workload.cached_tokens
        there = begun.first - ways.server - ways.hop + self.decoding.transfer_seconds(num_sent)
        at = np.where(is_begun, there, begun.arrived)
        order = np.argsort(at, kind="stable")
        decoded = self.decoding.of(arriving(workload, at), progress)
        seconds = np.full(len(at), np.inf)
        is_ended = np.isfinite(decoded.last)
        seconds[order[is_ended]] = decoded.last[is_ended] - decoded.first[is_ended]
        return dataclasses.replace(
            begun,
            last=np.where(is_begun, begun.first + np.where(num_out > 1, seconds, 0.0), np.inf),
            num_out=num_out,
            used=(*begun.used, *decoded.used),
            seconds=max(begun.seconds, decoded.seconds),
        ).counting(workload.counted)


def part_of(setup: Setup, load: Load, tpot: float, rate: float, seed: int) -> Simulation:
    """The simulation of a setup of one instance, or of one for prompts and one that decodes. tpot: see PromptRun."""
    ways = setup.ways if setup.is_cluster else dataclasses.replace(setup.ways, hop=0.0)
    by_role = {each.role: each for each in setup.replicas}
    prompts = PromptRun(by_role["prefill"], ways, load, tpot, rate, seed) if "prefill" in by_role else None
    decoding = DecodeRun(by_role["decode"], ways, load, rate, seed) if "decode" in by_role else None
    if prompts is not None and decoding is not None:
        return PairRun(prompts, decoding)
    return prompts or decoding or MixedRun(by_role["mixed"], ways, load, rate, seed)


def seconds_per_token(replicas: Replicas, ways: Ways) -> float:
    """Seconds that a token of a prompt keeps the link of an instance that sends its cache, or gets it."""
    budget = replicas.config.retain.budget
    kept = 1.0 if budget == "off" else budget
    return kept * replicas.plan.sizes.bytes_per_token / ways.bulk.bytes_per_second


def computed(replicas: Replicas) -> Replicas:
    """The same instances without tiers, where prompts take no time. Only routers refuse requests: no queue is full."""
    plan = replicas.plan
    scheduler = dataclasses.replace(plan.config.scheduler, token_budget=WIDE, max_queue=WIDE)
    config = dataclasses.replace(plan.config, scheduler=scheduler)
    return dataclasses.replace(
        replicas, plan=dataclasses.replace(plan, config=config, latency=OnlyDecoding(plan.latency)), tiers=()
    )


def may_skip(replicas: Replicas) -> bool:
    """Whether steps can be skipped: without retention, tiers and a window of attention."""
    return not (replicas.config.retain.is_on or replicas.tiers or replicas.plan.window)


def skipping(
    replicas: Replicas, workload: Workload, messages: float, progress: Progress, routing: str = "expected"
) -> Outcome:
    """What comes of a workload on equal instances, of which steps are skipped.

    messages  seconds of a message from the client to an instance, one way
    routing   see ClusterConfig
    """
    prompt_rows = replicas.capacity.prompt_rows if replicas.role == "prefill" else None
    found = simulate_bulk(
        workload, replicas.plan, replicas.count, routing=routing, prompt_rows=prompt_rows, progress=progress
    )
    return dataclasses.replace(found, first=found.first + 2 * messages, last=found.last + 2 * messages)


def _skipping_or_alone(replicas: Replicas, ways: Ways, workload: Workload, seed: int, progress: Progress) -> Outcome:
    """What comes of a workload on an instance; steps are skipped where they can be."""
    if may_skip(replicas):
        return skipping(replicas, workload, ways.server + ways.hop, progress)
    return _alone(replicas, ways, workload, seed, progress)


def _alone(replicas: Replicas, ways: Ways, workload: Workload, seed: int, progress: Progress) -> Outcome:
    """What comes of a workload on an engine that stands for an instance: its messages pass the router."""
    to_instance = dataclasses.replace(ways, server=ways.server + ways.hop)
    return run_of(Setup((replicas,), to_instance, is_cluster=False), workload, seed, progress)
