"""One load with nothing on, with each of five systems, with each pair of them and with all five, in the same memory.

    python benchmarks/compose.py --data DIR --clients 1 20 --seconds 75     # DIR has wiki.test.raw; an hour
    python benchmarks/compose.py --data DIR --only sharing "sharing + codec"
    python benchmarks/compose.py --quick                                    # a load too small to compare

The systems are sharing, codec, retention, offload and instances; docs/lab/composition.md says which settings they are,
and explains the columns. Processes and weights take a part of --plan.memory, which a probe measures, and the caches of
a configuration get the rest. Everything runs on the CPU. Settings of an engine are flags, such as --cache.codec, and
belong to their system: retain.budget holds only where retention is on.

Prompts are made up, with beginnings in common, or they are those of --trace FILE. The quality is measured on DIR's
text, or on --text FILE. --output writes the report that scripts/composition.py reads. The exit status is 1 if a
configuration failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "compose")]
from common import append_record, format_table  # noqa: E402
from comparison import Comparison  # noqa: E402
from results import Row, doubts, missed  # noqa: E402
from systems import ALL, CONFIGURATIONS, SET_HERE, Load, Recipe, systems_of  # noqa: E402

from quire.arguments import Arguments, count  # noqa: E402
from quire.cli.shared import check_writable, progress  # noqa: E402
from quire.config import (  # noqa: E402
    ENGINE_SECTIONS,
    EngineConfig,
    add_flags,
    format_bytes,
    options_from,
    parse_bytes,
    sources,
)
from quire.errors import QuireError  # noqa: E402
from quire.safe_io import read_given_text  # noqa: E402
from quire.workload.slo import Slo  # noqa: E402

TEXT = "wiki.test.raw"
MEMORY = "plan.memory"

LOAD: dict[str, Any] = {"input_tokens": 4096, "output_tokens": 64, "clients": [1, 4], "seconds": 50.0, "windows": 4}
"""The default load."""

QUICK: dict[str, Any] = {"input_tokens": 512, "output_tokens": 16, "clients": [4], "seconds": 3.0, "windows": 1}
"""The default load with --quick."""

Told = dict[str, Any]
"""A row of the report."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default="smollm2", help="(default: smollm2)")
    text = "memory of all processes together (default: 2GiB)"
    parser.add_argument(f"--{MEMORY}", type=parse_bytes, default=2 << 30, metavar="SIZE", help=text)
    parser.add_argument("--data", type=Path, metavar="DIR", help=f"folder that has {TEXT}; without it, no quality")
    parser.add_argument("--text", type=Path, metavar="FILE", help="another text, on which the quality is measured")
    text = "a trace whose requests are sent, in place of prompts of equal length"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=text)
    parser.add_argument("--input-tokens", type=count, metavar="N", help="tokens of a prompt (default: 4096)")
    text = "first tokens that prompts have in common (default: 7/8 of --input-tokens)"
    parser.add_argument("--shared-tokens", type=int, metavar="N", help=text)
    text = "different beginnings of prompts (default: 2)"
    parser.add_argument("--prefixes", type=count, default=2, metavar="N", help=text)
    parser.add_argument("--output-tokens", type=count, metavar="N", help="tokens per answer (default: 64)")
    text = "clients at once, one number after the other, each for --seconds (default: 1 4)"
    parser.add_argument("--clients", type=count, nargs="+", metavar="N", help=text)
    parser.add_argument("--seconds", type=float, metavar="X", help="time for each number of clients (default: 50)")
    text = "most seconds to the first token (default: 10 times those of a request alone)"
    parser.add_argument("--ttft", type=float, metavar="X", help=text)
    parser.add_argument("--tpot", type=float, metavar="X", help="most seconds per token after it (default: likewise)")
    parser.add_argument("--windows", type=count, metavar="N", help="windows of the text (default: 4)")
    text = "configurations to run beside none, such as sharing, or all five"
    parser.add_argument("--only", nargs="+", metavar="NAME", help=text)
    text = "a load that is too small to compare, to see that all of it works"
    parser.add_argument("--quick", action="store_true", help=text)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows as JSON lines")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings; flags override it")
    add_flags(Arguments(parser, []), ENGINE_SECTIONS, left_out=SET_HERE)
    parser.set_defaults(**LOAD)
    if parser.parse_args(words).quick:
        parser.set_defaults(**QUICK)
    given = parser.parse_args(words)
    for name in ("ttft", "tpot"):
        if (value := getattr(given, name)) is not None and not value > 0:
            parser.error(f"--{name} is {value:g}; it must be above 0")
    if given.text is None and given.data is not None:
        given.text = given.data / TEXT
    return given


