"""What several tests of clusters share: a tiny model, and one engine with it, whose answers are the right ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM

from ..clusters import SMALL
from ..tiny_models import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), head_dim=16, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def lonely(model: Path) -> LLM:
    """One engine, whose answers are the right ones."""
    return LLM(str(model), SMALL)
