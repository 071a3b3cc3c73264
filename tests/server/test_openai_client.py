"""The real, unmodified `openai` package with the server."""

import openai
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, openai_client

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
