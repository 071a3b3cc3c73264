"""The GGUF container: header, metadata and the location of each tensor's bytes, memory-mapped.

Knows the container, not models. The `gguf` package takes 1.9 s to read the 98,000 strings of the embedded model's
vocabulary; this reader takes 0.1 s. The package still decodes rare block formats.

Source: the GGUF specification, versions 2 and 3, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

# Type number -> (name, elements of a block, bytes of a block). Others are looked up in the `gguf` package.
BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """One entry of the tensor index."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as in torch; the file stores the reverse order."""
    kind: str
    """F32, Q4_1, ..."""
    block_size: int
    block_bytes: int
    first_byte: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Everything before the tensor data. Arrays of numbers are tuples, arrays of strings are lists."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


class GgufFile:
    """A GGUF file. Its tensors are read directly from the page cache."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        with path.open("rb") as file:
            # Private and writable, because torch warns about read-only buffers; nothing writes.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def bytes_of(self, stored: StoredTensor) -> Tensor:
        """The stored bytes, uint8 [num_bytes], as a view of the file. The view keeps the mapping alive."""
        import torch

        return torch.frombuffer(self._map, dtype=torch.uint8, count=stored.num_bytes, offset=stored.first_byte)

    def close(self) -> None:
        """Releases the mapping. It ends with its last view."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def forget(self, stored: StoredTensor) -> None:
        """Unmaps the whole pages of a copied tensor. The page cache still has them if they are needed."""
        first = -(-stored.first_byte // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (stored.first_byte + stored.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def read_header(path: Path) -> GgufHeader:
    """Parses the header of a GGUF file. Remembers the last one, because weights and tokenizer both need it.

    Raises ModelError naming the file if it is not a GGUF, too old, big-endian or shorter than its index says.
    """
    try:
        status = path.stat()
        return _read_header(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None


@functools.lru_cache(maxsize=1)
def _read_header(path: Path, size: int, modified: int) -> GgufHeader:
    del modified  # part of the cache key only
    if size < 32:
        is_one = path.read_bytes().startswith(b"GGUF")
        wrong = "the header is truncated" if is_one else "not a GGUF file"
        raise ModelError(f"{path}: {wrong} ({size} bytes)")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        magic, version, num_tensors, num_entries = struct.unpack_from("<4sIQQ", data)
        if magic != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file (it starts with {magic!r})")
        if version not in (2, 3):
            raise ModelError(f"{path}: GGUF version {version} is not supported (only 2 and 3, little-endian)")
        reader = _Reader(data, 24)
        metadata: dict[str, Any] = {}
        try:
            for _ in range(num_entries):
                key = reader.string()
                metadata[key] = reader.value(reader.scalar("I"))
            index = [_IndexEntry.read(reader) for _ in range(num_tensors)]
        except (struct.error, UnicodeDecodeError, _Malformed) as error:
            raise ModelError(
                f"{path}: the header is damaged or truncated at byte {reader.position} of {size} ({error})"
            ) from None
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{path}: general.alignment is {alignment!r}; it must be a positive whole number")
        data_start = -(-reader.position // alignment) * alignment
        tensors = {entry.name: entry.locate(path, data_start, size) for entry in index}
    return GgufHeader(metadata, tensors)


class _Malformed(Exception):
    """The header contradicts itself."""


class _Reader:
    """A cursor over the header."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data = data
        self.position = position

    def scalar(self, code: str) -> Any:
        layout = _layout(code)
        (value,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, position, unpack, end = self.data, self.position, _layout("Q").unpack_from, len(self.data)
        found = []
        for _ in range(count):
            stop = position + 8 + unpack(data, position)[0]
            if stop > end:
                raise _Malformed("a string runs past the end")
            found.append(str(data[position + 8 : stop], "utf-8"))
            position = stop
        self.position = position
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise _Malformed(f"value type {kind} is unknown")
        return self.scalar(_SCALARS[kind])

    def array(self) -> Any:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > len(self.data):
            raise _Malformed(f"an array claims {count} items")
        if kind == _STRING:
            return self.strings(count)
        if kind not in _SCALARS:
            raise _Malformed(f"arrays of type {kind} are not supported")
        values = struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.data, self.position)
        self.position += struct.calcsize(f"<{count}{_SCALARS[kind]}")
        return values


@functools.cache
def _layout(code: str) -> struct.Struct:
    return struct.Struct("<" + code)


@dataclass(frozen=True)
class _IndexEntry:
    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int

    @staticmethod
    def read(reader: _Reader) -> _IndexEntry:
        name, num_dims = reader.string(), reader.scalar("I")
        if num_dims > 4:
            raise _Malformed(f"tensor {name} has {num_dims} dimensions")
        dims = [reader.scalar("Q") for _ in range(num_dims)]
        return _IndexEntry(name, tuple(reversed(dims)), reader.scalar("I"), reader.scalar("Q"))

    def locate(self, path: Path, data_start: int, size: int) -> StoredTensor:
        kind, block_size, block_bytes = BLOCKS.get(self.type_number) or _rare_block(
            self.type_number, f"{path}: tensor {self.name}"
        )
        elements = math.prod(self.shape)
        if not self.shape or self.shape[-1] % block_size:
            raise ModelError(
                f"{path}: tensor {self.name} has shape {list(self.shape)}; {kind} rows are multiples of {block_size}"
            )
        first, num_bytes = data_start + self.offset, elements // block_size * block_bytes
        if first + num_bytes > size:
            raise ModelError(
                f"{path}: truncated: tensor {self.name} ends at byte {first + num_bytes}, the file has {size}"
            )
        return StoredTensor(self.name, self.shape, kind, block_size, block_bytes, first, num_bytes)


def _rare_block(number: int, source: str) -> tuple[str, int, int]:
    """Name and block size of a format that only the `gguf` package knows."""
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise ModelError(f"{source} has GGUF type {number}, which needs the 'gguf' package: pip install gguf") from None
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ModelError(f"{source} has GGUF type {number}, which is not supported") from None
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    return kind.name, block_size, block_bytes
