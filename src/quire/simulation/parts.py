"""One part of a server by itself: what a placement is searched with. A part is one of these:

- An instance that computes prompts. Only its time to the first token counts.
- An instance that decodes. Prompts arrive computed, and only its time per token counts.
- A tandem of both. What the first one has computed arrives at the second one.
- An instance that does both.

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

from quire.simulation.outcome import Outcome
from quire.simulation.pool import Progress
from quire.simulation.queueing import waits
from quire.simulation.run import may_skip, run_of, skipping
from quire.simulation.setup import Bandwidths, Replicas, Setup
from quire.timing.latency import Origin, StepTime, StepWork
from quire.workload.workload import Arrivals, Floats, Span, Workload


def _untold(done: int, total: int) -> None:
    pass


NO_TIME = 1e-6
"""Seconds of a step without decoding sequences where prompts arrive computed."""

WIDE = 1 << 20
"""Rows of a step there: a prompt joins in one step, however long it is."""


@dataclass(frozen=True)
class OnlyDecoding:
    """Latencies of steps whose prompts take no time."""

    latency: StepTime

    @property
    def origin(self) -> Origin:
        """See StepTime."""
        return self.latency.origin

    def seconds(self, work: StepWork) -> float:
        """See StepTime."""
        return self.latency.seconds(_decoding(work)) if work.decode_rows else NO_TIME

    def occupancy(self, work: StepWork) -> float:
        """See StepTime."""
        return self.latency.occupancy(_decoding(work)) if work.decode_rows else NO_TIME

    def quiet(self, work: StepWork, count: int) -> float:
        """See StepTime."""
        return self.latency.quiet(work, count)

    @property
    def knots(self) -> tuple[int, ...]:
        """See StepTime."""
        return self.latency.knots

    def covers(self, work: StepWork) -> bool:
        """See StepTime."""
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
class Parts:
    """A driver for one instance, or for one that computes prompts and one that decodes.

    tpot  seconds per token that answers take where nobody decodes, for what follows them in a conversation
    """

    tpot: float = 0.0

    def __call__(self, setup: Setup, workload: Workload, seed: int, progress: Progress) -> Outcome:
        """See Driver."""
        ways = setup.ways if setup.cluster is not None else dataclasses.replace(setup.ways, hop=0.0)
        by_role = {each.role: each for each in setup.replicas}
        if len(by_role) == 2:
            return _tandem(by_role["prefill"], by_role["decode"], ways, workload, self.tpot, seed, progress)
        if "decode" in by_role:
            return simulate_decoding(by_role["decode"], ways, workload, seed, progress)
        if "prefill" in by_role:
            found = simulate_prompts(by_role["prefill"], ways, workload, self.tpot, seed, progress)
        else:
            found = _on_instance(by_role["mixed"], ways, workload, seed, progress)
        return found.counting(workload.counted)


def simulate_prompts(
    replicas: Replicas, ways: Bandwidths, workload: Workload, tpot: float, seed: int, progress: Progress = _untold
) -> Outcome:
    """The first tokens of an instance that computes prompts. tpot: see Parts."""
    return _on_instance(replicas, ways, prompts_of(workload, tpot), seed, progress)


def simulate_decoding(
    replicas: Replicas, ways: Bandwidths, workload: Workload, seed: int, progress: Progress = _untold
) -> Outcome:
    """The answers of an instance that decodes. Of a request, the first token comes when its transfer is asked for."""
    computing_nothing = computed(replicas)
    found = _on_instance(computing_nothing, Bandwidths(server=0.0, hop=0.0), workload, seed, progress)
    # A prompt joins in a step of its own. So does a cache: the receiver makes room for it between two steps, and
    # decodes it between two later ones.
    num_sent = np.where(found.num_out > 1, found.num_in - found.num_cached, 0)
    bulk = num_sent * seconds_per_token(replicas, ways)
    order = np.argsort(found.arrived, kind="stable")
    waited = np.zeros(len(order))
    waited[order] = waits(found.arrived[order], bulk[order])
    with np.errstate(invalid="ignore"):
        seconds = found.last - found.arrived + waited + _transfer_seconds(ways, bulk)
        first = found.last - np.where(found.num_out > 1, seconds, 0.0)
    is_ended = np.isfinite(found.last)
    made = dataclasses.replace(
        found, arrived=np.where(is_ended, first, found.arrived), first=np.where(is_ended, first, np.inf)
    )
    return made.only(found.within(workload.counted))


def _tandem(
    computing: Replicas,
    decoding: Replicas,
    ways: Bandwidths,
    workload: Workload,
    tpot: float,
    seed: int,
    progress: Progress,
) -> Outcome:
    """An instance that computes prompts and one that decodes them."""
    prompts = simulate_prompts(computing, ways, workload, tpot, seed)
    is_begun, num_out = np.isfinite(prompts.first), workload.columns.num_out
    num_sent = workload.prompt_tokens - workload.cached_tokens
    bulk = np.asarray(num_sent * seconds_per_token(decoding, ways), np.float64)
    there = prompts.first - ways.server - ways.hop + _transfer_seconds(ways, bulk)
    at = np.where(is_begun, there, prompts.arrived)
    order = np.argsort(at, kind="stable")
    answers = simulate_decoding(decoding, ways, arriving(workload, at), seed, progress)
    seconds = np.full(len(at), np.inf)
    is_ended = np.isfinite(answers.last)
    seconds[order[is_ended]] = answers.last[is_ended] - answers.first[is_ended]
    return dataclasses.replace(
        prompts,
        last=np.where(is_begun, prompts.first + np.where(num_out > 1, seconds, 0.0), np.inf),
        num_out=num_out,
        used=(*prompts.used, *answers.used),
        seconds=max(prompts.seconds, answers.seconds),
    ).counting(workload.counted)


def _transfer_seconds(ways: Bandwidths, bulk: Floats) -> Floats:
    """Until caches are there, without others before them: f64 [n]. bulk: seconds that each keeps the link."""
    return 2 * ways.hop + ways.bulk.latency + bulk


def seconds_per_token(replicas: Replicas, ways: Bandwidths) -> float:
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


def _on_instance(replicas: Replicas, ways: Bandwidths, workload: Workload, seed: int, progress: Progress) -> Outcome:
    """What comes of a workload on an engine that stands for an instance: its messages pass the router. Steps are
    skipped where they can be.
    """
    if may_skip(replicas):
        return skipping(replicas, workload, ways.server + ways.hop, progress)
    to_instance = dataclasses.replace(ways, server=ways.server + ways.hop)
    return run_of(Setup((replicas,), to_instance), workload, seed, progress)
