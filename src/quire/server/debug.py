"""GET /debug/cache: the caller's prefixes in the cache. It helps to find out why a request was slow.

It shows the beginnings of prompts, so access is limited. A caller sees only prefixes of its own tenant. If several
tenants share, it sees no text. On a public server without keys it sees nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.server import shapes
from quire.server.engine_metrics import hit_rate
from quire.server.errors import ApiError, bad_request
from quire.server.event_stream import unless_disconnected
from quire.server.json_encoding import encoded, pieces
from quire.server.service import Service
from quire.server.usage import TenantTokens

if TYPE_CHECKING:
    from quire.prefixes.listing import Prefix

T = TypeVar("T")

LIMIT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 100_000, "default": 1000}
"""Schema of the number of prefixes in the answer."""

TEXT_CHARS = 80

# A character has at most four bytes in UTF-8, and a token at least one.
TEXT_TOKENS = 4 * TEXT_CHARS

# The engine answers between steps, and no step takes this long.
ENGINE_TIMEOUT_SECONDS = 30.0


async def show_cache(service: Service, request: Request) -> Response:
    """Answer one request."""
    check_allowed(service)
    limit = limit_of(request)
    service.check_ready()
    found = await unless_disconnected(request.receive, _contents(service, str(request.state.tenant), limit))
    return Response(b"".join(pieces(found)), media_type="application/json")


async def with_engine_timeout(answer: Awaitable[T]) -> T:
    """Awaits the engine's answer. Raises ApiError 503 if it takes too long."""
    try:
        async with asyncio.timeout(ENGINE_TIMEOUT_SECONDS):
            return await answer
    except TimeoutError:
        raise ApiError(503, "the engine is too busy to answer; try again", code="busy") from None


def check_allowed(service: Service) -> None:
    """Raises ApiError 403 on a public server without keys: its callers may not read each other's prompts."""
    if service.is_open:
        raise ApiError(
            403,
            "this endpoint shows prompts, and this server is public (serve.allow_public) and has no API keys;"
            " set serve.api_key_file",
            code="prompts_not_shown",
        )


def check_query(request: Request, known: str) -> None:
    """Raises ApiError 400 for any query parameter but `known`."""
    unknown = next((name for name in request.query_params if name != known), None)
    if unknown is not None:
        raise bad_request(f"Unknown parameter: '{unknown[:64]}'.", unknown[:64], "unknown_parameter")


def limit_of(request: Request) -> int:
    """The requested number of prefixes. Raises ApiError 400."""
    check_query(request, "limit")
    if len(request.query_params.getlist("limit")) > 1:
        raise bad_request("'limit' is given more than once", "limit")
    low, high = LIMIT["minimum"], LIMIT["maximum"]
    text = request.query_params.get("limit", str(LIMIT["default"]))
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and low <= int(text) <= high):
        raise bad_request(f"'limit' is '{text[:64]}'; it must be an integer from {low} to {high}", "limit")
    return int(text)


async def _contents(service: Service, tenant: str, limit: int) -> shapes.CacheInfo:
    """The part of the cache that the caller may see: the prefixes used last, parents first, and totals."""
    found = await with_engine_timeout(service.engine.prefixes(service.tenants.visible_salts(tenant)))
    stats = service.engine.stats()
    # Using a prefix uses its parents, so a parent's last use is never older: the limit keeps all parents.
    shown = sorted(found, key=lambda prefix: (prefix.idle_seconds, prefix.start))[:limit]
    # Tenants that share the cache may still not read each other's prompts.
    readable = service.tenants.are_isolated or len(service.keys.keys) <= 1
    return {
        "prefixes": await asyncio.to_thread(_described, shown, service.engine.tokenizer if readable else None),
        "num_prefixes": len(found),
        "truncated": len(shown) < len(found),
        "scope": "tenant" if service.tenants.are_isolated else "all",
        "totals": _totals(service, tenant, stats, found),
        "tiers": _tiers(service, tenant, stats),
        "moves": _moves(stats),
    }


