"""Run heads: bytes that anybody changed, moved or wrote without the secret are refused."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from quire.errors import ExtentError
from quire.stores.headers import RunHeader, common_digest, encode_run_header, parse_run_header
from quire.stores.signer import ExtentSigner
from tests.stores.test_signer import SECRET

from ..disk_runs import NAMESPACE, FakeRun
from ..effort import tries


@pytest.mark.parametrize("attached", [0, 2])
@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("secret", [SECRET, None])
def test_a_head_says_everything_of_its_run(attached: int, start: int, secret: bytes | None) -> None:
    run = FakeRun(3, 4, attached=attached, start=start, namespace=replace(NAMESPACE, salt="ä\n", strict=False)).run
    lengths = (80, 5000, 1 << 30)
    header = parse_run_header(encode_run_header(RunHeader(run, lengths), ExtentSigner(SECRET)), ExtentSigner(secret))
    assert header.lengths == lengths
    for name in ("names", "is_shared", "num_attached", "namespace", "start", "parent"):
        assert getattr(header.run, name) == getattr(run, name)
    for name in ("tokens", "kinds", "masks", "placed", "bases", "has_sidecar"):
        found = getattr(header.run, name)
        np.testing.assert_array_equal(found, getattr(run, name))
        assert found.dtype == getattr(run, name).dtype


def test_any_damage_to_a_head_is_an_extent_error(seed: int) -> None:
    rng = random.Random(seed)
    blob = encode_run_header(RunHeader(FakeRun(seed, 3, attached=1).run, (100, 200, 300)), ExtentSigner(SECRET))
    for _ in range(tries(300)):
        changed = bytearray(blob)
        match rng.randrange(4):
            case 0:
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            case 1:
                del changed[rng.randrange(len(changed)) :]
            case 2:
                changed += rng.randbytes(rng.randrange(1, 100))
            case _:
                at = rng.randrange(len(changed))
                changed[at : at + 8] = rng.randbytes(8)
        if changed != blob:
            with pytest.raises(ExtentError):
                parse_run_header(bytes(changed), ExtentSigner(SECRET))
    for junk in (b"", b"QHED", rng.randbytes(80), rng.randbytes(5000), bytes(5000)):
        with pytest.raises(ExtentError):
            parse_run_header(junk, ExtentSigner(SECRET))


def test_any_contents_under_a_valid_seal_are_a_head_or_an_extent_error(seed: int) -> None:
    """What a stranger may send whose checksums are right."""
    rng = random.Random(seed)
    blob = encode_run_header(RunHeader(FakeRun(seed, 3, attached=1).run, (100, 200, 300)), ExtentSigner(SECRET))
    num_refused = 0
    for _ in range(tries(400)):
        changed = bytearray(blob)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(8, 24) if rng.random() < 0.3 else rng.randrange(80, len(changed))
            size = rng.choice([1, 4, 8])
            changed[at : at + size] = rng.choice([bytes(size), b"\xff" * size, rng.randbytes(size)])
        if rng.random() < 0.3:
            del changed[rng.randrange(80, len(changed)) :]
        changed[24:32] = (len(changed) - 80).to_bytes(8, "little")
        ExtentSigner(SECRET).sign(b"", memoryview(changed))
        for secret in (SECRET, None):
            try:
                header = parse_run_header(bytes(changed), ExtentSigner(secret))
                assert len(header.run.masks) == len(header.run.kinds) == len(header.run.names) + header.run.num_attached
            except ExtentError:
                num_refused += 1
    assert num_refused > tries(100)


def test_a_strangers_tokens_must_have_the_keys_of_its_chunks() -> None:
    run = replace(FakeRun(1).run, tokens=FakeRun(2).run.tokens)
    blob = encode_run_header(RunHeader(run, (100, 100, 100)), ExtentSigner(SECRET))
    with pytest.raises(ExtentError, match="other keys"):
        parse_run_header(blob, ExtentSigner(None))


def test_a_salt_is_no_other_model() -> None:
    assert common_digest(replace(NAMESPACE, salt="x")) == common_digest(NAMESPACE)
    for changes in ({"model": "n"}, {"codec": "g4"}, {"calibration": "c"}, {"version": 99}, {"strict": False}):
        assert common_digest(replace(NAMESPACE, **changes)) != common_digest(NAMESPACE)
