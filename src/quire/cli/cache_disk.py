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
    from quire.stores.admin import Located, Shelf, Space
    from quire.stores.parcel import Parcel

SHOWN_DIGEST = 12
SHOWN_PROBLEMS = 20


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 1 if a part could not be done."""
    folder, cap = _folder(args.disk)
    try:
        if args.action == "import":
            return _import(args, folder, cap)
        from quire.stores.admin import Shelf

        shelf = Shelf(folder)
        if args.action == "ls":
            return _show(shelf, as_json=args.json)
        return _clear(shelf, args.model) if args.action == "clear" else _export(shelf, args)
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


def _show(shelf: Shelf, *, as_json: bool) -> int:
    spaces, places = shelf.spaces(), shelf.places()
    shelf.note_foreign()
    cap, num_bytes = shelf.cap, shelf.num_bytes
    names = _names({space.namespace.model for space in spaces})
    if as_json:
        facts = {
            "folder": str(shelf.path),
            "num_bytes": num_bytes,
            "cap_bytes": cap or None,
            "writers": [
                {"path": str(each.path), "num_bytes": each.num_bytes, "is_live": each.is_live} for each in places
            ],
            "namespaces": [_facts(space, names) for space in spaces],
            "problems": shelf.problems,
        }
        print(json.dumps(facts, indent=2))
        return 0
    if spaces:
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
        rows = [_row(space, names) for space in spaces]
        shared.print_table(columns, rows, ("name", "codec", "weights", "dtype"))
    num_live = sum(each.is_live for each in places)
    limit = f" of at most {format_bytes(cap)}" if cap else ""
    print(f"{format_bytes(num_bytes)}{limit} in {shelf.path}; engines that write to it now: {num_live}")
    _print_problems(shelf)
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


def _row(space: Space, names: dict[str, str]) -> tuple[str, ...]:
    named = space.namespace
    return (
        named.model[:SHOWN_DIGEST],
        names.get(named.model, ""),
        named.codec,
        named.weights,
        named.dtype,
        str(named.version),
        format_bytes(space.num_bytes),
        f"{space.num_chunks:,}",
        f"{space.num_chunks * 64:,}",
        f"{len(space.salts):,}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(space.used)),
    )


def _facts(space: Space, names: dict[str, str]) -> dict[str, object]:
    named = dataclasses.asdict(space.namespace)
    del named["salt"]
    return named | {
        "name": names.get(space.namespace.model),
        "num_bytes": space.num_bytes,
        "num_chunks": space.num_chunks,
        "num_runs": space.num_runs,
        "num_salts": len(space.salts),
        "last_used": space.used,
    }


def _print_problems(shelf: Shelf) -> None:
    for problem in shelf.problems[:SHOWN_PROBLEMS]:
        print(problem)
    if len(shelf.problems) > SHOWN_PROBLEMS:
        print(f"and {len(shelf.problems) - SHOWN_PROBLEMS} more")


def _clear(shelf: Shelf, model: str | None) -> int:
    freed, live = shelf.clear(None if model is None else _is_of(model, shelf))
    print(f"freed {format_bytes(freed)}")
    _print_problems(shelf)
    for place in live:
        print(f"{place}: an engine writes to it; stop it first")
    return 1 if live else 0


def _is_of(model: str, shelf: Shelf) -> Callable[[Namespace], bool]:
    """Whether a namespace is of a model, given by the beginning of its digest, or by its name or path."""
    digests = {space.namespace.model for space in shelf.spaces()}
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
        raise ConfigError(f"{shelf.path} has nothing of {model!r}; models there: {known}")
    (digest,) = found
    return lambda namespace: namespace.model == digest


# ---- export ------------------------------------------------------------------------------------------------------


def _export(shelf: Shelf, args: argparse.Namespace) -> int:
    from quire.stores.export import export

    target = Path(args.names[0])
    is_of = (lambda namespace: True) if args.model is None else _is_of(args.model, shelf)
    holds = _holds(args, shelf)
    found = export(shelf, target, lambda located: is_of(located.namespace) and holds(located))
    if not found.num_runs:
        target.unlink()
    for count, why in (
        (found.num_without_beginning, "the folder has no longer what comes before them"),
        (found.num_with_sums, "they have column sums of retention, which are not carried"),
        (found.num_damaged, "they are damaged"),
    ):
        if count:
            print(f"{count} runs are left out: {why}")
    _print_problems(shelf)
    if not found.num_runs:
        raise QuireError("nothing to export: no stored prefix is chosen")
    print(f"{target}: {found.num_tokens:,} tokens, {format_bytes(found.num_bytes)}")
    return 0


def _holds(args: argparse.Namespace, shelf: Shelf) -> Callable[[Located], bool]:
    """Whether a run is one of those asked for."""
    if args.key is not None:
        from quire.engine.known import read_key

        try:
            key = read_key(args.key)
        except RequestError as error:
            raise ConfigError(f"--key: {error}") from error
        return lambda located: key in located.head.run.names
    if args.prompt_file is None:
        return lambda located: True
    from quire.cache.keys import ChunkKeys
    from quire.engine.pins import read_pins
    from quire.models.resolve import resolve_model
    from quire.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_model(args.model))
    prompts = [pin.ids for pin in read_pins(args.prompt_file, tokenizer, "--prompt-file")]
    namespaces = {dataclasses.replace(space.namespace, salt=salt) for space in shelf.spaces() for salt in space.salts}
    names = {
        name for namespace in namespaces for ids in prompts for name in ChunkKeys(namespace, ids).first(len(ids) // 64)
    }
    return lambda located: not names.isdisjoint(located.head.run.names)


# ---- import ------------------------------------------------------------------------------------------------------


def _import(args: argparse.Namespace, folder: Path, cap: int | None) -> int:
    from quire.importing import check_namespaces, check_paths, read_parcel

    config = _config(args)
    source = Path(args.names[0])
    with read_parcel(source) as parcel:
        try:
            cap = _cap(folder, cap)
            namespace = _namespace(args.model, config)
            check_namespaces(parcel, namespace)
            check_paths(parcel)
            _compare(args.model, config, parcel, is_trusted=args.trust)
        except ExtentError as error:
            raise QuireError(f"{source} is refused: {error}") from error
        return _put(folder, cap, namespace, parcel)


def _config(args: argparse.Namespace) -> EngineConfig:
    """The settings, without what has no effect on pages."""
    from quire.cli.cache import SECTIONS

    config = EngineConfig.from_options(options_from(args, SECTIONS), args.config)
    cache = dataclasses.replace(config.cache, pin=None, share=True)
    return dataclasses.replace(config, tiers=TiersConfig(), retain=RetainConfig(), cache=cache)


def _cap(folder: Path, cap: int | None) -> int:
    from quire.stores.admin import Shelf

    if cap is not None:
        return cap
    try:
        known = Shelf(folder).cap
    except ConfigError:
        known = 0
    if not known:
        raise ConfigError(f"{folder} has no size yet: give --disk {folder}:SIZE, such as :20GiB")
    return known


def _namespace(model: str, config: EngineConfig) -> Namespace:
    """What the model's pages depend on, without loading it."""
    from quire.engine.build import resolve
    from quire.engine.control import namespace_of
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


