"""Keys, limits, health, metrics, and allowed addresses."""

import asyncio
import gc
import logging
import re
import socket
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config import ServeConfig
from quire.errors import ConfigError
from quire.server.auth import ApiKeys, check_exposure, is_loopback
from quire.server.run import HttpListener, serve
from quire.version import __version__
from tests.server.fake_engine import MOVED, FakeEngine
from tests.server.harness import CHAT, TEXT, RawCall, application, client, error_of, socket_server

pytestmark = pytest.mark.anyio

OPEN = ["/health", "/health/live", "/health/ready"]
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


def test_a_port_in_use_is_one_line():
    listener = HttpListener(ServeConfig(port=0))
    listener.socket.listen()
    with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1"):
        HttpListener(ServeConfig(port=listener.port))
    listener.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_of_two_servers_on_one_port_the_second_fails_before_either_listens(host):
    first = HttpListener(ServeConfig(host=host, port=0))
    for other in (host, "::" if ":" in host else "0.0.0.0"):
        with pytest.raises(ConfigError, match=rf"cannot listen on .*:{first.port} \(Address already in use\)"):
            HttpListener(ServeConfig(host=other, port=first.port, allow_public=True))
    with pytest.raises(ConnectionRefusedError):  # not left waiting
        socket.create_connection((host, first.port), timeout=5)
    first.listen()
    socket.create_connection((host, first.port), timeout=5).close()
    first.close()


def test_a_server_starts_again_at_once_and_still_has_the_port_to_itself():
    first = HttpListener(ServeConfig(port=0))
    first.listen()
    with socket.create_connection(("127.0.0.1", first.port), timeout=5) as peer:
        first.socket.accept()[0].close()  # this side closes first: its connection waits in TIME_WAIT
        assert peer.recv(1) == b""
    first.close()
    with pytest.raises(OSError), socket.socket() as plain:
        plain.bind(("127.0.0.1", first.port))
    second = HttpListener(ServeConfig(port=first.port))
    with pytest.raises(ConfigError, match="cannot listen"):
        HttpListener(ServeConfig(port=first.port))
    second.listen()
    second.close()


def test_a_port_that_was_taken_meanwhile_is_one_line():
    listener = HttpListener(ServeConfig(port=0))
    listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", listener.port))
        other.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            listener.listen()
    listener.close()


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


async def test_what_is_refused_is_counted_by_its_status_alone():
    async with client(FakeEngine(queue_limit=1, max_context=50)) as http:
        full = await http.post("/v1/completions", json={"prompt": ["ab", "cd"], "max_tokens": 2})
        assert full.status_code == 429
        assert (await http.post("/v1/completions", json={"prompt": "x" * 60})).status_code == 400
        metrics = (await http.get("/metrics")).text
    assert 'quire_requests_finished_total{reason="error"}' not in metrics
    assert 'quire_http_responses_total{route="/v1/completions",status="429"} 1.0' in metrics


async def test_while_serving_collections_pass_over_what_loading_left():
    """They stop all threads: over the objects of torch alone for 0.1 s."""
    gc.unfreeze()  # tests/conftest.py has frozen the same objects
    listener, ready = HttpListener(ServeConfig(port=0)), asyncio.Event()
    server = asyncio.ensure_future(serve(FakeEngine(), listener, ready.set))
    await asyncio.wait_for(ready.wait(), 10)
    assert gc.get_freeze_count() > 10_000
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)
    assert gc.get_freeze_count() == 0


async def test_a_full_queue_says_when_to_come_back():
    async with client(FakeEngine(queue_limit=0)) as http:
        for path, body in [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT | {"stream": True})]:
            response = await http.post(path, json=body)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "3"
            assert (error_of(response)["type"], error_of(response)["code"]) == ("rate_limit_error", "queue_full")


