"""Draws the frontier of `quire plan auto`, with matplotlib if it is installed."""

from __future__ import annotations

from pathlib import Path

from quire.evaluation.plot import drawing, finish
from quire.planning.points import PlanResult
from quire.planning.space import Space


def save_frontier(
    file: Path, found: PlanResult, space: Space, quality: float, title: str, unit: str = "machine"
) -> None:
    """Draws the goodput of finalists over the quality that they lose. Colours show their memory, and a line joins the
    points that none beats.

    quality  the budget
    `file` and the errors are those of `drawing`.
    """
    with drawing(file, 7.2, 4.6) as figure:
        axes = figure.subplots()
        points = found.finalists
        losses = [100 * each.point.loss.value for each in points]
        errors = [100 * (each.point.loss.value_error or 0.0) for each in points]
        rates = [each.rate for each in points]
        memory = [each.point.room.total / 2**30 for each in points]
        axes.errorbar(losses, rates, xerr=errors, fmt="none", color="gray", linewidth=0.8, capsize=2, zorder=1)
        dots = axes.scatter(losses, rates, c=memory, s=36, zorder=2)
        figure.colorbar(dots, ax=axes, label="memory, GiB (modelled)")
        best: list[tuple[float, float]] = []
        for loss, rate in sorted((100 * each.point.loss.value, each.rate) for each in found.frontier):
            if not best or rate > best[-1][1]:
                best.append((loss, rate))
        axes.step(*zip(*best, strict=True), where="post", color="black", linewidth=0.8, zorder=0)
        chosen = found.chosen
        axes.scatter(
            [100 * chosen.point.loss.value], [chosen.rate], s=130, facecolors="none", edgecolors="black", label="chosen"
        )
        axes.axvline(100 * quality, color="black", linestyle="--", linewidth=0.8, label="quality budget")
        for each in {id(each): each for each in (*found.frontier, chosen)}.values():
            axes.annotate(
                each.point.name(space), (100 * each.point.loss.value, each.rate), xytext=(5, 5),
                textcoords="offset points", fontsize="x-small",
            )  # fmt: skip
        axes.set_title(title, fontsize=10, parse_math=False)
        axes.margins(0.15)
        finish(axes, "perplexity above the lossless model, %", f"goodput, requests/s per {unit}")
