"""Makes Triton's interpreter three times as fast for kernels of many small operations.

Originally, it replaces the functions of `triton.language` again for each call of a device function, which takes 5
ms. It makes types, shapes and tables of types again for each operation. It repeats integer operations in 64 bits to
detect overflow, which a quick run leaves out. Results do not change.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

from tests.effort import EFFORT


class _NoScope:
    def restore(self) -> None: ...


def install() -> None:
    """Makes this process's interpreter faster, for good."""
    interpreter._patch_lang = _once_for_each_module(interpreter._patch_lang)
    interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype)
    tl.core.pointer_type.__hash__ = lambda self: hash(self.name)
    tl.core.block_type.__hash__ = lambda self: hash((self.element_ty, self.shape))
    tl.core.block_type.__new__ = staticmethod(_block_type)
    tl.core.block_type.__init__ = lambda self, element_ty, shape: None
    tl.core.tensor.__init__ = _tensor
    if EFFORT == "quick":
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _once_for_each_module(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter's `patch` of what a function sees of the language, once for each set of modules it sees."""
    patched = set()

    @functools.cache
    def seen(function: Any) -> frozenset[int]:
        return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)

    def patch_once(function: Any) -> _NoScope:
        found = seen(function)
        if found not in patched:
            patched.add(found)
            patch(function)
        return _NoScope()

    return patch_once


_make_block_type = tl.core.block_type.__init__
_block_types: dict[Any, Any] = {}


def _block_type(cls: Any, element_ty: Any, shape: Any) -> Any:
    key = element_ty, tuple(tl.core._unwrap_shape(shape))
    found = _block_types.get(key)
    if found is None:
        found = _block_types[key] = object.__new__(cls)
        _make_block_type(found, element_ty, shape)
    return found


def _tensor(self: Any, handle: Any, type: Any) -> None:
    shape, numel = _shape(type.shape if type.is_block() else ())
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = shape, numel


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """A tensor's shape and number of elements, as the language has them."""
    numel = 1
    for size in sizes:
        numel *= size
    return tl.core.tuple([tl.core.constexpr(size) for size in sizes]), tl.core.constexpr(numel)
