"""The sub-folders of other processes, as the catalog sees them."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from quire.stores.catalog import Catalog
from quire.stores.home import Home
from quire.stores.index import DamagedIndexError, Mirror
from quire.stores.view import View

log = logging.getLogger("quire")


class Mirrors:
    """Looks at all other sub-folders of a folder. Used by one thread."""

    def __init__(self, home: Home, catalog: Catalog) -> None:
        self._home, self._catalog = home, catalog
        self._mirrors: dict[Path, tuple[Mirror, View]] = {}

    def poll(self) -> None:
        """Takes over what other processes have changed. What cannot be read now is looked at again later."""
        home = self._home
        places = [place for place in home.folder.places() if place != home.place]
        for place in self._mirrors.keys() - set(places):
            self._forget(place)
        for place in places:
            if place not in self._mirrors:
                view = View(place, self._catalog, home.seal, home.digest, is_own=False)
                self._mirrors[place] = Mirror(place), view
            mirror, view = self._mirrors[place]
            with contextlib.suppress(OSError):
                self._poll(mirror, view)

    def _poll(self, mirror: Mirror, view: View) -> None:
        try:
            has_changed = mirror.poll()
            if has_changed is None:
                view.clear()
                has_changed = mirror.poll()
            if has_changed and mirror.index is not None:
                view.update(mirror.index)
        except DamagedIndexError as error:
            if not mirror.is_damaged:
                log.warning("the index of %s is damaged, and its runs are not found: %s", mirror.place, error)
            mirror.give_up()
            view.clear()

    def note_uses(self) -> None:
        """Tells whoever collects their files, by the files' times, which of them were used here."""
        for _, view in self._mirrors.values():
            for file in list(view.files.values()):
                if file.used > file.noted:
                    file.noted = file.used
                    with contextlib.suppress(OSError):
                        os.utime(file.path, (file.used, file.used))

    def close(self) -> None:
        """Forgets all of them."""
        for place in list(self._mirrors):
            self._forget(place)

    def _forget(self, place: Path) -> None:
        mirror, view = self._mirrors.pop(place)
        mirror.close()
        view.clear()
        self._catalog.files_of_others.pop(place, None)
