"""Keys of chunks: 16 bytes that name all tokens up to a chunk's end. They are the same on every machine and for any
division of the tree into segments.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import struct
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from quire.cache.ledger import PAGE_TOKENS

KEY_BYTES = 16
"""Bytes of a key. Among about 2^64 chunks, two are likely to have equal keys; such a pair cannot be found by trial."""

_CHUNK_BYTES = 4 * PAGE_TOKENS
_DIGEST = hashlib.blake2b(digest_size=KEY_BYTES)
"""An empty hash state. Copying it is a quarter cheaper than making a new one."""


@functools.lru_cache(maxsize=1024)
def namespace_key(namespace: Hashable) -> bytes:
    """The digest of a namespace's fields by name, as JSON. The keys of its chunks start from it."""
    fields: object = namespace
    if dataclasses.is_dataclass(namespace) and not isinstance(namespace, type):
        fields = dataclasses.asdict(namespace)
    text = json.dumps(fields, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


class ChunkKeys:
    """Keys and tokens of one sequence's chunks, each computed once as the sequence grows.

        key 0 = blake2b(key of the namespace, tokens of chunk 0)      key i = blake2b(key i - 1, tokens of chunk i)

    where tokens are int32, little-endian. Equal keys mean equal tokens up to the end of the chunk.

    namespace  what must be equal for two sequences to share pages
    token_ids  the sequence's tokens: a list that only grows

    reads_tokens  whether keys depend on the list's tokens
    """

    reads_tokens = True

    def __init__(self, namespace: Hashable, token_ids: list[int]) -> None:
        self.namespace = namespace
        self._token_ids = token_ids
        self._keys: list[bytes] = []
        self._data = bytearray()  # the tokens of the chunks that have keys, as they are hashed

    def first(self, count: int) -> list[bytes]:
        """The keys of the first `count` chunks; of all complete chunks if there are fewer."""
        known = self._keys
        if len(known) < count:
            num_whole = len(self._token_ids) // PAGE_TOKENS * PAGE_TOKENS
            tokens = self._token_ids[len(known) * PAGE_TOKENS : num_whole]
            key = known[-1] if known else namespace_key(self.namespace)
            data = struct.pack(f"<{len(tokens)}i", *tokens)  # twice as fast as numpy
            for start in range(0, len(data), _CHUNK_BYTES):
                digest = _DIGEST.copy()
                digest.update(key + data[start : start + _CHUNK_BYTES])
                key = digest.digest()
                known.append(key)
            self._data += data
        return known[:count]

    def tokens(self, first: int, end: int) -> NDArray[np.int32]:
        """The tokens of chunks [first, end), int32 [n * 64], which are complete."""
        if len(self._keys) < end:
            self.first(end)
        data = self._data[first * _CHUNK_BYTES : end * _CHUNK_BYTES]
        return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def num_common(left: list[bytes], right: list[bytes]) -> int:
    """Number of equal leading keys of two lists of chunks that begin at the same position."""
    low, high = 0, min(len(left), len(right))
    if high and left[high - 1] == right[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if left[middle] == right[middle]:
            low = middle + 1
        else:
            high = middle
    return low
