"""`quire bench compose`: one load with nothing on, with each of the five systems, with each pair and with all five."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import EngineConfig, format_bytes, options_from, parse_bytes, sources
from quire.errors import ConfigError
from quire.safe_io import read_given_text

if TYPE_CHECKING:
    from rich.console import Console

    from quire.evaluation.compose import Load, Row
    from quire.planning.slo import Slo

MEMORY = "plan.memory"

LOAD: dict[str, Any] = {
    "input_tokens": 4096, "output_tokens": 64, "clients": [1, 4], "seconds": 50.0, "windows": 4,
}  # fmt: skip
"""The default load."""

QUICK: dict[str, Any] = {
    "input_tokens": 512, "output_tokens": 16, "clients": [4], "seconds": 3.0, "windows": 1,
}  # fmt: skip
"""The default load with --quick: enough to see that everything works, too little to compare."""


def add_arguments(parser: Arguments) -> None:
    """Adds the flags of this benchmark."""
    group = parser.add_argument_group("benchmark")

    text = "memory of all processes together (default: 2GiB)"
    group.add_argument(f"--{MEMORY}", dest=MEMORY, type=_bytes, default=2 << 30, metavar="SIZE", help=text)
    group.add_file("--text", text="text on which the quality is measured; without it, it is not")
    group.add_file("--trace", text="a trace whose requests are sent, in place of prompts of equal length")
    group.add_argument("--input-tokens", type=int, metavar="N", help="tokens of a prompt (default: 4096)")
    text = "first tokens that prompts have in common (default: 7/8 of --input-tokens)"
    group.add_argument("--shared-tokens", type=int, metavar="N", help=text)
    group.add_count("--prefixes", text="different beginnings of prompts", default=2)
    group.add_argument("--output-tokens", type=int, metavar="N", help="tokens per answer (default: 64)")
    text = "clients at once, one number after the other, each for --seconds (default: 1 4)"
    group.add_count("--clients", text=text, nargs="+")
    group.add_argument("--seconds", type=float, metavar="X", help="time for each number of clients (default: 50)")
    text = "most seconds to the first token (default: 10 times those of a request alone)"
    group.add_argument("--ttft", type=float, metavar="X", help=text)
    group.add_argument("--tpot", type=float, metavar="X", help="most seconds per token after it (default: likewise)")
    group.add_count("--windows", text="windows of the text (default: 4)")
    text = "configurations to run beside none, such as sharing, or all five"
    group.add_argument("--only", nargs="+", metavar="NAME", help=text)
    group.add_switch("--quick", text="a load that is too small to compare, to see that all of it works")
    group.add_file("--output", text="write the report as JSON")


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for invalid arguments."""
    CompositionBenchmark(args)


def run(args: argparse.Namespace, console: Console) -> tuple[list[dict[str, Any]], bool]:
    """Runs all configurations, and prints a table. Returns its rows, and whether all configurations could run."""
    return CompositionBenchmark(args).run(console)


