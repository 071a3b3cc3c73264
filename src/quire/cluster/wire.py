"""The bytes of messages: msgpack of [name of the class, fields].

Knows the registered classes, and checks messages against their annotations. Bytes of a peer cannot create other
objects. Knows no connection.

A message is a dataclass or a named tuple. Fields may have types of msgspec, and numpy arrays: [dtype, shape, bytes].
Arrays that arrive are read-only.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, get_args

import msgspec
import numpy as np

from quire.cluster import messages
from quire.errors import QuireError

DTYPES = frozenset(("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"))
"""Types of arrays that messages may contain."""


class WireError(QuireError):
    """A message that cannot be encoded, or bytes that are no message."""


KINDS: dict[str, type] = {}
"""The registered classes, by name. `register` adds to it."""

_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {}


def register(*types: type) -> None:
    """Lets further classes travel. All processes of a cluster must register the same ones."""
    for each in types:
        name = each.__name__
        assert KINDS.get(name, each) is each, f"two classes of messages are called {name}"
        _DECODERS[name] = msgspec.msgpack.Decoder(each, dec_hook=_array_of)
        KINDS[name] = each


def encode(message: Any) -> bytes:
    """Encodes a message. Raises WireError if its class is not registered, or a field has an unsupported value."""
    kind = type(message).__name__
    if KINDS.get(kind) is not type(message):
        raise WireError(f"{kind} is no class of messages; wire.register({kind}) makes it one")
    try:
        return _ENCODER.encode((kind, message))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"{kind} cannot be encoded: {error}") from error


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Decodes a message. Raises WireError for any invalid bytes."""
    try:
        kind, fields = _ENVELOPE.decode(data)
        if (decoder := _DECODERS.get(kind)) is None:
            raise WireError(f"a message of the unknown class {kind[:80]!r}")
        return decoder.decode(fields)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise WireError(f"no message: {error}") from error


def _plain(value: Any) -> Any:
    """The encoding of numpy's arrays and numbers, for msgspec."""
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a field holds {type(value).__name__}")
    if value.dtype.str not in DTYPES:
        raise TypeError(f"arrays of {value.dtype.str} do not travel; those of {', '.join(sorted(DTYPES))} do")
    return value.dtype.str, value.shape, value.tobytes()


def _array_of(wanted: Any, value: Any) -> Any:
    """Decodes an array from [dtype, shape, bytes]. wanted: its annotation, such as NDArray[np.int32] or np.ndarray.

    A namespace must be None: only private runs travel, and they have none.
    """
    if wanted is Hashable and value is None:
        return None
    arguments = get_args(wanted)
    if (wanted if not arguments else wanted.__origin__) is not np.ndarray:
        raise TypeError(f"nothing here builds {wanted}")
    dtype, shape, data = msgspec.convert(value, tuple[str, tuple[int, ...], bytes])
    if dtype not in DTYPES:
        raise ValueError(f"an array of {dtype[:20]!r}")
    scalars = get_args(arguments[1]) if len(arguments) == 2 else ()
    if scalars and scalars[0] is not Any and not issubclass(np.dtype(dtype).type, scalars[0]):
        raise ValueError(f"an array of {dtype}, and it must be one of {scalars[0].__name__}")
    if min(shape, default=0) < 0 or math.prod(shape) * np.dtype(dtype).itemsize != len(data):
        raise ValueError(f"an array of shape {shape[:8]} has {len(data)} bytes of {dtype}")
    if dtype == "|b1" and data.strip(b"\0\1"):
        raise ValueError("truth values other than 0 and 1")
    return np.ndarray(shape, dtype, data)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_ENVELOPE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])

register(*get_args(messages.Message))
