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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cache.codecs import CODECS
from quire.cli import shared
from quire.config import CacheConfig, EngineConfig
from quire.errors import ConfigError
from quire.safe_io import read_text

if TYPE_CHECKING:
    from quire.calibrate import CalibrationSettings
    from quire.engine.calibration import Calibration

SECTIONS = ("model", "runtime")


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    shared.add_engine_arguments(parser, SECTIONS)
    group = parser.add_argument_group("calibration")

    def add(flag: str, text: str, **options: Any) -> None:
        group.add_argument(flag, help=text, default=argparse.SUPPRESS, **options)

    group.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write")
    travels = group.add_mutually_exclusive_group()
    travels.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="write the kept calibration to a file; make it first if there is none",
    )
    travels.add_argument(
        "--import", type=Path, metavar="FILE", dest="import_file", help="keep a calibration that was exported elsewhere"
    )
    group.add_argument(
        "--text", type=Path, metavar="FILE", help="text to read (default: the model writes a text itself)"
    )
    widths = ",".join(str(row.bits) for row in reversed(CODECS.values()) if row.is_calibrated)
    add("--bits", f"bit widths to make tables for (default: {widths})", type=_numbers, metavar="N,...")
    add(
        "--outlier-slots",
        "number of elements per vector stored exactly (default: cache.outlier_slots)",
        type=int,
        metavar="N",
    )
    add("--sink-tokens", "number of first tokens kept exact (default: cache.sink_tokens)", type=int, metavar="N")
    add("--windows", "number of windows of text to read (default: 8)", type=shared.count, metavar="N")
    add(
        "--window",
        "tokens per window (default: 1,024, for large models down to 256)",
        type=shared.count,
        metavar="TOKENS",
    )
    add("--seed", "seed of the text that the model writes (default: 0)", type=int, metavar="N")
    add("--q-norm", "preserve the mean and deviation of keys and values", action="store_true")
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")
    group = parser.add_argument_group("for ablations")
    text = "kinds of books to choose from: uniform,plain,fisher,damped,own (default: all)"
    group.add_argument("--books", type=_words, metavar="KIND,...", default=argparse.SUPPRESS, help=text)
    text = "use the same bit width in all layers, heads and channels"
    group.add_argument("--same-bits", action="store_true", default=argparse.SUPPRESS, help=text)


def run(args: argparse.Namespace) -> int:
    """Calibrates and prints the chosen widths and books."""
    if shared.printed_config(args):
        return 0
    config = EngineConfig.from_flags(args)
    text = None if args.text is None else _read(args.text)
    for file in (args.output, args.export):
        if file is not None:
            shared.check_writable(file)
    from quire.calibrate import CalibrationSettings, calibrate
    from quire.calibrate.progress import progress_display
    from quire.load import kept_calibration
    from quire.models.fingerprint import fingerprint
    from quire.models.resolve import resolve_model

    names = {"windows": "num_windows", "window": "window_tokens", "books": "kinds"}
    flags = ("bits", "outlier_slots", "sink_tokens", "windows", "window", "seed", "q_norm", "books")
    given = {names.get(flag, flag): getattr(args, flag) for flag in flags if flag in args}
    if "same_bits" in args:
        given["spends"] = False
    cache = {"outlier_slots": config.cache.outlier_slots, "sink_tokens": config.cache.sink_tokens}
    settings = CalibrationSettings(**{**cache, **given})
    path = resolve_model(args.model)
    model = fingerprint(path)
    if args.import_file is not None:
        return _import(args, path, model, settings)
    if args.export is not None and (kept := kept_calibration(model, settings)) is not None:
        return _export(args, kept)
    file = settings.file(model) if args.output is None else args.output
    found = CalibrationSettings(outlier_slots=settings.outlier_slots, sink_tokens=settings.sink_tokens).file(model)
    replaces = file.exists()
    with progress_display() as progress:
        made = calibrate(path, settings, file, text=text, config=config, progress=progress)
    if args.export is not None:
        return _export(args, made)
    if args.json:
        facts = {"file": str(file), "hash": made.hash, "model": made.model, "settings": made.settings}
        print(json.dumps(facts | {"codecs": made.report}, indent=2))
    else:
        _print(made)
        print(f"file: {file}{', replaces the earlier one' if replaces else ''}\nhash: {made.hash}")
        print("use:  " + _use(args.model, made, settings, None if file == found else file))
    return 0


def _export(args: argparse.Namespace, made: Calibration) -> int:
    """Writes a calibration for another machine."""
    try:
        made.save(args.export)
    except OSError as error:
        raise ConfigError(f"cannot write {args.export}: {error.strerror or error}") from None
    print(f"file: {args.export}\nhash: {made.hash}\nuse:  quire calibrate {args.model} --import {args.export.name}")
    return 0


def _import(args: argparse.Namespace, path: Path, model: str, settings: CalibrationSettings) -> int:
    """Keeps a calibration from another machine where engines look for it. Raises ConfigError for one of another model,
    or of other settings.
    """
    from quire.engine.calibration import Calibration, check_tables
    from quire.models.weights import open_model

    made = Calibration.load(args.import_file, model)
    with open_model(path) as checkpoint:
        shape = checkpoint.shape
    for tables in made.tables.values():
        check_tables(tables, shape.num_layers, shape.num_kv_heads, shape.head_dim)
    wanted = {
        "bits": sorted(settings.bits), "outlier_slots": settings.outlier_slots, "skipped": settings.skipped,
        "books": list(settings.kinds), "same_bits": not settings.spends, "q_norm": settings.q_norm,
    }  # fmt: skip
    for name, value in wanted.items():
        if (found := made.settings.get(name)) != value:
            raise ConfigError(
                f"{args.import_file}: made with {name} {found}, not {value}; give the same flags as to the command that"
                " made it, or use it as it is with --cache.calibration"
            )
    file = settings.file(model)
    replaces = file.exists()
    try:
        made.save(file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written ({error.strerror or error})") from None
    print(f"file: {file}{', replaces the earlier one' if replaces else ''}\nhash: {made.hash}")
    print("use:  " + _use(args.model, made, settings, None))
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
            widths, books = report[f"{what}_widths"], report[f"{what}_books"]
            total = sum(widths.values())
            spread = ", ".join(f"{width}: {count / total:.0%}" for width, count in widths.items())
            rows.append((*first, f"{what}s", spread, ", ".join(f"{kind} {n}" for kind, n in books.items() if n)))
    columns = ("codec", "bits/element", "cost", "of", "widths", "books of layers")
    shared.print_table(columns, rows, left=columns[3:])
    print("cost: on held-out text, relative to the same bits everywhere")


def _read(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text {file}: {error}") from error


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of whole numbers") from None
