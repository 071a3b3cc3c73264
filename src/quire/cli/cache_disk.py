"""`quire cache` for the folder of a disk tier: what it keeps, removal, and prefixes carried to and from files."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli import shared
from quire.config import EngineConfig, RetainConfig, TiersConfig, format_bytes, options_from, parse_bytes
from quire.errors import ConfigError, ExtentError, ModelError, QuireError, RequestError
from quire.folders import user_path

if TYPE_CHECKING:
    from quire.cache.namespace import Namespace
    from quire.stores.archive import RunArchive
    from quire.stores.folder_reader import FolderReader, LocatedRun, NamespaceUsage

SHOWN_DIGEST = 12
SHOWN_PROBLEMS = 20


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 1 if a part could not be done."""
    folder, cap = _folder(args.disk)
    try:
        if args.action == "import":
            return _import(args, folder, cap)
        from quire.stores.folder_reader import FolderReader

        reader = FolderReader(folder)
        if args.action == "ls":
            return _show(reader, as_json=args.json)
        return _clear(reader, args.model) if args.action == "clear" else _export(reader, args)
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


# ---- ls and clear ------------------------------------------------------------------------------------------------


def _show(reader: FolderReader, *, as_json: bool) -> int:
    usages, subfolders = reader.usages(), reader.subfolders()
    reader.note_foreign()
    cap, num_bytes = reader.cap, reader.num_bytes
    names = _names({usage.namespace.model for usage in usages})
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


def _names(digests: set[str]) -> dict[str, str]:
    """The names of the models that this machine knows without hashing: embedded ones, and those with packed layers."""
    from quire.models.digest import combined, remembered_digest
    from quire.models.embedded import EMBEDDED
    from quire.models.image_folder import ImageError, list_images

    found = {combined([model.sha256]): name for name, model in EMBEDDED.items()}
    if digests <= found.keys():
        return found
    from quire.models.weights import open_model

    with contextlib.suppress(ImageError, OSError):
        for image in list_images():
            with contextlib.suppress(ModelError, OSError), open_model(image.origin.path) as checkpoint:
                found.setdefault(remembered_digest(checkpoint) or "", image.origin.model)
    return found


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
    freed, live = reader.clear(None if model is None else _is_of(model, reader))
    print(f"freed {format_bytes(freed)}")
    _print_problems(reader)
    for subfolder in live:
        print(f"{subfolder}: an engine writes to it; stop it first")
    return 1 if live else 0


def _is_of(model: str, reader: FolderReader) -> Callable[[Namespace], bool]:
    """Whether a namespace is of a model, given by the beginning of its digest, or by its name or path."""
    digests = {usage.namespace.model for usage in reader.usages()}
    if re.fullmatch(r"[0-9a-f]{8,}", model):
        found = {digest for digest in digests if digest.startswith(model)}
        if len(found) > 1:
            raise ConfigError(f"several models begin with {model}; give more of the digest")
    else:
        from quire.models.digest import digest_of
        from quire.models.resolve import resolve_model
        from quire.models.weights import open_model

        with open_model(resolve_model(model)) as checkpoint, shared.byte_progress("hashing") as report:
            found = {digest_of(checkpoint, report).digest} & digests
    if not found:
        known = ", ".join(sorted(digest[:SHOWN_DIGEST] for digest in digests)) or "none"
        raise ConfigError(f"{reader.path} has nothing of {model!r}; models there: {known}")
    (digest,) = found
    return lambda namespace: namespace.model == digest


# ---- export ------------------------------------------------------------------------------------------------------


def _export(reader: FolderReader, args: argparse.Namespace) -> int:
    from quire.stores.export import export

    target = Path(args.names[0])
    is_of = (lambda namespace: True) if args.model is None else _is_of(args.model, reader)
    holds = _holds(args, reader)
    found = export(reader, target, lambda located: is_of(located.namespace) and holds(located))
    if not found.num_runs:
        target.unlink()
    for count, why in (
        (found.num_without_beginning, "the folder has no longer what comes before them"),
        (found.num_with_sums, "they have column sums of retention, which are not carried"),
        (found.num_damaged, "they are damaged"),
    ):
        if count:
            print(f"{count} runs are left out: {why}")
    _print_problems(reader)
    if not found.num_runs:
        raise QuireError("nothing to export: no stored prefix is chosen")
    print(f"{target}: {found.num_tokens:,} tokens, {format_bytes(found.num_bytes)}")
    return 0


