"""The library for servers: `AsyncLLM`, an async iterator per request, with the engine on its own thread."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from quire.background_calibration import BackgroundCalibration
from quire.engine.admission import AdmittedRequest, Prompt, admit
from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.engine.pins import PIN_PARAMS, check_pin_room, log_pins, pin_errors, protect, read_pins
from quire.engine_thread import EngineThread
from quire.errors import EngineStoppedError, QuireError, RequestError
from quire.llm import config_of
from quire.load import LoadedEngine, load_engine
from quire.prefixes.async_prefixes import AsyncPrefixes
from quire.structured.grammar_guide import CompiledGrammar
from quire.structured.params import StructuredOutputsParams

log = logging.getLogger("quire")

Answer = TypeVar("Answer")

GIVE_UP_SECONDS = 5.0
"""Seconds that a cancelled start waits for its thread."""


class RequestStreams:
    """The streams of requests by id, which are read on an event loop. Any thread may post to them.

    loop  the readers' event loop; None before the engine starts
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, asyncio.Queue[RequestOutput | BaseException] | None] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[str]:
        return iter(self._queues)

    def open(self, request_id: str) -> asyncio.Queue[RequestOutput | BaseException]:
        """Begins a stream. Raises RequestError if its id is in use."""
        if request_id in self._queues:
            raise RequestError(f"a request with id {request_id!r} is already running", "request_id")
        queue = self._queues[request_id] = asyncio.Queue[RequestOutput | BaseException]()
        return queue

    def end(self, request_id: str) -> None:
        """Frees the id of a stream that was read to its end."""
        del self._queues[request_id]

    def abandon(self, request_id: str) -> None:
        """Marks a stream as no longer read. Its id stays taken until `free`."""
        self._queues[request_id] = None

    def free(self, request_id: str) -> None:
        """On any thread: frees the id of an abandoned stream, after all items posted to it so far."""
        self.on_loop(lambda: self._queues.pop(request_id, None))

    def post(self, items: Iterable[tuple[str, RequestOutput | BaseException]]) -> None:
        """On any thread: puts items into streams that are read."""
        self.on_loop(partial(self._hand_out, list(items)))

    def _hand_out(self, items: Iterable[tuple[str, RequestOutput | BaseException]]) -> None:
        for request_id, item in items:
            queue = self._queues.get(request_id)
            if queue is not None:
                queue.put_nowait(item)

    def fail_all(self, reason: str) -> None:
        """On any thread: puts an error into every stream that is read then."""
        self.on_loop(
            lambda: self._hand_out((each, EngineStoppedError(f"the engine stopped: {reason}")) for each in self)
        )

    def on_loop(self, call: Callable[[], object]) -> None:
        """On any thread: calls a function on the loop, unless that is closed."""
        assert self.loop is not None
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call)