def load_of(given: argparse.Namespace) -> Load:
    """The load of a command line. Raises ConfigError if it cannot be."""
    shared = 7 * given.input_tokens // 8 if given.shared_tokens is None else given.shared_tokens
    trace = None if given.trace is None else str(given.trace)
    return Load(
        given.input_tokens, shared, given.prefixes, given.output_tokens, tuple(given.clients), given.seconds, trace
    )


def settings_of(given: argparse.Namespace) -> Mapping[str, Any]:
    """The settings of the flags, and those of the file that differ from the defaults. A file of quire plan auto has all
    settings; its cache size is ignored here.
    """
    flags = options_from(given)
    values, usual = (each.to_options() for each in (EngineConfig.from_options(flags, given.config), EngineConfig()))
    return {
        key: values[key]
        for key, origin in sources(flags, given.config).items()
        if origin == "flag" or (origin != "default" and values[key] != usual[key] and key not in SET_HERE)
    }


def compare(given: argparse.Namespace) -> tuple[list[Told], list[str]]:
    """The rows of all configurations, each of which runs in processes of its own, and what else is to be said. Raises
    ConfigError for what cannot be compared.
    """
    chosen = {systems_of(name) for name in given.only or ()}
    configurations = [each for each in CONFIGURATIONS if given.only is None or not each or each in chosen]
    load, memory = load_of(given), getattr(given, MEMORY)
    text = None if given.text is None else read_given_text(given.text)
    for file in (given.output, given.json):
        if file is not None:
            check_writable(file)
    comparison = Comparison(
        given.model, load, memory, configurations, Recipe.of(settings_of(given)), text, given.windows, given.ttft,
        given.tpot,
    )  # fmt: skip

    def write(found: Sequence[Row], slo: Slo) -> None:
        if given.output is not None:
            rows = [row.told(found[0], slo) for row in found]
            report = {"about": comparison.about(slo), "doubts": doubts(load, slo, found[0]), "rows": rows}
            given.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    with progress("runs") as told:
        found, slo = comparison.measured(told, write)
    rows = [row.told(found[0], slo) for row in found]
    requests = (
        f"requests of {load.trace}"
        if load.trace is not None
        else f"prompts of {load.prompt:,} tokens, {load.shared:,} of them shared, and {load.output:,} out"
    )
    notes = [
        f"{given.model} in {format_bytes(memory)} of all processes; {requests}; targets: {slo.ttft:.2f} s to the first"
        f" token, {1e3 * slo.tpot:.0f} ms for each one after it"
    ]
    notes += [f"{row['configuration']}: {row[what]}" for what in ("note", "refused") for row in rows if row[what]]
    if text is None:
        notes.append("the quality was not measured: give --data")
    notes += [f"doubt: {doubt}" for doubt in doubts(load, slo, found[0])]
    if not given.quick and rows[-1]["configuration"] == ALL and not rows[-1]["refused"]:
        notes += missed(rows[-1], memory)
    return rows, notes


def table(rows: Sequence[Told], markdown: bool) -> str:
    """The rows as text."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    head = ("configuration", "sequences (simulated)", "to none", "goodput/s", "to none", "clients", "perplexity ratio",
            "weights", "cache", "PSS")  # fmt: skip
    lines = [
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
    ]
    return format_table(head, lines, markdown)


def main(words: Sequence[str] | None = None) -> int:
    """Runs all configurations, and prints a table."""
    given = arguments(words)
    try:
        rows, notes = compare(given)
    except QuireError as error:
        sys.exit(f"compose.py: {error}")
    print(table(rows, given.markdown), *notes, sep="\n")
    if given.json is not None:
        for row in rows:
            append_record(given.json, {"benchmark": "compose", "model": given.model, **row})
    return int(any(row["refused"].startswith("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
