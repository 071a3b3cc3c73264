"""Layer images: the first start writes packed weights to a file. Later starts map it, and neither read the checkpoint
nor pack it.

The pages of an image belong to the system's page cache: all processes share one copy. `models.image_folder` has the
format.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import torch

from quire.config import format_bytes
from quire.kernels.memory import Fill, HugePageAllocator, WeightMemory, huge_pages
from quire.models.cpu_panels import DTYPES, KINDS, LAYOUT
from quire.models.fingerprint import fingerprint
from quire.models.image_folder import (
    DRAFT_SUFFIX,
    ENTRY_ALIGNMENT,
    SECTION_ALIGNMENT,
    Image,
    ImageBusyError,
    ImageEntry,
    ImageError,
    ImageSection,
    ImageSource,
    aligned,
    image_path,
    lock_draft,
    open_image,
    remove_leftovers,
    remove_older,
    table_bytes,
)
from quire.models.layers import torch_dtype
from quire.models.loading import loaded_kind, loaded_sizes
from quire.models.quants import loaded_row_bytes

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.models.loading import Form
    from quire.models.weights import Checkpoint

log = logging.getLogger("quire")

LEAST_BYTES = 384 << 20
"""Smaller packed weights have no image, because packing takes a fraction of a second. This includes the embedded model
in every form."""

DEVICE_LAYOUT = 1
"""Version of the packing for a GPU."""

BUSY_SECONDS = 0.2
"""Interval between checks of an image that another process writes."""

SPARE = 0.05
"""Share of an image's bytes that must remain free on disk."""

Made = TypeVar("Made")

_THREAD = "quire-image"
"""Name of the threads that wait for the disk."""

_named: set[Path] = set()
"""Images that this process has written."""


@contextlib.contextmanager
def temporary_images() -> Iterator[set[Path]]:
    """Removes the images that this process writes within the context, except for the paths that the caller adds to the
    yielded set. A model that runs keeps its image until it ends.
    """
    before, kept = set(_named), set[Path]()
    try:
        yield kept
    finally:
        for thread in threading.enumerate():
            if thread.name == _THREAD:
                thread.join()
        for path in _named - before - kept:
            with contextlib.suppress(OSError):
                path.unlink()
            _named.discard(path)


@dataclass(frozen=True)
class ImageSpec:
    """The image of a model. num_bytes: upper bound of its matrices' bytes."""

    origin: ImageSource
    num_bytes: int


def image_spec(checkpoint: Checkpoint, dtype: torch.dtype, form: Form) -> ImageSpec | None:
    """The image of a checkpoint with weights in `form` on the CPU backend; None if it gets no image."""
    num_bytes = _packed_bytes(checkpoint, dtype, form)
    if checkpoint.path is None or num_bytes < LEAST_BYTES:
        return None
    return _spec(checkpoint, dtype, form, num_bytes)


def engine_image_spec(checkpoint: Checkpoint, config: EngineConfig) -> ImageSpec | None:
    """The image that engines with a resolved configuration map; None if they map none."""
    if config.attention.backend != "cpu" or not config.model.images:
        return None
    return image_spec(checkpoint, torch_dtype(config.model.dtype), config.model.weights)


def full_image_spec(checkpoint: Checkpoint, dtype: torch.dtype, form: Form) -> ImageSpec:
    """The image with all matrices of the layers, of whatever size: plain numbers too, if they have no panels. It is the
    same as that of `image_spec` if all have panels.
    """
    assert checkpoint.path is not None, "a checkpoint that is on no disk"
    packed, num_bytes = (_packed_bytes(checkpoint, dtype, form, with_plain=plain) for plain in (False, True))
    return _spec(checkpoint, dtype, form if num_bytes == packed else f"{form}, whole", num_bytes)


def device_image_spec(checkpoint: Checkpoint, dtype: torch.dtype, form: Form, kinds: Collection[str]) -> ImageSpec:
    """The image with all matrices of the layers as a GPU multiplies them. kinds: of blocks that it multiplies."""
    sizes = loaded_sizes(checkpoint, dtype, form, kinds)
    num_bytes = sum(size for name, size in sizes.items() if name.startswith("layers."))
    return _spec(checkpoint, dtype, f"{form}, gpu", num_bytes, DEVICE_LAYOUT)


def _spec(checkpoint: Checkpoint, dtype: torch.dtype, form: str, num_bytes: int, layout: int = LAYOUT) -> ImageSpec:
    assert checkpoint.path is not None
    statuses = [file.stat() for file in checkpoint.files]
    path = checkpoint.path.resolve()
    origin = ImageSource(
        model=_name_of(checkpoint.path.absolute()),
        path=str(path),
        fingerprint=fingerprint(checkpoint.path),
        files=tuple((status.st_size, status.st_mtime_ns) for status in statuses),
        form=form,
        dtype=str(dtype).removeprefix("torch."),
        layout=layout,
    )
    return ImageSpec(origin, num_bytes)


