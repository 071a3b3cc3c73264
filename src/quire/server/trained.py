"""What a model was made for, as far as its files tell."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Pooling = Literal["mean", "last"]


@dataclass(frozen=True)
class Trained:
    """What a model was made for, by the files of sentence-transformers beside it.

    is_similarity  whether the nearness of its embeddings means something
    pooling        how they are pooled
    """

    is_similarity: bool = False
    pooling: Pooling = "mean"

    @classmethod
    def of(cls, folder: Path) -> Trained:
        """Of the model in a folder; a single file tells nothing."""
        if not (folder / "modules.json").is_file():
            return cls()
        try:
            given = json.loads((folder / "1_Pooling" / "config.json").read_text())
        except (OSError, ValueError):
            given = {}
        is_last = isinstance(given, dict) and given.get("pooling_mode_lasttoken") is True
        return cls(True, "last" if is_last else "mean")
