"""What a placement is searched with: the goodput and the upper bound of its options, by simulation.

An option is an instance that computes prompts, one that decodes, one that does both, or a pair: see
`quire.planning.candidates`. `OnGpus` makes them from data sheets, `OnCores` from latency models of this machine's kind.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from quire.cache.ledger import PAGE_TOKENS
from quire.config import ClusterConfig, EngineConfig
from quire.errors import ConfigError
from quire.planning.bounds import Asked
from quire.planning.candidates import Candidate, Needs, Option, Pair, Role
from quire.planning.cluster_file import ClusterSpec
from quire.planning.goodput import ROUNDING, Goodput
from quire.planning.latency import Origin
from quire.planning.placement import PlacementError
from quire.planning.placement_file import Instances, Placement
from quire.planning.slo import ANYTHING, Slo
from quire.simulation.hardware import Division, Target
from quire.simulation.load import (
    Attains,
    Load,
    Progress,
    Simulation,
    Workers,
    asked_of,
    bound_of,
    find_goodput,
    run_of,
)
from quire.simulation.outcome import Outcome
from quire.simulation.phases import DecodeRun, MixedRun, PairRun, PromptRun, may_skip, seconds_per_token, skipping
from quire.simulation.queue_check import QueueCheck, queue_check
from quire.simulation.setup import PROCESS_BYTES, LocalModel, Replicas, Setup, Ways, setup_of, ways_of

TOLERANCE = 0.03
"""Relative error of the goodput of an option."""

ROUGH = 0.1
"""The same of a rough goodput, which has one seed, few requests and no confirmation."""

LIKELY = 0.8
"""The part of a rough goodput at which the search for the goodput begins: few requests promise too much."""

SEEDS, CONFIRMATIONS = 2, 2
"""Seeds that the goodput of an option is searched with, and fresh ones that confirm it."""


class Maker(ABC):
    """Instances of a model on the machines of a cluster.

    cluster  the machines
    longest  tokens of the longest request
    window   tokens that a token attends to at most; None: all before it
    """

    cluster: ClusterSpec
    longest: int
    window: int | None = None

    @property
    @abstractmethod
    def config(self) -> EngineConfig:
        """Of all instances."""

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What the model needs."""

    @property
    @abstractmethod
    def origin(self) -> Origin:
        """Of the latencies."""

    @abstractmethod
    def replicas(self, candidate: Candidate) -> Replicas:
        """An instance. Raises ConfigError if its latencies are not known."""

    @abstractmethod
    def ways(self, option: Option) -> Ways:
        """Of messages and caches, for instances like this option."""

    @abstractmethod
    def setup(self, placement: Placement) -> Setup:
        """All instances of a placement."""

    def options_of(self, candidate: Candidate) -> Mapping[str, Any]:
        """Settings of an instance that differ from the defaults, by key."""
        usual = EngineConfig().to_options()
        given = self.config.to_options()
        return {key: value for key, value in given.items() if value != usual[key] and value is not None}

    def candidate_of(self, instances: Instances) -> Candidate:
        """What one of a placement's instances is."""
        cores = 0 if self.cluster.has_gpus else int(instances.options["runtime.threads"])
        return Candidate(Role(instances.role), instances.tp, instances.pp, cores)

    def why_unknown(self, option: Option) -> str:
        """Why the latencies of an option are not known; empty if they are."""
        try:
            for each in (option.prefill, option.decode) if isinstance(option, Pair) else (option,):
                self.replicas(each)
        except ConfigError as error:
            return str(error)
        return ""


