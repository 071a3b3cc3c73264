"""Checks a running server with unmodified litellm and pydantic-ai.

    python check_agents.py litellm|pydantic-ai http://127.0.0.1:8000/v1

Runs in the virtual environment of the agents, without Quire. Prints one line of JSON per check, {"what", "result",
"ok"}. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from checks import (
    ANSWER_TOKENS,
    CALL_TOKENS,
    ORDER,
    QUESTION,
    SECONDS,
    STRICT_TOOLS,
    TOOLS,
    Check,
    Pet,
    Served,
    check_call,
    feed,
    run_checks,
    walk,
)


def litellm_checks(served: Served) -> list[Check]:
    """Its two names for servers of OpenAI's API, which send different bodies."""
    # Otherwise it fetches a table of prices.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    litellm.suppress_debug_info = True
    question, order = {"role": "user", "content": QUESTION}, {"role": "user", "content": ORDER}

    def ask(messages: list, tokens: int = ANSWER_TOKENS, provider: str = "openai", **more: object) -> Any:
        return litellm.completion(
            model=f"{provider}/{served.model}", api_base=served.url, api_key="none", timeout=SECONDS, num_retries=0,
            temperature=0, max_tokens=tokens, messages=messages, **more,
        )  # fmt: skip

    def chat(provider: str) -> str:
        whole = ask([question], provider=provider)
        stream = ask([question], provider=provider, stream=True, stream_options={"include_usage": True})
        built = litellm.stream_chunk_builder(list(stream))
        text = whole.choices[0].message.content
        assert text and built.choices[0].message.content == text, (whole, built)
        assert whole.choices[0].finish_reason == built.choices[0].finish_reason in ("stop", "length"), (whole, built)
        assert whole.usage.completion_tokens == built.usage.completion_tokens <= ANSWER_TOKENS, (whole, built)
        return f"{whole.usage.completion_tokens} tokens, the same streamed"

    def formed(provider: str) -> str:
        answer = ask([question], CALL_TOKENS, provider, response_format=Pet).choices[0]
        assert answer.finish_reason == "stop", answer
        return repr(Pet.model_validate_json(answer.message.content))

    def called(choice: object, only: str | None, tools: list = TOOLS) -> str:
        given = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        given |= {"logit_bias": served.bias} if choice == "auto" else {}
        whole = ask([order], CALL_TOKENS, **given)
        built = litellm.stream_chunk_builder(list(ask([order], CALL_TOKENS, **given, stream=True)))
        said = []
        for answer in (whole.choices[0], built.choices[0]):
            calls = answer.message.tool_calls or []
            assert len(calls) < 2 and (answer.finish_reason == "tool_calls") == bool(calls), answer
            said.append(next((check_call(call.function.name, call.function.arguments, only) for call in calls), None))
        assert said[0] == said[1], said
        assert said[0] is not None or choice == "auto", "required, and not called"
        return f"{served.auto(said[0]) if choice == 'auto' else said[0]}, the same streamed"

    def goes_on(provider: str) -> str:
        """Its message with calls as an object and, as litellm's proxy and stores send it, as all fields of it."""
        first = ask([order], CALL_TOKENS, provider, tools=TOOLS, tool_choice="required")
        message = first.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "Done."}
            for call in message.tool_calls
        ]
        answers = []
        for turn in (message, message.model_dump()):
            more = ask([order, turn, *results], 16, provider, tools=TOOLS)
            assert more.usage.prompt_tokens > first.usage.total_tokens, (first, more)
            answers.append(more.choices[0].message.content)
        assert answers[0] == answers[1], answers
        return f"{len(message.tool_calls)} calls, then {answers[0]!r}"

    def responses() -> str:
        given = {"model": f"openai/{served.model}", "api_base": served.url, "api_key": "none", "timeout": SECONDS}
        answer = litellm.responses(**given, input=QUESTION, max_output_tokens=ANSWER_TOKENS, temperature=0)
        assert answer.output_text and answer.usage.output_tokens <= ANSWER_TOKENS, answer
        return f"{answer.usage.output_tokens} tokens"

    def embedded() -> str:
        given = {"model": f"openai/{served.model}", "api_base": served.url, "api_key": "none", "timeout": SECONDS}
        data = litellm.embedding(**given, input=["A cat.", "A dog."]).data
        assert all(math.isclose(math.hypot(*each["embedding"]), 1, abs_tol=1e-3) for each in data)
        return f"{len(data)} of {len(data[0]['embedding'])} numbers"

    named = {"type": "function", "function": {"name": "feed"}}
    return [
        ("chat", lambda: chat("openai")),
        ("chat, hosted_vllm", lambda: chat("hosted_vllm")),
        ("class", lambda: formed("openai")),
        ("class, hosted_vllm", lambda: formed("hosted_vllm")),
        ("required", lambda: called("required", None)),
        ("named", lambda: called(named, "feed")),
        ("auto, strict", lambda: called("auto", None, STRICT_TOOLS)),
        ("calls sent back", lambda: goes_on("openai")),
        ("calls sent back, hosted_vllm", lambda: goes_on("hosted_vllm")),
        ("responses", responses),
        ("embeddings", embedded),
    ]


