"""Async tests run only on asyncio, like the server. One tiny model serves them all."""

import pytest

from tests.tiny_models import save_tiny


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))
