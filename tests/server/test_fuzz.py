"""Any body gets an answer or a clean error: no 500, no hang, no request left in the engine."""

import asyncio
import contextlib
import itertools
import json

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from quire.async_llm import AsyncLLM
from quire.cache.manager import PINNED_SHARE
from quire.config import ServeConfig
from quire.server.app import create_app
from quire.server.connection_manager import ConnectionLimits
from tests.effort import examples
from tests.server import bombs
from tests.server.fake_engine import FakeEngine
from tests.server.harness import RawCall, client, error_of, events, named_events, post_head, socket_server
from tests.tiny_models import save_tiny

fuzz = examples(100, suppress_health_check=[HealthCheck.too_slow])

ODD_NUMBERS = [
    0,
    -1,
    1,
    2,
    20,
    21,
    128,
    129,
    2**31,
    2**63,
    -(2**63) - 1,
    10**300,
    10**400,
    0.5,
    -0.0,
    1e-300,
    1.5,
    1e308,
]
TEXT = st.text(max_size=12) | st.sampled_from(["", "\x00", "é🌍", "</s>", "{{ x }}", "%s", "\u202e", "a" * 300])
SCALAR = (
    st.none()
    | st.booleans()
    | st.sampled_from(ODD_NUMBERS)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
JSON = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)

IDS = st.lists(st.integers(0, 257), max_size=6)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "text", "image_url"])}, optional={"text": TEXT, "image_url": JSON}
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "developer", "tool"]),
        "content": TEXT | st.lists(PART, max_size=2),
    },
    optional={"name": TEXT, "tool_calls": JSON},
)
TOOL = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["function", "browser"]),
        "function": st.fixed_dictionaries({"name": st.sampled_from(["f", "g", "a b"])}, optional={"parameters": JSON}),
    }
)
LIKELY = {
    "model": st.sampled_from(["fake", None, "gpt-4"]),
    "prompt": TEXT | st.lists(TEXT, max_size=3) | IDS | st.lists(IDS, max_size=3),
    "messages": st.lists(MESSAGE, max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "n": st.integers(1, 4),
    "max_tokens": st.integers(0, 12),
    "max_completion_tokens": st.integers(1, 12),
    "min_tokens": st.integers(0, 5),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 9),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-5, 5),
    "echo": st.booleans(),
    "logprobs": st.booleans() | st.integers(0, 3),
    "top_logprobs": st.integers(0, 3),
    "prompt_logprobs": st.integers(0, 3),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stop_token_ids": IDS,
    "logit_bias": st.dictionaries(st.integers(0, 257).map(str), st.integers(-100, 100), max_size=3),
    "tokens": IDS,
    "input": TEXT | st.lists(TEXT, max_size=3) | IDS | st.lists(MESSAGE, max_size=3),
    "query": TEXT,
    "documents": st.lists(TEXT, max_size=3),
    "text_1": TEXT | st.lists(TEXT, max_size=3),
    "text_2": TEXT | st.lists(TEXT, max_size=3),
    "dimensions": st.integers(1, 5),
    "encoding_format": st.sampled_from(["float", "base64", "hex"]),
    "max_output_tokens": st.integers(1, 12),
    "tools": st.lists(TOOL, max_size=2),
    "tool_choice": st.sampled_from(["none", "auto", "required", "any"]),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}]),
    "structured_outputs": st.fixed_dictionaries(
        {}, optional={"regex": TEXT, "json": JSON, "choice": st.lists(TEXT, max_size=2), "grammar": TEXT}
    ),
    "return_token_ids": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "cache_salt": st.sampled_from(["", "a", "b", "/", "x" * 256, "x" * 257]) | TEXT,
    "cache_pin": st.booleans() | st.sampled_from([0, 1, 1e-3, 0.02, 3600, -1]) | st.floats(0, 5),
}
REQUIRED = {"prompt", "messages", "tokens", "input", "query", "documents", "text_1", "text_2"}


def bodies(model):
    """Bodies of known names with values mostly of the right kind, now and then a name or a value from nowhere."""
    fields = {name: (LIKELY[name] | JSON if name in LIKELY else st.none() | JSON) for name in model.model_fields}
    likely = {name: LIKELY[name] for name in model.model_fields if name in LIKELY}
    required = {name: likely[name] for name in likely if name in REQUIRED}
    optional = {name: each for name, each in likely.items() if name not in REQUIRED}
    sane = st.fixed_dictionaries(required, optional=optional)
    names = TEXT | st.sampled_from(sorted(fields)) if fields else TEXT
    spoiled = st.tuples(sane, st.dictionaries(names, JSON, max_size=2)).map(lambda both: both[0] | both[1])
    return sane | spoiled


ENDPOINTS = bombs.endpoints()


async def post(http, path, content):
    """One answer, which must be whole or a clean error."""
    async with asyncio.timeout(20):
        response = await http.post(path, content=content, headers={"content-type": "application/json"})
    # 429: together the requests may be more than the queue takes.
    assert response.status_code in (200, 400, 404, 429), (response.status_code, response.text)
    if response.status_code != 200:
        error_of(response)
    elif response.headers["content-type"].startswith("text/event-stream"):
        (events if "[DONE]" in response.text else named_events)(response.text)
    else:
        json.loads(response.text, parse_constant=lambda name: 1 / 0)
    return response


