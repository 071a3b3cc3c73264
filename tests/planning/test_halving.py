"""The search of `quire plan auto`, with made-up numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from quire.placement.rejected import Reason
from quire.planning.curves import NOTHING, Loss
from quire.planning.goodput import Goodput, Verdict
from quire.planning.halving import BATCH, HalvingSearch, NoPlanError, Rung, Trial, is_open
from quire.planning.points import PlanResult, Room, SettingsPoint, Tried, beats, covers
from quire.planning.space import RUNNING, SearchLimits, Settings, Space
from quire.timing.latency import LatencyModel, Origin

SPACE = Space.of(SearchLimits(cores=2, is_packed=True))
RUNGS = (Rung(10, 0.1, 16), Rung(20, 0.05, 8), Rung(40, 0.02, 4, confirms=True))
GIB = 1 << 30


def chosen(*names: str, space: Space = SPACE) -> Settings:
    """The settings of `first`, but for some choices by their names."""
    choices = {choice.name: choice for tried in space.tried.values() for choice in tried}
    wanted = {choices[name].axis: choices[name] for name in names}
    return Settings(tuple(wanted.get(each.axis, each) for each in space.first.choices))


def test_retention_is_never_covered_by_a_cache_that_keeps_everything() -> None:
    """The same steps take as long, but retention has fewer tokens in them."""
    all_tokens, half = point(seconds=1.0), point("budget 0.5", seconds=1.0)
    assert not covers(SPACE, all_tokens, half) and not covers(SPACE, half, all_tokens)
    assert covers(SPACE, all_tokens, point("g4", seconds=1.0))


def latency(base: float, context: float = 0.0, rows: float = 0.0, **about: Any) -> LatencyModel:
    ranges = {
        "rows": (1.0, 512.0), "prompt_rows": (0.0, 512.0), "prompt_pairs": (0.0, 2e5), "decode_rows": (0.0, 64.0),
        "context": (0.0, 40000.0), "unique": (0.0, 40000.0), "num_prompts": (0.0, 4.0), "share": (0.1, 1.0),
    }  # fmt: skip
    coefficients = {"base": base, "context": context, "rows_from_1": rows}
    return LatencyModel(about, coefficients, (1,), {"within": 0.05}, ranges, counts={"prompt": 500, "decode": 500})


def point(
    *names: str,
    loss: float = 0.0,
    error: float | None = 0.0,
    bound: float = 100.0,
    total: int = GIB,
    tokens: int = 1000,
    seconds: float | None = None,
    origin: Origin = Origin.MEASURED,
) -> SettingsPoint:
    """A point. seconds: of all steps; None: points are not alike, and each is faster in some steps."""
    lost = Loss(math.log1p(loss), error, origin) if loss else NOTHING
    draw = random.Random(str(names)).uniform(1, 2)
    profile = (draw, 1 / draw) if seconds is None else (seconds, 2 * seconds)
    return SettingsPoint(chosen(*names), Room(total // 2, total, tokens), lost, bound, profile)


class Fake:
    """A machine whose points serve what a table says. calls: points by rung; clock: a second for each trial."""

    def __init__(self, rates: Mapping[Settings, float], noise: float = 0.0) -> None:
        self.rates, self.noise, self.now = rates, noise, 0.0
        self.calls: list[tuple[int, list[Settings]]] = []

    def __call__(self, trials: Sequence[Trial], rung: Rung, end: float) -> list[Goodput | None]:
        self.calls.append((rung.requests, [trial.point.settings for trial in trials]))
        found: list[Goodput | None] = []
        for each, _, floor in trials:
            self.now += 1.0
            draw = random.Random(f"{SPACE.name(each.settings)} {rung.requests}").uniform(-1, 1)
            rate = self.rates[each.settings] * each.share**0.1 * (1 + self.noise * draw)
            is_late, is_slow = self.now > end, rate < floor
            none = Goodput(0.0, 0.5, Verdict.INFEASIBLE, confirmed=False)
            found.append(None if is_late else none if is_slow or not rate else Goodput(rate, 0.9))
        return found

    def tried(self, settings: Settings) -> int:
        return sum(asked.count(settings) for _, asked in self.calls)


class Flat(Fake):
    """A machine on which the size of the cache does not matter."""

    def __call__(self, trials: Sequence[Trial], rung: Rung, end: float) -> list[Goodput | None]:
        return [Goodput(self.rates[each.point.settings], 0.9) for each in trials]


def searched(points: Sequence[SettingsPoint], rates: Mapping[Settings, float], **more: Any) -> PlanResult:
    fake = more.pop("fake", None) or Fake(rates)
    settings = {"quality": 0.01, "rungs": RUNGS, "clock": lambda: fake.now, **more}
    return HalvingSearch(SPACE, points, fake, **settings).run()


def rates_of(points: Sequence[SettingsPoint], *rates: float) -> dict[Settings, float]:
    return {each.settings: rate for each, rate in zip(points, rates, strict=True)}


def test_the_most_is_served_by_what_loses_less_than_the_budget() -> None:
    points = [point(), point("nuq4", loss=0.004), point("nuq3", loss=0.02)]
    found = searched(points, rates_of(points, 1.0, 2.0, 3.0))
    assert found.chosen.point.settings == chosen("nuq4") and found.chosen.rate == 2.0
    assert [SPACE.name(each.point.settings) for each in found.frontier] == ["nuq3", "nuq4", "default"]
    assert found.baseline is not None and found.baseline.rate == 1.0


def measured_as(better: SettingsPoint, asked: list[Settings]) -> Any:
    """Measures the loss of these settings. asked: gets those that may still be within the budget."""

    def refine(given: Sequence[SettingsPoint]) -> list[SettingsPoint | None]:
        asked.extend(each.settings for each in given if is_open(each.loss, 0.01))
        return [better if each.settings == better.settings else each for each in given]

    return refine


def test_a_loss_from_few_windows_leaves_one_from_many_and_is_measured_further() -> None:
    few = point("nuq3", loss=0.002, error=None, seconds=0.9)
    many = point("nuq4", loss=0.003, error=0.0005, seconds=1.0)
    points, rates = [point(seconds=2.0), few, many], {chosen(): 1.0, chosen("nuq3"): 3.0, chosen("nuq4"): 2.9}
    assert not covers(SPACE, few, many) and not beats(*(Tried(each, Goodput(3.0, 0.9), 10) for each in (few, many)))
    assert searched(points, rates).chosen.point.settings == chosen("nuq4"), "no window more was read"
    for loss, best in ((0.002, "nuq3"), (0.012, "nuq4")):
        asked: list[Settings] = []
        refine = measured_as(point("nuq3", seconds=0.9, loss=loss, error=0.0005), asked)
        assert searched(points, rates, refine=refine).chosen.point.settings == chosen(best)
        assert {*asked} == {chosen("nuq3")}


def test_the_chosen_settings_wait_for_a_loss_that_may_be_within_the_budget() -> None:
    points = [point(), point("nuq4", loss=0.004), point("nuq3", loss=0.005, error=0.005)]
    num_asked = 0

    def refine(given: Sequence[SettingsPoint]) -> list[SettingsPoint | None]:
        nonlocal num_asked
        num_asked += 1
        # Before the last rung there was no time for it.
        return [point("nuq3", loss=0.006, error=0.001) if len(given) == 1 else each for each in given]

    found = searched(points, rates_of(points, 1.0, 2.0, 3.0), refine=refine)
    assert found.chosen.point.settings == chosen("nuq3") and num_asked == 2


def test_a_smaller_loss_that_is_less_sure_removes_no_other() -> None:
    unsure, sure = point("nuq3", loss=0.004, error=0.005, seconds=0.9), point("nuq4", loss=0.005, seconds=1.0)
    assert not covers(SPACE, unsure, sure)
    points = [point(seconds=2.0), unsure, sure]
    found = searched(points, rates_of(points, 1.0, 3.0, 2.0))
    assert found.chosen.point.settings == chosen("nuq4") and len(found.frontier) == 3


def test_of_equal_goodputs_the_one_with_less_memory_is_chosen() -> None:
    points = [point(), point("nuq4", loss=0.004, total=GIB)]
    small = {0.5: GIB // 2, 0.25: GIB // 4}

    def made(settings: Settings, share: float) -> SettingsPoint | None:
        if share == 1:
            return None
        each = next(each for each in points if each.settings == settings)
        return SettingsPoint(
            each.settings, Room(1, small[share], 10), each.loss, each.bound, each.profile, each.speed, share
        )

    rates = rates_of(points, 1.0, 1.5)
    found = searched(points, rates, made=made)
    # A quarter of the cache serves 0.25 ** 0.1 = 13 % less, half of it 7 % less: more than a tie.
    assert found.chosen.point.share == 1.0
    assert {each.point.share for each in found.frontier if each.point.settings == chosen("nuq4")} == {1.0, 0.5, 0.25}
    flat = searched(points, {}, made=made, fake=Flat(rates))
    assert (flat.chosen.point.settings, flat.chosen.point.share) == (chosen("nuq4"), 0.25)


def test_the_best_settings_are_tried_with_fewer_running_sequences() -> None:
    points = [point(), point("nuq4", loss=0.004), point("nuq3", loss=0.02)]
    fewer = {settings: 3.0 / number for number, settings in enumerate(SPACE.later(chosen("nuq4")), 1)}
    fake = Fake(
        {**dict.fromkeys(SPACE.later(chosen()), 0.5), **dict.fromkeys(SPACE.later(chosen("nuq3")), 1.0), **fewer}
    )
    fake.rates |= rates_of(points, 1.0, 2.0, 1.0)

    def made(settings: Settings, share: float) -> SettingsPoint | None:
        loss = {each.settings.of("codec"): each.loss for each in points}[settings.of("codec")]
        return None if share < 1 else replace(points[0], settings=settings, loss=loss)

    found = searched(points, {}, fake=fake, made=made)
    assert found.chosen.point.settings == SPACE.later(chosen("nuq4"))[0] and found.chosen.rate == 3.0
    assert SPACE.name(found.chosen.point.settings) == f"nuq4, {RUNNING[1]} running"
    assert not any({*asked} & {*fewer} for requests, asked in fake.calls if requests == RUNGS[0].requests)


def test_a_modelled_loss_is_measured_before_its_settings_are_chosen() -> None:
    both = "nuq4", "budget 0.75"
    points = [point(), point("nuq4", loss=0.004), point(*both, loss=0.006, origin=Origin.MODELLED)]
    rates = rates_of(points, 1.0, 2.0, 3.0)
    for loss, best in ((0.008, both), (0.012, ("nuq4",))):
        asked: list[Settings] = []
        found = searched(points, rates, refine=measured_as(point(*both, loss=loss), asked)).chosen.point
        assert found.settings == chosen(*best) and found.loss.origin is Origin.MEASURED
        assert points[2].settings in asked
    unknown = searched(points, rates)
    assert unknown.chosen.point.settings == points[2].settings
    assert any("modelled" in warning for warning in unknown.warnings)


def test_latencies_that_were_measured_meanwhile_are_simulated_again() -> None:
    points = [point(), point("nuq4", loss=0.004, origin=Origin.MODELLED)]
    fake = Fake(rates_of(points, 1.0, 2.0))
    num_asked = 0

    def refine(given: Sequence[SettingsPoint]) -> list[SettingsPoint | None]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:  # before the last rung there was no time
            return list(given)
        fake.rates = {chosen(): 1.0, chosen("nuq4"): 0.5}
        return [point("nuq4", loss=0.004, seconds=3.0)]

    found = searched(points, {}, fake=fake, refine=refine)
    assert found.chosen.point.settings == chosen() and num_asked == 2
    assert next(each.rate for each in found.finalists if each.point.settings == chosen("nuq4")) == 0.5


def test_a_bound_below_what_others_serve_excludes_without_a_trial() -> None:
    others = [point(codec, loss=0.001 * (number + 1)) for number, codec in enumerate(("nuq4", "nuq3", "nuq2"))]
    low = point("g4", loss=0.009, bound=1.5)
    points = [point(), *others, low]
    fake = Fake(rates_of(points, 2.0, 3.0, 3.0, 3.0, 1.4))
    found = searched(points, {}, fake=fake)
    assert fake.tried(chosen("g4")) == 0
    (left,) = (each for each in found.rejected if each.option.settings == chosen("g4"))
    assert left.why is Reason.BOUND and "at most 1.5 requests/s" in left.reason
    assert len(fake.calls[0][1]) == BATCH


def test_what_serves_less_than_others_who_lose_no_more_costs_no_search() -> None:
    points = [point(), *(point(name, loss=0.002) for name in ("nuq4", "nuq3", "nuq2")), point("g4", loss=0.003)]
    fake = Fake(rates_of(points, 2.0, 3.0, 1.0, 1.0, 1.5))
    floors: dict[Settings, float] = {}

    class Noted(Fake):
        def __call__(self, trials: Sequence[Trial], rung: Rung, end: float) -> list[Goodput | None]:
            floors.update({each.point.settings: each.floor for each in trials if rung.requests == 10})
            return super().__call__(trials, rung, end)

    found = searched(points, {}, fake=Noted(fake.rates))
    assert floors[chosen()] == 0.0 and floors[chosen("g4")] == pytest.approx(0.9 * 3.0)
    (left,) = (each for each in found.rejected if each.option.settings == chosen("g4"))
    assert left.why is Reason.SLOWER and "2.7 requests/s" in left.reason


def test_what_is_worse_in_all_that_is_known_is_covered() -> None:
    better, worse = point("nuq4", loss=0.002, seconds=0.9), point("nuq3", loss=0.004, seconds=1.0)
    assert covers(SPACE, better, worse) and not covers(SPACE, worse, better)
    assert covers(SPACE, better, point("nuq3", loss=0.004, seconds=0.9))
    for other in (
        point("nuq3", loss=0.004, seconds=1.0, tokens=2000),
        point("nuq3", loss=0.001, seconds=1.0),
        point("nuq3", loss=0.004, seconds=0.5),
        point("nuq3", loss=0.004, seconds=1.0, total=GIB // 2),
        point("nuq3", "budget 0.5", loss=0.004, seconds=1.0),  # who keeps fewer tokens has more room for others
        point("nuq3", "prefill + decode", loss=0.004, seconds=1.0),
    ):
        assert not covers(SPACE, better, other), other
    fake = Fake(rates_of([point(), better, worse], 1.0, 2.0, 2.0))
    found = searched([point(), better, worse], {}, fake=fake)
    assert fake.tried(worse.settings) == 0
    assert [(each.option.settings, each.why) for each in found.rejected] == [(worse.settings, Reason.COVERED)]


def test_the_best_of_hundreds_survives_the_rungs_of_a_noisy_simulation() -> None:
    draw = random.Random(3)
    points = []
    for settings in SPACE.settings():
        names = [each.name for each in settings.choices if each not in SPACE.first.choices]
        loss = 0.0 if not SPACE.parts(settings) else draw.uniform(0.001, 0.03)
        points.append(point(*names, loss=loss, seconds=draw.uniform(0.5, 2), tokens=draw.randint(500, 2000)))
    rates = {each.settings: draw.uniform(1, 10) for each in points}
    fake = Fake(rates, noise=0.05)
    found = searched(points, {}, fake=fake)
    best = max(rates[each.settings] for each in points if each.loss.is_within(0.01))
    assert rates[found.chosen.point.settings] >= 0.9 * best
    counts = {rung: sum(len(asked) for number, asked in fake.calls if number == rung.requests) for rung in RUNGS}
    assert counts[RUNGS[2]] <= RUNGS[1].keep + 1 < counts[RUNGS[0]]


def test_points_beyond_the_budget_do_not_crowd_out_those_within_it() -> None:
    lossy = [(codec, budget) for codec in ("nuq3", "nuq2", "g4") for budget in ("budget 0.75", "budget 0.5")]
    points = [point(), point("nuq4", loss=0.005)]
    points += [point(*names, loss=0.02 + 0.001 * number) for number, names in enumerate(lossy)]
    rates = rates_of(points, 1.0, 2.0, *(3.0 + number for number in range(len(lossy))))
    found = searched(points, rates, rungs=(Rung(10, 0.1, 4), Rung(20, 0.05, 4)))
    assert found.chosen.point.settings == chosen("nuq4") and len(found.frontier) > 2


def test_the_order_of_points_does_not_matter() -> None:
    draw = random.Random(5)
    points = [point(), *(point(name, loss=0.001 * number) for number, name in enumerate(("nuq4", "nuq3", "g4"), 1))]
    rates = {each.settings: draw.uniform(1, 5) for each in points}
    results = {searched(draw.sample(points, len(points)), rates).chosen.point.settings for _ in range(6)}
    assert len(results) == 1


def test_when_the_time_is_over_something_is_known_and_the_rest_is_named() -> None:
    points = [point(), *(point(name, loss=0.002) for name in ("nuq4", "nuq3", "nuq2", "g4"))]
    fake = Fake(rates_of(points, 1.0, 2.0, 3.0, 4.0, 5.0))
    found = searched(points, {}, fake=fake, deadline=0.5)
    assert found.chosen.rate > 0 and found.chosen.requests == RUNGS[0].requests
    assert {each.why for each in found.rejected} == {Reason.UNTRIED}
    assert any("raise --plan.seconds" in warning for warning in found.warnings)


def test_no_settings_that_meet_the_targets_is_an_error_with_the_best() -> None:
    points = [point(), point("nuq4", loss=0.002)]
    with pytest.raises(NoPlanError, match=r"no settings meet the latency targets; the best are default: 50.0%"):
        searched(points, rates_of(points, 0.0, 0.0))


def test_no_settings_within_the_budget_is_an_error_with_the_least_loss() -> None:
    points = [point("nuq4", loss=0.012), point("nuq3", loss=0.02)]
    with pytest.raises(NoPlanError, match=r"lose at most 1.00%; the least loss is that of nuq4: 1.20%"):
        searched(points, rates_of(points, 1.0, 2.0))


def test_neighbours_differ_in_one_thing_and_say_why_they_lost() -> None:
    points = [
        point(), point("nuq4", loss=0.004), point("nuq4", "budget 0.75", loss=0.006), point("nuq3", loss=0.02),
        point("nuq3", "budget 0.75", loss=0.03), point("nuq4", "prefill + decode", loss=0.004, bound=1.0),
    ]  # fmt: skip
    found = searched(points, rates_of(points, 1.0, 3.0, 2.0, 4.0, 4.0, 0.5))
    assert found.chosen.point.settings == chosen("nuq4")
    told = {SPACE.name(settings): reason for settings, _, reason in found.neighbours(SPACE)}
    assert {*told} == {"default", "nuq4, budget 0.75", "nuq3", "nuq4, prefill + decode"}
    assert "67% less" in told["default"]
    assert "loses 2.00%" in told["nuq3"]
    assert "requests/s" in told["nuq4, budget 0.75"] and "at most 1" in told["nuq4, prefill + decode"]


def test_points_that_are_equal_but_for_a_slab_do_not_beat_each_other() -> None:
    totals = {"nuq4": GIB, "g4": GIB + 999}
    one, other = (Tried(point(name, total=total), Goodput(2.0, 0.9), 10) for name, total in totals.items())
    assert not beats(one, other) and not beats(other, one)
