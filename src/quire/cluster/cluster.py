"""Several instances as one engine for the server. Starts them, watches them, and starts those again that fail."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

from quire.cluster.bodies import Hello, Job, Load, Peers, Ready, Role, Stop, Told
from quire.cluster.instance import Order, about
from quire.cluster.links import Links
from quire.cluster.members import ROLES, Health, Member
from quire.cluster.messages import ROUTER
from quire.cluster.on_ray import OnRay
from quire.cluster.processes import END_SECONDS, Processes, places_of, share_cores, share_memory
from quire.cluster.router import TICK_SECONDS, Router, Ticket
from quire.cluster.tracing import trace_of, tracer
from quire.config import ClusterConfig, EngineConfig
from quire.engine.build import resolve
from quire.engine.known import KnownPrefix
from quire.engine.limits import Limits
from quire.engine.outputs import RequestOutput
from quire.engine.params import CacheHints, SamplingParams
from quire.engine.prefixes import Prefix
from quire.engine.sampler import sequence_seed
from quire.engine.sampling_defaults import SamplingDefaults, read_sampling_defaults
from quire.errors import ConfigError, EngineStoppedError, ModelError, QueueFullError, QuireError, RequestError
from quire.llm import Prompt, ReadPrompt, read_prompt
from quire.load import find_calibration
from quire.models.resolve import resolve_model
from quire.models.shape import ModelShape
from quire.models.tokenizer import Tokenizer, load_tokenizer
from quire.models.weights import open_model

log = logging.getLogger("quire")

START_SECONDS = 1800.0
"""Most time in which instances load: a first start may calibrate, pack weights and compile kernels."""

LOADING_SECONDS = 60.0
"""Seconds without a sign of life after which an instance that loads counts as failed. Loading may keep the interpreter
busy for long.
"""

LEAST_PAUSE, MOST_PAUSE = 0.5, 30.0
"""Seconds before an instance that failed is started again; twice as many after each further failure."""


class Cluster:
    """A router in this process, and its instances. For the server it is an engine like `AsyncLLM`.

    model, options, config_file  as for `LLM`: every instance has them
    settings                     numbers of instances, and how they work together
    processes, transport         where instances run, and how caches travel, in place of the settings': for tests
    `async with Cluster(...) as cluster` starts and ends the instances.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any] | None = None,
        config_file: str | Path | None = None,
        settings: ClusterConfig | None = None,
        *,
        processes: Processes | None = None,
        transport: str = "",
    ) -> None:
        self.settings = settings or ClusterConfig(mixed=1)
        self._options, self._model = dict(options or {}), model
        self._file = None if config_file is None else Path(config_file)
        self.config = EngineConfig.from_options(self._options, self._file)
        if self.config.cache.pin is not None:
            raise ConfigError("cache.pin is not for a cluster yet: leave it out, or leave out the cluster settings")
        self._path = resolve_model(model)
        with open_model(self._path) as checkpoint:
            self.shape: ModelShape = checkpoint.shape
            calibration = find_calibration(self._path, self.config)
            resolved, self._sizes = resolve(self.config, checkpoint.shape, checkpoint, calibration)
        self.tokenizer: Tokenizer = load_tokenizer(
            self._path, self.config.model.tokenizer, self.config.model.chat_template
        )
        self.model_name = resolved.model.name or model
        self.max_context, self.context_limit = self._sizes.max_context, "model.max_context"
        self._secret = os.urandom(32)
        self._ids, self._starts = itertools.count(), itertools.count(1)
        self._processes = processes or (OnRay(self.settings) if self.settings.address else Processes())
        self._closing = False
        self._pauses: dict[str, float] = {}
        self._roles: dict[str, str] = {}
        self._cores: dict[str, tuple[int, ...]] = {}
        self._beside: list[asyncio.Task[None]] = []
        self._all_ready = asyncio.Event()
        self._start_error: QuireError | None = None
        wanted = self.settings.transport
        transport = transport or (self._processes.transport if wanted == "auto" else wanted)
        self._transport = transport
        self._tracer = tracer()
        self.router = Router(
            self._send, timeout=self.settings.timeout, tries=self.settings.tries, routing=self.settings.routing,
            tracer=self._tracer,
        )  # fmt: skip
        self._links = Links(ROUTER, self._secret, self, transport, about=about())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seed = int.from_bytes(os.urandom(6), "little")

    # ---- start and end ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts all instances, and waits until they are ready. Raises ConfigError or ModelError if one cannot be."""
        self._loop = asyncio.get_running_loop()
        counts = [(role, getattr(self.settings, role)) for role in ROLES]
        places = places_of(counts)
        shares = share_cores(len(places)) if self._processes.is_local else [()] * len(places)
        for (place, role), cores in zip(places, shares, strict=True):
            self._roles[place], self._cores[place] = role, cores
        try:
            host = await self._processes.open(self._roles, self.config, self._sizes.weight_bytes)
            self._address = self._links.listen(host)
            for place in self._roles:
                self._launch(place)
            self._beside.append(asyncio.create_task(self._watch()))
            async with asyncio.timeout(START_SECONDS):
                await self._all_ready.wait()
            if self._start_error is not None:
                raise self._start_error
        except BaseException:
            await self.close()
            raise

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Ends all instances. Running requests have `drain_seconds` to finish. A second call does nothing."""
        end = time.monotonic() + drain_seconds
        while (self.router.num_waiting or self.router.num_running) and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if self._closing:
            return
        self._closing = True
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        self.router.close(EngineStoppedError("the cluster is closed"))
        for member in self.router.members.values():
            if member.health is Health.STARTING:
                self._processes.kill(member.name)  # it hears nothing while it loads
            self._links.send(member.name, Stop())
        await self._processes.wait()
        await asyncio.to_thread(self._links.close)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    @property
    def is_ready(self) -> bool:
        """Whether any instance accepts requests."""
        return not self._closing and any(member.serves for member in self.router.members.values())

    # ---- requests --------------------------------------------------------------------------------------------------

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """See Engine."""
        return read_sampling_defaults(self._path, self._model)

    def prepare(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The token ids of a prompt. Raises the RequestError or QueueFullError that `generate` would raise."""
        return self._admit(prompt, params).ids

    def _admit(self, prompt: Prompt, params: SamplingParams) -> ReadPrompt:
        if self._closing:
            raise EngineStoppedError("the cluster is closed")
        read = read_prompt(prompt, self.tokenizer.encode)
        limit = self.config.scheduler.max_queue
        Limits(self.shape.vocab_size, self.max_context, self.context_limit, limit).check(read.ids, params)
        if self.router.num_waiting + params.n > limit:
            raise QueueFullError(
                f"{self.router.num_waiting} sequences wait and scheduler.max_queue is {limit}; try again later",
                retry_after=1.0,
            )
        return read

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the deltas of one request; the last one has `finished` set. Closing the generator aborts it."""
        return self._generate(prompt, sampling_params or SamplingParams(), request_id)

    async def _generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        text, ids, hints = self._admit(prompt, params)
        request_id = request_id or f"request-{next(self._ids)}"
        self._seed += 1
        seed = self._seed if params.seed is None else params.seed
        items: asyncio.Queue[tuple[int, Told | Exception | None]] = asyncio.Queue()
        tickets: list[Ticket] = []
        trace = trace_of(request_id)
        for index in range(params.n):
            name = request_id if params.n == 1 else f"{request_id}/{index}"
            own = dataclasses.replace(
                params, n=1, seed=None, prompt_logprobs=params.prompt_logprobs if index == 0 else None
            )
            job = Job(
                name, ids, asdict(own), _hints(hints), sequence_seed(seed, index) % (1 << 64), trace=trace.trace_id
            )
            tickets.append(self.router.begin(job, partial(_put, items, index), trace))
        first, left = None, params.n
        try:
            while left:
                index, item = await items.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    continue
                first = first or item.first
                output = dataclasses.replace(item.output, index=index)
                left -= output.finish_reason is not None
                yield _output(request_id, text, ids, output, item, first, finished=left == 0)
        finally:
            for ticket in tickets:
                if not ticket.is_over:
                    self.router.abort(ticket)

    # ---- operations ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters of all instances together, and under `cluster` those of the router and the state of each."""
        found = [each.stats for each in self.router.members.values() if each.stats is not None]
        total = _added([_NOTHING, *found])
        return {
            **total,
            "running": self.router.num_running,
            "waiting": self.router.num_waiting,
            "cluster": {**self.state(), "histograms": self.router.times.histograms()},
        }

    @property
    def operations(self) -> Self:
        """See Engine of the server: it does them itself."""
        return self

    def state(self) -> dict[str, Any]:
        """The instances, a place without one included, counters of the router, and quantiles of stages in seconds."""
        members = {each.place: each for each in self.router.members.values()}
        places = {**self._roles, **{each.place: each.role for each in members.values()}}
        return {
            "instances": [
                self._described(members.get(place) or Member("", place, role, Health.DOWN))
                for place, role in places.items()
            ],
            "counts": dict(self.router.counts),
            "stages": self.router.times.quantiles(),
        }

    def _described(self, member: Member) -> dict[str, Any]:
        ready, load = member.ready, member.load
        return {
            "place": member.place,
            "name": member.name,
            "role": member.role,
            "health": member.health.value,
            "pid": self._processes.pid(member.name),
            "attempts": self.router.num_attempts(member.name),
            "cores": list(self._cores[member.place]),
            "prompt_rows": None if ready is None else ready.prompt_rows,
            "seconds_per_row": None if ready is None else ready.seconds_per_row,
            "batch": None if ready is None else ready.batch,
            "seconds_per_step": None if ready is None else ready.seconds_per_step,
            "cache_bytes": None if ready is None else ready.cache_bytes,
            "load": None if load is None else asdict(dataclasses.replace(load, stats=None)),
        }

    async def drain(self, place: str, *, restart: bool = True) -> None:
        """Lets an instance finish what it has, and ends it. restart: another one takes its place.

        Raises RequestError if no other one would be left, EngineStoppedError if the cluster is closed meanwhile, and
        ModelError if the other one does not start; it is then tried again.
        """
        member = self._member_at(place)
        if not restart:
            if not any(each.serves for each in self.router.members.values() if each is not member):
                raise RequestError(f"{place} is the only instance that serves; it can be restarted", "restart")
            self._roles.pop(place, None)
        member.health = Health.DRAINING
        log.info("instance %s: finishes %d attempts", member.name, self.router.num_attempts(member.name))
        while self.router.num_attempts(member.name) and self.router.members.get(member.name) is member:
            await asyncio.sleep(0.02)
        if self.router.members.get(member.name) is not member:  # it failed meanwhile, and is started again
            await self._serving(place)
            return
        self._links.send(member.name, Stop())
        self.router.down(member.name)
        self._tell_peers()
        assert self._loop is not None
        self._loop.call_later(END_SECONDS, self._processes.kill, member.name)
        if self._closing:
            raise EngineStoppedError("the cluster is closed")
        if restart:
            await self._serving(place, self._launch(place))

    async def _serving(self, place: str, name: str = "") -> None:
        """Waits until an instance serves at a place. Raises EngineStoppedError or ModelError: see `drain`.

        name  of an instance that was started there; without one it may be any
        """
        while place in self._roles:
            members = self.router.members
            if any(each.place == place and each.serves for each in members.values()):
                return
            if self._closing:
                raise EngineStoppedError("the cluster is closed")
            if name and name not in members:
                raise ModelError(f"instance {name} did not start; see the log")
            await asyncio.sleep(0.02)

    async def restart(self) -> None:
        """Restarts one instance after the other, without a failed request."""
        for place in list(self._roles):
            if place in self._roles:
                await self.drain(place)

    def set_role(self, place: str, role: str) -> None:
        """Changes what an instance does. Attempts that it has go on."""
        if role not in ROLES:
            raise RequestError(f"{role!r} is no role; there are {', '.join(ROLES)}", "role")
        member = self._member_at(place)
        member.role = role
        if place in self._roles:
            self._roles[place] = role
        log.info("instance %s: its role is %s", member.name, role)
        self._links.send(member.name, Role(role))

    def _member_at(self, place: str) -> Member:
        found = [each for each in self.router.members.values() if each.place == place]
        if not found:
            known = ", ".join(self._roles)
            raise RequestError(f"there is no instance {place!r} that runs; there are {known}", "instance")
        return found[-1]

    async def prefixes(self, visible: Callable[[str], bool] = bool) -> list[Prefix]:
        """Nothing: the instances have them."""
        return []

    async def known_prefixes(self, visible: Callable[[str], bool] = bool) -> list[KnownPrefix]:
        """Nothing: the instances have them."""
        return []

    async def find_prefix(self, key: str, visible: Callable[[str], bool] = bool) -> KnownPrefix | None:
        """Nothing: the instances have them."""
        return None

    async def drop_prefix(self, key: str, visible: Callable[[str], bool] = bool) -> dict[str, int] | None:
        """Drops nothing."""
        return None

    def prefix_key(self, prompt: Prompt) -> str:
        """Raises RequestError: the instances have the prefixes."""
        raise RequestError("prefixes cannot be listed or warmed in a cluster yet", "prompt")

    async def pin(self, salts: Iterable[str] = ("",)) -> None:
        """Does nothing: cache.pin is refused at start."""

    # ---- instances -------------------------------------------------------------------------------------------------

    def _launch(self, place: str) -> str:
        """Starts an instance; returns its name."""
        name, cores = f"{place}.{next(self._starts)}", self._cores[place]
        options = dict(self._options)
        if cores and self.config.runtime.threads is None:
            options["runtime.threads"] = len(cores)
        if self.config.cache.memory == "auto" and self._processes.is_local:
            sizes = self._sizes
            options["cache.memory"] = share_memory(len(self._roles), sizes.weight_bytes, sizes.cache_bytes)
        order = Order(
            name, self._address, self._secret.hex(), self._model, {key: _plain(each) for key, each in options.items()},
            None if self._file is None else str(self._file), self._roles[place], self._transport, "127.0.0.1", cores,
            self.settings.timeout, log.getEffectiveLevel(),
        )  # fmt: skip
        group = self._processes.group(place)
        member = Member(name, place, self._roles[place], seen=time.monotonic(), group=group)
        self.router.members[name] = member
        try:
            self._processes.start(order)
        except OSError as error:
            self._fail(member, f"it could not be started: {error}")
        return name

    async def _watch(self) -> None:
        """Finds instances that failed, and starts others in their places."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            late, looked = now - looked - TICK_SECONDS, now
            try:
                self._look(now, late)
            except Exception:  # nobody else would find what fails from now on
                log.exception("watching the instances")

    def _look(self, now: float, late: float) -> None:
        """late: seconds in which this process was stopped or its loop busy. Signs of life of that time are not heard
        yet.
        """
        ended = self._processes.ended()
        for member in list(self.router.members.values()):
            if late > TICK_SECONDS:
                member.seen += late
            if member.name in ended:
                self._fail(member, "it ended")
            elif now - member.seen > self._patience(member):
                self._fail(member, "it gave no sign of life")
        self.router.tick()

    def _patience(self, member: Member) -> float:
        """Most seconds between two signs of life."""
        if member.health is not Health.STARTING:
            return self.settings.heartbeat
        return max(LOADING_SECONDS, self.settings.heartbeat) if member.is_loading else START_SECONDS

    def _fail(self, member: Member, reason: str) -> None:
        if self._closing or member.name not in self.router.members:
            return
        is_first = not self._all_ready.is_set()
        log.error("instance %s: %s", member.name, reason)
        self._processes.kill(member.name)
        self._links.forget(member.name)
        self.router.down(member.name)
        self._tell_peers()
        if is_first:
            self._start_error = self._start_error or ModelError(f"instance {member.place} did not start: {reason}")
            self._all_ready.set()
        elif member.place in self._roles and member.health is Health.DOWN:
            pause = self._pauses.get(member.place, LEAST_PAUSE)
            self._pauses[member.place] = min(2 * pause, MOST_PAUSE)
            assert self._loop is not None
            self._loop.call_later(pause, partial(self._relaunch, member.place))

    def _relaunch(self, place: str) -> None:
        if not self._closing and place in self._roles:
            self._launch(place)

    def _tell_peers(self) -> None:
        serving = [each for each in self.router.members.values() if each.ready is not None]
        addresses = {each.name: each.ready.address for each in serving if each.ready is not None}
        for member in serving:
            self._links.send(member.name, Peers(addresses))

    def _is_ready(self, ready: Ready) -> None:
        member = self.router.members.get(ready.instance)
        if member is None:
            return
        if ready.error:
            self._fail_to_start(member, ready.error)
            return
        member.ready, member.health, member.seen = ready, Health.SERVING, time.monotonic()
        self._pauses.pop(member.place, None)
        self._links.send(member.name, Role(member.role))  # it may be another one than when the instance was started
        self.max_context, self.context_limit = min(
            (each.ready.max_context, each.ready.context_limit)
            for each in self.router.members.values()
            if each.ready is not None
        )
        # The first ones are printed together when the server is ready.
        log.log(
            logging.INFO if self._all_ready.is_set() else logging.DEBUG,
            "instance %s is ready: %d prompt rows saturate it (%.2f ms each), and %d sequences decode at once"
            " (%.1f ms a step)",
            ready.instance, ready.prompt_rows, 1e3 * ready.seconds_per_row, ready.batch, 1e3 * ready.seconds_per_step,
        )  # fmt: skip
        self._tell_peers()
        if all(each.serves for each in self.router.members.values()):
            self._all_ready.set()

    def _fail_to_start(self, member: Member, reason: str) -> None:
        if not self._all_ready.is_set():
            self._start_error = ConfigError(reason)
        self._fail(member, reason)

    # ---- links: on their threads -----------------------------------------------------------------------------------

    def receive(self, sender: str, message: Any, extents: Iterator[memoryview]) -> None:
        """See Handler."""
        self._on_loop(partial(self._hear, sender, message))

    def lost(self, name: str) -> None:
        """See Handler."""
        self._on_loop(partial(self._has_lost, name))

    def _on_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call)

    def _hear(self, sender: str, message: Any) -> None:
        match message:
            case Ready():
                self._is_ready(message)
            case Load():
                self.router.hear_load(message)
            case Hello(name):
                if (member := self.router.members.get(name)) is not None:
                    member.seen, member.is_loading = time.monotonic(), True
            case _:
                self.router.hear(message)

    def _has_lost(self, name: str) -> None:
        member = self.router.members.get(name)
        if member is not None:
            self._fail(member, "its connection ended")

    def _send(self, name: str, message: Any) -> None:
        self._links.send(name, message)


_NOTHING: dict[str, Any] = {
    **dict.fromkeys(
        (
            "preemptions",
            "steps",
            "decode_tokens",
            "replayed_tokens",
            "prefill_tokens_computed",
            "prefill_tokens_cached",
        ),
        0,
    ),
    "cache": dict.fromkeys(
        (f"bytes_{name}" for name in ("total", "used", "cached", "free", "peak", "pinned", "saved", "evicted")), 0
    )
    | {"bytes_retention_freed": 0},
}
"""The counters of no instance."""


def _added(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum of counters, group by group."""
    total: dict[str, Any] = {}
    for each in found:
        for key, value in each.items():
            if isinstance(value, dict):
                total[key] = _added([total.get(key, {}), value])
            elif isinstance(value, int | float) and not isinstance(value, bool):
                total[key] = (total.get(key) or 0) + value
            else:
                total[key] = value if total.get(key) is None else total[key]
    return total


def _hints(hints: CacheHints) -> dict[str, Any]:
    """The fields of hints that make equal ones."""
    pin: Any = hints.cache_pin
    if pin is not None and math.isinf(pin):
        pin = True
    if pin is not None and hints.pin_tier != "arena":
        pin = {"tier": hints.pin_tier} if pin is True else {"tier": hints.pin_tier, "seconds": pin}
    return {
        "cache_salt": hints.cache_salt, "cache_pin": pin, "cache_priority": hints.cache_priority,
        "cache_lifetime": hints.cache_lifetime,
    }  # fmt: skip


def _output(
    request_id: str, text: str | None, ids: list[int], output: Any, item: Told, first: Any, *, finished: bool
) -> RequestOutput:
    prompt_logprobs = item.first.prompt_logprobs if item.first is first else None
    return RequestOutput(
        request_id, text, ids, prompt_logprobs, [output], finished, first.num_cached_tokens, first.cached_by_tier,
        first.num_pinned_tokens, first.kept_fraction,
    )  # fmt: skip


def _put(items: asyncio.Queue[tuple[int, Told | Exception | None]], index: int, item: Told | Exception | None) -> None:
    items.put_nowait((index, item))


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)