def _name_of(path: Path) -> str:
    """The hub id of a model in the hub's cache (`models--owner--name/snapshots/...`), else the last part of a path."""
    hub = next((part for part in path.parts if part.startswith("models--")), None)
    return path.name if hub is None else hub.removeprefix("models--").replace("--", "/")


def _packed_bytes(checkpoint: Checkpoint, dtype: torch.dtype, form: Form, *, with_plain: bool = False) -> int:
    """Upper bound of a checkpoint's bytes in panels, as if no two matrices shared a panel. with_plain: and of the
    matrices without panels.
    """
    shape, total = checkpoint.shape, 0
    for name, size in shape.tensor_shapes.items():
        if len(size) != 2 or name == "positions.weight":
            continue
        outputs, inputs = size
        kind = loaded_kind(name, size, checkpoint.kind(name), form, KINDS)
        if kind is None and name == "embed.weight" and not shape.tied_embeddings:
            continue
        if kind is None and (dtype not in DTYPES or inputs % 2) and not with_plain:
            continue
        total += aligned(outputs, 32) * (dtype.itemsize * inputs if kind is None else loaded_row_bytes(kind, inputs))
    return total


def load(wanted: ImageSpec | None, make: Callable[[WeightMemory], Made]) -> Made:
    """Calls `make` with packed weights: from the image if there is one; else while writing the image; else in plain
    memory, with the reason in the log. `make` may be called several times.
    """
    if wanted is None:
        return make(HugePageAllocator())
    path: Path | str = ""
    try:
        path = image_path(wanted.origin)
        reader = ImageReader(wanted.origin)
        made = make(reader)
        reader.finish()
        return made
    except FileNotFoundError:
        pass
    except ImageError as error:
        log.info("writing the layer image %s again: %s", path, error)
    try:
        with ImageWriter(wanted) as writer:
            made = make(writer)
            writer.finish()
        return made
    except ImageError as error:
        log.warning("packing the weights in memory, without the layer image %s: %s", path, error)
    return make(HugePageAllocator())


def ensure_image(wanted: ImageSpec, make: Callable[[WeightMemory], object]) -> Image:
    """The complete image, with whole blocks up to its last matrix. Writes it first if there is none, with `make`. If
    another process is writing it, waits for it.

    Raises ImageError if it cannot be written or read.
    """
    is_logged = False
    while True:
        try:
            image = _whole(open_image(wanted.origin))
            _note_use(image.path)
            return image
        except FileNotFoundError:
            pass
        except ImageError as error:
            log.info("writing the layer image again: %s", error)
        try:
            with ImageWriter(wanted) as writer:
                make(writer)
                writer.finish(wait=True)
            break
        except ImageBusyError:
            if not is_logged:
                log.warning("waiting for another process, which writes the layer image %s", image_path(wanted.origin))
            is_logged = True
            time.sleep(BUSY_SECONDS)
    try:
        return _whole(open_image(wanted.origin))
    except FileNotFoundError:
        raise ImageError("it was removed") from None


