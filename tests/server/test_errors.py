"""Errors of the engine and of the web framework are answers of the API."""

from __future__ import annotations

import json

import pytest
from fastapi import HTTPException

from quire.errors import CacheFullError, EngineStoppedError, QueueFullError, QuireError
from quire.server.errors import api_error


@pytest.mark.parametrize(
    ("error", "status", "code", "headers"),
    [
        (CacheFullError("no room"), 503, "cache_full", {"Retry-After": "1"}),
        (QueueFullError("full", 2.5), 429, "queue_full", {"Retry-After": "3"}),
        (QuireError("it failed"), 503, "not_ready", {}),
        (EngineStoppedError("it stopped"), 503, "not_ready", {}),
        (HTTPException(418, "a teapot", {"X-Pot": "1"}), 418, None, {"X-Pot": "1"}),
        (ZeroDivisionError(), 500, "internal_error", {}),
    ],
)
def test_an_error_has_a_status_and_a_code(
    error: Exception, status: int, code: str | None, headers: dict[str, str]
) -> None:
    found = api_error(error)
    assert (found.status, found.body()["error"]["code"]) == (status, code)
    assert headers.items() <= dict(found.headers).items()
    json.dumps(found.body())
