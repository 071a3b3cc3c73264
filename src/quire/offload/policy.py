"""What offloading runs: the shares of each tier and the sizes of a block, and their JSON file, as `quire plan offload
--output` writes it and `--offload.mode FILE` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.offload.units import NONE, Share, Split
from quire.safe_io import parse_json, read_text

FORMAT = 1
_FIELDS = ("format", "tiers", "micro_batch", "num_batches", "weights", "cache", "hidden", "attended")


@dataclass(frozen=True)
class OffloadPolicy:
    """A placement and a block: what is run.

    micro_batch  sequences of a micro-batch
    num_batches  micro-batches of a block
    attended     share of the cache whose attention is computed on the second tier
    """

    micro_batch: int
    num_batches: int
    weights: Split
    cache: Split
    hidden: Split
    attended: Share = NONE

    @property
    def block(self) -> int:
        """Sequences of a block."""
        return self.micro_batch * self.num_batches


def policy_text(policy: OffloadPolicy, tiers: Sequence[str]) -> str:
    """A policy as JSON. Shares are fractions of 1."""
    fields = {
        "format": FORMAT,
        "tiers": list(tiers),
        "micro_batch": policy.micro_batch,
        "num_batches": policy.num_batches,
        "weights": policy.weights.named(tiers),
        "cache": policy.cache.named(tiers),
        "hidden": policy.hidden.named(tiers),
        "attended": policy.attended,
    }
    return json.dumps(fields, indent=2) + "\n"


def read_policy(path: Path, tiers: Sequence[str]) -> OffloadPolicy:
    """The policy of a file for a machine with these tiers.

    Raises ConfigError that names the file, and the field if one is invalid.
    """
    try:
        fields = parse_json(read_text(path))
    except FileNotFoundError:
        raise ConfigError(f"offload.mode {path} is neither off nor auto, and there is no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"offload.mode {path}: not a policy that can be read ({error})") from None
    try:
        return _policy(fields, tiers)
    except ConfigError as error:
        raise ConfigError(f"offload.mode {path}: {error}") from None


def _policy(fields: Any, tiers: Sequence[str]) -> OffloadPolicy:
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ConfigError(f"not a policy of format {FORMAT}")
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        raise ConfigError(f"unknown field {unknown[0]!r}")
    if fields.get("tiers") != list(tiers):
        raise ConfigError(f"made for tiers {fields.get('tiers')}, but this machine has {list(tiers)}")

    def count(name: str) -> int:
        value = fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
        return value

    def split(name: str) -> Split:
        value = fields.get(name)
        if not isinstance(value, dict):
            raise ConfigError(f"{name} is {value!r}; it must be shares by tier")
        return Split.read(value, tiers, name)

    attended = fields.get("attended", 0.0)
    if not isinstance(attended, int | float) or isinstance(attended, bool) or not 0 <= attended <= 1:
        raise ConfigError(f"attended is {attended!r}; it must be a share from 0 to 1")
    return OffloadPolicy(
        count("micro_batch"), count("num_batches"), split("weights"), split("cache"), split("hidden"), Share(attended)
    )
