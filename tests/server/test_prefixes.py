"""/v1/cache/prefixes: what is warmed, listed and dropped, in the arena and on the disk, and by whom."""

import asyncio
import json
import math
import time

import pytest

from quire.cache.fetching import Fetching
from quire.prefixes.cached import CachedPrefix
from quire.prefixes.disk_index import TierCopy
from quire.server import debug
from tests.server.fake_engine import FakeEngine
from tests.server.harness import application, asgi_client, client, error_of, real_server, socket_server

pytestmark = pytest.mark.anyio

URL = "/v1/cache/prefixes"
KEYS = ("key-of-a", "key-of-b")
SYSTEM = "All of us begin alike, with these very words, and only later do we differ from each other. " * 2
PROMPT = SYSTEM + "one " * 40
"""Five whole chunks and a rest: with its begin token 343 tokens."""
OTHER = SYSTEM + "two " * 40
WHOLE = 320


@pytest.fixture
def disk(tmp_path):
    return {"tiers.disk": f"{tmp_path / 'kv'}:64MiB"}


@pytest.fixture(autouse=True)
def fetched(monkeypatch):
    """What the disk has is fetched, however fast a tiny model computes it."""
    monkeypatch.setattr(Fetching, "_pays", lambda *given: True)


def bearer(key):
    return {} if key is None else {"authorization": f"Bearer {key}"}


async def ask(http, method, path=URL, who=None, **body):
    found = await http.request(method, path, json=body or None, headers=bearer(who))
    assert found.status_code == 200, found.text
    return found.json()


async def refused(http, method, path=URL, who=None, **body):
    found = await http.request(method, path, json=body or None, headers=bearer(who))
    assert found.status_code != 200, found.text
    return found.status_code, error_of(found)


async def test_a_warmed_prefix_is_found_by_the_next_request(folder):
    async with real_server(folder) as (llm, _, http):
        first = await ask(http, "POST", prompt=PROMPT, cache_pin=60)
        assert first == {
            "key": llm.prefix_key(PROMPT),
            "tokens": WHOLE,
            "cached_tokens": 0,
            "cached_tokens_by_tier": {},
            "pinned_tokens": WHOLE,
        }
        again = await ask(http, "POST", prompt=llm.tokenizer.encode(PROMPT))
        assert again == first | {
            "cached_tokens": WHOLE,
            "cached_tokens_by_tier": {"arena": WHOLE},
            "pinned_tokens": 0,
        }
        body = {"prompt": PROMPT + "and more", "max_tokens": 1}
        details = (await ask(http, "POST", "/v1/completions", **body))["usage"]["prompt_tokens_details"]
        assert details["cached_tokens_by_tier"] == {"arena": WHOLE}
        salted = await ask(http, "POST", prompt=PROMPT, cache_salt="other")
        assert salted["cached_tokens"] == 0 and salted["key"] != first["key"]


async def test_a_warmed_conversation_is_the_beginning_of_a_longer_one(folder):
    messages = [{"role": "system", "content": SYSTEM}]
    async with real_server(folder) as (_, _, http):
        warm = await ask(http, "POST", messages=messages)
        body = {"messages": [*messages, {"role": "user", "content": "x"}], "max_tokens": 1}
        usage = (await ask(http, "POST", "/v1/chat/completions", **body))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == warm["tokens"] == 128


async def test_prefixes_are_listed_from_arena_and_disk_and_survive_a_restart(folder, disk):
    async with real_server(folder, disk) as (llm, _, http):
        key = (await ask(http, "POST", prompt=PROMPT))["key"]
        assert await llm.flush(10)
        listed = await ask(http, "GET")
        (prefix,) = listed["data"]
        assert (prefix["key"], prefix["parent"], prefix["tokens"]) == (key, None, WHOLE)
        assert prefix["tiers"].keys() == {"arena", "disk"}
        for held in prefix["tiers"].values():
            assert held["bytes"] > 0 and held["pinned_until"] is None and abs(held["last_used"] - time.time()) < 60
        assert (listed["num_prefixes"], listed["truncated"], listed["scope"]) == (1, False, "all")
        await ask(http, "POST", prompt=OTHER, cache_pin=60)
        assert await llm.flush(10)
        listed = await ask(http, "GET")
        front, *ends = sorted(listed["data"], key=lambda each: each["tokens"])
        assert [each["parent"] for each in ends] == [front["key"]] * 2 and front["tokens"] == 128
        assert sum(each["tiers"]["arena"]["pinned_until"] is not None for each in listed["data"]) == 1
        assert all("disk" in each["tiers"] for each in listed["data"])
        (last,) = (await ask(http, "GET", URL + "?limit=1"))["data"]
        assert last["key"] in {each["key"] for each in listed["data"]}
    async with real_server(folder, disk) as (_, _, http):
        listed = await ask(http, "GET")
        assert key in {each["key"] for each in listed["data"]}
        assert {tuple(each["tiers"]) for each in listed["data"]} == {("disk",)}
        shown = await ask(http, "GET", f"{URL}/{key}")
        assert (shown["key"], shown["tokens"], list(shown["tiers"])) == (key, WHOLE, ["disk"])
        warm = await ask(http, "POST", prompt=PROMPT)
        assert warm["cached_tokens_by_tier"] == {"disk": WHOLE}
        assert set((await ask(http, "GET", f"{URL}/{key}"))["tiers"]) == {"arena", "disk"}


