"""`quire eval ppl`: perplexity of a text through the engine's own cache, and the difference to a dense one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.arguments import Arguments
from quire.cli import shared
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.evaluation import Perplexity


def add_arguments(parser: Arguments) -> None:
    """Adds the flags of this evaluation."""
    group = parser.add_argument_group("perplexity")
    group.add_count("--context", text="tokens per window", default=2048)
    text = (
        "score only the last N tokens of a window, computed one step each after a prompt (default: 256 with retention"
        " or sparse values)"
    )
    group.add_count("--continuation", text=text)
    group.add_count("--tokens", text="use only the first N tokens of the text")
    group.add_count("--windows", text="use only the first N windows")
    text = "compare with a dense cache that keeps every token (default: yes)"
    group.add_argument("--kl", action=argparse.BooleanOptionalAction, default=True, help=text)
    shared.add_plot(group, "quality over cache bytes")


def run(args: argparse.Namespace, config: EngineConfig) -> Sequence[Perplexity]:
    """The results, which are drawn, and kept for later plans."""
    if args.text is None:
        raise ConfigError("quire eval ppl needs --text FILE")
    from quire.measure.engines import configs_of
    from quire.planning.quality import Text, keep_results

    text = Text.read(args.text)
    if args.plot is not None:
        shared.check_plot(args.plot)
    from quire.evaluation import perplexity

    with shared.progress("windows") as progress:
        results = perplexity(
            args.model,
            text.content,
            config=config,
            codecs=args.codecs or (),
            context=args.context,
            continuation=args.continuation,
            max_tokens=args.tokens,
            max_windows=args.windows,
            kl=args.kl,
            progress=progress,
        )
    keep_results(args.model, text, results, configs_of(config, args.codecs or (), compares=args.kl))
    if args.plot is not None:
        from quire.evaluation.plot import save_plot

        save_plot(args.plot, results, f"{args.model}, {args.text.name}, context {args.context}")
    return results


def print_results(results: Sequence[Perplexity]) -> None:
    """Prints a line per codec."""

    def error(value: float | None, digits: int) -> str:
        return "" if value is None else f" ± {value:.{digits}f}"

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    shared.print_table(
        ("codec", "bits/element", "bytes/token", "perplexity", "ratio", "KL mean", "KL p99", "same token", "windows"),
        [
            (
                each.codec,
                number(each.bits_per_element, ".2f"),
                f"{each.bytes_per_token:,.0f}",
                f"{each.perplexity:.3f}{error(each.perplexity_error, 3)}",
                "" if each.ratio is None else f"{each.ratio:.4f}{error(each.ratio_error, 4)}",
                number(each.kl_mean, ".5f"),
                number(each.kl_p99, ".4f"),
                number(each.agreement, ".2%"),
                f"{each.num_windows:,} x {each.context:,}"
                + ("" if each.continuation is None else f", last {each.continuation:,}"),
            )
            for each in results
        ],
    )
    from quire.cache.ledger import PAGE_TOKENS

    # The last token of a window is predicted, not computed.
    if len(results) > 1 and all(each.context - 1 <= PAGE_TOKENS for each in results):
        print("no window is longer than a chunk, and the last chunk is never encoded: codecs differ only by rounding")
