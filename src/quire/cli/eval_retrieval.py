"""`quire eval retrieval`: how often the model finds a number that is hidden in a text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.arguments import Arguments, count
from quire.cli import shared
from quire.safe_io import read_given_text

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.evaluation import Retrieval

LENGTHS = [1024, 2048, 4096]
DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]


def add_arguments(parser: Arguments) -> None:
    """Adds the flags of this evaluation."""
    group = parser.add_argument_group("retrieval")
    text = "prompt lengths in tokens (default: 1024,2048,4096)"
    group.add_argument("--lengths", type=shared.list_of(count), default=LENGTHS, metavar="N,...", help=text)
    text = "0: start, 1: end of the text (default: 0,0.25,0.5,0.75,1)"
    group.add_argument("--depths", type=shared.list_of(_depth), default=DEPTHS, metavar="X,...", help=text)
    group.add_count("--trials", text="trials per length and depth", default=2)


def run(args: argparse.Namespace, config: EngineConfig) -> Sequence[Retrieval]:
    """The results."""
    text = None if args.text is None else read_given_text(args.text)  # before torch is imported
    from quire.evaluation import retrieval

    with shared.progress("answers") as progress:
        return retrieval(
            args.model,
            text,
            config=config,
            codecs=args.codecs or (),
            lengths=args.lengths,
            depths=args.depths,
            num_trials=args.trials,
            progress=progress,
        )


def print_results(results: Sequence[Retrieval]) -> None:
    """Prints a line per codec and length."""
    depths = list(dict.fromkeys(each.depth for each in results))
    rows: dict[tuple[str, int], dict[float, Retrieval]] = {}
    for each in results:
        rows.setdefault((each.codec, each.length), {})[each.depth] = each
    shared.print_table(
        ("codec", "tokens", *(f"depth {depth:g}" for depth in depths), "all"),
        [
            (
                codec,
                f"{length:,}",
                *(f"{cells[depth].found:.0%}" for depth in depths),
                f"{sum(each.num_found for each in cells.values())}/{sum(each.num_trials for each in cells.values())}",
            )
            for (codec, length), cells in rows.items()
        ],
    )


def _depth(text: str) -> float:
    try:
        depth = float(text)
    except ValueError:
        depth = -1.0
    if not 0 <= depth <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return depth
