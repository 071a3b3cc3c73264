"""Exports a folder of a disk store to an archive: whole prefixes, each run after the run that it continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ExtentError
from quire.stores.archive import RunArchiveWriter
from quire.stores.direct import DirectFile, padded
from quire.stores.folder_reader import FolderReader, LocatedRun


@dataclass
class ExportStats:
    """The amounts that an export wrote, and the number of runs that it left out, by reason."""

    num_runs: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_without_beginning: int = 0
    num_with_sums: int = 0
    num_damaged: int = 0


def export(reader: FolderReader, target: Path, wanted: Callable[[LocatedRun], bool]) -> ExportStats:
    """Writes the wanted runs and their ancestors to an archive. Leaves out runs whose beginning is not stored, that
    have column sums of retention, or that are damaged. Raises ConfigError if a file of this name exists, and OSError.
    """
    runs: dict[tuple[bytes, ...], LocatedRun] = {}
    for located in reader.runs():
        runs.setdefault(located.header.run.names, located)
    by_name = {name: located for located in runs.values() for name in located.header.run.names}
    done: dict[tuple[bytes, ...], bool] = {}
    found = ExportStats()
    with RunArchiveWriter(target) as writer:
        for located in sorted(filter(wanted, runs.values()), key=lambda each: each.header.run.start):
            for each in _path(located, by_name):
                names = each.header.run.names
                if names not in done:
                    parent = by_name.get(each.header.run.parent)
                    has_beginning = not each.header.run.start or (
                        parent is not None and done.get(parent.header.run.names, False)
                    )
                    done[names] = has_beginning and _write(writer, each, reader, found)
                    found.num_without_beginning += not has_beginning
    return found


def _path(located: LocatedRun, by_name: dict[bytes, LocatedRun]) -> list[LocatedRun]:
    """The stored runs from the prompt's beginning up to this run."""
    found = [located]
    while found[-1].header.run.start and (parent := by_name.get(found[-1].header.run.parent)) is not None:
        found.append(parent)
    return found[::-1]


def _write(writer: RunArchiveWriter, located: LocatedRun, reader: FolderReader, found: ExportStats) -> bool:
    if located.header.run.num_attached:
        found.num_with_sums += 1
        return False
    try:
        extents = list(_extents(located, reader))
    except (ExtentError, OSError) as error:
        reader.problems.append(f"{located.path}: {error}")
        found.num_damaged += 1
        return False
    writer.add(located.blob, extents)
    found.num_runs += 1
    found.num_tokens += len(located.header.run.tokens)
    found.num_bytes += sum(map(len, extents))
    return True


def _extents(located: LocatedRun, reader: FolderReader) -> Iterator[memoryview]:
    file = DirectFile(located.path, is_direct=False)
    try:
        offset, names = located.offset, b"".join(located.header.run.names)
        for length in located.header.lengths:
            extent = memoryview(bytearray(length))
            file.read(extent, offset, lambda size: None)
            reader.signer.verify(names, extent)
            yield extent
            offset += padded(length)
    finally:
        file.close()
