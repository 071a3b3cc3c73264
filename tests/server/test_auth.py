"""Keys of the API, and who may ask without one."""

import logging
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.server.auth import ApiKeys, check_exposure, is_loopback
from tests.server.fake_engine import FakeEngine
from tests.server.harness import TEXT, RawCall, application, client, error_of
from tests.server.test_service import OPEN

pytestmark = pytest.mark.anyio

CLOSED = ["/v1/models", "/version", "/metrics", "/openapi.json", "/debug/cache", "/nowhere"]


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst-key\n\n  second-key  \n#no-key\n")
    path.chmod(0o600)
    return str(path)


WRONG = ["", "Bearer", "Bearer ", "Bearer wrong", "Bearer first-ke", "Bearer first-key2", "Bearer #no-key", "first-key"]
WRONG += ["Basic first-key", "Bearer first-key second-key", "Bearer \xe9"]


@pytest.mark.parametrize("header", [None, *WRONG])
async def test_without_a_key_only_health_is_told(keys, header):
    headers = [] if header is None else [(b"authorization", header.encode("latin-1"))]
    async with client(api_key_file=keys) as http:
        for path in OPEN:
            assert (await http.get(path, headers=headers)).status_code == 200
        for path in CLOSED:
            response = await http.get(path, headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await http.post("/v1/completions", json=TEXT, headers=headers)).status_code == 401


@pytest.mark.parametrize("header", ["Bearer first-key", "Bearer second-key", "bearer  first-key "])
async def test_every_key_of_the_file_is_accepted(keys, header):
    async with client(api_key_file=keys) as http:
        for path in CLOSED[:-1]:
            assert (await http.get(path, headers={"authorization": header})).status_code == 200
        assert (await http.post("/v1/completions", json=TEXT, headers={"authorization": header})).status_code == 200


def test_a_key_file_others_can_read_is_reported(keys, caplog):
    with caplog.at_level(logging.WARNING):
        ApiKeys.from_file(keys)
        assert not caplog.text
        Path(keys).chmod(0o644)
        ApiKeys.from_file(keys)
    assert "chmod 600" in caplog.text and "first-key" not in caplog.text


@pytest.mark.parametrize("text", ["", "# only a comment\n", "two words\n", "clé\n"])
def test_a_key_file_without_usable_keys_is_refused(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError) as error:
        ApiKeys.from_file(tmp_path / "keys")
    assert text.strip() in ("", "# only a comment") or text.strip() not in str(error.value)


@pytest.mark.parametrize("header", ["Basic first-key", "first-key", "Digest first-key"])
def test_a_key_that_is_no_bearer_token_is_none(keys, header):
    assert ApiKeys.from_file(keys).tenant(header.encode()) is None


def test_a_host_that_is_no_address_is_refused():
    with pytest.raises(ConfigError, match="is not an address of this machine"):
        is_loopback("no such host")


def test_a_missing_key_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="api_key_file"):
        ApiKeys.from_file(tmp_path / "none")


LOCAL = ["127.0.0.1", "127.8.8.8", "::1", "localhost"]

PUBLIC = ["0.0.0.0", "::", "", "10.0.0.1"]


@pytest.mark.parametrize(("host", "local"), [(host, True) for host in LOCAL] + [(host, False) for host in PUBLIC])
def test_a_public_address_needs_a_key_or_permission(host, local):
    assert is_loopback(host) == local
    check_exposure(host, ApiKeys(["key"]), allow_public=False)
    check_exposure(host, ApiKeys([]), allow_public=True)
    if not local:
        with pytest.raises(ConfigError, match="allow_public"):
            check_exposure(host, ApiKeys([]), allow_public=False)


ROUTES = [
    ("GET", "/health"),
    ("GET", "/health/live"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("GET", "/openapi.json"),
    ("GET", "/debug/cache"),
    ("GET", "/nothing/here"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_keys_no_route_answers_who_calls_this_machine_by_another_name(method, path):
    """A page on the web can make its own name lead to this machine; then its visitors' browsers could read on."""
    async with client() as http:
        for host in (
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
        ):
            answer = await http.request(method, path, headers={"host": host}, json=TEXT if method == "POST" else None)
            assert answer.status_code == 403 and error_of(answer)["code"] == "host_not_allowed", answer.text
            assert host.partition(":")[0] in error_of(answer)["message"]
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "127.1.2.3"):
            answer = await http.request(method, path, headers={"host": host}, json=TEXT if method == "POST" else None)
            assert answer.status_code != 403, answer.text


async def test_two_names_in_one_request_must_both_be_this_machines():
    app = application(FakeEngine())
    call = RawCall(app, "/v1/models", {}, method="GET")
    call.scope["headers"] += [(b"host", b"localhost"), (b"host", b"evil.example")]
    await call.task
    assert call.status == 403


async def test_keys_and_public_servers_answer_to_any_name(tmp_path):
    (tmp_path / "keys").write_text("k\n")
    host = {"host": "llm.example.org"}
    async with client(api_key_file=str(tmp_path / "keys")) as http:
        answer = await http.get("/v1/models", headers=host | {"authorization": "Bearer k"})
        assert answer.status_code == 200
        assert (await http.get("/v1/models", headers=host)).status_code == 401
    for settings in ({"allow_public": True}, {"allow_public": True, "host": "0.0.0.0"}):
        async with client(**settings) as http:
            assert (await http.get("/v1/models", headers=host)).status_code == 200
