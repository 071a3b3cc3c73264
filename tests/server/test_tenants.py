"""Which tenants share cached prefixes: keys, salts, and the limits of a salt."""

import hmac
import json
import logging
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.params import MAX_SALT_CHARS
from quire.server.auth import ApiKeys
from quire.server.tenants import Tenants, tenant_of
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, TEXT, client, real_server

pytestmark = pytest.mark.anyio

KEYS = ("key-of-a", "key-of-b")
A, B = (tenant_of(key.encode()) for key in KEYS)
PROMPT = "The pages of a quire are folded once. " * 4
FOUND = 128
SALTS = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=MAX_SALT_CHARS)


@pytest.mark.parametrize(
    "cache_salt",
    [None, "", "/", f"{B}", f"{B}/", f"/{B}/", f"../{B}/", f"{B}/\x00", f"\x00{B}/", quote(f"{B}/"), "x" * 256],
)
def test_no_salt_is_another_tenants(cache_salt):
    _check_apart(cache_salt)


@given(SALTS)
def test_no_salt_at_all_is_another_tenants(cache_salt):
    _check_apart(cache_salt)


def _check_apart(cache_salt):
    tenants = Tenants([A, B])
    salt = tenants.salt(A, cache_salt)
    assert tenants.visible_salts(A)(salt) and not tenants.visible_salts(B)(salt)
    assert salt != tenants.salt(B, cache_salt) and salt not in tenants.salts[1:]
    assert len(salt) <= MAX_SALT_CHARS


@given(SALTS, SALTS)
def test_a_tenants_salts_are_equal_where_those_asked_for_are(one, other):
    for tenants, name in ((Tenants([A, B]), A), (Tenants([]), "")):
        assert (tenants.salt(name, one) == tenants.salt(name, other)) == ((one or "") == (other or ""))


def test_without_tenants_everybody_is_one():
    tenants = Tenants([])
    assert tenants.salts == [""] and tenants.salt("", "mine") == "mine" and tenants.visible_salts("")("anything")


@pytest.mark.parametrize(("header", "tenant"), [("key-of-a", A), ("key-of-b", B), ("key-of-c", None), ("", None)])
def test_every_key_is_compared_whichever_it_is(header, tenant, monkeypatch):
    compared = []

    def compare(left, right, compare=hmac.compare_digest):
        compared.append(right)
        return compare(left, right)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert ApiKeys(list(KEYS)).tenant(f"Bearer {header}".encode()) == tenant
    assert compared == [key.encode() for key in KEYS]


def test_a_tenants_name_does_not_hold_its_key():
    assert A != B and tenant_of(b"key-of-a") == A
    assert "key-of-a" not in A and b"key-of-a".hex() not in A


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
async def test_the_prompt_carries_what_is_asked_of_the_cache(path, body, tmp_path):
    (tmp_path / "keys").write_text("\n".join(KEYS))
    (tmp_path / "keys").chmod(0o600)
    for settings in ({}, {"api_key_file": str(tmp_path / "keys")}):
        engine = FakeEngine()
        tenants = Tenants([A, B] if settings else [])
        name = B if settings else ""
        headers = {"authorization": "Bearer key-of-b"}
        async with client(engine, **settings) as http:
            on_disk = {"cache_pin": {"tier": "disk", "seconds": 60}, "cache_priority": -100}
            pins = ({"cache_pin": True}, {"cache_pin": 2.5}, {"cache_pin": False}, {"cache_pin": {"tier": "arena"}})
            for fields in ({}, {"cache_salt": "s"}, *pins, on_disk, {"cache_priority": 0, "cache_lifetime": 0}):
                answer = await http.post(path, json=body | fields | {"max_tokens": 1}, headers=headers)
                assert answer.status_code == 200, answer.text
                prompt = engine.prompts[-1]
                assert prompt["cache_salt"] == tenants.salt(name, fields.get("cache_salt"))
                assert prompt.get("cache_pin") is fields.get("cache_pin") or prompt["cache_pin"] == fields["cache_pin"]
                told = {name: value for name, value in prompt.items() if name.startswith("cache_")}
                assert told == fields | {"cache_salt": prompt["cache_salt"]}


