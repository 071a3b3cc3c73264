"""What several tests of clusters share: a tiny model, and one engine with it, whose answers are the right ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM

from ..clusters import SMALL
from ..ray_cluster import LONG, OPTIONS, PARAMS, PROMPTS, tokens
from ..tiny_models import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), head_dim=16, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def single_engine(model: Path) -> LLM:
    """One engine, whose answers are the right ones."""
    return LLM(str(model), SMALL)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[list[int]]]:
    """What one engine answers to the prompts of tests with Ray, and to a long request."""
    llm = LLM(str(model), OPTIONS)
    return {
        "prompts": [tokens(each) for each in llm.generate(PROMPTS, PARAMS)],
        "long": [tokens(each) for each in llm.generate([PROMPTS[1]], LONG)],
    }
