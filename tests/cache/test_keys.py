"""Keys of chunks: the written-out chain, equal on every machine, and the differences that keys must show."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from dataclasses import asdict, fields, replace

import pytest

from quire.cache.keys import ChunkKeys, namespace_key, num_common
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.namespace import Namespace
from tests.effort import tries

SPACE = Namespace(model="a model", dtype="bfloat16", codec="nuq3", salt="somebody")


def test_keys_are_a_chain_of_digests() -> None:
    tokens = [7 * place % 50_257 for place in range(3 * PAGE_TOKENS + 5)]
    keys = ChunkKeys(SPACE, tokens)
    key = hashlib.blake2b(json.dumps(asdict(SPACE), sort_keys=True).encode(), digest_size=16).digest()
    assert key == namespace_key(SPACE)
    expected = []
    for start in range(0, 3 * PAGE_TOKENS, PAGE_TOKENS):
        part = struct.pack(f"<{PAGE_TOKENS}i", *tokens[start : start + PAGE_TOKENS])
        key = hashlib.blake2b(key + part, digest_size=16).digest()
        expected.append(key)
    assert keys.first(1) == expected[:1] and keys.first(100) == expected, "of whole chunks alone"
    assert keys.tokens(1, 3).tolist() == tokens[PAGE_TOKENS : 3 * PAGE_TOKENS]
    tokens += range(PAGE_TOKENS)
    assert keys.first(100)[:3] == expected and len(keys.first(100)) == 4, "the sequence has grown"


def test_keys_are_the_same_on_every_machine_and_python() -> None:
    """What is kept on disk or sent has these names: another value is another format."""
    assert namespace_key("model").hex() == "eaeb9aa650f8b8ba62ebcb4ff27bc5f6"
    assert ChunkKeys("model", list(range(128))).first(2)[1].hex() == "00f75cfd81c2f1c3974ea1f4f790c66f"
    assert namespace_key(Namespace(version=3)).hex() == "49de367ffe87019fe15cf63f9e066dbd"


@pytest.mark.parametrize("name", [each.name for each in fields(Namespace)])
def test_every_field_of_a_namespace_changes_all_keys(name: str) -> None:
    value = getattr(SPACE, name)
    other = replace(SPACE, **{name: not value if isinstance(value, bool) else value * 2 or "other"})
    tokens = [1] * PAGE_TOKENS
    assert ChunkKeys(SPACE, tokens).first(1) != ChunkKeys(other, tokens).first(1)


def test_common_keys_are_counted_like_common_chunks(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(tries(200)):
        left, right = ([rng.randrange(2) for _ in range(rng.randrange(9))] for _ in range(2))
        same = 0
        while same < min(len(left), len(right)) and left[same] == right[same]:
            same += 1
        one, other = (
            ChunkKeys("model", [letter for letter in letters for _ in range(PAGE_TOKENS)]).first(9)
            for letters in (left, right)
        )
        assert num_common(one, other) == same
