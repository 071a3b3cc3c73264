"""The linear program of offloading against published numbers, and against a grid of all placements."""

from __future__ import annotations

import dataclasses
import itertools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.optimize

from quire.errors import ConfigError
from quire.offload.planning.costs import (
    BlockWorkload,
    CostModel,
    Form,
    Kind,
    Options,
    Rates,
    Sizes,
    TieredMachine,
    TierLink,
    Traffic,
)
from quire.offload.planning.paper import FORMS, GIB
from quire.offload.planning.planner import MICRO_BATCHES
from quire.offload.planning.program import (
    PlacedBlock,
    PlanError,
    Prediction,
    best,
    best_placement,
    lack_text,
    lacks_of,
    placed,
    predict,
    search,
)
from quire.offload.policy import OffloadPolicy
from quire.offload.units import TIERS, Share, Split, percent
from tests.effort import full_only, tries
from tests.opt_paper import OPT_30B, OPT_175B, Opt, cost_model, percents

WORK = BlockWorkload(prompt_tokens=512, output_tokens=32)
ROOM = (16 * GIB, 200 * GIB, 1500 * GIB)


REPOSITORY = FORMS[Form.SUMS]


def loose(slack: float) -> Options:
    return dataclasses.replace(REPOSITORY, slack=slack)


@pytest.mark.parametrize(("slack", "weights", "throughput"), [(0.8, 0.087, 6.974), (1.0, 0.1476, 7.060)])
@pytest.mark.parametrize("attended", [True, None])
def test_the_program_finds_the_golden_placement(
    slack: float, weights: float, throughput: float, attended: bool | None
) -> None:
    model = cost_model(OPT_30B, WORK, 48, 3, ROOM, loose(slack))
    policy = best_placement(model, attended=attended)
    assert policy is not None
    assert policy.weights.shares[0] == pytest.approx(weights, rel=1e-2)
    assert policy.cache.shares == pytest.approx((0, 1, 0), abs=1e-6)
    assert policy.attended == pytest.approx(1) and lacks_of(model) == {}
    assert predict(model, policy).throughput == pytest.approx(throughput, rel=1e-3)


def test_opt_175b_becomes_feasible_with_4_bits() -> None:
    model = cost_model(OPT_175B, WORK, 32, 8, ROOM, REPOSITORY)
    given = OffloadPolicy(32, 8, percents(0, 50, 50), percents(0, 0, 100), percents(0, 100, 0), Share(1.0))
    assert predict(model, given).throughput == pytest.approx(0.154, rel=1e-2)
    assert best_placement(model, attended=True) is None
    four_bits = 4.5 / 16
    sizes = dataclasses.replace(
        model.sizes,
        layer_bytes=model.sizes.layer_bytes * four_bits,
        cache_bytes=model.sizes.cache_bytes * four_bits,
    )
    packed = dataclasses.replace(model, sizes=sizes)
    policy = best_placement(packed, attended=True)
    assert policy is not None
    assert predict(packed, policy).throughput == pytest.approx(0.941, rel=1e-2)


@pytest.mark.parametrize(
    ("opt", "block", "room", "lacking"),
    [(OPT_175B, (32, 8), ROOM, "gpu"), (OPT_30B, (4, 1), (16 * GIB, 40 * GIB, 1 * GIB), "disk")],
)
def test_the_cheapest_tier_that_helps_is_named_and_filling_it_helps(
    opt: Opt, block: tuple[int, int], room: tuple[float, ...], lacking: str
) -> None:
    model = cost_model(opt, WORK, *block, room, REPOSITORY)
    lack, place = lacks_of(model), TIERS.index(lacking)
    assert list(lack) == [lacking] and lack_text(lack).startswith(f"{lacking} lacks ")
    for factor, helps in ((1 + 1e-6, True), (1 - 1e-4, False)):
        capacities = [*room]
        capacities[place] = (room[place] + lack[lacking]) * factor
        machine = dataclasses.replace(model.machine, capacities=tuple(capacities))
        assert (best_placement(dataclasses.replace(model, machine=machine)) is not None) is helps


def test_gpu_bytes_go_to_weights_before_the_cache_where_the_closed_form_says_so() -> None:
    """With nothing on disk: iff 1 / link > ((s + n/2) / (s + n)) * (1/cpu - 1/attention)."""
    for cpu_factor, weights_first in ((1.0, True), (0.5, False)):
        model = cost_model(OPT_30B, WORK, 48, 3, ROOM, loose(1.0))
        rates = model.machine.decode
        far = rates.far_flops * cpu_factor
        machine = dataclasses.replace(model.machine, decode=dataclasses.replace(rates, far_flops=far))
        gain = (512 + 16) / (512 + 32) * (1 / far - 1 / rates.attention_flops)
        assert (1 / rates.links[0].up.weights > gain) is weights_first
        policy = best_placement(dataclasses.replace(model, machine=machine), attended=True)
        assert policy is not None
        assert (policy.weights.shares[0] > 0.01) is weights_first
        assert (policy.cache.shares[0] > 0.01) is not weights_first


