"""Checks a running server with unmodified frameworks: instructor, LangChain and LlamaIndex.

    python check_frameworks.py instructor|langchain|llamaindex http://127.0.0.1:8000/v1

Runs in the virtual environment of the frameworks, without Quire. Prints one line of JSON per check, {"what", "result",
"ok"}. The exit status is 1 if a check failed.
"""

# LlamaIndex makes classes of annotations, which must not be texts: no `from __future__ import annotations`.
import math
import sys
from collections.abc import Callable

from checks import (
    ANSWER_TOKENS,
    CALL_TOKENS,
    ORDER,
    QUESTION,
    SECONDS,
    Check,
    Pet,
    Served,
    check_call,
    feed,
    run_checks,
    walk,
)
from pydantic import ConfigDict, ValidationInfo, model_validator


def instructor_checks(served: Served) -> list[Check]:
    """A class as the answer, in the modes that OpenAI's servers take."""
    import instructor
    import openai

    api = openai.OpenAI(api_key="none", base_url=served.url, max_retries=0, timeout=SECONDS)
    messages = [{"role": "user", "content": QUESTION}]
    given = {"model": served.model, "messages": messages, "temperature": 0, "max_tokens": CALL_TOKENS}

    def asks(mode: instructor.Mode) -> Callable[[], str]:
        def check() -> str:
            client = instructor.from_openai(api, mode=mode)
            pet = client.chat.completions.create(**given, response_model=Pet, max_retries=0)
            assert isinstance(pet, Pet), pet
            return repr(pet)

        return check

    def partial() -> str:
        client = instructor.from_openai(api, mode=instructor.Mode.JSON_SCHEMA)
        pets = list(client.chat.completions.create_partial(**given, response_model=Pet))
        assert len(pets) > 2 and pets[-1].kind in ("cat", "dog", "parrot") and pets[-1].age is not None, pets
        return f"{len(pets)} partial ones, the last one {pets[-1]!r}"

    def retried() -> str:
        """The class refuses the first answer, so instructor sends the call back with the error as the tool's result."""
        seen = []

        class Picky(Pet):
            # Without it a small model adds fields to its second answer until it has no tokens left.
            model_config = ConfigDict(extra="forbid")

            @model_validator(mode="after")
            def check_second(self, _: ValidationInfo) -> "Picky":
                seen.append(self.kind)
                if len(seen) == 1:
                    raise ValueError("describe another pet")
                return self

        client = instructor.from_openai(api, mode=instructor.Mode.TOOLS_STRICT)
        pet = client.chat.completions.create(**given, response_model=Picky, max_retries=1)
        assert len(seen) == 2 and isinstance(pet, Picky), seen
        return f"{seen[0]}, refused, then {seen[1]}"

    modes = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
    return [*((mode.value, asks(mode)) for mode in modes), ("partial", partial), ("retry", retried)]


