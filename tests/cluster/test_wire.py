"""Messages as bytes: every message comes back as it was, and other bytes are refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.cluster import messages, wire
from quire.cluster.messages import Ack, Attempt, ManifestRequest

from ..effort import examples, tries


@dataclass(frozen=True)
class Inner:
    numbers: list[float]
    name: str | None = None


@dataclass
class Everything:
    """A message of all types that fields may have."""

    attempt: Attempt
    inner: Inner
    tokens: NDArray[np.int32]
    anything: NDArray[Any]
    truths: NDArray[np.bool_]
    data: bytes = b"\0\xff"
    seconds: float = 0.5
    parts: frozenset[int] = frozenset((1, 2))
    by_name: dict[str, list[Inner]] = field(default_factory=dict)


wire.register(Everything)

ATTEMPTS = st.builds(Attempt, st.integers(0, 2**63 - 1), st.integers(0, 2**31))


def ints_in(value: Any) -> Iterator[int]:
    """The integers anywhere in a message."""
    if isinstance(value, int):
        yield value
    elif is_dataclass(value):
        for each in fields(value):
            yield from ints_in(getattr(value, each.name))
    elif isinstance(value, dict):
        yield from ints_in([*value, *value.values()])
    elif isinstance(value, list | tuple | frozenset):
        for each in value:
            yield from ints_in(each)


@given(st.sampled_from(get_args(messages.Message)).flatmap(lambda kind: st.builds(kind, attempt=ATTEMPTS)))
@examples(60, deadline=None)
def test_every_message_of_the_protocol_survives(message: Any) -> None:
    if not all(-(2**63) <= value < 2**64 for value in ints_in(message)):
        with pytest.raises(wire.WireError):
            wire.encode(message)
        return
    again = wire.decode(wire.encode(message))
    assert again == message and type(again) is type(message)


def everything(rng: np.random.Generator) -> Everything:
    shape = tuple(rng.integers(0, 4, rng.integers(0, 4)).tolist())
    dtype = sorted(wire.DTYPES)[rng.integers(len(wire.DTYPES))]
    anything = np.asarray(rng.integers(0, 2, shape)).astype(dtype)
    tokens = np.arange(20, dtype=np.int32).reshape(4, 5)[:, :: int(rng.integers(1, 3))]
    return Everything(
        Attempt(1, np.int64(2)), Inner([1.5, 2], "ä"), tokens, anything, tokens > 3, by_name={"x": [Inner([])]}
    )  # fmt: skip


def test_arrays_survive_with_dtype_and_shape() -> None:
    rng = np.random.default_rng(random.randrange(2**32))
    for _ in range(tries(50)):
        message = everything(rng)
        again = wire.decode(wire.encode(message))
        for each in fields(Everything):
            before, after = getattr(message, each.name), getattr(again, each.name)
            if isinstance(before, np.ndarray):
                assert (after.dtype, after.shape) == (before.dtype, before.shape), each.name
                np.testing.assert_array_equal(after, before)
            else:
                assert after == before, each.name


@pytest.mark.parametrize(
    "array", [np.zeros(2, ">i4"), np.zeros(2, object), np.zeros(2, "M8[s]"), np.zeros(2, "U3"), np.zeros(2, "c8")]
)
def test_arrays_that_are_no_plain_numbers_do_not_travel(array: np.ndarray[Any, Any]) -> None:
    message = everything(np.random.default_rng(0))
    message.anything = array
    with pytest.raises(wire.WireError, match="do not travel"):
        wire.encode(message)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("tokens", ["<i8", [1], bytes(8)], "must be one of int32"),
        ("tokens", ["<i4", [2], bytes(7)], "7 bytes"),
        ("tokens", ["<i4", [-1, -1], bytes(4)], "shape"),
        ("tokens", ["<i4", [0, 2**62], b""], "too big"),
        ("tokens", ["<i4", [1] * 65, bytes(4)], "maximum supported dimension"),
        ("anything", ["|O8", [1], bytes(8)], "an array of '|O8'"),
        ("anything", [">i4", [1], bytes(4)], "an array of '>i4'"),
        ("anything", "text", "Expected `array`"),
        ("truths", ["|b1", [2], b"\1\2"], "truth values"),
        ("parts", ["x"], "Expected `int`"),
        ("inner", {"numbers": [1.0], "name": 3}, "Expected `str | null`"),
    ],
)
def test_fields_are_checked(name: str, value: Any, reason: str) -> None:
    kind, plain = msgspec.msgpack.decode(wire.encode(everything(np.random.default_rng(0))))
    plain[name] = value
    with pytest.raises(wire.WireError) as caught:
        wire.decode(msgspec.msgpack.encode((kind, plain)))
    assert reason in str(caught.value)


@given(st.binary(max_size=60), st.integers(0, 2**32 - 1))
@examples(150, deadline=None)
def test_bytes_that_are_no_message_raise_one_error(noise: bytes, seed: int) -> None:
    """Noise, noise in the place of the fields, and messages with a few bytes replaced or cut off."""
    rng = random.Random(seed)
    whole = bytearray(wire.encode(everything(np.random.default_rng(seed))))
    for _ in range(rng.randint(1, 4)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    name = rng.choice(list(wire.KINDS)).encode()
    for data in (noise, b"\x92" + bytes([0xA0 + len(name)]) + name + noise, whole, whole[: rng.randrange(len(whole))]):
        try:
            message = wire.decode(bytes(data))
        except wire.WireError:
            continue
        assert is_dataclass(message)


@pytest.mark.parametrize(
    "data", [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\x92\xa3Ask\x81\xa7attempt" + b"\x91" * 99_999]
)
def test_deep_and_endless_messages_raise_it_too(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(data)


def test_two_classes_of_one_name_are_a_mistake() -> None:
    wire.register(Ack)
    with pytest.raises(AssertionError, match="two classes of messages are called Ack"):
        wire.register(type("Ack", (ManifestRequest,), {}))
