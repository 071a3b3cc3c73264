"""Async tests run on asyncio alone, as the server does."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