def _compare(model: str, config: EngineConfig, parcel: Parcel, *, is_trusted: bool) -> None:
    """Checks the form of all runs and, unless they are trusted, computes some of their chunks again."""
    from quire.importing import check_forms, check_pages
    from quire.load import load_engine
    from quire.stores.incoming import Incoming
    from quire.stores.tiers import Tiers

    incoming = Incoming(parcel)
    loaded = load_engine(model, config, tiers=Tiers([incoming]))
    check_forms(loaded.engine, parcel)
    if is_trusted:
        return
    with shared.progress("chunks compared") as report:
        num_checked, worst = check_pages(loaded.engine, parcel, incoming, random.SystemRandom(), report)
    print(f"computed {num_checked} chunks again: they differ by at most {worst:.3f} of their variation")


def _put(folder: Path, cap: int, namespace: Namespace, parcel: Parcel) -> int:
    from quire.importing import put_all
    from quire.stores.disk import DiskStore

    store = DiskStore(folder, cap, namespace)
    try:
        there = put_all(store, parcel)
    finally:
        store.close()
    num_runs, num_tokens = len(parcel.runs), sum(len(each.head.run.tokens) for each in parcel.runs)
    if is_partial := there.num_runs < num_runs:
        print(
            f"{num_runs - there.num_runs} of {num_runs} runs found no room in {folder}:"
            f" {num_tokens - there.num_tokens:,} of {num_tokens:,} tokens are left out"
        )
    print(f"{folder}: {there.num_tokens:,} tokens in {there.num_runs} runs")
    return 1 if is_partial else 0
