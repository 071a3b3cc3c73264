"""From a folder of a disk store to a parcel: whole prefixes, a run after the one that it goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ExtentError
from quire.stores.admin import Located, Shelf
from quire.stores.direct import DirectFile, padded
from quire.stores.parcel import ParcelWriter


@dataclass
class Exported:
    """What an export wrote, and how many runs it left out, by reason."""

    num_runs: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_without_beginning: int = 0
    num_with_sums: int = 0
    num_damaged: int = 0


def export(shelf: Shelf, target: Path, wanted: Callable[[Located], bool]) -> Exported:
    """Writes the wanted runs, and those that they go on from, to a parcel. Leaves out runs whose beginning is not
    stored, that have column sums of retention, or that are damaged. Raises ConfigError if there is a file of this name,
    and OSError.
    """
    runs: dict[tuple[bytes, ...], Located] = {}
    for located in shelf.runs():
        runs.setdefault(located.head.run.names, located)
    by_name = {name: located for located in runs.values() for name in located.head.run.names}
    done: dict[tuple[bytes, ...], bool] = {}
    found = Exported()
    with ParcelWriter(target) as writer:
        for located in sorted(filter(wanted, runs.values()), key=lambda each: each.head.run.start):
            for each in _path(located, by_name):
                names = each.head.run.names
                if names not in done:
                    parent = by_name.get(each.head.run.parent)
                    has_beginning = not each.head.run.start or (
                        parent is not None and done.get(parent.head.run.names, False)
                    )
                    done[names] = has_beginning and _write(writer, each, shelf, found)
                    found.num_without_beginning += not has_beginning
    return found


def _path(located: Located, by_name: dict[bytes, Located]) -> list[Located]:
    """The runs from the beginning up to this one, as far as they are stored."""
    found = [located]
    while found[-1].head.run.start and (parent := by_name.get(found[-1].head.run.parent)) is not None:
        found.append(parent)
    return found[::-1]


def _write(writer: ParcelWriter, located: Located, shelf: Shelf, found: Exported) -> bool:
    if located.head.run.num_attached:
        found.num_with_sums += 1
        return False
    try:
        extents = list(_extents(located, shelf))
    except (ExtentError, OSError) as error:
        shelf.problems.append(f"{located.path}: {error}")
        found.num_damaged += 1
        return False
    writer.add(located.blob, extents)
    found.num_runs += 1
    found.num_tokens += len(located.head.run.tokens)
    found.num_bytes += sum(map(len, extents))
    return True


def _extents(located: Located, shelf: Shelf) -> Iterator[memoryview]:
    file = DirectFile(located.path, is_direct=False)
    try:
        offset, names = located.offset, b"".join(located.head.run.names)
        for length in located.head.lengths:
            extent = memoryview(bytearray(length))
            file.read(extent, offset, lambda size: None)
            shelf.seal.verify(names, extent)
            yield extent
            offset += padded(length)
    finally:
        file.close()
