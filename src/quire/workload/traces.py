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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.gc_pause import gc_paused
from quire.safe_io import open_file, parse_json
from quire.workload.workload import Arrivals, Workload

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


class _Request(NamedTuple):
    """A request of a line: the fields of `Arrival`, but ids and tokens of its spans by themselves."""

    at: float
    ids: Sequence[int]
    sizes: Sequence[int]
    num_out: int
    after: int = -1
    pause: float = 0.0


Parse = Callable[[str], _Request | None]
"""Makes a request of a line. None: it is a header. Raises ValueError for what is no request."""

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(path: Path, limit: int | None = None) -> Arrivals:
    """The requests of a Mooncake trace, at most `limit`. Raises ConfigError with file and line for an invalid line."""
    return _read(path, limit, _mooncake())


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
        return _read_own(path, limit) if is_own else Workload(path.stem, read_trace(path, limit))
    if AZURE_COLUMNS[0] not in head:
        said = f"starts with {head!r:.60}" if head else "is empty"
        raise ConfigError(f"{path} {said}; a workload is {FORMS}")
    return Workload(path.stem, _read(path, limit, _azure()))


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


def _read_own(path: Path, limit: int | None) -> Workload:
    name: str | None = None

    def parse(text: str) -> _Request | None:
        nonlocal name
        fields = parse_json(text)
        if name is None:
            name = str(fields.get("workload", path.stem))
            if "workload" in fields:
                return None
        return _own(fields)

    columns = _read(path, limit, parse)
    assert name is not None
    return Workload(name, columns)


def _own(fields: Any) -> _Request:
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
    ids = [_whole("an id of its prompt", span, 0, MOST_ID) for span, _ in prompt]
    sizes = [_whole("a span of its prompt", size, 1) for _, size in prompt]
    num_out, after = _whole("num_out", fields.get("num_out"), 1), _whole("after", fields.get("after", -1), -1)
    return _Request(float(seconds[0]), ids, sizes, num_out, after, float(seconds[1]))


def _azure() -> Parse:
    """Parses the lines of an Azure trace, of which the first is the header."""
    places: list[int] = []
    times: list[datetime] = []

    def parse(text: str) -> _Request | None:
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
        # Only digits, and few: int() takes signs and underscores too, and raises for too many.
        counts = (int(cell) if cell.isascii() and cell.isdigit() and len(cell) < 20 else cell for cell in lengths)
        num_in, num_out = map(_whole, AZURE_COLUMNS[1:], counts, (1, 0))
        _append(times, at)
        return _Request((at - times[0]).total_seconds(), [len(times) - 1], [num_in], max(1, num_out))

    return parse


def _mooncake() -> Parse:
    """Parses the lines of a Mooncake trace. Hash ids are numbered from 0 as they first appear."""
    numbers: dict[int, int] = {}
    times: list[float] = []

    def parse(text: str) -> _Request:
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
        if not isinstance(hash_ids, list) or {*map(type, hash_ids)} - {int}:
            raise ValueError(f"hash_ids is {hash_ids!r:.60}; it must be a list of whole numbers")
        needed = -(-num_in // HASHED_TOKENS)
        if len(hash_ids) != needed:
            raise ValueError(
                f"hash_ids has {len(hash_ids)} ids; {num_in} tokens in blocks of {HASHED_TOKENS} have {needed}"
            )
        _append(times, time / 1000)
        ids = [numbers.setdefault(each, len(numbers)) for each in hash_ids]
        sizes = [HASHED_TOKENS] * (needed - 1) + [num_in - HASHED_TOKENS * (needed - 1)]
        return _Request(times[-1] - times[0], ids, sizes, max(1, num_out))

    return parse


def _append(times: list[Any], time: Any) -> None:
    """Appends the time of a line. Raises ValueError if it is before that of the line above."""
    if times and time < times[-1]:
        raise ValueError("its timestamp is before that of the line above")
    times.append(time)


@gc_paused()
def _read(path: Path, limit: int | None, parse: Parse) -> Arrivals:
    """The requests of a file, at most `limit`. Lines without text are skipped. Raises ConfigError with file and line
    for what is no request.
    """
    lines, requests = list[int](), list[_Request]()
    try:
        with open_file(path, encoding="utf-8-sig") as file:
            for line, text in enumerate(file, 1):
                if len(lines) == limit:
                    break
                if not text.strip():
                    continue
                try:
                    request = parse(text)
                except ValueError as error:
                    raise ConfigError(f"{path} line {line}: {error}") from error
                if request is not None:
                    lines.append(line)
                    requests.append(request)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    if not lines:
        raise ConfigError(f"the trace {path} has no requests")
    at, ids, sizes, num_out, after, pause = zip(*requests, strict=True)
    spans = (np.fromiter(itertools.chain.from_iterable(each), np.int64) for each in (ids, sizes))
    rows = (np.array(at), np.array(pause), np.array(num_out), np.array(after), np.cumsum([0, *map(len, ids)]))
    columns = Arrivals(*rows, *spans)
    if fault := columns.fault():
        raise ConfigError(f"{path} line {lines[fault[0]]}: {fault[1]}")
    return columns


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


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64: a bijection that mixes all bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
