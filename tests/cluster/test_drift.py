"""When a placement is searched again."""

from __future__ import annotations

import numpy as np
import pytest

from quire.cluster.drift import Patience, Phase, Replanner, Seen, TrafficStats, changes
from quire.errors import ConfigError
from tests.effort import tries

PATIENCE = Patience(seconds=60.0, pause=600.0)
PLANNED = TrafficStats(2.0, 200.0, 100.0, 0.2)


def arrivals(rng: np.random.Generator, begun: float, seconds: float, rate: float, cv: float = 1.0) -> list[float]:
    """Arrivals with gaps of a coefficient of variation; 1: Poisson."""
    gaps = rng.gamma(cv**-2, cv**2 / rate, 20 + int(4 * rate * seconds))
    at = begun + np.cumsum(gaps) - gaps[0] * rng.uniform()
    return [each for each in at.tolist() if each < begun + seconds]


def seen(rng: np.random.Generator, load: TrafficStats) -> Seen:
    """A request of exponential lengths."""
    num_in = 1 + int(rng.exponential(load.mean_in - 1))
    return Seen(num_in, 1 + int(rng.exponential(load.mean_out - 1)), rng.binomial(num_in, load.shared))


def searches(
    replanner: Replanner,
    rng: np.random.Generator,
    begun: float,
    load: TrafficStats,
    windows: int,
    cv: float = 1.0,
    answered: float = 1.0,
) -> list[float]:
    """When searches began during some windows of a load. answered: share of the requests that is answered."""
    found = []
    for number in range(windows):
        for at in arrivals(rng, begun + 60 * number, 60.0, load.rate, cv):
            replanner.note_arrival(at)
            if rng.random() < answered:
                replanner.note(seen(rng, load))
        now = begun + 60 * (number + 1)
        if replanner.tick(now):
            found.append(now)
            replanner.found(1.0, 1.0, now)
    return found


def test_a_longer_prompt_is_searched_for_after_three_windows_and_then_counts_as_planned() -> None:
    rng, replanner = np.random.default_rng(0), Replanner(PLANNED, PATIENCE, 0.0)
    assert not searches(replanner, rng, 0.0, PLANNED, 10)
    longer = TrafficStats(2.0, 2000.0, 100.0, 0.2)
    assert searches(replanner, rng, 600.0, longer, 3) == [780.0]
    assert replanner.planned.mean_in == pytest.approx(2000, rel=0.25) and replanner.phase is Phase.QUIET
    assert not searches(replanner, rng, 780.0, longer, 30), "nothing has changed since"


@pytest.mark.parametrize("seed", range(tries(5)))
@pytest.mark.parametrize("feature", ["rate", "mean_in", "mean_out", "shared"])
def test_a_tenth_more_or_less_in_turn_never_leads_to_a_search(feature: str, seed: int) -> None:
    rng, replanner = np.random.default_rng(seed), Replanner(PLANNED, PATIENCE, 0.0)
    for turn in range(20):
        share = 1 + (0.1 if turn % 2 else -0.1)
        values = {name: getattr(PLANNED, name) for name in ("rate", "mean_in", "mean_out", "shared")}
        values[feature] *= share
        assert not searches(replanner, rng, turn * 300.0, TrafficStats(**values), 5)


@pytest.mark.parametrize("feature,value", [("rate", 4.0), ("mean_in", 600.0), ("mean_out", 30.0), ("shared", 0.7)])
def test_every_feature_is_watched(feature: str, value: float) -> None:
    rng, replanner = np.random.default_rng(1), Replanner(PLANNED, PATIENCE, 0.0)
    values = {name: getattr(PLANNED, name) for name in ("rate", "mean_in", "mean_out", "shared")} | {feature: value}
    assert len(searches(replanner, rng, 0.0, TrafficStats(**values), 4)) == 1


def test_fewer_requests_are_as_planned() -> None:
    rng, replanner = np.random.default_rng(1), Replanner(PLANNED, PATIENCE, 0.0)
    assert not searches(replanner, rng, 0.0, TrafficStats(1.0, 200.0, 100.0, 0.2), 8) and replanner.phase is Phase.QUIET


def test_what_a_placement_serves_counts_as_planned_after_a_search() -> None:
    """Longer prompts at 2 requests/s, of which the present placement serves 3, lead to a search. More of them do not,
    until they are more than it serves.
    """
    rng, replanner = np.random.default_rng(7), Replanner(PLANNED, PATIENCE, 0.0)

    def search(begun: float, rate: float, windows: int) -> int:
        count = 0
        for number in range(windows):
            for at in arrivals(rng, begun + 60 * number, 60.0, rate):
                replanner.note_arrival(at)
                replanner.note(seen(rng, TrafficStats(rate, 2000.0, 100.0, 0.2)))
            if replanner.tick(now := begun + 60 * (number + 1)):
                count += 1
                assert not replanner.found(3.1, 3.0, now)
        return count

    assert search(0.0, 2.0, 3) == 1 and replanner.planned.rate == 3.0
    assert search(900.0, 3.2, 6) == 0
    assert search(1800.0, 5.0, 6) == 1


