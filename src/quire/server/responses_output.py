"""The items of a response, and the events that describe their growth."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from quire.server.shapes import TokenLogprob
from quire.tools.calls import AnswerDelta, ArgumentsDelta, CallStart, ReasoningDelta, TextDelta

NamedEvent = dict[str, Any]
"""An event without its number, which is added when it is sent."""


class ResponseOutputBuilder:
    """The items of one response so far. Each method yields the events of its change.

    items  finished items, and the open one
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False

    def add(self, part: AnswerDelta, scores: list[TokenLogprob]) -> Iterator[NamedEvent]:
        """Adds a part of the answer. scores: log-probabilities of its tokens, if they are text."""
        match part:
            case TextDelta(text):
                yield from self._written("message", "output_text", text, scores)
            case ReasoningDelta(text):
                yield from self._written("reasoning", "reasoning_text", text, [])
            case CallStart(_, call_id, name):
                yield from self.close("completed")
                call = {"type": "function_call", "id": _id("fc"), "call_id": call_id, "name": name, "arguments": ""}
                yield from self._opened(call)
            case ArgumentsDelta(_, text):
                self.items[-1]["arguments"] += text
                yield self._about("response.function_call_arguments.delta", delta=text)

    def close(self, status: str) -> Iterator[NamedEvent]:
        """Closes the open item. status: completed or incomplete."""
        if not self._is_open:
            return
        self._is_open, item = False, self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._about("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        else:
            (part,) = item["content"]
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._about(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._about("response.content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def finish(self, status: str) -> Iterator[NamedEvent]:
        """Closes the answer. An empty answer gets a message without text."""
        if not self.items:
            yield from self._written("message", "output_text", "", [])
        yield from self.close(status)

    def _written(self, kind: str, part_kind: str, text: str, scores: list[TokenLogprob]) -> Iterator[NamedEvent]:
        if not (self._is_open and self.items[-1]["type"] == kind):
            yield from self.close("completed")
            if kind == "message" and self.items and self.items[-1]["type"] == "function_call":
                text = text.lstrip()  # blanks between two texts, which are separate messages here
            item: dict[str, Any] = {"type": kind, "id": _id("msg" if kind == "message" else "rs"), "content": []}
            if kind == "message":
                item["role"] = "assistant"
            else:
                item["summary"] = []
            yield from self._opened(item)
            part: dict[str, Any] = {"type": part_kind, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            yield self._about("response.content_part.added", content_index=0, part=dict(part))
            item["content"].append(part)
        (part,) = self.items[-1]["content"]
        part["text"] += text
        more = {}
        if kind == "message":
            part["logprobs"] += scores
            more = {"logprobs": scores}
        if text or scores:
            yield self._about(f"response.{part_kind}.delta", content_index=0, delta=text, **more)

    def _opened(self, item: dict[str, Any]) -> Iterator[NamedEvent]:
        self._is_open = True
        item["status"] = "in_progress"
        self.items.append(item)
        shown = item | ({"content": []} if "content" in item else {})
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}

    def _about(self, kind: str, **more: Any) -> NamedEvent:
        """An event about the open item."""
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
