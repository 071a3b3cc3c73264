"""Answers with many log-probabilities: made once for all choices, off the event loop, in pieces, and bounded."""

import asyncio
import json
import threading
import tracemalloc
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.server import completions, errors, json_encoding
from quire.server.errors import json_bytes
from quire.server.json_encoding import SENT_BYTES, SLICE, AnswerByteLimiter, LargeJsonResponse, encoded, extend, pieces
from quire.server.shapes import EncodedList
from tests.effort import examples
from tests.server.fake_engine import FakeEngine
from tests.server.harness import RawCall, application, client, error_of, events

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=80) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=100,
)
PROMPT = list(range(1, 151))
"""Its scores are more than are made on the loop."""


@examples(40)
@given(JSON)
def test_pieces_join_to_the_json_of_the_whole(value):
    assert b"".join(pieces(value)) == json_bytes(value)


@examples(40)
@given(st.lists(JSON, max_size=3 * SLICE), st.integers(0, 3 * SLICE))
def test_a_list_that_was_begun_goes_on_as_one(values, begun):
    grown = bytearray()
    sizes = [extend(grown, [each]) for each in values[begun:]]
    value = {"a": [{"b": EncodedList(encoded(iter(values[:begun])), grown)}]}
    assert b"".join(pieces(value)) == json_bytes({"a": [{"b": values}]})
    assert encoded(values) == encoded(iter(values)) and sum(sizes) == len(grown)


def test_what_choices_share_is_there_once_and_sent_in_bounded_parts():
    shared = EncodedList(b"1," * SENT_BYTES + b"1", bytearray(b"2,2"), b"3," * SENT_BYTES + b"3")
    content = {"choices": [{"index": index, "x": shared} for index in range(8)]}
    held = ExitStack()
    length = LargeJsonResponse(content, held).headers["content-length"]
    tracemalloc.start()
    try:
        most = sizes = 0
        for part in pieces(content):
            most, sizes = max(most, len(part)), sizes + len(part)
        assert tracemalloc.get_traced_memory()[1] < 4 * SENT_BYTES, "it is made as a whole"
    finally:
        tracemalloc.stop()
    assert most == SENT_BYTES and length == str(sizes)
    ones, threes = [1] * (SENT_BYTES + 1), [3] * (SENT_BYTES + 1)
    assert json.loads(b"".join(pieces(content)))["choices"][7] == {"index": 7, "x": [*ones, 2, 2, *threes]}


