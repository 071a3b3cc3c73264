"""Run headers: the binary description of a shared run, for files and their index.

bytes        content
0 .. 4       QHED
4 .. 6       format version, u16
6 .. 8       zero
8 .. 12      chunks c, u32
12 .. 24     rows n, attached rows among them a, kv heads H: u32
24 .. 80     bytes after the header u64, checksum, MAC, as in an extent
then         layers L, index of the first chunk, bytes of the namespace's JSON: u32
16           key of the chunk before
16 * c       keys of the chunks
256 * c      tokens, i32
n, n, 4 * n  kernel ids; 1 where there is a sidecar; bases, i32
a * L * H    1 where an attached row has positions
8 * a * L * H  masks of attached rows, u64; those of chunks have all bits
8 * L        bytes of each extent, u64
then         the namespace's fields as JSON
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.keys import KEY_BYTES, namespace_key
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.namespace import FORMAT_VERSION, Namespace
from quire.cache.run import Run
from quire.cache.table import ALL_SLOTS
from quire.errors import ExtentError
from quire.stores.signer import HEADER_BYTES, ExtentSigner

_MAGIC = b"QHED"
_HEADER = struct.Struct("<4sHHIIIIQ48x")
_MORE = struct.Struct("<III")

MAX_LAYERS, MAX_HEADS, MAX_PAGES = 4096, 4096, 1 << 24
"""Maximum pages of a run. The limits prevent gigabytes of memory for a foreign header: a mask has 8 bytes a page."""
MAX_EXTENT_BYTES = 1 << 32
_MAX_JSON_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class RunHeader:
    """A shared run. lengths: bytes of its extent in each layer."""

    run: Run
    lengths: tuple[int, ...]


def common_digest(namespace: Namespace) -> bytes:
    """A digest of all fields except the salt. An engine reads only runs with its own digest."""
    return namespace_key(dataclasses.replace(namespace, salt=""))


def encode_run_header(header: RunHeader, signer: ExtentSigner) -> bytes:
    """The bytes of a header, signed."""
    run = header.run
    assert run.is_shared and isinstance(run.namespace, Namespace), "only shared runs of engines have a head"
    n, num_layers, num_heads = run.masks.shape
    chunks = len(run.names)
    text = json.dumps(dataclasses.asdict(run.namespace), sort_keys=True).encode()
    body = b"".join(
        (
            _MORE.pack(num_layers, run.start, len(text)),
            run.parent,
            *run.names,
            run.tokens.astype("<i4").tobytes(),
            run.kinds.tobytes(),
            run.has_sidecar.astype(np.uint8).tobytes(),
            run.bases.astype("<i4").tobytes(),
            run.placed[chunks:].astype(np.uint8).tobytes(),
            run.masks[chunks:].astype("<u8").tobytes(),
            np.array(header.lengths, "<u8").tobytes(),
            text,
        )
    )
    fields = (_MAGIC, FORMAT_VERSION, 0, chunks, n, run.num_attached, num_heads, len(body))
    signed = bytearray(_HEADER.pack(*fields) + body)
    signer.sign(b"", memoryview(signed))
    return bytes(signed)


def parse_run_header(blob: bytes, signer: ExtentSigner) -> RunHeader:
    """Parses a header. Raises ExtentError, and nothing else, unless `encode_run_header` wrote it."""
    signer.verify(b"", memoryview(blob))
    magic, version, zero, chunks, n, attached, num_heads, _ = _HEADER.unpack_from(blob)
    if magic != _MAGIC or version != FORMAT_VERSION or zero:
        raise ExtentError(f"a head of format {magic!r} {version}, and this is {_MAGIC!r} {FORMAT_VERSION}")
    parts = _Parts(blob, HEADER_BYTES)
    num_layers, start, text_bytes = _MORE.unpack(parts.take(_MORE.size))
    _check(0 < chunks <= n and n == chunks + attached, f"{chunks} chunks and {attached} attached rows of {n}")
    _check(0 < num_layers <= MAX_LAYERS and 0 < num_heads <= MAX_HEADS, f"{num_layers} layers, {num_heads} heads")
    _check(n * num_layers * num_heads <= MAX_PAGES, f"{n} rows of {num_layers} layers and {num_heads} heads")
    _check(text_bytes <= _MAX_JSON_BYTES, f"a namespace of {text_bytes} bytes")
    parent = parts.take(KEY_BYTES)
    names = tuple(parts.take(KEY_BYTES) for _ in range(chunks))
    tokens = parts.numbers("<i4", chunks * PAGE_TOKENS).astype(np.int32)
    kinds, sidecars = parts.numbers("u1", n).copy(), parts.numbers("u1", n)
    bases = parts.numbers("<i4", n).astype(np.int32)
    shape = attached, num_layers, num_heads
    placed = parts.numbers("u1", attached * num_layers * num_heads)
    masks = parts.numbers("<u8", attached * num_layers * num_heads)
    lengths = parts.numbers("<u8", num_layers)
    namespace = _namespace(parts.take(text_bytes))
    _check(parts.is_at_end, "bytes after its end")
    _check(bool((tokens >= 0).all() and (bases >= -1).all()), "a negative token or base")
    _check(bool((sidecars <= 1).all() and (placed <= 1).all()), "a flag that is neither 0 nor 1")
    _check(bool((lengths >= HEADER_BYTES).all() and (lengths <= MAX_EXTENT_BYTES).all()), "impossible lengths")
    _check(len(set(names)) == chunks and parent not in names, "two chunks of one name")
    _check(start > 0 or parent == namespace_key(namespace), "the namespace has another key")
    if signer.is_check_only:  # An untrusted author may have combined tokens with other keys.
        _check(names == _keys(parent, tokens), "its tokens have other keys")
    # All chunks have the same mask: without attached rows, one number stands for all of them.
    all_masks, all_placed = np.broadcast_to(ALL_SLOTS, (n, *shape[1:])), np.broadcast_to(False, (n, *shape[1:]))
    if attached:
        all_masks, all_placed = all_masks.copy(), all_placed.copy()
        all_masks[chunks:], all_placed[chunks:] = masks.reshape(shape), placed.reshape(shape)
    run = Run(
        names, True, tokens, attached, kinds, all_masks, all_placed, bases, sidecars == 1, namespace, start, parent
    )
    return RunHeader(run, tuple(lengths.tolist()))


class _Parts:
    """Reads consecutive parts of bytes."""

    def __init__(self, blob: bytes, at: int) -> None:
        self._blob, self._at = blob, at

    def take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        _check(end <= len(self._blob), "it is truncated")
        found = self._blob[self._at : end]
        self._at = end
        return found

    def numbers(self, dtype: str, count: int) -> NDArray[Any]:
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._blob)


def _namespace(text: bytes) -> Namespace:
    try:
        fields = json.loads(text)
        namespace = Namespace(**fields)
        is_whole = all(type(fields[each.name]) is type(each.default) for each in dataclasses.fields(Namespace))
    except (ValueError, TypeError, KeyError, RecursionError):
        is_whole = False
    _check(is_whole, "its namespace has other fields")
    return namespace


def _keys(parent: bytes, tokens: NDArray[np.int32]) -> tuple[bytes, ...]:
    """The keys of a run's chunks, as in `cache.keys.ChunkKeys`."""
    keys, key = [], parent
    for chunk in tokens.astype("<i4").reshape(-1, PAGE_TOKENS):
        key = hashlib.blake2b(key + chunk.tobytes(), digest_size=KEY_BYTES).digest()
        keys.append(key)
    return tuple(keys)


def _check(holds: bool, complaint: str) -> None:
    if not holds:
        raise ExtentError(f"the head of a run is damaged: {complaint}")
