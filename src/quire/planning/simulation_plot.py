"""Draws what came of simulated loads, with matplotlib if it is installed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.evaluation.plot import drawing, finish
from quire.options import format_number
from quire.planning.goodput import Goodput
from quire.simulation.outcome import Floats, Outcome
from quire.workload.slo import Slo

SCALES = tuple(float(scale) for scale in np.geomspace(0.25, 4, 33))
"""Factors of both targets: DistServe, section 6.2, calls them SLO scale. Below 1 they are tighter."""


def save_simulation(
    file: Path, outcomes: Mapping[float, Outcome], slo: Slo, title: str, goodput: Goodput | None = None
) -> None:
    """Draws the distributions of TTFT and TPOT by rate and, with targets, attainment over rate and over their scale.

    outcomes  by rate in requests/s
    goodput   its points are part of attainment over rate
    `file` and the errors are those of `drawing`.
    """
    has_targets = min(slo.ttft, slo.tpot) < math.inf
    with drawing(file, 9.6, 7.2 if has_targets else 3.8, title) as figure:
        ttft, tpot, *others = figure.subplots(2 if has_targets else 1, 2).flatten()
        for rate, outcome in outcomes.items():
            answered = np.isfinite(outcome.last)
            share = answered.mean()
            name = f"{format_number(rate)} requests/s" if math.isfinite(rate) else "all at once"
            _draw_cdf(ttft, outcome.ttft[answered], share, name)
            _draw_cdf(tpot, outcome.tpot[answered & (outcome.num_out > 1)], share)  # in the same colours
        for axes, metric, target in ((ttft, "TTFT", slo.ttft), (tpot, "TPOT", slo.tpot)):
            if math.isfinite(target):
                axes.axvline(target, color="black", linewidth=0.8, linestyle="--")
            finish(axes, f"{metric}, seconds", "share of requests", xscale="log", ylim=(0, 1))
        if has_targets:
            _draw_rates(others[0], outcomes, slo, goodput)
            _draw_scales(others[1], outcomes, slo)


def _draw_cdf(axes: Any, values: Floats, share: float, name: str | None = None) -> None:
    """share: of the requests that have a value; the others never come. name: in the legend; None: not there."""
    heights = share * np.arange(1, len(values) + 1) / max(1, len(values))
    axes.step(np.sort(values), heights, where="post", label=name)


def _draw_rates(axes: Any, outcomes: Mapping[float, Outcome], slo: Slo, goodput: Goodput | None) -> None:
    points = {rate: outcome.attainment(slo) for rate, outcome in outcomes.items() if math.isfinite(rate)}
    if goodput is not None:
        points |= {point.rate: point.attainment for point in goodput.points}
        if goodput.rate:
            axes.axvline(goodput.rate, color="tab:green", linewidth=1, label=f"goodput {format_number(goodput.rate)}")
    rates = sorted(points)
    axes.plot(rates, [points[rate] for rate in rates], marker="o", markersize=3)
    axes.axhline(slo.attainment, color="black", linewidth=0.8, linestyle="--")
    finish(axes, "requests/s", "share that meets both targets", ylim=(0, 1.02))


def _draw_scales(axes: Any, outcomes: Mapping[float, Outcome], slo: Slo) -> None:
    for outcome in outcomes.values():
        axes.plot(SCALES, [outcome.attainment(slo.scaled(scale)) for scale in SCALES])
    axes.axhline(slo.attainment, color="black", linewidth=0.8, linestyle="--")
    finish(axes, "scale of both targets", "share that meets both targets", xscale="log", ylim=(0, 1.02))
    axes.set_xticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
    axes.minorticks_off()