async def cached(http, key=None, **hints):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True} | hints
    answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_prefix_is_found_under_its_key_alone(folder):
    async with real_server(folder, keys=KEYS) as (_, _, http):
        assert await cached(http, "key-of-a") == 0
        assert await cached(http, "key-of-a") == FOUND
        for salt in (None, "", f"{A}/", f"{A}", f"/../{A}/", f"{A}/\x00"):
            assert await cached(http, "key-of-b", cache_salt=salt) in ((0,) if salt else (0, FOUND))
        assert await cached(http, "key-of-b") == FOUND


async def test_the_first_under_another_key_finds_nothing(folder):
    async with real_server(folder, keys=KEYS) as (_, _, http):
        await cached(http, "key-of-a")
        assert await cached(http, "key-of-b") == 0


async def test_tenants_may_be_told_to_share(folder):
    async with real_server(folder, keys=KEYS, tenants_share=True) as (_, _, http):
        assert await cached(http, "key-of-a") == 0
        assert await cached(http, "key-of-b") == FOUND
        assert await cached(http, "key-of-b", cache_salt="apart") == 0
        assert await cached(http, "key-of-a", cache_salt="apart") == FOUND


@pytest.mark.parametrize("keys", [(), KEYS])
async def test_a_salt_separates_the_requests_of_one_key(folder, keys):
    key = keys[0] if keys else None
    async with real_server(folder, keys=keys) as (_, _, http):
        for salt in ("one", "two", "x" * 256, None):
            assert await cached(http, key, cache_salt=salt) == 0
        for salt in ("one", "two", "x" * 256, None, ""):
            assert await cached(http, key, cache_salt=salt) == FOUND


async def test_a_tenant_cannot_end_the_pin_of_another(folder):
    async with real_server(folder, keys=KEYS) as (llm, _, http):
        await cached(http, "key-of-a", cache_pin=True)
        pinned = llm.stats()["cache"]["bytes_pinned"]
        assert pinned > 0
        for salt in (None, f"{A}/", A):
            await cached(http, "key-of-b", cache_pin=0, cache_salt=salt)
        assert llm.stats()["cache"]["bytes_pinned"] == pinned
        await cached(http, "key-of-a", cache_pin=0)
        assert llm.stats()["cache"]["bytes_pinned"] == 0


async def test_a_key_stands_in_no_log_salt_or_answer(folder, caplog):
    with caplog.at_level(logging.DEBUG):
        async with real_server(folder, keys=KEYS) as (llm, app, http):
            await cached(http, "key-of-a")
            await cached(http, "key-of-a", cache_pin=True)
            headers = {"authorization": "Bearer key-of-a"}
            answers = [await http.get(path, headers=headers) for path in ("/debug/cache", "/metrics", "/openapi.json")]
            answers += [await http.get("/debug/cache", headers={"authorization": "Bearer key-of-wrong"})]
            answers += [await http.post("/v1/completions", json={"cache_salt": 1}, headers=headers)]
            salts = [each.namespace.salt for each in llm._parts.engine.scheduler.manager.tree.segments()]
            found = app.state.service.tenant_tokens
    assert "found in the cache" in caplog.text, "the log says why a request hit or missed"
    shown = caplog.text + "".join(answer.text for answer in answers) + json.dumps(salts) + repr(found)
    assert all(salt.startswith(f"{A}/") for salt in salts)
    assert "key-of" not in shown


async def test_a_grammar_is_compiled_for_each_tenant_again(folder):
    """Also one that is refused: nobody can tell by an answer's time what another tenant has asked for."""
    async with real_server(folder, keys=KEYS) as (llm, _, http):
        grammars, tried = llm._parts.engine.grammars, []
        try_one = grammars._try

        def counted(wanted, seconds):
            tried.append(wanted.text)
            return try_one(wanted, seconds)

        grammars._try = counted
        for regex, status in (("[a-c]{3}", 200), ("(?=a)b", 400)):
            for key, num_tried in (("key-of-a", 1), ("key-of-a", 1), ("key-of-b", 2), ("key-of-b", 2)):
                body = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": regex}}
                headers = {"authorization": f"Bearer {key}"}
                assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == status
                assert tried.count(regex) == num_tried, (regex, key)


def test_every_promise_of_the_page_has_its_test():
    """The table in docs/design/server.md names tests that exist."""
    root = Path(__file__).parents[2]
    table = (root / "docs/design/server.md").read_text().partition("| promise | tests |")[2].partition("\n\n")[0]
    names = re.findall(r"`(test_\w+)`", table)
    written = "".join(file.read_text() for file in (root / "tests").rglob("test_*.py"))
    assert len(names) >= 15 and all(f"def {name}(" in written for name in names)
