"""The answers of the API, field by field.

The code that builds an answer writes it as a dict of one of these types: mypy checks its keys and values, and nothing
runs besides. /openapi.json is generated from the same types, and tests/server/test_document.py holds real answers to
them.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, NotRequired, TypeVar, get_args

from pydantic import Field, WithJsonSchema

# pydantic takes that of `typing` only from Python 3.12 on, and brings this one.
from typing_extensions import TypedDict

T = TypeVar("T")

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, le=1)]

_FINISH: dict[str, Any] = {"type": "string", "enum": ["stop", "length"]}
Finish = Annotated[str | None, WithJsonSchema(_FINISH)]
"""Why a choice ended; it has ended."""
FinishSoFar = Annotated[str | None, WithJsonSchema({"anyOf": [_FINISH, {"type": "null"}]})]
"""Null until the choice ends."""

Stop = int | str | None
"""The token id or the text that ended a choice."""


class EncodedList(Generic[T]):
    """A JSON list whose elements are encoded already: those of each part, which other lists may have too."""

    __slots__ = ("parts",)

    def __init__(self, *parts: bytes | bytearray) -> None:
        self.parts = [part for part in parts if part]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """For the document it is the list that it stands for."""
        (element,) = get_args(source)
        return handler.generate_schema(list[element])  # type: ignore[valid-type]


MaybeEncodedList = list[T] | EncodedList[T]
"""A list that may be encoded already."""


class ErrorResponse(TypedDict):
    """Every answer with a status of 400 and above."""

    error: ErrorInfo


class ErrorInfo(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class AnswerBase(TypedDict):
    """How every answer to a prompt begins, and every chunk of a streamed one."""

    id: str
    object: str
    created: Count
    model: str
    system_fingerprint: Annotated[str, Field(description="Of model and settings: what may change answers.")]


class PromptTokensDetails(TypedDict):
    """What the cache did for the prompts. Pins and retention are told of where there are any."""

    cached_tokens: Count
    cached_tokens_by_tier: Annotated[
        dict[str, Count], Field(description="The same tokens by where they were: arena, memory, disk.")
    ]
    pinned_tokens: NotRequired[Count]
    kept_fraction: NotRequired[Rate]


class UsageInfo(TypedDict):
    """Token counts of a request."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class TextLogprobs(TypedDict):
    """Log-probabilities of a completion, four parallel lists.

    `top_logprobs` is null where no alternatives were asked for; nulls inside lists stand for a prompt's first token.
    """

    tokens: MaybeEncodedList[str]
    token_logprobs: MaybeEncodedList[float | None]
    top_logprobs: MaybeEncodedList[dict[str, float] | None] | None
    text_offset: MaybeEncodedList[Count]


class PromptLogprob(TypedDict):
    """One token at one position of a prompt."""

    logprob: float
    rank: Count | None
    decoded_token: str


class CompletionChoice(TypedDict):
    """One continuation of a prompt."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish
    stop_reason: Stop
    prompt_logprobs: NotRequired[MaybeEncodedList[dict[str, PromptLogprob] | None]]
    prompt_token_ids: NotRequired[MaybeEncodedList[Count]]
    token_ids: NotRequired[MaybeEncodedList[Count]]


class Completion(AnswerBase):
    """The answer of /v1/completions."""

    choices: list[CompletionChoice]
    usage: UsageInfo


class CompletionDelta(TypedDict):
    """What is new in one choice."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishSoFar
    stop_reason: NotRequired[Stop]
    prompt_token_ids: NotRequired[
        Annotated[MaybeEncodedList[Count], Field(description="In the first chunk of a choice.")]
    ]
    token_ids: NotRequired[list[Count]]


class ChunkBase(AnswerBase):
    """`usage` is there if it was asked for, null in all chunks but the last unless counts were wanted in each."""

    usage: NotRequired[UsageInfo | None]


class CompletionChunk(ChunkBase):
    """The data of one event where /v1/completions streams its answer."""

    choices: list[CompletionDelta]


class UsageChunk(AnswerBase):
    """The data of the last event before [DONE] where usage was asked for."""

    choices: Annotated[list[Any], Field(max_length=0)]
    usage: UsageInfo