def _described(prefixes: Sequence[Prefix], tokenizer: Any) -> shapes.EncodedList[shapes.PrefixInfo]:
    """The prefixes as JSON, each with the beginning of its own text if there is a tokenizer to read it with."""
    found: Iterator[shapes.PrefixInfo] = (
        {
            "instance": prefix.instance or None,
            "id": prefix.id,
            "space": prefix.space,
            "parent": prefix.parent,
            "start": prefix.start,
            "tokens": prefix.num_tokens,
            "text": None if tokenizer is None else _beginning(prefix, tokenizer),
            "sharers": prefix.sharers,
            "hits": prefix.hits,
            "computed": prefix.computed,
            "hit_rate": round(prefix.hit_rate, 4),
            "bytes": prefix.num_bytes,
            "idle_seconds": round(prefix.idle_seconds, 3),
            "pinned_seconds": _pinned(prefix.pinned_seconds),
        }
        for prefix in prefixes
    )
    return shapes.EncodedList(encoded(found))


def _beginning(prefix: Prefix, tokenizer: Any) -> str:
    """The first characters of a prefix's own text, from where it differs from its parent's other children."""
    same = prefix.num_same
    text: str = tokenizer.decode(prefix.token_ids[same : same + TEXT_TOKENS], skip_special=False)
    return ("…" * (same > 0) + text)[:TEXT_CHARS]


def _pinned(seconds: float | None) -> float | Literal["forever"] | None:
    if seconds is None:
        return None
    return "forever" if math.isinf(seconds) else round(max(0.0, seconds), 3)


def _totals(service: Service, tenant: str, stats: dict[str, Any], found: Sequence[Prefix]) -> shapes.CacheTotals:
    """Sizes of the arena, which all tenants share, and of the caller's own prefixes."""
    cache = stats["cache"]
    if service.tenants.are_isolated:
        tokens = service.tenant_tokens.get(tenant, TenantTokens())
    else:
        tokens = TenantTokens(stats["prefill_tokens_cached"], stats["prefill_tokens_computed"])
    return {
        "bytes_total": cache["bytes_total"],
        "bytes_used": cache["bytes_used"],
        "bytes_cached": cache["bytes_cached"],
        "bytes_free": cache["bytes_free"],
        "bytes_evicted": cache["bytes_evicted"],
        "bytes_retention_freed": cache["bytes_retention_freed"],
        "bytes_pinned": _pinned_bytes(found),
        "bytes_saved": sum(prefix.num_bytes * max(0, prefix.sharers - 1) for prefix in found),
        "cached_tokens": tokens.cached,
        "computed_tokens": tokens.computed,
        "hit_rate": round(hit_rate(tokens.cached, tokens.computed), 4),
    }


def _pinned_bytes(found: Sequence[Prefix]) -> int:
    """Bytes of the pinned prefixes and of all their ancestors. `found` has parents first."""
    kept: set[tuple[str, str | None]] = set()
    for prefix in reversed(found):
        own, parent = (prefix.instance, prefix.id), (prefix.instance, prefix.parent)
        if prefix.pinned_seconds is not None or own in kept:
            kept |= {own, parent}
    return sum(prefix.num_bytes for prefix in found if (prefix.instance, prefix.id) in kept)


def _tiers(service: Service, tenant: str, stats: dict[str, Any]) -> dict[str, shapes.TierInfo]:
    """The tiers by name, nearest first; empty without tiers."""
    found: Counter[str] = Counter()
    for name, tokens in service.tenant_tokens.items():
        if name == tenant or not service.tenants.are_isolated:
            found.update(tokens.by_tier)
    return {
        name: {
            "bytes": each["bytes"],
            "capacity_bytes": each["cap_bytes"],
            "chunks": each["chunks"],
            "found_tokens": found[name],
            "fetched_bytes": each["bytes_read"],
            "demoted_bytes": each.get("bytes_written", 0),
            "seconds_reading": round(each.get("seconds_reading", 0.0), 3),
            "seconds_writing": round(each.get("seconds_writing", 0.0), 3),
            "failed_reads": each.get("num_failed", 0),
            "is_on": bool(each["is_on"]),
        }
        for name, each in stats.get("tiers", {}).items()
    }


def _moves(stats: dict[str, Any]) -> shapes.MovesInfo | None:
    """Speeds and counts of moving chunks; None without tiers."""
    if "moves" not in stats:
        return None
    moves, costs = stats["moves"], stats["costs"]
    return {
        "chunk_bytes": costs["chunk_bytes"],
        "fetched_bytes_per_second": costs["fetched_bytes_per_second"],
        "prefill_tokens_per_second": costs["prefill_tokens_per_second"],
        "fetched": moves["fetched"],
        "wasted": moves["wasted"],
        "computed_instead": moves["computed_instead"],
        "failed_fetches": moves["failed_transfers"],
        "lost": moves["lost"],
    }
