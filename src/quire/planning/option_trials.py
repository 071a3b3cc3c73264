"""What a placement is searched with: the goodput and the upper bound of its options, by simulation.

An option is an instance that computes prompts, one that decodes, one that does both, or a pair: see
`quire.placement.divisions`. `OnGpus` makes them from data sheets, `OnCores` from latency models of this machine's kind.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from quire.cache.ledger import PAGE_TOKENS
from quire.config import ClusterConfig, EngineConfig
from quire.engine.footprint import footprint
from quire.errors import ConfigError
from quire.placement.cluster_file import ClusterSpec
from quire.placement.divisions import Division, Needs, Option, Pair, Role
from quire.placement.placement_file import Instances, Placement
from quire.planning.attains import Attains, asked_of, bound_of, find_goodput
from quire.planning.bounds import RequestStats, joint_bound
from quire.planning.goodput import ROUNDING, Goodput
from quire.planning.placement import PlacementError
from quire.simulation.candidate import Candidate, InstanceGroup, Maker
from quire.simulation.hardware import Target, check_modelled
from quire.simulation.load import Load
from quire.simulation.parts import Parts, seconds_per_token
from quire.simulation.pool import InProcess, Pool
from quire.simulation.queue_check import QueueCheck, queue_check
from quire.simulation.run import SimulationRun, quickly
from quire.simulation.setup import LocalModel, Setup
from quire.timing.latency import Origin
from quire.workload.slo import ANYTHING, Slo

TOLERANCE = 0.03
"""Relative error of the goodput of an option."""

ROUGH = 0.1
"""The same of a rough goodput, which has one seed, few requests and no confirmation."""

LIKELY = 0.8
"""The part of a rough goodput at which the search for the goodput begins: few requests promise too much."""

SEEDS, CONFIRMATIONS = 2, 2
"""Seeds that the goodput of an option is searched with, and fresh ones that confirm it."""


class ModelOnCluster(ABC):
    """A model on the machines of a cluster.

    config   of all instances, with automatic values
    cluster  the machines
    context  tokens of the longest request that an instance takes
    longest  tokens of the longest request of the trace, at most the context
    window   tokens that a token attends to at most; None: all before it
    origin   of the latencies
    """

    origin: Origin

    def __init__(
        self, maker: Maker, config: EngineConfig, cluster: ClusterSpec, longest: int, context: int, window: int | None
    ) -> None:
        self.maker, self.config, self.cluster, self.window = maker, config, cluster, window
        self.context, self.longest = context, min(longest, context)
        self._setups: dict[Option, Setup | ConfigError] = {}

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What the model needs."""

    def options_of(self, division: Division) -> dict[str, Any]:
        """Settings of an instance that differ from the defaults, by key."""
        usual = EngineConfig().to_options()
        given = self.config.to_options()
        return {key: value for key, value in given.items() if value != usual[key] and value is not None}

    def candidate(self, counts: Mapping[Division, int], *, in_pairs: bool = False) -> Candidate:
        """Instances behind a router. counts: of each division."""
        groups = tuple(
            InstanceGroup(each.role, self.config.with_options(self.options_of(each)), count, each.tp, each.pp)
            for each, count in counts.items()
        )
        # Instances on several machines are a Ray cluster's, where those of one machine use TCP, too.
        transport = "shm" if self.cluster.nodes.count == 1 else "tcp"
        between = None if in_pairs or self.cluster.has_gpus else self.cluster.network.between
        return Candidate(groups, ClusterConfig(), transport, between, in_pairs)

    def setup_of(self, option: Option) -> Setup:
        """One instance or pair. Raises ConfigError if its latencies are not known."""
        if option not in self._setups:
            candidate = self.candidate(dict.fromkeys(option.divisions, 1), in_pairs=isinstance(option, Pair))
            try:
                self._setups[option] = self.maker.setup(candidate)
            except ConfigError as error:
                self._setups[option] = error
        found = self._setups[option]
        if isinstance(found, ConfigError):
            raise found
        return found

    def setup(self, placement: Placement) -> Setup:
        """All instances of a placement."""
        counts = Counter[Division]()
        for each in placement.instances:
            counts[self.division_of(each)] += each.count
        return self.maker.setup(self.candidate(counts, in_pairs=placement.in_pairs))

    def division_of(self, instances: Instances) -> Division:
        """What one of a placement's instances is."""
        cores = 0 if self.cluster.has_gpus else int(instances.options["runtime.threads"])
        return Division(Role(instances.role), instances.tp, instances.pp, cores)

    def why_unknown(self, option: Option) -> str:
        """Why the latencies of an option are not known; empty if they are."""
        try:
            self.setup_of(option)
        except ConfigError as error:
            return str(error)
        return ""


