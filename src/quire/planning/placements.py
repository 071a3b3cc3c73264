"""`quire plan placement`: searches with DistServe's algorithms, simulates each result as a whole, and takes the best.

`quire.planning.placement` has the algorithms, `quire.planning.option_trials` the goodputs of their options.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from quire.errors import ConfigError, QuireError
from quire.placement.divisions import Option, Role, divisions
from quire.placement.placement_file import Gpus, Hosts, Placement
from quire.planning.option_trials import CONFIRMATIONS, SEEDS, ModelOnCluster, OptionTrials
from quire.planning.placement import ALGORITHMS, PlacementError, PlacementTask, Rough, place
from quire.simulation.load import Load
from quire.simulation.outcome import Outcome
from quire.simulation.pool import Pool
from quire.simulation.queue_check import QueueCheck
from quire.simulation.run import SimulationRun
from quire.workload.slo import Slo

JOINT_SEEDS = 2
"""Number of simulations of a whole placement."""

NEAR = 0.01
"""Share of requests by which a placement may miss the target and still reach it: the noise of simulations."""

ACCEPTED_SHARE = 0.02
"""Largest difference in attainment between drawn and recorded requests that is not reported."""

Progress = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
"""Shows the progress of something: the number that is done, and of all."""


@dataclass(frozen=True)
class PlacementGoal:
    """What a placement is planned for.

    load       requests of one instance or pair
    rate       wanted requests/s; None: as many as the cluster can serve
    algorithm  one of ALGORITHMS; auto: mixed, and the one that suits the network
    ablation   whether the others are shown beside it
    seconds    for all searches together
    """

    load: Load
    slo: Slo
    rate: float | None
    algorithm: str
    ablation: bool
    seconds: float
    seed: int

    def algorithms(self, *, is_fast: bool) -> list[str]:
        """Those that are searched with. is_fast: see ClusterSpec."""
        if self.ablation:
            return list(ALGORITHMS)
        return ["apart" if is_fast else "pairs", "mixed"] if self.algorithm == "auto" else [self.algorithm]

    @property
    def fresh(self) -> int:
        """The first seed that no search uses."""
        return self.seed + SEEDS + CONFIRMATIONS


@dataclass(frozen=True)
class PlacementResult:
    """The result of an algorithm.

    attainment  attainment in the simulation of the whole placement at its predicted rate
    cached      share of the prompts' tokens that were cached there
    replayed    attainment of recorded requests, with their gaps scaled to that rate, and of as many drawn ones; None:
                the recorded requests cannot be compared
    searched    seconds of the search
    at_wanted   attainment at the wanted rate, if the target is missed at the predicted rate; None otherwise
    check       check of an instance for prompts; None: there is no such instance
    error       why there is no placement; empty if there is one
    """

    algorithm: str
    placement: Placement | None = None
    attainment: float = 0.0
    cached: float = 0.0
    replayed: tuple[float, float] | None = None
    searched: float = 0.0
    at_wanted: float | None = None
    check: QueueCheck | None = None
    error: str = ""


def search_placements(
    model: ModelOnCluster, goal: PlacementGoal, pool: Pool, progress: Progress
) -> list[PlacementResult]:
    """The result of each algorithm. Raises ConfigError if no instance has known latencies."""
    trials = OptionTrials(model, goal.load, goal.slo, goal.seed, pool)
    _check_known(model)
    chosen = goal.algorithms(is_fast=model.cluster.is_fast)
    found, left = list[PlacementResult](), goal.seconds
    for index, algorithm in enumerate(chosen):
        with progress(f"options ({algorithm})") as told:
            search = PlacementTask(
                model.cluster, model.needs, trials.goodput_of, goal.rate, trials.bound_of, trials.serves,
                Rough(trials.rough_goodput_of, trials.serves_roughly, partial(_tell, told, 0)), model.why_unknown,
                max(0.0, left) / (len(chosen) - index), time.monotonic, partial(_tell, told, 1), model.options_of,
            )  # fmt: skip
            found.append(_placed(algorithm, search, trials, goal, progress))
        left -= found[-1].searched
    return found


def _tell(told: Callable[[int, int], None], times: int, done: int, total: int, option: Option) -> None:
    """Counts an option twice: when it is tried roughly, and when it is done."""
    told(times * total + done, 2 * total)


def _check_known(model: ModelOnCluster) -> None:
    reasons = [
        model.why_unknown(each)
        for role in Role
        for each in divisions(model.cluster, model.needs.num_layers, role)
        if model.needs.lack(each, model.cluster) is None
    ]
    if reasons and all(reasons):
        raise ConfigError(reasons[0])


def _placed(
    algorithm: str, search: PlacementTask, trials: OptionTrials, goal: PlacementGoal, progress: Progress
) -> PlacementResult:
    """The result of one algorithm, simulated as a whole with fresh seeds."""
    begun = time.monotonic()
    try:
        found = trials.warned(place(search, algorithm))
    except PlacementError as error:
        return PlacementResult(algorithm, error=str(error), searched=time.monotonic() - begun)
    searched, said, cluster = time.monotonic() - begun, found.predicted, search.cluster
    if not said.fits:
        reason = (
            f"{goal.rate:.4g} requests/s need {said.cost:.4g} {said.unit}s, for which the cluster's"
            f" {cluster.nodes.count} x {cluster.slots} {'GPUs' if cluster.has_gpus else 'cores'} have no room: one"
            f" {said.unit} serves {said.rate_per_unit:.4g}/s; plan without --rate for as much as they can serve"
        )
        return PlacementResult(algorithm, error=reason, searched=searched)

    def outcomes(runs: Sequence[SimulationRun]) -> list[Outcome]:
        with progress(f"requests ({algorithm}, the placement as a whole)") as told:
            return trials.pool.run(runs, told)

    def joint(rate: float) -> list[SimulationRun]:
        return [trials.joint(found, rate, goal.fresh + index) for index in range(JOINT_SEEDS)]

    results = outcomes([*joint(said.rate), *trials.replayed(found, said.rate, goal.fresh)])
    shares = [each.attainment(goal.slo) for each in results]
    share, compared = fmean(shares[:JOINT_SEEDS]), shares[JOINT_SEEDS:]
    cached = fmean(each.cached for each in results[:JOINT_SEEDS])
    check = trials.queue_check(found, goal.fresh)
    at_wanted = None
    if goal.rate is not None and share < goal.slo.attainment:
        at_wanted = fmean(each.attainment(goal.slo) for each in outcomes(joint(goal.rate)))
    replayed = (compared[0], compared[1]) if compared else None
    return PlacementResult(algorithm, found, share, cached, replayed, searched, at_wanted, check)


def best_of(found: Sequence[PlacementResult], goal: PlacementGoal) -> tuple[PlacementResult, Placement]:
    """The best result that reaches the target: the fewest units for the wanted rate, or the highest rate. Raises
    QuireError if there is no placement.
    """
    wanted = [each for each in found if goal.algorithm in (each.algorithm, "auto")]
    placed = [(each, each.placement) for each in wanted if each.placement is not None]
    if not placed:
        raise QuireError(wanted[0].error)

    def order(each: tuple[PlacementResult, Placement]) -> tuple[bool, float, float]:
        result, said = each[0], each[1].predicted
        share = result.attainment if result.at_wanted is None else result.at_wanted
        return share >= goal.slo.attainment - NEAR, 0.0 if goal.rate is None else -said.cost, said.rate

    return max(placed, key=order)


def completed(
    best: tuple[PlacementResult, Placement],
    model: ModelOnCluster,
    goal: PlacementGoal,
    workload: Mapping[str, Any],
    made: Mapping[str, Any],
    doubts: Sequence[str] = (),
) -> Placement:
    """A placement with its requests, its targets and the record of its planning.

    workload  facts of the requests
    made      name, command and version
    doubts    of the requests
    """
    result, placement = best
    seeds = {"first": goal.seed, "search": SEEDS, "confirm": CONFIRMATIONS, "joint": JOINT_SEEDS}
    told: dict[str, Any] = {**placement.made, **made, "seeds": seeds, "origin": model.origin.value}
    if result.replayed is not None:
        told["attainment_of_trace"] = result.replayed[0]
    if result.check is not None:
        told["queue_check"] = result.check.facts()
    if result.at_wanted is not None:
        told |= {"wanted_rate": goal.rate, "attainment_at_wanted_rate": result.at_wanted}
    targets = {"ttft": goal.slo.ttft, "tpot": goal.slo.tpot, "attainment": goal.slo.attainment}
    return dataclasses.replace(
        placement,
        predicted=dataclasses.replace(placement.predicted, attainment=result.attainment),
        warnings=(*filter(None, [placement.unserved]), *doubts, *placement.warnings, *_doubts(result, placement, goal)),
        workload={**workload, "cached": result.cached, **({} if goal.rate is None else {"rate": goal.rate})},
        slo={name: value for name, value in targets.items() if math.isfinite(value)},
        made=told,
        gpus=Gpus.of(model.cluster),
        hosts=Hosts.of(model.cluster),
    )


def _doubts(result: PlacementResult, placement: Placement, goal: PlacementGoal) -> list[str]:
    told, wanted = [], goal.slo.attainment
    share, rate = result.attainment, placement.predicted.rate
    if result.at_wanted is not None:
        assert goal.rate is not None
        share, rate = result.at_wanted, goal.rate
    if share < wanted - NEAR:
        told.append(
            f"simulated as a whole, {share:.1%} of the requests meet both targets at {rate:.4g} requests/s, and"
            f" {wanted:.1%} are wanted; plan for a higher rate than is needed"
        )
    if result.replayed is not None and abs(result.replayed[0] - result.replayed[1]) > ACCEPTED_SHARE:
        replayed, drawn = result.replayed
        told.append(
            f"of the requests of the trace itself, replayed at {placement.predicted.rate:.4g} requests/s,"
            f" {replayed:.1%} meet both targets, and {drawn:.1%} of as many that were drawn like them: the fitted"
            " arrivals are not like the trace's"
        )
    return told
