"""Profiles: the measured speeds of a machine for one model, as JSON files. Knows numbers; measures nothing.

Of this package, `hardware` measures them, `fit` fits their corrections, and `planner` plans with them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.config import format_bytes
from quire.errors import ConfigError
from quire.offload.units import NONE, TIERS, Share
from quire.records import above, formatted, increasing, read_record

if TYPE_CHECKING:
    from quire.models.shape import ModelShape

FORMAT = 1


@dataclass(frozen=True)
class Conditions:
    """What a profile was made for. It is used for nothing else.

    model           name of the model, for people
    shape           numbers of the model, by their names in ModelShape
    dtype           of activations
    weights         model.weights
    layer_bytes     bytes of an average layer's weights as they are stored
    codec           cache.codec
    processor       its name, as the system tells it
    threads         threads that compute
    kernels         level of the CPU kernels
    disk_bandwidth  offload.disk_bandwidth in bytes per second; None: no limit
    device          name of the GPU that computes; empty: the processor does
    """

    model: str
    shape: dict[str, str | int]
    dtype: str
    weights: str
    layer_bytes: float
    codec: str
    processor: str
    threads: int
    kernels: str
    disk_bandwidth: float | None = None
    device: str = ""

    def difference(self, other: Conditions) -> str | None:
        """The first condition in which another one differs, in words; None if all are equal. Names do not count."""
        for name in (*self.shape, *(name for name in other.shape if name not in self.shape)):
            ours, theirs = self.shape.get(name), other.shape.get(name)
            if ours != theirs:
                return f"its model has {name} {ours}, this one has {theirs}"
        settings = {
            "dtype": "model.dtype",
            "weights": "model.weights",
            "layer_bytes": "bytes of a layer",
            "codec": "cache.codec",
            "processor": "the processor",
            "threads": "runtime.threads",
            "kernels": "runtime.cpu_level",
            "disk_bandwidth": "offload.disk_bandwidth",
            "device": "the GPU",
        }
        for field, setting in settings.items():
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                shown = [_shown(field, value) for value in (ours, theirs)]
                return f"it was made with {setting} {shown[0]}, not {shown[1]}"
        return None


def _shown(field: str, value: Any) -> str:
    if value is None:
        return "auto"
    if value == "":
        return "none"
    return format_bytes(int(value)) if field == "disk_bandwidth" else f"{value}"


SHAPE_FIELDS = (
    "architecture", "vocab_size", "hidden_size", "num_layers", "num_q_heads", "num_kv_heads", "head_dim", "ffn_size",
)  # fmt: skip


def numbers_of(shape: ModelShape) -> dict[str, str | int]:
    """The numbers of a model that its speed depends on, for `Conditions.shape`."""
    return {name: getattr(shape, name) for name in SHAPE_FIELDS}


@dataclass(frozen=True)
class Rate:
    """A measured speed. spread: (maximum - minimum) / median of the rounds."""

    bandwidth: float
    """Bytes per second, the median of the rounds."""
    spread: float = 0.0

    def __post_init__(self) -> None:
        above(self.bandwidth, "bandwidth")


@dataclass(frozen=True)
class Read:
    """Sequential reads with a size of requests and a number of threads."""

    request_bytes: int
    threads: int
    rate: Rate


@dataclass(frozen=True)
class DiskSpeeds:
    """The disk under a folder.

    is_direct  whether requests passed the page cache (O_DIRECT)
    reads      of every size of requests and number of threads
    streamed   reads with the requests and threads of `offload.stream`
    writes     with requests of `stores.direct`, until they are on the disk
    request_seconds  of a read of 4 KiB by `offload.mover`, from the call until its bytes are there
    """

    folder: str
    is_direct: bool
    reads: tuple[Read, ...]
    streamed: Rate
    writes: Rate
    request_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.request_seconds < math.inf:
            raise ConfigError(f"request_seconds is {self.request_seconds!r}; it must be a number of at least 0")


@dataclass(frozen=True)
class SecondsCurve:
    """Seconds over a count: rows of a product, or tokens of a prompt. Counts increase.

    spread  median over the counts of (maximum - minimum) / median of the rounds
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: float = 0.0

    def __post_init__(self) -> None:
        increasing(self.counts, "counts")
        if len(self.seconds) != len(self.counts):
            raise ConfigError(f"seconds has {len(self.seconds)} numbers for {len(self.counts)} counts")
        for value in self.seconds:
            above(value, "seconds")

    def at(self, count: float) -> float:
        """Seconds of a count: linear between the measured ones, proportional above the last, the first below it."""
        if count > self.counts[-1]:
            return self.seconds[-1] * count / self.counts[-1]
        return float(np.interp(count, self.counts, self.seconds))


