"""Server-sent events joined to one value: how an answer is cut into events is not compared, what they say is."""

from __future__ import annotations

import json
from typing import Any

from recorded.masks import Masked, fields_of


def events_of(body: bytes) -> list[tuple[str | None, str]]:
    """The events of a stream: name and data. Comments are passed over."""
    found = []
    for block in body.decode().split("\n\n"):
        name, data = None, []
        for line in block.splitlines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data.append(line.removeprefix("data: "))
        if name is not None or data:
            found.append((name, "\n".join(data)))
    return found


def joined_chunks(body: bytes) -> dict[str, Any]:
    """A streamed completion or chat as one value. `choices` are like those of a whole answer.

    heads   what chunks have besides choices and usage, each once
    opens   the first chunk of each choice
    fields  the fields of all chunks
    last    the fields of the last chunk
    counts  how chunks have usage: absent, null, or numbers
    usage   that of the last chunk that has it
    is_done whether the stream ends with [DONE]
    """
    data = [data for _, data in events_of(body)]
    chunks = [json.loads(each) for each in data if each != "[DONE]"]
    errors = [each["error"] for each in chunks if "error" in each]
    heads = [{name: each[name] for name in each if name not in ("choices", "usage", "error")} for each in chunks]
    choices: dict[int, dict[str, Any]] = {}
    opens: dict[int, Any] = {}
    for chunk in chunks:
        for part in chunk.get("choices", ()):
            opens.setdefault(part["index"], part)
            _join(choices.setdefault(part["index"], {"index": part["index"]}), part)
    counts = ["absent" if "usage" not in each else "null" if each["usage"] is None else "numbers" for each in chunks]
    usages = [each["usage"] for each in chunks if each.get("usage")]
    return {
        "heads": _each_once(heads),
        "opens": [opens[index] for index in sorted(opens)],
        "fields": sorted(set().union(*map(fields_of, chunks))),
        "last": sorted(fields_of(chunks[-1])) if chunks else [],
        "counts": _each_once(counts),
        "choices": [choices[index] for index in sorted(choices)],
        "usage": usages[-1] if usages else None,
        "errors": [{"error": each} for each in errors],
        "is_done": data[-1:] == ["[DONE]"],
    }


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds what a chunk says of a choice to what is known of it."""
    for name, value in part.items():
        if name == "index":
            continue
        if name == "delta":
            _join(whole.setdefault("message", {}), value)
        elif name == "tool_calls":
            calls = whole.setdefault("tool_calls", [])
            for call in value:
                while len(calls) <= call["index"]:
                    calls.append({})
                _join(calls[call["index"]], {key: each for key, each in call.items() if key != "index"})
        elif isinstance(value, dict):
            inner = whole[name] = whole.get(name) or {}
            _join(inner, value)
        elif isinstance(value, list):
            whole[name] = [*(whole.get(name) or ()), *value]
        elif isinstance(value, str) and name in ("content", "text", "reasoning_content", "arguments"):
            whole[name] = whole.get(name, "") + value
        elif value is not None or name not in whole:
            whole[name] = value


def joined_events(body: bytes) -> dict[str, Any]:
    """A streamed response as one value.

    kinds        types of the events in order; of deltas that follow each other, one
    deltas       texts of deltas, by type and item, and their log-probabilities
    others       all other events, whole
    response     that of the last event
    is_numbered  whether events count from 0
    is_named     whether each event's name is its type
    """
    found = events_of(body)
    parsed = [json.loads(data) for _, data in found]
    kinds: list[str] = []
    deltas: dict[str, dict[str, Any]] = {}
    others = []
    for each in parsed:
        kind = each.get("type", "")
        if kinds[-1:] != [kind] or not kind.endswith(".delta"):
            kinds.append(kind)
        rest = {name: value for name, value in each.items() if name != "sequence_number"}
        if kind.endswith(".delta"):
            part = deltas.setdefault(f"{kind} {each.get('output_index')}", {"delta": "", "logprobs": [], "about": rest})
            part["delta"] += each["delta"]
            part["logprobs"] += each.get("logprobs", [])
            part["about"] = {name: value for name, value in rest.items() if name not in ("delta", "logprobs")}
            part["fields"] = sorted(rest)
        else:
            others.append({"error": rest} if kind == "error" else rest)
    numbers = [each.get("sequence_number") for each in parsed]
    return {
        "kinds": kinds,
        "deltas": deltas,
        "others": others,
        "response": parsed[-1].get("response") if parsed else None,
        "is_numbered": numbers == list(range(len(parsed))),
        "is_named": all(name == each.get("type") for (name, _), each in zip(found, parsed, strict=True)),
    }


def masked_stream(body: bytes, path: str, masked: Masked) -> tuple[Any, Any]:
    """A joined stream as it is compared, and as it is."""
    whole = joined_events(body) if path == "/v1/responses" else joined_chunks(body)
    return masked(whole), whole


def _each_once(values: list[Any]) -> list[Any]:
    found: list[Any] = []
    for each in values:
        if each not in found:
            found.append(each)
    return found
