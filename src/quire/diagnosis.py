"""Examines this machine: what it has, what Quire will use, and why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.config import format_bytes
from quire.errors import QuireError
from quire.extras import install_command
from quire.folders import user_cache
from quire.version import __version__

LEAST_DISK = 2 << 30
"""Free bytes of the cache folder below which a download may fail: the embedded model and compiled kernels fit."""

LEAST_SHARED = 256 << 20
"""Free bytes of /dev/shm below which instances may run out of room for the caches they hand over."""

EXTRAS = {
    "serve": ("fastapi", "uvicorn", "msgspec"),
    "plot": ("matplotlib",),
    "cluster": ("ray",),
}
"""Packages of each optional part."""

USES = {"cluster": "instances on several machines, and not needed for those of one"}
"""The uses of optional parts whose names promise too much."""


@dataclass(frozen=True)
class Finding:
    """The result of examining one thing.

    state  ok; note: something is slower, or a part is missing; fault: models cannot run
    """

    state: Literal["ok", "note", "fault"]
    what: str
    text: str


def examine() -> Iterator[Finding]:
    """Examines everything, the most general first."""
    yield Finding("ok", "quire", f"{__version__} in {Path(__file__).parent}, Python {platform.python_version()}")
    first = list(_torch())
    yield from first
    if first[0].state == "fault":
        return
    yield from _processor()
    folders = list(_folders())
    if folders[0].state != "fault":
        yield from _kernels()
    yield from _memory()
    yield from folders
    yield from _parts()


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:  # a library of another machine
        yield Finding("fault", "torch", f"cannot be imported: {error}")
        return

    from quire.engine.machine import device_type_of

    device = device_type_of("auto")
    yield Finding("ok", "torch", torch.__version__)
    if device == "cpu":
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        yield Finding("ok", "device", f"cpu, because {why}; attention.backend is cpu")
        return
    names = ", ".join(
        f"{torch.cuda.get_device_name(index)} ({format_bytes(torch.cuda.get_device_properties(index).total_memory)})"
        for index in range(torch.cuda.device_count())
    )
    has_triton = importlib.util.find_spec("triton") is not None
    backend = "attention.backend is triton" if has_triton else "no package triton: attention would be the reference's"
    yield Finding("ok" if has_triton else "fault", "device", f"cuda: {names}; {backend}")


def _processor() -> Iterator[Finding]:
    from quire.engine.machine import processor_name, usable_cores
    from quire.kernels.levels import LEVELS, supported_levels

    level = supported_levels()[0]
    slower = LEVELS[level].slower
    yield Finding(
        "note" if slower else "ok", "processor", f"{processor_name()}; level {level}{f': {slower}' if slower else ''}"
    )
    cores, all_cores = usable_cores(), os.cpu_count() or 1
    limited = f" of {all_cores}: affinity or the container's share" if cores < all_cores else ""
    load = os.getloadavg()[0]
    busy = f"; other programs are at work: the load average is {load:.1f}" if load > 0.5 * all_cores else ""
    yield Finding("note" if busy else "ok", "cores", f"{cores}{limited}; runtime.threads is as many{busy}")


def _kernels() -> Iterator[Finding]:
    from quire.kernels import load
    from quire.kernels.build import SOURCE_DIR, find_compiler, is_current, source_hash
    from quire.kernels.levels import supported_levels

    level, compiler = supported_levels()[0], find_compiler()
    kept = user_cache() / "kernels" / source_hash()
    how = f"compiler: {compiler.version}" if compiler else "no C++ compiler (g++ 12, clang 15 or the package ziglang)"
    if is_current(SOURCE_DIR, level):
        yield Finding("ok", "kernels", f"level {level} is in the package; {how}")
        return
    was_there = is_current(kept, level)
    try:
        load()
    except QuireError as error:
        yield Finding("fault", "kernels", f"{error}; {how}")
        return
    there = f"level {level} is in {kept}" if was_there else f"level {level} was just compiled into {kept}"
    yield Finding("ok" if is_current(kept, level) else "note", "kernels", f"{there}; {how}")


def _memory() -> Iterator[Finding]:
    import torch

    from quire.engine.machine import available_memory

    free, total = available_memory(torch.device("cpu")), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding(
        "ok", "memory", f"{format_bytes(free)} of {format_bytes(total)} can be had; cache.memory takes a part"
    )
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if huge.exists() and "[never]" in huge.read_text():
        yield Finding("note", "huge pages", f"off ({huge} says never): reading weights and cache is slower")
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").free
        few = shared < LEAST_SHARED
        text = f"{format_bytes(shared)} in /dev/shm for instances (cluster.prefill and others)"
        yield Finding("note" if few else "ok", "shared memory", f"{text}{'; it is small: use tcp' if few else ''}")


def _folders() -> Iterator[Finding]:
    from quire.models.embedded import cached_path

    try:
        folder = user_cache()
    except RuntimeError:
        yield Finding("fault", "cache folder", "there is no home: set XDG_CACHE_HOME to a folder that can be written")
        return
    there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    try:
        free = shutil.disk_usage(there).free
        can_be_written = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except OSError:
        can_be_written = False
    if not can_be_written:
        yield Finding("fault", "cache folder", f"{folder} cannot be written; set XDG_CACHE_HOME to another one")
        return
    state: Literal["ok", "note"] = "note" if free < LEAST_DISK else "ok"
    yield Finding(state, "cache folder", f"{folder}, {format_bytes(free)} free")
    model = cached_path()
    yield Finding("ok", "model", f"smollm2 is {'in ' + str(model) if model else 'not downloaded: quire pull smollm2'}")


def _parts() -> Iterator[Finding]:
    for name, packages in EXTRAS.items():
        missing = [each for each in packages if importlib.util.find_spec(each) is None]
        if missing:
            use = f" for {USES[name]}" if name in USES else ""
            command = install_command(name, Path(sys.executable).name)
            yield Finding("note", name, f"not installed{use} ({', '.join(missing)} missing); {command}")
        else:
            versions = ", ".join(f"{each} {importlib.metadata.version(each)}" for each in packages)
            yield Finding("ok", name, versions)
