"""Files of requests: traces of servers, which have times and lengths and no text, and workloads of our own.

A Mooncake trace has one JSON object per line: `timestamp` in milliseconds, `input_length` and `output_length` in
tokens, and `hash_ids`, one per 512 tokens of the prompt; the last may stand for fewer. Prompts that begin with the same
ids begin with the same text. An Azure trace is CSV with the columns TIMESTAMP (date and time), ContextTokens and
GeneratedTokens, and says nothing of what prompts share. A workload of our own is JSON lines: first {"workload": name},
which may be missing, then one object per request with the fields of `Arrival`, such as

    {"at": 0.5, "prompt": [[0, 512], [7, 30]], "num_out": 129}
    {"at": 0.0, "prompt": [[8, 25]], "num_out": 64, "after": 0, "pause": 4.0}

The module also makes token ids of a workload's prompts. It knows ids and lengths, and nothing of the engine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.safe_io import open_file, parse_json
from quire.workload.workload import Arrival, Arrivals, Span, Workload

HASHED_TOKENS = 512
"""Tokens of a trace that one hash id stands for."""
TELLING_TOKENS = 4
"""Number of first tokens of a span that identify it."""

MOST_WHOLE = 10**300
"""Whole numbers of a trace are at most this, so that they have a float."""
MOST_TOKENS = 10**9
"""A length is below this."""
MOST_ID = 1 << 62
"""Ids of spans are below this, so that copies of a workload can have others."""

MOST_SECONDS = 1e9
"""Times of a workload are at most this, 31 years: beyond it gaps are lost in the rounding of sums."""

FORMS = (
    'CSV with TIMESTAMP, ContextTokens and GeneratedTokens, a Mooncake trace, or JSON lines like {"at": 0.5, "prompt":'
    ' [[1, 300]], "num_out": 40}'
)
_Row = TypeVar("_Row")

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace.

    line           its number in the file, from 1
    seconds        arrival time; in an Azure trace since its first request
    input_tokens   length of its prompt
    output_tokens  length of its answer, at least 1
    blocks         the prompt's hash ids, numbered from 0 as they first appear in the trace; none in an Azure trace
    """

    line: int
    seconds: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a Mooncake trace, at most `limit`. Raises ConfigError with file and line for an invalid line."""
    numbers: dict[int, int] = {}
    return _in_order(path, _read(path, limit, lambda line, text: _request(line, text, numbers)))


def read_azure(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests of an Azure trace, at most `limit`. Raises ConfigError with file and line for an invalid line."""
    places: list[int] = []
    first: datetime | None = None

    def parse(line: int, text: str) -> TraceRequest | None:
        nonlocal first
        cells = [cell.strip().strip('"') for cell in text.split(",")]
        if not places:
            if missing := [name for name in AZURE_COLUMNS if name not in cells]:
                raise ValueError(f"the header has no column {', '.join(missing)}")
            places.extend(map(cells.index, AZURE_COLUMNS))
            return None
        if len(cells) <= max(places):
            raise ValueError(f"{len(cells)} cells; the header asks for {max(places) + 1}")
        time, *lengths = (cells[place] for place in places)
        at = _time(time)
        first = first or at
        # Only digits, and few: int() takes signs and underscores too, and raises for too many.
        counts = (int(cell) if cell.isascii() and cell.isdigit() and len(cell) < 20 else cell for cell in lengths)
        num_in, num_out = map(_whole, AZURE_COLUMNS[1:], counts, (1, 0))
        return TraceRequest(line, (at - first).total_seconds(), num_in, max(1, num_out), ())

    return _in_order(path, _read(path, limit, parse))


