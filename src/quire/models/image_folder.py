"""The folder of layer images: paths and tables of images, listing and removal.

An image is a file with a model's matrices, packed for multiplication on a CPU:

    section | section | ... | table | footer

A section is a layer, or consecutive matrices outside of layers. It begins at a multiple of 4,096 bytes, and each of its
matrices at a multiple of 128. The table is JSON: the origin, and the sections with their matrices. The footer has the
offset and checksum of the table. A file gets its final name only when all of its bytes are on disk, so a complete table
implies a complete file.

Knows files and bytes, no tensors; imports no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.folders import user_cache

SECTION_ALIGNMENT = 4096
ENTRY_ALIGNMENT = 128

_FOOTER = struct.Struct("<8sIIQQ")  # magic, version, CRC-32 of the table, its first byte, its length
_MAGIC, _VERSION = b"QuireImg", 1
_MAX_TABLE_BYTES = 64 << 20

SUFFIX, DRAFT_SUFFIX = ".image", ".draft"

_writing: set[Path] = set()
"""Drafts of this process."""


class ImageError(Exception):
    """An image cannot be used or written. The message has the reason, for a log."""


class ImageBusyError(ImageError):
    """Another process writes the image."""


@dataclass(frozen=True)
class ImageSource:
    """The source of an image. Equal origins give equal bytes.

    model        name for users: the file, the folder, or the hub id
    path         path of the checkpoint, links resolved
    fingerprint  fingerprint of its contents; see models.fingerprint
    files        bytes and time of change in ns of each file with tensors
    form         model.weights
    dtype        dtype of rows and of matrices that are not in blocks
    layout       version of the packing
    """

    model: str = field(compare=False)
    path: str = field(compare=False)
    fingerprint: str
    files: tuple[tuple[int, int], ...]
    form: str
    dtype: str
    layout: int
    byte_order: str = sys.byteorder

    @property
    def key(self) -> str:
        """The image's name. It does not depend on layout and byte order, so an image with another layout is
        replaced.
        """
        parts = (self.fingerprint, self.files, self.form, self.dtype)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class ImageEntry:
    """A matrix of an image."""

    name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class ImageSection(ImageEntry):
    """Matrices that are read together, such as those of a layer."""

    entries: tuple[ImageEntry, ...]


@dataclass(frozen=True)
class Image:
    """A complete image.

    num_bytes  size of the file
    used       time of the last load, in seconds since the epoch
    """

    path: Path
    origin: ImageSource
    sections: tuple[ImageSection, ...]
    num_bytes: int
    used: float


@dataclass(frozen=True)
class ImageDraft:
    """An unfinished image.

    num_bytes   bytes on disk
    is_written  whether a process is still writing it; otherwise its process ended too early
    """

    path: Path
    num_bytes: int
    is_written: bool


def image_folder() -> Path:
    """The folder of images: quire/images in the user's cache folder. Raises ImageError without a home."""
    try:
        return user_cache() / "images"
    except RuntimeError as error:
        raise ImageError(f"there is no cache folder ({error}); set XDG_CACHE_HOME") from None


def image_path(origin: ImageSource) -> Path:
    """The path of an origin's image, whether it exists or not."""
    return image_folder() / (origin.key + SUFFIX)


