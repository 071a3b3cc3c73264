"""GET /debug/cache: its content, and who may read it."""

import asyncio
import json
import math

import pytest

from quire.cache.fetching import Fetching
from quire.prefixes.listing import Prefix
from quire.server import debug
from quire.server.tenants import Tenants, tenant_of
from tests.server.fake_engine import FakeEngine
from tests.server.harness import RawCall, application, client, error_of, real_server

pytestmark = pytest.mark.anyio

KEYS = ("key-of-a", "key-of-b")
CHUNK_BYTES = 64 * 2 * 2 * 12 * 2 * 4
SYSTEM = "All of us begin alike, with these very words, and only later do we differ from each other. " * 2


def bearer(key):
    return {"authorization": f"Bearer {key}"}


async def complete(http, prompt, key=None, **options):
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True} | options
    answer = await http.post("/v1/completions", json=body, headers=bearer(key) if key else {})
    assert answer.status_code == 200, answer.text


async def contents(http, key=None, query=""):
    answer = await http.get(f"/debug/cache{query}", headers=bearer(key) if key else {})
    assert answer.status_code == 200, answer.text
    return answer.json()


def prefix(number, parent=None, idle=0.0, **changes):
    fields = {
        "id": f"p{number}",
        "space": "5ace",
        "parent": None if parent is None else f"p{parent}",
        "start": 0 if parent is None else 64,
        "token_ids": [65 + number] * 64,
        "num_same": 0,
        "sharers": 0,
        "hits": 1,
        "computed": 2,
        "hit_rate": 1 / 3,
        "num_bytes": 10,
        "idle_seconds": idle,
        "pinned_seconds": None,
    }
    fields |= changes
    return Prefix(**({"num_tokens": len(fields["token_ids"])} | fields))


async def test_it_tells_what_is_resident(folder):
    async with real_server(folder) as (llm, _, http):
        for end in ("one " * 20, "two " * 20):
            await complete(http, SYSTEM + end)
        found = await contents(http)
        stats = llm.stats()
    first, *others = found["prefixes"]
    assert (first["parent"], first["start"], first["tokens"]) == (None, 0, 128)
    assert first["text"] == SYSTEM[:80]
    assert (first["hits"], first["computed"], first["hit_rate"]) == (1, 1, 0.5)
    assert first["bytes"] == 2 * CHUNK_BYTES and first["sharers"] == 0 and first["pinned_seconds"] is None
    assert 0 <= first["idle_seconds"] < 60
    assert [each["parent"] for each in others] == [first["id"]] * 2
    assert {each["text"][-4:] for each in others} == {"one ", "two "} or all(each["start"] == 128 for each in others)
    assert (found["num_prefixes"], found["truncated"], found["scope"]) == (3, False, "all")
    totals = found["totals"]
    assert totals["cached_tokens"] == stats["prefill_tokens_cached"] == 128
    assert totals["computed_tokens"] == stats["prefill_tokens_computed"]
    assert totals["hit_rate"] == pytest.approx(128 / (128 + totals["computed_tokens"]), abs=1e-4)
    assert {name: totals[name] for name in totals if name.startswith("bytes")} == {
        name: size for name, size in stats["cache"].items() if name != "bytes_peak"
    }


async def test_totals_agree_with_the_engine_while_requests_run(folder):
    """Pinned and saved bytes are added up from what the caller sees; who sees all must get the engine's own numbers."""
    async with real_server(folder) as (llm, app, http):
        await complete(http, SYSTEM + "one " * 20, cache_pin=3600)
        await complete(http, "another " * 20, cache_pin=True)
        body = {"prompt": SYSTEM + "two " * 20, "max_tokens": 200, "n": 3, "ignore_eos": True, "stream": True}
        call = RawCall(app, "/v1/completions", body)
        async with asyncio.timeout(10):
            while True:
                before, found, stats = llm.stats()["cache"], await contents(http), llm.stats()["cache"]
                if before == stats and max(each["sharers"] for each in found["prefixes"]) == 3:
                    break
        call.leave()
        await call.task
    totals = found["totals"]
    assert totals["bytes_saved"] == stats["bytes_saved"] >= 2 * 2 * CHUNK_BYTES
    assert totals["bytes_pinned"] == stats["bytes_pinned"] > 0
    pins = [each["pinned_seconds"] for each in found["prefixes"] if each["pinned_seconds"] is not None]
    assert "forever" in pins and all(pin == "forever" or 3500 < pin <= 3600 for pin in pins) and len(pins) == 2