def test_it_knows_when_the_windows_began_that_differ() -> None:
    rng, replanner = np.random.default_rng(8), Replanner(PLANNED, PATIENCE, 0.0)
    longer = TrafficStats(2.0, 2000.0, 100.0, 0.2)
    searches(replanner, rng, 0.0, PLANNED, 2)
    assert replanner.since == np.inf
    searches(replanner, rng, 120.0, longer, 2)
    assert replanner.since == 120.0
    searches(replanner, rng, 240.0, PLANNED, 1)
    assert replanner.since == np.inf


def test_a_burst_of_two_windows_is_forgotten() -> None:
    rng, replanner = np.random.default_rng(2), Replanner(PLANNED, PATIENCE, 0.0)
    for turn in range(6):
        begun = turn * 240.0
        assert not searches(replanner, rng, begun, TrafficStats(6.0, 200.0, 100.0, 0.2), 2)
        assert replanner.phase is Phase.SUSPECT and "requests/s" in str(replanner.reason[0])
        assert not searches(replanner, rng, begun + 120, PLANNED, 2) and replanner.phase is Phase.QUIET


def test_searches_keep_a_distance_whatever_happens() -> None:
    rng, replanner, found = np.random.default_rng(3), Replanner(PLANNED, PATIENCE, 0.0), list[float]()
    for turn in range(12):  # the load turns round as soon as it was searched for
        load = TrafficStats(2.0, 2000.0 if turn % 2 else 200.0, 100.0, 0.2)
        found += searches(replanner, rng, turn * 240.0, load, 4)
    assert len(found) > 2 and min(np.diff(found)) >= PATIENCE.pause


def test_a_switch_needs_a_gain_and_no_window_counts_meanwhile() -> None:
    replanner = Replanner(PLANNED, Patience(seconds=1.0, windows=1, pause=0.0, requests=2), 0.0)

    def search(begun: float) -> None:
        for number in range(50):
            replanner.note_arrival(begun + number / 50)
            replanner.note(Seen(900 + number, 100, 0))
        assert replanner.tick(begun + 1.0)

    search(0.0)
    assert not replanner.found(1.05, 1.0, 10.0) and replanner.phase is Phase.QUIET
    replanner.planned = PLANNED
    search(10.0)
    assert not replanner.tick(100.0), "it searches"
    assert replanner.found(1.2, 1.0, 100.0) and replanner.phase is Phase.SWITCH
    assert not replanner.tick(200.0), "it switches"
    replanner.switched(200.0)
    assert replanner.phase is Phase.QUIET and replanner.planned.mean_in == pytest.approx(924.5)


def test_a_window_waits_for_requests_but_not_for_ever() -> None:
    rng, replanner = np.random.default_rng(4), Replanner(TrafficStats(0.2, 200.0, 100.0, 0.2), PATIENCE, 0.0)
    found, busier = list[float](), TrafficStats(0.6, 200.0, 100.0, 0.2)
    for number in range(20):
        found += searches(replanner, rng, number * 60.0, busier, 1)
    assert found and found[0] >= 3 * 60, "three windows of fifty requests"
    silent = Replanner(PLANNED, PATIENCE, 0.0)
    for at in (0.0, 1.0):
        silent.note_arrival(at)
        silent.note(Seen(5000, 10, 0))
    assert not silent.tick(1100.0) and silent.phase is Phase.QUIET
    assert not silent.tick(1300.0) and silent.phase is Phase.SUSPECT, "hardly any requests in 20 windows is a change"


def test_few_requests_prove_nothing() -> None:
    answered = [Seen(2000, 100, 0), Seen(20, 100, 0)]
    now = TrafficStats.of([0.0, 1.0], answered, 60.0)
    assert now is not None and not [each for each in changes(PLANNED, now, PATIENCE) if each.feature == "mean_in"]
    assert TrafficStats.of([0.0, 1.0], answered[:1], 60.0) is None and TrafficStats.of([0.0], answered, 60.0) is None


def test_more_requests_than_the_cluster_can_answer_are_a_change() -> None:
    """Ten times as many arrive, and a tenth is answered."""
    rng, replanner = np.random.default_rng(5), Replanner(PLANNED, PATIENCE, 0.0)
    assert len(searches(replanner, rng, 0.0, TrafficStats(20.0, 200.0, 100.0, 0.2), 4, answered=0.1)) == 1


@pytest.mark.parametrize("seed", range(tries(5)))
def test_bursts_are_chance(seed: int) -> None:
    rng, replanner = np.random.default_rng(seed), Replanner(PLANNED, PATIENCE, 0.0)
    assert not searches(replanner, rng, 0.0, PLANNED, 60, cv=3.0)


def test_a_window_does_not_begin_before_the_search_has_ended() -> None:
    """A search of four minutes, after which requests are as they were when it began."""
    rng, replanner, now = np.random.default_rng(6), Replanner(PLANNED, PATIENCE, 0.0), 180.0
    longer = TrafficStats(2.0, 2000.0, 100.0, 0.2)
    for begun in (0.0, 60.0, 120.0):
        for at in arrivals(rng, begun, 60.0, 2.0):
            replanner.note_arrival(at)
            replanner.note(seen(rng, longer))
        assert replanner.tick(begun + 60.0) == (begun == 120.0)
    now += 240.0
    replanner.found(1.0, 1.0, now)
    assert not searches(replanner, rng, now, longer, 3) and replanner.phase is Phase.QUIET


def test_a_load_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="shared is 2"):
        TrafficStats(1.0, 1.0, 1.0, 2.0)
