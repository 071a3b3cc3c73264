"""Draws figures, with matplotlib if it is installed: what all of them share, and quality over cache bytes."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.evaluation.perplexity import Perplexity
from quire.extras import install_command
from quire.safe_io import atomic_write

ENDINGS = (".png", ".svg", ".pdf")


def check_figure(file: Path) -> None:
    """Raises ConfigError if no picture can be drawn into the file. Called before the measurement."""
    if file.suffix.lower() not in ENDINGS:
        raise ConfigError(f"cannot draw {file}: its ending selects the format and must be one of {', '.join(ENDINGS)}")
    load_figure()


def load_figure() -> Any:
    """Matplotlib's Figure class. Raises ConfigError if matplotlib is not installed."""
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a picture needs a package that is not installed ({error.name}); {install_command('plot')}"
        ) from error


@contextlib.contextmanager
def drawing(file: Path, width: float, height: float, title: str = "") -> Iterator[Any]:
    """A figure to draw into, which is then written to a file.

    file           its ending selects the format: .png, .svg, .pdf
    width, height  in inches
    title          of the whole figure; its dollar signs are no formulas
    Raises ConfigError if matplotlib is not installed or the file cannot be written; an existing file then stays
    unchanged.
    """
    figure = load_figure()(figsize=(width, height), dpi=150, layout="constrained")
    yield figure
    if title:
        figure.suptitle(title, parse_math=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=file.suffix[1:].lower())
    try:
        with atomic_write(file) as draft:
            draft.write_bytes(drawn.getvalue())
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error


def finish(axes: Any, xlabel: str, ylabel: str, **more: Any) -> None:
    """Labels axes, and gives them a grid and, if anything in them has a label, a legend. more: of matplotlib's
    `Axes.set`, such as xscale.
    """
    axes.set(xlabel=xlabel, ylabel=ylabel, **more)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def save_plot(file: Path, results: Sequence[Perplexity], title: str) -> None:
    """Draws a point per codec: perplexity increase over bytes per token, with the standard error.

    The arguments and errors are those of `drawing`.
    """
    with drawing(file, 6.4, 4.0) as figure:
        axes = figure.subplots()
        for each in results:
            is_compared = each.ratio is not None
            value = 100 * (each.ratio - 1) if each.ratio is not None else each.perplexity
            error = 100 * (each.ratio_error or 0.0) if is_compared else each.perplexity_error or 0.0
            (line, *_) = axes.errorbar(each.bytes_per_token, value, yerr=error, fmt="o", capsize=3)
            place = each.bytes_per_token, value
            axes.annotate(each.codec, place, xytext=(6, 6), textcoords="offset points", color=line.get_color())
        compared = any(each.ratio is not None for each in results)
        ylabel = "perplexity above dense, %" if compared else "perplexity"
        widest = max(each.bytes_per_token for each in results)
        finish(axes, "bytes resident per token", ylabel, title=title, xlim=(0, 1.15 * widest))
        axes.margins(0.1)