def langchain_checks(served: Served) -> list[Check]:
    """ChatOpenAI over both endpoints, and OpenAIEmbeddings."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    given = {"model": served.model, "base_url": served.url, "api_key": "none", "max_retries": 0, "timeout": SECONDS}
    chat = ChatOpenAI(**given, temperature=0, max_completion_tokens=CALL_TOKENS)
    newer = ChatOpenAI(**given, temperature=0, max_completion_tokens=CALL_TOKENS, use_responses_api=True)
    tools = [tool(feed), tool(walk)]

    def invoked(model: ChatOpenAI) -> Callable[[], str]:
        def check() -> str:
            short = model.model_copy(update={"max_tokens": ANSWER_TOKENS})
            whole = short.invoke(QUESTION)
            streamed = None
            for chunk in short.stream(QUESTION):
                streamed = chunk if streamed is None else streamed + chunk
            assert whole.text and streamed.text == whole.text, (whole, streamed)
            assert 0 < whole.usage_metadata["output_tokens"] <= ANSWER_TOKENS
            return f"{whole.usage_metadata['output_tokens']} tokens, the same streamed"

        return check

    def formed(model: ChatOpenAI, method: str) -> Callable[[], str]:
        def check() -> str:
            pet = model.with_structured_output(Pet, method=method).invoke(QUESTION)
            assert isinstance(pet, Pet), pet
            return repr(pet)

        return check

    def called(model: ChatOpenAI) -> Callable[[], str]:
        def check() -> str:
            question = HumanMessage(ORDER)
            answer = model.bind_tools(tools, tool_choice="feed").invoke([question])
            (call,) = answer.tool_calls
            said = check_call(call["name"], call["args"], "feed", is_open=True)
            result = tools[0].invoke(call)
            assert isinstance(result, ToolMessage), result
            more = model.bind_tools(tools).invoke([question, answer, result])
            assert more.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]
            return said

        return check

    def chosen(model: ChatOpenAI, choice: str | None = None, **more: object) -> Callable[[], str]:
        """A call of any tool, strict, whole and streamed."""

        def check() -> str:
            bound = model.bind_tools(tools, tool_choice=choice, strict=True, parallel_tool_calls=False, **more)
            streamed = None
            for chunk in bound.stream(ORDER):
                streamed = chunk if streamed is None else streamed + chunk
            said = []
            for answer in (bound.invoke(ORDER), streamed):
                assert len(answer.tool_calls) < 2 and not answer.invalid_tool_calls, answer
                said.append(next((check_call(call["name"], call["args"]) for call in answer.tool_calls), None))
            assert said[0] == said[1], said
            assert said[0] is not None or not choice, "required, and not called"
            return str(said[0]) if choice else served.auto(said[0], is_biased="logit_bias" in more)

        return check

    def embedded() -> str:
        # Otherwise it downloads the tokenizer of OpenAI's models.
        api = OpenAIEmbeddings(**given, check_embedding_ctx_length=False)
        vectors = api.embed_documents(["A cat.", "A dog."])
        assert all(math.isclose(math.hypot(*each), 1, abs_tol=1e-3) for each in vectors)
        return f"{len(vectors)} of {len(vectors[0])} numbers"

    return [
        ("chat", invoked(chat)),
        ("responses", invoked(newer)),
        *((f"chat, {method}", formed(chat, method)) for method in ("json_schema", "function_calling")),
        ("responses, json_schema", formed(newer, "json_schema")),
        ("chat, tools", called(chat)),
        ("responses, tools", called(newer)),
        ("chat, required", chosen(chat, "any")),
        ("chat, auto", chosen(chat, logit_bias=served.bias)),
        ("responses, auto", chosen(newer)),
        ("embeddings", embedded),
    ]


def llamaindex_checks(served: Served) -> list[Check]:
    """OpenAILike, which is LlamaIndex' class for OpenAI with any model's name."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=served.model, api_base=served.url, api_key="none", is_chat_model=True, is_function_calling_model=True,
        context_window=2048, max_tokens=CALL_TOKENS, temperature=0, max_retries=0, timeout=SECONDS,
    )  # fmt: skip
    messages = [ChatMessage(role="user", content=QUESTION)]

    def chat() -> str:
        whole = model.chat(messages, max_tokens=ANSWER_TOKENS).message.content
        *_, last = model.stream_chat(messages, max_tokens=ANSWER_TOKENS)
        assert whole and last.message.content == whole, (whole, last)
        return f"{len(whole)} characters, the same streamed"

    def formed() -> str:
        pet = model.structured_predict(Pet, PromptTemplate(QUESTION))
        assert isinstance(pet, Pet), pet
        return repr(pet)

    def called() -> str:
        tool = FunctionTool.from_defaults(feed)
        answer = model.chat_with_tools([tool], user_msg=ORDER, tool_required=True)
        (call,) = model.get_tool_calls_from_response(answer)
        said = check_call(call.tool_name, call.tool_kwargs, "feed", is_open=True)
        result = ChatMessage(role="tool", content="done", additional_kwargs={"tool_call_id": call.tool_id})
        assert (
            model.chat_with_tools(
                [tool], chat_history=[ChatMessage(role="user", content=ORDER), answer.message, result]
            ).message
            is not None
        )
        return said

    return [("chat", chat), ("class", formed), ("tools", called)]


FRAMEWORKS = {"instructor": instructor_checks, "langchain": langchain_checks, "llamaindex": llamaindex_checks}


def main() -> int:
    """Runs the checks of one framework."""
    name, url = sys.argv[1:]
    return run_checks(FRAMEWORKS[name](Served.at(url)))


if __name__ == "__main__":
    raise SystemExit(main())
