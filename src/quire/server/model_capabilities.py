"""The training purpose of a model, as far as its files show it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.safe_io import parse_json, read_text

Pooling = Literal["mean", "last"]

POOLINGS: dict[str, Pooling] = {"mean_tokens": "mean", "mean": "mean", "lasttoken": "last"}
"""Our poolings, by their names in sentence-transformers."""

# A square-root mean differs from the mean only in length, and embeddings have length 1 here.
POOLINGS["mean_sqrt_len_tokens"] = POOLINGS["mean_sqrt_len"] = "mean"

MODULES = frozenset({"Transformer", "Pooling", "Normalize"})
"""Modules of sentence-transformers that this server computes."""


@dataclass(frozen=True)
class ModelCapabilities:
    """The training purpose of a model, by the files of sentence-transformers beside it.

    is_similarity  whether the similarity of its embeddings means something
    pooling        pooling of its embeddings
    unsupported    the part of its embeddings that this server does not compute; "" if none
    """

    is_similarity: bool = False
    pooling: Pooling = "mean"
    unsupported: str = ""

    @classmethod
    def of(cls, folder: Path) -> ModelCapabilities:
        """Reads the capabilities of the model in a folder; the defaults for a model in a single file."""
        if not (folder / "modules.json").is_file():
            return cls()
        listed = _read(folder / "modules.json")
        modules = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        kinds = {str(each.get("type", "")).rpartition(".")[2]: str(each.get("path", "")) for each in modules}
        if others := sorted(kinds.keys() - MODULES):
            return cls(unsupported=f"the module {others[0]}")
        config = _read(folder / kinds.get("Pooling", "1_Pooling") / "config.json")
        poolings = _poolings(config if isinstance(config, dict) else {}) or ["mean"]
        if wrong := [name for name in poolings if name not in POOLINGS]:
            return cls(unsupported=f"the pooling {wrong[0]}")
        if len(poolings) > 1:
            return cls(unsupported=f"the poolings {' and '.join(poolings)} side by side")
        return cls(True, POOLINGS[poolings[0]])


def _poolings(config: dict[str, Any]) -> list[str]:
    """The poolings of a model's embeddings, given as one name or as a switch for each."""
    named = config.get("pooling_mode")
    if isinstance(named, str):
        return [named]
    prefix = "pooling_mode_"
    return [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]


def _read(path: Path) -> Any:
    try:
        return parse_json(read_text(path))
    except (OSError, ValueError):
        return None