def read_workload(path: Path, limit: int | None = None) -> Workload:
    """The requests of a file, at most `limit`: of an Azure trace, a Mooncake trace or JSON lines of our own.

    Prompts of an Azure trace share nothing: each is one span. Those of a Mooncake trace have one span per hash id.
    The times of a trace begin with 0.
    Raises ConfigError with file and line for what is no request.
    """
    try:
        with open_file(path, encoding="utf-8-sig") as file:
            head = next((text.strip() for text in file if text.strip()), "")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the workload {path}: {error}") from error
    if head.startswith("{"):
        try:
            is_own = not {"workload", "prompt", "num_out"}.isdisjoint(parse_json(head))
        except ValueError:
            is_own = False
        return _read_own(path, limit) if is_own else _workload(path, read_trace(path, limit))
    if AZURE_COLUMNS[0] not in head:
        said = f"starts with {head!r:.60}" if head else "is empty"
        raise ConfigError(f"{path} {said}; a workload is {FORMS}")
    return _workload(path, read_azure(path, limit))


def tokens(workload: Workload, vocabulary: range, seed: int) -> list[list[int]]:
    """Token ids of the own spans of every request, for a real server.

    A token depends on the id of its span, its place in the span, and the seed. Spans of different ids differ within
    their first 4 tokens; shorter ones may be equal. A request that follows another one begins with the answer that the
    server gave, which is not among the tokens.

    vocabulary  token ids to use
    Raises ConfigError if 4 tokens do not tell the ids apart.
    """
    columns, base = workload.columns, len(vocabulary)
    largest = int(columns.ids.max())
    if largest >= base**TELLING_TOKENS:
        raise ConfigError(f"4 of {base} tokens cannot tell span {largest} apart; use a larger vocabulary or lower ids")
    table = list(vocabulary)  # prompts share its integers: 8 bytes per token instead of 36
    powers = np.array([base**place for place in range(TELLING_TOKENS)], dtype=np.int64)
    offsets = _mixed(np.arange(TELLING_TOKENS, dtype=np.uint64) + np.uint64(seed)) % np.uint64(base)
    shifts = offsets.astype(np.int64)
    prompts = []
    for start, end in itertools.pairwise(columns.start.tolist()):
        sizes = columns.sizes[start:end]
        ids = np.repeat(columns.ids[start:end], sizes)
        places = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        telling = np.minimum(places, TELLING_TOKENS - 1)
        told = (ids // powers[telling] + shifts[telling]) % base
        words = _mixed(places.astype(np.uint64) + (np.uint64(seed) << np.uint64(32)))
        drawn = _mixed(words ^ ids.astype(np.uint64)) % np.uint64(base)
        chosen = np.where(places < TELLING_TOKENS, told, drawn.astype(np.int64))
        prompts.append([table[each] for each in chosen.tolist()])
    return prompts


def _workload(path: Path, requests: Sequence[TraceRequest]) -> Workload:
    """The requests of a trace. A prompt without blocks is one span of its own."""
    blocks = [each.blocks or (index,) for index, each in enumerate(requests)]
    count, lengths = len(blocks), np.array([len(each) for each in blocks])
    ids = np.fromiter(itertools.chain.from_iterable(blocks), dtype=np.int64)
    start = np.cumsum([0, *lengths], dtype=np.int64)
    num_in = np.array([each.input_tokens for each in requests])
    sizes = np.full(len(ids), HASHED_TOKENS, dtype=np.int64)
    sizes[start[1:] - 1] = num_in - HASHED_TOKENS * (lengths - 1)
    at = np.array([each.seconds - requests[0].seconds for each in requests])
    num_out = np.array([each.output_tokens for each in requests], dtype=np.int64)
    after = np.full(count, -1, dtype=np.int64)
    return Workload(path.stem, Arrivals(at, np.zeros(count), num_out, after, start, ids, sizes))


def _read_own(path: Path, limit: int | None) -> Workload:
    name: str | None = None

    def parse(line: int, text: str) -> tuple[int, Arrival] | None:
        nonlocal name
        fields = parse_json(text)
        if name is None:
            name = str(fields.get("workload", path.stem))
            if "workload" in fields:
                return None
        return line, _arrival(fields)

    lines, arrivals = zip(*_read(path, limit, parse), strict=True)
    columns = Arrivals.of(arrivals)
    if fault := columns.fault():
        raise ConfigError(f"{path} line {lines[fault[0]]}: {fault[1]}")
    assert name is not None
    return Workload(name, columns)


def _arrival(fields: Any) -> Arrival:
    """A request of a line. Raises ValueError if a field has the wrong type."""
    if not isinstance(fields, dict):
        raise ValueError(f"a request is an object, not {fields!r:.60}")
    seconds = [fields.get("at"), fields.get("pause", 0.0)]
    for name, value in zip(("at", "pause"), seconds, strict=True):
        if not _is_number(value):
            raise ValueError(f"{name} is {value!r:.60}; it must be seconds")
        if value > MOST_SECONDS:
            raise ValueError(f"{name} is {value!r:.60}; it must be at most {MOST_SECONDS:.0e} seconds")
    prompt = fields.get("prompt")
    if not isinstance(prompt, list) or any(not isinstance(span, list) or len(span) != 2 for span in prompt):
        raise ValueError(f"prompt is {prompt!r:.60}; it must be a list of spans [id, number of tokens]")
    spans = [
        Span(_whole("an id of its prompt", span, 0, MOST_ID), _whole("a span of its prompt", size, 1))
        for span, size in prompt
    ]
    num_out, after = _whole("num_out", fields.get("num_out"), 1), _whole("after", fields.get("after", -1), -1)
    return Arrival(float(seconds[0]), tuple(spans), num_out, after, float(seconds[1]))


def _read(path: Path, limit: int | None, parse: Callable[[int, str], _Row | None]) -> list[_Row]:
    """What `parse` makes of the lines of a file that are not empty. It raises ValueError, and returns None for a
    header.
    """
    rows: list[_Row] = []
    try:
        with open_file(path, encoding="utf-8-sig") as file:
            for line, text in enumerate(file, 1):
                if len(rows) == limit:
                    break
                if not text.strip():
                    continue
                try:
                    row = parse(line, text)
                except ValueError as error:
                    raise ConfigError(f"{path} line {line}: {error}") from error
                if row is not None:
                    rows.append(row)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    if not rows:
        raise ConfigError(f"the trace {path} has no requests")
    return rows


def _in_order(path: Path, requests: list[TraceRequest]) -> list[TraceRequest]:
    for before, each in itertools.pairwise(requests):
        if each.seconds < before.seconds:
            raise ConfigError(f"{path} line {each.line}: its timestamp is before that of the line above")
    return requests


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"TIMESTAMP is {text!r:.60}; it must be like 2023-11-16 18:15:46.68") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value of a JSON text is a number that is no larger than a float can be."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= MOST_WHOLE)