async def test_a_tenant_sees_its_own_prefixes_and_hits_alone(folder):
    async with real_server(folder, keys=KEYS) as (_, _, http):
        await complete(http, "secret of a " * 12, "key-of-a")
        await complete(http, "secret of a " * 12, "key-of-a", cache_salt="salted", cache_pin=True)
        await complete(http, "secret of a " * 12, "key-of-a")
        await complete(http, "words of b " * 12, "key-of-b")
        of_a, of_b = [await contents(http, key) for key in KEYS]
    assert {each["text"][:11] for each in of_a["prefixes"]} == {"secret of a"} and of_a["num_prefixes"] == 2
    assert {each["text"][:10] for each in of_b["prefixes"]} == {"words of b"} and of_b["num_prefixes"] == 1
    assert not {each["id"] for each in of_a["prefixes"]} & {each["id"] for each in of_b["prefixes"]}
    assert of_a["scope"] == of_b["scope"] == "tenant"
    assert (of_a["totals"]["cached_tokens"], of_a["totals"]["computed_tokens"]) == (128, 3 * 144 - 128)
    assert (of_b["totals"]["cached_tokens"], of_b["totals"]["computed_tokens"]) == (0, 132)
    assert of_b["totals"]["hit_rate"] == 0.0
    assert of_a["totals"]["bytes_pinned"] == 2 * CHUNK_BYTES and of_b["totals"]["bytes_pinned"] == 0


async def test_tenants_that_share_see_all(folder):
    async with real_server(folder, keys=KEYS, tenants_share=True) as (_, _, http):
        await complete(http, "of us both " * 12, "key-of-a")
        found = await contents(http, "key-of-b")
    assert found["num_prefixes"] == 1 and found["scope"] == "all"


@pytest.mark.parametrize("settings", [{"allow_public": True, "host": "0.0.0.0"}, {"allow_public": True}])
async def test_where_everybody_may_ask_nobody_sees_prompts(settings):
    engine = FakeEngine()
    engine.cached = [("", prefix(1))]
    async with client(engine, **settings) as http:
        refused = await http.get("/debug/cache")
        assert refused.status_code == 403 and "api_key_file" in error_of(refused)["message"]
        assert "B" * 64 not in refused.text


async def test_a_public_server_with_keys_tells_their_owners(tmp_path):
    (tmp_path / "keys").write_text("key-of-a\n")
    (tmp_path / "keys").chmod(0o600)
    engine = FakeEngine()
    own = Tenants([tenant_of(b"key-of-a")]).salts[0]
    engine.cached = [(own, prefix(1)), ("", prefix(2)), ("another/", prefix(3))]
    async with client(engine, host="0.0.0.0", api_key_file=str(tmp_path / "keys")) as http:
        assert [each["id"] for each in (await contents(http, "key-of-a"))["prefixes"]] == ["p1"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.1", 403),
        ("[", 403),
        ("", 403),
    ],
)
async def test_without_keys_only_who_names_this_machine_is_told(host, status):
    """A page of another site can make its own name lead to this machine; then it could read the answer."""
    async with client() as http:
        answer = await http.get("/debug/cache", headers={"host": host})
        assert answer.status_code == status, answer.text
        assert status == 200 or error_of(answer)["code"] == "host_not_allowed"


async def test_a_cut_keeps_what_was_used_last_and_its_parents():
    engine = FakeEngine()
    engine.cached = [
        ("", prefix(0, idle=5.0)),
        ("", prefix(1, parent=0, idle=9.0)),
        ("", prefix(2, parent=0, idle=5.0)),
        ("", prefix(3, idle=7.0)),
        ("", prefix(4, idle=0.0, sharers=2)),
    ]
    async with client(engine) as http:
        for limit, ids in ((1, "p4"), (3, "p4 p0 p2"), (5, "p4 p0 p2 p3 p1"), (1000, "p4 p0 p2 p3 p1")):
            found = await contents(http, query=f"?limit={limit}")
            assert " ".join(each["id"] for each in found["prefixes"]) == ids
            assert (found["num_prefixes"], found["truncated"]) == (5, limit < 5)
            # Of all of them, however many are shown.
            assert found["totals"]["bytes_saved"] == 10


@pytest.mark.parametrize("query", ["limit=0", "limit=-1", "limit=x", "limit=", "limit=1.5", "limit=100001", "limit=٣"])
async def test_a_limit_that_is_none_is_refused(query):
    async with client() as http:
        refused = await http.get(f"/debug/cache?{query}")
        assert refused.status_code == 400 and error_of(refused)["param"] == "limit"
        refused = await http.get("/debug/cache?salt=other")
        assert error_of(refused)["code"] == "unknown_parameter"


async def test_pins_are_told_in_json_and_count_what_stands_before_them():
    engine = FakeEngine()
    engine.cached = [
        ("", prefix(0)),
        ("", prefix(1, parent=0)),
        ("", prefix(2, parent=1, pinned_seconds=math.inf)),
        ("", prefix(3, parent=1)),
        ("", prefix(4, pinned_seconds=1.23456)),
    ]
    async with client(engine) as http:
        found = await contents(http)
    pins = {each["id"]: each["pinned_seconds"] for each in found["prefixes"]}
    assert pins == {"p0": None, "p1": None, "p2": "forever", "p3": None, "p4": 1.235}
    assert found["totals"]["bytes_pinned"] == 40