async def test_a_part_of_a_longer_prefix_has_its_own_key(folder, disk):
    async with real_server(folder, disk) as (llm, _, http):
        await ask(http, "POST", prompt=PROMPT)
        assert await llm.flush(10)
        part = llm.prefix_key(PROMPT[:150])
        shown = await ask(http, "GET", f"{URL}/{part}")
        assert (shown["tokens"], set(shown["tiers"])) == (128, {"arena", "disk"})
        whole = await ask(http, "GET", f"{URL}/{llm.prefix_key(PROMPT)}")
        for tier, held in shown["tiers"].items():
            assert held["bytes"] == pytest.approx(whole["tiers"][tier]["bytes"] * 2 / 5, rel=0.01)


@pytest.mark.parametrize("by_key", [False, True])
async def test_a_dropped_prefix_is_gone_from_everywhere(folder, disk, by_key):
    async with real_server(folder, disk) as (llm, _, http):
        key = (await ask(http, "POST", prompt=PROMPT, cache_pin={"tier": "disk"}))["key"]
        assert await llm.flush(10)
        assert (await ask(http, "GET", f"{URL}/{key.upper()}"))["key"] == key
        body = {"key": key.upper()} if by_key else {"prompt": PROMPT}
        assert await ask(http, "DELETE", **body) == {"key": key, "dropped": {"arena": 5, "disk": 5}}
        status, error = await refused(http, "DELETE", **body)
        assert (status, error["code"], error["param"]) == (404, "prefix_not_found", "key" if by_key else "prompt")
        assert (key in error["message"]) == by_key
        assert (await refused(http, "GET", f"{URL}/{key}"))[0] == 404
        assert await llm.flush(10)
    async with real_server(folder, disk) as (_, _, http):
        assert (await ask(http, "GET"))["data"] == []
        assert (await ask(http, "POST", prompt=PROMPT))["cached_tokens"] == 0


@pytest.mark.parametrize("tier", ["arena", "disk"])
async def test_a_pinned_prefix_stays_if_one_that_goes_on_from_it_is_dropped(folder, disk, tier):
    async with real_server(folder, disk) as (llm, _, http):
        key = (await ask(http, "POST", prompt=SYSTEM, cache_pin={"tier": tier}))["key"]
        assert await llm.flush(10)
        await ask(http, "POST", prompt=PROMPT)
        assert await llm.flush(10)
        dropped = (await ask(http, "DELETE", prompt=PROMPT))["dropped"]
        assert dropped[tier] == 3
        assert (await ask(http, "GET", f"{URL}/{key}"))["tiers"][tier]["pinned_until"] == "forever"
        assert (await ask(http, "DELETE", prompt=SYSTEM))["dropped"][tier] == 2


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_other_prefixes_need_stays(folder, disk, restarted):
    """The beginning that both have in common, in its own chunks, on the disk too."""
    async with real_server(folder, disk) as (llm, _, http):
        for prompt in (SYSTEM, PROMPT, OTHER):  # each of the three is a run of its own
            await ask(http, "POST", prompt=prompt)
            assert await llm.flush(10)
        if not restarted:
            assert (await ask(http, "DELETE", prompt=PROMPT))["dropped"] == {"arena": 3, "disk": 3}
            assert (await ask(http, "POST", prompt=OTHER))["cached_tokens_by_tier"] == {"arena": WHOLE}
    async with real_server(folder, disk) as (llm, _, http):
        if restarted:
            assert (await ask(http, "DELETE", prompt=PROMPT))["dropped"] == {"arena": 0, "disk": 3}
        assert (await ask(http, "POST", prompt=OTHER))["cached_tokens_by_tier"] == {"disk": WHOLE}
        assert (await ask(http, "POST", prompt=PROMPT))["cached_tokens"] == 128