def pydantic_ai_checks(served: Served) -> list[Check]:
    """Agents over both endpoints. A tool is offered once, so that a small model comes to its answer."""
    from pydantic_ai import Agent, ModelMessagesTypeAdapter, NativeOutput, RunContext, Tool, ToolOutput, UsageLimits
    from pydantic_ai.capabilities import PrepareOutputTools
    from pydantic_ai.messages import ToolCallPart
    from pydantic_ai.models import Model
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.tools import ToolDefinition

    given = {"model_name": served.model, "provider": OpenAIProvider(base_url=served.url, api_key="none")}
    chat, newer = OpenAIChatModel(**given), OpenAIResponsesModel(**given)
    limits = UsageLimits(request_limit=3)

    def settings(tokens: int) -> dict[str, object]:
        return {"max_tokens": tokens, "temperature": 0.0, "timeout": SECONDS, "parallel_tool_calls": False}

    async def at_first(context: RunContext, tool: ToolDefinition) -> ToolDefinition | None:
        return tool if context.run_step == 1 else None

    async def later(context: RunContext, tools: list[ToolDefinition]) -> list[ToolDefinition]:
        return tools if context.run_step > 1 else []

    def tools(*, strict: bool) -> list[Tool]:
        return [Tool(each, prepare=at_first, strict=strict) for each in (feed, walk)]

    def calls(messages: list) -> list[str]:
        parts = [part for message in messages for part in message.parts if isinstance(part, ToolCallPart)]
        return [check_call(part.tool_name, part.args_as_dict()) for part in parts if part.tool_name in ("feed", "walk")]

    def answered(model: Model) -> str:
        agent = Agent(model, model_settings=settings(ANSWER_TOKENS), retries=0)
        whole = agent.run_sync(QUESTION)

        async def streamed() -> str:
            async with agent.run_stream(QUESTION) as stream:
                return [text async for text in stream.stream_text()][-1]

        text = asyncio.run(streamed())
        assert whole.output and text == whole.output, (whole.output, text)
        return f"{whole.usage.output_tokens} tokens, the same streamed"

    def formed(model: Model, output: object) -> str:
        pet = (
            Agent(model, output_type=output, model_settings=settings(CALL_TOKENS), retries=0).run_sync(QUESTION).output
        )
        assert isinstance(pet, Pet), pet
        return repr(pet)

    def called(model: Model) -> str:
        """A tool must be called, then the class is the answer: pydantic-ai requires a call in both requests."""
        agent = Agent(
            model, output_type=ToolOutput(Pet), tools=tools(strict=False), capabilities=[PrepareOutputTools(later)],
            model_settings=settings(CALL_TOKENS), retries=0,
        )  # fmt: skip
        done = agent.run_sync(f"{ORDER} Then describe it.", usage_limits=limits)
        (call,) = calls(done.all_messages())
        assert isinstance(done.output, Pet), done
        return f"{call}, then {done.output!r}"

    def chosen(model: Model) -> str:
        """The model chooses. The run goes on from messages that were stored as JSON."""
        # The bias would make the second request call again. Responses have none.
        is_biased = model is chat

        def of_step(context: RunContext) -> dict[str, object]:
            bias = {"logit_bias": served.bias} if is_biased and context.run_step == 1 else {}
            return settings(CALL_TOKENS) | bias

        agent = Agent(model, tools=tools(strict=True), model_settings=of_step, retries=0)
        done = agent.run_sync(ORDER, usage_limits=limits)
        said = served.auto(next(iter(calls(done.all_messages())), None), is_biased=is_biased)
        history = ModelMessagesTypeAdapter.validate_json(done.all_messages_json())
        plain = Agent(model, model_settings=settings(ANSWER_TOKENS), retries=0)
        more = plain.run_sync("Thank you.", message_history=history, usage_limits=limits)
        assert more.output, more
        return f"{said}, then {more.output[:40]!r}"

    checks: list[tuple[str, Callable[[Model], str]]] = [
        ("chat", answered),
        ("class by tool", lambda model: formed(model, ToolOutput(Pet))),
        ("class by schema", lambda model: formed(model, NativeOutput(Pet))),
        ("tool and class", called),
        ("auto, strict, and sent back", chosen),
    ]
    return [
        (f"{where}{what}", lambda check=check, model=model: check(model))
        for where, model in (("", chat), ("responses: ", newer))
        for what, check in checks
    ]


AGENTS = {"litellm": litellm_checks, "pydantic-ai": pydantic_ai_checks}


def main() -> int:
    """Runs the checks of one library."""
    name, url = sys.argv[1:]
    return run_checks(AGENTS[name](Served.at(url)))


if __name__ == "__main__":
    raise SystemExit(main())
