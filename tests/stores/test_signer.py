"""Seals: bytes that anybody changed, moved or wrote without the secret are refused."""

from __future__ import annotations

import random

from blake3 import blake3

from quire.cache.run import layer_of
from quire.errors import ExtentError
from quire.stores.signer import ExtentSigner

from ..disk_runs import FakeRun
from ..effort import tries

SECRET, OTHER = bytes(range(32)), bytes(32)


def closed(fake: FakeRun, layer: int, secret: bytes = SECRET) -> bytearray:
    extent = bytearray(fake.extents[layer])
    ExtentSigner(secret).sign(b"".join(fake.names), memoryview(extent))
    return extent


def refuses(signer: ExtentSigner, names: bytes, extent: bytes) -> bool:
    try:
        signer.verify(names, memoryview(extent))
    except ExtentError:
        return True
    return False


def test_checksum_and_mac_are_those_of_the_page_format() -> None:
    fake = FakeRun(1)
    extent, names = closed(fake, 2), b"".join(fake.names)
    assert layer_of(memoryview(extent)) == 2
    assert extent[:32] == fake.extents[2][:32] and extent[80:] == fake.extents[2][80:]
    assert extent[32:48] == blake3(names + fake.extents[2]).digest()[:16]
    assert extent[48:80] == blake3(bytes(extent[:48]) + bytes(32), key=SECRET).digest()
    assert not refuses(ExtentSigner(SECRET), names, extent) and not refuses(ExtentSigner(None), names, extent)


def test_every_flipped_bit_of_a_header_and_many_behind_it_are_found(seed: int) -> None:
    rng, fake = random.Random(seed), FakeRun(seed)
    extent, names = closed(fake, 0), b"".join(fake.names)
    for bit in [*range(640), *(rng.randrange(8 * len(extent)) for _ in range(tries(200)))]:
        changed = bytearray(extent)
        changed[bit // 8] ^= 1 << bit % 8
        assert refuses(ExtentSigner(SECRET), names, changed), f"bit {bit}"
        assert refuses(ExtentSigner(None), names, changed) == (not 48 <= bit // 8 < 80), (
            "the MAC alone needs the secret"
        )
    for length in (0, 1, 79, 80, 81, len(extent) - 1):
        assert refuses(ExtentSigner(SECRET), names, extent[:length])
    assert refuses(ExtentSigner(SECRET), names, extent + b"x")


def test_an_extent_of_another_run_or_secret_is_refused() -> None:
    fake, other = FakeRun(1), FakeRun(2)
    names, others = b"".join(fake.names), b"".join(other.names)
    assert refuses(ExtentSigner(SECRET), names, closed(other, 0))
    assert refuses(ExtentSigner(SECRET), others, closed(fake, 0))
    foreign = closed(fake, 0, OTHER)
    assert refuses(ExtentSigner(SECRET), names, foreign) and not refuses(ExtentSigner(None), names, foreign)
