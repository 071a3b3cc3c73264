"""Loads the compiled CPU kernels once. They run on torch's own thread pool."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from quire.errors import QuireError
from quire.kernels import load

log = logging.getLogger("quire")

_I32, _I64, _F32, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

DTYPE_IDS = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
"""The kernels' number of each dtype, for tensors and dense pages; `common.h` has the same numbers."""

_OPENMP_SYMBOLS = ("GOMP_parallel", "omp_get_num_threads")

SIGNATURES: dict[str, list[type]] = {
    "quire_threads": [_PTR, _PTR, _I32],
    "quire_stack": [_PTR, _PTR, _I64, _PTR, _PTR, _I64],
    "quire_attend": [_PTR, _I32, _PTR, _I64, _PTR],
    "quire_recover": [_PTR, _I32, _PTR, _I64, _PTR, _PTR],
    "quire_add_norm": [_I32, _PTR, _I64, _PTR, _PTR, _F32, _I64, _I64, _I64, _PTR],
    "quire_pack_linear": [_PTR, _I64, _I64, _I32, _PTR],
    "quire_pack_blocks": [_I32, _PTR, _I64, _I64, _I32, _PTR],
    "quire_panel_rows": [_I32, _PTR, _I64, _PTR, _I64, _I32, _PTR],
    "quire_multiply": [_PTR, _PTR, _I32, _PTR],
    "quire_argmax": [_PTR, _I64, _I64, _I64, _PTR],
    "quire_keep_allowed": [_PTR, _I64, _PTR, _I64, _I64],
    "quire_nuq_encode": [_PTR, _I32, _I32, _PTR, _PTR, _I64, _PTR],
    "quire_nuq_decode": [_PTR, _I32, _PTR, _I64, _PTR, _PTR],
    "quire_group_encode": [_I32, _I32, _PTR, _PTR, _PTR, _I64, _PTR],
    "quire_group_decode": [_I32, _PTR, _PTR, _I64, _PTR, _PTR],
    "quire_move_slots": [_PTR, _PTR, _PTR, _PTR, _PTR, _PTR, _I64],
    "quire_gated": [_I32, _I32, _PTR, _I64, _I64, _PTR],
    "quire_layer_norm": [_I32, _PTR, _PTR, _PTR, _F32, _I64, _I64, _PTR],
}


def prepare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the signatures and passes torch's threads to the library."""
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.quire_query_steps.argtypes, library.quire_query_steps.restype = [_I32, _PTR], _I64
    library.quire_left_out.restype = _I32
    library.quire_panel_bytes.argtypes, library.quire_panel_bytes.restype = [_I32, _I64], _I64
    library.quire_quantized_bytes.argtypes, library.quire_quantized_bytes.restype = [_I32, _I64, _I64], _I64
    library.quire_threads(*_openmp(), num_threads())
    return library


def kernels() -> ctypes.CDLL:
    """The kernels for this CPU, or for the level that was set."""
    return _kernels(_level)


@functools.cache
def _kernels(level: str | None) -> ctypes.CDLL:
    return prepare(load(level))


_level: str | None = None


def set_level(level: str | None) -> None:
    """Sets the kernels' level for the whole process; None is this CPU's best. Pages and packed weights are the same on
    all levels. Raises ConfigError for a level that this processor lacks.
    """
    global _level
    _kernels(level).quire_threads(*_openmp(), num_threads())
    _level = level


class _Field(ctypes.Structure):
    """Mirror of `Field` in fields.h."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", _I64), ("size", _I64))


def check_mirrors(*mirrors: type[ctypes.Structure]) -> None:
    """Compares structures that the kernels read with their Python mirrors: every field's name, offset and size.

    A mirror has the name of its structure, with or without an underscore before it. Raises QuireError that names the
    first field that differs.
    """
    library = kernels()
    for mirror in mirrors:
        _check_mirror(library, mirror)


@functools.cache
def _check_mirror(library: ctypes.CDLL, mirror: type[ctypes.Structure]) -> None:
    name = mirror.__name__.lstrip("_")
    export = getattr(library, f"quire_fields_{name}")
    export.restype = ctypes.POINTER(_Field)
    table = export()
    theirs: list[str] = []
    while (field := table[len(theirs)]).name is not None:
        theirs.append(_described(field.name.decode(), field))
    theirs.append(f"its end (byte {field.offset})")
    ours = [_described(named[0], getattr(mirror, named[0])) for named in mirror._fields_]
    ours.append(f"its end (byte {ctypes.sizeof(mirror)})")
    for there, here in zip(theirs, ours, strict=False):
        if there != here:
            raise QuireError(f"the kernels' {name} has {there} where its Python mirror has {here}")


def _described(name: str, field: Any) -> str:
    return f"{name} (byte {field.offset}, {field.size} bytes)"


def level() -> str:
    """The level of the loaded kernels. It may be lower than this CPU's best, if that library is missing."""
    return Path(kernels()._name).stem.rpartition("_")[2]


def num_threads() -> int:
    """Number of threads of the kernels, the same as torch's."""
    return torch.get_num_threads()


def set_num_threads(count: int) -> None:
    """Sets torch's and the kernels' thread count together."""
    torch.set_num_threads(count)
    kernels().quire_threads(*_openmp(), count)


@contextlib.contextmanager
def limited_torch_threads() -> Iterator[None]:
    """Within the context, torch's own operations on this thread use as many threads as the kernels do at the moment.

    If another program holds a core, torch waits milliseconds per operation for the thread on that core. The kernels
    leave out a thread that was late (`thread_pool.h`), so they know how many cores are free.
    """
    openmp, left_out = _openmp_library(), kernels().quire_left_out()
    if openmp is None or not left_out:
        yield
        return
    # Not torch's setter: it also sets the number of threads for new threads.
    threads = num_threads()
    try:
        openmp.omp_set_num_threads(max(1, threads - left_out))
        yield
    finally:
        openmp.omp_set_num_threads(threads)


@functools.cache
def _openmp_library() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch loaded. Without one, logs a warning once and returns None: the kernels then run on
    the calling thread.
    """
    torch.get_num_threads()
    maps = Path("/proc/self/maps")
    paths = sorted(set(re.findall(r"(/\S*lib(?:gomp|iomp5|omp)\S*\.so\S*)", maps.read_text()))) if maps.exists() else []
    inside_torch = str(Path(torch.__file__).parent)
    for path in sorted(paths, key=lambda path: not path.startswith(inside_torch)):
        library = ctypes.CDLL(path)
        if all(hasattr(library, name) for name in (*_OPENMP_SYMBOLS, "omp_set_num_threads")):
            return library
    log.warning("no OpenMP runtime found in torch's process: the CPU kernels use one thread")
    return None


def _openmp() -> tuple[int | None, int | None]:
    """Addresses of GOMP_parallel and omp_get_num_threads in that runtime, if there is one."""
    library = _openmp_library()
    if library is None:
        return None, None
    parallel, count_threads = (ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _OPENMP_SYMBOLS)
    return parallel, count_threads
