"""Finds the placement with the highest throughput: a linear program for each block size, and a search over these.

The program minimises the seconds of a block over the shares of weights, cache and activations on each tier, with the
memory of every tier as a constraint. Micro-batch and block size are enumerated: throughput has several maxima in them,
so the search does not stop at the first. HiGHS needs about 2 ms for a program.

Source: FlexGen, arXiv 2303.06865, section 4.3. Ours differs: the program also decides how much of the cache is attended
to on the second tier; and without a solution it says which tier lacks memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import QuireError
from quire.offload.planning.costs import CostModel, Form, Kind, Linear
from quire.offload.policy import OffloadPolicy
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
class PlacedBlock:
    """A policy of the search, and its prediction."""

    policy: OffloadPolicy
    prediction: Prediction


def lack_text(num_bytes: Mapping[str, float]) -> str:
    """Bytes of capacity that are missing, by tier, in words."""
    return ", ".join(f"{tier} lacks {format_bytes(int(size) + 1)}" for tier, size in num_bytes.items())


def no_fit(model: CostModel) -> PlanError:
    """The error of a block that does not fit, which names what is missing. Raises PlanError if no memory helps."""
    return PlanError(f"with blocks of {model.num_batches} x {model.micro_batch}, {lack_text(lacks_of(model))}")


def predict(model: CostModel, policy: OffloadPolicy) -> Prediction:
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


def best_placement(model: CostModel, *, attended: bool | None = None) -> OffloadPolicy | None:
    """The placement with the least seconds of one block size; None if none fits.

    attended  whether all of the cache beyond the first tier is attended to on the second, as in the paper, or nothing
              is; None: the program decides
    Raises PlanError if the solver gives up.
    """
    if attended is None and model.options.form is Form.ENGINE and model.machine.decode.far_flops:
        both = [best_placement(model, attended=whole) for whole in (False, True)]
        found = [policy for policy in both if policy is not None]
        return min(found, key=lambda policy: predict(model, policy).seconds, default=None)
    values = _solve(model, attended)
    if values is None:
        return None
    tiers = model.num_tiers
    shares = [Share(min(1.0, max(0.0, float(value)))) for value in values]
    weights, cache, hidden = (_split(shares[kind * tiers : (kind + 1) * tiers]) for kind in Kind)
    return OffloadPolicy(model.micro_batch, model.num_batches, weights, cache, hidden, shares[3 * tiers])


def _split(shares: Sequence[Share]) -> Split:
    """Removes the solver's rounding: a share of 1e-9 is no tensor, and all add up to 1."""
    kept = [share if share > 1e-7 else 0.0 for share in shares]
    total = sum(kept)
    return Split(tuple(Share(share / total) for share in kept))


def lacks_of(model: CostModel) -> dict[str, float]:
    """The smallest additional capacity with which a block would fit, in bytes by tier; empty if it fits already.

    They are on one tier, if that can be: the slowest one that needs at most twice the fewest bytes, because it is the
    cheapest.
    Raises PlanError if no memory helps.
    """
    found: list[dict[str, float]] = []
    for tiers in [*([tier] for tier in reversed(range(model.num_tiers))), list(range(model.num_tiers))]:
        extra = _solve(model, None, tiers)
        if extra is not None:
            sizes = zip(model.machine.tiers, extra[model.num_variables :], strict=False)
            found.append({tier: size / model.options.slack for tier, size in sizes if size > 0.5})
    if not found:
        raise PlanError("no memory on any tier would make this block fit")
    least = min(sum(lack.values()) for lack in found)
    return next(lack for lack in found if sum(lack.values()) <= least * 2)


def _limits(model: CostModel) -> dict[str, float]:
    """Bytes of each tier that may be used."""
    sizes = zip(model.machine.tiers, model.machine.capacities, strict=True)
    return {tier: capacity * model.options.slack for tier, capacity in sizes}


def _ranges(model: CostModel, attended: bool | None) -> list[tuple[float, float | None]]:
    """The least and the largest value of each variable."""
    tiers, options = model.num_tiers, model.options
    found: list[tuple[float, float | None]] = [(0.0, 1.0)] * model.num_variables
    for kind, most in ((Kind.CACHE, options.cache_tiers), (Kind.HIDDEN, options.hidden_tiers)):
        for tier in range(most, tiers):
            found[kind * tiers + tier] = (0.0, 0.0)
    if not model.machine.decode.far_flops or tiers < 3 or attended is False:
        found[-1] = (0.0, 0.0)
    return found