class TopLogprob(TypedDict):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of an answer and the best ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of an answer, token by token."""

    content: MaybeEncodedList[TokenLogprob]
    refusal: None


class FunctionCall(TypedDict):
    """The function that is called. arguments: JSON text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(TypedDict):
    """What the model says. content: null where it only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]
    reasoning_content: NotRequired[Annotated[str, Field(description="What the model wrote before its answer.")]]


_CHAT_FINISH: dict[str, Any] = {"type": "string", "enum": ["stop", "length", "tool_calls"]}


class ChatChoice(TypedDict):
    """One answer to a conversation."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Annotated[str | None, WithJsonSchema(_CHAT_FINISH)]
    stop_reason: Stop
    token_ids: NotRequired[list[Count]]


class ChatCompletion(AnswerBase):
    """The answer of /v1/chat/completions."""

    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: NotRequired[MaybeEncodedList[dict[str, PromptLogprob] | None]]
    prompt_token_ids: NotRequired[list[Count]]


class FunctionDelta(TypedDict, total=False):
    """What is new in a call: its name first, then pieces of its arguments."""

    name: str
    arguments: str


class ToolCallDelta(TypedDict):
    """What is new in one call. Its first one has the id, the type and the name."""

    index: Count
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class MessageDelta(TypedDict, total=False):
    """What is new in a message: its role first, then text and calls."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatDelta(TypedDict):
    """What is new in one choice."""

    index: Count
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Annotated[str | None, WithJsonSchema({"anyOf": [_CHAT_FINISH, {"type": "null"}]})]
    stop_reason: NotRequired[Stop]
    token_ids: NotRequired[list[Count]]


class ChatCompletionChunk(ChunkBase):
    """The data of one event where /v1/chat/completions streams its answer."""

    choices: list[ChatDelta]
    prompt_token_ids: NotRequired[Annotated[list[Count], Field(description="In the first chunk.")]]


class EmbeddingUsage(TypedDict):
    """Token counts of texts."""

    prompt_tokens: Count
    total_tokens: Count
    completion_tokens: Count


class Embedding(TypedDict):
    """A text's embedding, with length 1; in base64 its 32-bit numbers, lowest byte first."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class Embeddings(TypedDict):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: MaybeEncodedList[Embedding]
    model: str
    usage: EmbeddingUsage


class ScoreResult(TypedDict):
    """How near two texts are, -1 to 1."""

    object: Literal["score"]
    index: Count
    score: float


class ScoreResponse(TypedDict):
    """The answer of /score."""

    id: str
    object: Literal["list"]
    data: list[ScoreResult]
    model: str
    usage: EmbeddingUsage


class Document(TypedDict):
    """A document's text."""

    text: str


class RerankResult(TypedDict):
    """How near a document is to the query, -1 to 1."""

    index: Count
    relevance_score: float
    document: NotRequired[Document]


class RerankResponse(TypedDict):
    """The answer of /rerank: the nearest documents first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class Capabilities(TypedDict):
    """What can be asked of a model. tools: the format of its calls; reasoning: that of its reasoning, if it does."""

    completion: bool
    chat: bool
    tools: str | None
    reasoning: str | None
    structured_outputs: list[str]
    embeddings: bool
    similarity: bool


class ModelInfo(TypedDict):
    """The served model."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count
    capabilities: Capabilities
    sampling_defaults: Annotated[
        dict[str, float],
        Field(
            description="What the model's makers advise, for parameters that a request leaves out; what is not there"
            " has the API's default."
        ),
    ]


class ModelList(TypedDict):
    """All that is served: one model."""

    object: Literal["list"]
    data: list[ModelInfo]


class TokenizeResponse(TypedDict):
    """The token ids of a text or a conversation."""

    tokens: list[Count]
    count: Count
    max_model_len: Count


class DetokenizeResponse(TypedDict):
    """The text of token ids."""

    prompt: str


class Status(TypedDict):
    """How the server is. calibration: of the codec that the server began without; absent if there is none."""

    status: str
    calibration: NotRequired[CalibrationStatus]


class CalibrationStatus(TypedDict):
    """A calibration beside requests. state: calibrating, waiting (for a moment without requests), taken or failed."""

    codec: str
    state: str
    done: float
    seconds_left: int
    reason: str


class Version(TypedDict):
    """The version of Quire."""

    version: str


class PrefixInfo(TypedDict):
    """A run of chunks that the cache holds. instance: which one of a cluster has it; null with one engine."""

    instance: str | None
    id: str
    space: str
    parent: str | None
    start: Count
    tokens: Count
    text: str | None
    sharers: Count
    hits: Count
    computed: Count
    hit_rate: Rate
    bytes: Count
    idle_seconds: Seconds
    pinned_seconds: Seconds | Literal["forever"] | None


class InstanceLoadInfo(TypedDict):
    """What an instance had to do when it said so last, some tenths of a second ago."""

    running: Count
    waiting: Count
    held: Count
    queued_rows: Count
    free_bytes: Count
    total_bytes: Count


