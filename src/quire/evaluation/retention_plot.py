"""Draws which tokens of a prompt each head keeps, with matplotlib if it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from quire.config import format_bytes
from quire.engine.retention_report import RetentionReport
from quire.evaluation.plot import drawing

# Colour by the last member of a policy. Colour-blind readers can distinguish these hues (Okabe and Ito), by lightness
# too.
COLORS = {
    "special": "#f0e442",
    "punctuation": "#56b4e9",
    "frequent": "#e69f00",
    "local": "#009e73",
    "full": "#3b3b3b",
}

_CELL_INCHES = 0.3
_MANY_LAYERS = 48
_SMALL_CELL_INCHES = 0.23


def save_retention(file: Path, report: RetentionReport, model: str) -> None:
    """Draws a cell per head with its policy and the share of tokens it keeps (with a budget, shaded by that share), and
    below it the recovery of each policy by layer.

    `file` and the errors are those of `drawing`.
    """
    num_layers, num_heads = report.policies.shape
    cell = _CELL_INCHES if num_layers <= _MANY_LAYERS else _SMALL_CELL_INCHES
    width = max(7.5, cell * num_layers + 1.2)
    heights = (max(0.7, cell * num_heads), 2.2)
    with drawing(file, width, sum(heights) + 1.9) as figure:
        heads, layers = figure.subplots(2, sharex=True, height_ratios=heights)
        _draw_heads(heads, report, 24 * cell)
        _draw_recovery(layers, report)
        how = f"T {report.threshold:g}" if report.budget is None else f"budget {report.budget:g}"
        figure.suptitle(
            f"{model}: {report.num_tokens:,} tokens, {how}, {report.kept_fraction:.1%} kept,"
            f" in {format_bytes(report.bytes_kept)} of {format_bytes(report.bytes_full)}",
            fontsize=11,
            parse_math=False,
        )
        handles, names = heads.get_legend_handles_labels()
        figure.legend(
            handles,
            names,
            title="policy (number of heads)",
            loc="outside lower center",
            ncols=len(names),
            frameon=False,
            fontsize=9,
            title_fontsize=9,
            handletextpad=0.1,
        )


def _draw_heads(axes: Any, report: RetentionReport, font_size: float) -> None:
    num_layers, num_heads = report.policies.shape
    colors = _colors(report)
    pixels = np.array([_channels(color) for color in colors])[report.policies.T]
    if report.budget is not None:
        # From white (keeps nothing) to the full colour (keeps all).
        shares = (report.kept / report.num_tokens).T[..., None]
        pixels = 1 - shares * (1 - pixels)
    axes.imshow(pixels, aspect="auto", interpolation="nearest")
    for layer in range(num_layers):
        for head in range(num_heads):
            policy = report.policies[layer, head]
            if policy < len(report.members):
                share = 100 * report.kept[layer, head] / report.num_tokens
                text = f"{share:.0f}" if share >= 1 else "<1"
                axes.text(layer, head, text, ha="center", va="center", fontsize=font_size, color="black")
    for name, color, count in zip(report.policy_names, colors, report.num_heads, strict=True):
        axes.plot([], [], "s", color=color, markersize=8, label=f"{name} ({count:,})")
    axes.set_xticks(np.arange(num_layers + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(num_heads + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0)
    axes.set_yticks(range(0, num_heads, max(1, num_heads // 8)))
    axes.set_ylabel("kv head")
    axes.set_title("tokens that each head keeps, %; unnumbered: all", fontsize=9)


def _draw_recovery(axes: Any, report: RetentionReport) -> None:
    num_layers, num_heads = report.policies.shape
    tried = ~np.isnan(report.recovery)
    for policy, color in enumerate(_colors(report)[:-1]):
        places = np.flatnonzero(tried[:, :, policy].any(1))
        values = [report.recovery[layer, tried[layer, :, policy], policy] for layer in places]
        mean, low, high = (np.array([measure(each) for each in values]) for measure in (np.mean, np.min, np.max))
        # Side by side, so that none hides another.
        x = places + 0.7 * ((policy + 0.5) / len(report.members) - 0.5)
        axes.vlines(x, low, high, color=color, linewidth=2)
        axes.plot(x, mean, "o", color=color, markersize=4, markeredgecolor="black", markeredgewidth=0.4)
    if report.budget is None:
        axes.axhline(report.threshold, color="black", linewidth=0.8, linestyle="--")
        axes.annotate(
            "T", (1, report.threshold), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
            va="center", annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(-0.5, num_layers - 0.5)
    axes.set_ylim(top=max(1.0, report.threshold) + 0.02)
    axes.set_xticks(range(0, num_layers, 1 if num_layers <= _MANY_LAYERS else 5))
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="x", which="minor", length=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel("layer")
    axes.set_ylabel("attention recovered")
    spread = "mean and range over its heads" if num_heads > 1 else "its head"
    axes.set_title(f"recovery of each policy where it was tried, by layer: {spread}", fontsize=9)


def _colors(report: RetentionReport) -> list[str]:
    return [COLORS[member] for member in (*report.members, "full")]


def _channels(color: str) -> list[float]:
    """Red, green and blue of #rrggbb, from 0 to 1."""
    return [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
