"""DistServe's placement algorithms: which instances serve most of a model's requests per GPU or machine.

Knows divisions of instances and their rates; the goodput of a division and an upper bound of it are callables. An
option is what is chosen as one: an instance with a division, or a pair of them.

    apart  prompts and decoding on different instances that are searched for separately (Algorithm 1)
    pairs  the same, but caches stay within machines: pairs are searched for as one (Algorithm 2)
    mixed  instances that do both

With a wanted rate, each algorithm takes the option with the best goodput per unit and as many of it as reach the rate.
For a rate that a few instances serve, another option may do with fewer units, because instances are whole. Without a
rate, it looks for the instances with which the whole cluster serves most.

A cluster of several machines without GPUs is one of Ray's, where all instances have as many cores and as much memory:
see `quire.cluster.placements`. There each number of cores is searched by itself.

Source: DistServe, arXiv 2401.09670, section 4. Ours differs: the second form is new; options are tried in the order of
an upper bound, and those that cannot win are skipped; an option whose goodput is searched for has served the rate with
which it would win; every option that is not taken has a reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.errors import QuireError
from quire.placement.cluster_file import ClusterSpec
from quire.placement.divisions import Division, Needs, Option, Role, degrees, divisions, pairs
from quire.placement.packing import ROUNDING, fit, mix, most, replicas
from quire.placement.placement_file import Instances, Placement, Predicted
from quire.placement.rejected import Reason, Rejected
from quire.planning.goodput import Goodput, Verdict
from quire.planning.search import Search

ALGORITHMS = ("apart", "pairs", "mixed")

NO_ROOM = "the cluster has no room for an instance of each role; plan for mixed instances"

JUST_BELOW = 1 - 1e-6
"""Of the rate with which an option would win: an option with this goodput is tried."""

ORDER = "of equals the one with fewer slots, and then with fewer stages, is taken"


class PlacementError(QuireError):
    """No instances serve the requests. The message says what the best of them lacks, and what would help."""


Progress = Callable[[int, int, Option], None]
"""Called with the number of options that are done, the number of all, and the option that was done last."""


class Rough(NamedTuple):
    """Rough goodputs, and the progress of the search with them: see PlacementTask."""

    goodput_of: Callable[[Option], Goodput]
    serves: Callable[[Option, float], bool]
    progress: Progress = lambda num_done, num_options, option: None


@dataclass(frozen=True)
class PlacementTask:
    """What is searched for, and with what.

    goodput_of  goodput of one instance or pair, in requests/s; of an instance that only computes prompts or only
                decodes, with regard to its own latency target
    rate        wanted requests/s; None: as many as the cluster can serve
    bound_of    requests/s per unit that an option never exceeds; infinite: no option is skipped
    serves      whether an option serves a rate in requests/s: one simulation, where `goodput_of` takes many. None: all
                goodputs are searched for
    rough       the same two, quickly and roughly: what a search with these takes is tried first, so that one simulation
                rules out most others. None: options are tried by their bounds alone
    why_unknown  why the latencies of an option are not known, so that it does not fit; empty if they are
    seconds     for the search. One option of each role is tried in any case, and one that is being tried when the time
                is over is finished
    clock       seconds from any beginning
    progress    see Progress
    options_of  settings of an instance's engine, by key
    """

    cluster: ClusterSpec
    needs: Needs
    goodput_of: Callable[[Option], Goodput]
    rate: float | None = None
    bound_of: Callable[[Option], float] = lambda option: math.inf
    serves: Callable[[Option, float], bool] | None = None
    rough: Rough | None = None
    why_unknown: Callable[[Option], str] = lambda option: ""
    seconds: float = math.inf
    clock: Callable[[], float] = lambda: 0.0
    progress: Progress = lambda num_done, num_options, option: None
    options_of: Callable[[Division], Mapping[str, Any]] = lambda division: {}

    def __post_init__(self) -> None:
        assert self.rate is None or 0 < self.rate < math.inf, f"a rate of {self.rate}"

    def cost(self, option: Option) -> float:
        """Units that an option takes."""
        return option.num_slots / self.cluster.slots_of_unit


def place(task: PlacementTask, algorithm: str) -> Placement:
    """The best placement by one of ALGORITHMS. Raises PlacementError.

    The predicted attainment of roles apart is the product of both: the share if they miss their targets independently.
    """
    assert algorithm in ALGORITHMS, algorithm
    cluster, layers = task.cluster, task.needs.num_layers
    if algorithm == "pairs":
        return _placed(task, [pairs(cluster, layers)], algorithm)
    if algorithm == "mixed":
        return _placed(task, [divisions(cluster, layers, Role.MIXED)], algorithm)
    found = _placed(task, [divisions(cluster, layers, role) for role in (Role.PREFILL, Role.DECODE)], algorithm)
    if cluster.is_fast:
        return found
    told = (
        "caches cross a network between machines that is not fast (network.fast), where transfers may wait for those of"
        " other instances, which the goodput does not know; pairs keep them within machines"
    )
    return dataclasses.replace(found, warnings=(told, *found.warnings))


def _placed(task: PlacementTask, roles: Sequence[Sequence[Option]], algorithm: str) -> Placement:
    """The best placement of options, one list for each role. Raises PlacementError."""
    cluster = task.cluster
    if cluster.has_gpus or cluster.nodes.count == 1:
        return _walk(task, roles).placement(algorithm)
    alike = [
        [[option for option in options if _cores(option) == {size}] for options in roles] for size in degrees(cluster)
    ]
    alike = [lists for lists in alike if all(lists)]
    unequal = [option for options in roles for option in options if len(_cores(option)) > 1]
    task = dataclasses.replace(task, seconds=task.seconds / max(1, len(alike)))
    rejected = [Rejected(option, Reason.UNFIT, "instances on several machines have equal cores") for option in unequal]
    found, errors = list[tuple[_Walk, Placement]](), list[tuple[bool, PlacementError]]()
    for lists in alike:
        walk = _walk(task, lists)
        try:
            placement = walk.placement(algorithm)
        except PlacementError as failed:
            errors.append((any(phase.tried for phase in walk.phases), failed))
            known = [each.option for each in walk.rejected]
            others = [option for options in lists for option in options if option not in known]
            rejected += [*walk.rejected, *(Rejected(option, Reason.MISSES, str(failed)) for option in others)]
        else:
            found.append((walk, placement))
            rejected += placement.rejected
    if not found:
        # Targets that were missed tell more than options that do not fit, and large instances more than small ones.
        raise max(reversed(errors), key=lambda each: each[0], default=(False, PlacementError(NO_ROOM)))[1]

    def worth(each: tuple[_Walk, Placement]) -> tuple[bool, float, float]:
        said = each[1].predicted
        return said.fits, 0.0 if task.rate is None else -said.cost, said.rate

    best = max(found, key=worth)
    for walk, placement in found:
        if walk is not best[0]:
            said, taken = placement.predicted, best[1].predicted
            told = (
                f"{said.rate:.4g} requests/s on {said.cost:.4g} {said.unit}s, but {taken.rate:.4g} on {taken.cost:.4g}"
            )
            rejected += [
                Rejected(option, Reason.SLOWER, f"{told} with instances of another size", said.rate_per_unit)
                for option in walk.chosen()
            ]
    return dataclasses.replace(best[1], rejected=tuple(rejected))


def _cores(option: Option) -> set[int]:
    """Cores of the instances of an option."""
    return {each.cores for each in option.divisions}


class _Phase:
    """The options of which a placement takes one.

    left       not tried, by decreasing upper bound
    bounds     the upper bounds; of those that `falls_short` has tested, the rate that they did not serve
    short      the rate in requests/s that an option did not serve
    tried      the goodput of the others
    best       the one with the best goodput per unit; None if no goodput is above 0
    best_rate  its requests/s per unit; 0 if there is none
    """

    def __init__(self, task: PlacementTask, options: Sequence[Option]) -> None:
        self.task = task
        self.bounds = {option: task.bound_of(option) for option in options}
        self.left = list(options)
        self._sort()
        self.short: dict[Option, float] = {}
        self.tried: dict[Option, Goodput] = {}
        self.best: Option | None = None
        self.best_rate = 0.0

    def try_one(self, option: Option) -> None:
        """Tries an option that is left."""
        self.left.remove(option)
        self.tried[option] = self.task.goodput_of(option)
        rate = self.rate(option)
        is_first_equal = rate == self.best_rate and self.best is not None and option.order < self.best.order
        if rate > self.best_rate or is_first_equal:
            self.best, self.best_rate = option, rate

    def falls_short(self, needed: float) -> bool:
        """Whether the option with the highest bound does not serve a rate per unit. Then this is its bound."""
        option, rate = self.left[0], needed * JUST_BELOW
        of_one = rate * self.task.cost(option)
        if self.task.serves is None or not 0 < rate < self.bounds[option] or self.task.serves(option, of_one):
            return False
        self.short[option], self.bounds[option] = of_one, rate
        self._sort()
        return True

    def _sort(self) -> None:
        self.left.sort(key=lambda option: (-self.bounds[option], option.order))

    def rate(self, option: Option) -> float:
        """Requests/s per unit of an option that was tried."""
        return self.tried[option].rate / self.task.cost(option)

    @property
    def ceiling(self) -> float:
        """An upper bound of the requests/s per unit of any option."""
        return max(self.best_rate, self.bounds[self.left[0]] if self.left else 0.0)


class _Walk(Search[Option], ABC):
    """Tries options until none that is left can win, or the time is over.

    Each phase tries its options by decreasing bound. Phases take turns, so that a budget is spent on all of them. One
    whose next option has fallen short comes last: it is left out as soon as the others' options have, too.
    """

    def __init__(self, task: PlacementTask, roles: Sequence[Sequence[Option]]) -> None:
        super().__init__(clock=task.clock)
        self.task = task
        self.roles = roles
        self.phases = [_Phase(task, self._admit(options)) for options in roles]
        self._num_options = sum(len(phase.left) for phase in self.phases)
        self.deadline = task.clock() + task.seconds
        self._num_done = 0

    @abstractmethod
    def excluded(self, phase: _Phase, option: Option) -> str | None:
        """Why an option that was not tried cannot be part of the best placement; None if it may be."""

    @abstractmethod
    def needed(self, phase: _Phase) -> float:
        """Requests/s per unit with which another option would be part of the best placement, with the best partner
        that was tried; 0 if that is not known.
        """

    @abstractmethod
    def learn(self, phase: _Phase, option: Option) -> None:
        """Takes note of an option that was tried and has a goodput."""

    @abstractmethod
    def chosen(self) -> dict[Option, int]:
        """The options of the placement and their numbers of instances or pairs. Raises PlacementError."""

    @abstractmethod
    def against(self, phase: _Phase, option: Option) -> str:
        """Why an option that was tried and has a goodput is not part of the placement."""

    def placement(self, algorithm: str) -> Placement:
        """Walks, and returns the best placement. Raises PlacementError."""
        self._try_likely()
        self._try_all()
        stuck = [phase for phase in self.phases if phase.best is None]
        if stuck:
            raise self._failed(min(stuck, key=lambda phase: len(phase.left)))
        counts = self.chosen()
        for phase in self.phases:
            self._explain(phase, counts)
        if untried := sum(each.why is Reason.UNTRIED for each in self.rejected):
            self.warnings.append(f"{untried} of {self._num_options} options were not tried: the time was over")
        goodputs = {option: phase.tried[option] for phase in self.phases for option in counts if option in phase.tried}
        for option, goodput in goodputs.items():
            self.warnings += [f"{option}: {doubt}" for doubt in goodput.doubts]
        cluster = self.task.cluster
        rate = min(count * goodputs[option].rate for option, count in counts.items())
        cost = sum(count * option.num_slots for option, count in counts.items()) / cluster.slots_of_unit
        attainment = math.prod(each.attainment for each in goodputs.values())
        predicted = Predicted(rate, cost, cluster.unit, rate / cost, attainment, fit(cluster, counts))
        instances = tuple(
            Instances(division.role.value, count, division.tp, division.pp, dict(self.task.options_of(division)))
            for option, count in counts.items()
            for division in option.divisions
        )
        return Placement(
            instances, predicted, tuple(self.rejected), tuple(self.warnings), made={"algorithm": algorithm}
        )

    def _failed(self, phase: _Phase) -> PlacementError:
        """The error of a phase without a goodput: what the most promising option lacks."""
        if phase.tried:
            best = max(phase.tried, key=lambda option: phase.tried[option].attainment)
            untried = f"{len(phase.left)} options were not tried in time; " if phase.left else ""
            return PlacementError(
                f"no option meets the latency targets; the best is {best}: {_missed(phase.tried[best])}; {untried}raise"
                " slo.ttft or slo.tpot, or plan for faster machines"
            )
        if not self.rejected:
            return PlacementError(NO_ROOM)
        largest = max(self.rejected, key=lambda each: (self.task.needs.divides(each.option), each.option.num_slots))
        lacks_room = self.task.needs.lack(largest.option, self.task.cluster) is not None
        help_ = (
            "; plan for machines with more memory, or make the cache smaller with cache.codec, retain.budget or"
            " model.max_context"
        )
        return PlacementError(f"no option fits; {largest.option}: {largest.reason}{help_ * lacks_room}")

    def _admit(self, options: Sequence[Option]) -> list[Option]:
        found = []
        for option in options:
            lack = self.task.needs.lack(option, self.task.cluster) or self.task.why_unknown(option)
            if lack:
                self.reject(option, Reason.UNFIT, lack)
            else:
                found.append(option)
        return found

    def _try_likely(self) -> None:
        """Tries what a rough search takes, which has half the time."""
        task = self.task
        if task.rough is None:
            return
        rough = dataclasses.replace(task, **task.rough._asdict(), rough=None, seconds=task.seconds / 2)
        walk = type(self)(rough, self.roles)
        walk._try_all()
        likely: Iterable[Option] = ()
        with contextlib.suppress(PlacementError):
            likely = walk.chosen()
        for option in likely:
            self._try(next(each for each in self.phases if option in each.left), option)

    def _try_all(self) -> None:
        while all(phase.left or phase.best for phase in self.phases):
            waiting = [phase for phase in self.phases if phase.left and not self.excluded(phase, phase.left[0])]
            phase = min(
                waiting, key=lambda each: (each.left[0] in each.short, len(each.tried) + len(each.short)), default=None
            )
            if phase is None or (phase.tried and self.is_over(self.deadline)):
                return
            if not phase.falls_short(self.needed(phase)):
                self._try(phase, phase.left[0])

    def _try(self, phase: _Phase, option: Option) -> None:
        phase.try_one(option)
        if phase.rate(option) > phase.bounds[option] * (1 + ROUNDING):
            self.warnings.append(
                f"{option}: its goodput of {self._per_unit(phase.rate(option))} is above its upper bound of"
                f" {phase.bounds[option]:.4g}, so options may have been skipped that are better"
            )
        if phase.rate(option) > 0:
            self.learn(phase, option)
        self._done(option)

    def _explain(self, phase: _Phase, counts: Mapping[Option, int]) -> None:
        for option, goodput in phase.tried.items():
            if goodput.rate <= 0:
                self.reject(option, Reason.MISSES, _missed(goodput), 0.0)
            elif option not in counts:
                more = "at least " if goodput.verdict is Verdict.UNBOUNDED else ""
                reason = f"{more}{self._per_unit(phase.rate(option))}: {self.against(phase, option)}"
                self.reject(option, Reason.SLOWER, reason, phase.rate(option))
        for option in phase.left:
            excluded = self.excluded(phase, option)
            if excluded is not None:
                rate = phase.short.get(option)
                tested = "" if rate is None else f"it misses the latency targets at {rate:.4g} requests/s: "
                self.reject(option, Reason.BOUND, tested + excluded)
            else:
                assert self.task.seconds < math.inf, f"{option} was left out"
                over = f"the search's {self.task.seconds:.4g} s were over before it was tried"
                self.reject(option, Reason.UNTRIED, over)
            self._done(option)

    def _done(self, option: Option) -> None:
        self._num_done += 1
        self.task.progress(self._num_done, self._num_options, option)

    def _per_unit(self, rate: float) -> str:
        return f"{rate:.4g} requests/s per {self.task.cluster.unit}"


class _PerUnit(_Walk):
    """The option with the best goodput per unit in each phase, and as many of it as the wanted rate needs."""

    def excluded(self, phase: _Phase, option: Option) -> str | None:
        """See _Walk: a bound that equals the best goodput may still win, by its order."""
        if phase.bounds[option] >= phase.best_rate * (1 - ROUNDING):
            return None
        return f"at most {self._per_unit(phase.bounds[option])}, but {phase.best} has {phase.best_rate:.4g}"

    def needed(self, phase: _Phase) -> float:
        """See _Walk."""
        return phase.best_rate

    def learn(self, phase: _Phase, option: Option) -> None:
        """See _Walk: phases know their best."""

    def chosen(self) -> dict[Option, int]:
        """See _Walk."""
        assert self.task.rate is not None
        best = [(phase, phase.best) for phase in self.phases]
        return {option: replicas(self.task.rate, phase.tried[option].rate) for phase, option in best if option}

    def against(self, phase: _Phase, option: Option) -> str:
        """See _Walk."""
        if phase.rate(option) == phase.best_rate:
            return f"no more than {phase.best}; {ORDER}"
        less = 1 - phase.rate(option) / phase.best_rate
        return f"{less:.1%} less than {phase.best}, which has {phase.best_rate:.4g}"


@dataclass(frozen=True)
class _Filling:
    """Instances that fill the cluster as well as they can."""

    rate: float
    counts: dict[Option, int]

    @property
    def order(self) -> tuple[Any, ...]:
        """The best filling has the smallest order: most requests/s, then fewest slots."""
        slots = sum(count * option.num_slots for option, count in self.counts.items())
        return -self.rate, slots, [option.order for option in self.counts]

    def __str__(self) -> str:
        return ", ".join(f"{count} x {option}" for option, count in self.counts.items())


class _Whole(_Walk):
    """The instances with which the cluster serves most: with roles apart, min(n * prefill's, m * decode's goodput).

    fillings  the best filling that each option is part of
    best      the best of them; None so far if there is none
    """

    def __init__(self, task: PlacementTask, roles: Sequence[Sequence[Option]]) -> None:
        super().__init__(task, roles)
        self.fillings: dict[Option, _Filling] = {}
        self.best: _Filling | None = None

    def excluded(self, phase: _Phase, option: Option) -> str | None:
        """See _Walk.

        An option and its partners share the units. With upper bounds b and d per unit, they serve at most
        units / (1 / b + 1 / d): then both roles are equally fast.
        """
        seconds = [_seconds(phase.bounds[option])]
        seconds += [_seconds(other.ceiling) for other in self.phases if other is not phase]
        ceiling = self.task.cluster.num_units / sum(seconds) if sum(seconds) else math.inf
        if self.best is None or ceiling >= self.best.rate * (1 - ROUNDING):
            return None
        return f"the cluster serves at most {ceiling:.4g} requests/s with it, but {self.best.rate:.4g} with {self.best}"

    def needed(self, phase: _Phase) -> float:
        """See _Walk: from the equation of `excluded`."""
        if self.best is None:
            return 0.0
        others = sum(_seconds(other.best_rate) for other in self.phases if other is not phase)
        seconds = self.task.cluster.num_units / self.best.rate - others
        return 1 / seconds if seconds > 0 else 0.0

    def learn(self, phase: _Phase, option: Option) -> None:
        """See _Walk: combines the option with all partners that were tried."""
        if len(self.phases) == 1:
            count = most(self.task.cluster, option)
            self._note(_Filling(count * phase.tried[option].rate, {option: count}))
            return
        prefill, decode = self.phases
        firsts = [option] if phase is prefill else prefill.tried
        seconds = [option] if phase is decode else decode.tried
        for first, second in itertools.product(firsts, seconds):
            assert isinstance(first, Division) and isinstance(second, Division)
            rates = prefill.tried[first].rate, decode.tried[second].rate
            rate, *counts = mix(self.task.cluster, first, rates[0], second, rates[1])
            if rate:
                self._note(_Filling(rate, dict(zip((first, second), counts, strict=True))))

    def _note(self, filling: _Filling) -> None:
        for option in filling.counts:
            known = self.fillings.get(option)
            if known is None or filling.order < known.order:
                self.fillings[option] = filling
        if self.best is None or filling.order < self.best.order:
            self.best = filling

    def chosen(self) -> dict[Option, int]:
        """See _Walk."""
        if self.best is None:
            raise PlacementError(NO_ROOM)
        return self.best.counts

    def against(self, phase: _Phase, option: Option) -> str:
        """See _Walk."""
        assert self.best is not None
        own = self.fillings.get(option)
        if own is None:
            return "it leaves no room for an instance of the other role"
        if own.rate == self.best.rate:
            return f"the cluster serves no more with {own} than with {self.best}; {ORDER}"
        return f"the cluster serves {own.rate:.4g} requests/s with {own}, but {self.best.rate:.4g} with {self.best}"


def _walk(task: PlacementTask, roles: Sequence[Sequence[Option]]) -> _Walk:
    return _Whole(task, roles) if task.rate is None else _PerUnit(task, roles)


def _seconds(rate: float) -> float:
    return 1 / rate if rate else math.inf


def _missed(goodput: Goodput) -> str:
    return goodput.doubts[0] if goodput.doubts else "no rate meets the latency targets"
