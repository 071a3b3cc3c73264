"""Strings of a request that are parsed or normalized again, and fields with a product of sizes, have bounds."""

import ast
import asyncio
import gc
import json
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import quire.server
from quire.engine.params import SamplingParams
from quire.server import body_reader, json_complexity, memory_trimmer, service
from quire.server.chat_schema import ChatRequest
from quire.server.errors import ApiError
from quire.server.responses_schema import ResponsesRequest
from quire.server.schema import CompletionRequest
from tests.server.fake_engine import ByteTokenizer, FakeEngine
from tests.server.harness import CHAT, RawCall, application, asgi_client, client, error_of

pytestmark = pytest.mark.anyio


def called(*arguments):
    """Messages of a chat with an answer that made calls."""
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": each}} for each in arguments]
    return [{"role": "assistant", "content": "", "tool_calls": calls}]


def replayed(*arguments):
    """The same for /v1/responses."""
    return [{"type": "function_call", "call_id": "c", "name": "f", "arguments": each} for each in arguments]


PLACES = {
    "chat": ("POST", "/v1/chat/completions", lambda text: {"messages": called(text)}, "function.arguments"),
    "responses": ("POST", "/v1/responses", lambda text: {"input": replayed(text)}, "input[0].arguments"),
    "tokenize": ("POST", "/tokenize", lambda text: {"messages": called(text)}, "function.arguments"),
    "a warm prefix": ("POST", "/v1/cache/prefixes", lambda text: {"messages": called(text)}, "function.arguments"),
    "a dropped prefix": ("DELETE", "/v1/cache/prefixes", lambda text: {"messages": called(text)}, "arguments"),
    "a schema as text": (
        "POST", "/v1/completions",
        lambda text: {"prompt": "a", "structured_outputs": {"json": text}}, "structured_outputs",
    ),
    "a schema as text in chat": (
        "POST", "/v1/chat/completions", lambda text: CHAT | {"structured_outputs": {"json": text}}, "structured_outputs"
    ),
}  # fmt: skip
"""Every field whose text is parsed as JSON: method, path, body, and the end of the parameter that an error names."""

BOMBS = {
    "lists": ("[" + ",".join(["[]"] * 66_000) + "]", "65,536 arrays and objects"),
    "objects": ('{"a":[' + ",".join(["{}"] * 66_000) + "]}", "65,536 arrays and objects"),
    "names": ("{" + ",".join(f'"{each}":1' for each in range(66_000)) + "}", "65,536 names"),
    "strings": ("[" + ",".join(['""'] * 132_000) + "]", "131,072 strings"),
    "values": ("[" + ",".join(["1"] * 1_100_000) + "]", "1,048,576 values"),
    "values in strings": ("[" + ",".join(["1"] * 263_000) + "]", "262,144 values in such strings"),
    "levels": ("[" * 201 + "]" * 201, "200 levels"),
    "digits": ("[" + "9" * 1001 + "]", "1,000 digits in a number"),
    "levels of what is no JSON": ('{"a":' * 5000, "200 levels"),
}