def _note_use(path: Path) -> None:
    """Records the time of a load, which `quire cache ls` shows."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _whole(image: Image) -> Image:
    last = image.sections[-1]
    if image.num_bytes < aligned(last.offset + last.num_bytes, SECTION_ALIGNMENT):
        raise ImageError("it ends inside a block")
    return image


class ImageReader:
    """A complete image, mapped."""

    def __init__(self, origin: ImageSource) -> None:
        """Raises the errors of open_image."""
        image = open_image(origin)
        self._path = path = image.path
        self._entries = iter([entry for section in image.sections for entry in section.entries])
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != image.num_bytes:
                    raise ImageError("it was replaced")
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
                self._map = _mapped(file.fileno(), image.num_bytes)
        except OSError as error:
            raise ImageError(f"it cannot be mapped ({error.strerror or error})") from None

    def place(self, name: str, num_bytes: int, fill: Fill) -> torch.Tensor:
        """See WeightMemory.place. Raises ImageError if the next matrix of the image is another one."""
        entry = next(self._entries, None)
        if entry is None or (entry.name, entry.num_bytes) != (name, num_bytes):
            raise ImageError(f"it does not have {name} where this model needs it")
        return _view(self._map, entry)

    def finish(self) -> None:
        """Call this after the last matrix. Raises ImageError if the image has more."""
        entry = next(self._entries, None)
        if entry is not None:
            raise ImageError(f"it has {entry.name}, which this model does not have")
        _note_use(self._path)


class ImageWriter:
    """Writes an image. A context manager: without `finish` it leaves no file.

    Each matrix is packed in memory, appended to the file by one plain write, and read through a mapping of the file. So
    a full disk is an error of that write, and never a signal.
    """

    def __init__(self, wanted: ImageSpec) -> None:
        """Raises ImageError if there is no room, or if another process writes this image."""
        self._path = path = image_path(wanted.origin)
        self._draft = path.with_suffix(DRAFT_SUFFIX)
        self._origin = wanted.origin
        self._sections: list[ImageSection] = []
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._is_finished = self._is_named = False
        self.num_bytes = 0
        with contextlib.ExitStack() as stack, _as_image_error():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            remove_leftovers()
            status, needed = os.statvfs(path.parent), int(wanted.num_bytes * (1 + SPARE))
            if (free := status.f_bavail * status.f_frsize) < needed:
                found = f"{path.parent} has {format_bytes(free)} free"
                raise ImageError(f"{found}, and it needs {format_bytes(needed)}")
            self._file = stack.enter_context(lock_draft(self._draft, create=True))
            stack.callback(self._leave)
            # Allocates the bytes in advance: writing is faster and cannot run out of space.
            self._room = aligned(needed, SECTION_ALIGNMENT) + (16 << 20)
            os.ftruncate(self._file, 0)
            os.posix_fallocate(self._file, 0, self._room)
            self._map = _mapped(self._file, self._room)
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_finished:
            self._open.close()

    def place(self, name: str, num_bytes: int, fill: Fill) -> torch.Tensor:
        """See WeightMemory.place. Raises ImageError if the file cannot grow."""
        if len(self._scratch) < num_bytes:
            self._scratch = huge_pages(num_bytes)
        packed = self._scratch[:num_bytes].zero_()
        fill(packed)
        entry = self._append(name, num_bytes)
        with _as_image_error():
            _write(self._file, packed.numpy().data, entry.offset)
        return _view(self._map, entry)

    def _append(self, name: str, num_bytes: int) -> ImageEntry:
        of = section_of(name)
        if not self._sections or self._sections[-1].name != of:
            self._sections.append(ImageSection(of, aligned(self.num_bytes, SECTION_ALIGNMENT), 0, ()))
        section = self._sections[-1]
        entry = ImageEntry(name, aligned(section.offset + section.num_bytes, ENTRY_ALIGNMENT), num_bytes)
        self.num_bytes = entry.offset + num_bytes
        if self.num_bytes > self._room:
            raise ImageError("it is larger than expected")
        self._sections[-1] = ImageSection(
            of, section.offset, self.num_bytes - section.offset, (*section.entries, entry)
        )
        return entry

    def finish(self, *, wait: bool = False) -> None:
        """Call this after the last matrix. A thread waits until the disk has the file and then gives it its name. The
        process waits for that thread before it ends.

        wait: returns only when the file has its name. Raises ImageError if it cannot get it.
        """
        self._scratch = torch.empty(0, dtype=torch.uint8)
        end = aligned(self.num_bytes, SECTION_ALIGNMENT)
        table = table_bytes(self._origin, self._sections, end)
        with _as_image_error():
            os.ftruncate(self._file, end + len(table))
            _write(self._file, table, end)
        self._is_finished = True
        if wait:
            self._publish()
            if not self._is_named:
                raise ImageError("it cannot be written")
            return
        try:
            threading.Thread(target=self._publish, name=_THREAD).start()
        except RuntimeError:  # no more threads
            self._publish()

    def _publish(self) -> None:
        with self._open:
            try:
                os.fdatasync(self._file)
                os.replace(self._draft, self._path)
                self._is_named = True
                _named.add(self._path)
                # A warning, because the user did not ask for a gigabyte or more on disk.
                log.warning("wrote packed layers, %s, to %s; quire cache ls", format_bytes(self.num_bytes), self._path)
                remove_older(self._origin)
            except OSError as error:
                # The weights that this process runs from may be lost, too.
                log.error("no layer image %s: %s; start again", self._path, error.strerror or error)

    def _leave(self) -> None:
        if not self._is_named:
            with contextlib.suppress(OSError):
                self._draft.unlink()


def section_of(name: str) -> str:
    """The section of a matrix: `layers.3` for `layers.3.q.weight+layers.3.k.weight Q4_K`, `head` for `head.weight`."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "layers" else 1])


def _mapped(file: int, num_bytes: int) -> mmap.mmap:
    """Maps a file, with large pages if the system has them."""
    # Private and writable, because torch warns about read-only buffers; nothing writes.
    found = mmap.mmap(file, num_bytes, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            found.madvise(mmap.MADV_HUGEPAGE)
    return found


def _view(mapped: mmap.mmap, entry: ImageEntry) -> torch.Tensor:
    return torch.frombuffer(mapped, dtype=torch.uint8, count=entry.num_bytes, offset=entry.offset)


def _write(file: int, data: bytes | memoryview, offset: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


@contextlib.contextmanager
def _as_image_error() -> Iterator[None]:
    """Converts an OSError to an ImageError."""
    try:
        yield
    except OSError as error:
        raise ImageError(f"it cannot be written ({error.strerror or error})") from error