def random_model(rng: np.random.Generator) -> CostModel:
    """Any model on any machine of three tiers."""

    def rate(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    def traffic(low: float, high: float) -> Traffic:
        return Traffic(rate(low, high), rate(low, high), rate(low, high))

    def rates() -> Rates:
        links = TierLink(traffic(1e9, 6e10), traffic(1e9, 6e10)), TierLink(traffic(1e8, 5e9), traffic(1e8, 5e9))
        attention = rate(1e11, 1e13)
        return Rates(links, rate(1e12, 1e14), attention, rate(attention / 1000, attention))

    width, inner, layers = int(rng.integers(8, 65)) * 128, int(rng.integers(8, 257)) * 128, int(rng.integers(4, 97))
    layer_bytes = (8.0 * width**2 + 4.0 * width * inner) * rng.choice([1, 0.28125])
    cache = 4.0 * width * rng.choice([1, 0.25, 0.208])
    sizes = Sizes(
        layers, layer_bytes, cache, 2.0 * width, 8.0 * width**2, 4.0 * width, score_bytes=64.0,
        prefill=(4096.0 * width, 512.0 * width), decode=(8.0 * width,),
        head_flops=2e5 * width,
    )  # fmt: skip
    work = BlockWorkload(
        float(rng.integers(16, 2049)), float(rng.integers(2, 257)), *[(0.0, 0.0), (16.0, 2.0)][int(rng.integers(2))],
        kept=Share(float(rng.choice([1.0, 0.5]))), growth=Share(float(rng.choice([1.0, 0.3]))),
    )  # fmt: skip
    whole = layer_bytes * layers
    room = tuple(float(whole * rng.uniform(low, high)) for low, high in ((0.05, 1.5), (0.1, 4), (1, 20)))
    form, slack, tiers = Form(str(rng.choice(list(Form)))), float(rng.uniform(0.7, 1)), rng.integers(1, 4, 2)
    options = Options(form, slack, int(tiers[0]), int(tiers[1]))
    micro, num = int(rng.choice([1, 4, 8, 32, 48])), int(rng.integers(1, 9))
    return CostModel(sizes, work, TieredMachine(TIERS, room, rates(), rates()), micro, num, options)


def grid_best(model: CostModel, step: float) -> float:
    """The least seconds of a block over all placements whose shares are multiples of `step`; infinity if none fits.

    Attention of what is beyond the first tier is computed on the second, or nothing of it.
    """
    tiers, count, options = model.num_tiers, round(1 / step), model.options
    points = np.array([each for each in itertools.product(range(count + 1), repeat=tiers) if sum(each) == count]) * step
    cached, hidden = (
        points[np.all(points[:, most:] == 0, axis=1)] for most in (options.cache_tiers, options.hidden_tiers)
    )
    phases = [[*bounds.values()] for bounds in (model.prefill_bounds(), model.decode_bounds())]
    needs = [
        (row, capacity * options.slack * (1 + 1e-12))
        for rows, capacity in zip(model.memory().values(), model.machine.capacities, strict=True)
        for row in rows
    ]

    def value(expression: np.ndarray, weights: np.ndarray, far: float) -> np.ndarray:
        """f64 [cached, hidden]"""
        of_weights, of_cache, of_hidden = (expression[tiers * kind : tiers * (kind + 1)] for kind in Kind)
        of_cached = cached @ of_cache + far * expression[-2] * (1 - cached[:, 0])
        return weights @ of_weights + expression[-1] + of_cached[:, None] + hidden @ of_hidden

    least = np.inf
    for place in itertools.product(points, (0.0, 1.0) if tiers == 3 else (0.0,)):
        fits = np.all([value(row, *place) <= limit for row, limit in needs], axis=0)
        prefill, decode = (np.max([value(bound, *place) for bound in bounds], axis=0) for bounds in phases)
        seconds = prefill + (model.workload.output_tokens - 1) * decode
        least = float(seconds[fits].min(initial=least))
    return least * model.sizes.num_layers


def check_against_grid(seed: int, step: float) -> bool:
    """Whether any placement fits."""
    model = random_model(np.random.default_rng(seed))
    policy, found = best_placement(model), grid_best(model, step)
    if policy is None:
        assert found == np.inf, f"seed {seed}: the grid has a placement of {found} s"
        assert lacks_of(model), f"seed {seed}: nothing fits, and nothing is lacking"
        return False
    said = predict(model, policy)
    head = model.head_seconds() * model.workload.output_tokens
    assert said.seconds - head <= found * (1 + 1e-6) + 1e-9, f"seed {seed}: {said.seconds - head} s, the grid {found} s"
    for tier, capacity in zip(model.machine.tiers, model.machine.capacities, strict=True):
        assert said.memory[tier] < capacity * model.options.slack + 1, f"seed {seed}: {tier} is too small"
    return True


def test_the_program_is_at_least_as_good_as_every_point_of_a_grid() -> None:
    fits = [check_against_grid(seed, 0.1) for seed in range(tries(40))]
    assert any(fits) and not all(fits)


@full_only("a second a model; the coarse grid covers more of them")
def test_the_program_is_at_least_as_good_as_every_point_of_a_fine_grid() -> None:
    fits = [check_against_grid(seed, 0.05) for seed in range(10)]
    assert any(fits)


def test_throughput_has_several_maxima_and_the_search_finds_the_highest() -> None:
    def model_of(micro_batch: int, num_batches: int) -> CostModel:
        return cost_model(OPT_30B, WORK, micro_batch, num_batches, ROOM, loose(1.0))

    sizes = list(itertools.product((4, 16, 48, 64), range(1, 9)))
    found = search(lambda *size: placed(model_of(*size)), sizes)
    chosen = best(found)
    assert chosen is not None
    assert chosen.prediction.throughput == max(each.prediction.throughput for each in found)
    for micro_batch, num_batches in sizes:
        policy = best_placement(model_of(micro_batch, num_batches))
        if policy is not None:
            assert predict(model_of(micro_batch, num_batches), policy).throughput <= chosen.prediction.throughput


def test_the_search_goes_on_where_throughput_falls() -> None:
    rates, near = {(48, 1): 5.0, (48, 2): 4.0, (48, 3): 6.0}, percents(100, 0, 0)

    def rated(*size: int) -> PlacedBlock:
        return PlacedBlock(OffloadPolicy(*size, near, near, near), Prediction(rates[size], 0.0, 0.0, {}, {}, ()))

    found = best(search(rated, rates))
    assert found is not None and found.policy.num_batches == 3
    assert 48 in MICRO_BATCHES, "the paper's for OPT-30B"


def test_throughput_rises_with_micro_batches_until_memory_limits() -> None:
    blocks = search(
        lambda *size: placed(cost_model(OPT_30B, WORK, *size, ROOM, loose(1.0))), [(48, count) for count in range(1, 9)]
    )
    rates = [each.prediction.throughput for each in blocks]
    assert len(rates) == 8 and rates[:4] == sorted(rates[:4])
    assert rates[3] == pytest.approx(7.379, rel=1e-3) and max(rates[4:]) < 5.6


def test_a_size_that_the_solver_gives_up_on_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(micro_batch: int, num_batches: int) -> PlacedBlock | None:
        return placed(cost_model(OPT_30B, WORK, micro_batch, num_batches, ROOM))

    def gives_up(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(status=4, message="numerical difficulties", x=None)

    linprog, calls = scipy.optimize.linprog, itertools.count()
    # Each size is tried with and without presolve.
    monkeypatch.setattr(scipy.optimize, "linprog", lambda *a, **b: (gives_up if next(calls) < 2 else linprog)(*a, **b))
    assert [each.policy.micro_batch for each in search(found, [(4, 1), (8, 1), (16, 1)])] == [8, 16]
    monkeypatch.setattr(scipy.optimize, "linprog", gives_up)
    with pytest.raises(PlanError, match="not solved: numerical difficulties"):
        search(found, [(4, 1)])


def test_two_tiers_are_enough() -> None:
    """A machine without a GPU: memory computes, the disk holds the rest."""
    rates = Rates((TierLink(Traffic.alike(2e9), Traffic.alike(1e9)),), 1e11, 1e11)
    sizes = Sizes(10, 100.0e6, 1000.0, 2000.0, 1e8, 4000.0)
    machine = TieredMachine(TIERS[1:], (600e6, 10e9), rates, rates)
    model = CostModel(sizes, BlockWorkload(64.0, 16.0), machine, 4, 1)
    policy = best_placement(model)
    assert policy is not None
    # Two layers of what is loaded are in memory beside the homes: 1000 w + 200 (1 - w) MB.
    assert policy.weights.shares[0] == pytest.approx(0.5, abs=0.01)
    assert policy.attended == 0
    said = predict(model, policy)
    assert said.binding == ("prefill: compute", "decode: disk to cpu", "memory: cpu")
    assert said.stages["decode"]["disk to cpu"] == pytest.approx(policy.weights.shares[1] * 100e6 / 2e9, rel=1e-2)


def test_shares_are_no_percentages() -> None:
    assert percents(20, 80, 0) == Split((Share(0.2), Share(0.8), Share(0.0)))
    assert percent(Share(0.25)) == "25 %"
    for wrong in ((20.0, 80.0, 0.0), (0.5, 0.4, 0.0), (1.5, -0.5, 0.0), (float("nan"), 1.0, 0.0)):
        with pytest.raises(ConfigError, match="add up to"):
            Split(tuple(map(Share, wrong)))
    split = Split((Share(0.25), Share(0.75), Share(0.0)))
    assert Split.read(json.loads(json.dumps(split.named(TIERS))), TIERS, "weights") == split
    assert Split.read({"cpu": 1}, TIERS, "weights") == Split((Share(0.0), Share(1.0), Share(0.0)))
    with pytest.raises(ConfigError, match="there is no tier 'ram'"):
        Split.read({"ram": 1}, TIERS, "weights")
    with pytest.raises(ConfigError, match="numbers from 0 to 1"):
        Split.read({"cpu": True}, TIERS, "weights")
