"""Compiling the CPU kernels: when it happens, what it leaves, and what happens if it cannot."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
import threading

import pytest

from quire import kernels
from quire.errors import ConfigError, QuireError
from quire.kernels import build, levels

from .pages import LEVELS

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler on this machine")

SOURCE = """
#include "answer.h"
struct Owner { int value = ANSWER; ~Owner() { value = 0; } };
extern "C" __attribute__((visibility("default"))) int answer() { static thread_local Owner owner; return owner.value; }
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder with one small kernel in place of the real ones."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCE_DIR", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.source_hash.cache_clear()
    kernels._load.cache_clear()
    yield folder
    build.source_hash.cache_clear()
    kernels._load.cache_clear()


def edit(folder):
    (folder / "answer.h").write_text("#define ANSWER 43\n")
    build.source_hash.cache_clear()


@pytest.mark.parametrize("level", LEVELS)
def test_the_real_kernels_load_at_the_levels_of_an_installation(level):
    library = kernels.load(level)
    assert library.quire_threads
    assert library.quire_attend


@pytest.mark.slow
@pytest.mark.parametrize("other", [level for level in levels.LEVELS if level not in levels.editable_levels()])
def test_the_real_kernels_compile_at_every_other_level(other, tmp_path, monkeypatch):
    """Without optimisation, a fifth of the time: an instruction that a level lacks is an error in both."""
    monkeypatch.setattr(build, "FLAGS", ("-O0", *build.FLAGS[1:]))
    build.source_hash.cache_clear()
    path = build.build([other], tmp_path)[0]
    build.source_hash.cache_clear()
    if other in levels.supported_levels():
        library = ctypes.CDLL(str(path))
        assert library.quire_threads
        assert library.quire_attend


def test_every_level_compiles_even_one_this_processor_lacks(sources, tmp_path):
    paths = build.build(levels.LEVELS, tmp_path / "out")
    assert [path.name for path in paths] == [f"_quire_{level}.so" for level in levels.LEVELS]
    assert all(build.is_current(tmp_path / "out", level) for level in levels.LEVELS)
    assert ctypes.CDLL(str(paths[-1])).answer() == 42


def test_what_is_up_to_date_is_not_compiled_again(sources, tmp_path, capfd):
    level = levels.supported_levels()[0]
    build.build([level], tmp_path)
    said = capfd.readouterr().err
    assert said.startswith(f"quire: compiling the CPU kernels ({level}) with ")
    assert said.count("\n") == 1
    build.build([level], tmp_path)
    assert capfd.readouterr().err == ""
    edit(sources)
    build.build([level], tmp_path)
    assert capfd.readouterr().err != ""
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".build-")]


def test_a_long_compilation_says_how_far_it_is(sources, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(build, "PROGRESS_SECONDS", 0.0)
    level = levels.supported_levels()[0]
    build.build([level], tmp_path)
    first, *progress = capfd.readouterr().err.splitlines()
    count = len(progress)
    assert "compiling" in first and count == len([*sources.glob("*.cpp")]) + (sys.platform == "linux")
    assert progress == [f"quire: compiled {number} of {count} files" for number in range(1, count + 1)]


def test_a_process_that_waits_for_another_one_says_so(sources, tmp_path, capfd):
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=build.build, args=([levels.supported_levels()[0]], tmp_path))
        thread.start()
        said = ""
        while "waiting for another process" not in said:
            said += capfd.readouterr().err
            assert thread.is_alive() and "compiling" not in said
    thread.join()
    assert "quire: compiling" in capfd.readouterr().err


def test_the_packaged_library_is_used_until_the_sources_change(sources, tmp_path):
    level = levels.supported_levels()[0]
    build.build([level], sources)
    assert kernels._find(level, False).parent == sources
    edit(sources)
    found = kernels._find(level, False)
    assert found.is_relative_to(tmp_path / "cache" / "quire" / "kernels")
    assert ctypes.CDLL(str(found)).answer() == 43


def test_the_same_level_is_loaded_by_default_and_by_name(sources):
    assert kernels.load().answer() == kernels.load(levels.supported_levels()[0]).answer() == 42


def test_without_a_compiler_the_error_says_what_to_install(sources, monkeypatch):
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with pytest.raises(QuireError, match=r"no C\+\+ compiler .*`pip install ziglang`"):
        kernels.load()


def test_without_a_compiler_a_lower_packaged_level_will_do(sources, monkeypatch, caplog):
    best, *lower = levels.supported_levels()
    if not lower:
        pytest.skip("this processor has one level only")
    build.build([lower[-1]], sources)
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert kernels.load().answer() == 42
    assert f"level {lower[-1]} instead of {best}" in caplog.text
    with pytest.raises(QuireError, match="no C"):
        kernels.load(best)


def test_a_level_the_processor_lacks_is_refused():
    with pytest.raises(ConfigError, match="'v9' does not run on this processor; it has"):
        kernels.load("v9")


def test_a_failing_compile_gives_the_compilers_first_error(sources, tmp_path):
    (sources / "broken.cpp").write_text("#error the reason\n")
    build.source_hash.cache_clear()
    with pytest.raises(QuireError, match="compiling the CPU kernels failed: .*the reason"):
        build.build([levels.supported_levels()[0]], tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.so"))


def test_a_kernel_that_needs_the_cpp_runtime_does_not_link(sources, tmp_path):
    (sources / "heavy.cpp").write_text("int* leak() { return new int(1); }\n")
    build.source_hash.cache_clear()
    with pytest.raises(QuireError, match="compiling the CPU kernels failed"):
        build.build([levels.supported_levels()[0]], tmp_path / "out")


def test_processes_that_need_the_same_library_compile_it_once(sources, tmp_path):
    code = (
        "import sys, pathlib; from quire.kernels import build, levels\n"
        "build.SOURCE_DIR = pathlib.Path(sys.argv[1])\n"
        "build.build([levels.supported_levels()[0]], pathlib.Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(sources), str(tmp_path / "out")]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert sum("compiling" in each for each in said) == 1, said


def test_the_hash_of_the_sources_is_the_same_in_every_process():
    code = "from quire.kernels.build import source_hash; print(source_hash())"
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1


def test_a_full_disk_is_one_line_and_leaves_nothing_half_compiled(sources, tmp_path, monkeypatch):
    level = levels.supported_levels()[0]

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "_quire.stamp")

    monkeypatch.setattr(build.os, "replace", full)
    with pytest.raises(
        QuireError, match=r"_quire.stamp: the CPU kernels cannot be written \(No space left on device\)"
    ):
        build.build([level], tmp_path / "out")
    assert [each.name for each in (tmp_path / "out").iterdir()] == [".lock"]