async def test_a_text_is_the_beginning_of_the_prefixs_own_tokens():
    engine = FakeEngine()
    ids = engine.tokenizer.encode("🌍" * 100)
    engine.cached = [("", prefix(0, token_ids=ids)), ("", prefix(1, token_ids=[0x8D, *b"end" * 22]))]
    async with client(engine) as http:
        texts = [each["text"] for each in (await contents(http))["prefixes"]]
    # Special tokens are shown; the rest of a character that began before is not.
    assert texts == ["<s>" + "🌍" * 77, ("\ufffd" + "end" * 22)]


async def test_an_engine_that_does_not_answer_is_a_503(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(debug, "ENGINE_TIMEOUT_SECONDS", 0.01)
    engine.prefixes = lambda visible: asyncio.Event().wait()
    async with client(engine) as http:
        refused = await http.get("/debug/cache")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "busy")
        engine.is_ready = False
        refused = await http.get("/debug/cache")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "not_ready")


async def test_a_client_that_leaves_is_not_waited_for():
    asked = asyncio.Event()

    async def never(visible):
        asked.set()
        await asyncio.Event().wait()

    engine = FakeEngine()
    engine.prefixes = never
    app = application(engine)
    call = RawCall(app, "/debug/cache", {}, {"host": "localhost"}, method="GET")
    async with asyncio.timeout(5):
        await asked.wait()
        call.leave()
        await call.task
    assert app.state.service.in_flight == 0


async def test_a_text_begins_where_it_differs_from_its_siblings():
    engine = FakeEngine()
    engine.cached = [("", prefix(0, token_ids=list(b"same words, other ends"), num_same=12)), ("", prefix(1))]
    async with client(engine) as http:
        texts = [each["text"] for each in (await contents(http))["prefixes"]]
    assert sorted(texts)[-1] == "…other ends"


@pytest.mark.parametrize("keys", [1, 2])
async def test_keys_that_share_do_not_read_each_other_s_prompts(tmp_path, keys):
    (tmp_path / "keys").write_text("\n".join(KEYS[:keys]))
    (tmp_path / "keys").chmod(0o600)
    engine = FakeEngine()
    engine.cached = [("", prefix(0))]
    async with client(engine, api_key_file=str(tmp_path / "keys"), tenants_share=True) as http:
        (found,) = (await contents(http, KEYS[0]))["prefixes"]
    assert found["text"] == ("A" * 64 if keys == 1 else None)
    assert found["tokens"] == 64


async def test_the_document_describes_the_answer_and_the_fields():
    engine = FakeEngine()
    engine.cached = [("", prefix(0))]
    async with client(engine) as http:
        document = (await http.get("/openapi.json")).json()
        found = await contents(http)
    described = document["paths"]["/debug/cache"]["get"]
    assert described["parameters"] == [{"name": "limit", "in": "query", "schema": debug.LIMIT}]
    assert {"200", "400", "401", "403", "503"} <= described["responses"].keys()
    schemas = document["components"]["schemas"]
    assert schemas["CacheInfo"]["properties"].keys() == found.keys()
    assert schemas["CacheTotals"]["properties"].keys() == found["totals"].keys()
    assert schemas["PrefixInfo"]["properties"].keys() == found["prefixes"][0].keys()
    for name in ("CompletionRequest", "ChatRequest"):
        fields = schemas[name]["properties"]
        assert "xtension" in fields["cache_salt"]["description"] and "xtension" in fields["cache_pin"]["description"]
        assert fields["cache_salt"]["anyOf"][0]["maxLength"] == 256
        assert [kind["type"] for kind in fields["cache_pin"]["anyOf"]] == ["boolean", "number", "object", "null"]


async def test_tiers_are_told_without_their_paths(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Fetching, "_pays", lambda *given: True)
    async with real_server(folder, {"tiers.disk": f"{tmp_path / 'kv'}:64MiB"}, KEYS) as (llm, _, http):
        await complete(http, SYSTEM, "key-of-a")
        assert await llm.flush(10)
    async with real_server(folder, {"tiers.disk": f"{tmp_path / 'kv'}:64MiB"}, KEYS) as (llm, _, http):
        await complete(http, SYSTEM, "key-of-a")
        of_a, of_b = await contents(http, "key-of-a"), await contents(http, "key-of-b")
    disk = of_a["tiers"]["disk"]
    assert disk["found_tokens"] == 128 and of_b["tiers"]["disk"]["found_tokens"] == 0
    assert disk["is_on"] and disk["capacity_bytes"] == 64 << 20 and disk["chunks"] >= 2
    assert disk["fetched_bytes"] >= 2 * CHUNK_BYTES and 0 < disk["bytes"] <= 64 << 20
    moves = of_a["moves"]
    assert (moves["chunk_bytes"], moves["fetched"], moves["failed_fetches"]) == (CHUNK_BYTES, 2, 0)
    assert moves["fetched_bytes_per_second"] > 0 and moves["prefill_tokens_per_second"] > 0
    assert str(tmp_path) not in json.dumps(of_a)
    async with real_server(folder) as (_, _, http):
        found = await contents(http)
    assert found["tiers"] == {} and found["moves"] is None
