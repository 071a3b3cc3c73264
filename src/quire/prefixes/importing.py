"""Imports prefixes that another machine computed: checks an archive against a model, then stores its runs on a disk.

Checksums prove that an archive is undamaged, not that its pages belong to its tokens. So a random sample of its chunks
is computed again and compared. The author of the archive cannot predict the sample.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quire.cache.ledger import PAGE_TOKENS
from quire.cache.namespace import Namespace
from quire.cache.run import HeldPages, Run, RunIdentity, extent_layout
from quire.cache.table import ChunkTable
from quire.config import EngineConfig, RetainConfig, TiersConfig
from quire.engine.build import resolve
from quire.engine.control_plane import namespace_of
from quire.engine.engine import Engine
from quire.engine.params import CacheHints, SamplingParams
from quire.errors import ConfigError, ExtentError, QuireError
from quire.load import find_calibration, load_engine
from quire.models.digest import Report, digest_of
from quire.models.resolve import resolve_model
from quire.models.weights import open_model
from quire.prefixes.listing import find_chunk
from quire.stores.archive import ArchivedRun, RunArchive
from quire.stores.archive_store import ArchiveStore
from quire.stores.disk import DiskStore
from quire.stores.folder_reader import FolderReader
from quire.stores.tiers import Tiers

CHUNKS_PER_CHECK = 16
"""One chunk in this many is computed again, and at least one per prefix."""

MOST_OF_TOKEN, MOST_OF_PAGE = 0.25, 0.6
"""Maximum difference of a token for dense pages, and of a page for encoded ones; see `difference`. Measured on SmolLM2
in bfloat16, for a chunk alone against the same chunk within a whole prompt: 0.09 for tokens of dense pages, and for
pages 0.27 with g4, 0.23 with nuq3 and 0.24 with nuq2, where a number that rounds to the next code moves its token by up
to 1. Keys or values of unrelated tokens differ by about 1.4."""

PUT_SECONDS = 60.0

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


@dataclass(frozen=True)
class RunCounts:
    """Runs of a store or an archive."""

    num_runs: int
    num_tokens: int

    @classmethod
    def of(cls, runs: Sequence[Run]) -> RunCounts:
        """Counts the runs and their tokens."""
        return cls(len(runs), sum(len(run.tokens) for run in runs))


@dataclass(frozen=True)
class ImportReport:
    """The result of an import.

    whole  runs of the archive
    there  those of them that the folder has now
    """

    whole: RunCounts
    there: RunCounts


def import_prefixes(
    source: Path,
    folder: Path,
    model: str,
    config: EngineConfig,
    *,
    cap: int | None,
    is_trusted: bool,
    hashing: AbstractContextManager[Report],
    compared: AbstractContextManager[Report],
    checked: Callable[[int, float], None],
) -> ImportReport:
    """Puts the prefixes of an archive into the folder of a disk tier.

    cap                maximum bytes of the folder; None: as before
    is_trusted         whether the check by computing is skipped
    hashing, compared  context managers; each yields a function (done, total): in bytes of the model, and in chunks
    checked            called before anything is stored, with the number of chunks that were computed again and their
                       largest difference, relative to the variation of tokens
    Raises ConfigError and QuireError for an archive or a folder that cannot be used.
    """
    # Without settings that do not affect pages.
    cache = dataclasses.replace(config.cache, pin=None, share=True)
    config = dataclasses.replace(config, tiers=TiersConfig(), retain=RetainConfig(), cache=cache)
    with open_archive(source) as archive:
        try:
            cap = _known_cap(folder) if cap is None else cap
            with hashing as report:
                namespace = _namespace(model, config, report)
            check_namespaces(archive, namespace)
            check_paths(archive)
            found = _check_runs(model, config, archive, None if is_trusted else compared)
        except ExtentError as error:
            raise QuireError(f"{source} is refused: {error}") from error
        if found is not None:
            checked(*found)
        store = DiskStore(folder, cap, namespace)
        try:
            there = store_runs(store, archive)
        finally:
            store.close()
        whole = RunCounts.of([each.header.run for each in archive.runs])
    return ImportReport(whole, there)


def _check_runs(
    model: str, config: EngineConfig, archive: RunArchive, compared: AbstractContextManager[Report] | None
) -> tuple[int, float] | None:
    """Checks the runs with an engine of the model, which is freed at the end. Returns what `check_pages` returns, or
    None without `compared`: then no chunk is computed again.
    """
    archive_store = ArchiveStore(archive)
    engine = load_engine(model, config, tiers=Tiers([archive_store])).engine
    check_run_shapes(engine, archive)
    if compared is None:
        return None
    with compared as report:
        return check_pages(engine, archive, archive_store, random.SystemRandom(), report)


def _known_cap(folder: Path) -> int:
    try:
        known = FolderReader(folder).cap
    except ConfigError:
        known = 0
    if not known:
        raise ConfigError(f"{folder} has no size yet: give --disk {folder}:SIZE, such as :20GiB")
    return known


def _namespace(model: str, config: EngineConfig, report: Report) -> Namespace:
    """The namespace of the model's pages, computed without loading the model."""
    path = resolve_model(model)
    with open_model(path) as checkpoint:
        calibration = find_calibration(path, config)
        if calibration is None and config.cache.is_calibrated:
            raise ConfigError(
                f"cache.codec {config.cache.codec} needs the calibration with which the file was computed: copy it, and"
                " name it by --cache.calibration FILE"
            )
        resolved, _ = resolve(config, checkpoint.shape, checkpoint, calibration)
        return namespace_of(resolved, checkpoint.shape, digest_of(checkpoint, report).digest, calibration)


