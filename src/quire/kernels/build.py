"""Compiles the CPU kernels: every .cpp beside this file into one shared library per CPU level.

Knows compilers, flags and when a library is out of date; knows neither torch nor what the kernels do. Used by the
package build (build_backend/), by `make install` and, when a source tree has no current library, by
`quire.kernels.load`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from quire import parent_watch
from quire.errors import QuireError
from quire.kernels.levels import LEVELS, Level, editable_levels

SOURCE_DIR = Path(__file__).parent

PROGRESS_SECONDS = 10.0
"""Interval of lines about the progress. All levels take minutes on two cores."""

# No -ffast-math: it assumes that NaN and -inf do not occur, but they mark empty rows and masked keys. No -fopenmp: the
# kernels run on torch's thread pool.
FLAGS = (
    "-O3 -std=c++17 -fno-exceptions -fno-rtti -fno-math-errno -fno-trapping-math -ffp-contract=fast"
    " -fPIC -fvisibility=hidden"
).split()

# Additional flags of single sources. The codecs must produce the same bits as their definitions, which have no fused
# multiply-adds.
SOURCE_FLAGS = dict.fromkeys(("group.cpp", "nuq.cpp"), ("-ffp-contract=off",))

# The kernels use _Float16, which needs g++ 12 or clang 15; an older compiler is ignored.
_PROBE = "int main() { _Float16 x = 1; return static_cast<float>(x) > 0; }"

# Thread-local objects need only this function of the C++ runtime, and glibc has it under another name. So the runtime
# is not linked. Zig would first have to build it, 50 s per level.
_THREAD_EXIT = """
extern "C" int __cxa_thread_atexit_impl(void (*)(void*), void*, void*);
extern "C" int __cxa_thread_atexit(void (*run)(void*), void* object, void* library) {
    return __cxa_thread_atexit_impl(run, object, library);
}
"""


@dataclass(frozen=True)
class Compiler:
    """A working C++ compiler: its command, and its version for the stamp."""

    command: tuple[str, ...]
    version: str

    @property
    def is_zig(self) -> bool:
        """Whether it is Zig, which names targets differently and links differently."""
        return "ziglang" in self.command

    def target_flags(self, level: Level) -> list[str]:
        """The flags that select the level's instructions."""
        if not level.architecture:
            return []
        if self.is_zig:
            return ["-mcpu=" + "+".join([level.architecture.replace("-", "_"), *level.extensions])]
        return ["-march=" + level.architecture, *("-m" + name for name in level.extensions)]

    @property
    def link_command(self) -> tuple[str, ...]:
        """Links without the C++ runtime; Zig does so as a C compiler."""
        return (*self.command[:-1], "cc", "-shared") if self.is_zig else (*self.command, "-shared")

    @property
    def link_libraries(self) -> tuple[str, ...]:
        """Link flags, after the objects. A missing symbol is an error at link time, not at load time."""
        if sys.platform != "linux":
            return ()
        # libgcc is linked statically: shared libgcc of older systems lacks the half-precision helpers of level v2.
        return ("-Wl,-z,defs", "-lm") if self.is_zig else ("-Wl,-z,defs", "-nodefaultlibs", "-lm", "-lc", "-lgcc")


