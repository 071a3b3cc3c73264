"""Fits a latency model to measured steps, and the paper's form beside it; shows both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.options import format_number
from quire.timing.latency import BASE, KINDS, QUANTILES, ROWS, TERMS, About, LatencyModel, Link, StepWork

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]

Record = tuple[StepWork, float]
"""A step and its seconds."""

PASSES = 3
"""The first fit weighs steps by their measured seconds, the others by those that the fit before predicts."""

ALONE = 0.01
"""Least share of a term that other terms do not explain. Below it the measured steps do not tell them apart."""

OUTLIER, LEAST_OUTLIER = 5.0, 0.03
"""Median absolute deviations from its like beyond which a step is an outlier, and least relative deviation."""

STIFFNESS = 0.3
"""Expected difference between the slopes of neighbouring pieces, in mean seconds of a row. It decides what noisy steps
leave open; exact ones leave nothing open.
"""

LIKE = 5
"""Steps alike from which on one is compared with them, and not with all of its kind."""

PAPER = {
    BASE: {"C3": "step of prompts", "C4": "step that decodes"},
    ROWS: {"C1": "token of a prompt"},
    "prompt_pairs": {"C2": "squared token of a prompt"},
    "context": {"C5": "token of context"},
}
"""The paper's constants beside our terms, and what they are seconds of."""

CELLS = 4
"""Steps are alike if each of their features is in the same of so many parts of a doubling."""


def fit(
    records: Iterable[Record], about: About, links: Mapping[str, Link] | None = None, *, are_exact: bool = False
) -> LatencyModel:
    """Fits a model to measured steps, by non-negative least squares on relative errors.

    Steps that are alike count together as the square root of their number. Steps that took much longer than their like
    are left out. The noisier the steps, the more neighbouring pieces are pulled towards one slope.

    are_exact  whether the seconds are computed and not measured: then none is left out
    Raises ConfigError if there are no steps.
    """
    steps = [(work, seconds) for work, seconds in records if work.rows and seconds > 0]
    if not steps:
        raise ConfigError("a latency model needs measured steps, but there are none; measure longer")
    works, measured = [work for work, _ in steps], np.array([seconds for _, seconds in steps])
    features = {name: np.array([getattr(work, name) for work in works], float) for name in (*StepWork._fields, "rows")}
    kinds = np.array([KINDS.index(work.kind) for work in works])
    knots = _knots(features["rows"])
    columns = {BASE: np.ones(len(works))}
    for knot, after in itertools.pairwise([*knots, math.inf]):
        columns[f"{ROWS}{knot}"] = np.clip(features["rows"] - knot, 0, after - knot)
    columns |= {name: features[name] for name in TERMS}
    cells = _cells(features, kinds)
    weights = (np.bincount(cells)[cells] ** -0.25).astype(np.float64)
    solver = _Solver(columns, measured, weights)
    predicted, is_fitted, pull = measured, np.ones(len(works), bool), 0.0
    seconds_of_row = measured.sum() / features["rows"].sum()
    for last in (False,) * PASSES + (True,):
        coefficients, dropped = solver.solve(predicted, is_fitted, pull)
        predicted = np.maximum(solver.predict(coefficients), 1e-3 * measured)
        if not last:
            if not are_exact:
                is_fitted = ~_outliers(measured / predicted, cells, kinds)
            noise = float(np.median(np.abs(measured / predicted - 1)[is_fitted]))
            pull = noise / STIFFNESS / seconds_of_row
    counts = {kind: int(np.count_nonzero(is_fitted & (kinds == index))) for index, kind in enumerate(KINDS)}
    decodes = features["context"] > 0
    shares = features["unique"][decodes] / features["context"][decodes] if decodes.any() else np.ones(1)
    ranges = {
        name: (float(values.min()), float(values.max())) for name, values in [*features.items(), ("share", shares)]
    }
    return LatencyModel(
        about=dict(about),
        coefficients=coefficients,
        knots=tuple(knots),
        residuals=_residuals(measured, predicted, is_fitted, kinds),
        ranges=ranges,
        links=dict(links or {}),
        counts={"steps": int(is_fitted.sum()), **counts, "outliers": int((~is_fitted).sum())},
        dropped=tuple(dropped),
        paper=_paper(features, measured, is_fitted, kinds),
    )