class OnGpus(ModelOnCluster):
    """A model on GPUs, by their data sheets. target: with the memory and the links of the cluster's machines."""

    origin = Origin.MODELLED

    def __init__(self, target: Target, config: EngineConfig, cluster: ClusterSpec, longest: int) -> None:
        check_modelled(config)
        super().__init__(target, config, cluster, longest, target.context(config), target.shape.sliding_window)
        self.target = target

    @cached_property
    def needs(self) -> Needs:
        """See ModelOnCluster."""
        shape, target = self.target.shape, self.target
        return Needs(
            shape.num_layers, target.weight_bytes(self.config), self.longest * target.token_bytes(self.config), 0.0,
            num_heads=shape.num_q_heads, num_kv_heads=shape.num_kv_heads,
        )  # fmt: skip


class OnCores(ModelOnCluster):
    """A model on cores of machines like this one, with measured latencies: those of instances with as many threads as
    cores.
    """

    origin = Origin.FITTED

    def __init__(self, model: LocalModel, config: EngineConfig, cluster: ClusterSpec, longest: int) -> None:
        resolved, self.sizes, _ = model.resolved(config)
        super().__init__(model, config, cluster, longest, self.sizes.max_context, model.shape.sliding_window)
        self.num_layers = model.shape.num_layers
        self._beside = footprint(model.shape, resolved, self.sizes).beside

    @cached_property
    def needs(self) -> Needs:
        """See ModelOnCluster."""
        sizes = self.sizes
        return Needs(self.num_layers, sizes.weight_bytes, self.longest * sizes.bytes_per_token, self._beside)

    def options_of(self, division: Division) -> dict[str, Any]:
        """See ModelOnCluster. Weights and cache fill the memory that belongs to the cores."""
        found = {"runtime.threads": division.cores} | super().options_of(division)
        if self.config.cache.memory == "auto":
            sizes = self.sizes
            room = self.cluster.slot_memory * division.cores - sizes.weight_bytes - self._beside
            chunks = self.config.scheduler.max_running * -(-sizes.max_context // PAGE_TOKENS)
            found["cache.memory"] = int(min(room, chunks * (sizes.chunk_bytes + sizes.open_chunk_bytes)))
        return found | {"runtime.threads": division.cores}


@dataclass
class OptionTrials:
    """Goodputs and bounds of options, by simulation. What was found is kept.

    load     of one instance or pair
    slo      targets of the whole; a phase by itself must reach the square root of the share, so that both together
             reach it if they miss independently
    """

    model: ModelOnCluster
    load: Load
    slo: Slo
    seed: int = 0
    pool: Pool = field(default_factory=InProcess)

    def __post_init__(self) -> None:
        self._found: dict[Option, Goodput] = {}
        self._tested: dict[Option, tuple[Attains, float]] = {}  # with the last rate
        self._rough: dict[Option, Goodput] = {}

    @cached_property
    def asked(self) -> RequestStats:
        """What the requests ask for at least."""
        return asked_of(self.load.workload, self.model.config.retain, self.model.window)

    def goodput_of(self, option: Option) -> Goodput:
        """The goodput of one instance or pair, in requests/s. There are enough requests to show a queue that grows."""
        if option not in self._found:
            self._check_work(option)
            ceiling = self._bound(option, ANYTHING)
            rough = self._rough.get(option)
            guess = ceiling / 2 if rough is None or not rough.rate else LIKELY * rough.rate
            attains, guess = self._tested.pop(option, (self._attains(option, guess), guess))
            self._found[option] = find_goodput(
                attains, ceiling, self.seed, SEEDS, CONFIRMATIONS, guess=guess, tolerance=TOLERANCE, probes=()
            )
        return self._found[option]

    def serves(self, option: Option, rate: float) -> bool:
        """Whether an option sustains a rate, by the seeds of the search."""
        if rate > self._bound(option, ANYTHING):
            return False
        seeds = range(self.seed, self.seed + SEEDS)
        attains = self._attains(option, rate)
        attains.groups = (seeds,)
        self._tested[option] = attains, rate
        return fmean(attains(rate, seed) for seed in seeds) >= attains.slo.attainment - ROUNDING

    def rough_goodput_of(self, option: Option) -> Goodput:
        """About the goodput of an option: of few requests, whose queues may not have grown yet."""
        self._check_work(option)
        if option not in self._rough:
            attains, ceiling = self._attains_roughly(option), self._bound(option, ANYTHING)
            self._rough[option] = find_goodput(attains, ceiling, self.seed, 1, 0, tolerance=ROUGH, probes=())
        return self._rough[option]

    def serves_roughly(self, option: Option, rate: float) -> bool:
        """The same for `serves`."""
        attains = self._attains_roughly(option)
        return rate <= self._bound(option, ANYTHING) and attains(rate, self.seed) >= attains.slo.attainment - ROUNDING

    def bound_of(self, option: Option) -> float:
        """Requests/s per GPU or machine that an option never exceeds."""
        cluster = self.model.cluster
        return self._bound(option, self._slo(option)) * cluster.slots_of_unit / option.num_slots

    def warned(self, placement: Placement) -> Placement:
        """The placement with a warning of what is left out."""
        if not self.model.config.tiers.is_on or not placement.count(Role.DECODE):
            return placement
        told = (
            "instances that decode have no tiers in the search, only in the simulation of the whole; what they preempt"
            " takes no time"
        )
        return dataclasses.replace(placement, warnings=(*placement.warnings, told))

    def joint(self, placement: Placement, rate: float, seed: int) -> SimulationRun:
        """All instances of a placement at once, with the router. Each gets about as many requests as by itself."""
        return SimulationRun(self.model.setup(placement), self._whole(placement), rate, seed, quickly)

    def replayed(self, placement: Placement, rate: float, seed: int) -> list[SimulationRun]:
        """The same with the requests and the gaps that were recorded, scaled to the rate, and with as many that are
        drawn. None where that tells nothing: for requests that all arrive at once, and for conversations, of which
        none is under way when a recording begins.
        """
        load = self._whole(placement)
        recorded = load.workload.first(load.count)
        if recorded.has_conversations or math.isinf(recorded.rate):
            return []
        drawn = dataclasses.replace(load, count=len(recorded.arrivals))
        setup = self.model.setup(placement)
        return [
            SimulationRun(setup, each, rate, seed, quickly) for each in (dataclasses.replace(drawn, fitted=None), drawn)
        ]

    def queue_check(self, placement: Placement, seed: int) -> QueueCheck | None:
        """Of an instance for prompts, at half of its part of the predicted rate; None if none has only prompts."""
        instances = next((each for each in placement.instances if each.role == Role.PREFILL), None)
        if instances is None:
            return None
        setup, rate = self.model.setup_of(self.model.division_of(instances)), placement.predicted.rate
        return queue_check(setup, self.load, self._tpot, rate / instances.count / 2, seed)

    def _whole(self, placement: Placement) -> Load:
        """As many requests as the instances of the most numerous role get by themselves."""
        times = max(placement.count(role) for role in Role)
        return dataclasses.replace(self.load, count=self.load.count * times)

    @property
    def _tpot(self) -> float:
        """Seconds per token of answers where nobody decodes."""
        return self.slo.tpot if math.isfinite(self.slo.tpot) else 0.0

    def _check_work(self, option: Option) -> None:
        """Raises PlacementError if an option has nothing to do."""
        if Role.DECODE in _roles(option) and not self.asked.tokens.any():
            raise PlacementError("every answer has one token: nothing decodes; plan with --algorithm mixed")

    def _attains(self, option: Option, rate: float) -> Attains:
        """The share of requests of an option that meet the targets that count for it, at rates up to twice this one."""
        slo = self._slo(option)
        load = self.load.lasting(min(2 * rate, self._bound(option, ANYTHING)), slo)
        first = self.load if load.count > 2 * self.load.count else None
        return Attains(self._simulation(option), load, slo, pool=self.pool, first=first)

    def _attains_roughly(self, option: Option) -> Attains:
        return Attains(self._simulation(option), self.load, self._slo(option), pool=self.pool)

    def _simulation(self, option: Option) -> Callable[[Load, float, int], SimulationRun]:
        """Makes the simulation of a load, a rate and a seed."""
        setup, driver = self.model.setup_of(option), Parts(self._tpot)
        return lambda load, rate, seed: SimulationRun(setup, load, rate, seed, driver)

    def _slo(self, option: Option) -> Slo:
        """The targets that count for an option."""
        alone, roles = math.sqrt(self.slo.attainment), _roles(option)
        if roles == {Role.PREFILL}:
            return Slo(ttft=self.slo.ttft, attainment=alone)
        return Slo(tpot=self.slo.tpot, attainment=alone) if roles == {Role.DECODE} else self.slo

    def _bound(self, option: Option, slo: Slo) -> float:
        """Requests/s of one instance or pair: of its steps, and of its link, if caches are sent."""
        setup = self.model.setup_of(option)
        rate = joint_bound([(each.role, 1, bound_of(each)) for each in setup.replicas], self.asked, slo)
        if _roles(option) == {Role.MIXED}:
            return rate
        num_tokens = float(np.where(self.asked.tokens > 0, self.asked.rows, 0.0).mean())
        seconds = num_tokens * seconds_per_token(setup.replicas[-1], setup.ways)
        return min(rate, 1 / seconds if seconds else math.inf)


def _roles(option: Option) -> set[Role]:
    return {each.role for each in option.divisions}
