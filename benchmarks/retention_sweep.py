"""Thresholds and budgets of retention: kept bytes, tokens and heads, and the loss in continuing a text.

    python benchmarks/retention_sweep.py --data DIR [--windows 8] [--thresholds 0.6,0.7,...] [--budgets 0.25,0.5,0.75]
                                         [--plot FILE.png] [--json FILE] [--threads 2] [--model smollm2] [--markdown]

DIR has wiki.test.raw and war_and_peace.txt. A window has 1,536 tokens of one of them as the prompt, and the 256 that
follow, which are read one after the other while heads continue to drop tokens. One engine in bfloat16 runs all
settings.

kept      mean share of the prompts' tokens, over all heads; for no prompt may it fall as the threshold rises
bytes     share of the bytes without retention, after the prompt and at the end
full      mean number of heads whose policy keeps everything
ratio     perplexity of the continuations relative to the full cache, with its standard error over windows
same      share of positions with the full cache's most probable token
KL        mean divergence from the full cache, in nats

The plot shows ratio and same token over bytes. The exit status is 1 if the kept share falls somewhere.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT, append_record, arguments, commit, format_table, hardware, hardware_line
from retention_quality import CONTEXT, CONTINUATION, TEXTS, spread_starts, standard_error

sys.path += [str(ROOT / "benchmarks" / "retention_quality"), str(ROOT / "benchmarks" / "peers")]
from run_quire import Runner, compare

from quire.models.resolve import resolve_model
from quire.models.tokenizer import load_tokenizer

THRESHOLDS = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)
BUDGETS = (0.25, 0.5, 0.75)


@dataclass
class Row:
    """The results of one setting, one number per window."""

    threshold: float | None
    budget: float | None
    kept: list[float] = field(default_factory=list)
    full: list[int] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    resident_end: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)  # minus the full cache's, in nats per token
    same: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its name in the table."""
        return f"T {self.threshold:g}" if self.budget is None else f"budget {self.budget:g}"

    @property
    def ratio(self) -> float:
        """Ratio of perplexities."""
        return math.exp(statistics.fmean(self.loss))


def main() -> int:
    """Measures, prints, draws."""
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder that has the two texts")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--windows", type=int, default=8, help="windows, half of each text")
    parser.add_argument("--thresholds", type=numbers, default=list(THRESHOLDS), help="comma-separated")
    parser.add_argument("--budgets", type=numbers, default=list(BUDGETS), help="comma-separated")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves: .png, .svg or .pdf")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    given = parser.parse_args()
    rows = measure(given)
    print(report(rows, given))
    if given.json:
        append_record(given.json, {"benchmark": "retention_sweep", "rows": [vars(row) for row in rows]})
    if given.plot:
        draw(rows, given.plot)
    by_threshold = [row.kept for row in sorted(rows, key=lambda row: row.threshold or 0.0) if row.budget is None]
    falls = any(
        after < before for pair in itertools.pairwise(by_threshold) for before, after in zip(*pair, strict=True)
    )
    if falls:
        print("a higher threshold keeps less")
    return int(falls)


def numbers(words: str) -> list[float]:
    """The numbers of an option."""
    return [float(word) for word in words.split(",") if word]


def measure(given: argparse.Namespace) -> list[Row]:
    """All settings on all windows."""
    path = resolve_model(given.model)
    tokenizer = load_tokenizer(path)
    runner = Runner(str(path), given.threads)
    rows = [Row(threshold, None) for threshold in given.thresholds] + [Row(None, budget) for budget in given.budgets]
    size = CONTEXT + CONTINUATION + 1
    for number, file in zip((given.windows - given.windows // 2, given.windows // 2), TEXTS.values(), strict=True):
        ids = tokenizer.encode((given.data / file).read_text(encoding="utf-8"))
        for start in spread_starts(len(ids), size, number) if number else ():
            prompt, rest = ids[start : start + CONTEXT], ids[start + CONTEXT : start + size]
            runner.set(None)
            reference, _ = runner.read(prompt, rest)
            base = compare(reference, reference, rest[1:])["surprise"]
            for row in rows:
                runner.set(row.budget, row.threshold or 0.0)
                found, end = runner.read(prompt, rest)
                result, decided = compare(found, reference, rest[1:]), runner.decided
                assert decided is not None
                row.kept.append(decided.kept_fraction)
                row.full.append(int((decided.policies == decided.chain.full).sum()))
                row.resident.append(runner.resident)
                row.resident_end.append(end)
                row.loss.append((result["surprise"] - base) / CONTINUATION)
                row.same.append(result["agreeing"] / CONTINUATION)
                row.divergence.append(result["divergence"] / CONTINUATION)
            print(f"{len(rows[0].kept)} of {given.windows} windows", file=sys.stderr)
    return rows


def report(rows: list[Row], given: argparse.Namespace) -> str:
    """The table, and the conditions."""
    mean = statistics.fmean
    lines = [
        [
            row.name,
            f"{mean(row.kept):.3f}",
            f"{mean(row.resident):.3f}",
            f"{mean(row.resident_end):.3f}",
            f"{mean(row.full):.1f}" if row.budget is None else "-",
            f"{row.ratio:.4f}",
            f"{row.ratio * standard_error(row.loss):.4f}",
            f"{mean(row.same):.1%}",
            f"{mean(row.divergence):.4f}",
        ]
        for row in rows
    ]
    head = ["retention", "kept", "bytes", "at the end", "full", "ratio", "+-", "same", "KL"]
    return (
        f"{format_table(head, lines, given.markdown)}\n\n{given.windows} windows; {hardware_line(hardware())};"
        f" commit {commit()}; {time.strftime('%Y-%m-%d')}"
    )


def draw(rows: list[Row], file: Path) -> None:
    """Draws the curves."""
    from quire.evaluation.plot import drawing, finish

    with drawing(file, 9, 4) as figure:
        axes = figure.subplots(1, 2)
        for kind, color, marker in (("threshold", "#0072b2", "o"), ("budget", "#d55e00", "s")):
            points = sorted(
                (statistics.fmean(row.resident), row.ratio, statistics.fmean(row.same), row.name)
                for row in rows
                if getattr(row, kind) is not None
            )
            for place, each in zip(axes, (1, 2), strict=True):
                spots = [(point[0], point[each]) for point in points]
                place.plot([x for x, _ in spots], [y for _, y in spots], marker + "-", color=color, label=kind)
                for point, spot in zip(points, spots, strict=True):
                    place.annotate(point[3], spot, xytext=(3, 4), textcoords="offset points", fontsize=7)
        for place, label in zip(axes, ("perplexity to the full cache's", "same most probable token"), strict=True):
            finish(place, "bytes held behind the prompt, of the full cache's", label)


if __name__ == "__main__":
    sys.exit(main())
