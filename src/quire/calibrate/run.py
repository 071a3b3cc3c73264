"""Makes a calibration from a checkpoint and a text: gathers windows, then fits layer after layer. An interruption loses
no gathered window.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import gc
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.cache.codecs import CODECS
from quire.cache.codecs.nuq import NuqTables
from quire.calibrate.fit import LayerFit, fit_layer
from quire.calibrate.gradients import GradientOps, PanelGradientOps
from quire.calibrate.progress import WAITING
from quire.calibrate.samples import SampleStore
from quire.calibrate.settings import ALGORITHM, CODEC_OF, CalibrationSettings, folder
from quire.calibrate.tables import make_tables
from quire.calibrate.text import generate_windows, windows_from_text
from quire.config import CacheConfig, EngineConfig, SchedulerConfig
from quire.engine.build import assemble, load_model, resolve
from quire.engine.calibration import Calibration, check_tables
from quire.engine.machine import device_type_of, usable_cores
from quire.errors import ConfigError, LoadCancelledError
from quire.kernels import runtime
from quire.kernels.memory import trim_heap
from quire.models import images
from quire.models.decoder import build_model
from quire.models.fingerprint import fingerprint
from quire.models.layers import torch_dtype
from quire.models.plan import Model
from quire.models.shape import ModelShape
from quire.models.tokenizer import load_tokenizer
from quire.models.weights import Checkpoint, open_model

log = logging.getLogger("quire")

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total). An exception that it raises ends the calibration."""

FEW_TOKENS = 2048
"""Tokens below which a calibration warns: a quarter of the default. Calibrated with 40 tokens, nuq4 raised SmolLM2's
perplexity by 8.2 %, and g4, without calibration, by 1.3 % (docs/lab/2026-11.md).
"""

LAYERS_AT_ONCE = 4
"""Maximum number of layers fitted in parallel: each holds all its samples in memory."""

REPORT_SECONDS = 1.0
"""Interval between progress reports while layers are fitted: one layer of a large model takes minutes."""

WAITING_SECONDS = 0.2
"""Interval between checks whether another process still calibrates the model."""


def calibrate(
    path: Path,
    settings: CalibrationSettings,
    file: Path,
    *,
    text: str | None = None,
    config: EngineConfig | None = None,
    progress: Progress = lambda what, done, total: None,
    unless: Callable[[], Calibration | None] = lambda: None,
) -> Calibration:
    """Makes a calibration and writes it to a file.

    path    the model: a folder or a .gguf file
    text    the text to read; None: the model writes it
    config  settings of model and runtime: dtype, tokenizer, device, threads
    unless  called when no other process calibrates this model; a calibration that it returns is used instead
    Raises ModelError, or ConfigError for a text that is too short, windows that are too long, an unsupported head size,
    or a folder that cannot be written. Gathered windows are kept until a calibration of the same model, text and
    settings is done.
    """
    config = config or EngineConfig()
    with open_model(path) as checkpoint:
        shape = checkpoint.shape
    tokens = settings.tokens_of(shape)
    settings = dataclasses.replace(settings, window_tokens=tokens)
    if settings.num_windows * tokens < FEW_TOKENS:
        log.warning(
            "%d tokens are too few for a good calibration: the codecs may lose more than g4, which needs none",
            settings.num_windows * tokens,
        )
    _check(settings, shape)
    device, dtype = _device_and_dtype(config, shape)
    if device.type == "cpu":
        runtime.set_level(config.runtime.level)
        runtime.set_num_threads(config.runtime.threads or usable_cores())
    model_id = fingerprint(path)
    gathered = _gathered(settings, text, dtype)
    name = _digest(json.dumps([model_id, gathered, config.model.tokenizer], sort_keys=True))[:16]
    windows = None
    if text is not None:  # reports one that is too short before it waits for another process
        windows = windows_from_text(load_tokenizer(path, config.model.tokenizer), text, settings.num_windows, tokens)
    try:
        with _locked(folder() / f".{model_id[:16]}.lock", progress):
            found = unless()
            if found is not None:
                return found
            store = SampleStore(folder() / name, settings.skipped)
            with _telling_what_is_kept(store, settings):
                _gather(path, store, settings, windows, config, dtype, device, progress)
                tables, report = _fit(store, settings, shape, progress)
            made = Calibration(model_id, tables, gathered | settings.of_tables(), report, path.name)
            made.save(file)
            store.clear()
    except OSError as error:
        raise ConfigError(
            f"{error.filename or file}: cannot be written ({error.strerror or error}); choose another place, or set"
            " XDG_CACHE_HOME to a folder that can"
        ) from None
    return made


