"""Real engines and simulated ones in the same events. The real ones record their results and the seconds of their
steps, and the simulated ones replay them. What both decide is noted, to be compared.

A real engine here computes with a tiny model, and keeps real bytes in its arena and its store. Only time is not real: a
step takes a random number of seconds, and chunks arrive when the simulation says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from quire.cache.ledger import PAGE_TOKENS
from quire.cache.retention.decisions import Retention
from quire.cache.run import Run
from quire.cache.store import Transfer
from quire.cluster.bodies import InstanceLoad, SequenceJob
from quire.cluster.outgoing_pages import OutgoingPages
from quire.cluster.peer_store import Pull
from quire.config import EngineConfig
from quire.engine.build import assemble, resolve
from quire.engine.capacity import MeasuredCapacity
from quire.engine.engine import Engine
from quire.engine.params import CacheHints, SamplingParams
from quire.engine.step import Result, Step
from quire.errors import QuireError
from quire.models.decoder import build_model
from quire.models.layers import TorchOps, torch_dtype
from quire.models.shape import ModelShape
from quire.models.tokenizer import Tokenizer
from quire.simulation.arrivals import ChunkArrivals, LateReads, SimulatedDisk
from quire.simulation.cluster import Place, SimulatedCluster
from quire.simulation.engine import EngineLoop, EngineOf, Plan, StoresOf, make_engine, no_stores, with_stores
from quire.simulation.events import Events, StepClock
from quire.simulation.instance import SimulatedInstance
from quire.stores.memory import MemoryStore
from quire.stores.tiers import Tiers
from quire.timing.latency import LatencyModel, Link

from .engines import made_up_calibration
from .tiny_models import BOS, EOS, RandomWeights, byte_tokenizer, tiny_shape

BULK = Link(0.004, 2e6)
"""Of caches between instances: slow enough that steps end meanwhile."""

DISK = Link(0.0005, 4e8)

Note = tuple[Any, ...]


@dataclass
class Script:
    """What an engine has computed: results, the seconds of steps, and what retention kept at each sealed chunk."""

    results: list[tuple[Result, float]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


class Recording:
    """The runner of a real engine. Every step takes random seconds."""

    def __init__(
        self, engine: Engine, clock: StepClock, arrivals: ChunkArrivals, script: Script, rng: random.Random
    ) -> None:
        self.inner, self.clock, self.arrivals, self.script, self.rng = engine.runner, clock, arrivals, script, rng

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    def run(self, step: Step) -> Result:
        seconds = self.rng.choice([0.0005, 0.002, 0.01])
        if step.ready is not None:
            seconds = max(seconds, self.arrivals.last(step.ready) - self.clock())
            self.arrivals.finish(step.ready)  # the kernels would wait for a layer that no thread brings
        result = self.inner.run(step)
        self.script.results.append((result, seconds))
        self.clock.spend(seconds)
        return result

    def check(self, live: set[int]) -> None:
        self.inner.check(live)


class Replaying:
    """The runner of a simulated engine that has the results of a real one."""

    def __init__(self, clock: StepClock, arrivals: ChunkArrivals, script: Script, vocab_size: int) -> None:
        self.clock, self.arrivals, self._vocab_size = clock, arrivals, vocab_size
        self.results = iter(script.results)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def run(self, step: Step) -> Result:
        result, seconds = next(self.results)
        if step.ready is not None:
            self.arrivals.finish(step.ready)
        self.clock.spend(seconds)
        return result

    def check(self, live: set[int]) -> None:
        """It remembers nothing."""


class RecordingRetention(Retention):
    """Notes what is kept at each sealed chunk, which depends on attention."""

    def select_while_decoding(self, retained: Any, tokens: Any, sums: Any) -> Any:
        kept = super().select_while_decoding(retained, tokens, sums)
        _scripts[id(self)].kept.append(kept)
        return kept


class ReplayingRetention(Retention):
    """Keeps what was noted."""

    def select_while_decoding(self, retained: Any, tokens: Any, sums: Any) -> Any:
        return next(_kept[id(self)])


_scripts: dict[int, Script] = {}
_kept: dict[int, Iterator[Any]] = {}


def _swap_retention(engine: Engine, kind: type[Retention]) -> Retention | None:
    retainer = engine.scheduler.manager.retainer
    if retainer is None:
        return None
    fields = {name: getattr(retainer.retention, name) for name in Retention.__dataclass_fields__}
    retainer.retention = kind(**fields)
    return retainer.retention


class LateMemory(MemoryStore):
    """Real bytes, which arrive when those of the simulated disk would."""

    name = "disk"

    def __init__(self, cap: int, link: Link, events: Events, arrivals: ChunkArrivals, lifetime: float | None) -> None:
        super().__init__(cap, pinned=False, lifetime=lifetime, clock=lambda: events.now)
        self.reads = LateReads(link, events, arrivals)

    def measure(self) -> float | None:
        return self.reads.link.bytes_per_second

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        for run in runs:
            kept = self._read(transfer, run)
            if kept is None:
                return
            self.reads.bring(transfer, kept.num_bytes, partial(_unpack, transfer, run, kept.content))


def _unpack(transfer: Transfer, run: Run, extents: Any, layer: int) -> None:
    begin = extents.ends[layer - 1] if layer else 0
    transfer.arrive(run, extents.data.numpy().data[begin : extents.ends[layer]])


class RealInstance(SimulatedInstance):
    """An instance whose caches have bytes."""

    def unload(self, pull: Pull, outgoing_pages: OutgoingPages) -> Callable[[int], None]:
        count, sizes = len(pull.runs), outgoing_pages.page_bytes
        extents = [bytes(extent) for extent in outgoing_pages.pack()]

        def note(layer: int) -> None:
            for index, run in enumerate(pull.runs):
                self.peer_store._note_extent(pull, sizes[index] // len(pull.transfer.ready))
                pull.transfer.arrive(run, extents[layer * count + index])
            if layer + 1 == len(pull.transfer.ready):
                self.peer_store._note_end(pull)

        return note


class RealCluster(SimulatedCluster):
    """A cluster of them."""

    instance = RealInstance


@dataclass(frozen=True)
class Setting:
    """Engines of one kind.

    memory  bytes of the arena
    disk    bytes of a store beside the arena; 0: there is none
    """

    memory: int
    options: dict[str, Any]
    disk: int = 0
    shape: ModelShape = field(default_factory=tiny_shape)

    def config(self) -> EngineConfig:
        codec = {"cache.outlier_slots": 1} if str(self.options.get("cache.codec", "")).startswith("nuq") else {}
        given = {
            "model.dtype": "float32", "runtime.device": "cpu", "runtime.threads": 1,
            "cache.memory": self.memory, **codec, **self.options,
        }  # fmt: skip
        return EngineConfig.from_options(given)

    def plan(self) -> Plan:
        wanted = self.config()
        calibration = made_up_calibration(self.shape, wanted) if wanted.cache.is_calibrated else None
        config, fits = resolve(wanted, self.shape, None, calibration)
        nobody = LatencyModel({}, {"base": 1.0}, (1,), {}, {})
        return Plan(self.shape, config, fits, nobody, calibration)

    def real(self, script: Script, rng: random.Random) -> EngineOf:
        """Makes an engine that computes and records."""
        plan = self.plan()

        def make(clock: StepClock, arrivals: ChunkArrivals, tiers: Tiers | None) -> Engine:
            model = build_model(self.shape, RandomWeights(self.shape, 0), TorchOps(), torch_dtype("float32"))
            words = Tokenizer(byte_tokenizer(), None, BOS, EOS)
            config = replace(plan.config, attention=replace(plan.config.attention, backend="reference"))
            engine = assemble(model, words, config, plan.sizes, "", plan.calibration, tiers)
            engine.scheduler.manager.table.arena.data.fill_(0xFF)  # type: ignore[attr-defined]
            engine.clock = clock
            engine.scheduler.manager.fetching.clock = arrivals.clock
            engine.any_runner = Recording(engine, clock, arrivals, script, rng)
            retention = _swap_retention(engine, RecordingRetention)
            _scripts[id(retention)] = script
            return engine

        return make

    def simulated(self, script: Script) -> EngineOf:
        """Makes an engine that replays."""
        plan = self.plan()

        def make(clock: StepClock, arrivals: ChunkArrivals, tiers: Tiers | None) -> Engine:
            engine = make_engine(plan, clock, arrivals, tiers)
            engine.eos_token_ids = tuple(dict.fromkeys((*self.shape.eos_token_ids, EOS)))
            engine.any_runner = Replaying(clock, arrivals, script, self.shape.vocab_size)
            retention = _swap_retention(engine, ReplayingRetention)
            _kept[id(retention)] = iter(script.kept)
            return engine

        return make

    def stores(self, *, real: bool) -> StoresOf:
        if not self.disk:
            return no_stores
        lifetime = self.config().cache.lifetime
        if real:
            return lambda events, arrivals: [LateMemory(self.disk, DISK, events, arrivals, lifetime)]
        return lambda events, arrivals: [SimulatedDisk("disk", self.disk, DISK, events, arrivals, lifetime)]


@dataclass(frozen=True)
class TimedRequest:
    """A request of a load.

    leaves_at    when its client goes away; None: never
    preempts_at  when some sequence is preempted; None: never
    """

    at: float
    prompt: list[int]
    params: SamplingParams
    hints: CacheHints
    leaves_at: float | None = None
    preempts_at: float | None = None


def asked(rng: random.Random, count: int, most: int) -> list[TimedRequest]:
    """Requests with common prefixes, stops, pins, lifetimes and clients that leave."""
    prefixes = [[rng.randrange(200) for _ in range(rng.randint(1, 5) * PAGE_TOKENS)] for _ in range(3)]
    found, at = list[TimedRequest](), 0.0
    for _ in range(count):
        at += rng.choice([0.0, 0.0, 0.001, 0.02, 0.2])
        prompt = list(rng.choice(prefixes)) if rng.random() < 0.8 else []
        prompt += [rng.randrange(200) for _ in range(rng.randint(1, most - len(prompt)))]
        stops = tuple(rng.sample(range(256), 12)) if rng.random() < 0.5 else None
        params = SamplingParams(
            max_tokens=rng.choice([1, rng.randint(2, 60), rng.randint(100, 180)]), temperature=0.0,
            ignore_eos=rng.random() < 0.7, detokenize=False,
            stop_token_ids=stops,
        )  # fmt: skip
        hints = CacheHints(
            cache_pin=rng.choice([None, None, None, 0.05]), cache_priority=rng.choice([0, 0, 1]),
            cache_lifetime=rng.choice([None, None, None, 0.1]), cache_salt=rng.choice(["", "", "another"]),
        )  # fmt: skip
        leaves = at + rng.random() * 0.1 if rng.random() < 0.15 else None
        preempts = at + rng.random() * 0.3 if rng.random() < 0.3 else None
        found.append(TimedRequest(at, prompt, params, hints, leaves, preempts))
    return found


def watch(engine: Engine, notes: list[Note], name: str = "") -> None:
    """Notes what an engine decides."""
    scheduler, manager = engine.scheduler, engine.scheduler.manager
    tree, fetching, ledger = manager.tree, manager.fetching, manager.table.ledger

    def wrap(owner: Any, method: str, note: Callable[..., Note | None]) -> None:
        call = getattr(owner, method)

        def noted(*given: Any, **named: Any) -> Any:
            found = call(*given, **named)
            if (made := note(found, *given)) is not None:
                notes.append((name, round(engine.clock(), 9), method, *made))
            return found

        setattr(owner, method, noted)

    def slices(found: Any) -> Note | None:
        if not isinstance(found, Step):
            return (type(found).__name__,) if found is not None else None
        rows = tuple(
            (each.sequence_id, each.start, each.num_rows, each.samples, each.decides, each.filled, each.num_dropped,
             tuple(each.chunks.tolist()), each.shared)
            for each in found.slices
        )  # fmt: skip
        return rows, found.ready is not None, tuple(found.ended), None if found.moved is None else tuple(found.moved)

    wrap(scheduler, "next_step", slices)
    wrap(scheduler.batch, "_preempt", lambda _, sequence: (sequence.sequence_id,))
    wrap(scheduler, "export", lambda found, sequence: (sequence.sequence_id, tuple(sorted(found.parts))))
    wrap(manager, "admit", lambda found, holder: (holder.sequence_id, holder.path.num_tokens) if found else None)
    wrap(manager, "retain", lambda _, holder, decided: (holder.sequence_id, decided.kept.tobytes()))
    wrap(tree, "evict", lambda found, count: (count, tuple(each.identity.names for each in found)))
    wrap(tree, "expire", lambda found: tuple(each.identity.names for each in found) or None)
    wrap(fetching, "start_transfer", lambda _, keys, path, far, *own: (tuple(path.transfer.names), len(far), len(own)))
    wrap(fetching, "_close", lambda found, path: (found,))
    wrap(manager.swapping, "swap_out", lambda _, holder: (holder.sequence_id, holder.swapped is not None))
    wrap(ledger, "take", lambda found, sizes: (found.tobytes(),))
    wrap(ledger, "compact", lambda found, needs: tuple((each.before.tobytes(), each.after.tobytes()) for each in found))


def run_alone(engine_of: EngineOf, stores: StoresOf, load: Sequence[TimedRequest]) -> list[Note]:
    """What an engine decides for a load."""
    events, notes = Events(), list[Note]()
    arrivals, clock = ChunkArrivals(events), StepClock(events)
    engine = with_stores(engine_of, clock, arrivals, stores(events, arrivals))
    watch(engine, notes)

    def stepped(outputs: list[Any]) -> None:
        engine.check()
        for each in outputs:
            notes.append(("", events.now, "output", each.request_id, tuple(each.outputs[0].token_ids), each.finished))

    loop = EngineLoop(events, engine, clock, stepped)

    def add(index: int, asking: TimedRequest) -> None:
        try:
            engine.add(str(index), asking.prompt, asking.params, asking.hints)
        except QuireError as error:
            notes.append(("refused", events.now, index, str(error)))

    for index, asking in enumerate(load):
        events.at(asking.at, partial(loop.submit, partial(add, index, asking)))
        if asking.preempts_at is not None:
            events.at(asking.preempts_at, partial(loop.submit, partial(_preempt, engine, index)))
        if asking.leaves_at is not None:
            events.at(asking.leaves_at, partial(loop.submit, partial(engine.abort, str(index))))
    events.run(lambda: False)
    assert not engine.has_work, "requests did not end"
    notes.append(("end", repr(engine.stats())))
    return notes


def _preempt(engine: Engine, index: int) -> None:
    running = engine.scheduler.running
    ready = [each for each in running if each.path.transfer is None]
    if ready:
        engine.scheduler.preempt(ready[index % len(ready)])


def run_cluster(
    kind: type[SimulatedCluster], engines: Sequence[EngineOf], stores: StoresOf, roles: Sequence[str],
    load: Sequence[TimedRequest],
) -> list[Note]:  # fmt: skip
    """What the router and the instances of a cluster decide for a load."""
    events, notes = Events(), list[Note]()
    capacity = MeasuredCapacity(96, 8, 1e-4, 1e-3)
    places = [
        Place(f"{role}-{index}", role, engine_of, capacity, stores)
        for index, (role, engine_of) in enumerate(zip(roles, engines, strict=True))
    ]
    cluster = kind(events, places, hop=0.0004, bulk=BULK, timeout=30.0)
    send = cluster.network.send

    def noted(sender: str, to: str, message: Any) -> None:
        if not isinstance(message, InstanceLoad):
            attempt = getattr(message, "attempt", getattr(getattr(message, "message", None), "attempt", None))
            notes.append(("message", events.now, sender, to, type(message).__name__, attempt))
        send(sender, to, message)

    cluster.network.send = noted  # type: ignore[method-assign]
    for each in cluster.instances:
        watch(each.engine, notes, each.name)
    left = len(load)

    def end(index: int, item: Any) -> None:
        nonlocal left
        tokens = None if item is None or isinstance(item, Exception) else tuple(item.output.token_ids)
        notes.append(("answer", events.now, index, tokens, isinstance(item, Exception)))
        left -= item is None or isinstance(item, Exception)

    def begin(index: int, asking: TimedRequest) -> None:
        hints = asking.hints
        wishes = {
            "cache_salt": hints.cache_salt, "cache_priority": hints.cache_priority,
            "cache_lifetime": hints.cache_lifetime,
        }  # fmt: skip
        job = SequenceJob(f"request-{index}", asking.prompt, asdict(asking.params), wishes, index)
        request = cluster.router.begin(job, partial(end, index))
        if asking.leaves_at is not None:
            events.at(asking.leaves_at, lambda: None if request.is_over else cluster.router.abort(request))

    for index, asking in enumerate(load):
        events.at(asking.at, partial(begin, index, asking))
        if asking.preempts_at is not None:
            each = cluster.instances[index % len(cluster.instances)]
            events.at(asking.preempts_at, partial(each.loop.submit, partial(_preempt, each.engine, index)))
    events.run(lambda: not left)
    end_at = events.now + 0.5
    events.run(lambda: events.now > end_at)  # what is freed at last
    for each in cluster.instances:
        each.engine.check()
        notes.append(("end", each.name, repr(each.engine.stats())))
    notes.append(("counts", sorted(cluster.router.counts.items())))
    return notes


def first_difference(left: Sequence[Note], right: Sequence[Note]) -> str:
    """Where two lists of notes part; empty if they do not."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return f"note {index} of {len(left)}:\n  {one!r:.3000}\n  {other!r:.3000}"
    return "" if len(left) == len(right) else f"{len(left)} and {len(right)} notes"