@functools.cache
def find_compiler() -> Compiler | None:
    """The first working compiler of $CXX, c++, g++, clang++ and the `ziglang` package; None if there is none."""
    commands = [shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"], ["clang++"]]
    for command in commands:
        if command and shutil.which(command[0]) and _compiles(command):
            return Compiler(tuple(command), _first_line([*command, "--version"]))
    if importlib.util.find_spec("ziglang") is not None:
        return Compiler(
            (sys.executable, "-m", "ziglang", "c++"), "zig " + _first_line([sys.executable, "-m", "ziglang", "version"])
        )
    return None


def library_name(level: str) -> str:
    """File name of the library of one level."""
    return f"_quire_{level}.so"


@functools.cache
def source_hash() -> str:
    """Hash of the kernel sources and compile flags. A library with another hash is out of date."""
    targets = [(name, level.architecture, level.extensions) for name, level in LEVELS.items()]
    digest = hashlib.sha256(repr((FLAGS, SOURCE_FLAGS, targets)).encode())
    for path in sorted([*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h")]):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def is_current(directory: Path, level: str, compiler: Compiler | None = None) -> bool:
    """Whether the directory holds this level, compiled from the present sources (and, if given, by this compiler)."""
    library, stamp = _paths(directory, level)
    try:
        text = stamp.read_text()
    except OSError:
        return False
    if compiler is not None:
        return library.exists() and text == _stamp(compiler)
    return library.exists() and text.partition("\n")[0] == source_hash()


def build(levels: Iterable[str], out_dir: Path) -> list[Path]:
    """Compiles the levels that are missing or out of date. Returns the paths of all levels.

    Reports on stderr, in one line, that it compiles. Other processes may build into the same directory at the same
    time. Raises QuireError if there is no compiler, if it fails (with its first message), or if the directory cannot be
    written.
    """
    try:
        return _build(list(levels), out_dir)
    except OSError as error:
        reason = error.strerror or error
        raise QuireError(
            f"{error.filename or out_dir}: the CPU kernels cannot be written ({reason}); set XDG_CACHE_HOME to a folder"
            " that can"
        ) from error


def _build(levels: list[str], out_dir: Path) -> list[Path]:
    compiler = find_compiler()
    with _locked(out_dir):
        stale = [level for level in levels if not is_current(out_dir, level, compiler)]
        if stale and compiler is None:
            raise QuireError(
                "no C++ compiler for the CPU kernels: install g++ >= 12 or clang++ >= 15, or `pip install ziglang`"
            )
        if stale and compiler is not None:
            print(
                f"quire: compiling the CPU kernels ({', '.join(stale)}) with {compiler.version}, once",
                file=sys.stderr,
                flush=True,
            )
            _compile(compiler, stale, out_dir)
    return [out_dir / library_name(level) for level in levels]


def _compile(compiler: Compiler, levels: list[str], out_dir: Path) -> None:
    # The temporary folder is beside the result, so that the last step is an atomic rename on one file system.
    with tempfile.TemporaryDirectory(dir=out_dir, prefix=".build-") as name, ThreadPoolExecutor(os.cpu_count()) as pool:
        scratch = Path(name)
        sources = sorted(SOURCE_DIR.glob("*.cpp"))
        if sys.platform == "linux":
            sources.append(scratch / "thread_exit.cpp")
            sources[-1].write_text(_THREAD_EXIT)
        objects: dict[str, list[str]] = {level: [] for level in levels}
        commands = []
        for level in levels:
            for source in sources:
                objects[level].append(str(scratch / f"{level}-{source.stem}.o"))
                target = compiler.target_flags(LEVELS[level])
                flags = (*FLAGS, *SOURCE_FLAGS.get(source.name, ()), *target)
                commands.append([*compiler.command, *flags, "-c", str(source), "-o", objects[level][-1]])
        reported = time.monotonic()
        for count, _ in enumerate(pool.map(lambda command: _run(command, scratch), commands), 1):
            if time.monotonic() - reported >= PROGRESS_SECONDS:
                reported = time.monotonic()
                print(f"quire: compiled {count} of {len(commands)} files", file=sys.stderr, flush=True)
        for level in levels:
            library, stamp = _paths(out_dir, level)
            built = scratch / library.name
            _run([*compiler.link_command, *objects[level], "-o", str(built), *compiler.link_libraries], scratch)
            stamp.unlink(missing_ok=True)
            os.replace(built, library)
            stamp.write_text(_stamp(compiler))


def _run(command: list[str], scratch: Path) -> None:
    environment = {**os.environ, "ZIG_LOCAL_CACHE_DIR": str(scratch / "zig")}
    # A compiler runs for a minute. It must end with the server that started it.
    done = parent_watch.run(command, capture_output=True, env=environment)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        reason = next((line for line in lines if "error" in line), lines[0])
        raise QuireError(f"compiling the CPU kernels failed: {reason} (command: {shlex.join(command)})")


def _compiles(command: list[str]) -> bool:
    probe = [*command, *FLAGS, "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(probe, input=_PROBE, capture_output=True, text=True).returncode == 0


def _first_line(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0].strip()


def _paths(directory: Path, level: str) -> tuple[Path, Path]:
    library = directory / library_name(level)
    return library, library.with_suffix(".stamp")


def _stamp(compiler: Compiler) -> str:
    return f"{source_hash()}\n{compiler.version}\n"


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("quire: waiting for another process, which compiles the CPU kernels", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Compiles the given levels, by default those of a development install, into the package directory or --out."""
    parser = argparse.ArgumentParser(prog="python -m quire.kernels.build", description=main.__doc__)
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help=f"any of {', '.join(LEVELS)}")
    parser.add_argument(
        "--out", type=Path, default=SOURCE_DIR, metavar="DIR", help="folder for the libraries (default: the package)"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.levels) - set(LEVELS)
    if unknown:
        parser.error(f"unknown CPU level: {', '.join(sorted(unknown))}")
    try:
        build(arguments.levels or editable_levels(), arguments.out)
    except QuireError as error:
        parser.exit(1, f"quire: {error}\n")


if __name__ == "__main__":
    main()