def import_calibration(source: Path, path: Path, settings: CalibrationSettings, file: Path) -> Calibration:
    """Keeps a calibration from another machine in `file`. Raises ConfigError if it is for another model than that at
    `path` or for other settings, and OSError if the file cannot be written.
    """
    made = Calibration.load(source, fingerprint(path))
    with open_model(path) as checkpoint:
        shape = checkpoint.shape
    for tables in made.tables.values():
        check_tables(tables, shape.num_layers, shape.num_kv_heads, shape.head_dim)
    for name, value in (settings.of_tables() | {"skipped": settings.skipped}).items():
        if (found := made.settings.get(name)) != value:
            raise ConfigError(
                f"{source}: made with {name} {found}, not {value}; give the same flags as to the command that made it,"
                " or use it as it is with --cache.calibration"
            )
    made.save(file)
    return made


def _gathered(settings: CalibrationSettings, text: str | None, dtype: torch.dtype) -> dict[str, Any]:
    """The settings on which the gathered windows depend. text: None if the model writes it."""
    return {
        "algorithm": ALGORITHM,
        "text": {"written by the model": settings.seed} if text is None else {"sha256": _digest(text)},
        "windows": settings.num_windows,
        "window_tokens": settings.window_tokens,
        "skipped": settings.skipped,
        "dtype": str(dtype).removeprefix("torch."),
    }


@contextlib.contextmanager
def _telling_what_is_kept(store: SampleStore, settings: CalibrationSettings) -> Iterator[None]:
    """A context that, if interrupted, logs how many windows the next calibration finds in the store."""
    try:
        yield
    except (KeyboardInterrupt, LoadCancelledError):
        kept = sum(store.has(window) for window in range(settings.num_windows))
        if kept:
            log.warning(
                "the calibration is interrupted; the next one resumes with %d of %d windows, kept in %s",
                kept,
                settings.num_windows,
                store.folder,
            )
        raise


def _check(settings: CalibrationSettings, shape: ModelShape) -> None:
    tokens = settings.window_tokens
    assert tokens is not None
    if tokens > shape.max_context:
        raise ConfigError(
            f"windows of {tokens:,} tokens exceed the model's context of {shape.max_context:,}; lower --window"
        )
    if tokens < settings.skipped + 2:
        raise ConfigError(
            f"windows of {tokens} tokens leave too few after the first {settings.skipped}; raise --window"
        )
    # An error is reported before a minute of work, not after.
    CODECS[CODEC_OF[settings.bits[0]]].check(shape.head_dim)


def _device_and_dtype(config: EngineConfig, shape: ModelShape) -> tuple[torch.device, torch.dtype]:
    device = device_type_of(config.runtime.device)
    dtype = torch_dtype(shape.dtype if config.model.dtype == "auto" else config.model.dtype)
    # Squared gradients exceed the range of float16.
    return torch.device(device), torch.float32 if dtype == torch.float16 else dtype