async def ask(http, method, path, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await http.request(method, path, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize("place", PLACES)
async def test_json_in_a_string_counts_in_the_limits_of_its_body(place):
    method, path, body, param = PLACES[place]
    async with client() as http:
        for text, said in BOMBS.values():
            response = await ask(http, method, path, body(text))
            error = error_of(response)
            assert response.status_code == 400 and error["code"] == "body_too_complex", error
            assert f"more than {said}" in error["message"] and error["param"].endswith(param)


async def test_all_strings_of_a_request_have_one_budget_with_its_body():
    lists = json.dumps({"a": [[]] * 30_000})
    variables = {"chat_template_kwargs": {"a": [[]] * 30_000}}
    async with client() as http:
        for path, fitting, too_many in (
            ("/v1/responses", {"input": replayed(lists, lists)}, {"input": replayed(lists, lists, lists)}),
            ("/v1/chat/completions", {"messages": called(lists, lists)}, {"messages": called(lists, lists, lists)}),
            (
                "/tokenize",
                {"messages": called(lists)} | variables,
                {"messages": [*called(lists), {"role": "user", "content": "a"}, *called(lists)]} | variables,
            ),
        ):
            assert error_of(await ask(http, "POST", path, fitting))["code"] == "context_length_exceeded"
            error = error_of(await ask(http, "POST", path, too_many))
            assert error["code"] == "body_too_complex" and error["param"].endswith("arguments")


async def test_text_that_nobody_parses_counts_nothing():
    brackets = "[[]," * 100_000
    async with client(FakeEngine(max_context=1000)) as http:
        for body in (
            {"messages": [{"role": "user", "content": brackets}]},
            {"messages": called(json.dumps({"code": brackets}))},
        ):
            error = error_of(await ask(http, "POST", "/v1/chat/completions", body))
            assert error["code"] == "context_length_exceeded"


def test_only_checked_strings_are_parsed_by_the_server():
    """A further `json.loads` needs a row in PLACES, or is of a file of the operator's."""
    found = set()
    for path in Path(quire.server.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("loads", "raw_decode", "b64decode", "literal_eval"):
                found.add(path.name)
    assert found == {"chat_schema.py"}


# --- the event loop --------------------------------------------------------------------------------------------------


async def test_a_schema_is_written_once_where_its_body_is_checked(monkeypatch):
    written = []
    original = json.dumps

    def dumps(value, **options):
        written.append(value)
        return original(value, **options)

    properties = {f"p{each:04d}": {"type": "string", "description": "d" * 40} for each in range(1000)}
    schema = {"type": "object", "properties": properties}
    chat = CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    text = {"prompt": ["a"] * 8} | {name: value for name, value in chat.items() if name != "messages"}
    said = {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}
    for path, body, model in (
        ("/v1/completions", text, CompletionRequest),
        ("/v1/chat/completions", chat, ChatRequest),
        ("/v1/responses", said, ResponsesRequest),
    ):
        content = original(body).encode()
        with monkeypatch.context() as patch:
            patch.setattr("quire.structured.params.json.dumps", dumps)
            parsed = body_reader._parse(bytearray(content), model)
            assert parsed.structure() is parsed.structure() and len(written) == 1
            written.clear()
        too_long = content.replace(b"d" * 40, b"d" * 400)
        async with client() as http:
            error = error_of(await ask(http, "POST", path, too_long))
        assert "at most 262,144" in error["message"] and error["param"].endswith(".schema")


async def test_parameters_of_many_prompts_are_made_once(monkeypatch):
    made = []

    def params(**given):
        made.append(given)
        return SamplingParams(**given)

    monkeypatch.setattr(service, "SamplingParams", params)
    biases = {str(each): 1 for each in range(200)}
    async with client(FakeEngine(max_context=300)) as http:
        body = {"prompt": ["a"] * 100 + ["a" * 290], "logit_bias": biases, "max_tokens": 2}
        assert (await ask(http, "POST", "/v1/completions", body)).status_code == 200
    assert len(made) == 1


# --- memory ----------------------------------------------------------------------------------------------------------


async def test_parsed_bodies_wait_for_room_and_give_it_back():
    app = application(FakeEngine())
    found = app.state.service.body_reader
    found.memory_limiter.seconds = 0.1
    large = {"prompt": [1] * 20_000}
    small = {"prompt": "a"}
    await found.parsed.acquire(found.parsed.size)
    waiting = RawCall(app, "/v1/completions", large)
    quick = RawCall(app, "/v1/completions", small)
    await asyncio.wait_for(quick.task, 2)
    assert quick.status == 200 and not waiting.task.done()
    await asyncio.wait_for(waiting.task, 2)
    assert waiting.status == 503 and json.loads(waiting.body)["error"]["code"] == "too_many_large_bodies"
    found.parsed.release(found.parsed.size)
    for _ in range(3):
        again = RawCall(app, "/v1/completions", large)
        await asyncio.wait_for(again.task, 2)
        assert again.status == 400 and found.parsed.free == found.parsed.size
    assert found.memory_limiter.held == 0


@pytest.mark.parametrize(
    ("body", "least"),
    [
        ({"prompt": [1_000_000 + each for each in range(100_000)]}, 3_600_000),
        ({"messages": [{"role": "user", "content": "a"}] * 5000}, 2_500_000),
        ({"input": replayed(*["{}"] * 5000)}, 2_500_000),
        ({"chat_template_kwargs": {"a": [{"b": 1}] * 30_000}}, 5_000_000),
        ({"prompt": "a" * 1_000_000 + "🌍"}, 4_000_000),
        ({"prompt": "a" * 1_000_000 + "é"}, 1_000_000),
        ({"prompt": "a" * 1_000_000}, 1_000_000),
    ],
    ids=range(7),
)
@pytest.mark.parametrize("escaped", [False, True])
def test_the_memory_of_a_parsed_body_is_known_before_it_is_parsed(body, least, escaped):
    text = bytearray(json.dumps(body, ensure_ascii=escaped).encode())
    models = {"messages": ChatRequest, "input": ResponsesRequest}
    model = next((models[name] for name in body if name in models), None)
    most = json_complexity.check_complexity(text).num_bytes
    gc.collect()
    tracemalloc.start()
    kept = body_reader.from_json(text, cache_strings=False)
    if model is not None:
        kept = model.model_validate(kept)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept is not None and least * 0.9 <= held <= 1.1 * most, f"{held} bytes, {most} expected at most"
    assert most <= 8 * held


async def test_a_refused_body_is_not_kept_by_its_error():
    async with client() as http:
        body = json.dumps(CHAT | {"user": "u" * 3_000_000}).encode()
        await ask(http, "POST", "/v1/chat/completions", body)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(4):
                assert error_of(await ask(http, "POST", "/v1/chat/completions", body))["param"] == "user"
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
    assert held < 4_000_000, f"{held} bytes are kept"  # one of them may be in use still


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"safety_identifier": "", "prompt_cache_key": ""}),
        ("/v1/responses", {"input": "a", "safety_identifier": "", "prompt_cache_key": ""}),
    ],
)
async def test_a_running_request_keeps_nothing_of_its_body_that_only_the_prompt_needed(path, body, monkeypatch):
    def chat(self, messages, opens=True, variables=None):
        return "a" * 100  # a template that leaves out what it is given

    monkeypatch.setattr(ByteTokenizer, "chat", chat)
    large = {name: "x" * 2_000_000 for name, value in body.items() if value == ""}
    app = application(FakeEngine(step_seconds=0.02, max_context=150_000))
    gc.collect()
    tracemalloc.start()
    try:
        call = RawCall(app, path, body | large | {"stream": True})
        async with asyncio.timeout(5):
            while not call.sent:
                await asyncio.sleep(0.01)
            held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        call.leave()
        await asyncio.gather(call.task, return_exceptions=True)
    assert held < 1_500_000, f"{held} bytes are kept"


