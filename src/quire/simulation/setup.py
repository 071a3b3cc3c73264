"""What to simulate: instances, their stores, and the ways between them, as a server of this machine would have them.

`LocalModel` makes candidates of a cluster's settings as a server does, with a share of the cores and of the memory for
each instance, and resolves their configurations as an instance does when it starts. `quire.simulation.hardware` does
the same for GPUs that are not here. A `Setup` is a value that other processes can have too.

What differs from a server: each instance has a disk of its own, where instances of one machine share a folder.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quire.cache.costs import LATENCY
from quire.cluster.colocation import colocated_groups
from quire.cluster.placements import ServedModel, shared_options, specs_of
from quire.config import ClusterConfig, EngineConfig
from quire.engine.build import resolve
from quire.engine.capacity import MeasuredCapacity
from quire.engine.engine import Engine
from quire.engine.sizes import EngineSizes
from quire.errors import ConfigError
from quire.load import find_calibration
from quire.models.fingerprint import fingerprint
from quire.models.resolve import resolve_model
from quire.models.weights import open_model
from quire.placement.placement_file import Instances, Placement
from quire.simulation.arrivals import ChunkArrivals, SimulatedDisk
from quire.simulation.candidate import Candidate, InstanceGroup, counts_of
from quire.simulation.cluster import Alone, Front, Place, SimulatedCluster
from quire.simulation.engine import Plan, check_simulated, make_engine
from quire.simulation.events import Events, StepClock
from quire.timing.latency import LatencyModel, Link, StepTime

if TYPE_CHECKING:
    from quire.engine.calibration import Calibration
    from quire.models.shape import ModelShape
    from quire.stores.tiers import Tier, Tiers

SERVER_SECONDS = 0.001
"""From a client to the engine or the router, one way: HTTP and JSON on the same machine."""

HOP_SECONDS = 0.0004
"""Of a message between the router and an instance."""

LINKS = {
    "shm": Link(LATENCY, 0.93e9),
    "tcp": Link(LATENCY, 0.50e9),
    "disk": Link(LATENCY, 0.5e9),
    "pinned": Link(LATENCY, 10e9),
}
"""Ways of the cache, if they were not measured. shm and tcp: `benchmarks/links.py` on two cores of an EPYC. disk: an
SSD on SATA. pinned: half of what PCIe gen 4 can do."""

LatencyOf = Callable[[str, EngineConfig, str], StepTime]
"""The latencies of an instance, by its role, its configuration without automatic values, and the checkpoint's
fingerprint."""


@dataclass(frozen=True)
class Bandwidths:
    """How long messages and caches take.

    server        seconds from a client to the engine or the router, and of an answer's way back
    hop           seconds of a message between the router and an instance
    bulk          of caches between instances
    disk, pinned  of reads from tiers
    measured      names of what was measured: shm, tcp, disk, pinned. The others are defaults, and so are server and hop
    """

    server: float = SERVER_SECONDS
    hop: float = HOP_SECONDS
    bulk: Link = LINKS["shm"]
    disk: Link = LINKS["disk"]
    pinned: Link = LINKS["pinned"]
    measured: frozenset[str] = frozenset()


@dataclass(frozen=True)
class TierSize:
    """A tier beside the cache.

    name      disk or memory
    cap       bytes
    lifetime  see cache.lifetime
    """

    name: str
    cap: int
    link: Link
    lifetime: float | None = None


@dataclass(frozen=True)
class Replicas:
    """Equal instances.

    tiers  beside its cache, nearest first
    unit   GPUs, or threads, of one
    """

    role: str
    plan: Plan
    count: int = 1
    tiers: tuple[TierSize, ...] = ()
    unit: str = ""

    @property
    def config(self) -> EngineConfig:
        """Without automatic values."""
        return self.plan.config

    @property
    def capacity(self) -> MeasuredCapacity:
        """What each measures when it starts."""
        return self.plan.capacity

    def engine(self, clock: StepClock, arrivals: ChunkArrivals, tiers: Tiers | None = None) -> Engine:
        """See EngineOf."""
        engine = make_engine(self.plan, clock, arrivals, tiers)
        if self.role == "prefill":
            engine.scheduler.policy.prompt_rows = self.capacity.prompt_rows
        return engine

    def stores(self, events: Events, arrivals: ChunkArrivals) -> Sequence[Tier]:
        """See StoresOf."""
        return [SimulatedDisk(each.name, each.cap, each.link, events, arrivals, each.lifetime) for each in self.tiers]


@dataclass(frozen=True)
class Setup:
    """What takes the requests.

    cluster   settings of the router; None: one engine in the server's process takes them
    in_pairs  whether caches stay within pairs of an instance for prompts and one that decodes
    """

    replicas: tuple[Replicas, ...]
    ways: Bandwidths = field(default_factory=Bandwidths)
    cluster: ClusterConfig | None = None
    in_pairs: bool = False

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self.replicas[0].plan.shape.vocab_size

    @property
    def max_context(self) -> int:
        """Most tokens of a request that every instance has room for."""
        return min(each.plan.sizes.max_context for each in self.replicas)

    @property
    def places(self) -> dict[str, Replicas]:
        """The instances by name."""
        numbers, found = Counter[str](), {}
        for each in self.replicas:
            for _ in range(each.count):
                found[f"{each.role}-{numbers[each.role]}"] = each
                numbers[each.role] += 1
        return found

    def measure(self, *, all_roles: bool) -> None:
        """Measures the instances of a cluster, or those for prompts among them, once, before other processes get copies
        of them.
        """
        for each in () if self.cluster is None else self.replicas:
            if all_roles or each.role == "prefill":
                _ = each.capacity

    def front_of(self, events: Events) -> Front:
        """What `simulate` gives the requests to."""
        settings, config = self.cluster, self.replicas[0].config
        if settings is None:
            (only,) = self.replicas
            return Alone(events, only.engine, only.stores, overhead=self.ways.server)
        places = self.places
        cluster = SimulatedCluster(
            events,
            [Place(name, each.role, each.engine, each.capacity, each.stores) for name, each in places.items()],
            hop=self.ways.hop,
            bulk=self.ways.bulk,
            routing=settings.routing,
            shares=config.cache.share,
            fetches=config.cache.share and not config.retain.is_on,
            overhead=self.ways.server,
            timeout=settings.timeout,
            tries=settings.tries,
            max_queue=config.scheduler.max_queue,
        )
        if self.in_pairs:
            groups = colocated_groups({name: each.role for name, each in places.items()}, "pairs")
            for number, names in enumerate(groups):
                for name in names:
                    cluster.router.members[name].group = f"group-{number}"
        return cluster


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Without warnings of engines and of the router: outcomes count the requests that fail."""
    log = logging.getLogger("quire")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


