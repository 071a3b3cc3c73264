"""What the server needs from an engine: `quire.AsyncLLM` fulfils it, and so does the fake engine of the tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.outputs import RequestOutput
    from quire.engine.params import SamplingParams
    from quire.engine.prefixes import Prefix
    from quire.engine.sampling_defaults import SamplingDefaults


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are no text, such as the end token."""

    @property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; part of a character for some."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The token ids of `text`, with the model's begin and end tokens if `add_special`."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that form no character become U+FFFD."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The messages rendered by the model's chat template, special tokens included."""


class Engine(Protocol):
    """An engine that runs while its event loop does.

    `generate` yields deltas: each item holds only what is new in `outputs[i].text`, `.token_ids` and `.logprobs`.
    Closing the iterator, or cancelling the task that waits for it, aborts the request and frees its cache within one
    step.
    """

    @property
    def tokenizer(self) -> Any:
        """A `Tokenizer`."""

    @property
    def shape(self) -> Any:
        """The model's shape; `vocab_size` is asked for."""

    @property
    def config(self) -> EngineConfig:
        """The engine's settings."""

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together that one request may have."""

    @property
    def context_limit(self) -> str:
        """What sets `max_context`, for messages."""
        ...

    @property
    def model_name(self) -> str:
        """The name that requests ask for."""

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """What the model's makers advise."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether a request would be worked on: started, not closed, not failed."""

    def prepare(self, prompt: Any, params: SamplingParams) -> object:
        """Raises RequestError for a request that can never run and QueueFullError for one that cannot wait now."""

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request, as they come."""

    def stats(self) -> dict[str, Any]:
        """Counters since start, and the state of the cache."""

    async def prefixes(self, visible: Callable[[str], bool]) -> list[Prefix]:
        """What the cache holds of the salts that are visible, parents first."""
        ...

    async def pin(self, salts: Iterable[str]) -> None:
        """Computes and keeps the prefixes of cache.pin for each salt. Raises ConfigError for what cannot be."""

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Stop: let running requests finish for `drain_seconds`, then abort them."""