class CompositionBenchmark:
    """The benchmark; see `quire.cli.bench`."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises ConfigError for invalid arguments."""
        self._text = None if args.text is None else read_given_text(args.text)  # before torch is imported
        from quire.evaluation.compose import CONFIGURATIONS, Recipe, systems_of

        usual = QUICK if args.quick else LOAD
        given = {name: value for name, value in vars(args).items() if value is not None or name not in usual}
        args = self._args = argparse.Namespace(**usual | given)
        for name in ("ttft", "tpot"):
            if (value := getattr(args, name)) is not None and not value > 0:
                raise ConfigError(f"--{name} is {value:g}; it must be above 0")
        if args.output is not None:
            shared.check_writable(args.output)
        chosen = {systems_of(name) for name in args.only or ()}
        self._configurations = [each for each in CONFIGURATIONS if args.only is None or not each or each in chosen]
        self._recipe = Recipe.of(_given(args))
        self._load = self._load_of(args)

    @staticmethod
    def _load_of(args: argparse.Namespace) -> Load:
        from quire.evaluation.compose import Load

        trace = None if args.trace is None else str(args.trace)
        shared_tokens = 7 * args.input_tokens // 8 if args.shared_tokens is None else args.shared_tokens
        return Load(
            args.input_tokens, shared_tokens, args.prefixes, args.output_tokens, tuple(args.clients), args.seconds,
            trace,
        )  # fmt: skip

    def run(self, console: Console) -> tuple[list[dict[str, Any]], bool]:
        """Runs all configurations, each in separate processes, and prints a table. Returns its rows, and whether all
        configurations could run.
        """
        from quire.evaluation.compose import Targets, doubts, name_of
        from quire.evaluation.compose_bench import Comparison

        args = self._args
        memory = getattr(args, MEMORY)
        comparison = Comparison(
            args.model, self._load, memory, self._configurations, self._recipe,
            self._text, args.windows, args.ttft, args.tpot,
        )  # fmt: skip

        def write(found: Sequence[Row], slo: Slo) -> None:
            if args.output is not None:
                report = {
                    "about": comparison.about(slo),
                    "doubts": doubts(self._load, slo, found[0]),
                    "rows": [row.told(found[0], slo) for row in found],
                }
                args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

        with shared.progress("runs") as progress:
            found, slo = comparison.measured(progress, write)
        rows = [row.told(found[0], slo) for row in found]
        console.print(
            f"{args.model} in {format_bytes(memory)} of all processes; {self._load_text()}; targets: {slo.ttft:.2f} s"
            f" to the first token, {1e3 * slo.tpot:.0f} ms for each one after it"
        )
        print_rows(rows)
        for note in sorted({f"{row['configuration']}: {row['note']}" for row in rows if row["note"]}):
            console.print(note)
        if args.text is None:
            console.print("the quality was not measured: give --text")
        for row in rows:
            if row["refused"]:
                console.print(f"{row['configuration']}: {row['refused']}")
        for doubt in doubts(self._load, slo, found[0]):
            console.print(f"doubt: {doubt}")
        if not args.quick and rows[-1]["configuration"] == name_of(self._configurations[-1]) == "all five":
            for missed in Targets().missed(rows[-1], memory) if not rows[-1]["refused"] else ():
                console.print(missed)
        return rows, not any(row["refused"].startswith("failed") for row in rows)

    def _load_text(self) -> str:
        load = self._load
        if load.trace is not None:
            return f"requests of {load.trace}"
        return f"prompts of {load.prompt:,} tokens, {load.shared:,} of them shared, and {load.output:,} out"


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of the flags, and those of the file that differ from the defaults. A file of quire plan auto has all
    settings; its cache size is ignored here.
    """
    from quire.evaluation.compose import SET_HERE

    flags = options_from(args)
    values, usual = (each.to_options() for each in (EngineConfig.from_options(flags, args.config), EngineConfig()))
    origins = sources(flags, args.config)
    return {
        key: values[key]
        for key, origin in origins.items()
        if origin == "flag" or (origin != "default" and values[key] != usual[key] and key not in SET_HERE)
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the table."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    shared.print_table(
        ("configuration", "sequences (simulated)", "to none", "goodput/s", "to none", "clients", "perplexity ratio",
         "weights", "cache", "PSS"),
        [
            (row["configuration"], "refused", *[""] * 8)
            if row["refused"]
            else (
                row["configuration"],
                f"{row['sequences']:,}",
                number(row["gain_sequences"], ".2f"),
                f"{row['goodput']:.3f}",
                number(row["gain_goodput"], ".2f"),
                f"{row['clients']}",
                number(row["ratio"], ".4f"),
                *(format_bytes(row[name]) for name in ("weights", "cache", "pss")),
            )
            for row in rows
        ],
    )  # fmt: skip


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
