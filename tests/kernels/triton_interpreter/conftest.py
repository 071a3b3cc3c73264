"""Collected only if TRITON_INTERPRET=1 was set before triton was imported, as tests/conftest.py does.

The interpreter stores bfloat16 as 16-bit integers. It truncates float32 where a GPU rounds to nearest, and its dot
product multiplies the integers. Both are corrected here.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from .faster import install

    _cast, _dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def _cast_impl(self, source, target):  # type: ignore[no-untyped-def]
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(source.data).view(np.uint32)
            rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            return TensorHandle(np.where(np.isnan(source.data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)
        return _cast(self, source, target)

    def _create_dot(self, a, b, *rest):  # type: ignore[no-untyped-def]
        a, b = (_cast_impl(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return _dot(self, a, b, *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = _cast_impl, _create_dot
    install()
else:
    collect_ignore_glob = ["test_*.py"]