class _Solver:
    """Least squares on relative errors with coefficients of at least 0.

    columns   a column by term, most important first: of terms that explain each other, the first one stays
    measured  seconds of each step
    weights   of each step
    """

    def __init__(self, columns: dict[str, Floats], measured: Floats, weights: Floats) -> None:
        self.names, self.matrix = [*columns], np.stack([*columns.values()], 1)
        self.measured, self.weights = measured, weights

    def solve(self, scale: Floats, chosen: Bools, pull: float = 0.0) -> tuple[dict[str, float], list[str]]:
        """Coefficients by term, and the terms that the chosen steps do not tell apart.

        scale  seconds that errors are relative to
        pull   weight of differences between neighbouring pieces
        """
        from scipy.optimize import nnls

        weights = (self.weights / scale)[chosen]
        matrix = self.matrix[chosen] * weights[:, None]
        kept, lengths = _independent(matrix)
        # With the triangle of a QR decomposition the same problem has as many rows as there are terms.
        q, r = np.linalg.qr(matrix[:, kept] / lengths[kept])
        wanted = q.T @ (self.measured[chosen] * weights)
        pieces = [place for place, index in enumerate(kept) if self.names[index].startswith(ROWS)]
        smooth = np.zeros((max(0, len(pieces) - 1), len(kept)))
        for line, pair in zip(smooth, itertools.pairwise(pieces), strict=True):
            line[[*pair]] = (pull, -pull) / lengths[kept][[*pair]]
        values, _ = nnls(np.concatenate((r, smooth)), np.append(wanted, np.zeros(len(smooth))))
        found = dict(zip(kept, (values / lengths[kept]).tolist(), strict=True))
        named = {name: found[index] for index, name in enumerate(self.names) if index in found}
        return named, [name for index, name in enumerate(self.names) if index not in found]

    def predict(self, coefficients: dict[str, float]) -> Floats:
        """Seconds of all steps."""
        found: Floats = self.matrix @ np.array([coefficients.get(name, 0.0) for name in self.names])
        return found


def _independent(matrix: Floats) -> tuple[list[int], Floats]:
    """The columns of which at least ALONE is not a sum of columns before them; and the lengths of all columns."""
    lengths, basis, kept = np.linalg.norm(matrix, axis=0), np.empty((len(matrix), 0)), []
    for index, length in enumerate(lengths):
        rest = matrix[:, index] / max(length, 1e-300)
        for _ in range(2):  # once more, against rounding errors
            rest = rest - basis @ (basis.T @ rest)
        size = float(np.linalg.norm(rest))
        if length and size > ALONE:
            kept.append(index)
            basis = np.column_stack([basis, rest / size])
    return kept, lengths


def _knots(rows: Floats) -> list[int]:
    """The fewest measured rows, then 2, 4, 8, ...: those between which rows were measured. Otherwise pieces next to
    each other could not be told apart.
    """
    values = np.unique(rows).astype(int).tolist()
    knots = [values[0]]
    for knot in (1 << power for power in range(values[-1].bit_length())):
        if any(knots[-1] < each <= knot for each in values) and knot < values[-1]:
            knots.append(knot)
    return knots if len(values) > 1 else []


def _cells(features: dict[str, Floats], kinds: Ints) -> Ints:
    """For each step the number of the group of steps that are alike."""
    grid = np.stack([kinds, *(np.round(CELLS * np.log2(1 + values)) for values in features.values())], 1)
    return np.unique(grid, axis=0, return_inverse=True)[1].reshape(-1)


