"""Upper bounds of the rate that an instance can serve: all its steps are busy, and nothing waits.

A request costs at least the seconds of its rows in the cheapest step, of its attention, and of its share of the
cheapest decode steps. No rate above the inverse of their mean lasts. If even requests that come alone miss their
targets too often, the bound is 0.

A bound holds for latencies in which prompts' pairs cost the same in every step, and which fall with more work at most
where decoding sequences divide a context among the stages of a pipeline: those of `LatencyModel` and of
`AnalyticModel`. Memory does not limit the batches of a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quire.planning.goodput import ROUNDING
from quire.timing.latency import StepTime, StepWork
from quire.workload.slo import Slo
from quire.workload.workload import Floats, Workload

MANY_PAIRS = 1e9
"""Pairs of a step that tell what a pair costs."""

MOST_REQUESTS = 2000
"""Requests that are looked at one by one."""

MOST_BESIDE = 32
"""Sequences of a step with one that is looked at: a pipeline with more stages is not faster for it."""


@dataclass(frozen=True)
class RequestStats:
    """What requests ask for at least, f64 [n] each: nothing is computed twice, and nothing is dropped that is shared.

    rows     tokens of the prompt that no earlier request has
    pairs    of these and the tokens that they attend to
    tokens   decoded after the first one
    context  that each of them attends to, on average
    own      tokens of it that no other request has
    """

    rows: Floats
    pairs: Floats
    tokens: Floats
    context: Floats
    own: Floats

    @classmethod
    def of(cls, workload: Workload, kept: float = 1.0, window: int | None = None) -> RequestStats:
        """What the requests of a workload ask for.

        kept    share of their context that retention keeps
        window  tokens that a token attends to at most
        """
        prompts = workload.prompt_tokens.astype(np.float64)
        cached = workload.cached_tokens.astype(np.float64)
        tokens = np.asarray(workload.columns.num_out - 1, np.float64)
        rows, grown, most = prompts - cached, (tokens + 1) / 2, math.inf if window is None else float(window)
        context, own = (np.minimum(kept * each, most) for each in (prompts + grown, rows + grown))
        sides = [(end, np.minimum(end, most)) for end in (prompts, cached)]
        whole, known = (side * (end - side / 2) for end, side in sides)  # as `pairs_of`, for all requests at once
        return cls(rows, whole - known, tokens, context, own)

    @cached_property
    def mean_decode(self) -> tuple[float, float, float]:
        """Decoded tokens of a request, and context and own tokens of one of them, on average."""
        total = float(self.tokens.sum())
        if not total:
            return 0.0, 0.0, 0.0
        weights = self.tokens / total
        return total / len(self.tokens), float(weights @ self.context), float(weights @ self.own)


@dataclass(frozen=True)
class Bound:
    """Rates in requests/s that an instance never exceeds.

    latency     of its steps
    most_rows   of a step
    most_batch  sequences of a step
    """

    latency: StepTime
    most_rows: int
    most_batch: int

    def prompts(self, asked: RequestStats, slo: Slo) -> float:
        """Of an instance that computes prompts."""
        seconds = float((self._rows * asked.rows + self._pair * asked.pairs).mean())
        return self._unless(self._first(asked) > slo.ttft, slo, seconds)

    def decoding(self, asked: RequestStats, slo: Slo) -> float:
        """Of an instance that decodes; infinite if every answer has one token."""
        return self._unless(self._per_token(asked) > slo.tpot, slo, self._decode_seconds(asked))

    def mixed(self, asked: RequestStats, slo: Slo) -> float:
        """Of an instance that does both: rows of prompts and of answers may share the cheapest step."""
        number, context, own = asked.mean_decode
        seconds = self._rows * (float(asked.rows.mean()) + number) + self._pair * float(asked.pairs.mean())
        seconds += number * self._attention(context, own)
        missed = (self._first(asked) > slo.ttft) | (self._per_token(asked) > slo.tpot)
        return self._unless(missed, slo, seconds)

    def of(self, role: str, asked: RequestStats, slo: Slo) -> float:
        """Of an instance with this role."""
        return {"prefill": self.prompts, "decode": self.decoding, "mixed": self.mixed}[role](asked, slo)

    def _unless(self, missed: np.ndarray[tuple[int], np.dtype[np.bool_]], slo: Slo, seconds: float) -> float:
        """The rate of a mean request; 0 if too many miss their targets when they come alone."""
        if 1 - float(missed.mean()) < slo.attainment - ROUNDING:
            return 0.0
        return 1 / seconds if seconds else np.inf

    def _first(self, asked: RequestStats) -> Floats:
        """Seconds of prompts that come alone, f64 [n]: slices of a prompt follow each other into a pipeline."""
        return np.asarray(self._rows * asked.rows + self._pair * asked.pairs, np.float64)

    def _per_token(self, asked: RequestStats) -> Floats:
        """Seconds per token of answers that come alone, f64 [n], of the first requests at most."""
        count = len(asked.tokens)
        found = np.zeros(count)
        for index in range(min(count, MOST_REQUESTS)):
            if asked.tokens[index]:
                context, own = float(asked.context[index]), float(asked.own[index])
                # Alone, or beside sequences that have next to no context and share its stages.
                found[index] = min(
                    self.latency.seconds(StepWork(0, 0.0, size, context + size - 1, own + size - 1, 0))
                    for size in self._sizes(min(self.most_batch, MOST_BESIDE))
                )
        return found

    @cached_property
    def _rows(self) -> float:
        """Least seconds of a prompt's row."""
        return min(self.latency.occupancy(StepWork(prompt_rows=rows)) / rows for rows in self._sizes(self.most_rows))

    @cached_property
    def _pair(self) -> float:
        """Seconds of a pair of a prompt."""
        with_pairs, without = (
            self.latency.occupancy(StepWork(prompt_rows=self.most_rows, prompt_pairs=pairs))
            for pairs in (MANY_PAIRS, 0.0)
        )
        return max(0.0, with_pairs - without) / MANY_PAIRS

    def _decode_seconds(self, asked: RequestStats) -> float:
        number, context, own = asked.mean_decode
        return number * min(self._decode(size, context, own) / size for size in self._sizes(self.most_batch))

    def _decode(self, size: int, context: float, own: float) -> float:
        return self.latency.occupancy(StepWork(0, 0.0, size, size * context, size * own, 0))

    def _attention(self, context: float, own: float) -> float:
        """Least seconds that a decoded token's context adds to a step."""
        return min(
            max(0.0, self._decode(size, context, own) - self._decode(size, 0.0, 0.0)) / size
            for size in self._sizes(self.most_batch)
        )

    def _sizes(self, most: int) -> Iterator[int]:
        """Sizes of which one is the cheapest per row: latencies bend at their knots, and nowhere else."""
        yield from {
            *(size for size in (*self.latency.knots, *(1 << power for power in range(21))) if 0 < size < most),
            most,
        }


def joint_bound(instances: Iterable[tuple[str, int, Bound]], asked: RequestStats, slo: Slo) -> float:
    """Requests/s that some instances never serve for long.

    instances  role, number, and bound of each
    """
    rates: dict[str, float] = {}
    for role, count, bound in instances:
        rates[role] = rates.get(role, 0.0) + count * bound.of(role, asked, slo)
    apart = [rates[role] for role in ("prefill", "decode") if role in rates]
    return rates.get("mixed", 0.0) + (min(apart) if apart else 0.0)
