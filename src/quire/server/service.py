"""Shared by the endpoints: the engine, its limits, and the path of a request through it.

Knows tokens and sampling parameters; knows neither routes nor what an answer's choices hold.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import time
import uuid
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.datastructures import Headers

from quire.engine.interned_ids import InternedTokenIds
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.engine.sampling_defaults import NO_DEFAULTS
from quire.errors import EngineStoppedError, QueueFullError, RequestError
from quire.server import shapes
from quire.server.access_log import CURRENT, AccessRecord
from quire.server.auth import ApiKeys, is_loopback
from quire.server.body_reader import BodyReader
from quire.server.byte_limiter import ByteLimiter
from quire.server.errors import ApiError, bad_request
from quire.server.event_stream import merge, unless_disconnected
from quire.server.json_encoding import FEW_NUMBERS, AnswerByteLimiter
from quire.server.logprobs import PROMPT_LOGPROBS_AT_ONCE
from quire.server.metrics import Metrics, RequestTimer
from quire.server.model_capabilities import ModelCapabilities
from quire.server.request_tokenizer import RequestTokenizer
from quire.server.schema import GenerationRequest, refused_as
from quire.server.tenants import Tenants
from quire.server.usage import TenantTokens
from quire.structured.masks import GRAMMAR_FAILED, NO_TEXT, TOO_COMPLEX
from quire.structured.params import CONSTRAINT_KINDS
from quire.tools.formats import format_of
from quire.tools.reasoning import reasoning_of
from quire.version import __version__

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

    from quire.config import EngineConfig, ServeConfig, SloConfig
    from quire.server.engines import ServedEngine
    from quire.server.prefix_schema import PrefixRequest
    from quire.server.tooling import Tooling

    FaultFinder = Callable[[ServedEngine, str], Awaitable[RequestError | None]]
    """Finds the faulty parameter of a request, given the request's salt."""

T = TypeVar("T")

MAX_WAITING_TOKENS = 1 << 22
"""Maximum number of prompt tokens that wait for their first token: 70 MB. One of several tenants may have half of them.
One request of each tenant may always wait."""


