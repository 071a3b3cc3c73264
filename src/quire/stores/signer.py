"""Signatures of extents: a checksum proves that bytes are undamaged, a MAC that their author knows the folder's
secret.

    checksum = first 16 bytes of BLAKE3 of: names, the header with zero checksum and MAC, all bytes after the header
    MAC      = BLAKE3, keyed with the secret, of the header with its checksum and a zero MAC

The checksum covers the run's names, so an extent cannot replace another run's extent. BLAKE3 instead of BLAKE2b: 4.5
against 0.9 GB/s on one core of an EPYC, and it releases the interpreter lock.
"""

from __future__ import annotations

import hmac
import struct

from blake3 import blake3

from quire.cache.run import CHECKSUM, MAC
from quire.errors import ExtentError

HEADER_BYTES = MAC.stop
_LENGTH, _LENGTH_AT = struct.Struct("<Q"), 24

SECRET_BYTES = 32


class ExtentSigner:
    """Signs and verifies extents and run headers: bytes that begin with the header of an extent
    (docs/reference/page-format.md).
    """

    def __init__(self, secret: bytes | None) -> None:
        """secret: 32 bytes; None: verifies only checksums, for bytes that an administrator imports."""
        assert secret is None or len(secret) == SECRET_BYTES, "a secret of another length"
        self._secret = secret

    @property
    def is_check_only(self) -> bool:
        """Whether it has no secret: it can verify checksums, but not sign."""
        return self._secret is None

    def sign(self, names: bytes, extent: memoryview) -> None:
        """Writes checksum and MAC into the header. names: the run's names, joined."""
        extent[CHECKSUM] = _checksum(names, extent)
        extent[MAC] = self._mac(extent)

    def verify(self, names: bytes, extent: memoryview) -> None:
        """Raises ExtentError unless `sign` wrote these bytes."""
        if len(extent) < HEADER_BYTES:
            raise ExtentError(f"{len(extent)} bytes have no header")
        (length,) = _LENGTH.unpack_from(extent, _LENGTH_AT)
        if length != len(extent) - HEADER_BYTES:
            raise ExtentError(f"a header says {length} bytes, and {len(extent) - HEADER_BYTES} follow it")
        if not hmac.compare_digest(bytes(extent[CHECKSUM]), _checksum(names, extent)):
            raise ExtentError("damaged, or of another run: the checksum differs")
        if self._secret is not None and not hmac.compare_digest(bytes(extent[MAC]), self._mac(extent)):
            raise ExtentError("written under another secret: the MAC differs")

    def _mac(self, extent: memoryview) -> bytes:
        assert self._secret is not None, "no secret"
        return blake3(bytes(extent[: MAC.start]) + bytes(32), key=self._secret).digest()


def _checksum(names: bytes, extent: memoryview) -> bytes:
    hashed = blake3(names + bytes(extent[: CHECKSUM.start]) + bytes(HEADER_BYTES - CHECKSUM.start))
    return hashed.update(extent[HEADER_BYTES:]).digest(length=16)
