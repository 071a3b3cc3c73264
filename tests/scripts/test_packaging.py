"""Installation and distribution: extras, pins, the source distribution, the Makefile."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from quire.extras import DISTRIBUTION, install_command
from quire.extras import EXTRAS as OPTIONAL

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def brought(requirement: Requirement, seen: dict[str, str]) -> Iterator[str]:
    """What installing a requirement brings, itself included, as installed here: `name==version`."""
    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
    if name in seen:
        return
    found = distribution(name)
    # torch's CPU build is 2.13.0+cpu, and its pin holds for every build.
    seen[name] = found.version.partition("+")[0]
    for line in found.requires or ():
        inner = Requirement(line)
        extras = requirement.extras or {""}
        if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
            list(brought(inner, seen))
    yield name


@pytest.mark.parametrize("extra", ["", "serve", "plot", "dev"])
def test_every_package_that_an_install_brings_is_pinned(extra: str) -> None:
    seen: dict[str, str] = {}
    try:
        for line in EXTRAS[extra] if extra else PROJECT["dependencies"]:
            list(brought(Requirement(line), seen))
    except PackageNotFoundError as error:
        pytest.fail(f"`make test` installs {extra}, and {error.name} is not here")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    assert {name: pinned.get(name) for name in seen} == seen


def test_the_optional_parts_that_messages_name_are_those_of_the_project() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert {*OPTIONAL, "dev"} == set(EXTRAS)
    assert install_command("serve", "python3").endswith("python3 -m pip install -c constraints.txt '.[serve]'")


def test_nothing_that_people_read_installs_the_strangers_package() -> None:
    """On the package index `quire` is another project."""
    read = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", ROOT / "constraints.txt"]
    read += [
        file for name in ("docs", "examples") for file in (ROOT / name).rglob("*.*") if file.suffix in (".md", ".py")
    ]
    read += [
        file for name in ("src", "scripts") for file in (ROOT / name).rglob("*.*") if file.suffix in (".py", ".sh")
    ]
    command = re.compile(r"""pip install\b[^`\n]*[ '"]quire(\[|['"\s`]|==|$)""", re.MULTILINE)
    assert command.search("pip install 'quire[serve]'") and command.search("pip install -U quire")
    found = {str(file.relative_to(ROOT)) for file in read if command.search(file.read_text())}
    assert found <= {"docs/lab/2026-11.md"}  # which quotes what was wrong


@pytest.mark.parametrize(("flags", "has_option"), [("avx2 avx512f avx512_bf16", True), ("avx2 avx512f", False)])
def test_llama_cpp_is_built_with_what_the_processor_has(tmp_path: Path, flags: str, has_option: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags} sse2\n")
    script = (ROOT / "scripts" / "peers.sh").read_text()
    part = script[script.index("LLAMACPP_OPTIONS=(") : script.index("LLAMACPP_PROGRAMS=")]
    command = ["bash", "-euc", part + 'echo "${LLAMACPP_OPTIONS[@]}"']
    environment = {"CPUINFO": str(tmp_path / "cpuinfo"), "PATH": "/usr/bin:/bin"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert ("AVX512" in printed) == has_option and "-DGGML_NATIVE=ON" in printed


def load_install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "scripts" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_install_says_what_it_does_and_that_it_still_does_it(capsys: pytest.CaptureFixture[str]) -> None:
    script = """
import sys, time
print("Looking in indexes: a, b")
print("Collecting torch>=2.11 (from quire-llm==0.1.0)")
print("  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (821.0 MB)", flush=True)
time.sleep(0.5)
print("  Downloading https://somewhere/a/numpy-2.4.6-cp311-cp311-linux.whl.metadata (62 kB)")
print("Building wheels for collected packages: quire-llm")
print("  Building editable for quire (pyproject.toml): started")
print("  Building editable for quire (pyproject.toml): finished with status 'done'")
print("Installing collected packages: torch, numpy, quire-llm")
print("Successfully installed torch-2.13.0")
sys.exit(3)
"""
    assert load_install().run([sys.executable, "-u", "-c", script], silence_seconds=0.2) == 3
    lines = capsys.readouterr().out.splitlines()
    still = [line for line in lines if "still" in line]
    assert still and all(line.endswith("s: still getting torch 2.13.0 (821.0 MB)") for line in still)
    assert [line for line in lines if "still" not in line] == [
        "  getting torch 2.13.0 (821.0 MB)",
        "  building wheels for collected packages: quire-llm",
        "  building editable for quire (pyproject.toml): compiling the CPU kernels, which takes minutes",
        "  installing 3 packages",
    ]


def made(target: str) -> str:
    """What make would run, in a checkout where nothing is installed."""
    command = ["make", "--dry-run", "--no-print-directory", "VENV=no-such-folder", "PORT=8123", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_make_installs_what_pictures_need_and_shows_that_it_is_alive() -> None:
    lines = made("serve").splitlines()
    (install,) = [line for line in lines if "--editable" in line]
    assert "scripts/install.py" in install and "plot" in install
    assert not any("--quiet" in line for line in lines)


def test_make_leaves_the_curl_line_to_the_server_which_knows_when_it_is_ready() -> None:
    assert "curl" not in made("serve")


def test_the_source_distribution_holds_every_file_of_the_repository(tmp_path: Path) -> None:
    """So that its tests, some of which read benchmarks, docs and scripts, run from it alone."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    elif (
        sources := ROOT / "src" / "quire_llm.egg-info" / "SOURCES.txt"
    ).exists():  # an unpacked distribution's own list
        listed = sources.read_text()
    else:
        pytest.skip("neither a git repository nor an unpacked distribution")
    names = listed.splitlines()
    tracked = {name for name in names if (ROOT / name).is_file()}
    for name in tracked:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    build = "import sys; sys.path.insert(0, 'build_backend'); import quire_build; quire_build.build_sdist('dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    assert {name for name in tracked - held if ".egg-info/" not in name} == set()