async def test_metadata_and_user_are_as_short_as_their_limits_say():
    async with client() as http:
        for field, fits, refused, said in (
            ("metadata", {"n" * 64: "t" * 512}, {"n" * 65: "t"}, "64"),
            ("metadata", {"n": "t" * 512}, {"n": "t" * 513}, "512"),
            ("user", "u" * 1024, "u" * 1025, "1024"),
        ):
            for path in ("/v1/chat/completions", "/v1/responses"):
                body = CHAT if "chat" in path else {"input": "a"}
                assert (await ask(http, "POST", path, body | {field: fits})).status_code == 200
                error = error_of(await ask(http, "POST", path, body | {field: refused}))
                assert error["param"].startswith(field) and said in error["message"]


async def test_tools_that_a_response_tells_of_are_written_once_and_counted():
    tools = [{"type": "function", "name": f"f{each}", "parameters": {"a": "x" * 20_000}} for each in range(10)]
    app = application(FakeEngine(step_seconds=0.01))
    body = {"input": "abcd", "tools": tools, "tool_choice": "none", "stream": True}
    call = RawCall(app, "/v1/responses", body)
    async with asyncio.timeout(5):
        while len(call.sent) < 3:
            await asyncio.sleep(0.005)
        assert app.state.service.answer_limiter.num_bytes > 100_000
        await call.task
    assert app.state.service.answer_limiter.num_bytes == 0
    blocks = call.body.decode().strip().split("\n\n")
    first, last = (json.loads(block.split("data: ")[1])["response"]["tools"] for block in (blocks[0], blocks[-1]))
    assert first == last == [tool | {"description": None, "strict": True} for tool in tools]


