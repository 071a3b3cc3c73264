"""Measure the effect of a cache codec or of retention on a model's quality.

ppl: perplexity of a text, read in windows of --context tokens as prompts through the engine's own cache. All tokens of
a window but the first are scored. With --kl (the default) the distribution of every next token is compared with that of
a dense cache with the same weights. Bytes are those that the request holds at the end of a window. Cached chunks that
no request reads, such as the prompt's original pages after retention, can be evicted and are not counted.

With retention only the last 256 tokens of a window are scored. They are computed one at a time after a prompt. The
dense cache it is compared with keeps every token. Likewise with cache.sparse_values; that cache reads every value.

retrieval: hides a five-digit number at several depths of texts of several lengths, and asks for it at the end.

docs/guide/quality.md has the definitions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cache.codecs import CODECS, DENSE
from quire.cli import shared
from quire.config import options_from
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.evaluation import Perplexity, Retrieval

DEFAULTS: dict[str, dict[str, Any]] = {
    "ppl": {"context": 2048, "continuation": None, "tokens": None, "windows": None, "kl": True, "plot": None},
    "retrieval": {"lengths": [1024, 2048, 4096], "depths": [0.0, 0.25, 0.5, 0.75, 1.0], "trials": 2},
}

ACTION_FLAGS = {name: tuple(flags) for name, flags in DEFAULTS.items()}
"""Names in the namespace of the flags that each evaluation takes."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command. Flags of one evaluation that are not given leave no trace in the namespace."""
    parser.add_argument("name", choices=DEFAULTS, metavar="NAME", help=f"one of: {', '.join(DEFAULTS)}")
    shared.add_engine_arguments(parser)
    group = parser.add_argument_group("every evaluation")
    text = "text to read; required for ppl; retrieval has built-in filler text"
    group.add_argument("--text", type=Path, metavar="FILE", help=text)
    text = "codecs to compare, such as dense,nuq4, each with its own cache; replaces --cache.codec"
    group.add_argument("--codecs", type=_list_of(str), metavar="NAME,...", help=text)
    group.add_argument("--json", action="store_true", help="print JSON lines instead of a table")

    def add(group: Arguments, flag: str, kind: Any, metavar: str, text: str) -> None:
        group.add_argument(flag, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=text)

    ppl = retrieval = parser.add_argument_group("flags of the evaluation")
    add(ppl, "--context", shared.count, "N", "tokens per window (default: 2048)")
    text = (
        "score only the last N tokens of a window, computed one step each after a prompt (default: 256 with retention"
        " or sparse values)"
    )
    add(ppl, "--continuation", shared.count, "N", text)
    add(ppl, "--tokens", shared.count, "N", "use only the first N tokens of the text")
    add(ppl, "--windows", shared.count, "N", "use only the first N windows")
    ppl.add_argument(
        "--kl",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="compare with a dense cache that keeps every token (default: yes)",
    )
    add(ppl, "--plot", Path, "FILE", "draw quality over cache bytes; the file's ending selects PNG, SVG or PDF")
    add(retrieval, "--lengths", _list_of(shared.count), "N,...", "prompt lengths in tokens (default: 1024,2048,4096)")
    add(retrieval, "--depths", _list_of(_depth), "X,...", "0: start, 1: end of the text (default: 0,0.25,0.5,0.75,1)")
    add(retrieval, "--trials", shared.count, "N", "trials per length and depth (default: 2)")


def run(args: argparse.Namespace) -> int:
    """Prints the results."""
    for name, other in DEFAULTS.items():
        for flag in other:
            if name != args.name and flag in args:
                raise ConfigError(f"--{flag} is for quire eval {name}, not for {args.name}")
    args = argparse.Namespace(**{**DEFAULTS[args.name], **vars(args)})
    if args.codecs:
        if "cache.codec" in args:
            raise ConfigError("give --codecs or --cache.codec, not both")
        # Some settings are valid for some codecs only. The configuration is checked with the codec that accepts the
        # most settings: a calibrated one, else any codec but dense. The dense reference drops settings not meant for
        # it.
        calibrated = [name for name, row in CODECS.items() if row.is_calibrated]
        vars(args)["cache.codec"] = min(args.codecs, key=lambda name: (name not in calibrated, name == DENSE))
    if shared.printed_config(args):
        return 0
    options = options_from(args, shared.ENGINE_SECTIONS)
    common = {"codecs": args.codecs or (), "options": options, "config_file": args.config}
    if args.name == "ppl":
        _perplexity(args, common)
    else:
        _retrieval(args, common)
    return 0


def _perplexity(args: argparse.Namespace, common: dict[str, Any]) -> None:
    if args.text is None:
        raise ConfigError("quire eval ppl needs --text FILE")
    from quire.evaluation.curves import Text, keep_results
    from quire.evaluation.engines import configs_of

    text = Text.read(args.text)
    if args.plot is not None:
        from quire.evaluation.plot import check_figure, save_plot

        check_figure(args.plot)
        shared.check_writable(args.plot)
    from quire.evaluation import perplexity

    with shared.progress("windows") as progress:
        results = perplexity(
            args.model,
            text.content,
            context=args.context,
            continuation=args.continuation,
            max_tokens=args.tokens,
            max_windows=args.windows,
            kl=args.kl,
            progress=progress,
            **common,
        )
    keep_results(args.model, text, results, configs_of(**common, compares=args.kl))
    if args.plot is not None:
        save_plot(args.plot, results, f"{args.model}, {args.text.name}, context {args.context}")
    if args.json:
        _print_lines({"eval": "ppl", "model": args.model, "text": str(args.text)}, results)
    else:
        _print_perplexity(results)


def _retrieval(args: argparse.Namespace, common: dict[str, Any]) -> None:
    from quire.evaluation import retrieval
    from quire.evaluation.curves import Text

    text = None if args.text is None else Text.read(args.text).content

    with shared.progress("answers") as progress:
        results = retrieval(
            args.model,
            text,
            lengths=args.lengths,
            depths=args.depths,
            num_trials=args.trials,
            progress=progress,
            **common,
        )
    if args.json:
        text_name = None if args.text is None else str(args.text)
        _print_lines({"eval": "retrieval", "model": args.model, "text": text_name}, results)
    else:
        _print_retrieval(results)


def _print_lines(about: dict[str, Any], results: Sequence[Perplexity] | Sequence[Retrieval]) -> None:
    for each in results:
        derived = {name: getattr(each, name) for name in ("perplexity", "perplexity_error") if hasattr(each, name)}
        print(json.dumps(about | asdict(each) | derived))


def _print_perplexity(results: Sequence[Perplexity]) -> None:
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


def _print_retrieval(results: Sequence[Retrieval]) -> None:
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


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A parser of comma-separated values, for argparse."""

    def convert(text: str) -> list[Any]:
        words = [word.strip() for word in text.split(",")]
        if not all(words):
            raise argparse.ArgumentTypeError(f"{text!r} has an empty value beside a comma")
        return [kind(word) for word in words]

    return convert


def _depth(text: str) -> float:
    try:
        depth = float(text)
    except ValueError:
        depth = -1.0
    if not 0 <= depth <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return depth