@dataclass(eq=False)
class PromptJob:
    """One prompt of a request, in the engine's form."""

    prompt_ids: list[int]
    params: SamplingParams
    hints: dict[str, Any] = field(default_factory=dict)
    """Cache hints, under the names of `CacheHints`."""
    tenant: str = ""
    text: str | None = None
    """The text of the prompt, if it was given as text."""
    constraint_param: str = "structured_outputs"
    """The parameter of the request that constrains the answer."""
    admitted: Any = None
    """The request as the engine has admitted it, with its grammar; held until the answer has ended."""

    def __post_init__(self) -> None:
        self.prompt_ids = InternedTokenIds(self.prompt_ids)

    def pack(self) -> array[int]:
        """Takes the token ids out of an admitted job. Returns them in four bytes each."""
        packed = array("i", self.prompt_ids)
        self.prompt_ids = self.admitted.prompt_ids = []
        return packed

    def unpack(self, packed: array[int]) -> None:
        """Puts packed token ids back."""
        self.prompt_ids = self.admitted.prompt_ids = InternedTokenIds(packed)

    @property
    def num_tokens(self) -> int:
        """Number of waiting tokens: the prompt, and for each further answer half as many bytes."""
        return len(self.prompt_ids) * (1 + self.params.n) // 2

    @property
    def prompt(self) -> dict[str, Any]:
        """The prompt in the engine's form."""
        return {"prompt_token_ids": self.prompt_ids, **self.hints}

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of prompt log-probabilities that the engine keeps while the job runs."""
        most = self.params.prompt_logprobs
        return 0 if most is None else len(self.prompt_ids) * (1 + most)


class Service:
    """One engine and the state of serving it.

    in_flight        number of requests in the server
    idle             set while no request is in the server
    draining         whether new requests are refused
    num_answered     number of prompts answered completely
    num_cut_off      number of prompts cut off by the shutdown
    disk_index_lock  held by the one request that reads the indexes of a disk
    waiting          for each tenant, tokens of its jobs that wait for their first token
    """

    def __init__(self, engine: ServedEngine, config: ServeConfig, keys: ApiKeys, slo: SloConfig | None = None) -> None:
        self.engine = engine
        self.config = config
        self.keys = keys
        self.tenants = tenants_of(config, keys)
        self.tenant_tokens: dict[str, TenantTokens] = {}
        self.sampling = engine.sampling_defaults if config.sampling_defaults == "model" else NO_DEFAULTS
        self.metrics = Metrics(engine.stats, slo)
        self.body_reader = BodyReader(config.max_request_bytes)
        self.created = int(time.time())
        self.draining = False
        self.in_flight = 0
        self.num_answered = 0
        self.num_cut_off = 0
        self.num_tokens = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.request_tokenizer = RequestTokenizer(engine, config.special_tokens_in_text == "tokens")
        self.answer_limiter = AnswerByteLimiter(self.body_reader.memory_trimmer.note_freed)
        self.logprob_limiter = ByteLimiter(PROMPT_LOGPROBS_AT_ONCE)
        self.waiting: Counter[str] = Counter()
        self.disk_index_lock = asyncio.Lock()
        # One at a time: each may use a core and much memory.
        self._answers = ThreadPoolExecutor(1, "quire-answer")

    def tenant(self, scope: Scope) -> str | None:
        """The tenant whose key a request has, given its ASGI scope; None without a valid key."""
        headers = Headers(scope=scope)
        given = headers.get("authorization", "")
        if not given.lower().startswith("bearer "):  # the header may hold the credentials of a proxy
            given = f"Bearer {headers.get('x-api-key', '')}"
        return self.keys.tenant(given.encode("latin-1"))

    def request_started(self) -> None:
        """Counts a request that has arrived."""
        self.in_flight += 1
        self.idle.clear()

    def request_ended(self) -> None:
        """Counts a request that was answered or aborted."""
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()

    @property
    def is_open(self) -> bool:
        """Whether other machines can reach the server without a key."""
        return not self.keys.keys and (self.config.allow_public or not is_loopback(self.config.host))

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served here. The model's path is accepted as a name."""
        if name is not None and name not in (self.engine.model_name, str(self.engine.model_path.absolute())):
            message = f"The model '{name[:200]}' does not exist; this server serves '{self.engine.model_name}'."
            raise ApiError(404, message, param="model", code="model_not_found")

    def job(
        self,
        request: GenerationRequest,
        prompt_ids: list[int],
        tenant: str,
        max_tokens: int | None,
        *,
        param: str,
        length_param: str = "max_tokens",
        default_tokens: int | None = None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        tooling: Tooling | None = None,
        text: str | None = None,
        made: dict[int, SamplingParams] | None = None,
    ) -> PromptJob:
        """A prompt of `request`, with its sampling parameters.

        max_tokens      None: the default, but at most the rest of the context and serve.max_output_tokens
        param           parameter to name if the prompt is too long
        length_param    parameter to name if max_tokens is too large
        default_tokens  None: the length that the model's authors recommend; without one, the rest of the context
        tooling         gives the constraint in place of the request, and whether the text needs special tokens
        text            text of the prompt, if it was given as text
        made            sampling parameters of the request's other prompts, by max_tokens: a request with 256 prompts
                        and a large schema makes them once
        Raises ApiError or RequestError (400) for values that exceed a limit or contradict each other.
        """
        num_prompt_tokens = len(prompt_ids)
        room = self.engine.max_context - num_prompt_tokens
        most = self.config.max_output_tokens
        if max_tokens is not None and most is not None and max_tokens > most:
            limit = f"this server generates at most {most} (serve.max_output_tokens)"
            raise bad_request(f"'{length_param}' is {max_tokens}; {limit}", length_param)
        wanted = max_tokens or 1  # the engine generates at least one token
        if room < wanted:
            limit = f"{self.engine.max_context} tokens ({self.engine.context_limit})"
            message = (
                f"This model's maximum context length is {limit}. However, you requested "
                f"{num_prompt_tokens + wanted} tokens ({num_prompt_tokens} in the prompt, {wanted} in the completion"
                f"{', which is computed with max_tokens 0 too' if max_tokens == 0 else ''}). "
                "Please reduce the length of the prompt or of the completion."
            )
            raise bad_request(message, param, "context_length_exceeded")
        if max_tokens is None:
            if default_tokens is None and (advised := self.sampling.values.get("max_tokens")) is not None:
                default_tokens = max(int(advised), request.min_tokens or 0)
            max_tokens = min(each for each in (room, most, default_tokens) if each is not None)
        max_tokens, made = max(max_tokens, 1), {} if made is None else made
        if (params := made.get(max_tokens)) is None:
            self.check_tokens(request.logit_bias, "logit_bias")
            self.check_tokens(request.stop_token_ids, "stop_token_ids")
            given = {name: value for name in _PASSED_ON if (value := getattr(request, name, None)) is not None}
            fixed = {
                "max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs,
                "structured_outputs": (tooling and tooling.constraint(prompt_ids)) or request.structure(),
            }  # fmt: skip
            if tooling is not None and tooling.shows_special:
                fixed["skip_special_tokens"] = False
            params = made[max_tokens] = SamplingParams(**{**self.sampling.values, **given, **fixed})
        return PromptJob(prompt_ids, params, self.hints(request, tenant), tenant, text, request.structure_param)

    @functools.cached_property
    def model_capabilities(self) -> ModelCapabilities:
        """The training purpose of the model, by its files."""
        return ModelCapabilities.of(self.engine.model_path)

    @property
    def capabilities(self) -> shapes.Capabilities:
        """The features of the model."""
        tokenizer = self.engine.tokenizer
        reasoning = reasoning_of(tokenizer.chat_template)
        return {
            "completion": True,
            "chat": bool(tokenizer.chat_template),
            "tools": format_of(tokenizer.tool_template).name if tokenizer.chat_template else None,
            "reasoning": None if reasoning is None else reasoning.name,
            "structured_outputs": list(CONSTRAINT_KINDS),
            "embeddings": True,
            "similarity": self.model_capabilities.is_similarity,
        }

    def head(self, kind: str, what: str) -> shapes.AnswerBase:
        """The common beginning of answers. kind: prefix of the answer's id; what: its `object`."""
        answer_id = kind + uuid.uuid4().hex
        if (access := CURRENT.get()) is not None:
            access.answer_id = answer_id
        return {
            "id": answer_id,
            "object": what,
            "created": int(time.time()),
            "model": self.engine.model_name,
            "system_fingerprint": _fingerprint(self.engine.model_name, self.engine.config),
        }

    def hints(self, request: GenerationRequest | PrefixRequest, tenant: str) -> dict[str, Any]:
        """The cache hints of a request of `tenant`; see `CacheHints`."""
        given = {name: value for name in _HINTS if (value := getattr(request, name)) is not None}
        return {"cache_salt": self.tenants.salt(tenant, request.cache_salt), **given}

    async def make_answer(self, num_numbers: int, make: Callable[[], T]) -> T:
        """Returns `make()`, which encodes log-probabilities or embeddings. Large numbers of them are encoded on a
        thread, one answer at a time.
        """
        if num_numbers <= FEW_NUMBERS:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._answers, make)

    def check_tokens(self, token_ids: Sequence[int] | dict[int, float] | None, param: str) -> None:
        """Raises ApiError 400 for an id outside the vocabulary."""
        size = self.engine.shape.vocab_size
        if token_ids and max(token_ids) >= size:
            raise bad_request(f"'{param}' has token id {max(token_ids)}; this model's ids are below {size}", param)

    def check_ready(self) -> None:
        """Raises ApiError 503 if the engine has stopped."""
        if not self.engine.is_ready:
            raise ApiError(503, "the engine is not running", code="not_ready")

    async def admit(
        self,
        jobs: Sequence[PromptJob],
        receive: Receive | None = None,
        find_fault: FaultFinder | None = None,
    ) -> None:
        """Raises the error that refuses the jobs, before anything is computed or sent. Raises ClientDisconnected if the
        client leaves while grammars are compiled.

        receive     gives the messages of the client, whose body has been read; None: no job has a constraint
        find_fault  finds the faulty parameter if the constraint cannot be honoured
        """
        if self.draining:
            raise shutting_down()
        self.check_ready()
        limit = self.engine.config.scheduler.max_queue
        if any(job.num_prompt_logprobs for job in jobs) and self.logprob_limiter.num_waiting + len(jobs) > limit:
            message = f"{self.logprob_limiter.num_waiting} prompts wait for room for their log-probabilities"
            raise QueueFullError(f"{message}; the limit is {limit} (scheduler.max_queue)")
        self._hold(jobs)
        admission = self._admit(jobs, find_fault)
        if all(job.params.structured_outputs is None for job in jobs):
            await admission
        else:
            assert receive is not None
            await unless_disconnected(receive, admission)

    async def _admit(self, jobs: Sequence[PromptJob], find_fault: FaultFinder | None) -> None:
        for index, job in enumerate(jobs):
            if index:
                await self.body_reader.start_throttle.acquire()  # a million token ids take 0.1 s
            try:
                job.admitted = await self.engine.admit(job.prompt, job.params)
            except RequestError as error:
                if error.param != "structured_outputs":
                    raise
                salt = str(job.hints.get("cache_salt") or "")
                own = None if find_fault is None else await find_fault(self.engine, salt)
                raise own or refused_as(error, job.constraint_param) from None

    def _hold(self, jobs: Sequence[PromptJob]) -> None:
        """Counts jobs as waiting. Raises QueueFullError if too many tokens wait already."""
        more, tenant = sum(job.num_tokens for job in jobs), jobs[0].tenant
        own, queued = self.waiting[tenant], self.waiting.total()
        most = MAX_WAITING_TOKENS // 2 if len(self.tenants.names) > 1 else MAX_WAITING_TOKENS
        if own and (own + more > most or queued + more > MAX_WAITING_TOKENS):
            raise QueueFullError(f"{own:,} tokens of your prompts wait; try again later")
        self.waiting[tenant] += more
        access = CURRENT.get()
        assert access is not None
        access.tenant = tenant
        access.num_queued += more

    def release_queued(self, access: AccessRecord, num_tokens: int) -> None:
        """Stops counting tokens of a request as waiting: their first output has come, or the request has ended."""
        num_tokens = min(num_tokens, access.num_queued)  # others may have released them already
        self.waiting[access.tenant] -= num_tokens
        access.num_queued -= num_tokens

    def run(
        self,
        jobs: Sequence[PromptJob],
        request_id: str,
        on_first_output: Callable[[int, RequestOutput], Awaitable[None]],
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields the engine's output as (index of the job, delta), in order of arrival. Closing it aborts all jobs.

        on_first_output  called with the first delta of each job, the only one with log-probabilities of the prompt
        """
        arrived = time.monotonic()
        return merge(
            [
                self._follow(job, f"{request_id}-{index}", arrived, functools.partial(on_first_output, index))
                for index, job in enumerate(jobs)
            ]
        )

    async def _follow(
        self,
        job: PromptJob,
        request_id: str,
        arrived: float,
        on_first_output: Callable[[RequestOutput], Awaitable[None]],
    ) -> AsyncGenerator[RequestOutput, None]:
        timer = RequestTimer(self.metrics, arrived, len(job.prompt_ids), job.params.n)
        access = CURRENT.get()
        reason: str | None = "abort"
        try:
            async with AsyncExitStack() as ends:
                # Released before the first yield, so that a client that does not read its answer blocks nobody.
                async with self.logprob_limiter.hold(job.num_prompt_logprobs):
                    generated = self.engine.generate(job.admitted, job.params, request_id)
                    items = await ends.enter_async_context(aclosing(generated))
                    item = await anext(items)
                    timer.record(item)
                    self._check_outputs(item, job.constraint_param)
                    self._count_found(job, item)
                    if access is not None:
                        self.release_queued(access, job.num_tokens)
                        access.record(item)
                    await on_first_output(item)
                    item.prompt_logprobs = None
                yield item
                async for item in items:
                    timer.record(item)
                    self._check_outputs(item, job.constraint_param)
                    yield item
            self.num_answered += 1
        except (RequestError, QueueFullError):
            # A request refused with 400 or 429 before it began is counted only by its HTTP status.
            reason = "error" if timer.begun else None
            raise
        except EngineStoppedError:
            if not self.draining:
                reason = "error"
                raise
            self.num_cut_off += 1
            raise shutting_down() from None
        except Exception:
            reason = "error"
            raise
        finally:
            self.num_tokens += timer.num_tokens
            if access is not None and job.params.pooling is None:
                access.num_generated += timer.num_tokens
            timer.end(reason)

    def _count_found(self, job: PromptJob, item: RequestOutput) -> None:
        found, cached = self.tenant_tokens.setdefault(job.tenant, TenantTokens()), item.num_cached_tokens or 0
        found.cached += cached
        found.computed += len(job.prompt_ids) - cached
        found.by_tier.update(item.cached_by_tier)
        for tier, num_tokens in item.cached_by_tier.items():
            self.metrics.cached_tokens.labels(tier).inc(num_tokens)

    def _check_outputs(self, item: RequestOutput, constraint_param: str) -> None:
        """Raises ApiError for an answer that was aborted or failed. constraint_param: see PromptJob."""
        for output in item.outputs:
            if output.finish_reason == "abort":
                self.num_cut_off += self.draining
                raise shutting_down() if self.draining else ApiError(503, "the request was aborted", code="aborted")
            if output.finish_reason == "error":
                reason = str(output.stop_reason)
                if reason.startswith((TOO_COMPLEX, NO_TEXT, GRAMMAR_FAILED)):
                    raise bad_request(f"'{constraint_param}': {reason}", constraint_param, "grammar_failed")
                raise ApiError(500, reason, code="not_finite")


_PASSED_ON = tuple(
    each.name
    for each in dataclasses.fields(SamplingParams)
    if each.name not in ("max_tokens", "logprobs", "prompt_logprobs", "structured_outputs")
)
"""Fields of SamplingParams that are taken unchanged from the request's field of the same name. The endpoints compute
the other four, whose values in a request may have another meaning.
"""


_HINTS = ("cache_pin", "cache_priority", "cache_lifetime")


def tenants_of(config: ServeConfig, keys: ApiKeys) -> Tenants:
    """One tenant for each key, or a single one if the keys share prefixes."""
    return Tenants(() if config.tenants_share else keys.tenants)


@functools.lru_cache(maxsize=4)
def _fingerprint(model_name: str, config: EngineConfig) -> str:
    """A digest of the model and of all settings that may change its answers. It changes when a server takes a codec."""
    parts = (__version__, model_name, config.model, config.cache, config.retain, config.attention)
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def shutting_down() -> ApiError:
    """The answer to new and waiting requests while the server shuts down."""
    headers = {"Retry-After": "5", "Connection": "close"}
    return ApiError(503, "the server is shutting down", code="shutting_down", headers=headers)
