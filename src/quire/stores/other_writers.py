"""The sub-folders of other processes, as the catalog sees them."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from quire.stores.catalog import Catalog
from quire.stores.folder_view import FolderView
from quire.stores.index import DamagedIndexError, IndexWatcher
from quire.stores.writer_folder import WriterFolder

log = logging.getLogger("quire")


class OtherWriters:
    """Looks at all other sub-folders of a folder. Used by one thread."""

    def __init__(self, writer_folder: WriterFolder, catalog: Catalog) -> None:
        self._writer_folder, self._catalog = writer_folder, catalog
        self._watchers: dict[Path, tuple[IndexWatcher, FolderView]] = {}

    def poll(self) -> None:
        """Takes over what other processes have changed. What cannot be read now is looked at again later."""
        writer_folder = self._writer_folder
        subfolders = [
            subfolder for subfolder in writer_folder.folder.subfolders() if subfolder != writer_folder.subfolder
        ]
        for subfolder in self._watchers.keys() - set(subfolders):
            self._forget(subfolder)
        for subfolder in subfolders:
            if subfolder not in self._watchers:
                view = FolderView(subfolder, self._catalog, writer_folder.signer, writer_folder.digest, is_own=False)
                self._watchers[subfolder] = IndexWatcher(subfolder), view
            watcher, view = self._watchers[subfolder]
            with contextlib.suppress(OSError):
                self._poll(watcher, view)

    def _poll(self, watcher: IndexWatcher, view: FolderView) -> None:
        try:
            has_changed = watcher.poll()
            if has_changed is None:
                view.clear()
                has_changed = watcher.poll()
            if has_changed and watcher.index is not None:
                view.update(watcher.index)
        except DamagedIndexError as error:
            if not watcher.is_damaged:
                log.warning("the index of %s is damaged, and its runs are not found: %s", watcher.subfolder, error)
            watcher.give_up()
            view.clear()

    def note_uses(self) -> None:
        """Tells whoever collects their files, by the files' times, which of them were used here."""
        for _, view in self._watchers.values():
            for file in list(view.files.values()):
                if file.used > file.noted:
                    file.noted = file.used
                    with contextlib.suppress(OSError):
                        os.utime(file.path, (file.used, file.used))

    def close(self) -> None:
        """Forgets all of them."""
        for subfolder in list(self._watchers):
            self._forget(subfolder)

    def _forget(self, subfolder: Path) -> None:
        watcher, view = self._watchers.pop(subfolder)
        watcher.close()
        view.clear()
        self._catalog.files_of_others.pop(subfolder, None)