async def test_more_output_than_the_server_allows_is_refused():
    async with client(max_output_tokens=5) as http:
        response = await http.post("/v1/completions", json=TEXT | {"max_tokens": 6})
        assert response.status_code == 400 and "serve.max_output_tokens" in error_of(response)["message"]


async def test_a_draining_server_takes_nothing_new_and_finishes_what_runs():
    app = application(engine := FakeEngine(step_seconds=0.002))
    running = RawCall(app, "/v1/completions", TEXT | {"max_tokens": 20})
    while not engine.live:
        await asyncio.sleep(0.001)
    app.state.service.draining = True
    refused = RawCall(app, "/v1/completions", TEXT)
    await refused.task
    assert refused.status == 503
    await running.task
    assert running.status == 200
    assert app.state.service.idle.is_set()


@pytest.mark.parametrize("path", OPEN)
async def test_health_answers_head_as_get_without_a_body(path):
    async with socket_server() as server, httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as http:
        head, get = await http.head(path), await http.get(path)
    assert head.status_code == get.status_code == 200 and not head.content
    assert head.headers["content-length"] == get.headers["content-length"]


async def test_an_engine_that_stopped_is_not_ready():
    engine = FakeEngine()
    engine.is_ready = False
    async with client(engine) as http:
        assert (await http.get("/health/live")).status_code == 200
        for path in ("/health", "/health/ready"):
            assert error_of(response := await http.get(path))["code"] == "not_ready"
            assert response.status_code == 503
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 503


async def test_a_request_the_engine_aborts_is_not_passed_off_as_finished():
    app = application(engine := FakeEngine(step_seconds=0.002))
    calls = [RawCall(app, "/v1/completions", TEXT | {"stream": stream}) for stream in (False, True)]
    await calls[1].arrived.wait()
    await engine.close()
    await asyncio.gather(*(call.task for call in calls))
    assert calls[0].status == 503
    assert b'"error"' in calls[1].body and b"[DONE]" not in calls[1].body and b'"abort"' not in calls[1].body


async def test_tokenize_and_back():
    async with client() as http:
        tokens = (await http.post("/tokenize", json={"prompt": "hé"})).json()
        assert tokens == {"tokens": [256, 104, 195, 169], "count": 4, "max_model_len": 2048}
        assert (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": "<s>hé"}
        body = {"tokens": tokens["tokens"], "skip_special_tokens": True}
        assert (await http.post("/detokenize", json=body)).json() == {"prompt": "hé"}
        assert (await http.post("/tokenize", json={"prompt": "", "add_special_tokens": False})).json()["tokens"] == []
        chat = (await http.post("/tokenize", json=CHAT | {"add_generation_prompt": False})).json()
        assert bytes(chat["tokens"]).decode() == "user: Hello, Wörld 🌍!\n"
        long = (await http.post("/tokenize", json={"prompt": "x" * 20_000})).json()
        assert long["count"] == 20_001


async def test_the_hit_rate_of_nothing_is_zero():
    engine = FakeEngine()
    stats = engine.stats() | {"prefill_tokens_computed": 0, "prefill_tokens_cached": 0}
    engine.stats = lambda: stats
    async with client(engine) as http:
        assert "quire_prefix_cache_hit_rate 0.0\n" in (await http.get("/metrics")).text


async def test_metrics_count_what_happened():
    engine = FakeEngine()
    async with client(engine) as http:
        await http.post("/v1/completions", json={"prompt": "abcde", "max_tokens": 5, "n": 2})
        engine.kept_fraction = 0.25
        await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 9, "stream": True})
        await http.post("/v1/completions", json={"foo": 1})
        await http.get("/some/unknown/url")
        response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["quire_prompt_tokens_total",] == 6 + 4
    assert values["quire_generation_tokens_total",] == 2 * 5 + 4
    assert values["quire_requests_finished_total", "length"] == 2
    assert values["quire_requests_finished_total", "stop"] == 1
    assert values["quire_http_responses_total", "/v1/completions", "200"] == 2
    assert values["quire_http_responses_total", "/v1/completions", "400"] == 1
    assert values["quire_http_responses_total", "404", "other"] == 1
    for name in ("time_to_first_token", "time_per_output_token", "request"):
        assert values[f"quire_{name}_seconds_count",] == 2
    assert values["quire_retention_kept_ratio_count",] == 1
    assert values["quire_retention_kept_ratio_sum",] == 0.25
    assert values["quire_retention_freed_bytes_total",] == 12
    assert values["quire_cache_bytes", "cached"] == 7
    assert values["quire_prefill_tokens_total", "computed"] == 10
    assert values["quire_prefix_cache_hit_rate",] == 5 / 15
    assert values["quire_cache_pinned_bytes",] == 3
    assert values["quire_cache_saved_bytes",] == 2
    assert values["quire_cache_evicted_bytes_total",] == 11
    assert {
        "quire_requests_running",
        "quire_requests_waiting",
        "quire_preemptions",
        "quire_cache_capacity_bytes",
    } <= families.keys()


