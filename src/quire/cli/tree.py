"""`quire inspect --tree`: prints the prefixes in the cache of a running server as a tree.

Knows the format of GET /debug/cache; loads no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.cli.remote import known_format, plain
from quire.config import format_bytes

COLUMNS = ("prefix", "key", "tokens", "sharers", "hits", "hit rate", "bytes", "last use", "pinned")
PIPED_WIDTH = 160
SHOWN_KEY = 8
KEYS_WIDTH = 100
MIN_TEXT_WIDTH = 12


def print_tree(answer: dict[str, Any]) -> None:
    """Prints the prefixes, each below its parent, and the totals. Raises QuireError for an answer in another format."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPED_WIDTH)
    with known_format():
        rows = [(guide, _cells(prefix)) for guide, prefix in _rows(answer["prefixes"])]
        columns: tuple[str, ...] = COLUMNS
        if console.width < KEYS_WIDTH:
            columns, rows = _without_keys(columns), [(guide, _without_keys(cells)) for guide, cells in rows]
        lines = _totals(answer)
    table = Table(box=None, pad_edge=False, header_style="bold")
    # Numbers take the width they need. The text gets the rest and is truncated here, by its width in terminal cells.
    numbers = [max(map(len, column)) for column in zip(columns[1:], *(cells[1:] for _, cells in rows), strict=True)]
    room = max(MIN_TEXT_WIDTH, console.width - sum(numbers) - 2 * len(numbers) - 2)
    table.add_column(columns[0], no_wrap=True)
    for name, width in zip(columns[1:], numbers, strict=True):
        table.add_column(name, no_wrap=True, min_width=width, justify="left" if name == columns[-1] else "right")
    for guide, cells in rows:
        # Text, so that brackets in a prompt are not read as markup.
        text = Text(guide, "dim") + Text(cells[0])
        text.truncate(room, overflow="ellipsis")
        table.add_row(text, *map(Text, cells[1:]))
    if rows:
        console.print(table, soft_wrap=console.width < room + sum(numbers) + 2 * len(numbers))
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _rows(prefixes: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The prefixes in depth-first order, each with the tree lines before it. A prefix without its parent is a root. If
    there are several spaces, each root shows its space; in a cluster also its instance.
    """
    known = {_place(prefix) for prefix in prefixes}
    several = len({prefix["space"] for prefix in prefixes}) > 1
    kept: set[Any] = set()
    for prefix in reversed(prefixes):
        if prefix["pinned_seconds"] is not None or _place(prefix) in kept:
            kept.add(_place(prefix, "parent"))
    children: dict[Any, list[dict[str, Any]]] = {}
    for prefix in prefixes:
        parent = _place(prefix, "parent")
        children.setdefault(parent if parent in known else None, []).append(prefix)
    first = sorted(children.pop(None, []), key=lambda prefix: (str(prefix["instance"] or ""), str(prefix["space"])))
    todo = [(_label(prefix, several), "", prefix) for prefix in reversed(first)]
    while todo:
        guide, indent, prefix = todo.pop()
        yield guide, prefix | {"leads_to_pin": _place(prefix) in kept}
        below = children.pop(_place(prefix), [])
        todo += [
            (indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  "), child)
            for last, child in reversed([(child is below[-1], child) for child in below])
        ]


def _place(prefix: dict[str, Any], which: str = "id") -> tuple[Any, Any]:
    """The key of a prefix, or of its parent, among the prefixes of all instances."""
    return prefix["instance"], prefix[which]


def _label(prefix: dict[str, Any], with_space: bool) -> str:
    """The text before a root."""
    space = f"[{prefix['space'][:4]}] " if with_space else ""
    return f"{prefix['instance']} {space}" if prefix["instance"] else space


def _cells(prefix: dict[str, Any]) -> tuple[str, ...]:
    start, tokens, pinned = prefix["start"], prefix["tokens"], prefix["pinned_seconds"]
    return (
        "(several keys share: no text)" if prefix["text"] is None else plain(prefix["text"]),
        prefix["id"][:SHOWN_KEY],
        f"{start:,}-{start + tokens:,}",
        f"{prefix['sharers']:,}",
        f"{prefix['hits']:,}",
        f"{prefix['hit_rate']:.0%}",
        format_bytes(prefix["bytes"]),
        "now" if prefix["sharers"] else f"{_duration(prefix['idle_seconds'])} ago",
        ("below" if prefix["leads_to_pin"] else "")
        if pinned is None
        else "forever"
        if pinned == "forever"
        else f"{_duration(pinned)} more",
    )


def _without_keys(cells: tuple[str, ...]) -> tuple[str, ...]:
    """The cells of a row for a narrow terminal."""
    return cells[0], *cells[2:]


def _totals(answer: dict[str, Any]) -> list[str]:
    totals = answer["totals"]
    size = {name: format_bytes(totals[f"bytes_{name}"]) for name in _SIZES}
    count = answer["num_prefixes"]
    lines = [f"{count:,} prefix{'' if count == 1 else 'es'}" + (" of this API key" * (answer["scope"] == "tenant"))]
    if answer["truncated"]:
        lines[0] += f"; showing the {len(answer['prefixes']):,} used last"
    lines.append(
        f"cache of {size['total']}: {size['used']} used, {size['cached']} cached, {size['free']} free;"
        f" {size['evicted']} evicted since start"
    )
    lines.append(f"pinned {size['pinned']}; sharing saves {size['saved']} now")
    lines.append(
        f"hit rate {totals['hit_rate']:.1%}: {totals['cached_tokens']:,} prompt tokens found,"
        f" {totals['computed_tokens']:,} computed"
    )
    return lines


_SIZES = ("total", "used", "cached", "free", "evicted", "pinned", "saved")


def _duration(seconds: float) -> str:
    """Seconds for people, in whole units."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length):,} {unit}"
    return f"{int(seconds):,} s"
