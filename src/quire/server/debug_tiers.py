"""The tiers in the answer of /debug/cache. Knows no prompts: all of it is sums."""

from __future__ import annotations

from collections import Counter
from typing import Any

from quire.server import shapes
from quire.server.service import Service


def tiers_of(service: Service, tenant: str, stats: dict[str, Any]) -> dict[str, shapes.TierInfo]:
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


def moves_of(stats: dict[str, Any]) -> shapes.MovesInfo | None:
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
