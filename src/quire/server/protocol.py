"""The interface of an engine for the server. `quire.AsyncLLM` and the tests' fake engine implement it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from quire.config import EngineConfig
    from quire.engine.outputs import RequestOutput
    from quire.engine.params import SamplingParams
    from quire.engine.sampling_defaults import SamplingDefaults
    from quire.models.control_tokens import EscapedConversation
    from quire.planning.placement_file import Placement
    from quire.prefixes.cached import CachedPrefix, SaltFilter
    from quire.prefixes.listing import Prefix
    from quire.structured.params import StructuredOutputsParams


class TokenizerProtocol(Protocol):
    """Text to token ids and back."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are not text, such as the end token."""

    @property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token."""
        ...

    @property
    def chat_template(self) -> str:
        """The source of the chat template; empty if there is none."""
        ...

    @property
    def tool_template(self) -> str:
        """The source of the template of conversations with tools; usually `chat_template`."""
        ...

    def added_id(self, text: str) -> int | None:
        """Id of the added token that is written like this, special or not; None if there is none."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; some tokens are only a part of a character."""

    def encode(self, text: str, add_special: bool = True, escape: str = "") -> list[int]:
        """The token ids of `text`, with the model's begin and end tokens if `add_special`, and with the escapes of
        `escape_names`.
        """

    def pieces(self, text: str, num_bytes: int) -> Iterator[str]:
        """A text in pieces of about at most `num_bytes` once normalized."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are not a whole character become U+FFFD."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The messages rendered by the model's chat template, special tokens included."""

    def escape_names(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> EscapedConversation:
        """The conversation with the names of control tokens in texts of users and tools escaped as text."""
        ...


class Operations(Protocol):
    """What an operator sees and does of the instances behind an engine. An instance is named by its place."""

    def state(self) -> dict[str, Any]:
        """The instances, counters, quantiles of stages, the placement, and a switch to another one."""
        ...

    async def drain(self, place: str, *, restart: bool = True) -> None:
        """Lets an instance finish what it has, and ends it. restart: another one takes its place."""

    async def restart(self) -> None:
        """Drains and restarts one instance after the other."""

    def set_role(self, place: str, role: str) -> None:
        """Changes what an instance does. Requests that it has go on."""

    async def switch(self, placement: Placement, *, may_pause: bool = False) -> None:
        """Switches to the instances of a placement. may_pause: requests may wait while no instance serves."""


class EngineProtocol(Protocol):
    """An engine that runs in an event loop.

    `generate` yields deltas: each item has only the new part of `outputs[i].text`, `.token_ids` and `.logprobs`.
    Closing the iterator, or cancelling the task that waits for it, aborts the request and frees its cache within one
    step.
    """

    @property
    def tokenizer(self) -> Any:
        """A `TokenizerProtocol`."""

    @property
    def shape(self) -> Any:
        """The model's shape; the server reads `vocab_size`."""

    @property
    def config(self) -> EngineConfig:
        """The engine's settings."""

    @property
    def max_context(self) -> int:
        """Maximum number of tokens of prompt and answer together."""

    @property
    def context_limit(self) -> str:
        """The limit that sets `max_context`, for messages."""
        ...

    @property
    def model_name(self) -> str:
        """The model's name in requests."""

    @property
    def model_path(self) -> Path:
        """The model's folder or file."""

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The sampling parameters that the model's authors recommend."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests: it has started, and has not been closed or failed."""

    @property
    def operations(self) -> Operations | None:
        """For operators; None if there are no instances."""

    async def compile_grammar(self, wanted: StructuredOutputsParams, cache_salt: str = "") -> object:
        """Compiles the grammar of a constraint, for requests with this salt. It stays compiled as long as the result is
        held. Raises RequestError if no text can be promised to satisfy it.
        """

    async def admit(self, prompt: Any, params: SamplingParams) -> Any:
        """The one check of a request: what it returns is given to `generate`. Raises RequestError for a request that
        can never run, and QueueFullError if the queue is full.
        """

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs of one request as they arrive."""

    def stats(self) -> dict[str, Any]:
        """Counters since start, and the state of the cache."""

    async def prefixes(self, visible: SaltFilter) -> list[Prefix]:
        """The cached prefixes with a visible salt, parents first."""
        ...

    def prefix_key(self, prompt: Any) -> str:
        """The key of a prompt's whole chunks. Raises RequestError for a prompt shorter than a chunk."""
        ...

    async def known_prefixes(self, visible: SaltFilter) -> list[CachedPrefix]:
        """The prefixes with a visible salt in the arena and on the disk, those used last first."""
        ...

    async def find_prefix(self, key: str, visible: SaltFilter) -> CachedPrefix | None:
        """The prefix with this key. None if there is none with a visible salt."""
        ...

    async def drop_prefix(self, key: str, visible: SaltFilter) -> dict[str, int] | None:
        """Drops the prefix with this key. Returns the number of dropped chunks by tier; None if there is none with a
        visible salt.
        """
        ...

    async def pin(self, salts: Iterable[str]) -> None:
        """Computes and pins the prefixes of cache.pin for each salt. Raises ConfigError if the file is invalid or the
        prefixes do not fit.
        """

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Stops the engine. Running requests have `drain_seconds` to finish; then they are aborted."""