def _solve(model: CostModel, attended: bool | None, open_tiers: Sequence[int] | None = None) -> Linear | None:
    """The values of the variables; None if the constraints cannot be met.

    open_tiers  with tiers: the least bytes are sought that make the block fit if these tiers may grow. The values then
                end with the bytes of each tier, otherwise with the seconds of both phases
    Raises PlanError for any other answer of the solver.
    """
    tiers, steps, rows = model.num_tiers, max(0.0, model.workload.output_tokens - 1), list[Linear]()
    limits = _limits(model)
    scales = [max(limit, 1.0) for limit in limits.values()]
    # The further variables are the seconds of both phases, or the bytes of each tier.
    costs = [1.0, steps] if open_tiers is None else scales

    def at_most(expression: Linear, further: int | None = None, scale: float = 1.0) -> None:
        """Adds expression <= a further variable, or 0. Rows are scaled: bytes and seconds differ by twelve digits."""
        others = np.zeros(len(costs))
        if further is not None:
            others[further] = -1.0
        rows.append(np.concatenate([expression[:-1] / scale, others, expression[-1:] / scale]))

    if open_tiers is None:
        for phase, stages in enumerate((model.prefill_bounds(), model.decode_bounds())):
            for stage in stages.values():
                at_most(stage, phase)
    for tier, (name, needs) in enumerate(model.memory().items()):
        for need in needs:
            at_most(need - model.constant(limits[name]), None if open_tiers is None else tier, scales[tier])
    far = model.attended - model.beyond(Kind.CACHE, 0)
    at_most(far)
    if attended:
        at_most(-far)
    may_grow = range(len(costs)) if open_tiers is None else open_tiers
    within = _ranges(model, attended) + [(0.0, None if place in may_grow else 0.0) for place in range(len(costs))]
    equal = np.zeros((3, len(within)))
    for kind in Kind:
        equal[kind, : model.num_variables] = model.share(kind, range(tiers))[:-1]
    objective = np.concatenate([np.zeros(model.num_variables), costs])
    answer = _minimum(objective, rows, equal, within)
    if answer.status == INFEASIBLE:
        return None
    if answer.status != OPTIMAL:
        raise PlanError(f"the linear program was not solved: {answer.message}")
    found: Linear = np.asarray(answer.x)
    if open_tiers is not None:
        found[model.num_variables :] *= scales
        return found
    # Where computing is slowest, many placements take equally long. The one that moves least is found.
    rows.append(np.append(objective / float(objective @ found), -(1 + EQUAL)))
    moved = sum(model.prefill_stages().values(), model.constant(0))[:-1]
    moved = moved + steps * sum(model.decode_stages().values(), model.constant(0))[:-1]
    answer = _minimum(np.concatenate([moved, np.zeros(2)]), rows, equal, within)
    return np.asarray(answer.x) if answer.status == OPTIMAL else found


def _minimum(objective: Linear, rows: Sequence[Linear], equal: NDArray[np.float64], within: Sequence[Any]) -> Any:
    """HiGHS's answer: the variables that minimise the objective.

    rows    each a constraint row @ (variables, 1) <= 0
    equal   sums that are 1
    within  the least and the largest value of each variable
    """
    from scipy.optimize import linprog

    # HiGHS gives up on coefficients of 1e9 in the objective, and now and then in its presolve.
    objective, table = objective / (np.abs(objective).max() or 1.0), np.array(rows)
    for presolve in (True, False):
        answer = linprog(
            objective, table[:, :-1], -table[:, -1], equal, np.ones(3), within, options={"presolve": presolve}
        )
        if answer.status in (OPTIMAL, INFEASIBLE):
            break
    return answer


def placed(model: CostModel) -> PlacedBlock | None:
    """The best placement of one block size; None if none fits. Raises PlanError if the solver gives up."""
    policy = best_placement(model)
    return None if policy is None else PlacedBlock(policy, predict(model, policy))


def search(placed: Callable[[int, int], PlacedBlock | None], blocks: Iterable[tuple[int, int]]) -> list[PlacedBlock]:
    """The best placement of every block size that fits, in the order of the sizes.

    placed  (sequences of a micro-batch, number of micro-batches) -> the best placement. Raises PlanError
    blocks  the sizes to try
    Raises PlanError if the solver gives up on a size and no other one fits.
    """
    found, failure = list[PlacedBlock](), None
    for micro_batch, num_batches in blocks:
        try:
            each = placed(micro_batch, num_batches)
        except PlanError as error:
            failure = error
            log.warning("blocks of %d x %d are left out: %s", num_batches, micro_batch, error)
            continue
        if each is not None:
            found.append(each)
    if not found and failure is not None:
        raise failure
    return found


def best(found: Sequence[PlacedBlock]) -> PlacedBlock | None:
    """The one with the highest throughput; of equal ones the smallest block, which answers sooner."""
    return max(found, key=lambda each: (each.prediction.throughput, -each.policy.block), default=None)
