"""The middleware and the routes of the server: keys, origins, methods and unknown URLs."""

import httpx
import pytest

from quire.server.auth import ApiKeys
from tests.server.fake_engine import FakeEngine
from tests.server.harness import TEXT, client, error_of, socket_server
from tests.server.test_service import OPEN

pytestmark = pytest.mark.anyio


async def test_a_key_may_come_in_the_other_header():
    from quire.config import ServeConfig
    from quire.server.app import create_app
    from tests.server.harness import asgi_client

    async with asgi_client(create_app(FakeEngine(), ServeConfig(), ApiKeys(["secret"]))) as http:
        for headers, status in (
            ({"X-Api-Key": "secret"}, 200),
            ({"X-Api-Key": "wrong"}, 401),
            ({"Authorization": "Bearer wrong", "X-Api-Key": "secret"}, 401),
            ({}, 401),
        ):
            assert (await http.get("/v1/models", headers=headers)).status_code == status


async def test_pages_of_other_origins_are_let_in_by_a_setting():
    asks = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization"}  # fmt: skip
    async with client() as http:
        assert "access-control-allow-origin" not in (await http.options("/v1/completions", headers=asks)).headers
    async with client(cors_origins="https://example.org, https://other.org") as http:
        allowed = await http.options("/v1/completions", headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://example.org"
        answer = await http.post("/v1/completions", json=TEXT, headers={"Origin": "https://other.org"})
        assert answer.headers["access-control-allow-origin"] == "https://other.org"
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        refused = await http.post("/v1/completions", json=TEXT, headers={"Origin": "https://evil.org"})
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("path", OPEN)
async def test_health_answers_head_as_get_without_a_body(path):
    async with socket_server() as server, httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as http:
        head, get = await http.head(path), await http.get(path)
    assert head.status_code == get.status_code == 200 and not head.content
    assert head.headers["content-length"] == get.headers["content-length"]


async def test_another_method_is_told_which_the_url_takes():
    async with client() as http:
        response = await http.delete("/v1/models")
    assert response.status_code == 405 and response.headers["allow"] == "GET"
    error = error_of(response)
    assert error["code"] == "method_not_allowed" and error["message"] == "/v1/models takes GET, not DELETE"
    for path, methods in (("/v1/cache/prefixes", "DELETE, GET, POST"), ("/health", "GET, HEAD")):
        async with client() as http:
            response = await http.put(path, json={})
        assert response.status_code == 405 and response.headers["allow"] == methods
        assert error_of(response)["message"] == f"{path} takes {methods}, not PUT"


async def test_unknown_urls_and_methods_have_the_same_form():
    async with client() as http:
        assert error_of(response := await http.get("/v1/images/generations"))["code"] == "unknown_url"
        assert response.status_code == 404
        assert error_of(response := await http.get("/v1/completions"))["code"] == "method_not_allowed"
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
