"""The library for batches: `LLM`, in the caller's thread."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import math
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from quire.config import ENGINE_GROUPS, EngineConfig, nearest
from quire.engine.admission import Prompt, admit, as_list, tokenized
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.engine.params import SamplingParams
from quire.engine.pins import pin_prefixes, read_pins
from quire.engine.retention_report import RetentionReport, report_of
from quire.engine.sampling_defaults import SamplingDefaults, read_sampling_defaults
from quire.errors import ConfigError, QuireError, RequestError
from quire.foreign_flags import setting_hint
from quire.load import LoadedEngine, load_engine
from quire.models.chat import check_messages
from quire.options import LISTED, settings_of
from quire.prefixes.cached import CachedPrefix, drop_prefix, find_prefix, known_prefixes, parse_prefix_key, prompt_key
from quire.prefixes.disk_index import DiskPrefixIndex
from quire.prefixes.listing import Prefix, engine_prefixes
from quire.structured.grammar_source import term_of
from quire.structured.schemas import UnsupportedSchemaError
from quire.tools.calls import Tool, ToolChoice, parse_tool
from quire.tools.conversation import render_chat
from quire.tools.format import ToolFormat
from quire.tools.formats import format_of

log = logging.getLogger("quire")

DROP_SECONDS = 5.0
"""Most seconds that `drop_prefix` waits until the index of a disk no longer has the prefix."""


def _all(salt: str) -> bool:
    return True


class BaseLLM(ABC):
    """Properties of the loaded model, shared by `LLM` and `AsyncLLM`."""

    @property
    @abstractmethod
    def _parts(self) -> LoadedEngine:
        """The loaded engine. Raises QuireError if nothing is loaded."""

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
        """The model's name, which requests use."""
        return self._parts.model_name

    @property
    def max_context(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return self._parts.engine.max_context

    @property
    def context_limit(self) -> str:
        """The limit that sets `max_context`: the name of a setting, or the model's own context."""
        return self._parts.engine.context_limit

    def prefix_key(self, prompt: Prompt) -> str:
        """The key of a prompt's whole chunks of 64 tokens, by which it is listed and dropped. Raises RequestError for
        a shorter prompt.
        """
        read = tokenized(prompt, self.tokenizer.encode)
        return prompt_key(self._parts.engine.namespace, read.ids, read.hints.cache_salt).hex()

    def _read_disk_index(self, visible: Callable[[str], bool]) -> DiskPrefixIndex:
        """The index of this engine's prefixes on the disk whose salts are visible. Reads the disk."""
        tiers = self._parts.engine.tiering.tiers
        stored = [] if tiers is None else tiers.stored(visible)
        return DiskPrefixIndex([run for run in stored if run.is_own_namespace])

    @property
    def model_path(self) -> Path:
        """The model's folder or file."""
        return self._parts.path

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The sampling parameters that the model's authors recommend, read from its files now. Raises ModelError for
        invalid values.
        """
        return read_sampling_defaults(self._parts.path, self._parts.requested_name)

    def get_default_sampling_params(self) -> SamplingParams:
        """The recommended sampling parameters: the defaults of the server, and of `generate` and `chat` without
        sampling_params. A SamplingParams of your own has the API's defaults: temperature 1 and 16 tokens.
        """
        return self._default_params

    @functools.cached_property
    def _default_params(self) -> SamplingParams:
        # Cached, because reading the header of a GGUF file, which has the vocabulary, takes tenths of a second.
        return SamplingParams(**self.sampling_defaults.values)  # type: ignore[arg-type]


def config_of(options: Mapping[str, Any] | None, file: str | Path | None, unknown: Collection[str]) -> EngineConfig:
    """The configuration of an `LLM` or `AsyncLLM`. Raises ConfigError.

    unknown  further arguments that the caller gave, as other engines' classes take them
    """
    for name in unknown:
        known = [setting.key for group in ENGINE_GROUPS for setting in settings_of(group)]
        raise ConfigError(
            f"there is no argument {name!r}; {setting_hint(name) or nearest(name, known, LISTED)}; settings are given"
            ' by key, as in options={"model.max_context": 4096}'
        )
    return EngineConfig.from_options(options or {}, Path(file) if file is not None else None)


class LLM(BaseLLM):
    """A model and its engine, for lists of prompts.

    model        a folder, a .gguf file, a hub id, or `smollm2`
    options      settings by key, as in flags and TOML: {"cache.memory": "1GiB", "model.dtype": "float32"}
    config_file  a TOML file; options override it
    unknown      nothing: other engines' arguments are refused by the name of the setting
    Raises ModelError or ConfigError. Calls from several threads wait for each other. To serve many concurrent callers,
    use AsyncLLM.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any] | None = None,
        config_file: str | Path | None = None,
        **unknown: Any,
    ) -> None:
        config = config_of(options, config_file, unknown)
        self._loaded: LoadedEngine | None = load_engine(model, config)
        self._ids = itertools.count()
        self._call_lock = _CallLock()
        if config.cache.pin is not None:
            try:
                file = Path(config.cache.pin)
                pin_prefixes(self._parts.engine, file, read_pins(file, self.tokenizer))
            except BaseException:
                self.close()
                raise

    @property
    def _parts(self) -> LoadedEngine:
        if self._loaded is None:
            raise QuireError("this LLM is closed")
        return self._loaded

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
        """Generates an answer to every prompt. Returns outputs in the order of the prompts.

        prompts          one prompt or a list of them. A list of ints is one prompt; a dict may have cache hints (see
                         `Prompt`)
        sampling_params  one for all prompts, or one per prompt; None: those that the model's authors recommend
        use_tqdm         a progress bar; by default for more than 8 prompts on a terminal
        Raises RequestError before anything runs if one of the requests can never run.
        """
        items = _as_prompts(prompts)
        params = self._one_each(sampling_params, len(items))
        return self._run(items, params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Generates the next message of one conversation, or of each conversation in a list, with the model's chat
        template. Names of control tokens in texts of users and tools stay text; `generate` takes other token ids.

        sampling_params       as in `generate`
        chat_template_kwargs  variables for the template, such as enable_thinking
        tools                 functions that the model may call, as in OpenAI's API. Calls are part of the text, as the
                              model writes them; the server reads them. Arguments of strict ones fit their schema
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError("messages is a list of at least one {'role': ..., 'content': ...}", "messages")
        conversations: Sequence[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        for conversation in conversations:
            check_messages(conversation)
        known = [parse_tool(each) for each in tools or ()]
        rendered = [
            render_chat(self.tokenizer, conversation, known, chat_template_kwargs, add_generation_prompt)
            for conversation in conversations
        ]
        items: list[Prompt] = [
            {"prompt_token_ids": self.tokenizer.encode(text, False, escape)} for text, escape in rendered
        ]
        params = self._one_each(sampling_params, len(items))
        if known:
            format_ = format_of(self.tokenizer.tool_template)
            params = [self._with_tools(each, format_, known) for each in params]
        outputs = self._run(items, params, use_tqdm)
        for output, prompt in zip(outputs, rendered, strict=True):
            output.prompt = prompt.text
        return outputs

    def _one_each(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
            message = "sampling_params must be a SamplingParams or a list of one per prompt"
            raise RequestError(message, "sampling_params")
        if len(params) != count:
            raise RequestError(f"{len(params)} sampling_params for {count} prompts", "sampling_params")
        return list(params)

    def _with_tools(self, params: SamplingParams, format_: ToolFormat, tools: Sequence[Tool]) -> SamplingParams:
        """Parameters of an answer that may call tools: it is calls, or a text under the request's own constraint."""
        wanted = params.structured_outputs
        assert not isinstance(wanted, Mapping), "it was checked"
        if wanted is not None:
            if wanted.kind == "grammar" and not any(tool.strict for tool in tools):
                return params
            try:
                term_of(wanted)
            except UnsupportedSchemaError as error:
                raise RequestError(f"the schema cannot be honoured: {error}", "structured_outputs") from None
        try:
            structure = format_.structure(tools, ToolChoice(), self.tokenizer.added_id, wanted)
        except UnsupportedSchemaError as error:
            raise RequestError(f"a schema cannot be honoured: {error}", "tools") from None
        return params if structure is None else replace(params, structured_outputs=structure)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Literal["mean", "last"] = "mean",
        normalize: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[list[float]]:
        """The embedding of every prompt, in their order: its last hidden states, pooled.

        pooling    mean: the mean over all tokens; last: that of the last token, which may use cached chunks
        normalize  whether to scale it to length 1
        """
        items = _as_prompts(prompts)
        outputs = self._run(items, [SamplingParams(max_tokens=1, pooling=pooling)] * len(items), use_tqdm)
        found = []
        for output in outputs:
            if output.embedding is None:
                raise QuireError(f"a prompt has no embedding: {output.outputs[0].stop_reason}")
            if not all(map(math.isfinite, output.embedding)):
                raise QuireError("an embedding is not finite: the model's numbers overflow on this prompt")
            found.append(normalized(output.embedding) if normalize else output.embedding)
        return found

    def profile(self, prompt: Prompt) -> RetentionReport:
        """Reports which tokens of a prompt each head keeps with the current `retain` settings, and why. Generates one
        token and discards it. Raises ConfigError if retention is off.
        """
        retainer = self._parts.engine.scheduler.manager.retainer
        if retainer is None:
            raise ConfigError("retention is off; set retain.threshold or retain.budget")
        found: list[RetentionReport] = []
        with self._call_lock:
            retainer.on_decision = lambda decided, before, after: found.append(report_of(decided, before, after))
            try:
                self._run_alone([prompt], [SamplingParams(max_tokens=1, temperature=0.0)], False)
            finally:
                retainer.on_decision = None
        return found[0]

    def stats(self) -> dict[str, Any]:
        """Counters since start.

        prefill_tokens_computed, prefill_tokens_cached   prompt tokens run through the model; prompt tokens found in the
                                                         cache
        decode_tokens                                    generated tokens run through the model, one at a time
        replayed_tokens                                  tokens of either kind computed again after a preemption
        preemptions, steps, running, waiting             counts of the scheduler
        cache                                            bytes_total = bytes_used by live requests + bytes_cached
                                                         + bytes_free; bytes_peak: most bytes ever used; bytes_pinned:
                                                         cached or used bytes held by pins; bytes_saved: additional
                                                         bytes that live requests would need without sharing;
                                                         bytes_evicted and bytes_retention_freed since start
        tiers, moves, costs                              with tiers: bytes, chunks and counts of each; chunks that were
                                                         fetched, wasted, lost and swapped; bytes of a chunk, bytes
                                                         fetched and tokens computed a second, as far as known
        offload                                          with offloading: the shares of weights, sealed chunks of the
                                                         cache and activations that are in memory (near), of the last
                                                         two over all steps; bytes of each read from the disk and
                                                         written; layers loaded, and seconds that computing waited for
                                                         them
        """
        return self._parts.engine.stats()

    def flush(self, seconds: float = 60.0) -> bool:
        """Waits until all cached chunks are on the disk of tiers.disk. False if this takes more than `seconds`."""
        with self._call_lock:
            is_done: bool = self._parts.engine.tiering.flush(seconds)
        return is_done

    def prefixes(self) -> list[Prefix]:
        """The cached prefixes in the arena, parents first: tokens, sharers, hits, bytes, last use."""
        with self._call_lock:
            found: list[Prefix] = engine_prefixes(self._parts.engine)
        return found

    def known_prefixes(self) -> list[CachedPrefix]:
        """The prefixes of this model and its settings in the arena and on the disk of tiers.disk, those used last
        first: keys, tokens, and by tier bytes, last use and pin. Lists what `GET /v1/cache/prefixes` lists.
        """
        return known_prefixes(self.prefixes(), self._read_disk_index(_all))

    def find_prefix(self, key: str) -> CachedPrefix | None:
        """The prefix with this key; see `prefix_key`. None if there is none."""
        name, disk_index = parse_prefix_key(key), self._read_disk_index(_all)
        with self._call_lock:
            return find_prefix(self._parts.engine, name, disk_index, _all)

    def drop_prefix(self, key: str) -> dict[str, int] | None:
        """Drops the prefix with this key (see `prefix_key`), and all prefixes that continue it, from the cache and its
        tiers. Returns the number of dropped chunks by tier; None if there is no such prefix.
        """
        name, disk_index = parse_prefix_key(key), self._read_disk_index(_all)
        with self._call_lock:
            dropped = drop_prefix(self._parts.engine, name, disk_index, _all)
            if dropped is not None and (tiers := self._parts.engine.tiering.tiers) is not None:
                tiers.flush(DROP_SECONDS)
        return dropped

    def close(self) -> None:
        """Waits for a call in another thread, then frees weights and cache. First writes cached chunks that the disk of
        tiers.disk still lacks. A second call does nothing.
        """
        with self._call_lock:
            if self._loaded is not None:
                self._loaded.engine.tiering.close()
            self._loaded = None
        gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], use_tqdm: bool | None
    ) -> list[RequestOutput]:
        with self._call_lock:
            return self._run_alone(prompts, params, use_tqdm)

    def _run_alone(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], use_tqdm: bool | None
    ) -> list[RequestOutput]:
        engine = self._parts.engine
        encode = self.tokenizer.encode
        admitted = [admit(prompt, param, engine.limits, encode) for prompt, param in zip(prompts, params, strict=True)]
        for request in admitted:
            engine.compile_grammar(request)
        todo = deque((f"request-{next(self._ids)}", request) for request in admitted)
        order = [request_id for request_id, _ in todo]
        collected: dict[str, RequestOutput] = {}
        show = len(todo) > 8 and sys.stderr.isatty() if use_tqdm is None else use_tqdm
        with _progress(len(todo), show) as advance:
            try:
                while todo or engine.has_work:
                    while todo and engine.scheduler.has_room(todo[0][1].params.n):
                        engine.queue(*todo.popleft())
                    for delta in engine.step():
                        merge_delta(collected, delta)
                        if delta.finished:
                            advance(sum(len(output.token_ids) for output in collected[delta.request_id].outputs))
            except BaseException:
                for request_id in order:
                    engine.abort(request_id)
                raise
            while engine.idle() == 0.0:
                pass
        return [collected[request_id] for request_id in order]