def _outliers(ratios: Floats, cells: Ints, kinds: Ints) -> Bools:
    """Steps that took much longer than their like: other work on the machine slows steps, nothing hastens them. Where
    the form does not fit, all steps that are alike are slow, and none of them is an outlier.
    """
    found = np.zeros(len(ratios), bool)
    order, counts = np.argsort(cells, kind="stable"), np.bincount(cells)
    groups = [group for group in np.split(order, np.cumsum(counts)[:-1]) if len(group) >= LIKE]
    for kind in np.unique(kinds):
        chosen = np.flatnonzero(kinds == kind)
        centres = np.full(len(ratios), np.median(ratios[chosen]))
        for group in groups:
            centres[group] = np.median(ratios[group])
        deviations = ratios[chosen] / centres[chosen] - 1
        limit = max(OUTLIER * float(np.median(np.abs(deviations))), LEAST_OUTLIER)
        found[chosen[deviations > limit]] = True
    return found


def _residuals(measured: Floats, predicted: Floats, chosen: Bools, kinds: Ints) -> dict[str, float]:
    found: dict[str, float] = {}
    for index, kind in enumerate(("", *KINDS)):
        is_kind = np.ones(len(kinds), bool) if not kind else kinds == index - 1
        ratios, prefix = (measured / predicted)[chosen & is_kind], f"{kind}." if kind else ""
        if len(ratios):
            found |= {prefix + name: float(np.quantile(ratios, share)) for name, share in QUANTILES.items()}
            found[f"{prefix}within"] = float(np.quantile(np.abs(ratios - 1), 0.9))
            found[f"{prefix}total"] = float(measured[is_kind].sum() / predicted[is_kind].sum())
    return found


def _paper(features: dict[str, Floats], measured: Floats, chosen: Bools, kinds: Ints) -> dict[str, float]:
    """The paper's constants, fitted to steps of one kind at a time; it has no steps of both."""
    prompts = {"C1": features["rows"], "C2": 2 * features["prompt_pairs"], "C3": np.ones(len(kinds))}
    decodes = {"C4": np.ones(len(kinds)), "C5": features["context"]}
    found: dict[str, float] = {}
    for index, columns in enumerate((prompts, decodes)):
        of_kind = chosen & (kinds == index)
        if of_kind.any():
            solver = _Solver(columns, measured, np.ones(len(kinds)))
            constants, _ = solver.solve(measured, of_kind)
            predicted = np.maximum(solver.predict(constants), 1e-3 * measured)
            residuals = _residuals(measured, predicted, of_kind, kinds)
            prefix = f"{KINDS[index]}."
            found |= constants | {name: value for name, value in residuals.items() if name.startswith(prefix)}
    return found


def describe(model: LatencyModel) -> list[tuple[str, str, str]]:
    """The terms of a model beside those of the paper's form, then the residuals of both. Rows of a table: what, ours,
    the paper's.
    """
    paper = model.paper

    def ours(term: str) -> str:
        value = model.coefficients.get(term)
        return "not told apart" if value is None else told(value)

    def theirs(term: str) -> str:
        named = PAPER.get(term, {})
        return "; ".join(f"{name} {told(paper[name])} a {what}" for name, what in named.items() if name in paper)

    rows = [("step", ours(BASE), theirs(BASE))]
    for index, knot in enumerate(model.knots):
        more = f"to {model.knots[index + 1]}" if index + 1 < len(model.knots) else "and more"
        rows.append((f"row, {knot} {more}", ours(f"{ROWS}{knot}"), theirs(ROWS) if not index else ""))
    rows += [(what, ours(term), theirs(term)) for term, what in TERMS.items()]
    for kind in KINDS:
        if model.counts.get(kind):
            what = f"{kind} steps: measured / predicted"
            rows.append((what, _quantiles(model.residuals, kind), _quantiles(paper, kind)))
    return rows


def _quantiles(residuals: Mapping[str, float], kind: str) -> str:
    values = [residuals[f"{kind}.{name}"] for name in QUANTILES if f"{kind}.{name}" in residuals]
    return " / ".join(f"{value:.2f}" for value in values) or "no such steps"


def told(seconds: float) -> str:
    """Seconds in a unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{format_number(seconds / size)} {unit}"
    return f"{format_number(seconds / 1e-9)} ns" if seconds else "0"
