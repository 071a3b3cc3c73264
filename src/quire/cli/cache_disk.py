"""`quire cache` for the folder of a disk tier: listing, removal, export and import of prefixes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli import shared
from quire.config import EngineConfig, format_bytes, parse_bytes
from quire.errors import ConfigError, QuireError
from quire.folders import user_path
from quire.models.digest import SHOWN_DIGEST, known_names

if TYPE_CHECKING:
    from quire.cache.namespace import Namespace
    from quire.stores.folder_reader import FolderReader, LocatedRun, NamespaceUsage

SHOWN_PROBLEMS = 20


def run(args: argparse.Namespace) -> int:
    """Runs the action. Returns 1 if a part of it failed."""
    folder, cap = _folder(args.disk)
    try:
        if args.action == "import":
            return _import(args, folder, cap)
        from quire.stores.folder_reader import FolderReader

        reader = FolderReader(folder)
        if args.action == "ls":
            return _show(reader, as_json=args.json)
        return _clear(reader, args.model) if args.action == "clear" else _export(reader, args)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise QuireError(f"{error.filename or folder}: {error.strerror or error}") from error


def _folder(disk: str) -> tuple[Path, int | None]:
    """The folder of DIR or DIR:SIZE, and the size."""
    folder, colon, size = disk.rpartition(":")
    cap = None
    if colon and folder:
        with contextlib.suppress(ConfigError):
            disk, cap = folder, parse_bytes(size)
    return user_path(disk), cap


def _show(reader: FolderReader, *, as_json: bool) -> int:
    usages, subfolders = reader.usages(), reader.subfolders()
    reader.note_foreign()
    cap, num_bytes = reader.cap, reader.num_bytes
    names = known_names({usage.namespace.model for usage in usages})
    if as_json:
        facts = {
            "folder": str(reader.path),
            "num_bytes": num_bytes,
            "cap_bytes": cap or None,
            "writers": [
                {"path": str(each.path), "num_bytes": each.num_bytes, "is_live": each.is_live} for each in subfolders
            ],
            "namespaces": [_facts(usage, names) for usage in usages],
            "problems": reader.problems,
        }
        print(json.dumps(facts, indent=2))
        return 0
    if usages:
        columns = (
            "model",
            "name",
            "codec",
            "weights",
            "dtype",
            "format",
            "size",
            "chunks",
            "tokens",
            "salts",
            "last used",
        )
        rows = [_row(usage, names) for usage in usages]
        shared.print_table(columns, rows, ("name", "codec", "weights", "dtype"))
    num_live = sum(each.is_live for each in subfolders)
    limit = f" of at most {format_bytes(cap)}" if cap else ""
    print(f"{format_bytes(num_bytes)}{limit} in {reader.path}; engines that write to it now: {num_live}")
    _print_problems(reader)
    return 0


def _row(usage: NamespaceUsage, names: dict[str, str]) -> tuple[str, ...]:
    named = usage.namespace
    return (
        named.model[:SHOWN_DIGEST],
        names.get(named.model, ""),
        named.codec,
        named.weights,
        named.dtype,
        str(named.version),
        format_bytes(usage.num_bytes),
        f"{usage.num_chunks:,}",
        f"{usage.num_chunks * 64:,}",
        f"{len(usage.salts):,}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(usage.used)),
    )


def _facts(usage: NamespaceUsage, names: dict[str, str]) -> dict[str, object]:
    named = dataclasses.asdict(usage.namespace)
    del named["salt"]
    return named | {
        "name": names.get(usage.namespace.model),
        "num_bytes": usage.num_bytes,
        "num_chunks": usage.num_chunks,
        "num_runs": usage.num_runs,
        "num_salts": len(usage.salts),
        "last_used": usage.used,
    }


def _print_problems(reader: FolderReader) -> None:
    for problem in reader.problems[:SHOWN_PROBLEMS]:
        print(problem)
    if len(reader.problems) > SHOWN_PROBLEMS:
        print(f"and {len(reader.problems) - SHOWN_PROBLEMS} more")


def _clear(reader: FolderReader, model: str | None) -> int:
    freed, live = reader.clear(None if model is None else _of_model(reader, model))
    print(f"freed {format_bytes(freed)}")
    _print_problems(reader)
    for subfolder in live:
        print(f"{subfolder}: an engine writes to it; stop it first")
    return 1 if live else 0


def _of_model(reader: FolderReader, model: str) -> Callable[[Namespace], bool]:
    """A test of whether a namespace belongs to the model. Shows the progress of hashing the model's files."""
    from quire.prefixes.exporting import of_model

    with shared.byte_progress("hashing") as report:
        return of_model(reader, model, report)


def _export(reader: FolderReader, args: argparse.Namespace) -> int:
    from quire.prefixes import exporting
    from quire.stores.export import export

    target = Path(args.names[0])
    tests: list[Callable[[LocatedRun], bool]] = []
    if args.model is not None:
        is_of = _of_model(reader, args.model)
        tests.append(lambda located: is_of(located.namespace))
    if args.key is not None:
        tests.append(exporting.with_key(args.key))
    if args.prompt_file is not None:
        tests.append(exporting.with_prompts(reader, args.model, args.prompt_file))
    found = export(reader, target, lambda located: all(test(located) for test in tests))
    if not found.num_runs:
        target.unlink()
    for count, why in (
        (found.num_without_beginning, "their beginnings are no longer in the folder"),
        (found.num_with_sums, "they have column sums of retention, which archives do not hold"),
        (found.num_damaged, "they are damaged"),
    ):
        if count:
            print(f"{count} runs are left out: {why}")
    _print_problems(reader)
    if not found.num_runs:
        raise QuireError("nothing to export: no stored prefix is chosen")
    print(f"{target}: {found.num_tokens:,} tokens, {format_bytes(found.num_bytes)}")
    return 0


def _import(args: argparse.Namespace, folder: Path, cap: int | None) -> int:
    from quire.prefixes.importing import import_prefixes

    def show_checked(num_checked: int, worst: float) -> None:
        print(f"computed {num_checked} chunks again: they differ by at most {worst:.3f} of their variation", flush=True)

    found = import_prefixes(
        Path(args.names[0]),
        folder,
        args.model,
        EngineConfig.from_flags(args),
        cap=cap,
        is_trusted=args.trust,
        hashing=shared.byte_progress("hashing"),
        compared=shared.progress("chunks compared"),
        checked=show_checked,
    )
    there, whole = found.there, found.whole
    if is_partial := there.num_runs < whole.num_runs:
        print(
            f"{whole.num_runs - there.num_runs} of {whole.num_runs} runs found no room in {folder}:"
            f" {whole.num_tokens - there.num_tokens:,} of {whole.num_tokens:,} tokens are left out"
        )
    print(f"{folder}: {there.num_tokens:,} tokens in {there.num_runs} runs")
    return 1 if is_partial else 0