def check_namespaces(archive: RunArchive, namespace: Namespace) -> None:
    """Raises ConfigError, naming the field, unless all runs have the namespace's model and settings, with any salt."""
    for each in archive.runs:
        theirs = each.header.run.namespace
        assert isinstance(theirs, Namespace), "a header without a namespace"
        for field in dataclasses.fields(Namespace):
            here, there = getattr(namespace, field.name), getattr(theirs, field.name)
            if field.name != "salt" and here != there:
                raise ConfigError(
                    f"the file is of another {_FIELDS[field.name]}: {_short(there)}, and here {_short(here)}"
                )


def check_paths(archive: RunArchive) -> None:
    """Raises ExtentError unless each run continues an earlier run of the archive, or begins a sequence."""
    ends: dict[bytes, int] = {}
    for each in archive.runs:
        run = each.header.run
        if run.start and ends.get(run.parent) != run.start:
            raise ExtentError(
                f"the beginning of a prefix of {(run.start + len(run.names)) * PAGE_TOKENS} tokens is missing"
            )
        ends.update((name, run.start + number) for number, name in enumerate(run.names, 1))


def check_run_shape(table: ChunkTable, run: Run, lengths: tuple[int, ...], vocab_size: int) -> None:
    """Raises ExtentError unless a run has the shape of this engine's runs of complete chunks."""
    sidecars = np.zeros(len(run.names), bool)
    sidecars[0] = table.sinks is not None and run.start == 0
    is_alike = (
        run.masks.shape[1:] == table.shape
        and run.num_attached == 0
        and bool((run.kinds == table.sealed_codec.kernel_id).all())
        and np.array_equal(run.has_sidecar, sidecars)
    )
    if not is_alike or list(lengths) != extent_layout(table, run).num_bytes:
        raise ExtentError("a run has pages of another shape")
    if int(run.tokens.max()) >= vocab_size:
        raise ExtentError(f"token id {int(run.tokens.max())} is outside the vocabulary of {vocab_size}")


def check_run_shapes(engine: Engine, archive: RunArchive) -> None:
    """Raises ExtentError unless all runs have the shape of this engine's runs, and all extents are undamaged."""
    table = engine.scheduler.manager.table
    assert isinstance(table, ChunkTable), "an engine without pages"
    for each in archive.runs:
        check_run_shape(table, each.header.run, each.header.lengths, engine.vocab_size)
        for _ in archive.extents(each):
            pass