async def test_what_a_prefix_on_the_disk_needs_stays_there_if_another_one_leaves_the_arena(folder, disk):
    async with real_server(folder, disk) as (llm, _, http):
        for prompt in (SYSTEM, PROMPT, OTHER):
            await ask(http, "POST", prompt=prompt)
            assert await llm.flush(10)
    async with real_server(folder, disk) as (llm, _, http):
        await ask(http, "POST", prompt=PROMPT)
        assert (await ask(http, "DELETE", prompt=PROMPT))["dropped"] == {"arena": 5, "disk": 3}
        assert (await ask(http, "POST", prompt=OTHER))["cached_tokens_by_tier"] == {"disk": WHOLE}


async def test_all_that_goes_on_from_a_dropped_prefix_is_dropped_after_a_restart(folder, disk):
    async with real_server(folder, disk) as (llm, _, http):
        for prompt in (SYSTEM, PROMPT, OTHER):
            await ask(http, "POST", prompt=prompt)
            assert await llm.flush(10)
    async with real_server(folder, disk) as (llm, _, http):
        assert (await ask(http, "DELETE", prompt=SYSTEM))["dropped"] == {"arena": 0, "disk": 8}
        assert (await ask(http, "GET"))["data"] == []


async def test_a_pin_on_the_disk_is_listed(folder, disk):
    async with real_server(folder, disk) as (llm, _, http):
        body = {"prompt": PROMPT, "cache_pin": {"tier": "disk", "seconds": 3600}}
        assert (await ask(http, "POST", **body))["pinned_tokens"] == WHOLE
        assert await llm.flush(10)
        (prefix,) = (await ask(http, "GET"))["data"]
        assert prefix["tiers"]["disk"]["pinned_until"] == pytest.approx(time.time() + 3600, abs=60)
        assert prefix["tiers"]["arena"]["pinned_until"] is None
        await ask(http, "POST", prompt=PROMPT, cache_pin={"tier": "disk"})
        assert await llm.flush(10)
        assert (await ask(http, "GET"))["data"][0]["tiers"]["disk"]["pinned_until"] == "forever"


async def test_tenants_see_and_touch_their_own_alone(folder, disk):
    async with real_server(folder, disk, KEYS) as (llm, _, http):
        key = (await ask(http, "POST", who="key-of-a", prompt=PROMPT))["key"]
        assert await llm.flush(10)
        assert (await ask(http, "GET", who="key-of-b"))["data"] == []
        unknown = "0" * 32
        for method, path, body in (
            ("GET", f"{URL}/{{}}", None),
            ("DELETE", URL, {"key": "{}"}),
        ):
            answers = []
            for asked in (key, unknown):
                content = body and {"key": asked}
                answer = await refused(http, method, path.format(asked), "key-of-b", **(content or {}))
                answers.append(json.dumps(answer).replace(asked, "KEY"))
            assert answers[0] == answers[1] and answers[0].startswith("[404")
        assert (await refused(http, "DELETE", who="key-of-b", prompt=PROMPT))[0] == 404
        listed = await ask(http, "GET", who="key-of-a")
        assert [each["key"] for each in listed["data"]] == [key] and listed["scope"] == "tenant"
        assert (await ask(http, "DELETE", who="key-of-a", prompt=PROMPT))["dropped"]["arena"] == 5