class LocalModel:
    """A checkpoint, and the engines that this machine would make of it. Equal ones are planned once.

    name        as for `LLM`
    latency_of  latencies of instances. Other processes can have the model if they can have this
    """

    def __init__(self, name: str, latency_of: LatencyOf) -> None:
        self.name, self.latency_of = name, latency_of
        self.path = resolve_model(name)
        self.model_id = fingerprint(self.path)
        with open_model(self.path) as checkpoint:
            self.shape: ModelShape = checkpoint.shape
        self._planned: dict[tuple[str, EngineConfig], Replicas] = {}

    def with_latencies(self, latency_of: LatencyOf) -> LocalModel:
        """The same checkpoint with other latencies."""
        found = copy.copy(self)
        found.latency_of, found._planned = latency_of, {}
        return found

    def resolved(self, config: EngineConfig) -> tuple[EngineConfig, EngineSizes, Calibration | None]:
        """A configuration without automatic values, and what fits under it. Raises ConfigError for what cannot be
        simulated.
        """
        check_simulated(config)
        with open_model(self.path) as checkpoint:
            calibration = find_calibration(self.path, config)
            if calibration is None and config.cache.is_calibrated:
                raise ConfigError(
                    f"cache.codec {config.cache.codec} needs a calibration; make one with quire calibrate {self.name}"
                )
            with silent():  # about threads: another machine may have more cores
                return *resolve(config, checkpoint.shape, checkpoint, calibration), calibration

    def replicas(self, group: InstanceGroup) -> Replicas:
        """A group that is simulated."""
        key = group.role, group.config
        if key not in self._planned:
            config, sizes, calibration = self.resolved(group.config)
            latency = self.latency_of(group.role, config, self.model_id)
            plan = Plan(self.shape, config, sizes, latency, calibration, self.model_id)
            threads = config.runtime.threads
            unit = f"{threads} thread{'s' * (threads != 1)}" if config.runtime.device == "cpu" else "1 GPU"
            self._planned[key] = Replicas(group.role, plan, 1, tiers_of(config, ways_of([latency])), unit)
        return replace(self._planned[key], count=group.count)

    def candidate(self, base: EngineConfig, settings: ClusterConfig, placement: Placement | None = None) -> Candidate:
        """What a server with these settings has, as `Cluster` starts it.

        base       configuration of the engines, with automatic values
        placement  of instances, in place of their numbers
        """
        if not settings.is_on and placement is None:
            return Candidate((InstanceGroup("mixed", base),))
        instances, hosts = tuple(Instances(role, count) for role, count in counts_of(settings)), None
        if placement is not None:
            instances, hosts = placement.instances, placement.hosts
        for each in instances:
            if each.tp * each.pp > 1:
                raise ConfigError(
                    f"the placement has instances with tp {each.tp} pp {each.pp}, and an engine here has one device;"
                    " --hardware NAME simulates more"
                )
        is_local = settings.address is None and (hosts is None or hosts.count == 1)
        options = shared_options(instances, base.to_options(), None, is_local=is_local)
        common = base.with_options(options)
        _, sizes, _ = self.resolved(common)
        model = ServedModel(self.name, options, None, common, sizes.weight_bytes, sizes.cache_bytes)
        # A placement for another machine says how many cores that one has.
        threads = [str(each.options.get("runtime.threads", "")) for each in instances]
        given = sum(int(own) * each.count for own, each in zip(threads, instances, strict=True) if own.isdecimal())
        specs = Counter(specs_of(instances, model, max(given, len(os.sched_getaffinity(0))), is_local=is_local))
        groups = tuple(
            InstanceGroup(spec.role, common.with_options(dict(spec.settings.options)), count)
            for spec, count in specs.items()
        )
        transport = "tcp" if settings.transport == "tcp" or not is_local else "shm"
        in_pairs = settings.placement == "pairs" if placement is None else placement.in_pairs and not is_local
        between = None if hosts is None or in_pairs else hosts.between
        return Candidate(groups, settings, transport, between, in_pairs)

    def setup(self, candidate: Candidate) -> Setup:
        """See Maker."""
        replicas = [self.replicas(each) for each in candidate.groups]
        ways = ways_of([each.plan.latency for each in replicas], candidate.transport, candidate.between)
        return Setup(tuple(replicas), ways, candidate.cluster, candidate.in_pairs)