class AsyncLLM(AsyncPrefixes):
    """A model and its engine for an event loop. The engine runs on its own thread. Only this thread touches the model
    and the cache.

    Callers send commands through a queue, which the engine reads before every step. The engine posts deltas to the loop
    once per step.

    model, options, config_file, unknown  as for `LLM`
    pins_at_start                         whether `start` pins the prefixes of cache.pin; otherwise call `pin`
    calibrates_beside                     whether a codec without a calibration is calibrated while the engine runs with
                                          dense pages, if that is possible; otherwise `start` calibrates first
    `async with AsyncLLM(model) as llm` starts and closes the engine, as `start` and `close` do. It runs once: closing
    frees its memory, and later requests and queries raise QuireError.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any] | None = None,
        config_file: str | Path | None = None,
        *,
        pins_at_start: bool = True,
        calibrates_beside: bool = False,
        **unknown: Any,
    ) -> None:
        self._config = config_of(options, config_file, unknown)
        self._model = model
        self._pins_at_start = pins_at_start
        self._calibrates_beside = calibrates_beside
        self._calibrating: BackgroundCalibration | None = None
        self._engine_thread: EngineThread | None = None
        self._started: asyncio.Future[None] | None = None
        self._streams = RequestStreams()
        self._closing = False
        self._accepts = False  # from the end of `start` on, except while `pin` runs
        self._ids = itertools.count()
        self._unqueued: dict[str, int] = {}  # request id -> sequences, until the engine's thread has queued them

    @property
    def _parts(self) -> LoadedEngine:
        thread = self._engine_thread
        if thread is None or thread.loaded is None:
            raise QuireError(
                "this AsyncLLM is closed" if self._closing else "this AsyncLLM is not started; await start() first"
            )
        return thread.loaded

    @property
    def _failure(self) -> str | None:
        return None if self._engine_thread is None else self._engine_thread.failure

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests: not before `start` has pinned its prefixes."""
        return self._accepts and self._runs

    @property
    def _runs(self) -> bool:
        thread = self._engine_thread
        return thread is not None and thread.loaded is not None and not self._closing and thread.failure is None

    @property
    def operations(self) -> None:
        """None, for the server: an engine has no instances to operate."""
        return None

    async def start(self) -> None:
        """Loads the model, starts the engine's thread, and pins the prefixes of cache.pin. Raises ModelError or
        ConfigError if loading fails or the prefixes cannot be pinned, and QuireError if it was started or closed
        before, or is closed meanwhile.

        If cancelled, it waits until the thread stops. A calibration stops within a second or two. It does not wait for
        longer work, such as downloading a model, which ends by itself.
        """
        if self._engine_thread is not None or self._closing:
            raise QuireError("this AsyncLLM was started or closed before; make a new one")
        self._streams.loop = asyncio.get_running_loop()
        self._started = self._streams.loop.create_future()
        load = partial(
            load_engine,
            self._model,
            self._config,
            is_cancelled=lambda: self._closing,
            may_calibrate_later=self._calibrates_beside,
        )
        self._engine_thread = thread = EngineThread(load, self)
        thread.start()
        try:
            await self._started
        except BaseException:
            self._closing = True
            thread.stop()
            deadline = time.monotonic() + GIVE_UP_SECONDS
            while thread.is_alive and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            raise
        if (grammars := self._parts.engine.grammars) is not None:
            grammars.warm(tries=True)
        if self._pins_at_start:
            try:
                await self.pin()
            except BaseException:
                await self.close()
                raise
        self._accepts = True
        if self._parts.pending_config is not None:
            self._calibrating = BackgroundCalibration(lambda: self._parts, self._submit, thread.replace)
            self._calibrating.start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def admit(self, prompt: Prompt, params: SamplingParams) -> AdmittedRequest:
        """Checks that a request can run, and compiles the grammar of its constraint on a thread. `generate` does not
        check the result again. The request is not queued yet, and the queue may fill up meanwhile.

        Raises RequestError for a request that can never run, and QueueFullError if it cannot wait now.
        """
        return await self._admit(prompt, params)

    async def _admit(self, prompt: Prompt, params: SamplingParams, *, is_pin: bool = False) -> AdmittedRequest:
        """is_pin: whether it is a request of `pin`."""
        self._check_running(is_pin=is_pin)
        parts = self._parts
        engine, limits = parts.engine, parts.engine.limits
        request = admit(prompt, params, limits, parts.tokenizer.encode)
        limits.check_queue(len(engine.scheduler.waiting) + sum(list(self._unqueued.values())), params.n)
        if params.structured_outputs is not None:
            request.grammar = await self.compile_grammar(params.structured_outputs, request.hints.cache_salt)
        return request

    def _check_running(self, *, is_pin: bool = False) -> None:
        """Raises EngineStoppedError if the engine has stopped, QuireError if it takes no requests yet."""
        if self._failure is not None or self._closing:
            raise _stopped(self._failure)
        if self._engine_thread is not None and not (self._accepts or is_pin):
            raise QuireError("the engine is not ready: it first pins the prefixes of cache.pin; try again later")

    async def compile_grammar(self, wanted: StructuredOutputsParams, cache_salt: str = "") -> CompiledGrammar:
        """Compiles the grammar of a constraint on a thread, for requests with this salt. It stays compiled as long as
        the result is held. Raises RequestError if no text can be promised to satisfy it.
        """
        grammars = self._parts.engine.grammars
        assert grammars is not None
        return await asyncio.wrap_future(grammars.prepare(wanted, cache_salt))

    def generate(
        self,
        prompt: Prompt | AdmittedRequest,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the deltas of one request; the last one has `finished` set. Closing the generator, or cancelling its
        task, aborts the request. Without sampling_params it has those that the model's authors recommend; an admitted
        request has its own.
        """
        return self._generate(prompt, sampling_params, request_id)

    async def _generate(
        self,
        prompt: Prompt | AdmittedRequest,
        params: SamplingParams | None,
        request_id: str | None = None,
        *,
        is_pin: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        if isinstance(prompt, AdmittedRequest):
            request = prompt
        else:
            if params is None:
                params = self.get_default_sampling_params() if self._runs else SamplingParams()
            request = await self._admit(prompt, params, is_pin=is_pin)
        # The engine may have stopped since the admission. Then no answer would come.
        self._check_running(is_pin=is_pin)
        request_id = request_id or f"request-{next(self._ids)}"
        stream = self._streams.open(request_id)
        self._unqueued[request_id] = request.params.n

        def queue() -> None:
            self._unqueued.pop(request_id, None)
            try:
                self._parts.engine.queue(request_id, request)
            except QuireError as error:
                self._streams.post([(request_id, error)])

        def retire() -> None:
            self._parts.engine.abort(request_id)
            self._streams.free(request_id)

        self._submit(queue)
        finished = False
        try:
            while not finished:
                if not stream.empty():
                    # `get` on a non-empty queue never waits, so a slow reader must let other tasks run.
                    await asyncio.sleep(0)
                item = await stream.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if finished:
                self._streams.end(request_id)
            else:
                # The id stays taken until no delta can arrive for it. Otherwise a late delta would reach the next
                # request with the same id.
                self._streams.abandon(request_id)
                self._submit(retire)

    async def abort(self, request_id: str) -> None:
        """Ends a request. Its stream gets a last item with finish reason `abort`. Unknown ids are ignored."""

        def end() -> None:
            output = self._parts.engine.abort(request_id)
            if output is not None:
                self._streams.post([(request_id, output)])

        self._submit(end)

    def stats(self) -> dict[str, Any]:
        """See `LLM.stats`. Also has `calibration` if the engine started without its codec. Raises QuireError before
        `start` and after `close`.
        """
        found = self._parts.engine.stats()
        return found if self._calibrating is None else found | {"calibration": self._calibrating.report()}

    async def _ask(self, question: Callable[[Engine], Answer]) -> Answer:
        """Runs a query on the engine's thread, between two steps. Raises its QuireError; the engine keeps running."""
        engine = self._parts.engine
        found: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def ask() -> None:
            try:
                end = partial(_end, found, question(engine))
            except QuireError as error:
                end = partial(_end, found, error=error)
            self._streams.on_loop(end)

        self._submit(ask)
        while not (await asyncio.wait({found}, timeout=0.1))[0]:
            if not self._runs:
                raise _stopped(self._failure)
        return found.result()

    async def pin(self, salts: Iterable[str] = ("",)) -> None:
        """Computes and pins the prefixes of cache.pin, once per salt. `start` does this without a salt.

        Call it before any request. Requests sent meanwhile are refused. Raises ConfigError if the file is invalid or
        its prefixes do not fit, and QuireError if there are requests.
        """
        file = self._config.cache.pin
        if file is None:
            return
        if self._streams:
            raise QuireError("the prefixes of cache.pin are pinned before there are requests")
        accepted, self._accepts = self._accepts, False
        try:
            await self._pin(Path(file), list(salts))
        finally:
            self._accepts = accepted

    async def _pin(self, file: Path, salts: list[str]) -> None:
        each = list(itertools.product(await asyncio.to_thread(read_pins, file, self.tokenizer), salts))
        for pin, salt in each:
            with pin_errors(file, pin.line, len(salts)):
                await self._ask(partial(check_pin_room, prompt_ids=pin.ids, salt=salt))
                async for _ in self._generate(pin.prompt(salt), PIN_PARAMS, is_pin=True):
                    pass
        for pin, salt in each:
            await self._ask(partial(protect, prompt_ids=pin.ids, salt=salt))
        log_pins(self._parts.engine, file, len(salts))

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Stops the engine and frees weights and cache. Running requests have `drain_seconds` to finish; then they are
        aborted. A second call does nothing.
        """
        self._closing = True
        if self._calibrating is not None:
            await asyncio.to_thread(self._calibrating.close)
        thread = self._engine_thread
        if thread is None:
            return
        deadline = time.monotonic() + drain_seconds
        while self._streams and self._failure is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for request_id in list(self._streams):
            await self.abort(request_id)
        thread.stop()
        await asyncio.to_thread(thread.join)
        gc.collect()

    def _submit(self, command: Callable[[], object]) -> None:
        assert self._engine_thread is not None
        self._engine_thread.submit(command)

    # ---- on the engine's thread ------------------------------------------------------------------------------------

    def has_started(self, error: BaseException | None) -> None:
        """See EngineListener."""
        assert self._started is not None
        self._streams.on_loop(partial(_end, self._started, error=error))

    def has_stepped(self, outputs: list[RequestOutput]) -> None:
        """See EngineListener."""
        if outputs:
            self._streams.post([(output.request_id, output) for output in outputs])

    def has_failed(self, reason: str) -> None:
        """See EngineListener."""
        self._streams.fail_all(reason)  # `_check_running` refuses later requests


def _stopped(failure: str | None) -> EngineStoppedError:
    return EngineStoppedError(f"the engine has stopped{f': {failure}' if failure else ''}")


def _end(future: asyncio.Future[Any], answer: object = None, error: BaseException | None = None) -> None:
    """On the loop: gives a future its answer or its error, unless its waiter was cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(answer)
