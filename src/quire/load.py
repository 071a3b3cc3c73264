"""Loads an engine from a model's name and a configuration. Calibrates first if the codec needs it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from quire.cache.codecs import DENSE
from quire.calibrate import CalibrationSettings, calibrate
from quire.calibrate.progress import progress_display
from quire.codec_check import check_codec
from quire.config import CacheConfig, EngineConfig, format_bytes
from quire.engine.build import assemble, load_model, ops_type, resolve
from quire.engine.calibration import Calibration
from quire.engine.capacity import measure_prefill
from quire.engine.control_plane import namespace_of
from quire.engine.engine import Engine
from quire.engine.footprint import footprint
from quire.engine.machine import device_type_of, usable_cores
from quire.engine.pins import read_pin_lines
from quire.engine.sizes import EngineSizes
from quire.errors import ConfigError, LoadCancelledError
from quire.gc_pause import gc_paused
from quire.kernels import runtime
from quire.kernels.levels import LEVELS
from quire.models.digest import Report, digest_of
from quire.models.fingerprint import fingerprint
from quire.models.layers import torch_dtype
from quire.models.loading import group_tensors
from quire.models.resolve import resolve_model, short_name
from quire.models.shape import ModelShape
from quire.models.tokenizer import Tokenizer, load_tokenizer
from quire.models.weights import Checkpoint, open_model
from quire.stores.opening import open_tiers
from quire.stores.tiers import Tier, Tiers

log = logging.getLogger("quire")


@dataclass(frozen=True)
class LoadedEngine:
    """An engine and its context. All automatic values of `config` are resolved.

    path, requested_name  the model's path, and the name by which it was requested
    pending_config        the configuration with the codec that waits for its calibration, while pages are dense; None
                          without one
    """

    engine: Engine
    tokenizer: Tokenizer
    shape: ModelShape
    sizes: EngineSizes
    config: EngineConfig
    model_name: str
    path: Path
    requested_name: str
    pending_config: EngineConfig | None = None


def load_engine(
    model: str,
    config: EngineConfig,
    *,
    show_progress: bool | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
    tiers: Tiers | None = None,
    peer_tiers: Sequence[Tier] = (),
    may_calibrate_later: bool = False,
) -> LoadedEngine:
    """Loads the model and allocates the cache. Calibrates first if the codec needs a calibration and there is none.
    Checks a codec that has not been checked on this model.

    show_progress  progress bars for downloading and calibrating; None: only if stderr is a terminal
    is_cancelled       polled between phases and during calibration; True cancels loading
    tiers          stores in place of the configured ones; their speed is not measured
    peer_tiers     stores that are searched after the configured ones
    may_calibrate_later  whether the engine may begin with dense pages, for a caller who calibrates meanwhile and then
                         calls `with_codec`; see `LoadedEngine.pending_config`
    Raises ModelError or ConfigError with one line, and LoadCancelledError if cancelled.
    """
    if config.cache.pin is not None:
        read_pin_lines(Path(config.cache.pin))
    path = resolve_model(model, show_progress)
    with open_model(path) as checkpoint:
        calibration = find_calibration(path, config)
        resolved, fits = resolve(config, checkpoint.shape, checkpoint, calibration)
        if not fits.fit_the_machine:
            raise ConfigError(fits.fails_first)
        pending_config = None
        if calibration is None and config.cache.is_calibrated:
            _check_cancelled(is_cancelled)
            config, pending_config, calibration = _without_calibration(
                path, config, resolved, show_progress, is_cancelled, may_calibrate_later
            )
        if calibration is not None or pending_config is not None:
            resolved, fits = resolve(config, checkpoint.shape, checkpoint, calibration)
        _check_cancelled(is_cancelled)
        # In parallel with the weights: packing releases the GIL, and another process parses the chat template.
        with gc_paused(), ThreadPoolExecutor(1, "quire-tokenizer") as beside:
            loading = beside.submit(load_tokenizer, path, resolved.model.tokenizer, resolved.model.chat_template)
            engine_model = load_model(checkpoint, resolved)
            tokenizer = loading.result()
        shape, weights = checkpoint.shape, _weights_text(checkpoint, resolved)
    requested, possible = config.model.max_context, fits.max_context
    if requested is not None and possible < requested:
        log.warning(
            "model.max_context is %d, and a cache of %s holds %d tokens: a request may have that many; %d need %s or a"
            " little more: raise cache.memory",
            requested, fits.cache_text, possible, requested, format_bytes(round(requested * fits.bytes_per_token)),
        )  # fmt: skip
    name = resolved.model.name or short_name(model)
    model_id = fingerprint(path)
    if resolved.cache.check and resolved.cache.codec != DENSE:
        _check_cancelled(is_cancelled)
        check_codec(engine_model, tokenizer, resolved, model_id, calibration)
    _log_loaded(name, shape, resolved, fits, weights)
    is_given = tiers is not None
    if is_given or resolved.tiers.is_on or peer_tiers:
        # Data that outlives the process needs the full digest, not the cheap fingerprint.
        model_id = digest_of(checkpoint, _logged_hashing()).digest
    if not is_given and resolved.tiers.is_on:
        namespace = namespace_of(resolved, shape, model_id, calibration)
        tiers = open_tiers(resolved.tiers, namespace, resolved.cache.lifetime)
    if peer_tiers:
        tiers = Tiers([*([] if tiers is None else tiers.tiers), *peer_tiers])
    with contextlib.ExitStack() as on_error:
        if tiers is not None and not is_given:
            on_error.callback(tiers.close)
        engine = assemble(engine_model, tokenizer, resolved, fits, model_id, calibration, tiers)
        if tiers is not None and not is_given:
            if resolved.tiers.disk is not None:
                log.info("measuring the disk of tiers.disk, and how fast prompts are computed")
            engine.scheduler.manager.fetching.costs.speed = tiers.measure()
            measure_prefill(engine)
        on_error.pop_all()
    return LoadedEngine(engine, tokenizer, shape, fits, resolved, name, path, model, pending_config)


def _without_calibration(
    path: Path,
    config: EngineConfig,
    resolved: EngineConfig,
    show_progress: bool | None,
    is_cancelled: Callable[[], bool],
    may_calibrate_later: bool,
) -> tuple[EngineConfig, EngineConfig | None, Calibration | None]:
    """For a codec that has no calibration yet: makes the calibration, or lets the engine begin with dense pages.
    Returns the configuration to begin with, `LoadedEngine.pending_config`, and the calibration.
    """
    reason = "" if not may_calibrate_later else _must_wait(config, resolved)
    if may_calibrate_later and not reason:
        # The size of an automatic cache is decided once, because weights and this cache occupy memory later.
        pending_config = replace(config, cache=replace(config.cache, memory=resolved.cache.memory))
        return replace(config, cache=_dense(config.cache)), pending_config, None
    if reason:
        log.warning("cache.codec %s is calibrated before serving begins: %s", config.cache.codec, reason)
    return config, None, _calibrated(path, config, show_progress, is_cancelled)


def _log_loaded(name: str, shape: ModelShape, resolved: EngineConfig, fits: EngineSizes, weights: str) -> None:
    """Logs the model and its main settings. weights: see `_weights_text`."""
    retain = resolved.retain
    how = "threshold" if retain.threshold != "off" else "budget"
    retained = f", retention by a {how} of {getattr(retain, how)}" if retain.is_on else ""
    share = resolved.cache.sparse_values
    sparse = f", decoded tokens read {share:g} of the values" if share < 1 else ""
    disk = resolved.tiers
    on_disk = f", at most {format_bytes(disk.disk_bytes)} on the disk in {disk.disk_folder}" if disk.disk else ""
    log.info(
        "%s: %s, cache %s of %s for %d tokens, context %d, %s attention on %s%s%s%s",
        name,
        f"{format_bytes(fits.weight_bytes)} {weights}",
        fits.cache_text,
        resolved.cache.codec,
        fits.tokens,
        fits.max_context,
        resolved.attention.backend,
        _machine(resolved),
        retained,
        sparse,
        on_disk,
    )
    if resolved.runtime.device == "cpu":
        log.info("memory: %s; cache.memory sets the cache", footprint(shape, resolved, fits))


def _must_wait(config: EngineConfig, resolved: EngineConfig) -> str:
    """The reason why an engine cannot begin with dense pages and change its codec later; empty if it can."""
    if resolved.runtime.device != "cpu" or resolved.attention.backend != "cpu":
        return f"on {resolved.runtime.device} with attention.backend {resolved.attention.backend} it needs the cores"
    named = {
        "tiers": config.tiers.is_on,
        "offload": config.offload.is_on,
        "cache.pin": config.cache.pin is not None,
        "runtime.step_log": config.runtime.step_log is not None,
    }
    found = [name for name, is_on in named.items() if is_on]
    return f"with {' and '.join(found)} the codec cannot change while the server runs" if found else ""


def _dense(cache: CacheConfig) -> CacheConfig:
    """The same cache with dense pages, without the settings that only other codecs have."""
    return CacheConfig(
        codec=DENSE, memory=cache.memory, share=cache.share, lifetime=cache.lifetime, sparse_values=cache.sparse_values
    )


def with_codec(
    loaded: LoadedEngine, config: EngineConfig, fits: EngineSizes, calibration: Calibration, *, preempts: bool
) -> LoadedEngine | None:
    """Replaces the engine by one with the codec that waited for its calibration. The new engine takes over all
    requests, but no cached chunks. Both caches are allocated for a moment; unwritten parts take no memory.

    config, fits  the result of `resolve` for `loaded.pending_config`
    preempts      whether running requests lose their pages and are computed again; otherwise there must be none
    Returns None, and changes nothing, if there are requests that may not be preempted or would not fit the new cache.
    Raises ConfigError if the codec does not work on this model. Call it on the thread that owns the engine.
    """
    old = loaded.engine
    if old.has_work and not (preempts and old.longest_request <= fits.max_context):
        return None
    model_id = old.namespace.model
    if config.cache.check:
        check_codec(old.runner.model, loaded.tokenizer, config, model_id, calibration)
    engine = assemble(old.runner.model, loaded.tokenizer, config, fits, model_id, calibration)
    num_running = len(old.scheduler.running)
    engine.take_over(old)
    log.info(
        "cache.codec %s is taken: cache %s for %d tokens, context %d; %d running requests are computed again",
        config.cache.codec,
        fits.cache_text,
        fits.tokens,
        fits.max_context,
        num_running,
    )
    return replace(loaded, engine=engine, config=config, sizes=fits, pending_config=None)


def _weights_text(checkpoint: Checkpoint, resolved: EngineConfig) -> str:
    """The types of the weights in memory: `weights in Q4_K and Q6_K, the rest in bfloat16`."""
    kinds = ops_type(resolved.attention.backend).kinds
    dtype = resolved.model.dtype
    parts = group_tensors(checkpoint, torch_dtype(dtype), resolved.model.weights, kinds)
    packed = list(dict.fromkeys(each.held for each in parts if each.held != dtype))
    return f"weights in {' and '.join(packed)}, the rest in {dtype}" if packed else f"weights in {dtype}"


def _logged_hashing() -> Report:
    """A report function for `digest_of` that logs once that weights are hashed, unless their hashes are remembered."""
    is_logged = False

    def report(done: int, total: int) -> None:
        nonlocal is_logged
        if not is_logged:
            log.info("hashing %s of weights, once", format_bytes(total))
        is_logged = True

    return report


def _machine(resolved: EngineConfig) -> str:
    """The device as text; for a CPU also the level of its kernels and the work that is slower with them."""
    if resolved.attention.backend != "cpu":
        return resolved.runtime.device
    level = runtime.level()
    slower = LEVELS[level].slower
    return f"{resolved.runtime.device} ({level}{slower and ': ' + slower})"


def calibration_for(
    path: Path, config: EngineConfig, report: Callable[[str, int, int], None] | None = None
) -> Calibration | None:
    """The calibration for a cache with this configuration. Makes it if there is none; None if the codec needs none.

    report  called with (phase, done, total); None: progress bars, or lines in the log
    """
    found = find_calibration(path, config)
    if found is not None or not config.cache.is_calibrated:
        return found
    return _calibrated(path, config, show_progress=None, is_cancelled=lambda: False, progress=report)


def _calibrated(
    path: Path,
    config: EngineConfig,
    show_progress: bool | None,
    is_cancelled: Callable[[], bool],
    progress: Callable[[str, int, int], None] | None = None,
) -> Calibration:
    """Makes a calibration; see `load_engine`."""
    settings = CalibrationSettings.of(config.cache)
    file = settings.file(fingerprint(path))
    # A warning, because the user did not ask for these minutes of work.
    log.warning(
        "cache.codec %s needs a calibration of this model; making it once, in %s%s",
        config.cache.codec,
        file,
        calibration_time(path, config),
    )
    begun = time.monotonic()
    of_another = None

    def made_meanwhile() -> Calibration | None:
        nonlocal of_another
        of_another = find_calibration(path, config)
        return of_another

    with contextlib.nullcontext(progress) if progress is not None else progress_display(show_progress) as show:

        def report(what: str, done: int, total: int) -> None:
            _check_cancelled(is_cancelled)
            show(what, done, total)

        made = calibrate(path, settings, file, config=config, progress=report, unless=made_meanwhile)
    if made is not of_another:
        log.info("calibrated in %.0f s", time.monotonic() - begun)
    return made


def calibration_seconds(path: Path, config: EngineConfig, threads: int | None = None) -> float | None:
    """Estimated seconds of the default calibration for a cache with this configuration; None if it is not on a CPU."""
    from quire.calibrate.estimate import estimated_seconds

    if device_type_of(config.runtime.device) != "cpu":
        return None
    with open_model(path) as checkpoint:
        shape = checkpoint.shape
    threads = threads or config.runtime.threads or usable_cores()
    return estimated_seconds(shape, CalibrationSettings.of(config.cache), threads)


def calibration_time(path: Path, config: EngineConfig) -> str:
    """`: about 3 minutes`, the estimate for a log line; empty if there is none."""
    from quire.calibrate.estimate import duration_text

    seconds = calibration_seconds(path, config)
    return "" if seconds is None else f": {duration_text(seconds)} while nothing else uses these cores"


def _check_cancelled(is_cancelled: Callable[[], bool]) -> None:
    if is_cancelled():
        raise LoadCancelledError("loading was cancelled")


def find_calibration(path: Path, config: EngineConfig) -> Calibration | None:
    """The existing calibration for a cache with this configuration, or None: that of cache.calibration, else the kept
    one, else the one that comes with Quire.

    Raises ConfigError if the file of cache.calibration is unusable. Ignores an unusable kept calibration, with a
    warning.
    """
    if not config.cache.is_calibrated:
        return None
    model = fingerprint(path)
    if config.cache.calibration is not None:
        return Calibration.load(Path(config.cache.calibration), model)
    return kept_calibration(model, CalibrationSettings.of(config.cache))


def kept_calibration(model: str, settings: CalibrationSettings) -> Calibration | None:
    """The kept calibration with these settings of the model with this fingerprint, else the one that comes with Quire,
    or None. Ignores an unusable one, with a warning.
    """
    from quire.calibrate.shipped import shipped

    file = settings.file(model)
    try:
        return Calibration.load(file, model) if file.exists() else shipped(model, settings)
    except ConfigError as error:
        log.warning("%s", error)
        return None
