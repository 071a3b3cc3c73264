"""A small agent: the model calls functions until it knows the answer.

    quire serve smollm2 &
    pip install openai
    python examples/agent.py "What is 17 times 23?"
    python examples/agent.py --free "What day is it?"

Without --free the first answer must be a call, and the second one must be words. Small models need that; with it the
model decides whether to call.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import datetime
import json
import operator
import os
from collections.abc import Callable
from typing import Any

import openai

MAX_TURNS = 6

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def calculate(expression: str) -> float:
    """The value of an expression of numbers, + - * / and parentheses."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError(f"{expression!r} has something else than numbers and + - * /")

    return value(ast.parse(expression, mode="eval").body)


def today() -> str:
    """The date."""
    return datetime.date.today().isoformat()


FUNCTIONS: dict[str, Callable[..., Any]] = {"calculate": calculate, "today": today}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "The value of an arithmetic expression, such as 3 * (4 + 5).",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "pattern": "^[0-9 +*/().-]{1,40}$"}},
                "required": ["expression"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    },
    {
        "type": "function",
        "function": {
            "name": "today",
            "description": "The date of today.",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
            "strict": True,
        },
    },
]


async def answer(
    client: openai.AsyncOpenAI, model: str, question: str, *, is_free: bool = False, say: Callable[[str], None] = print
) -> str:
    """The answer to a question. say: told of every call."""
    messages: list[Any] = [
        {"role": "system", "content": "Use the functions to find out what you need. Then answer in one sentence."},
        {"role": "user", "content": question},
    ]
    for turn in range(MAX_TURNS):
        choice: Any = "auto" if is_free else "none" if turn else "required"
        done = await client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=200
        )
        message = done.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            try:
                result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            except (KeyError, TypeError, ValueError, SyntaxError, ZeroDivisionError) as error:
                result = f"error: {error}"
            say(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    return "I do not know."


def main() -> None:
    """Asks what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--free", action="store_true", help="let the model decide whether to call")
    args = parser.parse_args()

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=args.url, api_key=os.environ.get("QUIRE_API_KEY", "none")) as client:
            model = (await client.models.list()).data[0].id
            return await answer(client, model, args.question, is_free=args.free)

    print(asyncio.run(ask()))


if __name__ == "__main__":
    main()