def check_pages(
    engine: Engine,
    archive: RunArchive,
    archive_store: ArchiveStore,
    rng: random.Random,
    report: Report,
) -> tuple[int, float]:
    """Computes a sample of the chunks again, with the archive's pages before them. Returns their number, and the
    largest difference. Raises ExtentError at the first chunk that differs.

    archive_store  the engine's only tier; `check_run_shapes` has already passed
    """
    manager, shape = engine.scheduler.manager, engine.runner.model.shape
    table = manager.table
    assert isinstance(table, ChunkTable), "an engine without pages"
    most = MOST_OF_PAGE if table.encodes else MOST_OF_TOKEN
    samples = list(_samples(archive, rng))
    worst = 0.0
    for number, (tokens, each, row) in enumerate(samples):
        report(number, len(samples))
        run, name = each.header.run, each.header.run.names[row]
        if len(tokens) + 2 > engine.max_context:
            raise ConfigError(
                f"a prefix has {len(tokens)} tokens and the context holds {engine.max_context}"
                f" ({engine.context_limit}); raise cache.memory, or give --trust"
            )
        manager.eviction.evict(manager.tree.num_chunks)
        archive_store.hidden = set(run.names[row:])
        _compute(engine, tokens, run)
        place = find_chunk(manager.tree, name)
        if place is None:
            raise QuireError("a chunk was computed and is not in the cache")
        segment, count = place
        origin = RunIdentity((name,), run.tokens[row * PAGE_TOKENS : (row + 1) * PAGE_TOKENS], run.namespace)
        pages = HeldPages(table, origin, segment.chunks[count - 1 : count])
        mine = decoded(table, pages.run, [bytes(extent) for extent in pages.pack(range(shape.num_layers))], 0)
        pages.release()
        theirs = decoded(table, run, [bytes(extent) for extent in archive.extents(each)], row)
        found = difference(mine, theirs, of_pages=table.encodes)
        worst = max(worst, found)
        if not found <= most:
            start = (run.start + row) * PAGE_TOKENS
            raise ExtentError(
                f"the pages of tokens {start} to {start + PAGE_TOKENS} are not what the model computes: they differ by"
                f" {found:.2f} of their variation, and rounding explains {most}"
            )
    archive_store.hidden = set()
    return len(samples), worst


def store_runs(store: DiskStore, archive: RunArchive) -> RunCounts:
    """Puts all runs into a store, which signs them, and waits until they are on the disk. Later runs may evict earlier
    ones. Raises QuireError if the disk takes no more.
    """
    for each in archive.runs:
        run = each.header.run
        for _ in range(2):
            store.put(run, archive.extents(each))
            if store.find(run.names[-1]) is not None:
                break
            store.flush(PUT_SECONDS)
        else:
            raise QuireError(f"the folder takes no more runs: {store.stats()['reason'] or 'it is full'}")
    if not store.flush(PUT_SECONDS):
        raise QuireError(f"the folder could not be written: {store.stats()['reason'] or 'it is too slow'}")
    there = [each.header.run for each in archive.runs if store.find(each.header.run.names[-1]) is not None]
    return RunCounts.of(there)


def decoded(table: ChunkTable, run: Run, extents: list[bytes], row: int) -> torch.Tensor:
    """Decodes a row of a run from the extents of all layers: keys and values, float32 [L, H, 2, P, D]."""
    at, codec, device = extent_layout(table, run), table.sealed_codec, table.arena.device
    found: list[torch.Tensor] = []
    for layer, extent in enumerate(extents):
        body, images = np.frombuffer(extent, np.uint8), {}
        for group in at.groups[layer]:
            for (of_row, head), image in zip(np.argwhere(group.held).tolist(), group.images(body), strict=True):
                if of_row == row:
                    images[head] = image
        heads = []
        for head in range(table.shape[1]):
            page = torch.from_numpy(images[head].copy())[None].to(device)
            heads.append(torch.stack([part[0] for part in codec.decode(layer, head, page)]))
        whole = torch.stack(heads).cpu()
        if run.has_sidecar[row] and table.sinks is not None:
            assert row == 0, "only the first chunk has exact tokens"
            sinks, start = table.sinks, at.sidecars[layer]
            exact = torch.frombuffer(bytearray(extent[start : start + at.beside]), dtype=sinks.dtype)
            whole[:, :, : sinks.num_tokens] = exact.view(sinks.num_heads, 2, sinks.num_tokens, -1).float()
        found.append(whole)
    return torch.stack(found)


