"""Rotary position embeddings in numbers: frequencies, angles, and the order of a head's channels."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

from quire.errors import ModelError

if TYPE_CHECKING:
    from numpy import float32, float64, intp
    from numpy.typing import NDArray

MAX_SIZE = 2**31 - 1
"""Upper bound of a model's sizes and counts; a larger number means that the file is damaged."""

MAX_LAYERS = 1 << 16
"""Upper bound of a model's layers."""

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "factors", "yarn", "longrope", "proportional")

# Angles are computed in float64, this many positions at a time: 131,072 positions at once would temporarily need 200
# MB.
_TABLE_ROWS = 4096


_FIRST_FIELDS = frozenset("theta dim kind factor low_freq_factor high_freq_factor original_context factors".split())
"""Fields of Rope that its text always has."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of a layer: pairs channel i with channel i + dim/2 (rotate-half).

    Files may pair channels differently, or leave some unrotated: `channels` brings them into this order.

    `dynamic` is NTK scaling. Its base would depend on the length of the current sequence, but keys in a shared cache
    must not depend on a request. So the engine's `max_context` takes the place of that length. If it is at most
    `original_context`, frequencies are unscaled. Otherwise all positions of all requests have the frequencies of a
    sequence of `max_context` tokens. `longrope` chooses between its factors in the same way.

    Sources: YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753.
    """

    theta: float
    """Base of the frequencies."""
    dim: int
    """Channels of a head."""
    rotated: int = 0
    """Channels that are rotated; 0: all of them."""
    kind: str = "default"
    """One of ROPE_KINDS. `factors` divides each frequency by its own number (how GGUF stores `llama3`). `proportional`
    has the frequencies of whole heads, of which only the first pairs turn."""
    factor: float = 1.0
    """linear, dynamic, llama3, yarn: the factor by which the context is stretched."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_context / low_freq_factor are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_context / high_freq_factor are not stretched."""
    beta_fast: float = 32.0
    """yarn: pairs with more turns than this over the original context are not stretched."""
    beta_slow: float = 1.0
    """yarn: pairs with fewer turns than this are stretched in full."""
    truncates: bool = True
    """yarn: whether the bounds between these pairs are whole numbers."""
    original_context: int = 0
    """llama3, dynamic, yarn, longrope: positions of the pre-training, before stretching."""
    factors: tuple[float, ...] = ()
    """factors: rotated/2 divisors. longrope: those up to original_context."""
    long_factors: tuple[float, ...] = ()
    """longrope: divisors beyond original_context."""
    magnitude: float = 1.0
    """yarn, longrope: factor of the rotated channels of queries and keys. Queries get its square; keys stay as they
    are."""

    def __repr__(self) -> str:
        """As in the namespaces of stored chunks. Fields that came later are left out where they have their defaults."""
        shown = [
            each for each in fields(self) if each.name in _FIRST_FIELDS or getattr(self, each.name) != each.default
        ]
        shown.sort(key=lambda each: each.name not in _FIRST_FIELDS)
        return f"Rope({', '.join(f'{each.name}={getattr(self, each.name)!r}' for each in shown)})"

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ModelError(f"rope scaling {self.kind!r} is not supported (only {', '.join(ROPE_KINDS)})")
        # Below `least` frequencies overflow. There is no upper bound on theta: models with 1e11 exist.
        least = 1 / MAX_SIZE
        if self.dim <= 0 or self.dim % 2 or not (least < self.theta < math.inf and least < self.factor <= MAX_SIZE):
            raise ModelError(
                f"rope needs an even dim, a finite theta > 0 and a factor from above 0 to {MAX_SIZE}; "
                f"got {self.dim}, {self.theta}, {self.factor}"
            )
        if not 0 <= self.rotated <= self.dim or self.rotated % 2:
            raise ModelError(f"rope rotates {self.rotated} of {self.dim} channels; it needs an even number of them")
        if self.kind == "dynamic" and self.num_rotated == 2:
            raise ModelError("rope scaling 'dynamic' needs heads of more than 2 channels")
        if self.kind in ("dynamic", "llama3", "yarn", "longrope") and self.original_context <= 0:
            raise ModelError(f"rope scaling {self.kind!r} needs the original context length")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                "rope scaling 'llama3' needs low_freq_factor < high_freq_factor; "
                f"got {self.low_freq_factor:g} and {self.high_freq_factor:g}"
            )
        if self.kind == "yarn" and not (self.beta_slow > 0 and self.beta_fast > 0 and self.theta > 1):
            raise ModelError("rope scaling 'yarn' needs a theta above 1, and beta_fast and beta_slow above 0")
        wanted = {"factors": (self.factors,), "longrope": (self.factors, self.long_factors)}.get(self.kind, ())
        for factors in wanted:
            if len(factors) != self.num_rotated // 2:
                raise ModelError(f"rope has {len(factors)} frequency factors for {self.num_rotated // 2} channel pairs")
            if not all(0 < factor < math.inf for factor in factors):
                raise ModelError("rope has a frequency factor that is not a positive number")
        if not 0 < self.magnitude < math.inf:
            raise ModelError(f"rope has a magnitude of {self.magnitude}; it must be a positive number")

    @property
    def num_rotated(self) -> int:
        """Channels that are rotated."""
        return self.rotated or self.dim

    @property
    def is_partial(self) -> bool:
        """Whether some channels are not rotated."""
        return self.num_rotated < self.dim

    @property
    def is_stretched_by_context(self) -> bool:
        """Whether `max_context` of an engine decides on the frequencies."""
        return self.kind in ("dynamic", "longrope")

    def channels(self, *, interleaved: bool) -> NDArray[intp] | None:
        """The channel of a file's head at each place of ours, [dim]; None if they are the same.

        A file's rotated channels are its first ones. Ours are the first halves of both halves of a head.

        interleaved  whether the file pairs neighbours instead of channels that are rotated/2 apart
        """
        import numpy as np

        if self.kind == "proportional" or not (interleaved or self.is_partial):
            return None
        pairs = np.arange(self.num_rotated).reshape((-1, 2) if interleaved else (2, -1))
        first, second = pairs.T if interleaved else pairs
        rest = np.arange(self.num_rotated, self.dim).reshape(2, -1)
        return np.concatenate((first, rest[0], second, rest[1]))

    @cached_property
    def query_scales(self) -> tuple[float, ...]:
        """The factor of each channel of queries, in our order; empty if it is the same for all: see `score_scale`."""
        if self.magnitude == 1 or not self.is_partial:
            return ()
        rest = (self.dim - self.num_rotated) // 2
        return 2 * (*[self.magnitude**2] * (self.num_rotated // 2), *[1.0] * rest)

    @property
    def score_scale(self) -> float:
        """The factor of all scores, where all channels are rotated."""
        return 1.0 if self.is_partial else self.magnitude**2

    def frequencies(self, max_context: int) -> NDArray[float64]:
        """Radians per position of each channel pair, f64 [dim/2]; 0 for pairs that are not rotated.

        max_context  tokens; see `is_stretched_by_context`
        """
        import numpy as np

        width = self.dim if self.kind == "proportional" else self.num_rotated
        exponents = np.arange(0, self.num_rotated, 2, dtype=np.float64) / width
        theta = self.theta
        if self.kind == "dynamic" and max_context > self.original_context:
            stretch = self.factor * max_context / self.original_context - (self.factor - 1)
            theta *= stretch ** (width / (width - 2))
        turning = self._stretched(theta**-exponents, max_context)
        return np.append(turning, np.zeros(self.dim // 2 - len(turning)))

    def _stretched(self, plain: NDArray[float64], max_context: int) -> NDArray[float64]:
        """The frequencies of rotated pairs, from those without stretching."""
        import numpy as np

        match self.kind:
            case "linear" | "proportional":
                return plain / self.factor
            case "factors":
                return plain / np.asarray(self.factors, dtype=np.float64)
            case "longrope":
                factors = self.long_factors if max_context > self.original_context else self.factors
                return plain / np.asarray(factors, dtype=np.float64)
            case "llama3":
                # The number of turns of a pair over the original context decides: few turns are stretched, many are
                # not, and between them the two are blended linearly.
                turns = self.original_context * plain / (2 * math.pi)
                kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
                return kept * plain + (1 - kept) * plain / self.factor
            case "yarn":
                kept = 1 - self._yarn_ramp(len(plain))
                return kept * plain + (1 - kept) * plain / self.factor
        return plain

    def _yarn_ramp(self, num_pairs: int) -> NDArray[float64]:
        """How far each pair is stretched, from 0 to 1: linear between the pairs with beta_fast and beta_slow turns."""
        import numpy as np

        def pair_of(turns: float) -> float:
            """The pair that makes this number of turns over the original context, as a fraction of a pair."""
            return num_pairs * math.log(self.original_context / (turns * 2 * math.pi)) / math.log(self.theta)

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncates:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * num_pairs - 1)
        if low == high:
            high += 0.001
        return np.clip((np.arange(num_pairs, dtype=np.float64) - low) / (high - low), 0, 1)

    def tables(self, max_context: int) -> tuple[NDArray[float32], NDArray[float32]]:
        """(cos, sin) of positions 0 .. max_context-1, f32 [max_context, dim/2] each, rounded once from f64."""
        import numpy as np

        frequencies = self.frequencies(max_context)
        cos = np.empty((max_context, self.dim // 2), dtype=np.float32)
        sin = np.empty_like(cos)
        for first in range(0, max_context, _TABLE_ROWS):
            positions = np.arange(first, min(first + _TABLE_ROWS, max_context), dtype=np.float64)
            angles = np.outer(positions, frequencies)
            cos[first : first + len(positions)] = np.cos(angles)
            sin[first : first + len(positions)] = np.sin(angles)
        return cos, sin
