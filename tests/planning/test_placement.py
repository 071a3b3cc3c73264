"""The placement algorithms against worked numbers of DistServe's paper and against an exhaustive search."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from quire.placement.cluster_file import ClusterSpec, Network, Nodes
from quire.placement.divisions import Division, Needs, Option, Pair, Role, divisions
from quire.placement.packing import fit
from quire.placement.placement_file import Placement, Predicted
from quire.placement.rejected import Reason
from quire.planning.goodput import Goodput, Verdict
from quire.planning.placement import PlacementError, PlacementTask, Rough, place
from tests.effort import tries

GB, GIB = 10**9, 1 << 30
SMALL = Needs(num_layers=4, weight_bytes=GB, request_bytes=GB)
"""A model that fits everywhere."""


def gpus(nodes: int, each: int, memory: int = 80 * GB, fast: bool = True) -> ClusterSpec:
    between = 25 * GB // 8 if nodes > 1 else None
    return ClusterSpec(Nodes(count=nodes, gpus=each, gpu_memory=memory), Network(between=between, fast=fast))


def cpus(nodes: int, cores: int, memory: int = 64 * GIB) -> ClusterSpec:
    between = 125_000_000 if nodes > 1 else None
    return ClusterSpec(Nodes(count=nodes, cores=cores, memory=memory), Network(between=between))


def threads_of(division: Division) -> dict[str, int]:
    return {"runtime.threads": division.cores}


def untried(placement: Placement) -> tuple[Option, ...]:
    """Options that were not tried because the time was over."""
    return tuple(each.option for each in placement.rejected if each.why is Reason.UNTRIED)


def roughly(rate_of: Callable[[Option], float], error: float) -> Rough:
    """Goodputs that are too high or too low by up to a share of them."""

    def rate(option: Option) -> float:
        return rate_of(option) * float(np.random.default_rng(option.num_slots).uniform(1 - error, 1 + error))

    return Rough(lambda option: Goodput(rate(option), 0.95), lambda option, wanted: rate(option) >= wanted)


def rates(known: dict[str, float]) -> Callable[[Option], Goodput]:
    """The goodput of options by their names; of all others no rate meets the targets."""
    return lambda option: Goodput(known.get(str(option), 0.0), 0.95)


def counts(placement: Placement) -> list[tuple[str, int, int, int]]:
    return [(each.role, each.count, each.tp, each.pp) for each in placement.instances]


def reasons(placement: Placement, why: Reason) -> dict[str, str]:
    return {str(each.option): each.reason for each in placement.rejected if each.why is why}


# Worked numbers.

TOY = {"mixed tp 1 pp 1": 2.0, "mixed tp 2 pp 1": 5.0, "mixed tp 1 pp 2": 4.4, "mixed tp 4 pp 1": 9.0}


def test_the_toy_takes_three_replicas_of_tp_2() -> None:
    placement = place(PlacementTask(gpus(2, 4), SMALL, rates(TOY), rate=12.0), "mixed")
    assert counts(placement) == [("mixed", 3, 2, 1)]
    assert placement.predicted == Predicted(15.0, 6.0, "GPU", 2.5, 0.95)
    rejected = {str(each.option): each.rate_per_unit for each in placement.rejected if each.why is Reason.SLOWER}
    assert rejected == {"mixed tp 1 pp 1": 2.0, "mixed tp 1 pp 2": 2.2, "mixed tp 4 pp 1": 2.25}
    assert reasons(placement, Reason.SLOWER)["mixed tp 4 pp 1"] == (
        "2.25 requests/s per GPU: 10.0% less than mixed tp 2 pp 1, which has 2.5"
    )
    others = divisions(gpus(2, 4), SMALL.num_layers, Role.MIXED)
    assert len(placement.rejected) == len(others) - 1
    assert set(reasons(placement, Reason.MISSES)) == {str(each) for each in others} - set(TOY)


MOTIVATION = {"prefill tp 1 pp 1": 5.6, "decode tp 1 pp 1": 10.0, "mixed tp 1 pp 1": 1.6}
"""OPT-13B on an A100 (DistServe, Figure 1)."""


@pytest.mark.parametrize(("rate", "machine"), [(10.0, 8), (None, 3)])
def test_two_gpus_for_prompts_and_one_that_decodes_serve_twice_what_three_mixed_ones_do(
    rate: float | None, machine: int
) -> None:
    search = PlacementTask(gpus(1, machine), dataclasses.replace(SMALL, num_layers=1), rates(MOTIVATION), rate=rate)
    apart = place(search, "apart")
    assert counts(apart) == [("prefill", 2, 1, 1), ("decode", 1, 1, 1)]
    assert (apart.predicted.rate, apart.predicted.cost) == (10.0, 3.0)
    assert apart.predicted.rate_per_unit == pytest.approx(3.33, abs=0.005)
    assert apart.predicted.attainment == pytest.approx(0.95**2)
    mixed = place(search, "mixed")
    assert mixed.predicted.rate_per_unit == pytest.approx(1.6)
    assert apart.predicted.rate_per_unit / mixed.predicted.rate_per_unit == pytest.approx(2.1, abs=0.02)


# The exhaustive search. It shares no code with the algorithms.

Shape = tuple[int, int]
"""GPUs of a stage, and stages; a pair's stage has the GPUs of both."""