async def send(path, content):
    engine = FakeEngine(max_context=64)
    async with client(engine) as http:
        response = await post(http, path, content)
        assert engine.started == 0 or response.status_code in (200, 400)


@fuzz
@given(st.sampled_from(sorted(ENDPOINTS)).flatmap(lambda path: st.tuples(st.just(path), bodies(ENDPOINTS[path]))))
def test_any_json_is_answered(request):
    path, body = request
    asyncio.run(send(path, json.dumps(body).encode()))


@fuzz
@given(st.sampled_from(sorted(ENDPOINTS)), JSON)
def test_any_json_of_no_known_form_is_answered(path, body):
    asyncio.run(send(path, json.dumps(body).encode()))


@fuzz
@given(
    st.sampled_from(sorted(ENDPOINTS)).flatmap(lambda path: st.tuples(st.just(path), bodies(ENDPOINTS[path]))),
    st.lists(st.tuples(st.integers(0, 500), st.binary(max_size=3)), min_size=1, max_size=4),
)
def test_any_bytes_are_answered(request, changes):
    path, body = request
    content = bytearray(json.dumps(body, ensure_ascii=False).encode())
    for place, piece in changes:
        at = place % (len(content) + 1)
        content[at : at + len(piece)] = piece
    asyncio.run(send(path, bytes(content)))


@examples(60, suppress_health_check=[HealthCheck.too_slow])
@given(bombs.bombs(ENDPOINTS))
def test_any_size_is_answered_shortly(request):
    """Deep, wide, long, of many names, giant numbers, in every field of every endpoint."""
    path, body = request

    async def send():
        async with client(FakeEngine(max_context=64)) as http:
            response = await post(http, path, body.encode())
        if response.status_code != 200:
            assert len(response.content) < 1500

    asyncio.run(send())


@pytest.mark.anyio
@pytest.mark.parametrize("what", bombs.HEAD_BOMBS)
async def test_no_route_reads_a_head_of_any_size(what):
    async with socket_server() as server:
        sent = [bombs.HEAD_BOMBS[what](*route).encode() for route in bombs.routes()]
        for answer in await asyncio.gather(*map(server.ask, sent)):
            # A route that needs no body may answer before the end of one.
            early = what in ("trailers", "a chunk extension") and answer.status in (200, 400, 404, 405)
            assert answer.status == 431 or early, (answer.status, answer.body)
        assert (await server.ask(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")).status == 200


@pytest.mark.anyio
@pytest.mark.parametrize("what", bombs.SLOW)
async def test_no_route_waits_for_a_client_that_stops(what):
    limits = ConnectionLimits(head_seconds=0.1, body_seconds=0.1, linger_seconds=0.1, sweep_seconds=0.02)
    async with socket_server(limits=limits) as server:
        clients = [await server.connect(bombs.SLOW[what](*route).encode()) for route in bombs.routes()]
        for each in clients:
            answer = await each.answer(3)
            # A route that needs no body has answered before its end.
            assert answer.status == 408 or (("body" in what or "chunk" in what) and answer.status in (200, 404, 405))
            assert await each.ended(3)
        async with asyncio.timeout(3):  # a connection ends before the handler that it is taken from
            while server.app.state.service.in_flight:
                await asyncio.sleep(0.001)


@pytest.fixture(scope="module")
def slow_server():
    """A server on a socket, with little patience, for many tests: (runner of its event loop, server)."""
    limits = ConnectionLimits(head_seconds=0.05, body_seconds=0.05, linger_seconds=0.05, sweep_seconds=0.01)
    with asyncio.Runner() as runner:
        context = socket_server(limits=limits)
        yield runner, runner.run(context.__aenter__())
        runner.run(context.__aexit__(None, None, None))


@examples(40, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(bombs.routes()),
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=4)), max_size=6),
    st.lists(st.integers(1, 200), max_size=4),
)
def test_any_bytes_on_a_connection_are_answered_or_end_it(slow_server, route, changes, cuts):
    runner, server = slow_server
    body = b'{"prompt": "a", "max_tokens": 2}'
    sent = bytearray(post_head(route[1], f"Content-Length: {len(body)}").replace(b"POST", route[0].encode()) + body)
    for place, piece in changes:
        at = place % (len(sent) + 1)
        sent[at : at + len(piece)] = piece

    async def send():
        one = await server.connect()
        for begin, end in itertools.pairwise([0, *sorted(cuts), len(sent)]):
            await one.send(bytes(sent[begin:end]))
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            assert (await one.answer(3)).status in (200, 400, 403, 404, 405, 408, 413, 429, 431)
        one.close()

    runner.run(send())


