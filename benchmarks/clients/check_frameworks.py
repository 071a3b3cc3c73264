"""Checks a running server with unmodified frameworks: instructor, LangChain and LlamaIndex.

    python check_frameworks.py instructor|langchain|llamaindex http://127.0.0.1:8000/v1

Runs in the virtual environment of the clients, without Quire. Prints one line of JSON per check, {"what", "result",
"ok"}. The exit status is 1 if a check failed. Every form is small, so that a small model comes to its end.
"""

# LlamaIndex makes classes of annotations, which must not be texts: no `from __future__ import annotations`.
import json
import math
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, Field

MODEL = "smollm2"
QUESTION = "Describe a pet that people keep at home."
SECONDS = 120


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog", "parrot"]
    is_old: bool
    age: Annotated[int, Field(ge=0, le=20)]


def feed(kind: Literal["cat", "dog"], grams: int) -> str:
    """Feeds a pet."""
    return f"The {kind} has eaten {grams} grams."


def check_fed(name: str, arguments: dict) -> str:
    """What was called, if it may be: LangChain's schemas allow further arguments, and LlamaIndex' have no limits."""
    assert name == "feed" and {"kind", "grams"} <= set(arguments), (name, arguments)
    assert arguments["kind"] in ("cat", "dog") and type(arguments["grams"]) is int, arguments
    return f"{name}({arguments})"


def instructor_checks(url: str) -> list[tuple[str, Callable[[], str]]]:
    """A class as the answer, in the modes that OpenAI's servers take."""
    import instructor
    import openai

    api = openai.OpenAI(api_key="none", base_url=url, max_retries=0, timeout=SECONDS)
    messages = [{"role": "user", "content": QUESTION}]

    def asks(mode: instructor.Mode) -> Callable[[], str]:
        def check() -> str:
            client = instructor.from_openai(api, mode=mode)
            pet = client.chat.completions.create(
                model=MODEL, messages=messages, response_model=Pet, max_retries=0, temperature=0
            )
            assert isinstance(pet, Pet), pet
            return repr(pet)

        return check

    def partial() -> str:
        client = instructor.from_openai(api, mode=instructor.Mode.JSON_SCHEMA)
        pets = list(client.chat.completions.create_partial(model=MODEL, messages=messages, response_model=Pet))
        assert len(pets) > 2 and pets[-1].kind in ("cat", "dog", "parrot") and pets[-1].age is not None, pets
        return f"{len(pets)} partial ones, the last one {pets[-1]!r}"

    modes = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
    return [*((mode.value, asks(mode)) for mode in modes), ("partial", partial)]


def langchain_checks(url: str) -> list[tuple[str, Callable[[], str]]]:
    """ChatOpenAI over both endpoints, and OpenAIEmbeddings."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    given = {"model": MODEL, "base_url": url, "api_key": "none", "max_retries": 0, "timeout": SECONDS}
    chat = ChatOpenAI(**given, temperature=0, max_completion_tokens=64)
    newer = ChatOpenAI(**given, temperature=0, max_completion_tokens=64, use_responses_api=True)
    tools = [tool(feed)]

    def invoked(model: ChatOpenAI) -> Callable[[], str]:
        def check() -> str:
            whole = model.invoke(QUESTION)
            streamed = None
            for chunk in model.stream(QUESTION):
                streamed = chunk if streamed is None else streamed + chunk
            assert whole.text and streamed.text == whole.text, (whole, streamed)
            assert whole.usage_metadata["output_tokens"] > 0
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
            question = HumanMessage(QUESTION)
            answer = model.bind_tools(tools, tool_choice="feed").invoke([question])
            (call,) = answer.tool_calls
            said = check_fed(call["name"], call["args"])
            result = tools[0].invoke(call)
            assert isinstance(result, ToolMessage), result
            more = model.bind_tools(tools).invoke([question, answer, result])
            assert more.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]
            return said

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
        ("embeddings", embedded),
    ]


def llamaindex_checks(url: str) -> list[tuple[str, Callable[[], str]]]:
    """OpenAILike, which is LlamaIndex' class for OpenAI with any model's name."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=MODEL, api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True,
        context_window=2048, max_tokens=64, temperature=0, max_retries=0, timeout=SECONDS,
    )  # fmt: skip
    messages = [ChatMessage(role="user", content=QUESTION)]

    def chat() -> str:
        whole = model.chat(messages).message.content
        *_, last = model.stream_chat(messages)
        assert whole and last.message.content == whole, (whole, last)
        return f"{len(whole)} characters, the same streamed"

    def formed() -> str:
        pet = model.structured_predict(Pet, PromptTemplate(QUESTION))
        assert isinstance(pet, Pet), pet
        return repr(pet)

    def called() -> str:
        tool = FunctionTool.from_defaults(feed)
        answer = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
        (call,) = model.get_tool_calls_from_response(answer)
        said = check_fed(call.tool_name, call.tool_kwargs)
        result = ChatMessage(role="tool", content="done", additional_kwargs={"tool_call_id": call.tool_id})
        assert model.chat_with_tools([tool], chat_history=[*messages, answer.message, result]).message is not None
        return said

    return [("chat", chat), ("class", formed), ("tools", called)]


FRAMEWORKS = {"instructor": instructor_checks, "langchain": langchain_checks, "llamaindex": llamaindex_checks}


def main() -> int:
    """Runs the checks of one framework."""
    name, url = sys.argv[1:]
    failed = False
    for what, check in FRAMEWORKS[name](url):
        ok = False
        try:
            result, ok = check(), True
        except Exception as error:
            traceback.print_exc()
            result = f"{type(error).__name__}: {error}"[:300]
        failed |= not ok
        print(json.dumps({"what": what, "result": result, "ok": ok}), flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