def _whole(name: str, value: object, least: int, most: int = MOST_TOKENS) -> int:
    if type(value) is not int or not least <= value < most:
        raise ValueError(f"{name} is {value!r:.60}; it must be a whole number of at least {least} and below {most}")
    return value


def _request(line: int, text: str, numbers: dict[int, int]) -> TraceRequest:
    """Parses a line and adds new ids to `numbers`. Raises ValueError for an invalid line."""
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a request is an object, not {text.strip()!r:.60}")
    time, hash_ids = fields.get("timestamp"), fields.get("hash_ids")
    if not _is_number(time) or not 0 <= time < math.inf:
        raise ValueError(f"timestamp is {time!r:.60}; it must be milliseconds, at least 0")
    num_in = _whole("input_length", fields.get("input_length"), 1)
    num_out = _whole("output_length", fields.get("output_length"), 0)
    if not isinstance(hash_ids, list) or any(type(each) is not int for each in hash_ids):
        raise ValueError(f"hash_ids is {hash_ids!r:.60}; it must be a list of whole numbers")
    needed = -(-num_in // HASHED_TOKENS)
    if len(hash_ids) != needed:
        raise ValueError(
            f"hash_ids has {len(hash_ids)} ids; {num_in} tokens in blocks of {HASHED_TOKENS} have {needed}"
        )
    blocks = tuple(numbers.setdefault(each, len(numbers)) for each in hash_ids)
    return TraceRequest(line, time / 1000, num_in, max(1, num_out), blocks)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64: a bijection that mixes all bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
