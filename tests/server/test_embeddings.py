"""Embeddings, scores and rankings over HTTP, with OpenAI's client and with a real model."""

import base64
import math
import struct

import pytest

from quire.engine.params import SamplingParams
from quire.llm import LLM
from tests.server.fake_engine import FakeEngine
from tests.server.harness import OPTIONS, client, error_of, openai_client, real_server

pytestmark = pytest.mark.anyio

PATH = "/v1/embeddings"


def trained(tmp_path):
    """A fake whose model was made to compare texts."""
    (tmp_path / "modules.json").write_text("[]")
    engine = FakeEngine()
    engine.model_path = tmp_path
    return engine


async def test_openais_client_gets_vectors_of_length_one():
    async with openai_client() as api:
        found = await api.embeddings.create(model="fake", input=["aab", "b"])
        assert [each.index for each in found.data] == [0, 1]
        assert found.data[0].embedding == pytest.approx([2 / math.sqrt(5), 1 / math.sqrt(5), 0, 0])
        assert found.data[1].embedding == [0, 1, 0, 0]
        assert found.usage.prompt_tokens == found.usage.total_tokens == 6
        plain = await api.embeddings.create(model="fake", input="aab", encoding_format="float", dimensions=1)
        assert plain.data[0].embedding == [1.0]


async def test_every_form_of_input_and_answer():
    async with client() as http:
        for given, count in (("ab", 1), ([97, 98], 1), (["ab", "c"], 2), ([[97], [98, 99], [100]], 3)):
            answer = (await http.post(PATH, json={"input": given})).json()
            assert len(answer["data"]) == count and answer["model"] == "fake"
        both = [
            (await http.post(PATH, json={"input": "abb", "encoding_format": form})).json()["data"][0]["embedding"]
            for form in ("float", "base64")
        ]
        assert list(struct.unpack("<4f", base64.b64decode(both[1]))) == pytest.approx(both[0])
        last = (await http.post(PATH, json={"input": "aab", "pooling": "last"})).json()["data"][0]["embedding"]
        assert last == [0, 1, 0, 0]


async def test_a_model_that_was_made_for_it_scores_and_ranks(tmp_path):
    async with client(trained(tmp_path)) as http:
        body = {"text_1": "aa", "text_2": ["a", "b", "ab"]}
        scores = [each["score"] for each in (await http.post("/score", json=body)).json()["data"]]
        assert scores == pytest.approx([1, 0, math.sqrt(0.5)])
        pairs = {"text_1": ["a", "b"], "text_2": ["b", "b"]}
        assert [each["score"] for each in (await http.post("/v1/score", json=pairs)).json()["data"]] == [0, 1]
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            body = {"query": "a", "documents": ["b", "ab", "a"], "top_n": 2}
            results = (await http.post(path, json=body)).json()["results"]
            assert [each["index"] for each in results] == [2, 1] and results[0]["document"] == {"text": "a"}
        card = (await http.get("/v1/models")).json()["data"][0]
        assert card["capabilities"]["similarity"] and card["capabilities"]["embeddings"]


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/score", {"text_1": "a", "text_2": "b"}, "model", "was not made to compare texts"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "model", "modules.json"),
        (PATH, {"input": []}, "input", "not empty"),
        (PATH, {"input": [""], "add_special_tokens": False}, "input", "no token"),
        (PATH, {"input": "a", "dimensions": 5}, "dimensions", "this model has 4"),
        (PATH, {"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        (PATH, {"input": ["a"] * 2049}, "input", "2048"),
        (PATH, {"input": [[1], [9999]]}, "input", "9999"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(path, body, param, said):
    async with client() as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param and said in error_of(answer)["message"], answer.text


async def test_texts_of_two_lengths_are_not_paired(tmp_path):
    async with client(trained(tmp_path)) as http:
        answer = await http.post("/score", json={"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
    assert error_of(answer)["param"] == "text_1"


async def test_vectors_are_those_of_the_library(folder):
    texts = ["Quires are gatherings of pages. " * 8, "a", "Ünïcödé"]
    with LLM(folder, OPTIONS) as llm:
        expected = {pooling: llm.embed(texts, pooling) for pooling in ("mean", "last")}
        assert llm.embed("a") == [pytest.approx(expected["mean"][1])]
        with pytest.raises(ValueError, match="n must be 1"):
            SamplingParams(n=2, pooling="mean")
    async with real_server(folder) as (_, _, http):
        for pooling, vectors in expected.items():
            answer = (await http.post(PATH, json={"input": texts, "pooling": pooling})).json()
            for each, vector in zip(answer["data"], vectors, strict=True):
                assert each["embedding"] == pytest.approx(vector, abs=1e-5)
                assert math.hypot(*each["embedding"]) == pytest.approx(1)