@dataclass
class OnGpus(Maker):
    """Instances on GPUs, by their data sheets. target: with the memory and the links of the cluster's machines."""

    target: Target
    cluster: ClusterSpec
    longest: int
    origin = Origin.MODELLED

    def __post_init__(self) -> None:
        self._made: dict[Candidate, Replicas] = {}
        self.window = self.target.shape.sliding_window

    @property
    def config(self) -> EngineConfig:
        """See Maker."""
        return self.target.config

    @cached_property
    def needs(self) -> Needs:
        """See Maker."""
        shape, target = self.target.shape, self.target
        request = self.longest * target.token_bytes(target.config)
        return Needs(
            shape.num_layers, target.weight_bytes, request, 0.0, num_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
        )  # fmt: skip

    def replicas(self, candidate: Candidate) -> Replicas:
        """See Maker."""
        if candidate not in self._made:
            (self._made[candidate],) = self._setup([candidate]).replicas
        return self._made[candidate]

    def ways(self, option: Option) -> Ways:
        """See Maker. Caches of a pair stay within machines."""
        parts = (option.prefill, option.decode) if isinstance(option, Pair) else (option,)
        return self._setup(parts, in_pairs=isinstance(option, Pair)).ways

    def setup(self, placement: Placement) -> Setup:
        """See Maker."""
        divisions = [Division(each.role, self.config, each.count, each.tp, each.pp) for each in placement.instances]
        return self.target.setup(divisions, ClusterConfig(), in_pairs=placement.in_pairs)

    def _setup(self, parts: Sequence[Candidate], *, in_pairs: bool = False) -> Setup:
        divisions = [Division(each.role, self.config, 1, each.tp, each.pp) for each in parts]
        return self.target.setup(divisions, ClusterConfig(), in_pairs=in_pairs)


