"""The library: `LLM` for batches, in the caller's thread, and `AsyncLLM` for servers, with the engine on a thread of
its own.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quire.config import EngineConfig
from quire.engine.build import Loaded, load_engine
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.engine.params import SamplingParams
from quire.errors import QueueFullError, QuireError, RequestError

log = logging.getLogger("quire")

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its token ids, or {"prompt": text} or {"prompt_token_ids": ids}."""


def read_prompt(prompt: Prompt, encode: Callable[[str], list[int]]) -> tuple[str | None, list[int]]:
    """The text, if there is one, and the token ids of a prompt. Raises RequestError for anything else."""
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise RequestError(
                f"a prompt given as a dict has the keys prompt or prompt_token_ids, not {sorted(prompt)}", "prompt"
            )
        given = prompt.get("prompt_token_ids")
        prompt = prompt["prompt"] if given is None else given
    if isinstance(prompt, str):
        return prompt, encode(prompt)
    if isinstance(prompt, Sequence):
        ids = [token for token in prompt if isinstance(token, int) and not isinstance(token, bool)]
        if len(ids) == len(prompt):
            return None, ids
    raise RequestError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}", "prompt")


class LLM:
    """A model and its engine, for lists of prompts.

    model        a folder, a .gguf file, a hub id, or `smollm2`
    options      settings by key, as flags and TOML have them: {"cache.memory": "1GiB", "model.dtype": "float32"}
    config_file  a TOML file; options win over it
    Raises ModelError or ConfigError. Not thread-safe; use AsyncLLM to serve.
    """

    def __init__(
        self, model: str, options: Mapping[str, Any] | None = None, config_file: str | Path | None = None
    ) -> None:
        config = EngineConfig.from_options(options or {}, Path(config_file) if config_file is not None else None)
        self._loaded: Loaded | None = load_engine(model, config)
        self._ids = itertools.count()

    @property
    def _parts(self) -> Loaded:
        if self._loaded is None:
            raise QuireError("this LLM is closed")
        return self._loaded

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._parts.tokenizer

    @property
    def shape(self) -> Any:
        """The model's shape."""
        return self._parts.shape

    @property
    def config(self) -> EngineConfig:
        """The configuration with every automatic value filled in."""
        return self._parts.config

    @property
    def model_name(self) -> str:
        """The name the model goes by."""
        return self._parts.model_name

    @property
    def engine(self) -> Any:
        """The engine itself, for measurements and tests."""
        return self._parts.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Generates for every prompt; outputs in the order of the prompts.

        prompts          one prompt or a list of them; a list of ints is one prompt
        sampling_params  one for all, or one each
        use_tqdm         a progress bar; by default for more than 8 prompts on a terminal
        Raises RequestError before anything runs if one of the requests can never run.
        """
        items = _as_prompts(prompts)
        params = _one_each(sampling_params, len(items))
        return self._run(items, params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Generates the next message of one conversation, or of each of a list of them, through the model's chat
        template.
        """
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        texts = [
            self.tokenizer.chat(conversation, add_generation_prompt=add_generation_prompt)
            for conversation in conversations
        ]
        items: list[Prompt] = [{"prompt_token_ids": self.tokenizer.encode(text, add_special=False)} for text in texts]
        outputs = self._run(items, _one_each(sampling_params, len(items)), use_tqdm)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs

    def stats(self) -> dict[str, Any]:
        """Counters since start.

        prefill_tokens_computed, prefill_tokens_cached   prompt tokens run through the model, and found in the cache
                                                         instead
        decode_tokens                                    tokens generated one at a time
        preemptions, steps, running, waiting             of the scheduler
        cache                                            bytes_total = bytes_used by live requests + bytes_cached
                                                         + bytes_free; bytes_peak of used
        """
        return self._parts.engine.stats()

    def close(self) -> None:
        """Frees weights and cache; closing twice does nothing."""
        self._loaded = None
        gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], use_tqdm: bool | None
    ) -> list[RequestOutput]:
        engine = self._parts.engine
        encoded = [read_prompt(prompt, self.tokenizer.encode) for prompt in prompts]
        for (_, ids), param in zip(encoded, params, strict=True):
            engine.check_request(ids, param)
        todo = deque(
            (f"request-{next(self._ids)}", text, ids, param) for (text, ids), param in zip(encoded, params, strict=True)
        )
        order = [request_id for request_id, *_ in todo]
        collected: dict[str, RequestOutput] = {}
        show = len(todo) > 8 and sys.stderr.isatty() if use_tqdm is None else use_tqdm
        with _progress(len(todo), show) as advance:
            try:
                while todo or engine.has_work:
                    while todo and engine.scheduler.has_room(todo[0][3].n):
                        engine.add(*todo.popleft())
                    for delta in engine.step():
                        gather(collected, delta)
                        if delta.finished:
                            advance(sum(len(output.token_ids) for output in collected[delta.request_id].outputs))
            except BaseException:
                for request_id in order:
                    engine.abort(request_id)
                raise
        return [collected[request_id] for request_id in order]


