"""No field of a request is accepted and then ignored."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any

import pytest

from quire.engine.params import SamplingParams
from quire.server.chat_schema import ChatRequest
from quire.server.fields import UNUSED
from quire.server.responses_schema import ResponsesRequest
from quire.server.schema import CompletionRequest, GenerationRequest
from quire.server.service import _HINTS, _PASSED_ON
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, TEXT, client

SERVER = Path(__file__).parents[2] / "src/quire/server"
REQUESTS = {
    "/v1/completions": (CompletionRequest, TEXT),
    "/v1/chat/completions": (ChatRequest, CHAT),
    "/v1/responses": (ResponsesRequest, {"input": "Hello"}),
}

TRUE_ANYWAY = {"service_tier", "store", "truncation", "background", "modalities"}
"""Fields that take only values which say what the server does without them."""

GIVEN: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.75,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": 1.5},
    "seed": 11,
    "stop": ["never"],
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 1,
    "skip_special_tokens": False,
}
"""A value other than the default for every sampling parameter that requests hand on as it is."""


def read_names() -> set[str]:
    """The fields that code of the server reads: attributes of what it calls `self`, `body` or `request`."""
    return {
        node.attr
        for path in SERVER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "body", "request")
    }


def ignored(kind: type[GenerationRequest]) -> set[str]:
    """The fields of a request that change nothing and do not say so."""
    found = set(kind.model_fields) - read_names() - {*_PASSED_ON, *_HINTS} - TRUE_ANYWAY
    says_so = {
        name
        for name, field in kind.model_fields.items()
        if field.annotation is NoneType or field.description == UNUSED.description
    }
    return found - says_so


@pytest.mark.parametrize("path", REQUESTS)
def test_every_field_of_a_request_is_read_or_says_that_it_is_not(path: str) -> None:
    kind, _ = REQUESTS[path]
    assert not ignored(kind)


def test_a_field_that_nothing_reads_is_found() -> None:
    class Request(GenerationRequest):
        typical_p: float | None = None

    assert ignored(Request) == {"typical_p"}


@pytest.mark.anyio
@pytest.mark.parametrize("path", REQUESTS)
async def test_every_sampling_parameter_of_a_request_reaches_the_engine(path: str) -> None:
    kind, body = REQUESTS[path]
    names = {field.name for field in fields(SamplingParams)} & kind.model_fields.keys() & {*_PASSED_ON}
    assert names <= GIVEN.keys(), "GIVEN needs a value for each"
    asked: list[SamplingParams] = []

    class Asked(FakeEngine):
        async def _generate(self, ids, params, request_id):  # type: ignore[no-untyped-def]
            asked.append(params)
            async for item in super()._generate(ids, params, request_id):
                yield item

    given = {name: GIVEN[name] for name in names}
    async with client(Asked()) as http:
        answer = await http.post(path, json=body | given)
        assert answer.status_code == 200, answer.text
    expected = SamplingParams(**{**GIVEN, "logit_bias": {5: 1.5}})
    assert {name: getattr(asked[0], name) for name in names} == {name: getattr(expected, name) for name in names}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ("/v1/completions", {**TEXT, "structured_outputs": 3}, "structured_outputs"),
        ("/v1/completions", {**TEXT, "structured_outputs": {"json": {}, "may_force": True}}, "structured_outputs"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_a_field_of_the_wrong_form_or_place_is_named(path: str, body: dict[str, Any], param: str) -> None:
    async with client() as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