def test_small_parts_are_joined():
    sizes = [len(part) for part in pieces({"a": ["x" * (SENT_BYTES // 5)] * 12})]
    assert len(sizes) == 3 and max(sizes) <= SENT_BYTES


def test_the_bytes_of_answers_are_counted_up_and_down_and_the_first_of_each_are_free():
    answer_limiter, free = AnswerByteLimiter(), json_encoding.UNCOUNTED_BYTES
    with answer_limiter.hold() as one, answer_limiter.hold() as other:
        one(free)
        assert answer_limiter.num_bytes == 0
        one(100)
        other(free + 30)
        assert answer_limiter.num_bytes == 130
        one(-200)
        assert answer_limiter.num_bytes == 30
        one(150)
        assert answer_limiter.num_bytes == 80
    assert answer_limiter.num_bytes == 0


def test_an_answer_that_nobody_asks_for_any_more_gives_its_count_back():
    answer_limiter = AnswerByteLimiter()
    with ExitStack() as held:
        held.enter_context(answer_limiter.hold())(10**6)
        answer = LargeJsonResponse({"a": 1}, held.pop_all())
    assert answer_limiter.num_bytes > 0
    del answer
    assert answer_limiter.num_bytes == 0


@pytest.fixture
def calls(monkeypatch):
    """The threads on which scores of prompts were made."""
    threads = []
    make = completions.prompt_logprobs

    def watched(*given):
        threads.append(threading.current_thread())
        return make(*given)

    monkeypatch.setattr(completions, "prompt_logprobs", watched)
    return threads


@pytest.mark.anyio
async def test_prompt_scores_are_made_once_for_all_choices_and_off_the_loop(calls):
    body = {"prompt": PROMPT, "n": 8, "max_tokens": 1, "prompt_logprobs": 20}
    async with client() as http:
        choices = (await http.post("/v1/completions", json=body)).json()["choices"]
        assert len(calls) == 1 and calls[0] is not threading.main_thread()
        (alone,) = (await http.post("/v1/completions", json=body | {"n": 1})).json()["choices"]
    assert len(choices) == 8
    assert all(each["prompt_logprobs"] == alone["prompt_logprobs"] for each in choices)
    assert len(alone["prompt_logprobs"]) == 150 and len(alone["prompt_logprobs"][1]) == 21


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_echoed_lists_are_made_once_for_all_choices(stream, monkeypatch):
    made = []
    lists = completions.LegacyLogprobs.__call__
    monkeypatch.setattr(
        completions.LegacyLogprobs,
        "__call__",
        lambda self, ids, *rest: made.append((len(ids), threading.current_thread())) or lists(self, ids, *rest),
    )
    body = {"prompt": PROMPT, "n": 3, "max_tokens": 2, "echo": True, "logprobs": 20, "stream": stream}
    async with client() as http:
        answer = await http.post("/v1/completions", json=body)
    (echo,) = [thread for count, thread in made if count == len(PROMPT)]
    assert echo is not threading.main_thread()
    parts = events(answer.text) if stream else [answer.json()]
    for index in range(3):
        found = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        text = ""
        for choice in (each for part in parts for each in part["choices"] if each["index"] == index):
            text += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                found[name] += values
        assert [len(values) for values in found.values()] == [152] * 4
        assert found["token_logprobs"][0] is None and found["text_offset"] == sorted(found["text_offset"])
        assert text.startswith(FakeEngine().tokenizer.decode(PROMPT[:100]))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": PROMPT, "n": 4, "prompt_logprobs": 20, "echo": True, "logprobs": 20}),
        ("completions", {"prompt": PROMPT, "n": 4, "echo": True, "logprobs": 20, "stream": True}),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x" * 300}], "logprobs": True, "top_logprobs": 20},
        ),
    ],
)
async def test_no_single_call_encodes_a_large_part_of_an_answer(path, body, monkeypatch):
    lengths = []
    monkeypatch.setattr(
        json_encoding, "json_bytes", lambda value: lengths.append(len(text := json_bytes(value))) or text
    )
    async with client() as http:
        answer = await http.post(f"/v1/{path}", json=body | {"max_tokens": 300})
    assert answer.status_code == 200 and len(answer.content) > 250_000
    # 64 tokens with 20 alternatives each.
    assert max(lengths) < 100_000
    if not body.get("stream"):
        assert answer.headers["content-length"] == str(len(answer.content)) and json.loads(answer.content)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "num_scores", "param"),
    [
        ({"n": 6, "prompt_logprobs": 20}, 6 * 4000 * 21, "prompt_logprobs"),
        ({"n": 6, "echo": True, "logprobs": 20}, 6 * 4000 * 21, "logprobs"),
        ({"n": 128, "echo": True, "logprobs": 0}, 128 * 4000, "logprobs"),
        ({"n": 3, "echo": True, "logprobs": 20, "prompt_logprobs": 20}, 3 * 4000 * 42, "logprobs"),
    ],
)
async def test_more_scores_than_an_answer_holds_are_refused_by_name(fields, num_scores, param):
    async with client(FakeEngine(max_context=5000)) as http:
        response = await http.post("/v1/completions", json={"prompt": [65] * 4000, "max_tokens": 1} | fields)
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == param
    for word in ("'n'", "4000 tokens", str(num_scores), "500000", f"'{param}' is {fields[param]}"):
        assert word in error["message"], word


