"""Loads an engine from a model's name and a configuration. Calibrates first if the codec needs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from quire.cache.codecs import DENSE
from quire.check import check_codec
from quire.collecting import uncollected
from quire.config import EngineConfig, format_bytes
from quire.engine.build import assemble, load_model, ops_type, resolve
from quire.engine.calibration import Calibration
from quire.engine.control import namespace_of
from quire.engine.engine import Engine
from quire.engine.footprint import footprint
from quire.engine.pins import read_lines
from quire.engine.sizes import Sizes
from quire.errors import ConfigError, UnwantedError
from quire.kernels.levels import LEVELS
from quire.models.digest import Report, digest_of
from quire.models.fingerprint import fingerprint
from quire.models.layers import torch_dtype
from quire.models.loading import held
from quire.models.resolve import resolve_model, short_name
from quire.models.shape import ModelShape
from quire.models.tokenizer import Tokenizer, load_tokenizer
from quire.models.weights import Checkpoint, open_model
from quire.stores.opening import open_tiers
from quire.stores.tiers import Tier, Tiers

log = logging.getLogger("quire")


@dataclass(frozen=True)
class Loaded:
    """An engine and its context. `config` has no automatic values left.

    path, asked_for  the model's path, and the name by which it was requested
    """

    engine: Engine
    tokenizer: Tokenizer
    shape: ModelShape
    sizes: Sizes
    config: EngineConfig
    model_name: str
    path: Path
    asked_for: str


def load_engine(
    model: str,
    config: EngineConfig,
    *,
    show_progress: bool | None = None,
    unwanted: Callable[[], bool] = lambda: False,
    tiers: Tiers | None = None,
    neighbours: Sequence[Tier] = (),
) -> Loaded:
    """Loads the model and allocates the cache. Calibrates first if the codec needs a calibration and there is none.
    Checks a codec that has not been checked on this model.

    show_progress  progress bars for downloading and calibrating; None: only if stderr is a terminal
    unwanted       polled between phases and during calibration; True cancels loading
    tiers          stores in place of those that the configuration names, for good: nothing is measured
    neighbours     stores that come after those that the configuration names
    Raises ModelError or ConfigError with one line, and UnwantedError if cancelled.
    """
    if config.cache.pin is not None:
        read_lines(Path(config.cache.pin))
    path = resolve_model(model, show_progress)
    with open_model(path) as checkpoint:
        calibration = find_calibration(path, config)
        resolved, fits = resolve(config, checkpoint.shape, checkpoint, calibration)
        if not fits.fit_the_machine:
            raise ConfigError(fits.fails_first)
        if calibration is None and config.cache.is_calibrated:
            _ask(unwanted)
            calibration = _calibrated(path, config, show_progress, unwanted)
            resolved, fits = resolve(config, checkpoint.shape, checkpoint, calibration)
        _ask(unwanted)
        # In parallel with the weights: packing releases the GIL, and another process parses the chat template.
        with uncollected(), ThreadPoolExecutor(1, "quire-tokenizer") as beside:
            loading = beside.submit(load_tokenizer, path, resolved.model.tokenizer, resolved.model.chat_template)
            engine_model = load_model(checkpoint, resolved)
            tokenizer = loading.result()
        shape, weights = checkpoint.shape, _weights_text(checkpoint, resolved)
    asked, possible = config.model.max_context, fits.max_context
    if asked is not None and possible < asked:
        log.warning(
            "model.max_context is %d, and a cache of %s holds %d tokens: a request may have that many; %d need %s or a"
            " little more: raise cache.memory",
            asked, fits.cache_text, possible, asked, format_bytes(round(asked * fits.bytes_per_token)),
        )  # fmt: skip
    name = resolved.model.name or short_name(model)
    model_id = fingerprint(path)
    if resolved.cache.check and resolved.cache.codec != DENSE:
        _ask(unwanted)
        check_codec(engine_model, tokenizer, resolved, model_id, calibration)
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
    is_given = tiers is not None
    if is_given or resolved.tiers.is_on or neighbours:
        # Cheap names are not enough for what outlives the process.
        model_id = digest_of(checkpoint, _told_hashing()).digest
    if not is_given and resolved.tiers.is_on:
        namespace = namespace_of(resolved, shape, model_id, calibration)
        tiers = open_tiers(resolved.tiers, namespace, resolved.cache.lifetime)
    if neighbours:
        tiers = Tiers([*([] if tiers is None else tiers.tiers), *neighbours])
    try:
        engine = assemble(engine_model, tokenizer, resolved, fits, model_id, calibration, tiers)
        if tiers is not None and not is_given:
            if resolved.tiers.disk is not None:
                log.info("measuring the disk of tiers.disk, and how fast prompts are computed")
            engine.scheduler.manager.fetching.costs.speed = tiers.measure()
            engine.measure()
    except BaseException:
        if tiers is not None and not is_given:
            tiers.close()
        raise
    return Loaded(engine, tokenizer, shape, fits, resolved, name, path, model)


def _weights_text(checkpoint: Checkpoint, resolved: EngineConfig) -> str:
    """The types of the weights in memory: `weights in Q4_K and Q6_K, the rest in bfloat16`."""
    kinds = ops_type(resolved.attention.backend).kinds
    dtype = resolved.model.dtype
    parts = held(checkpoint, torch_dtype(dtype), resolved.model.weights, kinds)
    packed = list(dict.fromkeys(each.held for each in parts if each.held != dtype))
    return f"weights in {' and '.join(packed)}, the rest in {dtype}" if packed else f"weights in {dtype}"


def _told_hashing() -> Report:
    """Says once that weights are hashed, unless their hashes are remembered."""
    is_told = False

    def report(done: int, total: int) -> None:
        nonlocal is_told
        if not is_told:
            log.info("hashing %s of weights, once", format_bytes(total))
        is_told = True

    return report


def _machine(resolved: EngineConfig) -> str:
    """The device; for a CPU also the level of its kernels and what is slower with them."""
    if resolved.attention.backend != "cpu":
        return resolved.runtime.device
    from quire.kernels import runtime

    level = runtime.level()
    slower = LEVELS[level].slower
    return f"{resolved.runtime.device} ({level}{slower and ': ' + slower})"


def calibration_for(path: Path, config: EngineConfig) -> Calibration | None:
    """The calibration for a cache with this configuration. Makes it if there is none; None if the codec needs none."""
    found = find_calibration(path, config)
    if found is not None or not config.cache.is_calibrated:
        return found
    return _calibrated(path, config, show_progress=None, unwanted=lambda: False)


def _calibrated(
    path: Path, config: EngineConfig, show_progress: bool | None, unwanted: Callable[[], bool]
) -> Calibration:
    """Makes a calibration; see `load_engine`."""
    from quire.calibrate import CalibrationSettings, calibrate
    from quire.calibrate.progress import shown

    settings = CalibrationSettings.of(config.cache)
    file = settings.file(fingerprint(path))
    # A warning, because the user did not ask for this minute of work.
    log.warning("cache.codec %s needs a calibration of this model; making it once, in %s", config.cache.codec, file)
    begun = time.monotonic()
    of_another = None

    def made_meanwhile() -> Calibration | None:
        nonlocal of_another
        of_another = find_calibration(path, config)
        return of_another

    with shown(show_progress) as progress:

        def report(what: str, done: int, total: int) -> None:
            _ask(unwanted)
            progress(what, done, total)

        made = calibrate(path, settings, file, config=config, progress=report, unless=made_meanwhile)
    if made is not of_another:
        log.info("calibrated in %.0f s", time.monotonic() - begun)
    return made


def _ask(unwanted: Callable[[], bool]) -> None:
    if unwanted():
        raise UnwantedError("loading was cancelled")


def find_calibration(path: Path, config: EngineConfig) -> Calibration | None:
    """The existing calibration for a cache with this configuration, or None.

    Raises ConfigError if the file of cache.calibration is unusable. Ignores an unusable kept calibration, with a
    warning.
    """
    if not config.cache.is_calibrated:
        return None
    from quire.calibrate.settings import CalibrationSettings

    model = fingerprint(path)
    if config.cache.calibration is not None:
        return Calibration.load(Path(config.cache.calibration), model)
    file = CalibrationSettings.of(config.cache).file(model)
    if not file.exists():
        return None
    try:
        return Calibration.load(file, model)
    except ConfigError as error:
        log.warning("%s", error)
        return None
