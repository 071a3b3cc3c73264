"""What the configurations did: answers, goodput, and what all five together must reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from systems import NONE, Load, Systems, name_of, note_of

from quire.config import format_bytes
from quire.workload.slo import Slo


@dataclass(frozen=True)
class Served:
    """An answer: when it ended, seconds from the beginning of its stage, and its latencies."""

    end: float
    ttft: float
    tpot: float


FEW_ANSWERS = 20
"""Answers of a stage from which its goodput is known to about a tenth."""

WARM_UP = 0.4
"""Share of a stage that does not count: the first prompts come all at once."""


@dataclass(frozen=True)
class Stage:
    """What some clients got, all of which asked at once in the beginning.

    running      most sequences in engines at once
    preemptions  sequences that had to give their memory back
    """

    clients: int
    seconds: float
    served: tuple[Served, ...]
    running: int
    preemptions: int

    @property
    def counted(self) -> list[Served]:
        """Answers that ended after the warm-up."""
        return [each for each in self.served if each.end > WARM_UP * self.seconds]

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.counted) / (self.seconds * (1 - WARM_UP))

    def goodput(self, slo: Slo) -> float:
        """Answers a second that met both targets."""
        met = sum(each.ttft <= slo.ttft and each.tpot <= slo.tpot for each in self.counted)
        return met / (self.seconds * (1 - WARM_UP))

    def told(self, slo: Slo) -> dict[str, Any]:
        """For a report."""
        counted = self.counted
        times = {
            f"{name}_p{percent}": percentile([getattr(each, name) for each in counted], percent)
            for name in ("ttft", "tpot")
            for percent in (50, 90)
        }
        rates = {"rate": self.rate, "goodput": self.goodput(slo)}
        counts = {"clients": self.clients, "answers": len(counted)}
        return counts | rates | times | {"running": self.running, "preemptions": self.preemptions}


def best(stages: Sequence[Stage], slo: Slo) -> tuple[float, int]:
    """The highest goodput of some stages, and its number of clients."""
    found = max(stages, key=lambda stage: stage.goodput(slo))
    return found.goodput(slo), found.clients


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The percentile, rounded up to one of the values; None of no values."""
    return float(np.percentile(values, percent, method="higher")) if values else None


@dataclass
class Row:
    """A configuration and what was found.

    refused         why it cannot run; empty: it can
    sequences       most of them that were in the caches at once (see holding.py)
    sequence_bytes  of the caches, for each of these
    weights, cache  bytes in memory, of all engines together
    pss             most bytes that all processes had together; what several of them map counts once
    ratio           perplexity relative to that of the dense cache without retention, and its standard error
    """

    systems: Systems
    refused: str = ""
    sequences: int = 0
    sequence_bytes: float = 0.0
    weights: int = 0
    cache: int = 0
    pss: int = 0
    stages: tuple[Stage, ...] = ()
    ratio: float | None = None
    ratio_error: float | None = None

    def told(self, none: Row, slo: Slo) -> dict[str, Any]:
        """For a report. none: the row that gains are relative to."""
        found: dict[str, Any] = {
            "configuration": name_of(self.systems), "systems": list(self.systems), "refused": self.refused,
            "note": note_of(self.systems), "ratio": self.ratio, "ratio_error": self.ratio_error,
        }  # fmt: skip
        if self.refused:
            return found
        goodput, clients = best(self.stages, slo)
        base, held = best(none.stages, slo)[0], none.sequences
        return found | {
            "sequences": self.sequences,
            "sequence_bytes": self.sequence_bytes,
            "goodput": goodput,
            "clients": clients,
            "weights": self.weights,
            "cache": self.cache,
            "pss": self.pss,
            "gain_sequences": self.sequences / held if held else None,
            "gain_goodput": goodput / base if base else None,
            "stages": [stage.told(slo) for stage in self.stages],
        }


def doubts(load: Load, slo: Slo, none: Row) -> list[str]:
    """Reasons why goodputs of a load say less than they should, one sentence each. none: the base."""
    found, most = list[str](), max(load.clients)
    if most <= none.sequences:
        found.append(
            f"the largest number of clients is {most}, and the configuration '{NONE}' holds {none.sequences} sequences:"
            " no goodput was measured under memory pressure; raise --clients"
        )
    if slo.ttft >= load.seconds:
        found.append(
            f"a stage takes {load.seconds:g} s, so hardly any answer can miss the target of {slo.ttft:.4g} s to the"
            " first token; raise --seconds or lower --ttft"
        )
    answers = max((len(stage.counted) for stage in none.stages), default=0)
    if answers < FEW_ANSWERS:
        found.append(f"the configuration '{NONE}' gave at most {answers} counted answers: ratios of goodputs are rough")
    return found


WANTED = {"gain_sequences": ("sequences", 6.0), "gain_goodput": ("goodput", 2.0)}
"""Of all five: how many times as much as none they must have."""

MOST_RATIO = 1.03
"""Of all five: the most times the perplexity of none."""


def missed(row: Mapping[str, Any], memory: int) -> list[str]:
    """What a told row of all five misses, and whether it takes more than the memory; a sentence each."""
    found = [
        f"all five have {row[key]:.2f} times the {what} of none, and {least:g} times are wanted"
        for key, (what, least) in WANTED.items()
        if row[key] is not None and row[key] < least
    ]
    if row["ratio"] is not None and row["ratio"] > MOST_RATIO:
        found.append(f"all five have {row['ratio']:.4f} times the perplexity of none; {MOST_RATIO:g} is allowed")
    if row["pss"] > memory:
        found.append(f"all five took {format_bytes(row['pss'])} of {format_bytes(memory)}")
    return found