GOOD = {
    name: LIKELY[name] for name in ("n", "temperature", "top_p", "seed", "stop_token_ids", "logit_bias", "stream")
} | {
    "max_tokens": st.integers(1, 90),
    "ignore_eos": st.booleans(),
    "stop": st.text(min_size=1, max_size=2),
}
CACHE = {
    "cache_salt": st.sampled_from(["", "a", "é" * 256]),
    "cache_pin": LIKELY["cache_pin"],
    "cache_priority": st.integers(-100, 100),
    "cache_lifetime": st.sampled_from([0, 0.01, 60]),
}
# Of few prompts, so that they meet, and long enough to be shared and pinned.
SHARED_IDS = st.tuples(st.integers(0, 2), st.sampled_from([64, 65, 100, 129, 140]), st.integers(0, 2)).map(
    lambda drawn: [drawn[0]] * drawn[1] + [drawn[2]] * 3
)
GOOD_TEXT = st.text(min_size=1, max_size=20)
GOOD_IDS = st.lists(st.integers(0, 255), min_size=1, max_size=70)
WORK = st.one_of(
    st.tuples(
        st.just("/v1/completions"),
        st.fixed_dictionaries(
            {"prompt": GOOD_TEXT | GOOD_IDS | st.lists(GOOD_IDS, min_size=1, max_size=3)},
            optional=GOOD | {"echo": LIKELY["echo"], "logprobs": st.integers(0, 3)},
        ),
    ),
    st.tuples(
        st.just("/v1/completions"),
        st.fixed_dictionaries(
            {"prompt": SHARED_IDS | st.lists(SHARED_IDS, min_size=1, max_size=3)},
            optional=GOOD | CACHE | {"max_tokens": st.integers(1, 30)},
        ),
    ),
    st.tuples(
        st.just("/v1/chat/completions"),
        st.fixed_dictionaries(
            {
                "messages": st.lists(
                    st.fixed_dictionaries({"role": st.just("user"), "content": GOOD_TEXT}), min_size=1, max_size=2
                )
            },
            optional=GOOD | {"logprobs": st.just(True)},
        ),
    ),
    st.sampled_from(sorted(ENDPOINTS)).flatmap(lambda path: st.tuples(st.just(path), bodies(ENDPOINTS[path]))),
)
"""Bodies most of which give the engine something to do."""


class RealServer:
    """A tiny model behind the server, on an event loop of its own."""

    def __init__(self, folder):
        self.runner = asyncio.Runner()
        self.llm = self.runner.run(self.start(folder))
        self.app = create_app(self.llm, ServeConfig())
        self.at_rest = self.llm.stats()["cache"]

    async def start(self, folder):
        options = {"model.dtype": "float32", "model.name": "fake", "model.max_context": 192, "cache.memory": "256KiB"}
        llm = AsyncLLM(folder, options | {"runtime.threads": 1, "runtime.device": "cpu", "scheduler.max_queue": 32})
        await llm.start()
        return llm

    def close(self):
        self.runner.run(self.llm.close())
        self.runner.close()

    async def send_all(self, requests, unpin):
        """Requests side by side; a client with a patience leaves after so many parts of its answer. What they pinned
        stays for the next ones, or not.
        """
        transport = httpx.ASGITransport(self.app)
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=30)
        async with client as http, asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(self.one(http, *request))
        async with asyncio.timeout(10):
            while (stats := self.llm.stats())["running"] or stats["waiting"] or stats["cache"]["bytes_used"]:
                await asyncio.sleep(0.001)
        await self.check(unpin)
        rest = self.llm.stats()["cache"]
        assert rest["bytes_used"] == rest["bytes_saved"] == 0
        assert rest["bytes_cached"] + rest["bytes_free"] == rest["bytes_total"] == self.at_rest["bytes_total"]
        assert 0 <= rest["bytes_pinned"] <= rest["bytes_cached"]
        assert rest["bytes_pinned"] <= (0 if unpin else rest["bytes_total"] * PINNED_SHARE)

    async def check(self, unpin):
        """The engine's own proof, on its own thread: it may still be putting the last request away."""
        checked = asyncio.get_running_loop().create_future()

        def check():
            try:
                engine = self.llm._parts.engine
                while unpin and engine.scheduler.manager.pins.end_oldest():
                    pass
                engine.check()
            except AssertionError as error:
                self.llm._streams.on_loop(lambda error=error: checked.set_exception(error))
            else:
                self.llm._streams.on_loop(lambda: checked.set_result(None))

        self.llm._submit(check)
        async with asyncio.timeout(10):
            await checked

    async def one(self, http, path, body, patience):
        if patience is None:
            await post(http, path, json.dumps(body).encode())
            return
        call = RawCall(self.app, path, body)
        async with asyncio.timeout(20):
            while not call.task.done() and len(call.sent) < patience:
                await asyncio.sleep(0)
            call.leave()
            await call.task


@pytest.fixture(scope="module")
def real_server(tmp_path_factory):
    server = RealServer(str(save_tiny(tmp_path_factory.mktemp("tiny"))))
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.slow
@examples(25, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(
        st.tuples(WORK, st.none() | st.integers(0, 8)).map(lambda both: (*both[0], both[1])), min_size=1, max_size=5
    ),
    unpin=st.booleans(),
)
def test_the_real_engine_answers_side_by_side_and_keeps_no_page(real_server, requests, unpin):
    real_server.runner.run(real_server.send_all(requests, unpin))
