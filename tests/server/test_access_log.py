"""The access log, and ids of requests."""

import json
import logging
import re

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, TEXT, client, events

pytestmark = pytest.mark.anyio


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="quire.access")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "quire.access"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_line_with_its_costs(lines, stream):
    engine = FakeEngine()
    engine.kept_fraction = 0.5
    async with client(engine) as http:
        body = CHAT | {"max_tokens": 3, "stream": stream}
        answer = await http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    said = events(answer.text)[0]["id"] if stream else answer.json()["id"]
    (line,) = lines()
    found = dict(re.findall(r"(\w+)=(\S+)", line))
    assert line.startswith("127.0.0.1 POST /v1/chat/completions 200 ")
    assert found["id"] == "mine-1" and found["answer"] == said
    assert int(found["prompt"]) > 10 and found["generated"] == "3" and found["cached"].isdecimal()
    assert int(found["kept"]) == round(int(found["prompt"]) / 2)
    assert 0 <= float(found["first"]) <= float(found["seconds"])


async def test_refusals_and_ids_that_cannot_be_logged_have_lines_of_their_own(lines):
    async with client() as http:
        wrong = await http.post("/v1/completions", json={"prompt": "a", "nonsense": 1}, headers={"X-Request-Id": "a b"})
        other = await http.get("/no/such\u00e4%0Aurl")
        await http.get("/health")
        await http.get("/metrics")
    ids = [each.headers["x-request-id"] for each in (wrong, other)]
    assert [len(each) for each in ids] == [32, 32] and ids[0] != ids[1]
    first, second = lines()
    assert f"400 seconds=0.{first.split('seconds=0.')[1][:3]} id={wrong.headers['x-request-id']}" in first
    assert " 404 " in second and "\n" not in second


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/v1/completions", {"prompt": "a", "nonsense": 1}, 400, {"code": "unknown_parameter", "param": "nonsense"}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**6}, 400, {"code": "context_length_exceeded"}),
        ("/v1/chat/completions", {"messages": [{"role": "a\nb"}]}, 400, {"param": "messages[0].role"}),
        ("/v1/nowhere", {}, 404, {"code": "unknown_url"}),
    ],
)
async def test_a_refusal_is_logged_with_its_reason_at_debug(caplog, path, body, status, error, stream):
    for level in (logging.INFO, logging.DEBUG):
        caplog.clear()
        caplog.set_level(level, logger="quire.access")
        async with client(access_log=False) as http:
            answer = await http.post(path, json=body | {"stream": stream}, headers={"X-Request-Id": "mine"})
        assert answer.status_code == status
        reasons = [record.getMessage() for record in caplog.records if record.name == "quire.access"]
        assert len(reasons) == (level == logging.DEBUG)
    begin = f"refused id=mine status={status} error="
    assert reasons[0].startswith(begin) and "\n" not in reasons[0]
    told = json.loads(reasons[0].removeprefix(begin))
    assert told == answer.json()["error"] and error.items() <= told.items()


async def test_no_line_where_none_is_wanted(lines):
    async with client(access_log=False) as http:
        await http.post("/v1/completions", json=TEXT | {"max_tokens": 2})
    assert not lines()