def normalized(embedding: Sequence[float]) -> list[float]:
    """The embedding, scaled to length 1; a zero vector stays as it is."""
    length = math.hypot(*embedding)
    return [each / length for each in embedding] if length else list(embedding)


def merge_delta(collected: dict[str, RequestOutput], delta: RequestOutput) -> None:
    """Adds a delta to the collected output of its request."""
    whole = collected.get(delta.request_id)
    if whole is None:
        whole = collected[delta.request_id] = replace(delta, outputs=[])
    whole.finished = delta.finished
    whole.kept_fraction = delta.kept_fraction
    whole.embedding = whole.embedding or delta.embedding
    for news in delta.outputs:
        found = next((output for output in whole.outputs if output.index == news.index), None)
        if found is None:
            found = CompletionOutput(news.index, "", [], None if news.logprobs is None else [])
            whole.outputs.append(found)
            whole.outputs.sort(key=lambda output: output.index)
        found.add(news)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        raise RequestError(f"prompts must be texts or lists of token ids, not {type(prompts).__name__}", "prompt")
    items = list(as_list(prompts))
    if items and all(hasattr(item, "__index__") and not hasattr(item, "__len__") for item in items):
        return [items]
    return items


class _CallLock:
    """A lock for calls from several threads. It refuses a call from within a call, for example from a signal handler,
    which would wait forever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise QuireError("this LLM is already running in this thread; call it after that call returns")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = None
        self._lock.release()


@contextlib.contextmanager
def _progress(total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar over requests, with tokens per second, if `show` is true. Yields a function to call with the
    number of tokens of each finished request.
    """
    if not show:
        yield lambda tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[speed]}"), console=Console(stderr=True)) as bar:
        task, begun, done = bar.add_task("", total=total, speed=""), time.monotonic(), 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            speed = done / max(1e-9, time.monotonic() - begun)
            bar.update(task, advance=1, speed=f"{speed:.0f} tokens/s")

        yield advance
