"""`quire inspect --tree` with servers that answer, refuse, or are not Quire's."""

import asyncio
import contextlib
import json
import math
import re

import pytest
from rich.cells import cell_len

from quire.cli import main, tree
from quire.cli.tree import print_tree
from quire.config import ServeConfig
from quire.errors import QuireError
from quire.server.run import HttpListener, serve
from quire.server.tenants import Tenants, tenant_of
from tests.server.fake_engine import FakeEngine
from tests.server.harness import real_server
from tests.server.test_debug_cache import prefix

pytestmark = pytest.mark.anyio


async def inspect(*words):
    return await asyncio.to_thread(main, ["inspect", "--tree", *words])


@contextlib.asynccontextmanager
async def served(engine, **settings):
    listener = HttpListener(ServeConfig(port=0, **settings))
    ready = asyncio.Event()
    server = asyncio.ensure_future(serve(engine, listener, ready.set))
    try:
        await asyncio.wait_for(ready.wait(), 10)
        yield listener.url
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


@contextlib.asynccontextmanager
async def answering(data):
    """Something that answers every connection with the same bytes."""
    heard = []

    async def answer(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard


def engine():
    found = FakeEngine()
    found.cached = [
        ("", prefix(0, token_ids=list(b"[bold]begin[/]\x1b[2J" * 8)[:128], hits=3, computed=1, hit_rate=0.75)),
        ("", prefix(1, parent=0, sharers=2, token_ids=[66] * 64)),
        ("", prefix(2, parent=1, idle=90.0, start=128, pinned_seconds=math.inf, token_ids=[67] * 64)),
        ("", prefix(3, idle=7200.0, pinned_seconds=30.5, token_ids=[68] * 64, num_bytes=2048)),
    ]
    return found


async def test_prefixes_are_printed_under_their_parents(capsys):
    async with served(engine()) as url:
        for address in (url, f"{url}/", f"{url}/v1", f"{url}/v1/", f"{url}/debug/cache"):
            assert await inspect(address) == 0
            head, *lines = capsys.readouterr().out.splitlines()
            rows = [line.split() for line in lines]
            assert head.split() == "prefix key tokens sharers hits hit rate bytes last use pinned".split()
            assert lines[0].startswith("[bold]begin[/]\\x1b[2J"), "a prompt neither steers the terminal nor is markup"
            assert rows[0][1:] == "p0 0-128 0 3 75% 10B 0 s ago below".split()
            assert rows[1][0] == "└─" and rows[1][2:] == "p1 64-128 2 1 33% 10B now below".split()
            assert lines[2].startswith("   └─ CCC") and rows[2][2:] == "p2 128-192 0 1 33% 10B 90 s ago forever".split()
            assert rows[3][1:] == "p3 0-64 0 1 33% 2KiB 2 h ago 30 s more".split()
            assert lines[4] == "4 prefixes"
            assert lines[5] == "cache of 100B: 0B used, 7B cached, 93B free; 11B evicted since start"
            assert lines[6] == "pinned 2.029KiB; sharing saves 10B now"
            assert lines[7] == "hit rate 33.3%: 5 prompt tokens found, 10 computed"


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("text", ["plain words and more of them, " * 4, "\u202e evil " * 8, "日本語テキスト" * 11])
async def test_a_narrow_terminal_shows_every_number(capsys, monkeypatch, width, text):
    monkeypatch.setattr(tree, "PIPED_WIDTH", width)
    found = engine()
    found.cached.append(("", prefix(4, num_bytes=1500 * 2**20, token_ids=list(text.encode())[:320], hits=12_345)))
    async with served(found) as url:
        assert await inspect(url) == 0
    *_, long = [line for line in capsys.readouterr().out.splitlines() if "12,345" in line]
    found = re.fullmatch(r"(.*…) +(?:p4 +)?0-\d+ +0 +12,345 +33% +1\.465GiB +0 s ago *", long)
    assert found is not None and cell_len(found[1]) <= max(tree.MIN_TEXT_WIDTH, width - 50)
    assert width < 80 or cell_len(long) <= width
    assert (" p4 " in long) == (width >= tree.KEYS_WIDTH)


async def test_prefixes_of_several_salts_are_told_apart(capsys):
    found = engine()
    found.cached.append(("", prefix(5, space="0ther")))
    async with served(found) as url:
        assert await inspect(url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("[0the] FFF") and lines[2].startswith("[5ace] [bold]")


async def test_instances_have_trees_of_their_own(capsys):
    """The same prefixes lie on both, and one of them has more pinned."""
    found = engine()
    found.cached = [
        ("", prefix(number, parent=0 if number else None, instance=name, pinned_seconds=9.5 if pin == number else None))
        for name, pin in (("decode-0.2", None), ("prefill-0.1", 1))
        for number in (0, 1)
    ]
    async with served(found) as url:
        assert await inspect(url) == 0
    lines = capsys.readouterr().out.splitlines()[1:5]
    assert [line.split()[:2] for line in lines] == [
        ["decode-0.2", "A" * 64], ["└─", "B" * 64], ["prefill-0.1", "A" * 64], ["└─", "B" * 64],
    ]  # fmt: skip
    assert "below" not in lines[0] and "below" in lines[2] and lines[3].endswith("9 s more")


async def test_json_is_the_answer_itself(capsys):
    async with served(engine()) as url:
        assert await inspect(url, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["id"] for each in found["prefixes"]] == ["p0", "p1", "p2", "p3"]


async def test_a_key_is_taken_from_the_file_or_the_environment(tmp_path, capsys, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# ours\nkey-of-a\nkey-of-b\n")
    file.chmod(0o600)
    found = engine()
    found.cached = [(Tenants([tenant_of(b"key-of-a")]).salts[0], found.cached[0][1])]
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    async with served(found, api_key_file=str(file)) as url:
        assert await inspect(url) == 2
        assert "needs an API key: give --api-key-file FILE, or set QUIRE_API_KEY" in capsys.readouterr().err
        assert await inspect(url, "--api-key-file", str(file)) == 0
        assert "1 prefix of this API key" in capsys.readouterr().out
        for key, code, said in (
            ("key-of-b", 0, "0 prefixes of this API key"),
            ("key-of-x", 2, "does not accept this API key"),
            ("key of", 2, "QUIRE_API_KEY has spaces"),
            ("key\nof", 2, "QUIRE_API_KEY has spaces"),
        ):
            monkeypatch.setenv("QUIRE_API_KEY", key)
            assert await inspect(url) == code
            out, error = capsys.readouterr()
            assert said in out + error and error.count("\n") == (code == 2) and key not in out + error
        assert await inspect(url, "--api-key-file", str(file)) == 0, "the file wins"


async def test_what_a_server_refuses_is_told(capsys):
    found = engine()
    async with served(found, allow_public=True) as url:
        assert await inspect(url) == 2
        assert f"{url} refuses (403): this endpoint shows prompts" in capsys.readouterr().err
    async with served(found) as url:
        found.is_ready = False
        assert await inspect(url) == 2
        error = capsys.readouterr().err
        assert "(503): the engine is not running" in error and error.count("\n") == 1
        assert await inspect(f"{url}/elsewhere") == 2
        assert "has no /debug/cache" in capsys.readouterr().err


OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
OTHERS = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.9\r\n",
    "nothing": b"",
    "no JSON": OK + b"<html>",
    "other JSON": OK + b"[1]",
    "no prefixes": OK + b'{"prefixes": 1}',
    "bytes that are no text": OK + b"\xff\xfe",
    "too deep": OK + b"[" * 100_000,
    "another error": b"HTTP/1.1 500 No\r\nConnection: close\r\n\r\n<html>",
    "half an answer": b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
}


@pytest.mark.parametrize("what", OTHERS)
async def test_what_is_not_quire_is_one_line(what, capsys):
    async with answering(OTHERS[what]) as (url, _):
        assert await inspect(url) == 2
    out, error = capsys.readouterr()
    assert not out and error == f"quire: the server at {url} is not Quire\n"


async def test_a_key_follows_no_redirection(capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "key-of-a")
    async with answering(OK + b"{}") as (other, heard):
        moved = f"HTTP/1.1 302 Found\r\nLocation: {other}/\r\nConnection: close\r\n\r\n".encode()
        async with answering(moved) as (url, asked):
            assert await inspect(url) == 2
    assert b"Bearer key-of-a" in asked[0] and not heard
    assert "is not Quire" in capsys.readouterr().err


@pytest.mark.parametrize(
    "answer",
    [
        {"prefixes": []},
        {"prefixes": [{}]},
        {"prefixes": [1], "totals": {}},
        {"prefixes": [], "totals": {}, "num_prefixes": 0, "truncated": False, "scope": "all"},
    ],
)
def test_an_answer_of_another_form_is_one_line(answer):
    with pytest.raises(QuireError, match="another version"):
        print_tree(answer)


async def test_a_cut_answer_says_so(capsys):
    found = engine()
    found.cached = [("", prefix(each, idle=each / 10)) for each in range(1001)]
    async with served(found) as url:
        assert await inspect(url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4] == "1,001 prefixes; showing the 1,000 used last" and len(lines) == 1 + 1000 + 4


async def test_a_deep_tree_is_printed(capsys):
    found = engine()
    found.cached = [("", prefix(each, parent=each - 1 if each else None)) for each in range(900)]
    async with served(found) as url:
        assert await inspect(url) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 900 + 4


async def test_the_tree_of_a_real_engine(folder, capsys):
    async with real_server(folder) as (_, _, http):
        for end in "xy":
            await http.post("/v1/completions", json={"prompt": "shared " * 20 + end * 80, "max_tokens": 2})
        print_tree((await http.get("/debug/cache")).json())
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("shared shared") and lines[2].startswith("├─ ") and lines[3].startswith("└─ ")
    assert lines[4] == "3 prefixes" and "128 prompt tokens found" in lines[-1]