async def test_an_echoed_prompt_counts_for_each_choice(monkeypatch):
    monkeypatch.setattr("quire.server.json_encoding.UNSENT_BYTES", 1_000_000)
    async with client(FakeEngine(max_context=20_000)) as http:
        body = {"prompt": "a" * 19_000, "echo": True, "max_tokens": 1}
        assert len((await ask(http, "POST", "/v1/completions", body | {"n": 40})).json()["choices"]) == 40
        error = error_of(await ask(http, "POST", "/v1/completions", body | {"n": 60}))
        assert (error["code"], error["param"]) == ("answer_too_large", "echo")


async def test_ids_of_prompts_and_answers_come_whole_for_each_choice():
    async with client() as http:
        body = {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 2, "return_token_ids": True, "add_special_tokens": False}
        for echo in (False, True):
            answer = (await ask(http, "POST", "/v1/completions", body | {"echo": echo})).json()
            prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
            assert prompts == [[97, 98]] * 2 + [[99, 100, 101]] * 2
            assert [choice["token_ids"] for choice in answer["choices"]][:2] == [[97, 98], [98, 97]]


def test_too_complex_strings_are_refused_where_a_model_is_used_alone():
    lists = json.dumps({"a": [[]] * 66_000})
    with pytest.raises(ValueError, match="65,536 arrays and objects"):
        ChatRequest.model_validate({"messages": called(lists)})
    with pytest.raises(ApiError, match="65,536 arrays"):
        body_reader._parse(bytearray(json.dumps({"messages": called(lists)}).encode()), ChatRequest)


def test_numbers_of_a_thousand_digits_are_the_longest_ones(monkeypatch):
    for size in (json_complexity.SLICE, 700):
        monkeypatch.setattr(json_complexity, "SLICE", size)
        json_complexity.check_complexity(b"[" + b",".join([b"9" * 1000] * 100) + b"]")
        json_complexity.check_complexity(b'["' + b"9" * 5000 + b'"]')
        with pytest.raises(ApiError, match="1,000 digits in a number"):
            json_complexity.check_complexity(b"[1,-" + b"9" * 3000 + b"]")


class HeldTimers:
    """An event loop whose timers wait until the test fires them: how long requests take decides nothing."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.threads: list[asyncio.Future] = []

    def call_later(self, seconds: float, function: Callable[..., None], *values: object) -> object:
        assert seconds == memory_trimmer.TRIM_SECONDS
        self.waiting.append(lambda: function(*values))
        return function  # anything but None: the trimmer looks whether a timer is set

    def run_in_executor(self, executor: None, function: Callable[..., object], *values: object) -> None:
        self.threads.append(asyncio.get_running_loop().run_in_executor(executor, function, *values))

    async def fire(self) -> None:
        waiting, self.waiting = self.waiting, []
        for start in waiting:
            start()
        await asyncio.gather(*self.threads)


async def test_memory_is_given_back_once_after_large_bodies(monkeypatch):
    timers = HeldTimers()
    monkeypatch.setattr(memory_trimmer, "asyncio", SimpleNamespace(get_running_loop=lambda: timers))
    app = application(FakeEngine())
    found, threads = app.state.service.body_reader.memory_trimmer, []
    assert found._trim is None or found._trim(0) in (0, 1)
    found._trim = lambda pad: threads.append(threading.current_thread())
    small, refused, parsed = b'{"prompt":"a"}', b'{"prompt":' + b"[" * 1_000_000, json.dumps({"tokens": [1] * 30_000})

    async def num_trims() -> int:
        threads.clear()
        await timers.fire()
        assert threading.main_thread() not in threads
        return len(threads)

    async with asgi_client(app) as http:
        hold = app.state.service.answer_limiter.hold
        for size, count in ((10, 0), (2_000_000, 1)):
            with hold() as grow:
                grow(size)
            assert await num_trims() == count
        for content, count in ((small, 0), (refused, 1), (parsed.encode(), 1), (b'{"prompt":"' + b"a" * 10**6, 1)):
            for _ in range(3):
                assert (await ask(http, "POST", "/detokenize", content)).status_code == 400
            assert await num_trims() == count
        monkeypatch.setattr(memory_trimmer, "MANY_BYTES", 20_000)
        for _ in range(200):
            assert (await ask(http, "POST", "/detokenize", small)).status_code == 400
        assert await num_trims() == 1
