"""Finds the placement with the highest throughput: a linear program for each block size, and a search over these.

The program minimises the seconds of a block over the shares of weights, cache and activations on each tier, with the
memory of every tier as a constraint. Micro-batch and block size are enumerated: throughput has several maxima in them,
so the search does not stop at the first. HiGHS needs about 2 ms for a program.

Source: FlexGen, arXiv 2303.06865, section 4.3. Ours differs: the program also decides how much of the cache is attended
to on the second tier; and without a solution it says which tier lacks memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.errors import QuireError
from quire.offload.costs import CostModel, Kind, Linear, Policy
from quire.offload.units import Share, Split
from quire.options import format_bytes

log = logging.getLogger("quire")

OPTIMAL, INFEASIBLE = 0, 2
"""HiGHS's status numbers, as scipy has them."""

BATCHES = range(1, 21)
"""Numbers of micro-batches that are tried; the paper has fewer than 20."""

EQUAL = 1e-7
"""Largest relative difference of the seconds of placements that take equally long."""

BINDING = 1e-3
"""Largest relative distance at which a limit counts as reached."""


class PlanError(QuireError):
    """No policy can be found. The message says why, and what would help."""


@dataclass(frozen=True)
class Prediction:
    """What the cost model says of a policy.

    throughput       generated tokens per second
    prefill_seconds  of a block
    decode_seconds   of a block, all steps together
    stages           seconds of each stage of a layer, by phase and name
    memory           bytes at the peak of each tier, by its name
    binding          names of what limits: the slowest stage of each phase, and the tiers that are full
    """

    throughput: float
    prefill_seconds: float
    decode_seconds: float
    stages: dict[str, dict[str, float]]
    memory: dict[str, float]
    binding: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Seconds of a block."""
        return self.prefill_seconds + self.decode_seconds


@dataclass(frozen=True)
class Lack:
    """What a machine lacks.

    num_bytes  bytes of capacity that are missing, by tier
    """

    num_bytes: dict[str, float]

    def __str__(self) -> str:
        return ", ".join(f"{tier} lacks {format_bytes(int(size) + 1)}" for tier, size in self.num_bytes.items())


def predict(model: CostModel, policy: Policy) -> Prediction:
    """The times and bytes of a policy, whether it fits or not."""
    assert policy.block == model.block, f"a policy for {policy.block} sequences, a model of {model.block}"
    values = model.vector(policy)

    def slowest(bounds: dict[str, Linear]) -> tuple[str, float]:
        seconds = {name: float(bound @ values) for name, bound in bounds.items()}
        name = max(seconds, key=lambda each: seconds[each])
        return name, seconds[name]

    steps = max(0.0, model.workload.output_tokens - 1)
    prefill_name, prefill = slowest(model.prefill_bounds())
    decode_name, decode = slowest(model.decode_bounds())
    memory = {tier: max(float(row @ values) for row in rows) for tier, rows in model.memory().items()}
    limits = _limits(model)
    full = [tier for tier, size in memory.items() if 0 < size >= limits[tier] * (1 - BINDING)]
    head = model.head_seconds()
    prefill_seconds = model.sizes.num_layers * prefill + head
    decode_seconds = steps * (model.sizes.num_layers * decode + head)
    return Prediction(
        throughput=model.block * model.workload.output_tokens / (prefill_seconds + decode_seconds),
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        stages={
            "prefill": {name: float(stage @ values) for name, stage in model.prefill_stages().items()},
            "decode": {name: float(stage @ values) for name, stage in model.decode_stages().items()},
        },
        memory=memory,
        binding=(f"prefill: {prefill_name}", f"decode: {decode_name}", *(f"memory: {tier}" for tier in full)),
    )


def best_placement(model: CostModel, *, attended: bool | None = None) -> Policy | None:
    """The placement with the least seconds of one block size; None if none fits.

    attended  whether all of the cache beyond the first tier is attended to on the second, as in the paper, or nothing
              is; None: the program decides
    Raises PlanError if the solver gives up.
    """
    if attended is None and model.options.attends_whole and model.machine.decode.far_flops:
        both = [best_placement(model, attended=whole) for whole in (False, True)]
        found = [policy for policy in both if policy is not None]
        return min(found, key=lambda policy: predict(model, policy).seconds, default=None)
    values = _solve(model, attended)
    if values is None:
        return None
    tiers = model.num_tiers
    shares = [Share(min(1.0, max(0.0, float(value)))) for value in values]
    weights, cache, hidden = (_split(shares[kind * tiers : (kind + 1) * tiers]) for kind in Kind)
    return Policy(model.micro_batch, model.num_batches, weights, cache, hidden, shares[3 * tiers])


def _split(shares: Sequence[Share]) -> Split:
    """Removes the solver's rounding: a share of 1e-9 is no tensor, and all add up to 1."""
    kept = [share if share > 1e-7 else 0.0 for share in shares]
    total = sum(kept)
    return Split(tuple(Share(share / total) for share in kept))


def lacks_of(model: CostModel) -> Lack:
    """The smallest additional capacity with which a block would fit; empty if it fits already.

    They are on one tier, if that can be: the slowest one that needs at most twice the fewest bytes, because it is the
    cheapest.
    Raises PlanError if no memory helps.
    """
    found: list[Lack] = []
    for tiers in [*([tier] for tier in reversed(range(model.num_tiers))), list(range(model.num_tiers))]:
        extra = _solve(model, None, tiers)
        if extra is not None:
            sizes = zip(model.machine.tiers, extra[model.num_variables :], model.options.slack, strict=False)
            found.append(Lack({tier: size / slack for tier, size, slack in sizes if size > 0.5}))
    if not found:
        raise PlanError("no memory on any tier would make this block fit")
    least = min(sum(lack.num_bytes.values()) for lack in found)
    return next(lack for lack in found if sum(lack.num_bytes.values()) <= least * 2)