def aligned(offset: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `offset`."""
    return -(-offset // alignment) * alignment


def table_bytes(origin: ImageSource, sections: Sequence[ImageSection], offset: int) -> bytes:
    """Table and footer of an image, to write at the offset."""
    fields = {"origin": dataclasses.asdict(origin), "sections": [dataclasses.asdict(section) for section in sections]}
    table = json.dumps(fields).encode()
    return table + _FOOTER.pack(_MAGIC, _VERSION, zlib.crc32(table), offset, len(table))


def read_image(path: Path) -> Image:
    """Reads the table of an image. Raises FileNotFoundError, and ImageError if the image is not complete."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            end = status.st_size - _FOOTER.size
            if end < 0:
                raise ImageError("it is truncated")
            footer = os.pread(file.fileno(), _FOOTER.size, end)
            magic, version, checksum, start, length = _FOOTER.unpack(footer)
            if magic != _MAGIC or version != _VERSION or start + length != end or length > _MAX_TABLE_BYTES:
                raise ImageError("it is truncated, or from another version of Quire")
            table = os.pread(file.fileno(), length, start)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except OSError as error:
        raise ImageError(f"it cannot be read ({error.strerror or error})") from None
    if len(table) != length or zlib.crc32(table) != checksum:
        raise ImageError("its table is damaged")
    try:
        fields = json.loads(table)
        origin, sections = _origin(fields["origin"]), tuple(map(_section, fields["sections"]))
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ImageError("its table is damaged") from None
    _check_places(sections, start)
    return Image(path, origin, sections, status.st_size, status.st_mtime)


def _origin(fields: Any) -> ImageSource:
    files = tuple((int(size), int(changed)) for size, changed in fields["files"])
    return ImageSource(**{**fields, "files": files})


def _section(fields: Any) -> ImageSection:
    entries = tuple(
        ImageEntry(str(each["name"]), int(each["offset"]), int(each["num_bytes"])) for each in fields["entries"]
    )
    return ImageSection(str(fields["name"]), int(fields["offset"]), int(fields["num_bytes"]), entries)


def _check_places(sections: Sequence[ImageSection], end: int) -> None:
    """Raises ImageError unless every matrix is at the offset that the writer gives it."""
    at = 0
    for section in sections:
        at = start = aligned(at, SECTION_ALIGNMENT)
        for entry in section.entries:
            at = aligned(at, ENTRY_ALIGNMENT)
            if entry.offset != at or entry.num_bytes <= 0:
                raise ImageError("its table is damaged")
            at += entry.num_bytes
        if (section.offset, section.num_bytes) != (start, at - start):
            raise ImageError("its table is damaged")
    if at > end:
        raise ImageError("its table is damaged")


def open_image(origin: ImageSource) -> Image:
    """The image of an origin. Raises FileNotFoundError. Raises ImageError if the image is damaged or has another
    layout, or if the checkpoint has moved; the image is then written again, with the new path.
    """
    found = read_image(image_path(origin))
    if found.origin != origin:
        raise ImageError("it has another layout")
    if found.origin.path != origin.path and not Path(found.origin.path).exists():
        raise ImageError("the checkpoint has moved")
    return found


def remove_older(origin: ImageSource) -> None:
    """Removes outdated images of the checkpoint at this path in this form and dtype."""
    for image in list_images():
        same = (image.origin.path, image.origin.form, image.origin.dtype) == (origin.path, origin.form, origin.dtype)
        if same and image.origin.key != origin.key:
            image.path.unlink(missing_ok=True)


def list_images() -> list[Image]:
    """All complete images, the last used first. Raises ImageError or OSError if the folder cannot be read."""
    found = []
    for path in _files(SUFFIX):
        with contextlib.suppress(ImageError, FileNotFoundError):
            found.append(read_image(path))
    return sorted(found, key=lambda image: -image.used)


def images_called(names: Sequence[str]) -> list[Image]:
    """The files of models or files with these names or paths. Raises ConfigError for a name of none."""
    images = list_images()
    found = {image.path: image for name in names for image in images if _is_called(image, name)}
    for name in names:
        if not any(_is_called(image, name) for image in found.values()):
            known = ", ".join(sorted({image.origin.model for image in images})) or "none"
            raise ConfigError(f"no packed layers of {name!r}; models with packed layers: {known}")
    return list(found.values())


def _is_called(image: Image, name: str) -> bool:
    path = str(Path(name).resolve())
    return name in (image.origin.model, image.origin.key, image.path.name) or path in (
        image.origin.path,
        str(image.path),
    )


def clear(images: Sequence[Image] | None = None) -> int:
    """Removes images; without an argument all of them, damaged ones too. Always removes drafts of killed processes.
    Returns the freed bytes. A running model keeps its image until it ends.

    Raises OSError if a file cannot be removed.
    """
    freed = remove_leftovers()
    for path in _files(SUFFIX) if images is None else [image.path for image in images]:
        with contextlib.suppress(FileNotFoundError):
            freed += path.stat().st_size
            path.unlink()
    return freed


def list_drafts() -> list[ImageDraft]:
    """Unfinished images."""
    found = []
    for path in _files(DRAFT_SUFFIX):
        with contextlib.suppress(OSError):
            num_bytes = path.stat().st_blocks * 512
            try:
                with lock_draft(path, create=False):
                    found.append(ImageDraft(path, num_bytes, False))
            except ImageError:
                found.append(ImageDraft(path, num_bytes, True))
    return found


@atexit.register
def drop_drafts() -> None:
    """Removes the drafts of this process, if it must end while a thread still loads."""
    for path in list(_writing):
        with contextlib.suppress(OSError):
            path.unlink()


def remove_leftovers() -> int:
    """Removes drafts that no process writes any more. Returns the freed bytes."""
    freed = 0
    for path in _files(DRAFT_SUFFIX):
        with contextlib.suppress(ImageError, OSError), lock_draft(path, create=False) as draft:
            freed += os.fstat(draft).st_blocks * 512
            path.unlink()
    return freed


@contextlib.contextmanager
def lock_draft(path: Path, *, create: bool) -> Iterator[int]:
    """Yields the file descriptor of a draft, locked by this process. The lock ends with the process or the context.

    Raises ImageBusyError if another process writes the draft, OSError if it cannot be opened.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ImageBusyError("another process is writing it") from None
            except OSError:
                if create:
                    path.unlink(missing_ok=True)
                raise
            # The file may have been renamed or removed between the two calls.
            if not _is_at(descriptor, path):
                continue
            if create:
                _writing.add(path)
            try:
                yield descriptor
            finally:
                if create:
                    _writing.discard(path)
            return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _files(suffix: str) -> list[Path]:
    try:
        return sorted(path for path in image_folder().iterdir() if path.name.endswith(suffix))
    except (FileNotFoundError, NotADirectoryError):
        return []
