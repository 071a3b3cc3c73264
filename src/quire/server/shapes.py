"""The answers of the API, field by field.

The code that builds an answer writes it as a dict of one of these types: mypy checks its keys and values,
which costs no time at run time. /openapi.json is generated from the same types, and tests/server/test_shapes.py
checks real answers against them.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, NotRequired, TypeVar, get_args

from pydantic import Field, WithJsonSchema

# pydantic accepts the TypedDict of `typing` only from Python 3.12 on; typing_extensions comes with pydantic.
from typing_extensions import TypedDict

T = TypeVar("T")

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, le=1)]

_FINISH: dict[str, Any] = {"type": "string", "enum": ["stop", "length"]}
Finish = Annotated[str | None, WithJsonSchema(_FINISH)]
"""Why a choice ended."""
FinishSoFar = Annotated[str | None, WithJsonSchema({"anyOf": [_FINISH, {"type": "null"}]})]
"""Null until the choice ends."""

Stop = int | str | None
"""The token id or the text that ended a choice."""


class EncodedList(Generic[T]):
    """A JSON list in encoded parts. Several lists may share a part."""

    __slots__ = ("parts",)

    def __init__(self, *parts: bytes | bytearray) -> None:
        self.parts = [part for part in parts if part]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """The schema of a list of its elements, for the OpenAPI document."""
        (element,) = get_args(source)
        return handler.generate_schema(list[element])  # type: ignore[valid-type]


MaybeEncodedList = list[T] | EncodedList[T]
"""A list, encoded or not."""


class ErrorResponse(TypedDict):
    """The answer with any status of 400 and above."""

    error: ErrorInfo


class ErrorInfo(TypedDict):
    """The error."""

    message: str
    type: str
    param: str | None
    code: str | None


class AnswerBase(TypedDict):
    """The common beginning of all answers, and of all chunks of a streamed answer."""

    id: str
    object: str
    created: Count
    model: str
    system_fingerprint: Annotated[str, Field(description="Digest of all that may change answers.")]


class PromptTokensDetails(TypedDict):
    """Prompt tokens by their source. `pinned_tokens` and `kept_fraction` exist only with pins and with retention."""

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

    `top_logprobs` is null if the request wants no alternatives; nulls inside lists stand for a prompt's first token.
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
    """The new output of one choice."""

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
    """`usage` exists if the request wants it. It is null in all chunks but the last, unless each chunk has counts."""

    usage: NotRequired[UsageInfo | None]


class CompletionChunk(ChunkBase):
    """The data of one event of a streamed answer of /v1/completions."""

    choices: list[CompletionDelta]


class UsageChunk(AnswerBase):
    """The data of the last event before [DONE], if the request wants usage."""

    choices: Annotated[list[Any], Field(max_length=0)]
    usage: UsageInfo


class TopLogprob(TypedDict):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of an answer, and the best tokens at its position."""

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
    """A message of the model. content: null if the message has only calls."""

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
    """The new output of a call: first its name, then pieces of its arguments."""

    name: str
    arguments: str


class ToolCallDelta(TypedDict):
    """The new output of one call. The first delta of a call has its id, type and name."""

    index: Count
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class MessageDelta(TypedDict, total=False):
    """The new output of a message: first its role, then text and calls."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatDelta(TypedDict):
    """The new output of one choice."""

    index: Count
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Annotated[str | None, WithJsonSchema({"anyOf": [_CHAT_FINISH, {"type": "null"}]})]
    stop_reason: NotRequired[Stop]
    token_ids: NotRequired[list[Count]]


class ChatCompletionChunk(ChunkBase):
    """The data of one event of a streamed answer of /v1/chat/completions."""

    choices: list[ChatDelta]
    prompt_token_ids: NotRequired[Annotated[list[Count], Field(description="In the first chunk.")]]


class EmbeddingUsage(TypedDict):
    """Token counts of texts."""

    prompt_tokens: Count
    total_tokens: Count
    completion_tokens: Count


class Embedding(TypedDict):
    """A text's embedding, with length 1; in base64: its 32-bit floats, lowest byte first."""

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
    """The similarity of two texts, -1 to 1."""

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
    """The similarity of a document to the query, -1 to 1."""

    index: Count
    relevance_score: float
    document: NotRequired[Document]


class RerankResponse(TypedDict):
    """The answer of /rerank: the most similar documents first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class Capabilities(TypedDict):
    """The features of a model. tools: its format of calls; reasoning: its format of reasoning, or null."""

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
    """The served models: always one."""

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
    """The state of the server. calibration: for a codec that the server began without; absent without one."""

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
    """A run of cached chunks. instance: the instance of a cluster that holds it; null with one engine."""

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
    """The load of an instance as of its last report, some tenths of a second ago."""

    running: Count
    waiting: Count
    held: Count
    queued_rows: Count
    free_bytes: Count
    total_bytes: Count


class InstanceInfo(TypedDict):
    """An instance of a cluster. Its measurements are null until it is ready. Its name is empty while no instance runs
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
    """A placement and its prediction: requests per second, on a number of GPUs or machines, and the share of requests
    within the latency targets.
    """

    name: str
    rate: Annotated[float, Field(ge=0)]
    cost: Annotated[float, Field(ge=0)]
    unit: str
    attainment: Rate


class SwitchInfo(TypedDict):
    """A switch to another placement that runs or has failed; `error` is the reason of the failure."""

    to: str
    actions: Count
    done: Count
    now: str
    error: str


class ReplanningInfo(TypedDict):
    """The state of `cluster.replan`: what has changed since the placement was planned, and the results so far."""

    phase: Literal["quiet", "suspect", "search", "switch"]
    reason: str
    searches: Count
    switches: Count
    failed: Count


class ClusterInfo(TypedDict):
    """The instances behind a server, counters of its router, and quantiles of seconds by stage. The placement is null
    unless the instances come from one; the switch is null unless one runs or the last one failed; replanning is null
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
    """A tier's copy of a prefix."""

    bytes: Count
    last_used: Seconds
    pinned_until: Seconds | Literal["forever"] | None


class ListedPrefix(TypedDict):
    """A prefix and its copies in the arena and on the disk."""

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
    """Sizes of the whole cache, and of the caller's own prefixes."""

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
    """A memory beside the arena. `found_tokens` counts the caller's tokens; all other fields are of all tenants."""

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
    """Measurements that decide between fetching and computing, and their results, in chunks of all tenants. Speeds are
    null until they are known.
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
    """The prefixes that the caller may see, those used last first, and parents before their children."""

    prefixes: MaybeEncodedList[PrefixInfo]
    num_prefixes: Count
    truncated: bool
    scope: Literal["all", "tenant"]
    totals: CacheTotals
    tiers: dict[str, TierInfo]
    moves: MovesInfo | None