@dataclass(frozen=True)
class AttentionTimes:
    """Seconds of a layer's attention while decoding, [rows][contexts]. Both increase."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        increasing(self.rows, "rows")
        if len(self.seconds) != len(self.rows):
            raise ConfigError(f"seconds has {len(self.seconds)} lines for {len(self.rows)} rows")
        for line in self.seconds:
            SecondsCurve(self.contexts, line)

    def at(self, rows: float, context: float) -> float:
        """Seconds of rows that attend to `context` tokens each; see `SecondsCurve.at`."""
        return SecondsCurve(
            self.rows, tuple(SecondsCurve(self.contexts, line).at(context) for line in self.seconds)
        ).at(rows)

    def of_rows(self, rows: float) -> SecondsCurve:
        """Seconds of a number of rows over the context of each."""
        columns = zip(*self.seconds, strict=True)
        return SecondsCurve(self.contexts, tuple(SecondsCurve(self.rows, column).at(rows) for column in columns))


@dataclass(frozen=True)
class ProfiledGpu:
    """A GPU beside the host. Products and attention of a profile are its own.

    up, down  copies between pinned memory and the GPU
    far       seconds of a layer's attention on the host while decoding, with copies of queries and partials
    """

    up: Rate
    down: Rate
    far: AttentionTimes


@dataclass(frozen=True)
class Corrections:
    """What turns the sum of the parts into the time of a generation, fitted to whole runs.

    disk              factor on the seconds that reading takes alone
    prefill           factor on the seconds of products and attention while prompts are computed
    decode            the same while tokens are generated
    exposed           share of a stage that other stages do not hide: 0 is the slowest stage alone, 1 is their sum
    step_seconds      of every pass, whatever it computes
    sequence_seconds  of every sequence in every pass: sampling and scheduling
    scratch           factor on the bytes that the products of a pass need beside their inputs
    bus               factor on the seconds that copies to a GPU take alone
    """

    disk: float = 1.0
    prefill: float = 1.0
    decode: float = 1.0
    exposed: float = 0.0
    step_seconds: float = 0.0
    sequence_seconds: float = 0.0
    scratch: float = 1.0
    bus: float = 1.0

    def __post_init__(self) -> None:
        for name in ("disk", "prefill", "decode", "scratch", "bus"):
            above(getattr(self, name), name)
        for name in ("step_seconds", "sequence_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a number of at least 0")
        if not 0 <= self.exposed <= 1:
            raise ConfigError(f"exposed is {self.exposed!r}; it must be a share from 0 to 1")


@dataclass(frozen=True)
class ProfiledRun:
    """A generation that was measured from its start to its end.

    disk_share  share of the layers' bytes on the disk, as realised
    sequences   of equal length, generated together
    budget      scheduler.token_budget: most rows of a pass
    seconds     median of the rounds
    spread      (maximum - minimum) / median
    predicted   seconds with the fitted corrections
    memory      bytes that the engine took at most where it computes; 0: not measured
    host_share  beside a GPU, share of the layers' bytes in the host's memory
    """

    disk_share: Share
    sequences: int
    prompt_tokens: int
    output_tokens: int
    budget: int
    seconds: float
    spread: float = 0.0
    predicted: float = 0.0
    memory: float = 0.0
    host_share: Share = NONE

    def __post_init__(self) -> None:
        above(self.seconds, "seconds")
        for name in ("disk_share", "host_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a share from 0 to 1")

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.seconds - 1


@dataclass(frozen=True)
class Profile:
    """A machine, measured for one model. Seconds are medians of the rounds; those of a layer are of one layer.

    made         time in UTC, for people
    conditions   what it is valid for
    disk         the disk
    copy         bytes that all threads copy within memory, per second
    products     seconds of a layer's products, norms and calls, by rows
    head         seconds of the output head, by rows
    attention    seconds of attention while decoding
    prompt       seconds of attention of one prompt from its start, by tokens
    corrections  fitted to `runs`
    runs         whole generations
    device       the GPU; None: the processor computes
    """

    made: str
    conditions: Conditions
    disk: DiskSpeeds
    copy: Rate
    products: SecondsCurve
    head: SecondsCurve
    attention: AttentionTimes
    prompt: SecondsCurve
    corrections: Corrections = Corrections()
    runs: tuple[ProfiledRun, ...] = ()
    device: ProfiledGpu | None = None

    @property
    def tiers(self) -> tuple[str, ...]:
        """The machine's tiers, fastest first."""
        return TIERS if self.device is not None else TIERS[1:]

    def check(self, wanted: Conditions) -> None:
        """Raises ConfigError with the reason if the profile is not valid for these conditions."""
        difference = self.conditions.difference(wanted)
        if difference is not None:
            raise ConfigError(
                f"the profile of {self.conditions.model} is not for this: {difference}; quire plan hardware makes one"
            )


def profile_text(profile: Profile) -> str:
    """A profile as JSON."""
    return json.dumps({"format": FORMAT, **dataclasses.asdict(profile)}, indent=2) + "\n"


def profile_of(fields: Any) -> Profile:
    """The profile of a file's fields. Raises ConfigError that names the field."""
    if isinstance(fields, dict):
        fields = {name: value for name, value in fields.items() if name != "yardstick"}  # of older versions
    return formatted(Profile, fields, FORMAT, f"a profile of format {FORMAT}; quire plan hardware makes one")


def read_profile(path: Path) -> Profile:
    """The profile of a file. Raises ConfigError that names the file, and the field if one is invalid."""
    return read_record(path, "hardware", profile_of)