def ways_of(latencies: Sequence[StepTime], transport: str = "shm", between: int | None = None) -> Bandwidths:
    """The ways that came with latency models, and defaults for the others. If two models have measured the same way,
    the first one counts.

    transport  of caches between instances: shm or tcp
    between    bytes/s of a network that these cross; None: they cross none
    """
    links: dict[str, Link] = {}
    for latency in latencies:
        if isinstance(latency, LatencyModel):  # others have no links of their own
            links = {**latency.links, **links}
    known = {**LINKS, **links}
    bulk = known[transport]
    if between is not None:
        bulk = Link(bulk.latency, min(float(between), bulk.bytes_per_second))
    return Bandwidths(bulk=bulk, disk=known["disk"], pinned=known["pinned"], measured=frozenset(links))


def tiers_of(config: EngineConfig, ways: Bandwidths) -> tuple[TierSize, ...]:
    """The tiers beside a cache, nearest first."""
    tiers, lifetime = config.tiers, config.cache.lifetime
    found = [] if tiers.memory is None else [TierSize("memory", tiers.memory, ways.pinned, lifetime)]
    if tiers.disk is not None:
        link = ways.disk
        if tiers.disk_bandwidth is not None:
            link = Link(link.latency, min(link.bytes_per_second, float(tiers.disk_bandwidth)))
        found.append(TierSize("disk", tiers.disk_bytes, link, lifetime))
    return tuple(found)
