"""Token counts of requests and tenants, and their form in answers and streamed chunks."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field

from quire.engine.outputs import RequestOutput
from quire.server import shapes
from quire.server.errors import json_bytes
from quire.server.event_stream import DONE, sse_event
from quire.server.schema import StreamOptions


@dataclass
class TenantTokens:
    """Number of prompt tokens of a tenant since start, cached and computed. Each request counts once.

    by_tier  the cached tokens by the tier that had them
    """

    cached: int = 0
    computed: int = 0
    by_tier: Counter[str] = field(default_factory=Counter)


@dataclass
class Usage:
    """Token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    pinned_tokens: int | None = None
    kept_tokens: float | None = None

    def record(self, item: RequestOutput) -> None:
        """Adds the cache counts from the first item of a prompt."""
        self.cached_tokens += item.num_cached_tokens or 0
        for tier, num_tokens in item.cached_by_tier.items():
            self.cached_by_tier[tier] = self.cached_by_tier.get(tier, 0) + num_tokens
        if item.num_pinned_tokens is not None:
            self.pinned_tokens = (self.pinned_tokens or 0) + item.num_pinned_tokens
        if item.kept_fraction is not None:
            self.kept_tokens = (self.kept_tokens or 0.0) + item.kept_fraction * len(item.prompt_token_ids)

    def as_dict(self) -> shapes.UsageInfo:
        """The `usage` object of an answer."""
        details: shapes.PromptTokensDetails = {
            "cached_tokens": self.cached_tokens,
            "cached_tokens_by_tier": dict(self.cached_by_tier),
        }
        if self.pinned_tokens is not None:
            details["pinned_tokens"] = self.pinned_tokens
        if self.kept_tokens is not None:
            details["kept_fraction"] = round(self.kept_tokens / self.prompt_tokens, 4)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": details,
        }


class StreamChunks:
    """The chunks of one streamed answer. Encodes their common beginning once."""

    def __init__(self, head: shapes.AnswerBase, usage: Usage, options: StreamOptions | None) -> None:
        self._usage = usage
        self._is_continuous = options is not None and bool(options.continuous_usage_stats)
        self._includes_usage = options is not None and bool(options.include_usage)
        self._head = head

    @functools.cached_property
    def _begin(self) -> bytes:
        return json_bytes(self.head())[:-1]

    def head(self) -> shapes.ChunkBase:
        """The next chunk without its choices."""
        head: shapes.ChunkBase = {**self._head, "usage": self._usage.as_dict() if self._is_continuous else None}
        if not (self._is_continuous or self._includes_usage):
            del head["usage"]
        return head

    def event(self, choice: shapes.CompletionDelta | shapes.ChatDelta) -> bytes:
        """The server-sent event with a delta of a choice."""
        begin = json_bytes(self.head())[:-1] if self._is_continuous else self._begin
        return b'data: %s,"choices":[%s]}\n\n' % (begin, json_bytes(choice))

    def end(self) -> bytes:
        """The last events: usage, if the request wants it, and [DONE]."""
        if not self._includes_usage:
            return DONE
        last: shapes.UsageChunk = {**self._head, "choices": [], "usage": self._usage.as_dict()}
        return sse_event(last) + DONE
