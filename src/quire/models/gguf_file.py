"""The GGUF container: header, metadata and the location of each tensor's bytes, memory-mapped.

A model may be split into several files, NAME-00001-of-00003.gguf and so on. The first one has the metadata, and every
one an index of its own tensors. Any of them stands for the model.

Knows the container, not models. The `gguf` package takes 1.9 s to read the 98,000 strings of the embedded model's
vocabulary; this reader takes 0.1 s. The package still decodes rare block formats.

Source: the GGUF specification, versions 2 and 3, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ModelError, shown
from quire.models.rope import MAX_SIZE
from quire.safe_io import check_regular, open_file, read_bytes

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

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
MOST_PARTS = 1000
"""Most parts of one model."""


@dataclass(frozen=True)
class StoredTensor:
    """One entry of the tensor index."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as in torch; the file stores the reverse order."""
    kind: str
    """F32, Q4_1, ..."""
    first_byte: int
    num_bytes: int
    part: int = 0
    """Which of the model's files has it."""


@dataclass(frozen=True)
class GgufHeader:
    """Everything before the tensor data. Arrays of numbers are tuples, arrays of strings are lists.

    files  files of the model; the first one has the metadata
    """

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: tuple[Path, ...]


class GgufFile:
    """A GGUF model: one file, or all its parts. Its tensors are read directly from the page cache."""

    def __init__(self, path: Path) -> None:
        """path: of the file, or of any part."""
        self.header = read_header(path)
        self._maps = []
        for each in self.header.files:
            with open_file(each, "rb") as file:
                # Private and writable, because torch warns about read-only buffers; nothing writes.
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def bytes_of(self, stored: StoredTensor) -> Tensor:
        """The stored bytes, uint8 [num_bytes], as a view of the file. The view keeps the mapping alive."""
        import torch

        return torch.frombuffer(
            self._maps[stored.part], dtype=torch.uint8, count=stored.num_bytes, offset=stored.first_byte
        )

    def close(self) -> None:
        """Releases the mappings. Each ends with its last view."""
        for each in self._maps:
            with contextlib.suppress(BufferError):
                each.close()

    def unmap(self, stored: StoredTensor) -> None:
        """Unmaps the whole pages of a copied tensor. The page cache still has them if they are needed."""
        first = -(-stored.first_byte // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (stored.first_byte + stored.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[stored.part].madvise(mmap.MADV_DONTNEED, first, last - first)


def read_header(path: Path) -> GgufHeader:
    """Parses the header of a GGUF file, or those of all parts of a model. Remembers the last one, because weights and
    tokenizer both need it.

    path  of the file, or of any part
    Raises ModelError naming the file if it is not a GGUF, too old, big-endian or shorter than its index says, and if
    a part is missing or belongs to another model.
    """
    try:
        names = _names_of_parts(path)
        missing = [each for each in names if not each.exists()]
        if not missing:
            return _read_parts(path, *((each, *_version(each)) for each in names))
        _, metadata, _ = _read_file(path, *_version(path))
        if not _split_setting(metadata, "split.count", path):
            return _read_parts(path, (path, *_version(path)))
    except OSError as error:
        raise ModelError(f"{error.filename or path}: cannot be read ({error.strerror})") from None
    others = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
    raise ModelError(f"{missing[0]}: this part of the model is missing{others}; all {len(names)} must be in one folder")


def files_of(path: Path) -> tuple[Path, ...]:
    """The files of a model; the first one identifies it. path: of the file, or of any part. Raises ModelError if a part
    is missing.
    """
    return (path,) if _PART_NAME.fullmatch(path.name) is None else read_header(path).files


def _names_of_parts(path: Path) -> list[Path]:
    """The paths of all parts, if the path is named like one; they need not exist."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) or int(match[3]) > MOST_PARTS:
        return [path]
    count = int(match[3])
    return [path.with_name(f"{match[1]}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


def _version(path: Path) -> tuple[int, int]:
    """Size and time of change, which differ once the file changes."""
    check_regular(path)
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@functools.lru_cache(maxsize=1)
def _read_parts(path: Path, *parts: tuple[Path, int, int]) -> GgufHeader:
    """The header of a model.

    path   the part that the caller named
    parts  path, size and time of change of each file named like a part
    """
    read = [_read_file(*part) for part in parts]
    first, metadata, tensors = read[0]
    count = _split_setting(metadata, "split.count", first)
    if count <= 1:
        # One file, whatever its name is.
        if path != first:
            return _read_parts(path, *(part for part in parts if part[0] == path))
        return GgufHeader(metadata, tensors, (path,))
    if len(parts) == 1:
        raise ModelError(
            f"{path}: is one of {count} parts of a model; its name must be like NAME-00001-of-{count:05d}.gguf"
        )
    merged: dict[str, StoredTensor] = {}
    for number, (file, own, found) in enumerate(read):
        if _split_setting(own, "split.count", file) != len(read) or _split_setting(own, "split.no", file) != number:
            raise ModelError(f"{file}: is not part {number + 1} of {len(read)} of this model")
        for tensor in found.values():
            if tensor.name in merged:
                raise ModelError(f"{file}: tensor {tensor.name} is in part {merged[tensor.name].part + 1} too")
            merged[tensor.name] = dataclasses.replace(tensor, part=number)
    if (expected := _split_setting(metadata, "split.tensors.count", first)) not in (0, len(merged)):
        raise ModelError(f"{first}: split.tensors.count is {expected}, and the parts have {len(merged)} tensors")
    return GgufHeader(metadata, merged, tuple(file for file, _, _ in read))


def _split_setting(metadata: dict[str, Any], key: str, source: Path) -> int:
    """A setting of split models; 0 if it is absent."""
    value = metadata.get(key, 0)
    if type(value) is not int or not 0 <= value <= MAX_SIZE:
        raise ModelError(f"{source}: setting {key} is {shown(value)}; it must be a whole number")
    return value


def _read_file(path: Path, size: int, modified: int) -> tuple[Path, dict[str, Any], dict[str, StoredTensor]]:
    """Path, metadata and tensors of one file."""
    del modified  # part of the key of the cache only
    if size < 32:
        is_one = read_bytes(path).startswith(b"GGUF")
        wrong = "the header is truncated" if is_one else "not a GGUF file"
        raise ModelError(f"{path}: {wrong} ({size} bytes)")
    with open_file(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
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
            index = [reader.index_entry() for _ in range(num_tensors)]
        except (struct.error, UnicodeDecodeError, _Malformed) as error:
            raise ModelError(
                f"{path}: the header is damaged or truncated at byte {reader.position} of {size} ({error})"
            ) from None
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{path}: general.alignment is {alignment!r}; it must be a positive whole number")
        data_start = -(-reader.position // alignment) * alignment
        tensors = {entry[0]: _located(*entry, path, data_start, size) for entry in index}
    return path, metadata, tensors


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

    def index_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, number of the type and offset of a tensor."""
        name, num_dims = self.string(), self.scalar("I")
        if num_dims > 4:
            raise _Malformed(f"tensor {name} has {num_dims} dimensions")
        dims = [self.scalar("Q") for _ in range(num_dims)]
        return name, tuple(reversed(dims)), self.scalar("I"), self.scalar("Q")


@functools.cache
def _layout(code: str) -> struct.Struct:
    return struct.Struct("<" + code)


def _located(
    name: str, shape: tuple[int, ...], type_number: int, offset: int, path: Path, data_start: int, size: int
) -> StoredTensor:
    """A tensor of the index. Raises ModelError if it does not fit its type or the file."""
    kind, block_size, block_bytes = BLOCKS.get(type_number) or _rare_block(type_number, f"{path}: tensor {name}")
    if not shape or shape[-1] % block_size:
        raise ModelError(f"{path}: tensor {name} has shape {list(shape)}; {kind} rows are multiples of {block_size}")
    first, num_bytes = data_start + offset, math.prod(shape) // block_size * block_bytes
    if first + num_bytes > size:
        raise ModelError(f"{path}: truncated: tensor {name} ends at byte {first + num_bytes}, the file has {size}")
    return StoredTensor(name, shape, kind, first, num_bytes)


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