async def test_metrics_tell_the_version_and_what_the_process_takes():
    async with client() as http:
        text = (await http.get("/metrics")).text
    (build,) = [line for line in text.splitlines() if line.startswith("quire_build_info{")]
    assert f'version="{__version__}"' in build and build.endswith(" 1.0")
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1]) > 0


async def test_metrics_tell_what_offloading_moved():
    engine = FakeEngine()
    async with client(engine) as http:
        assert "quire_offload" not in (await http.get("/metrics")).text
        moved = {"weights_bytes_read": 5, "weights_wait_seconds": 1.5, "weights_near": 0.25, "cache_bytes_read": 7}
        engine.moved = {"offload": moved | {"cache_bytes_written": 8, "hidden_bytes_read": 3}}
        lines = (await http.get("/metrics")).text.splitlines()
    assert {line for line in lines if line.startswith("quire_offload")} == {
        "quire_offload_weights_read_bytes_total 5.0",
        "quire_offload_wait_seconds_total 1.5",
        "quire_offload_cache_read_bytes_total 7.0",
        "quire_offload_cache_written_bytes_total 8.0",
        "quire_offload_activations_read_bytes_total 3.0",
    }


async def test_metrics_tell_what_each_tier_holds_and_what_moved():
    engine = FakeEngine()
    async with client(engine) as http:
        await http.post("/v1/completions", json={"prompt": ["abcde", "fg"], "max_tokens": 5})
        without = (await http.get("/metrics")).text
        engine.moved = MOVED
        text = (await http.get("/metrics")).text
    assert "quire_tier" not in without and "somebody" not in text
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for name, memory, disk in (
        ("bytes", 1, 10),
        ("capacity_bytes", 2, 20),
        ("chunks", 3, 30),
        ("fetched_bytes_total", 4, 40),
        ("demoted_bytes_total", 5, 50),
        ("failed_reads_total", 0, 6),
        ("refused_runs_total", 0, 7),
        ("collected_files_total", 0, 8),
        ("on", 1, 0),
    ):
        assert (values[f"quire_tier_{name}", "memory"], values[f"quire_tier_{name}", "disk"]) == (memory, disk), name
    assert (
        values["quire_tier_seconds_total", "disk", "read"],
        values["quire_tier_seconds_total", "disk", "write"],
    ) == (
        1.5,
        2.5,
    )
    for name, count in (
        ("fetched_chunks", 11),
        ("wasted_chunks", 12),
        ("computed_instead_chunks", 13),
        ("failed_fetches", 17),
        ("lost_chunks", 18),
    ):
        assert values[f"quire_{name}_total",] == count, name
    assert (values["quire_swapped_chunks_total", "out"], values["quire_swapped_chunks_total", "in"]) == (15, 16)
    assert (values["quire_cached_tokens_total", "arena"], values["quire_cached_tokens_total", "disk"]) == (2, 4)