def room(bins: list[int], items: list[int]) -> bool:
    """Whether items fit into bins, by trying all ways."""
    if not items:
        return True
    for size in {size for size in bins if size >= items[0]}:
        left = sorted(bins)
        left.remove(size)
        if room([*left, size - items[0]], items[1:]):
            return True
    return False


@dataclasses.dataclass
class World:
    """A small cluster with random goodputs below random bounds. Values are multiples of 1/4: ties are exact."""

    nodes: int
    each: int
    layers: int
    memory: int
    weights: int
    request: int
    rates: dict[tuple[Any, ...], float] = dataclasses.field(default_factory=dict)
    bounds: dict[tuple[Any, ...], float] = dataclasses.field(default_factory=dict)
    calls: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)

    def search(self, rate: float | None, *, pruned: bool, tests: bool = False) -> PlacementTask:
        def name(option: Option) -> tuple[Any, ...]:
            if isinstance(option, Pair):
                return "pair", option.prefill.tp, option.decode.tp, option.pp
            return option.role.value, option.tp, option.pp

        def goodput_of(option: Option) -> Goodput:
            self.calls.append(name(option))
            return Goodput(self.rates[name(option)], 0.95)

        def bound_of(option: Option) -> float:
            return self.bounds[name(option)] if pruned else math.inf

        serves = (lambda option, rate: self.rates[name(option)] >= rate) if tests else None
        rough = roughly(lambda option: self.rates[name(option)], 0.2) if tests else None
        return PlacementTask(
            gpus(self.nodes, self.each, self.memory), Needs(self.layers, self.weights, self.request), goodput_of,
            rate=rate, bound_of=bound_of, serves=serves, rough=rough,
        )  # fmt: skip

    def shapes(self, role: str) -> Iterator[tuple[tuple[Any, ...], Shape, float]]:
        """Every feasible option: its name, its shape and its goodput."""
        for name, rate in self.rates.items():
            if name[0] == role:
                *sizes, pp = name[1:]
                layers = -(-self.layers // pp) / self.layers
                if rate and all((self.weights + self.request) * layers / tp < self.memory for tp in sizes):
                    yield name, (sum(sizes), pp), rate

    def fits(self, *kinds: tuple[Shape, int]) -> bool:
        stages = [size for (size, pp), count in kinds for _ in range(pp * count)]
        return sum(stages) <= self.nodes * self.each and room([self.each] * self.nodes, sorted(stages, reverse=True))


def world(seed: int) -> World:
    random = np.random.default_rng(seed)
    found = World(
        nodes=int(random.integers(1, 4)), each=int(random.choice([1, 2, 3, 4, 4])), layers=int(random.integers(1, 4)),
        memory=100, weights=int(random.choice([30, 90, 150])), request=int(random.choice([5, 20])),
    )  # fmt: skip
    total = found.nodes * found.each
    sizes = range(1, found.each + 1)

    def add(name: tuple[Any, ...], cost: int) -> None:
        per_gpu = float(random.choice([0.0, *np.arange(1, 13) / 4]))
        found.rates[name] = per_gpu * cost
        found.bounds[name] = per_gpu + float(random.choice([0.0, 0.25, 0.5, 2.0]))

    for tp, pp in itertools.product(sizes, range(1, min(found.layers, total) + 1)):
        if found.fits(((tp, pp), 1)):
            for role in ("prefill", "decode", "mixed"):
                add((role, tp, pp), tp * pp)
        for other in sizes:
            if tp + other <= found.each and found.fits(((tp + other, pp), 1)):
                add(("pair", tp, other, pp), (tp + other) * pp)
    return found


Found = list[tuple[tuple[Any, ...], int]] | None
"""The options that were taken, by name, and how many of each."""


def best_per_gpu(world: World, rate: float, roles: list[str]) -> Found:
    found = []
    for role in roles:
        options = [(-rate / (size * pp), size * pp, pp, name, rate) for name, (size, pp), rate in world.shapes(role)]
        if not options:
            return None
        *_, name, goodput = min(options)
        found.append((name, -int(-rate // goodput)))
    return found


def best_of_all(world: World, roles: list[str]) -> tuple[float, int, Found]:
    """The highest rate of the whole cluster, then the fewest GPUs, then the order of options."""
    best: tuple[Any, ...] = (0.0, 0, (), None)
    total = world.nodes * world.each
    for options in itertools.product(*(list(world.shapes(role)) for role in roles)):
        for numbers in itertools.product(range(1, total + 1), repeat=len(roles)):
            slots = sum(size * pp * count for (_, (size, pp), _), count in zip(options, numbers, strict=True))
            rate = min(goodput * count for (_, _, goodput), count in zip(options, numbers, strict=True))
            order = [(size * pp, pp, *name[1:]) for name, (size, pp), _ in options]
            key = (-rate, slots, order)
            if slots > total or (best[3] is not None and key >= best[:3]):
                continue
            if world.fits(*((shape, count) for (_, shape, _), count in zip(options, numbers, strict=True))):
                best = (*key, [(name, count) for (name, _, _), count in zip(options, numbers, strict=True)])
    return -best[0], best[1], best[3]


ROLES = {"apart": ["prefill", "decode"], "pairs": ["pair"], "mixed": ["mixed"]}
"""By algorithm."""


def taken(placement: Placement, algorithm: str) -> Found:
    if algorithm == "pairs":
        prefill, decode = placement.instances
        assert prefill.count == decode.count
        return [(("pair", prefill.tp, decode.tp, prefill.pp), prefill.count)]
    return [((each.role, each.tp, each.pp), each.count) for each in placement.instances]


def attempt(algorithm: str, search: PlacementTask) -> tuple[Found, Placement | None]:
    try:
        placement = place(search, algorithm)
    except PlacementError:
        return None, None
    return taken(placement, algorithm), placement


@pytest.mark.parametrize("algorithm", ROLES)
@pytest.mark.parametrize("rate", [None, 7.0])
def test_a_pruned_search_takes_exactly_what_an_exhaustive_one_takes(algorithm: str, rate: float | None) -> None:
    calls, tested, everything, found = 0, 0, 0, 0
    for seed in range(tries(30)):
        case = world(seed)
        wanted, placement = attempt(algorithm, case.search(rate, pruned=True))
        calls += len(case.calls)
        case.calls.clear()
        assert attempt(algorithm, case.search(rate, pruned=True, tests=True))[0] == wanted, seed
        tested += len(case.calls)
        case.calls.clear()
        assert attempt(algorithm, case.search(rate, pruned=False))[0] == wanted, seed
        everything += len(case.calls)
        if rate is not None:
            assert wanted == best_per_gpu(case, rate, ROLES[algorithm]), seed
            continue
        most, slots, exact = best_of_all(case, ROLES[algorithm])
        assert wanted == exact, seed
        if placement is not None:
            found += 1
            assert (placement.predicted.rate, placement.predicted.cost) == (most, slots), seed
            assert placement.predicted.fits and not placement.warnings
    assert calls < 0.9 * everything, f"{calls} of {everything} options were tried"
    assert tested < 0.9 * calls, f"of {calls} options {tested} were searched for after a test of one rate"
    assert rate is not None or found > tries(30) / 3


@pytest.mark.parametrize("seed", range(3))
def test_one_rate_rules_out_most_options_of_a_large_cluster(seed: int) -> None:
    random, names = np.random.default_rng(seed), list[tuple[str, str]]()
    needs = dataclasses.replace(SMALL, num_layers=40)
    options = [each for role in (Role.PREFILL, Role.DECODE) for each in divisions(gpus(4, 8), 40, role)]
    per_gpu: dict[Option, float] = {each: (1 + 0.3 * random.random()) * each.num_slots**-0.1 for each in options}
    bounds: dict[Option, float] = {each: per_gpu[each] * (1 + 0.8 * random.random()) for each in options}

    def goodput_of(option: Option) -> Goodput:
        names.append(("search", str(option)))
        return Goodput(per_gpu[option] * option.num_slots, 0.95)

    def serves(option: Option, rate: float) -> bool:
        names.append(("test", str(option)))
        return per_gpu[option] * option.num_slots >= rate

    def count(kind: str) -> int:
        return sum(each == kind for each, _ in names)

    search = PlacementTask(gpus(4, 8), needs, goodput_of, bound_of=bounds.__getitem__, serves=serves)
    placement = place(search, "apart")
    num_searched, num_tested = count("search"), count("test")
    names.clear()
    assert counts(place(dataclasses.replace(search, serves=None), "apart")) == counts(placement)
    assert num_searched < 0.25 * count("search") and num_tested < 1.5 * count("search")
    names.clear()
    rough = roughly(lambda option: per_gpu[option] * option.num_slots, 0.03)
    assert counts(place(dataclasses.replace(search, rough=rough), "apart")) == counts(placement)
    assert count("search") <= num_searched / 2, "what is likely is not tried first"
    told = reasons(placement, Reason.BOUND).values()
    assert sum("it misses the latency targets at " in each for each in told) > num_tested / 2


def test_options_are_tried_by_decreasing_bound_and_every_other_one_has_a_reason() -> None:
    for seed in range(tries(30)):
        for algorithm, rate in itertools.product(ROLES, (None, 7.0)):
            case = world(seed)
            _, placement = attempt(algorithm, case.search(rate, pruned=True))
            for role in {name[0] for name in case.calls}:
                bounds = [case.bounds[name] for name in case.calls if name[0] == role]
                assert bounds == sorted(bounds, reverse=True)
            if placement is not None:
                roles = ROLES[algorithm]
                names = [str(each.option) for each in placement.rejected]
                assert len(set(names)) == len(names) == sum(name[0] in roles for name in case.rates) - len(roles)
                assert sum(each.why is Reason.BOUND for each in placement.rejected) + len(case.calls) == sum(
                    each.why is not Reason.UNFIT for each in placement.rejected
                ) + len(roles)


# Reasons, bounds and time.


def test_a_bound_below_the_best_goodput_is_the_reason_to_skip() -> None:
    bounds = {"mixed tp 2 pp 1": 4.0, "mixed tp 1 pp 1": 3.0, "mixed tp 4 pp 1": 2.5, "mixed tp 1 pp 2": 2.25}
    tried: list[str] = []

    def goodput_of(option: Option) -> Goodput:
        tried.append(str(option))
        return rates(TOY)(option)

    placement = place(
        PlacementTask(gpus(1, 4), SMALL, goodput_of, rate=12.0, bound_of=lambda option: bounds.get(str(option), 0.5)),
        "mixed",
    )
    assert tried == ["mixed tp 2 pp 1", "mixed tp 1 pp 1", "mixed tp 4 pp 1"], "2.5 may still be equalled"
    skipped = reasons(placement, Reason.BOUND)
    assert skipped["mixed tp 1 pp 2"] == "at most 2.25 requests/s per GPU, but mixed tp 2 pp 1 has 2.5"
    assert "mixed tp 2 pp 2" in skipped and all(each.rate_per_unit is None for each in placement.rejected[-4:])


def test_a_whole_cluster_skips_what_cannot_serve_more_with_the_best_partner() -> None:
    """4 GPUs serve 10 requests/s with 5 per GPU on both sides, and at most 4 / (1 / 4 + 1 / 5) = 8.9 with 4 on one."""
    tried: list[Option] = []

    def goodput_of(option: Option) -> Goodput:
        tried.append(option)
        return Goodput(5.0, 0.95)

    needs = dataclasses.replace(SMALL, num_layers=1)
    bounds = {1: 6.0, 2: 4.0, 3: 4.0, 4: 4.0}
    placement = place(
        PlacementTask(gpus(1, 4), needs, goodput_of, bound_of=lambda option: bounds[option.num_slots]), "apart"
    )
    assert tried == [Division(Role.PREFILL), Division(Role.DECODE)] and placement.predicted.rate == 10.0
    assert reasons(placement, Reason.BOUND)["prefill tp 2 pp 1"] == (
        "the cluster serves at most 8.889 requests/s with it, but 10 with 2 x prefill tp 1 pp 1, 2 x decode tp 1 pp 1"
    )


def test_a_bound_excludes_nothing_that_an_untried_partner_could_make_the_best() -> None:
    """The second decoding option may have 9 per GPU; with it the second one for prompts may serve 6.5 requests/s."""
    clock = Clock()
    bounds = {"prefill tp 1 pp 1": 6.0, "decode tp 1 pp 1": 10.0, "prefill tp 2 pp 1": 2.0, "decode tp 2 pp 1": 9.0}
    known = {"prefill tp 1 pp 1": 5.0, "decode tp 1 pp 1": 1.0}

    def goodput_of(option: Option) -> Goodput:
        clock.now += 10
        return rates(known)(option)

    placement = place(
        PlacementTask(
            gpus(1, 4), dataclasses.replace(SMALL, num_layers=1), goodput_of,
            bound_of=lambda option: bounds.get(str(option), 0.5), seconds=15, clock=clock,
        ),
        "apart",
    )  # fmt: skip
    assert placement.predicted.rate == 3.0
    assert [str(each) for each in untried(placement)] == ["prefill tp 2 pp 1", "decode tp 2 pp 1"]
    assert set(reasons(placement, Reason.BOUND)) == {
        f"{role} tp {tp} pp 1" for role in ("prefill", "decode") for tp in (3, 4)
    }


def test_a_goodput_above_its_bound_is_reported() -> None:
    placement = place(PlacementTask(gpus(1, 4), SMALL, rates(TOY), rate=1.0, bound_of=lambda option: 2.3), "mixed")
    assert [each[:15] for each in placement.warnings] == ["mixed tp 2 pp 1"]
    assert "2.5 requests/s per GPU is above its upper bound of 2.3" in placement.warnings[0]


class Clock:
    """A clock that an evaluation moves by 10 seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def goodput_of(self, option: Option) -> Goodput:
        self.now += 10
        return Goodput(2.0 * option.num_slots, 0.95)


@pytest.mark.parametrize("rate", [None, 3.0])
@pytest.mark.parametrize(("seconds", "num_tried"), [(0, 2), (15, 2), (25, 3), (35, 4), (1000, 16)])
def test_a_budget_is_shared_by_the_roles_and_the_rest_is_said_to_be_untried(
    rate: float | None, seconds: float, num_tried: int
) -> None:
    clock, done = Clock(), []
    placement = place(
        PlacementTask(
            gpus(1, 4), SMALL, clock.goodput_of, rate=rate, seconds=seconds, clock=clock,
            progress=lambda *at: done.append(at),
        ),
        "apart",
    )  # fmt: skip
    assert clock.now == 1000 + 10 * num_tried
    assert len(untried(placement)) == 16 - num_tried
    assert [at[:2] for at in done] == [(number, 16) for number in range(1, 17)]
    assert {option for _, _, option in done[:2]} == {Division(Role.PREFILL), Division(Role.DECODE)}
    assert untried(placement) == tuple(option for *_, option in done[num_tried:])
    said = [warning for warning in placement.warnings if "not tried" in warning]
    assert said == ([f"{16 - num_tried} of 16 options were not tried: the time was over"] if num_tried < 16 else [])
    assert len(set(reasons(placement, Reason.UNTRIED).values())) == (num_tried < 16)


def test_rough_trials_are_told_too_and_count_as_half_of_the_work() -> None:
    from quire.planning.placements import _tell

    shown, rough = list[tuple[int, int]](), roughly(lambda option: 2.0 * option.num_slots, 0.1)
    tell = partial(_tell, lambda *at: shown.append(at))
    search = PlacementTask(gpus(1, 4), SMALL, Clock().goodput_of, rough=rough._replace(progress=partial(tell, 0)))
    place(dataclasses.replace(search, progress=partial(tell, 1)), "apart")
    first = [at for at in shown if at[0] <= 16]
    assert first == [(number, 32) for number in range(1, len(first) + 1)] and first
    assert shown[len(first) :] == [(number, 32) for number in range(17, 33)]


def test_doubts_about_the_chosen_goodput_become_warnings() -> None:
    placement = place(
        PlacementTask(gpus(1, 1), SMALL, lambda option: Goodput(16.0, 0.95, Verdict.UNBOUNDED), rate=16.0), "mixed"
    )
    assert placement.warnings == (
        "mixed tp 1 pp 1: the goodput is at least 16 requests/s, the highest rate that was tried",
    )


def test_a_rate_beyond_the_cluster_is_planned_and_said_not_to_fit() -> None:
    placement = place(PlacementTask(gpus(1, 4), SMALL, rates(TOY), rate=12.0), "mixed")
    assert placement.predicted.cost == 6 and not placement.predicted.fits
    # 6 of 8 GPUs, but two stages of 3 do not fit into machines of 4 beside each other.
    assert fit(gpus(2, 4), {Division(Role.MIXED, 3): 2}) and not fit(gpus(1, 8), {Division(Role.MIXED, 3): 3})


def test_without_any_goodput_the_error_says_what_the_best_option_lacks() -> None:
    shares = {"mixed tp 1 pp 1": 0.2, "mixed tp 2 pp 1": 0.7}

    def misses(option: Option) -> Goodput:
        return Goodput(0.0, shares.get(str(option), 0.1), Verdict.INFEASIBLE, confirmed=False)

    with pytest.raises(
        PlacementError, match=r"the best is mixed tp 2 pp 1: .* 70\.0% of .* raise slo\.ttft or slo\.tp"
    ):
        place(PlacementTask(gpus(1, 4), SMALL, misses, rate=1.0), "mixed")
    with pytest.raises(PlacementError, match=r"5 options were not tried in time"):
        place(PlacementTask(gpus(1, 4), dataclasses.replace(SMALL, num_layers=1), misses, seconds=-1), "pairs")
    large = Needs(num_layers=96, weight_bytes=350 * GB, request_bytes=GB, num_heads=96)
    with pytest.raises(PlacementError, match=r"no option fits; mixed tp 4 pp 1: 81\.72GiB are needed .* cache\.codec"):
        place(PlacementTask(gpus(1, 4), large, misses), "mixed")
    with pytest.raises(PlacementError, match="no room for an instance of each role; plan for mixed"):
        place(PlacementTask(gpus(1, 1), SMALL, misses), "pairs")
    with pytest.raises(PlacementError, match="no room for an instance of each role; plan for mixed"):
        place(PlacementTask(gpus(1, 1), SMALL, rates(MOTIVATION)), "apart")


def test_a_role_without_a_goodput_ends_the_search_of_the_other() -> None:
    tried: list[Option] = []

    def goodput_of(option: Option) -> Goodput:
        tried.append(option)
        return Goodput(float(isinstance(option, Division) and option.role is Role.PREFILL), 0.5)

    needs = dataclasses.replace(SMALL, num_layers=1)
    with pytest.raises(PlacementError, match="no option meets the latency targets; the best is decode"):
        place(PlacementTask(gpus(8, 1), needs, goodput_of, rate=1.0), "apart")
    assert len(tried) == 2


def test_a_slow_network_is_a_reason_to_doubt_instances_on_different_machines() -> None:
    for cluster, is_doubted in [(gpus(1, 4), False), (gpus(2, 4), False), (gpus(2, 4, fast=False), True)]:
        placement = place(PlacementTask(cluster, SMALL, rates(MOTIVATION), rate=5.0), "apart")
        assert (
            placement.made == {"algorithm": "apart"}
            and ["not fast (network.fast)" in each for each in placement.warnings] == [True] * is_doubted
        )


def test_an_instance_without_gpus_takes_cores_and_their_memory() -> None:
    cluster = cpus(2, 4, 40 * GIB)
    needs = Needs(num_layers=30, weight_bytes=15 * GIB, request_bytes=GIB)
    known = {"prefill on 2 cores": 2.0, "decode on 2 cores": 1.9, "decode on 4 cores": 5.0}
    placement = place(PlacementTask(cluster, needs, rates(known), options_of=threads_of), "apart")
    assert [(str(each.option), each.reason) for each in placement.rejected if each.why is Reason.UNFIT] == [
        (f"{role} on 1 core", "16GiB are needed (15GiB of weights, 1GiB for the longest request), and a core has 10GiB")
        for role in ("prefill", "decode")
    ]
    assert counts(placement) == [("prefill", 2, 1, 1), ("decode", 2, 1, 1)]
    assert [each.options for each in placement.instances] == [{"runtime.threads": 2}, {"runtime.threads": 2}]
    assert (placement.predicted.cost, placement.predicted.unit, placement.predicted.rate) == (2.0, "machine", 3.8)
    assert placement.predicted.rate_per_unit == 1.9
    told = {str(each.option): each.reason for each in placement.rejected if each.why is Reason.MISSES}
    assert set(told) == {"prefill on 4 cores", "decode on 4 cores"} and "no option meets" in told["decode on 4 cores"]
    # Of one machine the instances may be unequal.
    known = {"prefill on 2 cores": 2.0, "decode on 2 cores": 0.9, "decode on 4 cores": 5.0}
    alone = place(PlacementTask(cpus(1, 6, 60 * GIB), needs, rates(known), options_of=threads_of), "apart")
    assert [each.options for each in alone.instances] == [{"runtime.threads": 2}, {"runtime.threads": 4}]
    uneven = {"prefill on 1 core with decode on 2 cores": 9.0, "prefill on 2 cores with decode on 2 cores": 1.5}
    pair = place(PlacementTask(cluster, needs, rates(uneven), rate=3.0), "pairs")
    assert [each.count for each in pair.instances] == [2, 2] and pair.predicted.rate_per_unit == 1.5


def test_the_best_size_of_equal_instances_is_taken_and_the_others_say_why_not() -> None:
    known = {f"{role} on {size}": rate for role in ("prefill", "decode")
             for size, rate in (("1 core", 1.0), ("2 cores", 2.5), ("4 cores", 4.0))}  # fmt: skip
    cluster, needs = cpus(2, 4), Needs(num_layers=30, weight_bytes=GIB, request_bytes=GIB)
    most = place(PlacementTask(cluster, needs, rates(known)), "apart")
    assert counts(most) == [("prefill", 2, 1, 1), ("decode", 2, 1, 1)] and most.predicted.rate == 5.0
    few = place(PlacementTask(cluster, needs, rates(known), rate=1.0, options_of=threads_of), "apart")
    assert counts(few) == [("prefill", 1, 1, 1), ("decode", 1, 1, 1)] and few.predicted.cost == 0.5
    assert [each.options["runtime.threads"] for each in few.instances] == [1, 1]
    told = {str(each.option): each.reason for each in most.rejected if each.why is Reason.SLOWER}
    assert told["decode on 1 core"] == "4 requests/s on 2 machines, but 5 on 2 with instances of another size"
    assert {str(each.option) for each in (*most.rejected, *few.rejected)} >= set(known)


def test_options_without_latencies_say_so_and_do_not_hide_what_others_miss() -> None:
    def why_unknown(option: Option) -> str:
        return "no latencies" if f"on {unknown} core" in str(option) else ""

    cluster, needs = cpus(2, 2), Needs(num_layers=30, weight_bytes=GIB, request_bytes=GIB)
    known = {"prefill on 1 core with decode on 1 core": 2.0, "mixed on 2 cores": 3.0}
    unknown = 2
    search = PlacementTask(cluster, needs, rates(known), why_unknown=why_unknown)
    placement = place(dataclasses.replace(search, goodput_of=rates({"mixed on 1 core": 1.0})), "mixed")
    assert reasons(placement, Reason.UNFIT) == {"mixed on 2 cores": "no latencies"}
    with pytest.raises(PlacementError, match="the best is mixed on 1 core"):
        place(search, "mixed")
    with pytest.raises(PlacementError, match="the best is mixed on 2 cores"):  # the largest
        place(dataclasses.replace(search, goodput_of=rates({}), why_unknown=lambda option: ""), "mixed")
    unknown = 1
    with pytest.raises(PlacementError, match=r"no option fits; prefill .*: no latencies$"):
        place(search, "pairs")


def test_the_caller_s_settings_are_part_of_the_instances() -> None:
    placement = place(
        PlacementTask(
            cpus(1, 2), SMALL, rates({"mixed on 2 cores": 1.0}),
            options_of=lambda division: {"scheduler.token_budget": 256 * division.cores},
        ),
        "mixed",
    )  # fmt: skip
    assert placement.instances[0].options == {"scheduler.token_budget": 512}