def _gather(
    path: Path,
    store: SampleStore,
    settings: CalibrationSettings,
    windows: Tensor | None,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> None:
    """Fills the store with all windows. The model writes them if there is no text."""
    kept = sum(store.has(window) for window in range(settings.num_windows))
    if kept:
        log.warning(
            "resuming the calibration with %d of %d windows, kept in %s", kept, settings.num_windows, store.folder
        )
    if kept == settings.num_windows:
        return
    if windows is None:
        windows = store.tokens()
    if windows is None:
        windows = _written(path, settings, config, progress)
        gc.collect()  # frees the engine that wrote the text, and its weights
        trim_heap()
        store.put_tokens(windows)
    with open_model(path) as checkpoint:
        shape = checkpoint.shape
        model = _model(checkpoint, config, dtype, device)
    total = settings.num_windows * shape.num_layers

    def report(before: int, done: int) -> None:
        progress("gathering", before + done, total)

    for window in range(settings.num_windows):
        if not store.has(window):
            done = functools.partial(report, window * shape.num_layers)
            store.put(window, model, windows[window].to(device), done)


def _model(checkpoint: Checkpoint, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> Model:
    """The model with gradients. On a CPU it multiplies with the engine's panels and maps the same layer image, so that
    both share one copy of the weights in memory.
    """
    shape, form = checkpoint.shape, config.model.weights
    if device.type != "cpu":
        return build_model(shape, checkpoint, GradientOps(), dtype, device)
    image = images.image_spec(checkpoint, dtype, form) if config.model.images else None
    return images.load(
        image, lambda memory: build_model(shape, checkpoint, PanelGradientOps(memory), dtype, device, form)
    )


def _written(path: Path, settings: CalibrationSettings, config: EngineConfig, progress: Progress) -> Tensor:
    tokenizer = load_tokenizer(path, config.model.tokenizer)
    count, tokens = settings.num_windows, settings.window_tokens
    assert tokens is not None
    plain = dataclasses.replace(
        EngineConfig(runtime=config.runtime),
        model=dataclasses.replace(config.model, max_context=tokens),
        cache=CacheConfig(share=False),
        scheduler=SchedulerConfig(max_running=count),
    )
    with open_model(path) as checkpoint:
        resolved, fits = resolve(plain, checkpoint.shape, checkpoint)
        engine = assemble(load_model(checkpoint, resolved), tokenizer, resolved, fits)
    return generate_windows(
        engine, tokenizer, count, tokens, settings.seed, lambda done, total: progress("writing a text", done, total)
    )


def _fit(
    store: SampleStore, settings: CalibrationSettings, shape: ModelShape, progress: Progress
) -> tuple[dict[str, NuqTables], dict[str, Any]]:
    """Tables by codec, and the report of the choices."""

    def fit(layer: int) -> LayerFit:
        samples = store.layer(layer, settings.num_windows)
        held_out = len(samples.keys) // settings.num_windows * settings.num_held_out
        return fit_layer(samples, held_out, settings.outlier_slots, kinds=settings.kinds, q_norm=settings.q_norm)

    threads = torch.get_num_threads()
    # Layers in parallel rather than threads inside each small operation: on a busy machine these would wait for each
    # other thousands of times.
    workers = min(threads, LAYERS_AT_ONCE)
    pool = ThreadPoolExecutor(workers, "quire-fit", torch.set_num_threads, (threads // workers,))
    try:
        running = [pool.submit(fit, layer) for layer in range(shape.num_layers)]
        left = set(running)
        while left:
            progress("fitting", shape.num_layers - len(left), shape.num_layers)
            done, left = wait(left, REPORT_SECONDS, FIRST_COMPLETED)
            for each in done:
                each.result()  # raises a layer's exception at once
        fits = [each.result() for each in running]
        progress("fitting", shape.num_layers, shape.num_layers)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
    tables, report = {}, {}
    for bits in sorted(settings.bits):
        codec = CODEC_OF[bits]
        tables[codec], report[codec] = make_tables(
            fits, bits, settings.outlier_slots, kinds=settings.kinds, spends=settings.spends
        )
    return tables, report


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Holds an exclusive lock on a file among processes. The kernel releases it if its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        waited = False
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            progress(WAITING, 0, 1)
            time.sleep(WAITING_SECONDS)
            waited = True
        if waited:
            progress(WAITING, 1, 1)
        yield
