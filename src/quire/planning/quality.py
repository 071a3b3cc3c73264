"""Measures the losses of quality that `quire plan auto` plans with, with the engine that would serve: see `perplexity`.

Windows are read one after the other and kept after each one, so that a measurement that runs out of time, or is
interrupted, goes on where it ended. Engines of different weights are not in memory at once.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from quire.cache.codecs import DENSE
from quire.config import EngineConfig
from quire.engine.calibration import Calibration
from quire.engine.machine import device_type_of
from quire.errors import ConfigError
from quire.evaluation.perplexity import CONTINUATION, Perplexity, cut_windows, measure
from quire.folders import user_cache
from quire.load import find_calibration
from quire.measure.engines import load_engines
from quire.measure.latency_bench import retention_text
from quire.measure.memory_use import free_memory
from quire.models.fingerprint import fingerprint
from quire.models.resolve import resolve_model
from quire.models.shape import ModelShape
from quire.models.tokenizer import load_tokenizer
from quire.models.weights import open_model
from quire.planning.curves import BEYOND, FITTED_TEXT, Curves, Loss, LossCurve, Losses, Reading, parts_of
from quire.planning.space import Settings, Space
from quire.safe_io import read_given_text
from quire.timing.latency import About
from quire.version import __version__

CONTEXT, WINDOWS = 1024, 12
"""Tokens of a window, and most windows that settings are measured with. With SmolLM2 on two cores a window takes half a
second as a prompt, and three seconds if 256 tokens of it are decoded.
"""

LEAST_CONTEXT = 8
"""Tokens of the shortest window: two of them are an answer."""

FIRST_WINDOWS = 4
"""Windows that all settings are measured with before any gets more."""

LOSSLESS = ("native", "dequantized")
"""Values of model.weights that lose nothing: dequantized weights are rounded once more, which changes perplexity by up
to 0.15 % (docs/lab/weights.md).
"""

Progress = Callable[[str, int, int], None]
"""Is told what is measured, windows done, and all of them."""


def curve_folder() -> Path:
    """The folder of kept curves, with a folder for each model."""
    return user_cache() / "curves"


@dataclass(frozen=True)
class Text:
    """A text to measure with. name: of its file."""

    name: str
    content: str

    @property
    def digest(self) -> str:
        """SHA-256."""
        return hashlib.sha256(self.content.encode()).hexdigest()

    @classmethod
    def read(cls, file: Path) -> Text:
        """The text of a file. Raises ConfigError."""
        return cls(file.name, read_given_text(file))


class Quality:
    """What is known of the quality of a model's settings, and what can be measured of it.

    name         as for `LLM`
    base         configuration of the engines, as far as no axis decides it
    text         to measure with; None: nothing is measured
    context      tokens of a window; None: CONTEXT, or as many as the model takes
    num_windows  most of them
    losses       what is known so far
    """

    def __init__(
        self,
        name: str,
        base: EngineConfig,
        space: Space,
        text: Text | None = None,
        *,
        context: int | None = None,
        num_windows: int = WINDOWS,
        folder: Path | None = None,
    ) -> None:
        self.name, self.space, self._text, self._num_windows = name, space, text, num_windows
        self._base = base
        self._path = resolve_model(name)
        self.model_id = fingerprint(self._path)
        with open_model(self._path) as checkpoint:
            self._shape = checkpoint.shape
        if context is None:
            context = min(CONTEXT, base.model.max_context or self._shape.max_context)
        if context < LEAST_CONTEXT:
            raise ConfigError(
                f"a window of {context} tokens has no room for a prompt and an answer; give at least {LEAST_CONTEXT}"
            )
        # An answer needs a prompt that retention can drop something of.
        continuation = min(CONTINUATION, context // 4)
        scoring = None if text is None else Reading(text.digest, context, continuation)
        self.key_of = functools.cache(self._key_of)
        self.losses = Losses(space, Curves(folder or curve_folder(), self.model_id), self.key_of, scoring)
        self._windows: list[list[int]] | None = None

    def config_of(self, settings: Settings) -> EngineConfig:
        """Raises ConfigError."""
        return settings.engine(self._base)

    def calibration_of(self, config: EngineConfig) -> Calibration | None:
        """The calibration of a configuration. Raises ConfigError with a command that makes it if there is none."""
        found = find_calibration(self._path, config)
        if found is None and config.cache.is_calibrated:
            slots, sinks = config.cache.outlier_slots, config.cache.sink_tokens
            raise ConfigError(
                f"there is no calibration with {slots} outlier slots; make it with quire calibrate {self.name}"
                f" --outlier-slots {slots} --sink-tokens {sinks}"
            )
        return found

    def measure_all(
        self, settings: Sequence[Settings], quality: float, deadline: float, progress: Progress = lambda *_: None
    ) -> dict[Settings, str]:
        """Measures the parts of some settings, until a time of `time.monotonic`. Returns why parts are not known.

        quality  the budget: parts that are clearly within it or beyond it are not measured more closely
        Of an ordered axis nothing is measured behind a choice that loses more than anybody would want.
        """
        failed: dict[Settings, str] = {}
        parts = []
        for part in parts_of(self.space, settings):
            try:
                self.key_of(part)
            except ConfigError as error:
                failed[part] = str(error)
            else:
                parts.append(part)
        for count in (min(FIRST_WINDOWS, self._num_windows), self._num_windows):
            too_much: set[str] = set()
            for part in parts:
                known, axes = self.losses.measured(part), self._ordered(part)
                if known is None and too_much.intersection(axes):
                    failed[part] = "a choice of the same kind that loses less loses too much already"
                elif known is None or not (self.losses.num_windows(part) >= count or _is_clear(known, quality)):
                    failed[part] = self.measure(part, count, deadline, progress)
                    known = self.losses.measured(part)
                if known is not None:
                    failed.pop(part, None)
                    too_much.update(axes if known.least > BEYOND * quality else ())
        return failed

    def measure(self, settings: Settings, count: int, deadline: float, progress: Progress = lambda *_: None) -> str:
        """Reads `count` windows, or as many as there is time for, with what of the settings may cost quality, and with
        the reference. Returns why nothing more is known; empty: all windows were read.
        """
        if self._text is None:
            return "no kept curve has it, and there is no text to measure it with; give --text FILE"
        lossy = self.space.lossy(settings)
        scoring = self.losses.scoring_of(lossy)
        assert scoring is not None
        for each in (self.losses.reference(lossy), lossy):
            try:
                is_done = self._read(each, scoring, count, deadline, progress)
            except ConfigError as error:
                return str(error)
            if not is_done:
                return "the time was over before its quality was measured"
        return ""

    def _read(self, settings: Settings, scoring: Reading, count: int, deadline: float, progress: Progress) -> bool:
        """Reads the windows that a curve lacks. Returns whether there was time for all."""
        windows = self._cut(scoring.context)[:count]
        key = self.key_of(settings)
        assert self._text is not None
        curve = self.losses.curves.find(key, scoring) or LossCurve.of(self.model_id, key, scoring, self._text.name)
        left = windows[len(curve.losses) :]
        if not left:
            return True
        if time.monotonic() >= deadline:
            return False
        what = self.space.name(settings)
        config = self.config_of(settings)
        self.calibration_of(config)
        engines, _ = load_engines(self.name, config, scoring.context)
        try:
            for number, window in enumerate(left):
                begun = time.monotonic()
                progress(f"quality of {what}", number, len(left))
                (found,) = measure(engines, [window], continuation=scoring.continuation)
                curve = _longer(curve, found.window_nll)
                self.losses.curves.keep(curve)
                # The next one takes as long.
                if 2 * time.monotonic() - begun >= deadline and number + 1 < len(left):
                    return False
        finally:
            engines.clear()
            free_memory()
        return True

    def _ordered(self, part: Settings) -> list[str]:
        """The ordered axes in which a part is not plain."""
        plain = self.space.plain
        return [each.name for each in self.space.axes if each.is_ordered and part.of(each.name) != plain[each.name]]

    def _cut(self, context: int) -> list[list[int]]:
        if self._windows is None:
            assert self._text is not None
            model = self._base.model
            tokenizer = load_tokenizer(self._path, model.tokenizer, model.chat_template)
            self._windows = cut_windows(tokenizer.encode(self._text.content), context)
        return self._windows

    def _key_of(self, settings: Settings) -> About:
        config = self.config_of(settings)
        return quality_key(config, self._shape, self.calibration_of(config))


def keep_results(name: str, text: Text, results: Sequence[Perplexity], configs: Mapping[str, EngineConfig]) -> None:
    """Keeps what `perplexity` found for later plans, unless more windows are kept already that were read in the same
    way.

    name     of the model
    text     that was read
    configs  of the results' engines: see `configs_of`
    """
    path = resolve_model(name)
    with open_model(path) as checkpoint:
        shape = checkpoint.shape
    curves = Curves(curve_folder(), fingerprint(path))
    for each in results:
        config = configs[each.codec]
        key = quality_key(config, shape, find_calibration(path, config))
        scoring = Reading(text.digest, each.context, each.continuation)
        known = curves.find(key, scoring)
        if known is None or len(known.losses) < len(each.window_nll):
            curves.keep(_longer(LossCurve.of(curves.model, key, scoring, text.name), each.window_nll))


def quality_key(config: EngineConfig, shape: ModelShape, calibration: Calibration | None) -> About:
    """What decides the losses of a configuration, by name."""
    cache = config.cache
    found: About = {
        "dtype": shape.dtype if config.model.dtype == "auto" else config.model.dtype,
        "weights": "lossless" if config.model.weights in LOSSLESS else config.model.weights,
        "codec": cache.codec,
        "sparse_values": cache.sparse_values,
        "retain": retention_text(config.retain),
        "device": device_type_of(config.runtime.device),
    }
    if cache.codec != DENSE:
        found |= {"sinks": cache.num_sinks, "strict": cache.strict}
    if calibration is not None:
        found |= {"slots": cache.outlier_slots, "calibration": calibration.hash}
        if (digest := calibration.settings.get("text", {}).get("sha256")) is not None:
            found[FITTED_TEXT] = digest
    return found


def _longer(curve: LossCurve, losses: Sequence[float]) -> LossCurve:
    """The curve with the losses of further windows, which were measured just now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return replace(curve, losses=(*curve.losses, *losses), version=__version__, date=now)


def _is_clear(loss: Loss, quality: float) -> bool:
    """Whether more windows would hardly change on which side of the budget a loss is."""
    if loss.error is None:
        return False
    return loss.log_ratio + 3 * loss.error < quality / 2 or loss.log_ratio - 3 * loss.error > quality