def difference(mine: torch.Tensor, theirs: torch.Tensor, *, of_pages: bool = False) -> float:
    """The largest distance between a token's keys or values in two computations of a chunk, relative to the root mean
    square of the tokens' distances from their mean, both within one layer and head. NaN if a number is NaN.

    mine, theirs  float32 [L, H, 2, P, D]
    of_pages      whether to use the root mean square over a page's tokens instead of the largest distance
    """
    spread = (mine - mine.mean(3, keepdim=True)).square().sum(-1).mean(-1).sqrt()  # [L, H, 2]
    squares = (mine - theirs).square().sum(-1)
    distance = (squares.mean(-1) if of_pages else squares.amax(-1)).sqrt()
    return float((distance / spread.clamp(min=1e-6)).max())


def _samples(archive: RunArchive, rng: random.Random) -> Iterator[tuple[list[int], ArchivedRun, int]]:
    """The chunks to compute, each with all tokens up to its end, its run, and its row there. Samples every prefix
    without descendants, among the chunks that no earlier prefix has covered.
    """
    by_end = {each.header.run.names[-1]: each for each in archive.runs}
    by_name = {name: each for each in archive.runs for name in each.header.run.names}
    parents = {each.header.run.parent for each in archive.runs if each.header.run.start}
    seen: set[bytes] = set()
    for name, leaf in by_end.items():
        if name in parents:
            continue
        path = [leaf]
        while path[-1].header.run.start:
            path.append(by_name[path[-1].header.run.parent])
        tokens: list[int] = []
        places: list[tuple[int, ArchivedRun, int]] = []
        for index, each in enumerate(path[::-1], 1):
            run = each.header.run
            # A later run may continue from the middle of this one.
            next_parent = path[-index - 1].header.run.parent if index < len(path) else run.names[-1]
            count = run.names.index(next_parent) + 1
            for row in range(count):
                if run.names[row] not in seen:
                    seen.add(run.names[row])
                    places.append((len(tokens) + (row + 1) * PAGE_TOKENS, each, row))
            tokens += run.tokens[: count * PAGE_TOKENS].tolist()
        for end, each, row in sorted(
            rng.sample(places, -(-len(places) // CHUNKS_PER_CHECK)), key=lambda place: place[0]
        ):
            yield tokens[:end], each, row


def _compute(engine: Engine, tokens: list[int], run: Run) -> None:
    """Runs a prompt of these tokens and one more, so that all their chunks get complete."""
    assert isinstance(run.namespace, Namespace), "a header without a namespace"
    hints = CacheHints(cache_salt=run.namespace.salt)
    engine.add("import", [*tokens, tokens[-1]], ONE_TOKEN, hints)
    while engine.has_work:
        engine.step()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:36] + "..."


_FIELDS = {
    "model": "model (digest)",
    "dtype": "type of activations (model.dtype)",
    "weights": "kind of weights (model.weights)",
    "adapter": "adapter",
    "codec": "codec (cache.codec, cache.sink_tokens)",
    "calibration": "calibration (cache.calibration)",
    "strict": "attention within chunks (cache.strict)",
    "rope": "rotary embedding",
    "version": "page format",
}


def open_archive(path: Path) -> RunArchive:
    """Opens an archive. Raises ConfigError for a file that cannot be read, QuireError for one that is refused."""
    try:
        return RunArchive(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ExtentError as error:
        raise QuireError(f"{path} is refused: {error}") from error
