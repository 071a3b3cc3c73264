"""The curl commands of README and of the first guide are answered, and the routes that pages for users name exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.server.harness import client, real_server

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "guide" / "start.md"]
USERS = [*PAGES, *sorted((ROOT / "docs" / "guide").glob("*.md")), ROOT / "docs" / "reference" / "endpoints.md"]


def curls_of(page: Path) -> list[list[str]]:
    """The words of its curl commands."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("curl ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
async def test_the_curl_commands_that_a_newcomer_copies_are_answered(page: Path, folder: str) -> None:
    commands = curls_of(page)
    assert commands
    async with real_server(folder) as (_, _, http):
        for words in commands:
            body = json.loads(words[words.index("-d") + 1])
            (url,) = [word for word in words if word.startswith("http://127.0.0.1:8000/")]
            answer = await http.post(url, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["role"] == "assistant"


async def test_routes_that_pages_name_exist() -> None:
    named = {
        route.partition("?")[0].rstrip("/.")
        for page in USERS
        for route in re.findall(r"[`\s](/(?:v1|health|debug)/[\w/.-]+)", page.read_text())
    }
    assert {"/v1/chat/completions", "/v1/cache/prefixes", "/health/ready", "/debug/cache"} <= named
    async with client() as http:
        known = set((await http.get("/openapi.json")).json()["paths"])
    known = {re.sub(r"/\{.*", "", path) for path in known}
    assert {route for route in named if re.sub(r"/(?:NAME|KEY)$", "", route) not in known} == set()
