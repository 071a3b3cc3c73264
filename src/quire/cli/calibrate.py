"""Calibrate the nuq codecs for a model: fit their codebooks and allocate their bits.

The model reads windows of a text. Without --text it first writes the text itself. Its gradients give the cost of an
error in each key and value. One run makes the tables of all bit widths and writes them to one file.

Without --output the file goes where quire serve, chat and generate look for it. If they find none, they calibrate with
these defaults themselves. --cache.calibration FILE makes them use another file.

An interrupted calibration resumes with the windows gathered so far. --export FILE writes the kept calibration for
another machine, where --import FILE keeps it. See docs/guide/calibration.md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from quire.arguments import Arguments, count
from quire.cache.codecs import CODECS
from quire.cli import shared
from quire.config import CacheConfig, EngineConfig
from quire.safe_io import read_given_text

if TYPE_CHECKING:
    from quire.calibrate import CalibrationSettings
    from quire.engine.calibration import Calibration

SECTIONS = ("model", "runtime")


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    shared.add_engine_arguments(parser, SECTIONS)
    group = parser.add_argument_group("calibration")
    group.add_file("-o", "--output", text="file to write")
    travels = group.add_mutually_exclusive_group()
    travels.add_file("--export", text="write the kept calibration to a file; make it first if there is none")
    travels.add_file("--import", text="keep a calibration that was exported elsewhere", dest="import_file")
    group.add_file("--text", text="text to read (default: the model writes a text itself)")
    widths = ",".join(str(row.bits) for row in reversed(CODECS.values()) if row.is_calibrated)
    text = f"bit widths to make tables for (default: {widths})"
    group.add_argument("--bits", type=shared.set_of(count), metavar="N,...", help=text)
    for flag, text in (
        ("--outlier-slots", "number of elements per vector stored exactly (default: cache.outlier_slots)"),
        ("--sink-tokens", "number of first tokens kept exact (default: cache.sink_tokens)"),
        ("--seed", "seed of the text that the model writes (default: 0)"),
    ):
        group.add_argument(flag, type=int, metavar="N", help=text)
    group.add_count("--windows", text="number of windows of text to read (default: 8)", dest="num_windows")
    text = "tokens per window (default: 1,024, for large models down to 256)"
    group.add_count("--window", text=text, dest="window_tokens", metavar="TOKENS")
    group.add_switch("--q-norm", text="preserve the mean and deviation of keys and values")
    group.add_switch("--json", text="print JSON instead of a table")
    group = parser.add_argument_group("for ablations")
    text = "kinds of codebooks to choose from: uniform,plain,fisher,damped,own (default: all)"
    group.add_argument("--books", type=shared.set_of(str), dest="kinds", metavar="KIND,...", help=text)
    text = "use the same bit width in all layers, heads and channels"
    group.add_argument("--same-bits", action="store_false", dest="spends", help=text)


def run(args: argparse.Namespace) -> int:
    """Calibrates and prints the chosen widths and codebooks."""
    if shared.printed_config(args):
        return 0
    config = EngineConfig.from_flags(args)
    text = None if args.text is None else read_given_text(args.text)
    for file in (args.output, args.export):
        if file is not None:
            shared.check_replaceable(file)
    from quire.calibrate import CalibrationSettings, calibrate, import_calibration
    from quire.calibrate.progress import progress_display
    from quire.load import kept_calibration
    from quire.models.fingerprint import fingerprint
    from quire.models.resolve import resolve_model

    given = {each.name: getattr(args, each.name) for each in fields(CalibrationSettings)}
    cache = {"outlier_slots": config.cache.outlier_slots, "sink_tokens": config.cache.sink_tokens}
    settings = CalibrationSettings(**cache | {name: value for name, value in given.items() if value is not None})
    path = resolve_model(args.model)
    model = fingerprint(path)
    file = settings.file(model) if args.output is None or args.import_file is not None else args.output
    replaces = ", replaces the earlier one" * file.exists()
    if args.import_file is not None:
        with shared.writing(file):
            made = import_calibration(args.import_file, path, settings, file)
    elif args.export is not None and (kept := kept_calibration(model, settings)) is not None:
        made = kept
    else:
        with progress_display() as progress:
            made = calibrate(path, settings, file, text=text, config=config, progress=progress)
    if args.export is not None:
        with shared.writing(args.export):
            made.save(args.export)
        print(f"file: {args.export}\nhash: {made.hash}\nuse:  quire calibrate {args.model} --import {args.export.name}")
    elif args.json and args.import_file is None:
        facts = {"file": str(file), "hash": made.hash, "model": made.model, "settings": made.settings}
        print(json.dumps(facts | {"codecs": made.report}, indent=2))
    else:
        if args.import_file is None:
            _print(made)
        usual = CalibrationSettings(outlier_slots=settings.outlier_slots, sink_tokens=settings.sink_tokens).file(model)
        is_found = args.import_file is not None or file == usual
        print(f"file: {file}{replaces}\nhash: {made.hash}")
        print("use:  " + _use(args.model, made, settings, None if is_found else file))
    return 0


def _use(model: str, made: Calibration, settings: CalibrationSettings, file: Path | None) -> str:
    """A command that uses the calibration. file is None if Quire finds it without a flag."""
    words = ["quire serve", model, "--cache.codec", max(made.tables)]
    for name in ("outlier_slots", "sink_tokens"):
        value = getattr(settings, name)
        if value != CacheConfig.__dataclass_fields__[name].default:
            words += [f"--cache.{name}", str(value)]
    if file is not None:
        words += ["--cache.calibration", str(file)]
    return " ".join(words)


def _print(made: Calibration) -> None:
    rows = []
    for codec, report in made.report.items():
        even, chosen = (report["held_out_cost"][name] for name in ("same bits everywhere", "chosen"))
        ratio = f"{chosen / even:.0%}" if even else ""
        for what, *first in (("key", codec, f"{report['bits_per_element']:.2f}", ratio), ("value", "", "", "")):
            widths, codebooks = report[f"{what}_widths"], report[f"{what}_books"]
            total = sum(widths.values())
            spread = ", ".join(f"{width}: {count / total:.0%}" for width, count in widths.items())
            rows.append((*first, f"{what}s", spread, ", ".join(f"{kind} {n}" for kind, n in codebooks.items() if n)))
    columns = ("codec", "bits/element", "cost", "of", "widths", "codebooks of layers")
    shared.print_table(columns, rows, left=columns[3:])
    print("cost: on held-out text, relative to the same bits everywhere")
