"""The real, unmodified `openai` package with the server."""

import json
from contextlib import asynccontextmanager
from typing import Annotated, Literal

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, asgi_http, named_events, openai_client, real_server
from tests.server.test_responses import TOOLS
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.anyio


async def test_models():
    async with openai_client() as api:
        assert [model.id async for model in api.models.list()] == ["fake"]
        assert (await api.models.retrieve("fake")).owned_by == "quire"


async def test_chat():
    async with openai_client() as api:
        answer = await api.chat.completions.create(
            model="fake",
            messages=CHAT["messages"],
            max_completion_tokens=4,
            n=2,
            logprobs=True,
            top_logprobs=2,
            seed=0,
            stop=["zzz"],
        )
    assert [choice.message.content for choice in answer.choices] == ["user", "ser:"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.content[0].top_logprobs[1].token == "v"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_chat_continues_with_the_answer_it_got():
    async with openai_client() as api:
        first = await api.chat.completions.create(model="fake", messages=CHAT["messages"])
        message = first.choices[0].message.model_dump()
        messages = [*CHAT["messages"], message, {"role": "user", "content": "more"}]
        assert (await api.chat.completions.create(model="fake", messages=messages)).choices


async def test_a_chat_stream_with_usage():
    async with openai_client() as api:
        stream = await api.chat.completions.create(
            model="fake", messages=CHAT["messages"], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "user: Hello, Wörld 🌍!\nassistant:"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.total_tokens > 0


async def test_the_stream_helper_accumulates():
    async with openai_client() as api, api.chat.completions.stream(model="fake", messages=CHAT["messages"]) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "user: Hello, Wörld 🌍!\nassistant:"
    assert final.choices[0].finish_reason == "stop"


async def test_completions_whole_and_streamed():
    async with openai_client() as api:
        answer = await api.completions.create(
            model="fake", prompt=["abc", "xyz"], max_tokens=2, logprobs=1, echo=True, best_of=1
        )
        stream = await api.completions.create(
            model="fake", prompt=[104, 105], max_tokens=3, stream=True, extra_body={"ignore_eos": True, "top_k": 5}
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert [choice.text for choice in answer.choices] == ["abcab", "xyzxy"]
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5, -0.5]
    assert text == "hih"


async def test_errors_are_the_clients_exceptions():
    async with openai_client(FakeEngine(queue_limit=0)) as api:
        with pytest.raises(openai.BadRequestError, match="modalities") as bad:
            await api.chat.completions.create(model="fake", messages=CHAT["messages"], modalities=["audio"])
        assert (bad.value.param, bad.value.code) == ("modalities[0]", "unsupported_value")
        with pytest.raises(openai.NotFoundError, match="gpt-4"):
            await api.chat.completions.create(model="gpt-4", messages=CHAT["messages"])
        with pytest.raises(openai.RateLimitError) as full:
            await api.chat.completions.create(model="fake", messages=CHAT["messages"])
        assert full.value.response.headers["retry-after"] == "3"
    async with openai_client(FakeEngine(fail_at=0)) as api:
        with pytest.raises(openai.InternalServerError):
            await api.chat.completions.create(model="fake", messages=CHAT["messages"], stream=True)


async def test_an_error_in_mid_stream_reaches_the_client():
    async with openai_client(FakeEngine(fail_at=3)) as api:
        stream = await api.chat.completions.create(model="fake", messages=CHAT["messages"], stream=True)
        with pytest.raises(openai.APIError, match="failed"):
            async for _ in stream:
                pass


async def test_keys(tmp_path):
    (tmp_path / "keys").write_text("none\n")
    async with openai_client(api_key_file=str(tmp_path / "keys")) as api:
        assert (await api.models.list()).data
        with pytest.raises(openai.AuthenticationError):
            await api.with_options(api_key="other").models.list()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with room for tools in a vocabulary of bytes."""
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192))


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    is_old: bool
    age: Annotated[int, Field(ge=0, le=20)]


class Adopt(BaseModel):
    """Takes a pet home."""

    kind: Literal["cat", "dog"]


@asynccontextmanager
async def real_client(folder):
    """The client of a server with a real model, and the model's name."""
    async with real_server(folder) as (_, app, _):
        http = asgi_http(app)
        async with openai.AsyncOpenAI(
            api_key="none", base_url="http://localhost/v1", http_client=http, max_retries=0
        ) as api:
            yield api, (await api.models.list()).data[0].id


async def test_answers_are_parsed_as_the_class_that_was_asked_for(folder, seed):
    arguments = {"messages": [{"role": "user", "content": "A pet."}], "response_format": Pet, "seed": seed}
    async with real_client(folder) as (api, model):
        answer = await api.chat.completions.parse(model=model, **arguments, temperature=1)
        pet = answer.choices[0].message.parsed
        assert isinstance(pet, Pet)
        async with api.chat.completions.stream(model=model, **arguments, temperature=1) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == pet and {"content.delta", "content.done"} <= kinds


async def test_arguments_are_parsed_as_the_class_of_the_tool(folder, seed):
    arguments = {"messages": [{"role": "user", "content": "A pet."}], "tools": [openai.pydantic_function_tool(Adopt)]}
    arguments |= {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed, "temperature": 1}
    async with real_client(folder) as (api, model):
        answer = await api.chat.completions.parse(model=model, **arguments)
        (call,) = answer.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Adopt)
        async with api.chat.completions.stream(model=model, **arguments) as stream:
            parsed = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert [event.parsed_arguments for event in parsed] == [call.function.parsed_arguments]


async def test_responses_are_parsed_whole_and_streamed(folder, seed):
    async with real_client(folder) as (api, model):
        arguments = {
            "model": model,
            "input": "A pet.",
            "text_format": Pet,
            "temperature": 1,
            "extra_body": {"seed": seed},
        }
        whole = await api.responses.parse(**arguments)
        assert isinstance(whole.output_parsed, Pet)
        async with api.responses.stream(**arguments) as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            final = await stream.get_final_response()
        assert final.output_parsed == whole.output_parsed == Pet.model_validate_json(text)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"top_logprobs": 2},
        {"tools": TOOLS, "tool_choice": "required"},
        {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 3},
    ],
    ids=["text", "scores", "calls", "cut off"],
)
async def test_responses_and_their_events_are_openais_types(folder, more, seed):
    """Strictly: no required field is missing, and none has a value of another type."""
    body = {"input": "Go.", "max_output_tokens": 60, "temperature": 1, "seed": seed} | more
    async with real_server(folder) as (_, _, http):
        whole = await http.post("/v1/responses", json=body)
        assert whole.status_code == 200, whole.text
        sent = named_events((await http.post("/v1/responses", json=body | {"stream": True})).text)
    TypeAdapter(Response).validate_json(whole.text, strict=True)
    adapter = TypeAdapter(Annotated[ResponseStreamEvent, Field(discriminator="type")])
    for event in sent:
        adapter.validate_json(json.dumps(event), strict=True)
    assert sent[-1]["response"]["status"] in ("completed", "incomplete")
