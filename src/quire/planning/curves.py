"""Measured losses of quality, as they are kept for a model, and what is predicted from them.

A curve is what one configuration makes of the windows of one text: the mean loss of each window. The loss of quality of
settings is the ratio of perplexities minus one, over windows that both have read. Windows that are hard for one are
hard for the other, so the error of a ratio comes from the differences within windows.

Settings that nobody has measured get the sum of what their parts lose (weights, codec, retention), as logarithms of
ratios. That holds where parts disturb different things; the sum says `modelled`.

Knows numbers and files, and nothing of how they are measured: see `quire.planning.quality`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from quire.errors import ConfigError
from quire.planning.space import Settings, Space
from quire.records import formatted, read_record
from quire.safe_io import atomic_write
from quire.timing.latency import About, Origin

log = logging.getLogger("quire")

FORMAT = 1

CONFIDENCE = 0.95
"""Share of samples of windows like those that were read for which the bounds of a loss hold. Other texts may differ by
more.
"""

BEYOND = 4.0
"""Settings that lose more than this multiple of the quality budget are not shown."""

REFERENCE = "the reference"

FITTED_TEXT = "calibration_text"
"""Name of a curve's setting: SHA-256 of the text that the codec was calibrated on. Without one the model wrote it."""


@dataclass(frozen=True)
class Reading:
    """How windows are read.

    text          SHA-256 of the text
    context       tokens of a window
    continuation  scored tokens at its end, which are decoded one by one; None: all, as a prompt
    """

    text: str
    context: int
    continuation: int | None = None


@dataclass(frozen=True)
class LossCurve:
    """Measured losses of one configuration.

    model      fingerprint of the checkpoint
    settings   what decides the losses, by name
    text_name  of the file, for people
    losses     mean negative log-likelihood of the scored tokens of each window, in nats, from the text's beginning on
    version    of Quire
    date       of the measurement
    """

    model: str
    settings: dict[str, str | int | float | bool | None]
    text: str
    text_name: str
    context: int
    continuation: int | None
    losses: tuple[float, ...]
    version: str = ""
    date: str = ""

    @classmethod
    def of(cls, model: str, settings: About, scoring: Reading, text_name: str = "") -> LossCurve:
        """A curve without windows."""
        return cls(model, dict(settings), scoring.text, text_name, scoring.context, scoring.continuation, ())

    def __post_init__(self) -> None:
        for index, loss in enumerate(self.losses):
            if not 0 <= loss < math.inf:
                raise ConfigError(f"losses[{index}] is {loss!r}; it must be a number of at least 0")

    @property
    def scoring(self) -> Reading:
        """How it was read."""
        return Reading(self.text, self.context, self.continuation)

    @property
    def name(self) -> str:
        """Of its file: the same for everything that is measured in the same way."""
        told = json.dumps([self.model, self.settings, self.text, self.context, self.continuation], sort_keys=True)
        return hashlib.blake2b(told.encode(), digest_size=12).hexdigest()


@dataclass(frozen=True)
class Loss:
    """Quality that settings lose, beside the same model without any loss.

    log_ratio    logarithm of the perplexity over the reference's
    error        standard error of it; None: it is not known, because a single window was read
    how          what it comes from, for people
    num_windows  that were read; infinite: the error is known
    is_fitted    whether the codec was calibrated on the text that was read: others lose more
    """

    log_ratio: float
    error: float | None
    origin: Origin
    how: str = ""
    num_windows: float = math.inf
    is_fitted: bool = False

    @property
    def value(self) -> float:
        """Ratio of perplexities minus one; below 0 if the settings happen to do better."""
        return math.expm1(self.log_ratio)

    @property
    def value_error(self) -> float | None:
        """Standard error of `value`, to first order."""
        return None if self.error is None else self.error * math.exp(self.log_ratio)

    @property
    def most(self) -> float:
        """What it is at most, but for one of 20 samples of windows; infinite without an error."""
        return math.expm1(self.log_ratio + self._margin)

    @property
    def least(self) -> float:
        """What it is at least, likewise."""
        return math.expm1(self.log_ratio - self._margin)

    @property
    def _margin(self) -> float:
        if not self.error:
            return 0.0 if self.error == 0 else math.inf
        from scipy.stats import t

        return self.error * float(t.ppf(CONFIDENCE, self.num_windows - 1))

    def is_within(self, budget: float) -> bool:
        """Whether it is at most the budget, with its margin."""
        return self.most <= budget


NOTHING = Loss(0.0, 0.0, Origin.MEASURED, REFERENCE)
"""What settings without any loss lose, by definition."""


def compared(curve: LossCurve, reference: LossCurve) -> Loss:
    """The loss of one curve beside another one, over the windows that both have."""
    assert curve.scoring == reference.scoring, f"{curve.scoring} beside {reference.scoring}"
    pairs = zip(curve.losses, reference.losses, strict=False)
    differences = [mine - its for mine, its in pairs]
    assert differences, "a curve without windows"
    count = len(differences)
    error = stdev(differences) / math.sqrt(count) if count > 1 else None
    part = "" if curve.continuation is None else f", last {curve.continuation:,}"
    how = f"{count} window{'s' * (count > 1)} of {curve.context:,} tokens{part} of {curve.text_name}"
    is_fitted = curve.settings.get(FITTED_TEXT) == curve.text
    return Loss(fmean(differences), error, Origin.MEASURED, how, count, is_fitted)


