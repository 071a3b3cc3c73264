"""Makes Triton's interpreter several times as fast for kernels of many small operations.

Originally, it replaces the functions of `triton.language` again for each call of a device function, which takes 5
ms. It makes types, shapes and tables of types again for each operation, and it finds out again how two types are
broadcast. It repeats integer operations in 64 bits to detect overflow and checks the size of every array, which a quick
run leaves out. Results do not change.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.effort import IS_FULL


class _NoScope:
    def restore(self) -> None: ...


def install() -> None:
    """Makes this process's interpreter faster, for good."""
    interpreter._patch_lang = _once_for_each_module(interpreter._patch_lang)
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype)
    tl.core._unwrap_if_constexpr = tl._unwrap_if_constexpr = _unwrap
    tl.core.dtype.__eq__ = _same_or(tl.core.dtype.__eq__)
    tl.core.pointer_type.__eq__ = _same_or(tl.core.pointer_type.__eq__)
    tl.core.pointer_type.__hash__ = lambda self: hash(self.name)
    tl.core.pointer_type.__new__ = staticmethod(_pointer_type)
    tl.core.block_type.__eq__ = _same_or(tl.core.block_type.__eq__)
    tl.core.block_type.__hash__ = lambda self: hash(self.name)
    tl.core.block_type.__new__ = staticmethod(_block_type)
    tl.core.block_type.__init__ = lambda self, element_ty, shape: None
    tl.core.tensor.__init__ = _tensor
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.binary_op_type_checking_impl = _operands
    if not IS_FULL:
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
        interpreter.TensorHandle.__post_init__ = lambda self: None


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


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """The interpreter's function of this name, with one call less for each operation."""
    for name, member in inspect.getmembers(package):
        if tl.core.is_builtin(member):
            scope.set_attr(package, name, _with_semantic(inspect.unwrap(member)))


def _with_semantic(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        more["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **more)

    return call


_unwrap_any = tl.core._unwrap_if_constexpr
_PLAIN = frozenset((int, bool, float, str, type(None), tl.dtype, tl.core.block_type, tl.core.pointer_type, tl.tensor))


def _unwrap(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    return value.value if kind is tl.constexpr else _unwrap_any(value)


def _same_or(equals: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equals(self, other)


_make_block_type = tl.core.block_type.__init__
_block_types: dict[Any, Any] = {}


def _block_type(cls: Any, element_ty: Any, shape: Any) -> Any:
    key = element_ty, tuple([size.value if type(size) is tl.constexpr else size for size in shape])
    found = _block_types.get(key)
    if found is None:
        found = _block_types[key] = object.__new__(cls)
        _make_block_type(found, element_ty, shape)
        found.of_tensors = _shape_of(found.shape)
    return found


@functools.cache
def _one_pointer_type(element_ty: Any, address_space: int, const: bool) -> Any:
    return object.__new__(tl.core.pointer_type)


def _pointer_type(cls: Any, element_ty: Any, address_space: int = 1, const: bool = False) -> Any:
    return _one_pointer_type(_unwrap(element_ty), address_space, const)


def _shape_of(sizes: Any) -> tuple[Any, Any]:
    """A tensor's shape and number of elements, as the language has them."""
    numel = 1
    for size in sizes:
        numel *= size
    return tl.core.tuple([tl.core.constexpr(size) for size in sizes]), tl.core.constexpr(numel)


_SCALAR = _shape_of(())


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensors if type.is_block() else _SCALAR


_broadcast_any = TritonSemantic.broadcast_impl_value
_broadcasts: dict[tuple[int, int], tuple[Any, ...]] = {}
"""By the ids of two types: both types, which keeps their ids theirs, and what they become."""


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    if lhs.type is rhs.type:
        return lhs, rhs
    known = _broadcasts.get((id(lhs.type), id(rhs.type)))
    if known is None:
        types = lhs.type, rhs.type
        lhs, rhs = _broadcast_any(self, lhs, rhs)
        _broadcasts[id(types[0]), id(types[1])] = *types, lhs.type, rhs.type
        return lhs, rhs
    return _spread(lhs, known[2]), _spread(rhs, known[3])


def _spread(tensor: Any, wanted: Any) -> Any:
    if tensor.type is wanted:
        return tensor
    handle = tensor.handle
    data, dtype = handle.data, interpreter._get_np_dtype(handle.dtype)
    if data.dtype != dtype:
        data = data.astype(dtype)
    shape = tuple(wanted.shape)
    # Most have one element. An array with strides of zero is made in a fraction of the time of `broadcast_to`.
    spread = np.ndarray(shape, dtype, data, 0, (0,) * len(shape)) if data.size == 1 else np.broadcast_to(data, shape)
    return tl.tensor(interpreter.TensorHandle(spread, handle.dtype.scalar), wanted)


def _cast(semantic: Any, tensor: Any, wanted: Any) -> Any:
    return tensor if tensor.dtype is wanted else semantic.cast(tensor, wanted)


_operands_of_any = TritonSemantic.binary_op_type_checking_impl
_of_tensors: dict[Any, tuple[Any, ...]] = {}
_of_numbers: dict[Any, tuple[Any, ...]] = {}


def _operands(self: Any, lhs: Any, rhs: Any, *flags: Any, **more: Any) -> tuple[Any, Any]:
    """Both operands in the type in which they are computed."""
    if type(lhs) is not tl.tensor:
        return _operands_of_any(self, lhs, rhs, *flags, **more)
    key = id(lhs.type), flags, *more.items()
    if type(rhs) is tl.tensor:
        known = _of_tensors.get((id(rhs.type), key))
        if known is not None:
            return _broadcast(self, _cast(self, lhs, known[2]), _cast(self, rhs, known[3]))
        types = lhs.type, rhs.type
        lhs, rhs = _operands_of_any(self, lhs, rhs, *flags, **more)
        _of_tensors[id(types[1]), key] = *types, lhs.dtype, rhs.dtype
        return lhs, rhs
    if type(rhs) in (int, float, bool):
        number = type(rhs), rhs.hex() if type(rhs) is float else rhs, key
        known = _of_numbers.get(number)
        if known is not None:
            return _cast(self, lhs, known[1]), known[2]
        before = lhs.type
        lhs, rhs = _operands_of_any(self, lhs, rhs, *flags, **more)
        _of_numbers[number] = before, lhs.dtype, rhs
        return lhs, rhs
    return _operands_of_any(self, lhs, rhs, *flags, **more)
