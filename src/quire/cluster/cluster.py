"""Several instances as one engine for the server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from quire.cluster.answers import stream_answer
from quire.cluster.members import Member
from quire.cluster.operations import ClusterOperations
from quire.cluster.placements import ServedModel, check_instances, shared_options
from quire.cluster.prefixes import group_by_machine, machine_total
from quire.cluster.processes import Processes
from quire.cluster.replanning import AnsweredRequest, Replanning, search_command
from quire.cluster.router import COUNTERS
from quire.cluster.supervisor import Supervisor
from quire.cluster.tracing import tracer
from quire.config import ClusterConfig, EngineConfig, SloConfig
from quire.engine.admission import AdmittedRequest, PinLimits, Prompt, RequestLimits, admit, tokenized
from quire.engine.build import end_tokens, resolve
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.engine.pins import read_pins
from quire.engine.sampling_defaults import SamplingDefaults, read_sampling_defaults
from quire.engine.sizes import EngineSizes
from quire.errors import ConfigError, EngineStoppedError, QueueFullError
from quire.load import find_calibration
from quire.models.resolve import resolve_model, short_name
from quire.models.shape import ModelShape
from quire.models.tokenizer import Tokenizer, load_tokenizer
from quire.models.weights import open_model
from quire.placement.placement_file import Placement, read_placement
from quire.prefixes.cached import DISK, CachedPrefix, SaltFilter, parse_prefix_key, prompt_key
from quire.prefixes.listing import Prefix
from quire.structured.grammar_compiler import GrammarCompiler
from quire.structured.grammar_guide import CompiledGrammar
from quire.structured.params import StructuredOutputsParams

ALL = SaltFilter()


class Cluster:
    """A router in this process, and its instances. For the server it is an engine like `AsyncLLM`.

    model, options, config_file  as for `LLM`; the same for every instance
    settings                     settings of the cluster, such as the numbers of instances
    salts                        the prefixes of cache.pin are pinned for each of these salts
    slo                          latency targets, for cluster.replan
    processes                    starts instances in place of the settings' processes; for tests
    `async with Cluster(...) as cluster` starts and ends the instances.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any] | None = None,
        config_file: str | Path | None = None,
        settings: ClusterConfig | None = None,
        *,
        salts: Sequence[str] = ("",),
        processes: Processes | None = None,
        slo: SloConfig | None = None,
    ) -> None:
        file = None if config_file is None else Path(config_file)
        settings = settings or ClusterConfig(mixed=1)
        placement = None if settings.placement_file is None else _read(settings.placement_file)
        options = dict(options or {})
        if placement is not None:
            is_local = settings.address is None if processes is None else processes.is_local
            options = shared_options(placement.instances, options, file, is_local=is_local)
        self.config = EngineConfig.from_options(options, file)
        self._model, self.model_path = model, resolve_model(model)
        resolved, self.shape, sizes = self._resolve(self.config)
        self.tokenizer: Tokenizer = load_tokenizer(
            self.model_path, self.config.model.tokenizer, self.config.model.chat_template
        )
        self._grammars = GrammarCompiler(self.tokenizer, self.shape.vocab_size, end_tokens(self.shape, self.tokenizer))
        self.model_name = resolved.model.name or short_name(model)
        self._salts = tuple(salts)
        self._ids = itertools.count()
        self._seed = int.from_bytes(os.urandom(6), "little")
        self._tracer = tracer()
        started_with = ServedModel(
            model, options, file, self.config, sizes.weight_bytes, sizes.cache_bytes,
            () if self.config.cache.pin is None else tuple(read_pins(Path(self.config.cache.pin), self.tokenizer)),
            self._salts, sizes.available_bytes or 0, self._resolve,
        )  # fmt: skip
        limits = RequestLimits(
            self.shape.vocab_size, sizes.max_context, "model.max_context", self.config.scheduler.max_queue, PinLimits(0)
        )
        supervisor = Supervisor(started_with, settings, limits, processes, self._tracer, placement)
        self.supervisor, self.router = supervisor, supervisor.router
        self.operations = ClusterOperations(supervisor, placement)
        self._closing = False
        self._replanning: Replanning | None = None
        self._watching: asyncio.Task[None] | None = None
        if settings.replan is not None:
            search = search_command(model, options, file, Path(settings.replan), slo or SloConfig(), placement)
            operations = self.operations
            replanning = Replanning(lambda: operations.placement, search.search, operations.switch, time.monotonic)
            self.router.ended = lambda request: replanning.note(AnsweredRequest.of(request))
            operations.replanning = replanning.state
            self._replanning = replanning

    def _resolve(self, config: EngineConfig) -> tuple[EngineConfig, ModelShape, EngineSizes]:
        """Resolves automatic values, and computes the sizes. Raises ConfigError for an impossible configuration."""
        with open_model(self.model_path) as checkpoint:
            calibration = find_calibration(self.model_path, config)
            resolved, sizes = resolve(config, checkpoint.shape, checkpoint, calibration)
        if sizes.disk_bytes:
            raise ConfigError(
                "instances hand over caches that are in memory, but the offload settings move the cache to the disk;"
                " leave offload.cache out (weights may be on the disk), or the instances"
            )
        return resolved, checkpoint.shape, sizes

    # ---- start and end ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts all instances, and waits until they are ready. Raises ConfigError or ModelError if one does not."""
        try:
            self._grammars.warm(tries=True)
            await self.supervisor.start()
            if self._replanning is not None:
                self._watching = asyncio.create_task(self._replanning.watch())
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
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.supervisor.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    @property
    def is_ready(self) -> bool:
        """See Supervisor."""
        return self.supervisor.is_ready

    @property
    def max_context(self) -> int:
        """Maximum number of tokens of a request, for which every instance has room."""
        return self.supervisor.limits.max_context

    @property
    def context_limit(self) -> str:
        """The setting that limits `max_context`."""
        return self.supervisor.limits.context_limit

    # ---- requests --------------------------------------------------------------------------------------------------

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """See AsyncLLM.sampling_defaults."""
        return read_sampling_defaults(self.model_path, self._model)

    async def compile_grammar(self, wanted: StructuredOutputsParams, cache_salt: str = "") -> CompiledGrammar:
        """See AsyncLLM.compile_grammar."""
        return await asyncio.wrap_future(self._grammars.prepare(wanted, cache_salt))

    async def admit(self, prompt: Prompt, params: SamplingParams) -> AdmittedRequest:
        """See AsyncLLM.admit. The limits are the strictest of all instances; instances check nothing again."""
        self._check_running()
        request = admit(prompt, params, self.supervisor.limits, self.tokenizer.encode)
        self._check_queue(params)
        if params.structured_outputs is not None:
            request.grammar = await self.compile_grammar(params.structured_outputs, request.hints.cache_salt)
        return request

    def _check_running(self) -> None:
        if self._closing:
            raise EngineStoppedError("the cluster is closed")

    def _check_queue(self, params: SamplingParams) -> None:
        try:
            self.supervisor.limits.check_queue(self.router.num_waiting, params.n)
        except QueueFullError:
            self._note_arrivals(params)
            raise

    def _note_arrivals(self, params: SamplingParams) -> None:
        """Notes the arrival of a request's sequences, one by one."""
        if (replanning := self._replanning) is not None:
            for _ in range(params.n):
                replanning.note_arrival()

    async def generate(
        self,
        prompt: Prompt | AdmittedRequest,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the deltas of one request; the last one has `finished` set. Closing the generator aborts it."""
        if isinstance(prompt, AdmittedRequest):
            request = prompt
        else:
            request = await self.admit(prompt, sampling_params or SamplingParams())
        params = request.params
        # Since the admission, the cluster may have been closed, and other requests may have filled the queue.
        self._check_running()
        self._check_queue(params)
        self._note_arrivals(params)
        request_id = request_id or f"request-{next(self._ids)}"
        self._seed += 1
        seed = self._seed if params.seed is None else params.seed
        async with contextlib.aclosing(stream_answer(self.router, request_id, request, seed)) as outputs:
            async for output in outputs:
                yield output

    # ---- operations ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters of all instances together, and under `cluster` those of the router and the state of each. Instances
        on one machine have one disk.
        """
        return {
            **_sum_counters(self.router.members.values(), self.router.past_counters),
            "running": self.router.num_running,
            "waiting": self.router.num_waiting,
            "cluster": {**self.operations.state(), "histograms": self.router.times.histograms()},
        }

    async def prefixes(self, visible: SaltFilter = ALL) -> list[Prefix]:
        """The prefixes of each instance, with the instance's name."""
        return await self.supervisor.cluster_prefixes.prefixes(visible)

    async def known_prefixes(self, visible: SaltFilter = ALL) -> list[CachedPrefix]:
        """The prefixes of all instances, merged."""
        return await self.supervisor.cluster_prefixes.known_prefixes(visible)

    async def find_prefix(self, key: str, visible: SaltFilter = ALL) -> CachedPrefix | None:
        """The prefix with a key on any instance. Raises RequestError for an invalid key."""
        return await self.supervisor.cluster_prefixes.find_prefix(parse_prefix_key(key), visible)

    async def drop_prefix(self, key: str, visible: SaltFilter = ALL) -> dict[str, int] | None:
        """Drops a prefix on all instances. Raises RequestError for an invalid key."""
        return await self.supervisor.cluster_prefixes.drop_prefix(parse_prefix_key(key), visible)

    def prefix_key(self, prompt: Prompt) -> str:
        """See `BaseLLM`. Raises EngineStoppedError if no instance serves."""
        read = tokenized(prompt, self.tokenizer.encode)
        ready = next((each.ready for each in self.router.members.values() if each.ready is not None), None)
        if ready is None:
            raise EngineStoppedError("no instance serves; try again later")
        return prompt_key(ready.namespace, read.ids, read.hints.cache_salt).hex()

    async def pin(self, salts: Iterable[str] = ("",)) -> None:
        """Does nothing: every instance pins the prefixes of cache.pin at its start, for each salt that the cluster was
        made with. Raises ConfigError for other salts.
        """
        if self.config.cache.pin is not None and set(salts) - set(self._salts):
            raise ConfigError("cache.pin: the cluster was made for other salts")


_NOTHING: dict[str, Any] = {
    **dict.fromkeys(COUNTERS, 0),
    "cache": dict.fromkeys(
        (f"bytes_{name}" for name in ("total", "used", "cached", "free", "peak", "pinned", "saved", "evicted")), 0
    )
    | {"bytes_retention_freed": 0},
}
"""The counters without any instance."""


def _sum_counters(members: Iterable[Member], past: Mapping[str, int]) -> dict[str, Any]:
    """The counters of all instances together. Instances on one machine have one disk.

    past  counters of instances that have ended
    """
    found = [(each.machine, each.stats) for each in members if each.stats is not None]
    total = _added([_NOTHING, dict(past), *(stats for _, stats in found)])
    disks = [(machine, stats["tiers"][DISK]) for machine, stats in found if DISK in stats.get("tiers", {})]
    for name in ("bytes", "cap_bytes", "chunks") if disks else ():
        of_each = group_by_machine((machine, disk[name]) for machine, disk in disks)
        total["tiers"][DISK][name] = sum(machine_total(DISK, sizes) for sizes in of_each)
    costs = [stats["costs"] for _, stats in found if "costs" in stats]
    if costs:  # sizes and speeds are not summed
        total["costs"] = {key: max((each[key] for each in costs), key=lambda cost: cost or 0) for key in costs[0]}
    return total


def _added(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums counters, group by group."""
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


def _read(file: Path) -> Placement:
    """Reads the placement of a file; the file's name is its default name. Raises ConfigError."""
    if not file.exists():
        raise ConfigError(
            f"cluster.placement is {str(file)!r}; it must be pack, spread, pairs, or a file made by `quire plan"
            " placement`, and there is no such file"
        )
    found = read_placement(file)
    check_instances(found)
    return dataclasses.replace(found, made={"name": file.name, **found.made})
