"""The seconds of the steps of an engine with weights on several tiers, from a machine's profile.

A layer takes the slower one of computing and of each link that its weights cross, and the fitted share of what is
faster. `quire.offload.planning.planner` has the same for whole blocks, where cache and activations may be on other
tiers, too: its linear programs take their coefficients from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.offload.planning.costs import TierLink, Traffic
from quire.timing.latency import Origin, StepWork, pairs_of

if TYPE_CHECKING:
    from quire.offload.planning.costs import Sizes
    from quire.offload.planning.profile import Profile, SecondsCurve
    from quire.offload.units import Split

Floats = NDArray[np.float64]

SLACK = 0.05
"""Share by which a step may be larger than what was measured, and still count as covered."""


def links_of(profile: Profile) -> tuple[TierLink, ...]:
    """The links of a machine from its fastest tier outwards, as fast as they are while an engine runs."""
    corrections, disk, device = profile.corrections, profile.disk, profile.device
    found = TierLink(Traffic.alike(disk.streamed.bandwidth / corrections.disk), Traffic.alike(disk.writes.bandwidth))
    if device is None:
        return (found,)
    up, down = device.up.bandwidth / corrections.bus, device.down.bandwidth
    return TierLink(Traffic.alike(up), Traffic.alike(down)), found


def prompt_attention(profile: Profile, tokens: float, pairs: float, whole: float) -> float:
    """Seconds of a layer's attention of prompts, or of slices of them that end at some tokens. Without corrections.

    pairs  of a query and a key that the rows have
    whole  the same of a whole prompt of so many tokens
    """
    return profile.prompt.at(tokens) * pairs / whole


def beside_layers(profile: Profile, sequences: float, passes: float, factor: float) -> float:
    """Seconds of passes beside their layers: of the output head, and between two passes.

    sequences  that get a token at the end
    factor     correction of what is computed
    """
    fixed, head = profile.corrections, profile.head.at(sequences)
    return fixed.step_seconds * passes + fixed.sequence_seconds * sequences + factor * head


@dataclass(frozen=True)
class ProfiledTime:
    """See StepTime. weights: where they are; cache and activations are on the first tier.

    Of prompts only the mean of their slices' ends is known. A slice has its share of the pairs of a prompt that ends
    where it does.
    """

    profile: Profile
    sizes: Sizes
    weights: Split
    origin = Origin.FITTED

    def seconds(self, work: StepWork) -> float:
        """See StepTime."""
        return float(self._layers(work, self._decoding(work, np.array([work.context])))[0])

    def occupancy(self, work: StepWork) -> float:
        """See StepTime. A measured engine is no pipeline."""
        return self.seconds(work)

    def quiet(self, work: StepWork, count: int) -> float:
        """See StepTime."""
        contexts = work.context + work.decode_rows * np.arange(count, dtype=np.float64)
        return float(self._layers(work, self._decoding(work, contexts)).sum())

    def covers(self, work: StepWork) -> bool:
        """See StepTime. SLACK may be missing at the end of a range."""
        profile, most = self.profile, 1 + SLACK
        rows = max(1, work.decode_rows)
        return (
            work.rows <= most * profile.products.counts[-1]
            and work.decode_rows <= most * profile.attention.rows[-1]
            and work.context / rows <= most * profile.attention.contexts[-1]
            and _mean_end(work) <= most * profile.prompt.counts[-1]
        )

    @property
    def knots(self) -> tuple[int, ...]:
        """See StepTime."""
        return self.profile.products.counts

    def _layers(self, work: StepWork, decoding: Floats) -> Floats:
        """Seconds of steps. decoding: of a layer's attention of the rows that decode, f64 [n]."""
        profile, sizes = self.profile, self.sizes
        factor = profile.corrections.prefill if work.prompt_rows else profile.corrections.decode
        prompts = 0.0
        if work.prompt_rows:
            end = _mean_end(work)
            prompts = prompt_attention(profile, end, work.prompt_pairs, pairs_of(0, end, sizes.window))
        beside = beside_layers(profile, work.decode_rows + work.num_prompts, 1, factor)
        compute = factor * (profile.products.at(work.rows) + prompts + decoding) + beside / sizes.num_layers
        slowest, total = np.maximum(compute, max(self._loads)), compute + sum(self._loads)
        exposed = profile.corrections.exposed
        found: Floats = sizes.num_layers * (slowest * (1 - exposed) + total * exposed)
        return found

    def _decoding(self, work: StepWork, contexts: Floats) -> Floats:
        """Seconds of a layer's attention of the rows that decode, f64 [n]. contexts: of all of them, [n]."""
        if not work.decode_rows:
            return np.zeros(len(contexts))
        curve, each = self._line(work.decode_rows), contexts / work.decode_rows
        beyond = np.maximum(1.0, each / curve.counts[-1])
        return np.asarray(np.interp(each, curve.counts, curve.seconds) * beyond, np.float64)

    @cached_property
    def _lines(self) -> dict[int, SecondsCurve]:
        return {}

    def _line(self, rows: int) -> SecondsCurve:
        """Seconds of a layer's attention of some rows over the context of each."""
        if rows not in self._lines:
            self._lines[rows] = self.profile.attention.of_rows(rows)
        return self._lines[rows]

    @cached_property
    def _loads(self) -> tuple[float, ...]:
        """Seconds in which a layer's weights cross each link."""
        return tuple(
            self.weights.beyond(index) * self.sizes.layer_bytes / link.up.weights
            for index, link in enumerate(links_of(self.profile))
        )


def _mean_end(work: StepWork) -> float:
    """Tokens of the prompts up to the ends of their slices, on average: r rows from s on have r (s + r / 2) pairs."""
    if not work.prompt_rows:
        return 0.0
    return work.prompt_pairs / work.prompt_rows + work.prompt_rows / (2 * max(1, work.num_prompts))
