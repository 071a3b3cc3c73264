"""What the checks of all Python clients share: the served model, the forms that they ask for, and the loop.

Runs in the virtual environments of the clients, without Quire. Every form is small, so that a small model comes to its
end, and every answer is short, so that a slow machine does too.
"""

# LlamaIndex makes classes of annotations, which must not be texts: no `from __future__ import annotations`.
import json
import traceback
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

QUESTION = "Describe a pet that people keep at home."
ORDER = "Feed my cat 20 grams of food."
ANSWER_TOKENS = 24
# A call of the tools below takes about 30 tokens.
CALL_TOKENS = 96
# A 1.5B model on a busy machine decodes a few tokens per second, after a prompt with tools of some hundred tokens.
SECONDS = 300

# What calls begin with, by the server's name of the format. Other formats have no token of their own.
CALL_BEGINS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}

Check = tuple[str, Callable[[], str]]
"""What is checked, and a function that returns its finding or raises."""


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog", "parrot"]
    is_old: bool
    age: Annotated[int, Field(ge=0, le=20)]


def feed(kind: Literal["cat", "dog"], grams: int) -> str:
    """Feeds a pet."""
    return f"The {kind} has eaten {grams} grams."


def walk(minutes: int) -> str:
    """Walks the dog."""
    return f"The dog has walked for {minutes} minutes."


FEED_SCHEMA = {
    "type": "object",
    "properties": {"kind": {"type": "string", "enum": ["cat", "dog"]}, "grams": {"type": "integer"}},
    "required": ["kind", "grams"],
    "additionalProperties": False,
}
WALK_SCHEMA = {
    "type": "object",
    "properties": {"minutes": {"type": "integer"}},
    "required": ["minutes"],
    "additionalProperties": False,
}


def tool(name: str, schema: dict[str, Any], **more: object) -> dict[str, Any]:
    """A tool as chats take it."""
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


TOOLS = [tool("feed", FEED_SCHEMA), tool("walk", WALK_SCHEMA)]
STRICT_TOOLS = [tool("feed", FEED_SCHEMA, strict=True), tool("walk", WALK_SCHEMA, strict=True)]


def check_call(name: str, arguments: str | dict[str, Any], only: str | None = None, *, is_open: bool = False) -> str:
    """Returns what was called. Raises AssertionError if the name or the arguments break the tool's schema.

    only     the one name that may be called; None: any
    is_open  the client's schema allows further arguments
    """
    fields = json.loads(arguments) if isinstance(arguments, str) else arguments
    said = f"{name}({fields})"
    assert name == only or (only is None and name in ("feed", "walk")), said
    wanted = {"kind", "grams"} if name == "feed" else {"minutes"}
    assert wanted <= set(fields) if is_open else wanted == set(fields), said
    assert all(type(fields[key]) is int for key in wanted - {"kind"}), said
    assert fields.get("kind", "cat") in ("cat", "dog"), said
    return said


@dataclass(frozen=True)
class Served:
    """A running server's model, by its list of models."""

    url: str
    """The address, with /v1."""
    model: str
    context: int
    """Tokens."""
    bias: dict[str, int]
    """A `logit_bias` with which the model begins a call where it may choose. Empty: its calls begin with no one token.

    Qwen2.5-Coder, left free, writes its calls as code blocks, which are text.
    """

    @classmethod
    def at(cls, url: str) -> "Served":
        """Asks the server. Raises OSError."""
        with urllib.request.urlopen(f"{url}/models", timeout=SECONDS) as answer:
            (found,) = json.load(answer)["data"]
        begin = CALL_BEGINS.get(found["capabilities"]["tools"], "")
        body = json.dumps({"prompt": begin, "add_special_tokens": False}).encode()
        request = urllib.request.Request(
            f"{url.removesuffix('/v1')}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            ids = json.load(answer)["tokens"]
        return cls(url, found["id"], found["max_model_len"], {str(ids[0]): 100} if len(ids) == 1 else {})

    def auto(self, call: str | None, *, is_biased: bool = True) -> str:
        """What to report where the model chose whether to call. With a bias towards calls it must have called."""
        assert call is not None or not (self.bias and is_biased), "no call, although the bias asks for one"
        return call or "an answer without a call"


def run_checks(checks: Iterable[Check]) -> int:
    """Runs all checks and prints one line of JSON for each. Returns the exit status: 1 if one failed."""
    failed = False
    for what, check in checks:
        ok = False
        try:
            result, ok = check(), True
        except Exception as error:
            traceback.print_exc()
            result = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        failed |= not ok
        print(json.dumps({"what": what, "result": result, "ok": ok}), flush=True)
    return int(failed)
