"""Workloads: when requests arrive, what their prompts share, and how long prompts and answers are.

Knows neither text nor a model. A prompt is a row of spans; equal spans at equal places are equal tokens.
`quire.workload.traces` reads workloads and makes token ids of them, `quire.workload.fitted` draws others like them.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from quire.cache.ledger import PAGE_TOKENS
from quire.errors import ConfigError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PIECE = 1 << 14
"""Requests whose objects are made at once. Objects of a million requests take at least 310 MB, columns 56 MB."""


class Span(NamedTuple):
    """Consecutive tokens of a prompt. Of two spans with one id the shorter one is the beginning of the longer one."""

    id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request.

    at       seconds
    prompt   spans, in order
    num_out  tokens of its answer, at least 1
    after    index of the request of the same conversation that it follows; -1: none. `at` is then not used: it arrives
             `pause` seconds after that one's last token, and its prompt is that one's prompt, that one's answer, and
             then `prompt`
    pause    seconds
    """

    at: float
    prompt: tuple[Span, ...]
    num_out: int
    after: int = -1
    pause: float = 0.0

    @property
    def num_in(self) -> int:
        """Tokens of its own spans."""
        return sum(span.num_tokens for span in self.prompt)


@dataclass(frozen=True, eq=False)
class Arrivals(Sequence[Arrival]):
    """Requests in columns. An `Arrival` is made when it is asked for.

    at, pause       f64 [n]
    num_out, after  i64 [n]
    start           i64 [n + 1]: request i has the spans start[i] to start[i + 1]
    ids, sizes      i64 [spans]: ids and tokens of the spans
    """

    at: Floats
    pause: Floats
    num_out: Ints
    after: Ints
    start: Ints
    ids: Ints
    sizes: Ints

    def __post_init__(self) -> None:
        for column in self._columns():
            column.setflags(write=False)

    @classmethod
    def of(cls, arrivals: Sequence[Arrival]) -> Arrivals:
        """The columns of some requests."""
        rows = ((each.at, each.pause, each.num_out, each.after, len(each.prompt)) for each in arrivals)
        at, pause, num_out, after, lengths = zip(*rows, strict=True) if arrivals else ((),) * 5
        values = itertools.chain.from_iterable(itertools.chain.from_iterable(each.prompt for each in arrivals))
        spans = np.fromiter(values, dtype=np.int64).reshape(-1, 2)
        return cls(
            np.array(at, dtype=np.float64),
            np.array(pause, dtype=np.float64),
            np.array(num_out, dtype=np.int64),
            np.array(after, dtype=np.int64),
            np.cumsum([0, *lengths], dtype=np.int64),
            spans[:, 0].copy(),
            spans[:, 1].copy(),
        )

    def fault(self) -> tuple[int, str] | None:
        """The first request that is not valid (see `Workload`), and why; None: all are."""
        at, after, index = self.at, self.after, np.arange(len(self))
        is_late = np.zeros(len(self), dtype=np.bool_)
        roots = np.flatnonzero(after < 0)
        is_late[roots[1:]] = at[roots[1:]] < at[roots[:-1]]
        span_owner = np.repeat(index, np.diff(self.start))
        has_bad_span = np.zeros(len(self), dtype=np.bool_)
        has_bad_span[span_owner[(self.sizes < 1) | (self.ids < 0)]] = True
        checks = (
            ("its prompt has no tokens", np.diff(self.start) == 0),
            ("a span of its prompt has no tokens or an id below 0", has_bad_span),
            ("num_out is {num_out}; it must be at least 1", self.num_out < 1),
            ("after is {after}; it must be the index of an earlier request, or -1", (after < -1) | (after >= index)),
            ("pause is {pause}; it must be seconds, at least 0", ~np.isfinite(self.pause) | (self.pause < 0)),
            ("at is {at}; it must be seconds, at least 0", ~np.isfinite(at) | (at < 0)),
            ("at is {at}, which is before the request above", is_late),
        )
        found = [(int(np.argmax(wrong)), reason) for reason, wrong in checks if wrong.any()]
        if not found:
            return None
        place, reason = min(found, key=lambda each: each[0])
        values = {name: getattr(self, name)[place] for name in ("at", "pause", "num_out", "after")}
        return place, reason.format(**values)

    def __len__(self) -> int:
        return len(self.at)

    def __iter__(self) -> Iterator[Arrival]:
        for begin in range(0, len(self), PIECE):
            yield from self._piece(begin, min(begin + PIECE, len(self)))

    @overload
    def __getitem__(self, index: int) -> Arrival: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Arrival, ...]: ...
    def __getitem__(self, index: int | slice) -> Arrival | tuple[Arrival, ...]:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        index = range(len(self))[index]
        (found,) = self._piece(index, index + 1)
        return found

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Arrivals):
            return all(map(np.array_equal, self._columns(), other._columns()))
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    def _columns(self) -> tuple[NDArray[Any], ...]:
        return self.at, self.pause, self.num_out, self.after, self.start, self.ids, self.sizes

    def _piece(self, begin: int, end: int) -> Iterator[Arrival]:
        start = self.start[begin : end + 1].tolist()
        part, offset = slice(start[0], start[-1]), start[0]
        spans = tuple(map(Span, self.ids[part].tolist(), self.sizes[part].tolist()))
        columns = (column[begin:end].tolist() for column in (self.at, self.num_out, self.after, self.pause))
        for (first, last), at, num_out, after, pause in zip(itertools.pairwise(start), *columns, strict=True):
            yield Arrival(at, spans[first - offset : last - offset], num_out, after, pause)


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival. One that follows another comes anywhere after it.

    Raises ConfigError with the index of the first request that is not valid: see `Arrival`. Times of those that follow
    none are sorted and at least 0; a request has at least one token of its own.

    counted  begin and end in seconds. Results are about requests that arrive within; the others only make load
    """

    name: str
    arrivals: Sequence[Arrival]
    counted: tuple[float, float] = (-math.inf, math.inf)

    def __post_init__(self) -> None:
        if not self.arrivals:
            raise ConfigError(f"the workload {self.name} has no requests")
        if fault := self.columns.fault():
            raise ConfigError(f"request {fault[0]} of the workload {self.name}: {fault[1]}")

    @cached_property
    def columns(self) -> Arrivals:
        """The requests in columns."""
        return self.arrivals if isinstance(self.arrivals, Arrivals) else Arrivals.of(self.arrivals)

    @cached_property
    def has_conversations(self) -> bool:
        """Whether some requests follow others."""
        return bool((self.columns.after >= 0).any())

    @cached_property
    def begun(self) -> Floats:
        """f64 [n]: when each request's conversation begins."""
        columns = self.columns
        found = columns.at.copy()
        for index in np.flatnonzero(columns.after >= 0).tolist():
            found[index] = found[columns.after[index]]
        return found

    @cached_property
    def waited(self) -> Floats:
        """f64 [n]: seconds from the begin of a request's conversation to its arrival, if answers took no time."""
        columns = self.columns
        found = np.where(columns.after >= 0, columns.pause, 0.0)
        for index in np.flatnonzero(columns.after >= 0).tolist():
            found[index] += found[columns.after[index]]
        return found

    @cached_property
    def times(self) -> Floats:
        """Times of the requests that follow none."""
        return self.columns.at[self.columns.after < 0]

    @property
    def rate(self) -> float:
        """Requests per second, infinity if all arrive at once.

        It is the inverse of the mean gap, times the mean number of requests of a conversation: pauses delay its
        requests, and in the long run as many finish as begin.
        """
        times = self.times
        seconds = float(times[-1] - times[0])
        return (len(times) - 1) / seconds * len(self.arrivals) / len(times) if seconds else math.inf

    @property
    def cv(self) -> float:
        """Coefficient of variation of the gaps between arrivals: 1 for a Poisson process, 0 without gaps."""
        gaps = np.diff(self.times)
        return float(gaps.std() / gaps.mean()) if gaps.any() else 0.0

    @property
    def mean_in(self) -> float:
        """Mean number of tokens of a prompt, with the conversation before it."""
        return float(self.prompt_tokens.mean())

    @property
    def mean_out(self) -> float:
        """Mean number of tokens of an answer."""
        return float(self.columns.num_out.mean())

    @property
    def shared(self) -> float:
        """Share of the prompt tokens that a cache without eviction has when the request arrives."""
        return float(self.cached_tokens.sum() / self.prompt_tokens.sum())

    @cached_property
    def prompt_tokens(self) -> Ints:
        """i64 [n]: tokens of the prompts, with the conversation before them."""
        columns = self.columns
        whole = np.add.reduceat(columns.sizes, columns.start[:-1])
        for index in np.flatnonzero(columns.after >= 0).tolist():
            before = columns.after[index]
            whole[index] += whole[before] + columns.num_out[before]
        return whole

    @cached_property
    def cached_tokens(self) -> Ints:
        """i64 [n]: tokens of each prompt that a dense cache without eviction has, if requests run in their order.

        These are whole chunks, and at most all tokens but the last. An answer counts in its own conversation alone, and
        there without its last token, which is never computed.
        """
        columns = self.columns
        nodes: dict[tuple[int, int, int], int] = {}  # a trie: (node, id, tokens) -> node; 0 is the root
        held: dict[tuple[int, int], int] = {}  # (node, id) -> most tokens of the span that any prompt so far has
        ends: list[int] = []  # by request: node of its whole prompt
        found: list[int] = []
        spans = list(zip(columns.ids.tolist(), columns.sizes.tolist(), strict=True))
        whole, answers = self.prompt_tokens.tolist(), columns.num_out.tolist()
        bounds = itertools.pairwise(columns.start.tolist())
        for before, (start, end) in zip(columns.after.tolist(), bounds, strict=True):
            node = length = common = 0
            prompt = spans[start:end]
            if before >= 0:
                node, length = ends[before], whole[before]
                held.setdefault((node, ~before), answers[before] - 1)
                prompt.insert(0, (~before, answers[before]))
            is_cached = True
            for span, size in prompt:
                most = held.get((node, span), 0)
                if is_cached:
                    common, is_cached = length + min(most, size), most >= size
                if most < size:
                    held[node, span] = size
                node = nodes.setdefault((node, span, size), len(nodes) + 1)
                length += size
            ends.append(node)
            found.append(min(common // PAGE_TOKENS * PAGE_TOKENS, length - 1))
        return np.array(found, dtype=np.int64)

    def at_rate(self, rate: float) -> Workload:
        """The same requests at another rate: times are scaled, pauses are not. Raises ConfigError if all arrive at
        once, because no scale changes that.
        """
        if not 0 < rate < math.inf:
            raise ConfigError(f"a rate is {rate}; it must be above 0 requests per second")
        if math.isinf(self.rate):
            raise ConfigError(f"all requests of the workload {self.name} arrive at once; give them times to set a rate")
        columns = self.columns
        return Workload(self.name, replace(columns, at=columns.at * (self.rate / rate)))

    def first(self, count: int) -> Workload:
        """The first `count` requests, or all if there are fewer."""
        assert count >= 1, count
        return self.only(np.arange(len(self.arrivals)) < count)

    def only(self, kept: NDArray[np.bool_]) -> Workload:
        """Some requests, at least one. What follows a request that is left out must be left out as well.

        kept  bool [n]
        """
        columns = self.columns
        after = columns.after[kept]
        assert kept[after[after >= 0]].all(), "a request is kept without the one that it follows"
        lengths, spans = np.diff(columns.start), np.repeat(kept, np.diff(columns.start))
        found = Arrivals(
            columns.at[kept], columns.pause[kept], columns.num_out[kept],
            np.where(after < 0, -1, (np.cumsum(kept) - 1)[after]), np.cumsum([0, *lengths[kept]], dtype=np.int64),
            columns.ids[spans], columns.sizes[spans],
        )  # fmt: skip
        return Workload(self.name, found)

    def write(self, path: Path) -> None:
        """Writes JSON lines that `read_workload` reads. Raises ConfigError if it cannot."""
        try:
            with path.open("w", encoding="utf-8") as file:
                file.write(json.dumps({"workload": self.name}) + "\n")
                for each in self.columns:
                    fields: dict[str, Any] = {"at": each.at, "prompt": each.prompt, "num_out": each.num_out}
                    fields |= {"after": each.after} if each.after >= 0 else {}
                    fields |= {"pause": each.pause} if each.pause else {}
                    file.write(json.dumps(fields) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write the workload {path}: {error}") from error
