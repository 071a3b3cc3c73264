"""Chooses and removes files of runs when there is no room."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from quire.stores.catalog import Catalog, RunFile
from quire.stores.folder import remove_file, run_files, writer_bytes
from quire.stores.folder_view import used_by_others
from quire.stores.index import DamagedIndexError, RunIndex, remove_index

log = logging.getLogger("quire")


def victim(files: Iterable[RunFile], catalog: Catalog, stale: float) -> RunFile | None:
    """The file to remove next: the least recently used file of the first non-empty group. The groups are files of other
    models unused since `stale`, files of this model, files of other models, and pinned files.
    """

    def rank(file: RunFile) -> tuple[int, float]:
        if catalog.is_pinned(file):
            return 3, file.used
        if file.entries or not file.others:
            return 1, file.used
        return (0 if file.used < stale else 2), file.used

    return min(files, key=rank, default=None)


def collect_abandoned(subfolder: Path, num_bytes: int, catalog: Catalog) -> None:
    """Frees `num_bytes`, or all, in a sub-folder without a writer. Removes the least recently used files first, pinned
    ones last. Under the lock of the sub-folder. Raises OSError.
    """
    goal, paths = writer_bytes(subfolder) - num_bytes, dict[int, Path]()
    known = catalog.files_of_others.get(subfolder, {})
    try:
        with RunIndex(subfolder, is_writer=True) as index:
            rows = {row.number: row for row in index.files()}
            for number, path in run_files(subfolder):
                if number in rows:
                    paths[number] = path
                else:
                    remove_file(path)

            def rank(number: int) -> tuple[bool, float]:
                file = known.get(number)
                used = max(rows[number].used, used_by_others(paths[number]))
                return file is not None and catalog.is_pinned(file), used

            for number in sorted(paths, key=rank):
                if writer_bytes(subfolder) <= goal:
                    break
                index.remove_files([number])
                remove_file(paths.pop(number))
                if (file := known.get(number)) is not None:
                    catalog.drop_file(file)
    except DamagedIndexError as error:
        log.warning("the index of %s is damaged, and its runs are lost: %s", subfolder, error)
        paths = {}
    if not paths:
        clear_subfolder(subfolder)


def clear_subfolder(subfolder: Path) -> None:
    """Removes everything from a sub-folder except its lock. Under that lock."""
    remove_index(subfolder)
    for _, path in run_files(subfolder):
        remove_file(path)