@dataclass
class OnCores(Maker):
    """Instances on cores of machines like this one, with measured latencies.

    model  resolves their configurations; its latencies are those of instances with as many threads as cores
    """

    model: LocalModel
    cluster: ClusterSpec
    longest: int
    origin = Origin.FITTED

    def __post_init__(self) -> None:
        self._made: dict[Candidate, Replicas | ConfigError] = {}
        self.window = self.model.shape.sliding_window

    @property
    def config(self) -> EngineConfig:
        """See Maker."""
        return self.model.base

    @cached_property
    def needs(self) -> Needs:
        """See Maker."""
        sizes = self.model.sizes
        return Needs(
            self.model.shape.num_layers, sizes.weight_bytes, self.longest * sizes.bytes_per_token, PROCESS_BYTES
        )

    def options_of(self, candidate: Candidate) -> Mapping[str, Any]:
        """See Maker. Weights and cache fill the memory that belongs to the cores."""
        found = dict(super().options_of(candidate))
        if self.config.cache.memory == "auto":
            sizes = self.model.sizes
            room = self.cluster.slot_memory * candidate.cores - sizes.weight_bytes - PROCESS_BYTES
            chunks = self.config.scheduler.max_running * -(-sizes.max_context // PAGE_TOKENS)
            found["cache.memory"] = int(min(room, chunks * (sizes.chunk_bytes + sizes.open_chunk_bytes)))
        found.pop("runtime.threads", None)
        return found

    def replicas(self, candidate: Candidate) -> Replicas:
        """See Maker."""
        if candidate not in self._made:
            options = {**self.options_of(candidate), "runtime.threads": candidate.cores}
            try:
                self._made[candidate] = self.model.replicas(candidate.role, self.config.with_options(options))
            except ConfigError as error:
                self._made[candidate] = error
        found = self._made[candidate]
        if isinstance(found, ConfigError):
            raise found
        return found

    def ways(self, option: Option) -> Ways:
        """See Maker."""
        parts = (option.prefill, option.decode) if isinstance(option, Pair) else (option,)
        return self._ways([self.replicas(each) for each in parts], within=isinstance(option, Pair))

    def setup(self, placement: Placement) -> Setup:
        """See Maker."""
        within = placement.in_pairs
        found = [
            dataclasses.replace(self.replicas(self.candidate_of(each)), count=each.count)
            for each in placement.instances
        ]
        return setup_of(found, self._ways(found, within=within), ClusterConfig(), in_pairs=within)

    def _ways(self, replicas: Sequence[Replicas], *, within: bool) -> Ways:
        # Instances on several machines are a Ray cluster's, where those of one machine use TCP, too.
        transport = "shm" if self.cluster.nodes.count == 1 else "tcp"
        ways = ways_of([each.plan.latency for each in replicas], transport)
        return ways.across(None if within else self.cluster.network.between)


@dataclass
class Planner:
    """Goodputs and bounds of options. What was found is kept.

    load     of one instance or pair
    slo      targets of the whole; a phase by itself must reach the square root of the share, so that both together
             reach it if they miss independently
    on_run   is told of each simulation
    """

    maker: Maker
    load: Load
    slo: Slo
    seed: int = 0
    workers: Workers | None = None
    on_run: Callable[[float, int, Outcome], None] = lambda rate, seed, outcome: None
    found: dict[Option, Goodput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tested: dict[Option, tuple[Attains, float]] = {}  # with the last rate
        self._rough: dict[Option, Goodput] = {}

    @cached_property
    def asked(self) -> Asked:
        """What the requests ask for at least."""
        return asked_of(self.load.workload, self.maker.config.retain, self.maker.window)

    def goodput_of(self, option: Option) -> Goodput:
        """The goodput of one instance or pair, in requests/s, of so many requests that a queue that grows shows."""
        if option not in self.found:
            self.found[option] = self._goodput(option)
        return self.found[option]

    def serves(self, option: Option, rate: float) -> bool:
        """Whether an option's goodput is at least so many requests/s, by the seeds of the search."""
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

    def _attains_roughly(self, option: Option) -> Attains:
        return Attains(self._simulation(option, self.load), self._slo(option), workers=self.workers)

    def bound_of(self, option: Option) -> float:
        """Requests/s per GPU or machine that an option never exceeds."""
        cluster = self.maker.cluster
        return self._bound(option, self._slo(option)) * cluster.slots_of_unit / option.num_slots

    def warned(self, placement: Placement) -> Placement:
        """The placement with a warning of what is left out."""
        if not self.maker.config.tiers.is_on or not placement.count(Role.DECODE):
            return placement
        told = (
            "instances that decode have no tiers in the search, only in the simulation of the whole; what they preempt"
            " takes no time"
        )
        return dataclasses.replace(placement, warnings=(*placement.warnings, told))

    def joint(self, placement: Placement, rate: float, seed: int) -> Joint:
        """All instances of a placement at once, with the router. Each gets about as many requests as by itself."""
        return Joint(self.maker.setup(placement), self._whole(placement), rate, seed)

    def replayed(self, placement: Placement, rate: float, seed: int) -> list[Joint]:
        """The same with the requests and the gaps that were recorded, scaled to the rate, and with as many that are
        drawn. None where that tells nothing: for requests that all arrive at once, and for conversations, of which
        none is under way when a recording begins.
        """
        load = self._whole(placement)
        recorded = load.workload.first(load.count)
        if recorded.has_conversations or math.isinf(recorded.rate):
            return []
        drawn = dataclasses.replace(load, count=len(recorded.arrivals))
        setup = self.maker.setup(placement)
        return [Joint(setup, each, rate, seed) for each in (dataclasses.replace(drawn, fitted=None), drawn)]

    def _whole(self, placement: Placement) -> Load:
        """As many requests as the instances of the most numerous role get by themselves."""
        times = max(placement.count(role) for role in Role)
        return dataclasses.replace(self.load, count=self.load.count * times)

    def queue_check(self, placement: Placement, seed: int) -> QueueCheck | None:
        """Of an instance for prompts, at half of its part of the predicted rate; None if none has only prompts."""
        instances = next((each for each in placement.instances if each.role == Role.PREFILL), None)
        if instances is None:
            return None
        option, rate = self.maker.candidate_of(instances), placement.predicted.rate / instances.count / 2
        return queue_check(self.maker.replicas(option), self.maker.ways(option), self.load, self._tpot, rate, seed)

    @property
    def _tpot(self) -> float:
        """Seconds per token of answers where nobody decodes."""
        return self.slo.tpot if math.isfinite(self.slo.tpot) else 0.0

    def _goodput(self, option: Option) -> Goodput:
        self._check_work(option)
        ceiling = self._bound(option, ANYTHING)
        rough = self._rough.get(option)
        guess = ceiling / 2 if rough is None or not rough.rate else LIKELY * rough.rate
        attains, guess = self._tested.pop(option, (self._attains(option, guess), guess))
        return find_goodput(
            attains, ceiling, self.seed, SEEDS, CONFIRMATIONS, guess=guess, tolerance=TOLERANCE, probes=()
        )

    def _check_work(self, option: Option) -> None:
        """Raises PlacementError if an option has nothing to do."""
        has_decoding = isinstance(option, Pair) or option.role is Role.DECODE
        if has_decoding and not self.asked.tokens.any():
            raise PlacementError("every answer has one token: nothing decodes; plan with --algorithm mixed")

    def _attains(self, option: Option, rate: float) -> Attains:
        """The share of requests of an option that meet the targets that count for it, at rates up to twice this one."""
        slo = self._slo(option)
        load = self.load.lasting(min(2 * rate, self._bound(option, ANYTHING)), slo)
        first = self._simulation(option, self.load) if load.count > 2 * self.load.count else None
        return Attains(self._simulation(option, load), slo, workers=self.workers, on_run=self.on_run, first=first)

    def _slo(self, option: Option) -> Slo:
        """The targets that count for an option."""
        alone = math.sqrt(self.slo.attainment)
        if isinstance(option, Pair) or option.role is Role.MIXED:
            return self.slo
        if option.role is Role.PREFILL:
            return Slo(ttft=self.slo.ttft, attainment=alone)
        return Slo(tpot=self.slo.tpot, attainment=alone)

    def _bound(self, option: Option, slo: Slo) -> float:
        """Requests/s of one instance or pair."""
        if isinstance(option, Pair):
            first, second = (bound_of(self.maker.replicas(each)) for each in (option.prefill, option.decode))
            rates = first.prompts(self.asked, slo), second.decoding(self.asked, slo)
            return min(*rates, self._link_bound(option, option.decode))
        bound = bound_of(self.maker.replicas(option))
        if option.role is Role.MIXED:
            return bound.mixed(self.asked, slo)
        rate = bound.prompts if option.role is Role.PREFILL else bound.decoding
        return min(rate(self.asked, slo), self._link_bound(option, option))

    def _link_bound(self, option: Option, instance: Candidate) -> float:
        """Requests/s whose caches the link of an instance can send, or bring."""
        num_tokens = float(np.where(self.asked.tokens > 0, self.asked.rows, 0.0).mean())
        seconds = num_tokens * seconds_per_token(self.maker.replicas(instance), self.maker.ways(option))
        return 1 / seconds if seconds else math.inf

    def _simulation(self, option: Option, load: Load) -> Callable[[float, int], Simulation]:
        """Makes the simulation of a rate and a seed."""
        ways, replicas, tpot = self.maker.ways(option), self.maker.replicas, self._tpot
        if isinstance(option, Pair):
            first, second = replicas(option.prefill), replicas(option.decode)
            return lambda rate, seed: PairRun(
                PromptRun(first, ways, load, tpot, rate, seed), DecodeRun(second, ways, load, rate, seed)
            )
        one = replicas(option)
        if option.role is Role.PREFILL:
            return lambda rate, seed: PromptRun(one, ways, load, tpot, rate, seed)
        kind = DecodeRun if option.role is Role.DECODE else MixedRun
        return lambda rate, seed: kind(one, ways, load, rate, seed)


@dataclass(frozen=True)
class Joint:
    """A whole setup, of which only times count. Equal instances that do both skip steps where that changes nothing."""

    setup: Setup
    load: Load
    rate: float
    seed: int

    def __post_init__(self) -> None:
        self.setup.measure()

    @property
    def count(self) -> int:
        """See Simulation."""
        return self.load.count

    def outcome(self, progress: Progress = lambda done, total: None) -> Outcome:
        """See Simulation."""
        setup, workload = self.setup, self.load.drawn(self.rate, self.seed)
        first, *others = setup.replicas
        fetches = setup.fetches and first.count > 1 and bool(workload.cached_tokens.any())
        if others or first.role != Role.MIXED or not may_skip(first) or fetches:
            found = run_of(setup, workload, self.seed, progress)
        else:
            messages = setup.ways.server + setup.ways.hop * setup.is_cluster
            found = skipping(first, workload, messages, progress, setup.routing)
        return found.counting(workload.counted)