class InstanceInfo(TypedDict):
    """An instance of a cluster. What it has measured is null until it is ready, and its name is empty while none runs
    at its place.
    """

    place: str
    name: str
    role: Literal["prefill", "decode", "mixed"]
    health: Literal["starting", "serving", "draining", "down"]
    pid: Count | None
    cores: list[Count]
    attempts: Count
    saturating_rows: Count | None
    seconds_per_row: Seconds | None
    batch: Count | None
    seconds_per_step: Seconds | None
    cache_bytes: Count | None
    load: InstanceLoadInfo | None


class PlacementInfo(TypedDict):
    """A placement, and what it is predicted to serve: requests per second on GPUs or machines, and the share of
    requests within the latency targets.
    """

    name: str
    rate: Annotated[float, Field(ge=0)]
    cost: Annotated[float, Field(ge=0)]
    unit: str
    attainment: Rate


class SwitchInfo(TypedDict):
    """A switch to another placement that is under way, or that has ended before its end; then `error` says why."""

    to: str
    actions: Count
    done: Count
    now: str
    error: str


class ReplanningInfo(TypedDict):
    """How `cluster.replan` stands: what has changed since the placement was planned, and what came of it so far."""

    phase: Literal["quiet", "suspect", "search", "switch"]
    reason: str
    searches: Count
    switches: Count
    failed: Count


class ClusterInfo(TypedDict):
    """The instances behind a server, counters of its router, and quantiles of seconds by stage. The placement is null
    unless the instances are those of one, the switch unless one is under way or the last one has failed, and replanning
    without `cluster.replan`.
    """

    instances: list[InstanceInfo]
    counts: dict[str, Count]
    stages: dict[str, dict[str, Seconds]]
    placement: PlacementInfo | None
    switch: SwitchInfo | None
    replanning: ReplanningInfo | None


class WarmPrefix(TypedDict):
    """A prompt whose whole chunks are cached now."""

    key: str
    tokens: Count
    cached_tokens: Count
    cached_tokens_by_tier: dict[str, Count]
    pinned_tokens: Count


class PrefixTierInfo(TypedDict):
    """What a tier has of a prefix."""

    bytes: Count
    last_used: Seconds
    pinned_until: Seconds | Literal["forever"] | None


class ListedPrefix(TypedDict):
    """A prefix, and what the arena and the disk have of it."""

    key: str
    parent: str | None
    tokens: Count
    last_used: Seconds
    tiers: dict[str, PrefixTierInfo]


class ListedPrefixes(TypedDict):
    """The prefixes that the caller may see, those used last first."""

    data: MaybeEncodedList[ListedPrefix]
    num_prefixes: Count
    truncated: bool
    scope: Literal["all", "tenant"]


class DroppedPrefix(TypedDict):
    """The number of chunks dropped from each tier."""

    key: str
    dropped: dict[str, Count]


class CacheTotals(TypedDict):
    """Sizes of the whole cache, and of what is the caller's own."""

    bytes_total: Count
    bytes_used: Count
    bytes_cached: Count
    bytes_free: Count
    bytes_evicted: Count
    bytes_retention_freed: Count
    bytes_pinned: Count
    bytes_saved: Count
    cached_tokens: Count
    computed_tokens: Count
    hit_rate: Rate


class TierInfo(TypedDict):
    """A memory beside the arena. All but `found_tokens` is of all tenants; `found_tokens` is the caller's own."""

    bytes: Count
    capacity_bytes: Count
    chunks: Count
    found_tokens: Count
    fetched_bytes: Count
    demoted_bytes: Count
    seconds_reading: Seconds
    seconds_writing: Seconds
    failed_reads: Count
    is_on: bool


class MovesInfo(TypedDict):
    """What decides between fetching and computing, and how that went, in chunks of all tenants. Speeds are null until
    they are known.
    """

    chunk_bytes: Count
    fetched_bytes_per_second: Seconds | None
    prefill_tokens_per_second: Seconds | None
    fetched: Count
    wasted: Count
    computed_instead: Count
    failed_fetches: Count
    lost: Count


class CacheInfo(TypedDict):
    """The prefixes that the caller may see, those used last first and parents before what follows them."""

    prefixes: MaybeEncodedList[PrefixInfo]
    num_prefixes: Count
    truncated: bool
    scope: Literal["all", "tenant"]
    totals: CacheTotals
    tiers: dict[str, TierInfo]
    moves: MovesInfo | None
