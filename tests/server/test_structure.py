"""Structured output over HTTP: the formats of OpenAI and of vLLM, whole and streamed, and what is refused."""

import json

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, TEXT, client, error_of, events, real_server

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
BOTH = ("/v1/completions", "/v1/chat/completions")
REFUSED = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"uniqueItems": True}}}
LONG = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "a" * 270_000}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


def body_for(path, **options):
    return (CHAT if "chat" in path else TEXT) | {"max_tokens": 100, "temperature": 1.0} | options


def text_of(choice):
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    "wish", [{"response_format": FORMAT}, {"structured_outputs": {"json": SCHEMA}}], ids=["openai", "vllm"]
)
async def test_answers_fit_their_schema_whole_and_streamed(folder, path, wish, seed):
    async with real_server(folder) as (_, _, http):
        body = body_for(path, n=3, seed=seed, **wish)
        whole = await http.post(path, json=body)
        assert whole.status_code == 200, whole.text
        texts = [text_of(choice) for choice in whole.json()["choices"]]
        for text, choice in zip(texts, whole.json()["choices"], strict=True):
            found = json.loads(text)
            assert isinstance(found["ok"], bool) and found["kind"] in ("cat", "dog") and len(found) == 2
            assert choice["finish_reason"] == "stop"
        streamed = ["", "", ""]
        for chunk in events((await http.post(path, json=body | {"stream": True})).text):
            for choice in chunk["choices"]:
                delta = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                streamed[choice["index"]] += delta
        assert streamed == texts


@pytest.mark.parametrize(
    ("wish", "check"),
    [
        ({"structured_outputs": {"regex": "[ab]{4}x"}}, lambda text: len(text) == 5 and text.endswith("x")),
        ({"structured_outputs": {"choice": ["left", "right"]}}, lambda text: text in ("left", "right")),
        ({"structured_outputs": {"grammar": 'start: "<" /[a-z]/ ">"'}}, lambda text: text[0] + text[-1] == "<>"),
        ({"response_format": {"type": "text"}}, lambda text: True),
    ],
)
async def test_every_way_is_honoured(folder, wish, check, seed):
    async with real_server(folder) as (_, _, http):
        for path in BOTH:
            answer = await http.post(path, json=body_for(path, seed=seed, **wish))
            assert answer.status_code == 200, answer.text
            assert check(text_of(answer.json()["choices"][0]))


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("wish", "param", "said"),
    [
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", "not"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json and regex"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs", "yaml"),
        ({"structured_outputs": 3}, "structured_outputs", "object"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "look-ahead"),
        ({"response_format": REFUSED}, "response_format.json_schema.schema", "schema': the schema cannot be honoured"),
        ({"response_format": REFUSED}, "response_format.json_schema.schema", "uniqueItems"),
        ({"response_format": LONG}, "response_format.json_schema.schema", "at most 262,144"),
        ({"response_format": {"type": "text"}, "structured_outputs": {"json": {"not": {}}}}, "structured_outputs", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"name": "a"}}}, "response_format", "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs", "exclude each other"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens", "min_tokens"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(path, wish, param, said):
    async with client(FakeEngine()) as http:
        answer = await http.post(path, json=body_for(path, **wish))
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == param and said in error["message"]