def _limits(model: CostModel) -> dict[str, float]:
    slack = model.options.slack
    return {
        tier: capacity * slack[index]
        for index, (tier, capacity) in enumerate(zip(model.machine.tiers, model.machine.capacities, strict=True))
    }


def _solve(model: CostModel, attended: bool | None, open_tiers: Sequence[int] | None = None) -> Linear | None:
    """The values of the variables; None if the constraints cannot be met.

    open_tiers  with tiers: the least bytes are sought that make the block fit if these tiers may grow. The values then
                end with the bytes of each tier
    Raises PlanError for any other answer of the solver.
    """
    from scipy.optimize import linprog

    variables, tiers = model.num_variables, model.num_tiers
    further = 2 if open_tiers is None else tiers
    rows, bounds_above = [], []

    def at_most(expression: Linear, beyond: dict[int, float], scale: float = 1.0) -> None:
        """Adds expression + beyond <= 0. Rows are scaled, because bytes and seconds differ by twelve digits."""
        row = np.zeros(variables + further)
        row[:variables] = expression[:-1] / scale
        for index, factor in beyond.items():
            row[variables + index] += factor
        rows.append(row)
        bounds_above.append(-expression[-1] / scale)

    objective = np.zeros(variables + further)
    if open_tiers is None:
        for index, stages in enumerate((model.prefill_bounds(), model.decode_bounds())):
            for stage in stages.values():
                at_most(stage, {index: -1.0})
        steps = max(0.0, model.workload.output_tokens - 1)
        objective[variables], objective[variables + 1] = 1.0, steps
    limits = _limits(model)
    for tier, (name, needs) in enumerate(model.memory().items()):
        scale = max(limits[name], 1.0)
        for need in needs:
            at_most(need - model.constant(limits[name]), {} if open_tiers is None else {tier: -1.0}, scale)
        if open_tiers is not None:
            objective[variables + tier] = scale
    far = model.attended - model.beyond(Kind.CACHE, 0)
    at_most(far, {})
    if attended:
        at_most(-far, {})
    equal = np.zeros((3, variables + further))
    for kind in Kind:
        equal[kind, :variables] = model.share(kind, range(tiers))[:-1]
    within: list[tuple[float, float | None]] = [(0.0, 1.0)] * variables
    if not model.options.hidden_on_last and tiers > 1:
        within[3 * tiers - 1] = (0.0, 0.0)
    if not model.options.cache_on_last and tiers > 1:
        within[2 * tiers - 1] = (0.0, 0.0)
    if model.options.only_weights:
        for kind in (Kind.CACHE, Kind.HIDDEN):
            within[kind * tiers + 1 : (kind + 1) * tiers] = [(0.0, 0.0)] * (tiers - 1)
    if not model.machine.decode.far_flops or tiers < 3 or attended is False:
        within[3 * tiers] = (0.0, 0.0)
    if open_tiers is None:
        within += [(0.0, None)] * 2
    else:
        within += [(0.0, None if tier in open_tiers else 0.0) for tier in range(tiers)]

    def solved(objective: Linear) -> Any:
        # HiGHS gives up on coefficients of 1e9 in the objective, and now and then in its presolve.
        objective = objective / (np.abs(objective).max() or 1.0)
        for presolve in (True, False):
            answer = linprog(
                objective,
                A_ub=np.array(rows),
                b_ub=np.array(bounds_above),
                A_eq=equal,
                b_eq=np.ones(3),
                bounds=within,
                options={"presolve": presolve},
            )
            if answer.status in (OPTIMAL, INFEASIBLE):
                break
        return answer

    answer = solved(objective)
    if answer.status == INFEASIBLE:
        return None
    if answer.status != OPTIMAL:
        raise PlanError(f"the linear program was not solved: {answer.message}")
    found: Linear = np.asarray(answer.x)
    if open_tiers is None:
        # Where computing is slowest, many placements take equally long. The one that moves least is found.
        least = float(objective @ found)
        rows.append(objective / least)
        bounds_above.append(1 + EQUAL)
        moved = np.zeros(variables + further)
        moved[:variables] = sum(model.prefill_stages().values(), model.constant(0))[:-1]
        moved[:variables] += steps * sum(model.decode_stages().values(), model.constant(0))[:-1]
        answer = solved(moved)
        if answer.status == OPTIMAL:
            found = np.asarray(answer.x)
    else:
        for tier, name in enumerate(model.machine.tiers):
            found[variables + tier] *= max(limits[name], 1.0)
    return found


@dataclass(frozen=True)
class Found:
    """A policy of the search, and its prediction."""

    policy: Policy
    prediction: Prediction


def search(model_of: Callable[[int, int], CostModel], batches: Iterable[tuple[int, int]]) -> list[Found]:
    """The best placement of every block size that fits, in the order of the sizes.

    model_of  (sequences of a micro-batch, number of micro-batches) -> its cost model
    batches   the sizes to try
    Raises PlanError if the solver gives up on a size and no other one fits.
    """
    found, failure = list[Found](), None
    for micro_batch, num_batches in batches:
        model = model_of(micro_batch, num_batches)
        try:
            policy = best_placement(model)
        except PlanError as error:
            failure = error
            log.warning("blocks of %d x %d are left out: %s", num_batches, micro_batch, error)
            continue
        if policy is not None:
            found.append(Found(policy, predict(model, policy)))
    if not found and failure is not None:
        raise failure
    return found


def best(found: Sequence[Found]) -> Found | None:
    """The one with the highest throughput; of equal ones the smallest block, which answers sooner."""
    return max(found, key=lambda each: (each.prediction.throughput, -each.policy.block), default=None)
