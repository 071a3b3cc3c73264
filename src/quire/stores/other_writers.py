"""The sub-folders of other processes, and their entries in the catalog."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from quire.stores.catalog import Catalog
from quire.stores.folder import INDEX_NAME
from quire.stores.folder_view import FolderView
from quire.stores.index import DamagedIndexError, RunIndex
from quire.stores.writer_folder import WriterFolder

log = logging.getLogger("quire")


class WatchedFolder:
    """The view of a sub-folder that another process writes, and its index, which stays open."""

    def __init__(self, view: FolderView) -> None:
        self.view = view
        self.index: RunIndex | None = None
        self._is_damaged = False
        self._inode = self._time = 0
        self._version: int | None = None

    def poll(self) -> None:
        """Takes over changes; cheap without changes. Ignores a damaged index until a new one replaces it. Raises
        OSError if the index cannot be read now.
        """
        subfolder = self.view.subfolder
        try:
            status = (subfolder / INDEX_NAME).stat()
            inode, changed = status.st_ino, status.st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            inode = changed = 0
        # A new file may reuse the inode of a removed one that is no longer open.
        if inode != self._inode or (self._is_damaged and changed != self._time):
            self.close()
            self._inode, self._time, self._is_damaged = inode, changed, False
        if not inode or self._is_damaged:
            return
        try:
            if self.index is None:
                self._time = changed
                self.index = RunIndex(subfolder, is_writer=False)
            version = self.index.data_version
            if version != self._version:
                self.view.update(self.index)
                self._version = version
        except DamagedIndexError as error:
            log.warning("the index of %s is damaged, and its runs are not found: %s", subfolder, error)
            self.close()
            self._is_damaged = True

    def close(self) -> None:
        """Forgets the sub-folder's runs, and closes the index."""
        if self.index is not None:
            self.index.close()
        self.index, self._version = None, None
        self.view.clear()


class OtherWriters:
    """Polls all other sub-folders of a folder. Used by one thread."""

    def __init__(self, writer_folder: WriterFolder, catalog: Catalog) -> None:
        self._writer_folder, self._catalog = writer_folder, catalog
        self._watched: dict[Path, WatchedFolder] = {}

    def poll(self) -> None:
        """Takes over the changes of other processes. Retries later if a sub-folder cannot be read now."""
        own = self._writer_folder
        subfolders = [subfolder for subfolder in own.folder.subfolders() if subfolder != own.subfolder]
        for subfolder in self._watched.keys() - set(subfolders):
            self._forget(subfolder)
        for subfolder in subfolders:
            if subfolder not in self._watched:
                view = FolderView(subfolder, self._catalog, own.signer, own.digest, is_own=False)
                self._watched[subfolder] = WatchedFolder(view)
            with contextlib.suppress(OSError):
                self._watched[subfolder].poll()

    def note_uses(self) -> None:
        """Sets the times of used files, so that their owners see the uses when they collect."""
        for watched in self._watched.values():
            for file in list(watched.view.files.values()):
                if file.used > file.noted:
                    file.noted = file.used
                    with contextlib.suppress(OSError):
                        os.utime(file.path, (file.used, file.used))

    def close(self) -> None:
        """Forgets all other sub-folders."""
        for subfolder in list(self._watched):
            self._forget(subfolder)

    def _forget(self, subfolder: Path) -> None:
        self._watched.pop(subfolder).close()
        self._catalog.files_of_others.pop(subfolder, None)