def summed(losses: Mapping[str, Loss]) -> Loss:
    """The loss of several parts together, by their names, if they do not depend on each other."""
    errors = [each.error for each in losses.values()]
    known = [error for error in errors if error is not None]
    return Loss(
        sum(each.log_ratio for each in losses.values()),
        math.hypot(*known) if len(known) == len(errors) else None,
        Origin.MODELLED,
        "sum of " + " and ".join(losses),
        min(each.num_windows for each in losses.values()),
        any(each.is_fitted for each in losses.values()),
    )


class Curves:
    """The kept curves of a model. One file each; files of another format, or damaged ones, are ignored.

    folder  of the curves of all models; it need not exist
    model   fingerprint
    """

    def __init__(self, folder: Path, model: str) -> None:
        self.model = model
        self._folder = folder / model
        self._curves: dict[str, LossCurve] = {}
        for path in sorted(self._folder.glob("*.json")):
            try:
                curve = read_curve(path)
            except ConfigError as error:
                log.warning("%s", error)
                continue
            if curve.model == model:
                self._curves[curve.name] = curve

    def find(self, settings: About, scoring: Reading) -> LossCurve | None:
        """The curve of these settings, read in this way."""
        return self._curves.get(LossCurve.of(self.model, settings, scoring).name)

    def scorings(self, settings: About) -> list[Reading]:
        """The ways in which these settings were read, most windows first."""
        found = [each for each in self._curves.values() if each.settings == settings]
        return [each.scoring for each in sorted(found, key=lambda each: (-len(each.losses), each.name))]

    def keep(self, curve: LossCurve) -> None:
        """Keeps a curve, in place of an earlier one that was read in the same way. A file that cannot be written is
        only missed by later runs.
        """
        self._curves[curve.name] = curve
        path = self._folder / f"{curve.name}.json"
        try:
            with atomic_write(path) as draft:
                draft.write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(curve)}, indent=1) + "\n")
        except OSError as error:
            log.warning("%s cannot be written (%s); the next plan measures again", path, error.strerror or error)


def read_curve(path: Path) -> LossCurve:
    """The curve of a file. Raises ConfigError that names the file and the field if it is none."""
    what = f"a curve of format {FORMAT}; quire plan auto --text FILE makes one"
    return read_record(path, "curve", lambda fields: formatted(LossCurve, fields, FORMAT, what))


@dataclass(frozen=True)
class Losses:
    """What is known of the quality of settings.

    space     they are part of
    curves    measured ones
    key_of    what decides the losses of settings, by name. Raises ConfigError for settings that cannot be
    scoring   how windows are read for the plan, if the settings lose in decoded tokens alone; all others score whole
              windows. None: nothing is measured
    """

    space: Space
    curves: Curves
    key_of: Callable[[Settings], About]
    scoring: Reading | None = None

    def measured(self, settings: Settings) -> Loss | None:
        """The loss of exactly these settings: of the plan's own text before that of any other one, and of a text that
        the codec was calibrated on last of all.
        """
        lossy = self.space.lossy(settings)
        if not self.space.parts(lossy):
            return NOTHING
        key, plain = self.key_of(lossy), self.key_of(self.reference(settings))
        own = self.scoring_of(lossy)
        ways = self.curves.scorings(key) if own is None else [own, *self.curves.scorings(key)]
        for way in sorted(ways, key=lambda each: each.text == key.get(FITTED_TEXT)):  # stable
            curve, reference = self.curves.find(key, way), self.curves.find(plain, way)
            if curve is not None and reference is not None and curve.losses and reference.losses:
                return compared(curve, reference)
        return None

    def of(self, settings: Settings) -> Loss | None:
        """The measured loss, or else the sum of the parts; None if one of them is not known."""
        found = self.measured(settings)
        if found is not None:
            return found
        parts = {name: self.measured(part) for name, part in self.space.parts(settings).items()}
        known = {name: loss for name, loss in parts.items() if loss is not None}
        return summed(known) if len(known) == len(parts) > 1 else None

    def scoring_of(self, settings: Settings) -> Reading | None:
        """How windows are read for the plan with these settings."""
        if self.scoring is None or self.space.decodes(settings):
            return self.scoring
        return dataclasses.replace(self.scoring, continuation=None)

    def reference(self, settings: Settings) -> Settings:
        """What the settings are compared with."""
        return self.space.only(settings, ())

    def num_windows(self, settings: Settings) -> int:
        """Windows of the plan's own text that were read with these settings, and without any loss."""
        lossy = self.space.lossy(settings)
        way = self.scoring_of(lossy)
        if way is None:
            return 0
        curves = [self.curves.find(self.key_of(each), way) for each in (lossy, self.reference(settings))]
        return min(0 if each is None else len(each.losses) for each in curves)


def parts_of(space: Space, settings: Sequence[Settings]) -> list[Settings]:
    """Every part of some settings once. First come those that are cheap to measure, because they read a text as a
    prompt, and then those with few choices.
    """
    found = dict.fromkeys(part for each in settings for part in space.parts(each).values())
    plain = space.only(settings[0], ()) if settings else None
    return sorted(found, key=lambda part: (space.decodes(part), 0 if plain is None else len(part.differs(plain))))