@pytest.mark.anyio
async def test_an_answer_without_log_probabilities_is_encoded_in_one_call(monkeypatch):
    calls = []
    for module in (json_encoding, errors):
        monkeypatch.setattr(module, "json_bytes", lambda value: calls.append(value) or json_bytes(value))
    async with client() as http:
        answer = await http.post("/v1/completions", json={"prompt": ["a"] * 20, "n": 2, "max_tokens": 2})
    assert len(answer.json()["choices"]) == 40 and len(calls) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_large_answers_that_nobody_reads_are_bounded_together(stream, monkeypatch):
    monkeypatch.setattr(json_encoding, "UNCOUNTED_BYTES", 0)
    request_body = {"prompt": PROMPT, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": stream}
    app = application(FakeEngine())
    answer_limiter, read = app.state.service.answer_limiter, asyncio.Event()

    class Unread(RawCall):
        """A client whose connection takes the answer's head alone until it is read."""

        async def _send(self, message):
            await super()._send(message)
            if message["type"] == "http.response.body":
                await read.wait()

    first = Unread(app, "/v1/completions", request_body)
    async with asyncio.timeout(5):
        while not answer_limiter.num_bytes:
            await asyncio.sleep(0.001)
    size = answer_limiter.num_bytes
    assert size > 20_000
    monkeypatch.setattr(json_encoding, "UNSENT_BYTES", 2 * size)
    second, third = Unread(app, "/v1/completions", request_body), None
    async with asyncio.timeout(5):
        while answer_limiter.num_bytes < 2 * size:
            await asyncio.sleep(0.001)
        third = RawCall(app, "/v1/completions", request_body)
        await third.task
    assert third.status == 503 and json.loads(third.body)["error"]["code"] == "too_many_large_answers"
    read.set()
    async with asyncio.timeout(5):
        await asyncio.gather(first.task, second.task)
    assert first.status == second.status == 200 and answer_limiter.num_bytes == 0
    fourth = RawCall(app, "/v1/completions", request_body)
    await fourth.task
    assert fourth.status == 200


@pytest.mark.anyio
@pytest.mark.parametrize("is_stream", [False, True])
async def test_tools_that_are_too_large_for_an_answer_are_refused_before_the_engine_is_asked(is_stream, monkeypatch):
    engine = FakeEngine()
    app = application(engine)
    tool = {"type": "function", "name": "look", "description": "x" * 2000, "parameters": {"type": "object"}}
    request_body = {"input": "a", "tools": [tool], "tool_choice": "none", "stream": is_stream, "store": False}
    monkeypatch.setattr(json_encoding, "UNCOUNTED_BYTES", 0)
    monkeypatch.setattr(json_encoding, "UNSENT_BYTES", 1000)
    refused = RawCall(app, "/v1/responses", request_body)
    await refused.task
    assert refused.status == 400 and json.loads(refused.body)["error"]["code"] == "answer_too_large"
    assert not engine.prompts and app.state.service.answer_limiter.num_bytes == 0


CHOICES = {
    "completions": {"prompt": "a", "logprobs": 20},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20},
}


