"""How long a step takes: the features of a step, and a model of its seconds that is fitted to measured steps.

seconds = base + sum of pieces(rows) + a * prompt_pairs + b * context + c * unique + d * num_prompts + e * decode_rows

A piece is min(max(rows - knot_i, 0), knot_i+1 - knot_i), over knots that double. All coefficients are at least 0, so
that the time never falls with more rows; it may stay flat while weights are read, and rise where products limit.

Source: DistServe, arXiv 2401.09670, Appendix A: C1 t + C2 t2 + C3 for t prompt tokens and the sum t2 of their squared
lengths, and C4 + C5 t for decoding with t tokens of context; sizes of the model are part of the constants. Ours
contains both: pieces with equal coefficients are C1, pieces of 0 are C4, and the pairs of a prompt without a prefix are
t2 / 2. It differs: a step may hold prompts and decoding sequences, prompts may start behind cached tokens, shared
tokens are read once, and a row costs more or less depending on how many there are. `quire.timing.latency_fit` fits
both forms.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from quire.errors import ConfigError
from quire.records import above, formatted, read_record

FORMAT = 1

SLACK = 0.05
"""Share by which a step may leave the measured range and still count as covered."""


class Origin(StrEnum):
    """Where a number comes from."""

    MEASURED = "measured"
    FITTED = "fitted"
    MODELLED = "modelled"


class StepWork(NamedTuple):
    """What a step computes: the features of a latency model.

    prompt_rows   rows of prompts: slices of several rows, and the single last row of a prompt
    prompt_pairs  sum over prompt slices of `pairs_of`: pairs of a query and a token it attends to
    decode_rows   sequences that decode one token
    context       sum of their contexts: tokens that they attend to
    unique        tokens of `context` that are distinct: those that sequences share count once
    num_prompts   prompt slices
    """

    prompt_rows: int = 0
    prompt_pairs: float = 0.0
    decode_rows: int = 0
    context: float = 0.0
    unique: float = 0.0
    num_prompts: int = 0

    @property
    def rows(self) -> int:
        """All rows of the step."""
        return self.prompt_rows + self.decode_rows

    @property
    def kind(self) -> str:
        """`prompt`, `decode`, or `mixed` for both."""
        if not self.decode_rows:
            return "prompt"
        return "mixed" if self.prompt_rows else "decode"


def pairs_of(start: float, rows: float, window: float = math.inf) -> float:
    """Pairs of a prompt's rows [start, start + rows) and the tokens that they attend to. The pairs of a prompt are the
    sum of those of its slices, however it is divided.

    window  tokens that a row attends to at most
    """

    def before(end: float) -> float:
        """Of all rows up to one: a triangle, and a stripe after it where the window limits."""
        side = min(end, window)
        return side * (end - side / 2)

    return before(start + rows) - before(start)


class StepTime(Protocol):
    """The seconds of steps, as a simulator asks for them."""

    @property
    def origin(self) -> Origin:
        """Where the seconds come from."""
        ...

    def seconds(self, work: StepWork) -> float:
        """From the begin of a step to its tokens."""
        ...

    def occupancy(self, work: StepWork) -> float:
        """From the begin of a step until the next one may begin: less than `seconds` in a pipeline."""
        ...

    def quiet(self, work: StepWork, count: int) -> float:
        """Seconds of `count` decode steps of the same sequences, each one token longer than the one before. The first
        step is `work`, which has no prompts.
        """
        ...

    def covers(self, work: StepWork) -> bool:
        """Whether a step lies within what the seconds are known for."""
        ...

    @property
    def knots(self) -> tuple[int, ...]:
        """Rows at which the seconds of a row change; powers of two need not be among them."""
        ...


@dataclass(frozen=True)
class Link:
    """A way that bytes of the cache take.

    latency           seconds until the first bytes arrive
    bytes_per_second  after that
    """

    latency: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        above(self.bytes_per_second, "bytes_per_second")
        if not 0 <= self.latency < math.inf:
            raise ConfigError(f"latency is {self.latency!r}; it must be a number of at least 0")


About = dict[str, str | int | float | bool | None]
"""What a model was measured with, by name."""

MOST_SECONDS = 1e6
"""Largest coefficient. After such steps a clock is too coarse for the seconds that a message takes."""

KINDS = ("prompt", "decode", "mixed")
"""Of steps: only prompts, only decoding sequences, both."""

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
"""Of measured / predicted seconds."""

TERMS = {
    "prompt_pairs": "pair of query and token, prompts",
    "context": "token of context",
    "unique": "distinct token of context",
    "num_prompts": "prompt",
    "decode_rows": "decoding sequence",
}
"""Features that are terms of their own, in words."""

BASE, ROWS = "base", "rows_from_"
"""Terms of every step, and of a piece of rows, which the knot follows."""


@dataclass(frozen=True)
class LatencyModel:
    """A fitted latency model. Files of it are JSON.

    about         what it was measured with: model, fingerprint, codec, retain, weights, dtype, threads, processor, ...
    coefficients  seconds by term: `base`, `rows_from_K` for the piece of rows from knot K on, and those of TERMS
    knots         rows at which pieces begin
    residuals     quantiles of measured / predicted seconds (p10, p50, p90, p99); `within`: the relative error that nine
                  of ten steps stay within; `total`: the measured seconds of all steps, outliers too, over the predicted
                  ones. Of all steps, and of a kind with its name before a dot
    ranges        smallest and largest measured value of each feature, of rows, and of the share unique / context
    links         how fast bytes of the cache move, by name: disk, shm, tcp, pinned
    counts        fitted steps, by kind too, and `outliers`, which took so much longer than their like that something
                  else must have run
    dropped       terms that the measured steps do not tell apart from others
    paper         the paper's constants C1 to C5, fitted to the same steps, with residuals
    """

    about: About
    coefficients: dict[str, float]
    knots: tuple[int, ...]
    residuals: dict[str, float]
    ranges: dict[str, tuple[float, float]]
    links: dict[str, Link] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    paper: dict[str, float] = field(default_factory=dict)
    origin = Origin.FITTED

    def __post_init__(self) -> None:
        if any(after <= before for before, after in itertools.pairwise(self.knots)):
            raise ConfigError(f"knots are {list(self.knots)}; they must increase")
        known = {BASE, *TERMS, *(f"{ROWS}{knot}" for knot in self.knots)}
        for name, value in self.coefficients.items():
            if name not in known:
                raise ConfigError(f"coefficients.{name} is no term; the terms are {', '.join(sorted(known))}")
            if not 0 <= value <= MOST_SECONDS:
                raise ConfigError(f"coefficients.{name} is {value!r}; it must be seconds, 0 to {MOST_SECONDS:,.0f}")
        if not any(self.coefficients.values()):
            raise ConfigError("coefficients are all 0: no step would take any time")
        for name, bounds in self.ranges.items():
            if bounds[0] > bounds[1]:
                raise ConfigError(f"ranges.{name} is {list(bounds)}; it must be a smallest and a largest value")

    def seconds(self, work: StepWork) -> float:
        """See StepTime."""
        knots, at_knots, slopes = self._pieces
        rows = work.prompt_rows + work.decode_rows
        found, piece = at_knots[0], bisect.bisect_right(knots, rows) - 1
        if piece >= 0:
            found = at_knots[piece] + slopes[piece] * (rows - knots[piece])
        pairs, context, unique, prompts, decoding = self._slopes
        return (
            found
            + pairs * work.prompt_pairs
            + context * work.context
            + unique * work.unique
            + prompts * work.num_prompts
            + decoding * work.decode_rows
        )

    def occupancy(self, work: StepWork) -> float:
        """See StepTime. A measured engine is no pipeline."""
        return self.seconds(work)

    def quiet(self, work: StepWork, count: int) -> float:
        """See StepTime. Exact, because seconds are linear in context and unique."""
        assert not work.prompt_rows, f"a quiet step with {work.prompt_rows} rows of prompts"
        _, context, unique, _, _ = self._slopes
        growth = (context + unique) * work.decode_rows
        return count * self.seconds(work) + growth * (count * (count - 1) / 2)

    def covers(self, work: StepWork) -> bool:
        """See StepTime. SLACK may be missing at either end of a range."""
        for name, low, high in self._bounds:
            if not low <= getattr(work, name) <= high:
                return False
        low, _ = self.ranges.get("share", (1.0, 1.0))
        return work.unique >= (1 - SLACK) * low * work.context

    @cached_property
    def _slopes(self) -> tuple[float, ...]:
        return tuple(self.coefficients.get(name, 0.0) for name in TERMS)

    @cached_property
    def _pieces(self) -> tuple[list[int], list[float], list[float]]:
        """Knots; seconds of as many rows; seconds of each further row."""
        knots, base = [*self.knots] or [0], self.coefficients.get(BASE, 0.0)
        slopes = [self.coefficients.get(f"{ROWS}{knot}", 0.0) for knot in knots]
        steps = (
            slope * (after - before) for slope, (before, after) in zip(slopes, itertools.pairwise(knots), strict=False)
        )
        return knots, [*itertools.accumulate(steps, initial=base)], slopes

    @cached_property
    def _bounds(self) -> list[tuple[str, float, float]]:
        return [
            (name, low * (1 - SLACK), high * (1 + SLACK))
            for name, (low, high) in self.ranges.items()
            if name in (*StepWork._fields, "rows")
        ]

    def to_json(self) -> str:
        """The model as a JSON text."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Writes the model to a file. Raises ConfigError if it cannot."""
        try:
            path.write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None

    @classmethod
    def of(cls, fields: Any) -> LatencyModel:
        """The model of a file's fields. Raises ConfigError that names the field."""
        return formatted(
            cls,
            fields,
            FORMAT,
            f"a latency model of format {FORMAT}; quire bench latency MODEL --output FILE makes one",
        )

    @classmethod
    def read(cls, path: Path) -> LatencyModel:
        """The model of a file. Raises ConfigError that names the file, and the field if one is invalid."""
        return read_record(path, "latency model", cls.of)


SETTINGS = {
    "fingerprint": "the checkpoint",
    "processor": "the processor",
    "dtype": "model.dtype",
    "weights": "model.weights",
    "codec": "cache.codec",
    "outlier_slots": "cache.outlier_slots",
    "sparse_values": "cache.sparse_values",
    "offload": "offload.mode",
    "backend": "attention.backend",
    "threads": "runtime.threads",
    "level": "runtime.cpu_level",
}
"""What entries of `about` are called in messages; others by their name."""


def mismatch(made_with: About, wanted: Mapping[str, str | int | float | bool | None]) -> str | None:
    """The first setting in which a model's `about` differs from what is wanted, in one line; None if there is none.

    wanted  settings that matter, by name; others do not count
    """
    for name, value in wanted.items():
        if made_with.get(name) != value:
            was = made_with.get(name, "an unknown value")
            return (
                f"the latency model was made with {SETTINGS.get(name, name)} {was}, not {value};"
                " quire bench latency MODEL --output FILE makes one with the same settings"
            )
    return None