def _holds(args: argparse.Namespace, reader: FolderReader) -> Callable[[LocatedRun], bool]:
    """Whether a run is one of those asked for."""
    if args.key is not None:
        from quire.prefixes.cached import parse_prefix_key

        try:
            key = parse_prefix_key(args.key)
        except RequestError as error:
            raise ConfigError(f"--key: {error}") from error
        return lambda located: key in located.header.run.names
    if args.prompt_file is None:
        return lambda located: True
    from quire.cache.keys import ChunkKeys
    from quire.engine.pins import read_pins
    from quire.models.resolve import resolve_model
    from quire.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_model(args.model))
    prompts = [pin.ids for pin in read_pins(args.prompt_file, tokenizer, "--prompt-file")]
    namespaces = {dataclasses.replace(usage.namespace, salt=salt) for usage in reader.usages() for salt in usage.salts}
    names = {
        name for namespace in namespaces for ids in prompts for name in ChunkKeys(namespace, ids).first(len(ids) // 64)
    }
    return lambda located: not names.isdisjoint(located.header.run.names)


# ---- import ------------------------------------------------------------------------------------------------------


def _import(args: argparse.Namespace, folder: Path, cap: int | None) -> int:
    from quire.prefixes.importing import check_namespaces, check_paths, open_archive

    config = _config(args)
    source = Path(args.names[0])
    with open_archive(source) as archive:
        try:
            cap = _cap(folder, cap)
            namespace = _namespace(args.model, config)
            check_namespaces(archive, namespace)
            check_paths(archive)
            _compare(args.model, config, archive, is_trusted=args.trust)
        except ExtentError as error:
            raise QuireError(f"{source} is refused: {error}") from error
        return _put(folder, cap, namespace, archive)


def _config(args: argparse.Namespace) -> EngineConfig:
    """The settings, without what has no effect on pages."""
    from quire.cli.cache import SECTIONS

    config = EngineConfig.from_options(options_from(args, SECTIONS), args.config)
    cache = dataclasses.replace(config.cache, pin=None, share=True)
    return dataclasses.replace(config, tiers=TiersConfig(), retain=RetainConfig(), cache=cache)


def _cap(folder: Path, cap: int | None) -> int:
    from quire.stores.folder_reader import FolderReader

    if cap is not None:
        return cap
    try:
        known = FolderReader(folder).cap
    except ConfigError:
        known = 0
    if not known:
        raise ConfigError(f"{folder} has no size yet: give --disk {folder}:SIZE, such as :20GiB")
    return known


def _namespace(model: str, config: EngineConfig) -> Namespace:
    """What the model's pages depend on, without loading it."""
    from quire.engine.build import resolve
    from quire.engine.control_plane import namespace_of
    from quire.load import find_calibration
    from quire.models.digest import digest_of
    from quire.models.resolve import resolve_model
    from quire.models.weights import open_model

    path = resolve_model(model)
    with open_model(path) as checkpoint, shared.byte_progress("hashing") as report:
        calibration = find_calibration(path, config)
        if calibration is None and config.cache.is_calibrated:
            raise ConfigError(
                f"cache.codec {config.cache.codec} needs the calibration with which the file was computed: copy it, and"
                " name it by --cache.calibration FILE"
            )
        resolved, _ = resolve(config, checkpoint.shape, checkpoint, calibration)
        return namespace_of(resolved, checkpoint.shape, digest_of(checkpoint, report).digest, calibration)


def _compare(model: str, config: EngineConfig, archive: RunArchive, *, is_trusted: bool) -> None:
    """Checks the form of all runs and, unless they are trusted, computes some of their chunks again."""
    from quire.load import load_engine
    from quire.prefixes.importing import check_pages, check_run_shapes
    from quire.stores.archive_store import ArchiveStore
    from quire.stores.tiers import Tiers

    archive_store = ArchiveStore(archive)
    loaded = load_engine(model, config, tiers=Tiers([archive_store]))
    check_run_shapes(loaded.engine, archive)
    if is_trusted:
        return
    with shared.progress("chunks compared") as report:
        num_checked, worst = check_pages(loaded.engine, archive, archive_store, random.SystemRandom(), report)
    print(f"computed {num_checked} chunks again: they differ by at most {worst:.3f} of their variation")


def _put(folder: Path, cap: int, namespace: Namespace, archive: RunArchive) -> int:
    from quire.prefixes.importing import store_runs
    from quire.stores.disk import DiskStore

    store = DiskStore(folder, cap, namespace)
    try:
        there = store_runs(store, archive)
    finally:
        store.close()
    num_runs, num_tokens = len(archive.runs), sum(len(each.header.run.tokens) for each in archive.runs)
    if is_partial := there.num_runs < num_runs:
        print(
            f"{num_runs - there.num_runs} of {num_runs} runs found no room in {folder}:"
            f" {num_tokens - there.num_tokens:,} of {num_tokens:,} tokens are left out"
        )
    print(f"{folder}: {there.num_tokens:,} tokens in {there.num_runs} runs")
    return 1 if is_partial else 0
