"""`quire inspect --tiers`: the capacity of a disk for a model's cache, and the contents of a running server's tiers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from quire.cli import shared
from quire.config import format_bytes
from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.inspection import ModelInspection


def print_disk(name: str, found: ModelInspection, *, as_json: bool) -> None:
    """Prints the capacity of tiers.disk's folder, and its speed if it exists. Raises QuireError if the folder cannot be
    written, or if an engine would refuse it.
    """
    facts, shape = found.disk(), found.shape
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    is_example = facts["folder"] is None
    per_token, speed = facts["disk_bytes_per_token"], facts["bytes_per_second"]
    size = format_bytes(facts["capacity_bytes"])
    where = "a folder would hold; give --tiers.disk DIR:SIZE" if is_example else facts["folder"]
    rows = [
        ("bytes per token", format_bytes(round(per_token)), "on the disk, with headers and padding"),
        (f"tokens in {size}", f"{facts['tokens']:,}", where),
        ("prompts of 4,096 tokens", f"{facts['tokens'] // 4096:,}", ""),
    ]
    if speed is not None:
        limited = ", limited by tiers.disk_bandwidth" if facts["is_limited"] else ", measured now"
        rows += [
            ("bandwidth", f"{format_bytes(round(speed))}/s", f"write and read{limited}"),
            ("fetching 4,096 tokens", f"{4096 * per_token / speed:.2f} s", ""),
            ("break-even", f"{speed / per_token:,.0f} tokens/s", "a slower prefill makes fetching the faster way"),
        ]
    print(f"{name}: {facts['codec']}, {shape.num_layers} layers, {shape.num_kv_heads} kv heads")
    width = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    for label, value, note in rows:
        print(f"{label:{width[0]}}   {value:{width[1]}}   {note}".rstrip())


def print_tiers(answer: dict[str, Any], *, as_json: bool) -> None:
    """Prints the tiers in the answer of /debug/cache. Raises QuireError for an answer in another format."""
    try:
        tiers, moves = answer["tiers"], answer["moves"]
        if as_json:
            print(json.dumps({"tiers": tiers, "moves": moves}, indent=2))
            return
        rows = [_row(name, tier) for name, tier in tiers.items()]
        lines = [] if moves is None else _lines(moves)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise QuireError("the server's answer has no tiers; is it an older version of Quire?") from error
    if not rows:
        print("this server has no tiers; give it --tiers.disk DIR:SIZE")
        return
    shared.print_table(("tier", "bytes", "of", "chunks", "found", "fetched", "demoted", "failed reads", "state"), rows)
    for line in lines:
        print(line)


def _row(name: str, tier: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        format_bytes(tier["bytes"]),
        format_bytes(tier["capacity_bytes"]),
        f"{tier['chunks']:,}",
        f"{tier['found_tokens']:,} tokens",
        _moved(tier["fetched_bytes"], tier["seconds_reading"]),
        _moved(tier["demoted_bytes"], tier["seconds_writing"]),
        f"{tier['failed_reads']:,}",
        "on" if tier["is_on"] else "off",
    )


def _moved(num_bytes: int, seconds: float) -> str:
    return format_bytes(num_bytes) + (f" in {seconds:,.1f} s" if seconds else "")


def _lines(moves: dict[str, Any]) -> list[str]:
    fetch, prefill = moves["fetched_bytes_per_second"], moves["prefill_tokens_per_second"]
    per_token = moves["chunk_bytes"] / 64
    lines = [
        f"chunks of 64 tokens: {moves['fetched']:,} fetched, {moves['wasted']:,} fetched for nobody,"
        f" {moves['computed_instead']:,} computed because that was faster, {moves['lost']:,} evicted without a copy;"
        f" {moves['failed_fetches']:,} fetches failed"
    ]
    known = []
    if fetch:
        known.append(f"fetching {format_bytes(round(fetch))}/s, {fetch / per_token:,.0f} tokens/s")
    if prefill:
        known.append(f"prefill {prefill:,.0f} tokens/s")
    if fetch and prefill:
        known.append(f"{'fetching' if fetch / per_token > prefill else 'computing'} is faster for long prefixes")
    return lines + (["; ".join(known)] if known else [])
