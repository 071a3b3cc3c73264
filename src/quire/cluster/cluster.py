"""Several instances as one engine for the server."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import os
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

from quire.cache.ledger import PAGE_TOKENS
from quire.cluster.bodies import SequenceJob, TokenUpdate
from quire.cluster.placements import ServedModel, check_instances, shared_options
from quire.cluster.prefixes import group_by_machine, machine_total
from quire.cluster.processes import Processes
from quire.cluster.replanning import AnsweredRequest, Replanning, SearchCommand
from quire.cluster.router import COUNTERS, RoutedRequest
from quire.cluster.supervisor import Supervisor
from quire.cluster.tracing import trace_of, tracer
from quire.config import ClusterConfig, EngineConfig, SloConfig
from quire.engine.admission import AdmittedRequest, PinLimits, Prompt, RequestLimits, admit, tokenized
from quire.engine.build import end_tokens, resolve
from quire.engine.outputs import RequestOutput
from quire.engine.params import CacheHints, SamplingParams
from quire.engine.pins import read_pins
from quire.engine.sampler import sequence_seed
from quire.engine.sampling_defaults import SamplingDefaults, read_sampling_defaults
from quire.engine.sizes import EngineSizes
from quire.errors import ConfigError, EngineStoppedError, QueueFullError
from quire.load import find_calibration
from quire.models.resolve import resolve_model, short_name
from quire.models.shape import ModelShape
from quire.models.tokenizer import Tokenizer, load_tokenizer
from quire.models.weights import open_model
from quire.planning.cluster_file import read_cluster
from quire.planning.placement_file import Placement, read_placement
from quire.prefixes.cached import DISK, CachedPrefix, SaltFilter, parse_prefix_key, prompt_key
from quire.prefixes.listing import Prefix
from quire.structured.grammar_compiler import GrammarCompiler
from quire.structured.grammar_guide import CompiledGrammar
from quire.structured.params import StructuredOutputsParams

ALL = SaltFilter()


class Cluster:
    """A router in this process, and its instances. For the server it is an engine like `AsyncLLM`.

    model, options, config_file  as for `LLM`: every instance has them
    settings                     numbers of instances, and how they work together
    salts                        for each of which the prefixes of cache.pin are pinned
    slo                          latency targets, for cluster.replan
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
        salts: Sequence[str] = ("",),
        processes: Processes | None = None,
        transport: str = "",
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
        self._model, self._path = model, resolve_model(model)
        resolved, self.shape, sizes = self._resolve(self.config)
        self.tokenizer: Tokenizer = load_tokenizer(
            self._path, self.config.model.tokenizer, self.config.model.chat_template
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
        self.operations = Supervisor(started_with, settings, limits, processes, transport, self._tracer, placement)
        self.router = self.operations.router
        self._closing = False
        self._replanning = None
        self._watching: asyncio.Task[None] | None = None
        if settings.replan is not None:
            self._replanning = self._replanner(Path(settings.replan), options, file, slo or SloConfig())
            self.router.ended = self._note
            self.operations.replanning = self._replanning.state

    def _resolve(self, config: EngineConfig) -> tuple[EngineConfig, ModelShape, EngineSizes]:
        """The configuration without automatic values, and what fits under it. Raises ConfigError for what cannot be."""
        with open_model(self._path) as checkpoint:
            calibration = find_calibration(self._path, config)
            resolved, sizes = resolve(config, checkpoint.shape, checkpoint, calibration)
        if sizes.disk_bytes:
            raise ConfigError(
                "instances hand over caches that are in memory, but the offload settings move the cache to the disk;"
                " leave offload.cache out (weights may be on the disk), or the instances"
            )
        return resolved, checkpoint.shape, sizes

    def _replanner(self, machines: Path, options: dict[str, Any], file: Path | None, slo: SloConfig) -> Replanning:
        if self.operations.placement is None:
            raise ConfigError("cluster.replan needs a placement to begin with: set cluster.placement to its file")
        if slo.ttft is None or slo.tpot is None:
            raise ConfigError("cluster.replan needs latency targets: set slo.ttft and slo.tpot")
        read_cluster(machines)
        command = SearchCommand(self._model, options, file, machines, slo.to_options())
        return Replanning(lambda: self.operations.placement, command.search, self.operations.place, time.monotonic)

    def _note_arrivals(self, params: SamplingParams) -> None:
        """Notes the sequences of a request: each is answered by itself."""
        if (replanning := self._replanning) is not None:
            for _ in range(params.n):
                replanning.note_arrival()

    def _note(self, request: RoutedRequest) -> None:
        assert self._replanning is not None
        num_in = len(request.job.prompt_ids)
        keys = tuple(request.keys.first(num_in // PAGE_TOKENS))
        self._replanning.note(AnsweredRequest(request.begun, keys, num_in, len(request.token_ids), request.num_cached))

    # ---- start and end ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts all instances, and waits until they are ready. Raises ConfigError or ModelError if one cannot be."""
        try:
            self._grammars.warm(tries=True)
            await self.operations.start()
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
        await self.operations.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    @property
    def is_ready(self) -> bool:
        """See Supervisor."""
        return self.operations.is_ready

    @property
    def max_context(self) -> int:
        """Most tokens of a request that every instance has room for."""
        return self.operations.limits.max_context

    @property
    def context_limit(self) -> str:
        """The setting that limits them."""
        return self.operations.limits.context_limit

    # ---- requests --------------------------------------------------------------------------------------------------

    @property
    def model_path(self) -> Path:
        """See Engine."""
        return self._path

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """See Engine."""
        return read_sampling_defaults(self._path, self._model)

    async def compile_grammar(self, wanted: StructuredOutputsParams, cache_salt: str = "") -> CompiledGrammar:
        """See AsyncLLM.compile_grammar."""
        return await asyncio.wrap_future(self._grammars.prepare(wanted, cache_salt))

    async def admit(self, prompt: Prompt, params: SamplingParams) -> AdmittedRequest:
        """See AsyncLLM.admit. The limits are those that every instance keeps; instances check nothing again."""
        self._check_running()
        request = admit(prompt, params, self.operations.limits, self.tokenizer.encode)
        self._check_queue(params)
        if params.structured_outputs is not None:
            request.grammar = await self.compile_grammar(params.structured_outputs, request.hints.cache_salt)
        return request

    def _check_running(self) -> None:
        if self._closing:
            raise EngineStoppedError("the cluster is closed")

    def _check_queue(self, params: SamplingParams) -> None:
        try:
            self.operations.limits.check_queue(self.router.num_waiting, params.n)
        except QueueFullError:
            self._note_arrivals(params)
            raise

    def generate(
        self,
        prompt: Prompt | AdmittedRequest,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the deltas of one request; the last one has `finished` set. Closing the generator aborts it."""
        return self._generate(prompt, sampling_params or SamplingParams(), request_id)

    async def _generate(
        self, prompt: Prompt | AdmittedRequest, params: SamplingParams, request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        request = prompt if isinstance(prompt, AdmittedRequest) else await self.admit(prompt, params)
        ids, params, hints = request.prompt_ids, request.params, _hints(request.hints)
        # The cluster may have been closed since the admission, and others may have taken the places in the queue.
        self._check_running()
        self._check_queue(params)
        self._note_arrivals(params)
        request_id = request_id or f"request-{next(self._ids)}"
        self._seed += 1
        seed = self._seed if params.seed is None else params.seed
        items: asyncio.Queue[tuple[int, TokenUpdate | Exception | None]] = asyncio.Queue()
        requests: list[RoutedRequest] = []
        trace = trace_of(request_id)
        for index in range(params.n):
            name = request_id if params.n == 1 else f"{request_id}/{index}"
            own = dataclasses.replace(
                params, n=1, seed=None, prompt_logprobs=params.prompt_logprobs if index == 0 else None
            )
            job = SequenceJob(
                name, ids, asdict(own), hints, sequence_seed(seed, index) % (1 << 64), trace=trace.trace_id
            )
            requests.append(self.router.begin(job, partial(_put, items, index), trace))
        first, left = None, params.n
        held: list[tuple[int, TokenUpdate]] = []  # until the answer that has the prompt's log-probabilities begins
        try:
            while left:
                index, item = held.pop(0) if held and first is not None else await items.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    continue
                if first is None and index and params.prompt_logprobs is not None:
                    held.append((index, item))
                    continue
                first = first or item.first
                output = dataclasses.replace(item.output, index=index)
                left -= output.finish_reason is not None
                yield _output(request_id, request.text, ids, output, item, first, finished=left == 0)
        finally:
            for each in requests:
                if not each.is_over:
                    self.router.abort(each)

    # ---- operations ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters of all instances together, and under `cluster` those of the router and the state of each. Instances
        on one machine have one disk.
        """
        found = [(each.machine, each.stats) for each in self.router.members.values() if each.stats is not None]
        total = _added([_NOTHING, dict(self.router.past_counters), *(stats for _, stats in found)])
        disks = [(machine, stats["tiers"][DISK]) for machine, stats in found if DISK in stats.get("tiers", {})]
        for name in ("bytes", "cap_bytes", "chunks") if disks else ():
            of_each = group_by_machine((machine, disk[name]) for machine, disk in disks)
            total["tiers"][DISK][name] = sum(machine_total(DISK, sizes) for sizes in of_each)
        costs = [stats["costs"] for _, stats in found if "costs" in stats]
        if costs:  # sizes and speeds, which are not summed
            total["costs"] = {key: max((each[key] for each in costs), key=lambda cost: cost or 0) for key in costs[0]}
        return {
            **total,
            "running": self.router.num_running,
            "waiting": self.router.num_waiting,
            "cluster": {**self.operations.state(), "histograms": self.router.times.histograms()},
        }

    async def prefixes(self, visible: SaltFilter = ALL) -> list[Prefix]:
        """Of each instance, with its name."""
        return await self.operations.cluster_prefixes.prefixes(visible)

    async def known_prefixes(self, visible: SaltFilter = ALL) -> list[CachedPrefix]:
        """Of all instances together."""
        return await self.operations.cluster_prefixes.known_prefixes(visible)

    async def find_prefix(self, key: str, visible: SaltFilter = ALL) -> CachedPrefix | None:
        """On any instance. Raises RequestError for what is no key."""
        return await self.operations.cluster_prefixes.find_prefix(parse_prefix_key(key).hex(), visible)

    async def drop_prefix(self, key: str, visible: SaltFilter = ALL) -> dict[str, int] | None:
        """From all instances. Raises RequestError for what is no key."""
        return await self.operations.cluster_prefixes.drop_prefix(parse_prefix_key(key).hex(), visible)

    def prefix_key(self, prompt: Prompt) -> str:
        """See `BaseLLM`. Raises EngineStoppedError if no instance serves."""
        read = tokenized(prompt, self.tokenizer.encode)
        ready = next((each.ready for each in self.router.members.values() if each.ready is not None), None)
        if ready is None:
            raise EngineStoppedError("no instance serves; try again later")
        return prompt_key(ready.namespace, read.ids, read.hints.cache_salt).hex()

    async def pin(self, salts: Iterable[str] = ("",)) -> None:
        """Does nothing: every instance pins the prefixes of cache.pin when it starts, once for each of the salts that
        the cluster was made with. Raises ConfigError for other salts.
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
"""The counters of no instance."""


def _read(file: Path) -> Placement:
    """The placement of a file, with the file's name if it has none. Raises ConfigError."""
    if not file.exists():
        raise ConfigError(
            f"cluster.placement is {str(file)!r}; it must be pack, spread, pairs, or a file made by `quire plan"
            " placement`, and there is no such file"
        )
    found = read_placement(file)
    check_instances(found)
    return dataclasses.replace(found, made={"name": file.name, **found.made})


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
    request_id: str, text: str | None, ids: list[int], output: Any, item: TokenUpdate, first: Any, *, finished: bool
) -> RequestOutput:
    own = item.first if item.first is first else None
    prompt_logprobs, embedding = (None, None) if own is None else (own.prompt_logprobs, own.embedding)
    return RequestOutput(
        request_id, text, ids, prompt_logprobs, [output], finished, first.num_cached_tokens, first.cached_by_tier,
        first.num_pinned_tokens, first.kept_fraction, embedding,
    )  # fmt: skip


def _put(
    items: asyncio.Queue[tuple[int, TokenUpdate | Exception | None]], index: int, item: TokenUpdate | Exception | None
) -> None:
    items.put_nowait((index, item))
