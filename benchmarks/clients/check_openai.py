"""Checks a running server with the unmodified `openai` package: requests, answers and exceptions.

    python check_openai.py http://127.0.0.1:8000/v1

Runs in the virtual environment of the clients, without Quire. Prints one line of JSON per check, {"what", "result",
"ok"}. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sys
import time
import urllib.request
from typing import Literal

import openai
import pydantic
from checks import CALL_TOKENS, ORDER, SECONDS, STRICT_TOOLS, TOOLS, Check, Served, check_call, run_checks

MESSAGES = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "What is paper made of? 📜"}]
TEXT = "Paper is made of wood, and a book is made of"


class Sheet(pydantic.BaseModel):
    """A sheet of paper."""

    size: Literal["A3", "A4", "A5"]
    is_white: bool


class Checks:
    """The checks. Each is a method that returns its finding, or raises AssertionError."""

    def __init__(self, served: Served) -> None:
        self.served, self.url, self.model = served, served.url, served.model
        self.api = openai.OpenAI(api_key="none", base_url=self.url, max_retries=0, timeout=SECONDS)
        self.chat = self.api.chat.completions

    def models(self) -> str:
        """The list, and one by name."""
        listed = [model.id for model in self.api.models.list()]
        assert listed == [self.model], listed
        assert self.api.models.retrieve(self.model).id == self.model
        return f"serves {self.model}"

    def chat_whole_and_streamed(self) -> str:
        """The same greedy answer in one piece, in chunks, and through the package's accumulating helper."""
        whole = self.chat.create(model=self.model, messages=MESSAGES, max_completion_tokens=24, temperature=0)
        text, usage = whole.choices[0].message.content, whole.usage
        assert text and whole.choices[0].finish_reason in ("stop", "length")
        assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens and usage.completion_tokens <= 24
        options = {"include_usage": True}
        chunks = list(
            self.chat.create(
                model=self.model,
                messages=MESSAGES,
                max_completion_tokens=24,
                temperature=0,
                stream=True,
                stream_options=options,
            )
        )
        assert chunks[0].choices[0].delta.role == "assistant"
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert streamed == text, (streamed, text)
        assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == usage.completion_tokens
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        # The helper raises for answers that max_completion_tokens cuts off, so this answer needs a stop string.
        stop = text[len(text) // 2 :][:3]
        with self.chat.stream(model=self.model, messages=MESSAGES, temperature=0, stop=stop) as stream:
            gathered = stream.get_final_completion().choices[0]
        assert gathered.message.content == text[: text.index(stop)] and gathered.finish_reason == "stop"
        return f"{usage.completion_tokens} tokens, the same in {len(chunks)} chunks"

    def chat_goes_on(self) -> str:
        """A second turn that contains the first answer as the package returned it."""
        first = self.chat.create(model=self.model, messages=MESSAGES, max_completion_tokens=8, seed=1)
        turn = {"role": "user", "content": [{"type": "text", "text": "Say more."}]}
        more = [*MESSAGES, first.choices[0].message.model_dump(), turn]
        second = self.chat.create(model=self.model, messages=more, max_completion_tokens=8)
        assert second.usage.prompt_tokens > first.usage.total_tokens
        return f"{second.usage.prompt_tokens} prompt tokens"

    def chat_logprobs(self) -> str:
        """The bytes of the tokens make the text, and the greedy token leads its alternatives."""
        answer = self.chat.create(
            model=self.model, messages=MESSAGES, max_completion_tokens=12, temperature=0, logprobs=True, top_logprobs=5
        )
        choice = answer.choices[0]
        content = choice.logprobs.content
        assert len(content) == answer.usage.completion_tokens
        for token in content:
            tops = [top.logprob for top in token.top_logprobs]
            assert len(tops) == 5 and tops == sorted(tops, reverse=True) and token.logprob == tops[0] <= 0
        text = b"".join(bytes(token.bytes) for token in content).decode(errors="replace")
        # The end token is counted but not shown.
        assert text == choice.message.content or choice.finish_reason == "stop", (text, choice.message.content)
        return f"{len(content)} tokens, 5 alternatives each"

    def several_choices(self) -> str:
        """Three answers: drawn differently, the same again with the same seed, the same in a stream."""
        given = {
            "model": self.model,
            "messages": MESSAGES,
            "max_completion_tokens": 12,
            "n": 3,
            "seed": 7,
            "temperature": 1.0,
        }
        first, again = self.chat.create(**given), self.chat.create(**given)
        texts = [choice.message.content for choice in first.choices]
        assert [choice.index for choice in first.choices] == [0, 1, 2]
        assert texts == [choice.message.content for choice in again.choices]
        assert len(set(texts)) > 1, texts
        streamed = ["", "", ""]
        for chunk in self.chat.create(**given, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == texts, (streamed, texts)
        return f"{len(set(texts))} different of 3, repeatable"

    def stop_strings(self) -> str:
        """The text ends before the stop string."""
        given = {"model": self.model, "prompt": "1 2 3 4 5 6", "max_tokens": 24, "temperature": 0}
        full = self.api.completions.create(**given).choices[0].text
        stop = full[len(full) // 2 :][:2]
        cut = self.api.completions.create(**given, stop=[stop, "zzz"]).choices[0]
        assert cut.text == full[: full.index(stop)] and cut.finish_reason == "stop", (full, stop, cut)
        return f"stopped at {stop!r}"

    def completions(self) -> str:
        """Text, a list of texts, and a stream: the same continuation."""
        given = {"model": self.model, "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
        single = self.api.completions.create(prompt=TEXT, **given)
        both = self.api.completions.create(prompt=[TEXT, "One, two, three"], n=2, **given)
        chunks = list(self.api.completions.create(prompt=TEXT, stream=True, **given))
        assert single.choices[0].finish_reason == "length" and single.usage.completion_tokens == 12
        assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
        assert both.choices[0].text == both.choices[1].text
        assert both.choices[2].text == both.choices[3].text != both.choices[0].text
        assert "".join(chunk.choices[0].text for chunk in chunks) == single.choices[0].text
        return f"12 tokens in {len(chunks)} chunks; 2 prompts x 2 choices"

    def scoring(self) -> str:
        """Scores without generating, by text and by token ids."""
        given = {"model": self.model, "max_tokens": 0, "echo": True, "logprobs": 2}
        scored = self.api.completions.create(prompt=TEXT, **given)
        choice = scored.choices[0]
        lists = choice.logprobs
        assert choice.text == TEXT == "".join(lists.tokens) and scored.usage.completion_tokens == 0
        assert lists.token_logprobs[0] is None and all(value <= 0 for value in lists.token_logprobs[1:])
        starts = [*lists.text_offset, len(TEXT)]
        assert [TEXT[begin:end] for begin, end in itertools.pairwise(starts)] == lists.tokens
        for token, logprob, top in zip(lists.tokens[1:], lists.token_logprobs[1:], lists.top_logprobs[1:], strict=True):
            assert top[token] == logprob and 2 <= len(top) <= 3
        body = json.dumps({"model": self.model, "prompt": TEXT}).encode()
        ids = self._post("/tokenize", body)["tokens"]
        by_ids = self.api.completions.create(prompt=ids, **given).choices[0]
        assert by_ids.logprobs.token_logprobs == lists.token_logprobs and by_ids.text == TEXT
        return f"{len(ids)} tokens, the same by text and by ids"

    def errors(self) -> str:
        """Refusals arrive as the package's exceptions, streaming or not, with the parameter's name."""
        good = {"model": self.model, "messages": MESSAGES, "max_completion_tokens": 4}
        tool = {"type": "function", "function": {"name": "look up", "parameters": {"type": "object", "properties": {}}}}
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"uniqueItems": True}}}
        cases: list[tuple[dict, type[openai.APIStatusError], str | None, str]] = [
            ({"model": "gpt-4"}, openai.NotFoundError, "model", "model_not_found"),
            ({"tools": [tool]}, openai.BadRequestError, "tools[0].function.name", "invalid_value"),
            (
                {"response_format": schema},
                openai.BadRequestError,
                "response_format.json_schema.schema",
                "invalid_value",
            ),
            ({"temperature": 9}, openai.BadRequestError, "temperature", "invalid_value"),
            ({"temperature": "hot"}, openai.BadRequestError, "temperature", "invalid_type"),
            ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature", "unknown_parameter"),
            (
                {"messages": [{"role": "user", "content": "paper " * 2 * self.served.context}]},
                openai.BadRequestError,
                "messages",
                "context_length_exceeded",
            ),
        ]
        for change, kind, param, code in cases:
            for stream in (False, True):
                try:
                    self.chat.create(**(good | change), stream=stream)
                except kind as error:
                    assert (error.param, error.code) == (param, code), (error.param, error.code, change)
                else:
                    raise AssertionError(f"accepted {list(change)}")
        return f"{2 * len(cases)} refusals by name"

    def structures(self) -> str:
        """Answers as a class, and a call with the arguments of one, whole and streamed."""
        given = {"model": self.model, "messages": MESSAGES, "temperature": 0}
        sheet = self.chat.parse(**given, response_format=Sheet).choices[0].message.parsed
        assert isinstance(sheet, Sheet), sheet
        with self.chat.stream(**given, response_format=Sheet) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == sheet
        tools = {"tools": [openai.pydantic_function_tool(Sheet)], "tool_choice": "required"}
        (call,) = self.chat.parse(**given, **tools, parallel_tool_calls=False).choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Sheet), call
        return f"{sheet!r}, called with {call.function.arguments}"

    def tools(self) -> str:
        """A call that is required, one of a named tool, and one that the model chooses: whole and streamed the same."""
        found = []
        named = {"type": "function", "function": {"name": "feed"}}
        for tools, choice, only in ((TOOLS, "required", None), (TOOLS, named, "feed"), (STRICT_TOOLS, "auto", None)):
            given = {"model": self.model, "messages": [{"role": "user", "content": ORDER}], "tools": tools}
            given |= {"tool_choice": choice, "temperature": 0, "max_completion_tokens": CALL_TOKENS}
            given |= {"logit_bias": self.served.bias} if choice == "auto" else {}
            whole = self.chat.create(**given, parallel_tool_calls=False).choices[0]
            chunks = list(self.chat.create(**given, parallel_tool_calls=False, stream=True))
            calls = [self._call(message, only) for message in (whole.message, self._gathered(chunks))]
            assert calls[0] == calls[1], calls
            ends = {chunk.choices[0].finish_reason for chunk in chunks if chunk.choices} - {None}
            assert ends == {whole.finish_reason}, (ends, whole.finish_reason)
            assert (whole.finish_reason == "tool_calls") == (calls[0] is not None), whole
            found.append(calls[0] if choice != "auto" else self.served.auto(calls[0]))
        assert None not in found, found
        return f"required {found[0]}, named {found[1]}, auto {found[2]}; the same streamed"

    def tools_go_on(self) -> str:
        """Calls and their results, sent back as the package returned them, over both endpoints."""
        question = {"role": "user", "content": ORDER}
        given = {"model": self.model, "tools": TOOLS, "temperature": 0}
        first = self.chat.create(
            **given, messages=[question], max_completion_tokens=CALL_TOKENS, tool_choice="required"
        )
        message = first.choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "Done."} for call in message.tool_calls]
        turns = [question, message.model_dump(), *results]
        more = self.chat.create(**given, messages=turns, max_completion_tokens=16)
        assert more.choices[0].message.content or more.choices[0].message.tool_calls, more
        assert more.usage.prompt_tokens > first.usage.total_tokens, (first.usage, more.usage)
        flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
        newer = {"model": self.model, "tools": flat, "temperature": 0}
        first = self.api.responses.create(
            **newer, input=[question], max_output_tokens=CALL_TOKENS, tool_choice="required"
        )
        calls = [item for item in first.output if item.type == "function_call"]
        said = [check_call(call.name, call.arguments) for call in calls]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "Done."} for call in calls]
        turns = [question, *(item.model_dump() for item in first.output), *results]
        last = self.api.responses.create(**newer, input=turns, max_output_tokens=16)
        assert said and last.output and last.usage.input_tokens > first.usage.total_tokens, (said, last)
        return f"{', '.join(said)}, then {last.output_text or last.output[0].type!r}"

    def responses(self) -> str:
        """The newer endpoint: text, whole and streamed, and a class."""
        given = {"model": self.model, "input": "What is paper made of?", "temperature": 0}
        whole = self.api.responses.create(**given, max_output_tokens=16)
        with self.api.responses.stream(**given, max_output_tokens=16) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == whole.output_text and whole.usage.output_tokens <= 16
        sheet = self.api.responses.parse(**given, text_format=Sheet).output_parsed
        assert isinstance(sheet, Sheet), sheet
        return f"{whole.usage.output_tokens} tokens, the same streamed; {sheet!r}"

    def embeddings(self) -> str:
        """Vectors of length one, the same as numbers and as the package asks for them."""
        texts = ["paper", "a quire of paper"]
        packed = self.api.embeddings.create(model=self.model, input=texts).data
        plain = self.api.embeddings.create(model=self.model, input=texts, encoding_format="float").data
        for one, other in zip(packed, plain, strict=True):
            assert math.isclose(math.hypot(*one.embedding), 1, abs_tol=1e-3)
            assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True)) < 1e-5
        return f"{len(packed)} of {len(packed[0].embedding)} numbers"

    def concurrent(self) -> str:
        """The asynchronous client with twelve requests at once, half of them streams."""

        async def ask(api: openai.AsyncOpenAI, order: int) -> str:
            given = {"model": self.model, "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0}
            if order % 2:
                return (await api.chat.completions.create(**given)).choices[0].message.content
            stream = await api.chat.completions.create(**given, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def all_of_them() -> list[str]:
            async with openai.AsyncOpenAI(api_key="none", base_url=self.url, max_retries=0, timeout=SECONDS) as api:
                return await asyncio.gather(*[ask(api, order) for order in range(12)])

        texts = asyncio.run(all_of_them())
        assert all(texts)
        return "12 at once, 6 of them streams"

    def leaving(self) -> str:
        """Closing a stream early aborts its request."""
        given = {"model": self.model, "prompt": TEXT, "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
        stream = self.api.completions.create(**given, stream=True)
        next(iter(stream))
        begun = time.monotonic()
        stream.close()
        while self._metric("quire_requests_running"):
            assert time.monotonic() - begun < 10, "still running ten seconds after the client left"
            time.sleep(0.02)
        assert self._metric('quire_requests_finished_total{reason="abort"}') >= 1
        return "aborted"

    @staticmethod
    def _gathered(chunks: list) -> openai.types.chat.ChatCompletionMessage:
        """The message that the chunks of a stream make."""
        calls: dict[int, dict] = {}
        text = ""
        for choice in (chunk.choices[0] for chunk in chunks if chunk.choices):
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": part.id, "type": "function", "name": "", "arguments": ""})
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
        made = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls.values()
        ]
        fields = {"role": "assistant", "content": text or None, "tool_calls": made or None}
        return openai.types.chat.ChatCompletionMessage.model_validate(fields)

    @staticmethod
    def _call(message: openai.types.chat.ChatCompletionMessage, only: str | None) -> str | None:
        """The one call of a message, if there is one."""
        assert len(message.tool_calls or []) < 2, message
        for call in message.tool_calls or []:
            return check_call(call.function.name, call.function.arguments, only)
        return None

    def _post(self, path: str, body: bytes) -> dict:
        request = urllib.request.Request(self._root() + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def _metric(self, name: str) -> float:
        with urllib.request.urlopen(self._root() + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.removeprefix(name)) for line in lines if line.startswith(name + " "))

    def _root(self) -> str:
        return self.url.removesuffix("/v1")


def main() -> int:
    """Runs all checks."""
    checks = Checks(Served.at(sys.argv[1]))
    todo: list[Check] = [
        ("models", checks.models),
        ("chat, whole and streamed", checks.chat_whole_and_streamed),
        ("chat, second turn", checks.chat_goes_on),
        ("chat logprobs", checks.chat_logprobs),
        ("n and seed", checks.several_choices),
        ("stop", checks.stop_strings),
        ("completions, whole and streamed", checks.completions),
        ("echo and logprobs", checks.scoring),
        ("errors", checks.errors),
        ("structures and tools", checks.structures),
        ("required, named and chosen calls", checks.tools),
        ("calls sent back", checks.tools_go_on),
        ("responses", checks.responses),
        ("embeddings", checks.embeddings),
        ("async client", checks.concurrent),
        ("leaving a stream", checks.leaving),
    ]
    return run_checks(todo)


if __name__ == "__main__":
    raise SystemExit(main())