@pytest.mark.anyio
@pytest.mark.parametrize("path", CHOICES)
async def test_scores_of_a_whole_answer_are_counted_as_they_come_and_bounded(path, monkeypatch):
    body = CHOICES[path] | {"n": 4, "max_tokens": 200}
    app = application(FakeEngine())
    answer_limiter = app.state.service.answer_limiter
    fits = RawCall(app, f"/v1/{path}", body)
    await fits.task
    assert fits.status == 200 and answer_limiter.num_bytes == 0
    monkeypatch.setattr(json_encoding, "UNCOUNTED_BYTES", 0)
    monkeypatch.setattr(json_encoding, "UNSENT_BYTES", len(fits.body) // 2)
    large = RawCall(app, f"/v1/{path}", body)
    await large.task
    assert large.status == 400 and json.loads(large.body)["error"]["code"] == "answer_too_large"
    with answer_limiter.hold() as grow:
        grow(len(fits.body) // 4)
        late = RawCall(app, f"/v1/{path}", body | {"n": 2})
        await late.task
        assert late.status == 503 and json.loads(late.body)["error"]["code"] == "too_many_large_answers"
        monkeypatch.setattr(json_encoding, "UNCOUNTED_BYTES", len(fits.body))
        few = RawCall(app, f"/v1/{path}", body | {"n": 2})
        await few.task
        assert few.status == 200, "an answer of a few bytes is refused"
    streamed = RawCall(app, f"/v1/{path}", body | {"stream": True})
    await streamed.task
    assert streamed.status == 200 and answer_limiter.num_bytes == 0


class Unread(RawCall):
    """A client that takes nothing of its answer's body until it is let."""

    reads = None

    async def _send(self, message):
        await super()._send(message)
        if message["type"] == "http.response.body":
            self.reads = self.reads or asyncio.Event()
            await self.reads.wait()


@pytest.mark.anyio
@pytest.mark.parametrize("prompts", [1, 8])
async def test_a_client_that_does_not_read_keeps_nobody_s_scores_waiting(prompts):
    engine, items = FakeEngine(), []
    generate = engine.generate

    async def watched(*given):
        async for item in generate(*given):
            items.append(item)
            yield item

    engine.generate = watched
    app = application(engine)
    service = app.state.service
    service.logprob_limiter.free = service.logprob_limiter.size = 21 * len(PROMPT)
    request_body = {"prompt": [PROMPT] * prompts, "max_tokens": 1, "echo": True, "logprobs": 20}
    slow = [Unread(app, "/v1/completions", request_body | {"stream": True}) for _ in range(3)]
    async with asyncio.timeout(10):
        other = RawCall(app, "/v1/completions", request_body)
        await other.task
        while not all(call.reads for call in slow) or len(items) < 4 * prompts:
            await asyncio.sleep(0.001)
        # The scores of the last item are encoded at this moment, whoever reads.
        while service.logprob_limiter.free < service.logprob_limiter.size:
            await asyncio.sleep(0.001)
    assert other.status == 200 and service.logprob_limiter.free == service.logprob_limiter.size
    assert all(each.prompt_logprobs is None for each in items), "scores lie where nobody counts them"
    for call in slow:
        call.reads.set()
        await asyncio.wait_for(call.task, 5)
    assert service.answer_limiter.num_bytes == 0


@pytest.mark.anyio
async def test_prompts_that_wait_for_room_for_their_scores_count_as_queued():
    engine = FakeEngine()
    engine.config = EngineConfig.from_options({"scheduler.max_queue": 3})
    app = application(engine)
    logprob_limiter = app.state.service.logprob_limiter
    request_body = {"prompt": PROMPT, "max_tokens": 1, "echo": True, "logprobs": 20}
    async with logprob_limiter.hold(logprob_limiter.size):
        waiting = [RawCall(app, "/v1/completions", request_body) for _ in range(3)]
        while logprob_limiter.num_waiting < 3:
            await asyncio.sleep(0)
        late, plain = RawCall(app, "/v1/completions", request_body), RawCall(app, "/v1/completions", {"prompt": "a"})
        await asyncio.gather(late.task, plain.task)
        assert late.status == 429 and json.loads(late.body)["error"]["code"] == "queue_full" and plain.status == 200
    await asyncio.gather(*(call.task for call in waiting))
    assert [call.status for call in waiting] == [200] * 3


@pytest.mark.anyio
async def test_scores_of_prompts_that_the_engine_keeps_are_bounded_over_all_requests():
    engine = FakeEngine()
    app = application(engine)
    logprob_limiter = app.state.service.logprob_limiter
    begun = []
    generate = engine.generate
    engine.generate = lambda prompt, params, request_id: (
        begun.append(request_id),
        generate(prompt, params, request_id),
    )[1]
    request_body = {"prompt": PROMPT, "max_tokens": 1, "echo": True, "logprobs": 20}
    logprob_limiter.free = logprob_limiter.size = 2 * 21 * len(PROMPT) - 1
    async with logprob_limiter.hold(21 * len(PROMPT)):
        waiting, other = RawCall(app, "/v1/completions", request_body), RawCall(app, "/v1/completions", {"prompt": "a"})
        await other.task
        assert other.status == 200 and len(begun) == 1 and not waiting.task.done()
    await waiting.task
    assert waiting.status == 200 and logprob_limiter.free == logprob_limiter.size
    # More than there is room for takes all of it.
    large = RawCall(app, "/v1/completions", request_body | {"prompt": [PROMPT, PROMPT, PROMPT]})
    await large.task
    assert large.status == 200 and logprob_limiter.free == logprob_limiter.size