REFUSED = [
    ("POST", {}, 400, "prompt"),
    ("POST", {"prompt": "short"}, 400, "prompt"),
    ("POST", {"prompt": ""}, 400, "prompt"),
    ("POST", {"prompt": []}, 400, "prompt"),
    ("POST", {"prompt": [True]}, 400, "prompt"),
    ("POST", {"prompt": [300] * 64}, 400, "prompt"),
    ("POST", {"prompt": ["a", "b"]}, 400, "prompt"),
    ("POST", {"prompt": "x" * 4096}, 400, "prompt"),
    ("POST", {"prompt": "x" * 99, "messages": [{"role": "user", "content": "a"}]}, 400, "prompt"),
    ("POST", {"messages": [{"role": "user", "content": "a"}]}, 400, "messages"),
    ("POST", {"prompt": "x" * 99, "model": "other"}, 404, "model"),
    ("POST", {"prompt": "x" * 99, "max_tokens": 1}, 400, "max_tokens"),
    ("POST", {"prompt": "x" * 99, "cache_pin": {"tier": "tape"}}, 400, "cache_pin"),
    ("POST", {"prompt": "x" * 99, "add_generation_prompt": True}, 400, "add_generation_prompt"),
    ("POST", {"prompt": [1] * 99, "add_special_tokens": True}, 400, "add_special_tokens"),
    ("DELETE", {}, 400, "key"),
    ("DELETE", {"key": "0" * 32, "prompt": "x" * 99}, 400, "key"),
    ("DELETE", {"key": "0" * 32, "cache_salt": "a"}, 400, "cache_salt"),
    ("DELETE", {"key": "0" * 32, "cache_pin": 1}, 400, "cache_pin"),
    ("DELETE", {"key": "0" * 31}, 404, "key"),
    ("DELETE", {"key": "Ü" * 32}, 404, "key"),
    ("DELETE", {"prompt": "x" * 99}, 404, "prompt"),
    ("DELETE", {"messages": [{"role": "user", "content": "x" * 99}]}, 404, "messages"),
]


@pytest.mark.parametrize(("method", "body", "status", "param"), REFUSED)
async def test_a_request_is_refused_by_name(method, body, status, param):
    async with client() as http:
        answer = await http.request(method, URL, json=body)
        assert answer.status_code == status and error_of(answer)["param"] == param, answer.text


async def test_a_full_queue_refuses_a_warm_prefix():
    async with client(FakeEngine(queue_limit=0)) as http:
        answer = await http.post(URL, json={"prompt": "x" * 99})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "3"


async def test_a_public_server_without_keys_lists_and_drops_nothing():
    async with client(allow_public=True) as http:
        for method, path in (("GET", URL), ("GET", f"{URL}/{'0' * 32}"), ("DELETE", URL)):
            status, error = await refused(http, method, path, **({"key": "0" * 32} if method == "DELETE" else {}))
            assert (status, error["code"]) == (403, "prompts_not_shown")
        assert (await ask(http, "POST", prompt="x" * 99))["tokens"] == 64


async def test_a_limit_cuts_the_list_and_says_so():
    engine = FakeEngine()
    held = TierCopy(10, 5.0, math.inf)
    engine.known = [("", CachedPrefix(bytes([number] * 16).hex(), None, 64, {"disk": held})) for number in range(3)]
    async with client(engine) as http:
        found = await ask(http, "GET", URL + "?limit=2")
        assert [len(found["data"]), found["num_prefixes"], found["truncated"]] == [2, 3, True]
        assert found["data"][0]["tiers"] == {"disk": {"bytes": 10, "last_used": 5.0, "pinned_until": "forever"}}
        assert (await refused(http, "GET", URL + "?limit=0"))[0] == 400
        assert (await refused(http, "GET", URL + "?offset=1"))[0] == 400
        status, error = await refused(http, "GET", URL + "?limit=1&limit=2")
        assert (status, error["param"]) == (400, "limit") and "more than once" in error["message"]


async def test_the_wait_for_another_listing_has_an_end(monkeypatch):
    monkeypatch.setattr(debug, "ENGINE_TIMEOUT_SECONDS", 0.01)
    app = application(FakeEngine())
    async with app.state.service.disk_index_lock, asgi_client(app) as http:
        for method, path in (("GET", URL), ("GET", f"{URL}/{'0' * 32}"), ("DELETE", URL)):
            async with asyncio.timeout(5):
                status, error = await refused(http, method, path, **({"key": "0" * 32} if method == "DELETE" else {}))
            assert (status, error["code"]) == (503, "busy")


async def test_a_body_may_come_with_delete():
    engine = FakeEngine()
    engine.known = [("", CachedPrefix((b"k" * 16).hex(), None, 64, {"disk": TierCopy(10, 5.0, 0.0)}))]
    body = json.dumps({"key": (b"k" * 16).hex()})
    head = f"DELETE {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with socket_server(engine) as server:
        answer = await server.ask(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    assert answer.status == 200 and json.loads(answer.body)["dropped"] == {"arena": 1, "disk": 2}
