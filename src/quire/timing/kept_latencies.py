"""Latency models that are kept for later simulations and plans, one file for each way to measure and each group of
settings. Knows files, and nothing of engines.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from quire.errors import ConfigError
from quire.folders import user_cache
from quire.timing.latency import KINDS, About, LatencyModel, mismatch

SET_BY_USERS = (
    "fingerprint", "dtype", "weights", "codec", "outlier_slots", "sparse_values", "retain", "offload", "threads",
)  # fmt: skip
"""What a given file must agree with. Its processor may be that of another machine."""

KEPT_BY = (*SET_BY_USERS, "backend", "processor", "level", "tp", "pp")
"""What kept models are told apart by."""

FEW_STEPS, POOR = 100, 0.25
"""Measured steps below which seconds are little known, and the error of nine in ten of them above which."""


def kept_folder() -> Path:
    """The folder of kept models. Every .json file there is one."""
    return user_cache() / "latency"


def keep(model: LatencyModel, folder: Path, prefix: str = "") -> Path | None:
    """Keeps a model in place of an earlier one for the same settings. Returns its file; None if the earlier one stays,
    because it says enough and the new one says little. Raises ConfigError if it cannot be written.

    prefix  of the file's name: models with different prefixes do not replace each other
    """
    settings = {name: model.about.get(name) for name in KEPT_BY}
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()
    path = folder / f"{prefix}{digest}.json"
    if is_poor(model) and path.exists():
        with contextlib.suppress(ConfigError):
            if not is_poor(LatencyModel.read(path)):
                return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be made: {error.strerror or error}") from None
    model.write(path)
    return path


def kept_models(folder: Path) -> list[tuple[Path, LatencyModel]]:
    """The kept models that can be read, by `rank`, and of equal ones the newest first."""
    found = []
    for path in sorted(folder.glob("*.json"), key=lambda each: each.stat().st_mtime, reverse=True):
        try:
            found.append((path, LatencyModel.read(path)))
        except ConfigError:
            continue
    return sorted(found, key=lambda each: rank(each[1]))


def rank(model: LatencyModel) -> tuple[bool, int]:
    """Of two models for the same settings the one with the lower rank is used: it says enough, or it has more steps."""
    return is_poor(model), -num_steps(model)


def is_poor(model: LatencyModel) -> bool:
    """Whether a model says little. Plans measure again if there is time."""
    return num_steps(model) < FEW_STEPS or model.residuals.get("within", 0.0) > POOR


def unmeasured(model: LatencyModel, role: str = "mixed") -> str:
    """What was not measured of the steps of an instance with this role, for people; empty: nothing. Seconds of such
    steps would follow from those of other steps alone. A model without counts was not fitted, and lacks nothing.
    """
    counts = model.counts
    lacking = []
    if role != "decode" and not counts.get("prompt", 0) + counts.get("mixed", 0):
        lacking.append("steps with prompts")
    if role != "prefill" and not counts.get("decode", 0) + counts.get("mixed", 0):
        lacking.append("steps that decode")
    return " and ".join(lacking) if num_steps(model) else ""


def unsuitable(model: LatencyModel, wanted: About, role: str = "mixed", *, is_given: bool = False) -> str:
    """Why a model does not tell the seconds of an instance with this role and these settings, for people; empty: it
    does.

    is_given  whether a user gave the model: it must agree with what it states of SET_BY_USERS, and nothing else
    """
    if is_given:
        wanted = {name: wanted[name] for name in SET_BY_USERS if model.about.get(name) is not None}
    if reason := mismatch(model.about, wanted):
        return reason
    lacking = unmeasured(model, role)
    return f"no {lacking} were measured for it; measure longer with quire bench latency --seconds" if lacking else ""


def num_steps(model: LatencyModel) -> int:
    """Steps that a model is fitted to."""
    return sum(model.counts.get(kind, 0) for kind in KINDS)