def gather(collected: dict[str, RequestOutput], delta: RequestOutput) -> None:
    """Adds a request's deltas to what is collected of it."""
    whole = collected.get(delta.request_id)
    if whole is None:
        whole = collected[delta.request_id] = RequestOutput(
            delta.request_id,
            delta.prompt,
            delta.prompt_token_ids,
            delta.prompt_logprobs,
            [],
            False,
            delta.num_cached_tokens,
        )
    whole.finished = delta.finished
    whole.prompt_logprobs = delta.prompt_logprobs
    for news in delta.outputs:
        found = next((output for output in whole.outputs if output.index == news.index), None)
        if found is None:
            found = CompletionOutput(news.index, "", [], None if news.logprobs is None else [])
            whole.outputs.append(found)
            whole.outputs.sort(key=lambda output: output.index)
        found.text += news.text
        found.token_ids.extend(news.token_ids)
        if news.logprobs is not None:
            found.logprobs = (found.logprobs or []) + news.logprobs
        found.finish_reason, found.stop_reason = news.finish_reason, news.stop_reason
        found.cumulative_logprob = news.cumulative_logprob


class AsyncLLM:
    """A model and its engine for an event loop. The engine runs on one thread of its own, which alone touches the model
    and the cache.

    Callers and engine exchange two things: a queue of commands, read before every step, and deltas, posted to the loop
    once per step.
    """

    def __init__(
        self, model: str, options: Mapping[str, Any] | None = None, config_file: str | Path | None = None
    ) -> None:
        self._config = EngineConfig.from_options(options or {}, Path(config_file) if config_file is not None else None)
        self._model = model
        self._loaded: Loaded | None = None
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Event()
        self._streams: dict[str, asyncio.Queue[RequestOutput | BaseException]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._failure: BaseException | None = None
        self._ids = itertools.count()
        self._queued = 0

    @property
    def _parts(self) -> Loaded:
        if self._loaded is None:
            raise QuireError("this AsyncLLM was not started; await start() first")
        return self._loaded

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._parts.tokenizer

    @property
    def shape(self) -> Any:
        """The model's shape."""
        return self._parts.shape

    @property
    def config(self) -> EngineConfig:
        """The configuration with every automatic value filled in."""
        return self._parts.config

    @property
    def model_name(self) -> str:
        """The name requests ask for."""
        return self._parts.model_name

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output together one request may have."""
        return self._parts.sizes.max_context

    @property
    def is_ready(self) -> bool:
        """Whether a request would be worked on."""
        return self._thread is not None and not self._closing and self._failure is None

    async def start(self) -> None:
        """Loads the model and starts the engine's thread."""
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(started,), name="quire-engine", daemon=True)
        self._thread.start()
        await started

    def prepare(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The token ids of a prompt; raises RequestError or QueueFullError, before a byte is streamed, for what
        `generate` would refuse.
        """
        parts = self._parts
        if self._failure is not None or self._closing:
            raise QuireError(f"the engine has stopped{f': {self._failure}' if self._failure else ''}")
        _, ids = read_prompt(prompt, parts.tokenizer.encode)
        parts.engine.check_request(ids, params)
        waiting = len(parts.engine.scheduler.waiting) + self._queued
        limit = parts.config.scheduler.max_queue
        if waiting + params.n > limit:
            raise QueueFullError(
                f"{waiting} sequences wait and scheduler.max_queue is {limit}; try again later", retry_after=1.0
            )
        return ids

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Deltas of one request as they come; the last has finished set. Closing the generator, or cancelling its task,
        aborts the request.
        """
        params = sampling_params or SamplingParams()
        ids = self.prepare(prompt, params)
        text = prompt if isinstance(prompt, str) else None
        request_id = request_id or f"request-{next(self._ids)}"
        if request_id in self._streams:
            raise RequestError(f"a request with id {request_id!r} is already running", "request_id")
        stream: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()
        self._streams[request_id] = stream
        self._queued += params.n
        engine = self._parts.engine

        def add() -> None:
            self._queued -= params.n
            try:
                engine.add(request_id, text, ids, params)
            except QuireError as error:
                self._post([(request_id, error)])

        self._submit(add)
        finished = False
        try:
            while not finished:
                item = await stream.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            self._streams.pop(request_id, None)
            if not finished:
                self._submit(lambda: engine.abort(request_id))

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets a last item whose sequences finish with `abort`. Unknown ids are ignored."""
        engine = self._parts.engine

        def end() -> None:
            output = engine.abort(request_id)
            if output is not None:
                self._post([(request_id, output)])

        self._submit(end)

    def stats(self) -> dict[str, Any]:
        """See `LLM.stats`."""
        return self._parts.engine.stats()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Takes no new requests, lets running ones finish for so long, then aborts them and stops the thread."""
        self._closing = True
        if self._thread is None:
            return
        deadline = time.monotonic() + drain_seconds
        while self._streams and self._failure is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for request_id in list(self._streams):
            await self.abort(request_id)
        self._submit(None)
        await asyncio.to_thread(self._thread.join)
        self._thread = None

    def _submit(self, command: Callable[[], object] | None) -> None:
        self._commands.append(command if command is not None else self._stop)
        self._wake.set()

    def _stop(self) -> None:
        raise _Stopped

    def _main(self, started: asyncio.Future[None]) -> None:
        """The engine's thread: loads, then commands and steps until it is told to stop."""
        assert self._loop is not None
        try:
            self._loaded = load_engine(self._model, self._config)
            # What was loaded stays: a full collection would walk it for nothing, with every stream waiting.
            gc.collect()
            gc.freeze()
        except BaseException as error:
            self._loop.call_soon_threadsafe(started.set_exception, error)
            return
        self._loop.call_soon_threadsafe(started.set_result, None)
        engine = self._loaded.engine
        try:
            while True:
                if not self._commands and not engine.has_work:
                    engine.check()
                    self._wake.wait()
                self._wake.clear()
                while self._commands:
                    self._commands.popleft()()
                outputs = engine.step()
                if outputs:
                    self._post([(output.request_id, output) for output in outputs])
        except _Stopped:
            return
        except BaseException as error:
            log.exception("the engine stopped")
            self._failure = error
            self._post([(request_id, QuireError(f"the engine stopped: {error}")) for request_id in list(self._streams)])

    def _post(self, items: Iterable[tuple[str, RequestOutput | BaseException]]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_out, list(items))

    def _hand_out(self, items: list[tuple[str, RequestOutput | BaseException]]) -> None:
        for request_id, item in items:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.put_nowait(item)


class _Stopped(Exception):
    """Ends the engine's thread."""


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts", "sampling_params")
    return list(params)


class _progress:
    """A progress bar over requests, with tokens a second; nothing where it is not wanted."""

    def __init__(self, total: int, show: bool) -> None:
        self._bar: Any = None
        self._tokens = 0
        if show:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("generating"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[speed]}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("", total=total, speed="")
            self._start = time.monotonic()

    def __enter__(self) -> Callable[[int], None]:
        if self._bar is not None:
            self._bar.start()
        return self._advance

    def _advance(self, tokens: int) -> None:
        self._tokens += tokens
        if self._bar is not None:
            speed = self._tokens / max(1e-9, time.monotonic() - self._start)
            self._bar.update(self._task, advance=1, speed=f"{speed:.0f} tokens/s")

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
