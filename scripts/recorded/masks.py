"""What of an answer or an output is compared: all of it but ids, times, and the wording of errors and help."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

MEASURED = frozenset(
    "available_bytes created created_at completed_at idle_seconds last_used pinned_until pinned_seconds seconds"
    " seconds_left seconds_reading seconds_writing fetched_bytes_per_second prefill_tokens_per_second"
    " tokens_per_second".split()
)
"""Fields whose numbers are times, follow from measured times, or are what is free of a machine."""

IDS = frozenset("id call_id item_id tool_call_id".split())

HEADERS = ("content-type", "allow", "www-authenticate", "access-control-allow-origin", "access-control-allow-methods")
"""Headers whose values are compared."""

PRESENT = ("retry-after", "x-request-id")
"""Headers whose presence is compared. A request's own `x-request-id` is compared as it is."""

_ID = re.compile(r"([a-z]+)([-_])[0-9a-zA-Z]{8,}(-\d+)?")
_TIME = re.compile(r"(?<![\w.])\d[\d,]*(\.\d+)?(e-?\d+)? ?(h|min|s|ms|us|µs|ns|seconds?|minutes?)\b")
_RATE = re.compile(r"(?<![\w.])\d[\d,]*(\.\d+)?(e-?\d+)? ?(\w+)/s\b")
_SIZE = re.compile(r"\bN ?[KMGT]?i?B\b")
_DATE = re.compile(r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\+00:00|Z)?)?")
_FREE = re.compile(r"(memory free now) +\S+")
_AGE = re.compile(r"\bnow$|\bnow(?=  )|\bTIME (ago|more)\b")
_NUMBER = re.compile(r"(?<![A-Za-z_])[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?")
_TEMPORARY = re.compile(r"/(tmp|var/tmp|dev/shm)/[^\s'\",:;)]+")
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")
_OPTION = re.compile(r"^ {2,4}((?:-[\w.-]+(?: [^ ,]+)?, )*--?[\w.-]+)", re.MULTILINE)


@dataclass
class Marks:
    """What stands for what, over all answers of one server and all outputs of one run.

    texts         replaced in every output, such as the temporary folder
    fingerprints  of model and settings, by their first appearance
    """

    texts: dict[str, str] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)

    def plain(self, text: str) -> str:
        """A text without what differs between two runs of the same code on the same machine."""
        for found, mark in self.texts.items():
            text = text.replace(found, mark)
        return re.sub(r"(127\.0\.0\.1|localhost):\d+", r"\1:PORT", text)

    def fingerprint(self, found: str) -> str:
        """The name of a system fingerprint: a change of settings within a run gives it another one."""
        return self.fingerprints.setdefault(found, f"fp_{len(self.fingerprints) + 1}")


class Masked:
    """Masks the parts of one answer: the same id gets the same name throughout."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._ids: dict[str, str] = {}

    def __call__(self, value: Any, key: str = "") -> Any:
        """A JSON value without what is not compared. key: the name of the field it is the value of."""
        match value:
            case dict() if key == "error" and "message" in value:
                return {**self(value), "message": "TEXT" if value["message"] else ""}
            case dict():
                return {name: self(each, name) for name, each in value.items()}
            case list():
                return [self(each) for each in value]
            case str() if key in IDS:
                return self.id_of(value)
            case str() if key == "system_fingerprint":
                return self._marks.fingerprint(value)
            case str() if key == "embedding":
                return {"base64": [_short(each) for (each,) in struct.iter_unpack("<f", base64.b64decode(value))]}
            case str():
                return self._marks.plain(value)
            case bool() | None:
                return value
            case int() | float() if key in MEASURED:
                return "NUMBER"
            case float():
                return _short(value)
        return value

    def id_of(self, value: str) -> str:
        """The kind of an id and its number within the answer; what is no random id as it is."""
        found = _ID.fullmatch(value)
        if found is None:
            return self._marks.plain(value)
        kind = found[1]
        number = 1 + sum(name.startswith(f"{kind}#") for name in self._ids.values())
        return self._ids.setdefault(value, f"{kind}#{number}")


def _short(value: float) -> float:
    return float(f"{value:.7g}")


def fields_of(value: Any, path: str = "") -> set[str]:
    """The paths of all fields of a JSON value, as in `choices[].delta.content`."""
    match value:
        case dict():
            inner = {f"{path}.{name}".lstrip(".") for name in value}
            return inner.union(*(fields_of(each, f"{path}.{name}".lstrip(".")) for name, each in value.items()))
        case list():
            return set().union(*(fields_of(each, f"{path}[]") for each in value))
    return set()


def shape_of(value: Any) -> Any:
    """The fields of a JSON value and the types of their values. A list has the shapes of its elements, each once."""
    match value:
        case dict():
            return {name: shape_of(each) for name, each in value.items()}
        case list():
            shapes = {json.dumps(shape_of(each), sort_keys=True) for each in value}
            return [json.loads(each) for each in sorted(shapes)]
        case bool():
            return "flag"
        case int() | float():
            return "number"
        case str():
            return "text"
    return None


def headers_of(given: dict[str, str], asked_id: str | None) -> dict[str, str]:
    """The headers of an answer that are compared."""
    found = {name: given[name] for name in HEADERS if name in given}
    found |= {name: "PRESENT" for name in PRESENT if name in given}
    if asked_id is not None and "x-request-id" in given:
        found["x-request-id"] = given["x-request-id"] if given["x-request-id"] == asked_id else "ANOTHER"
    return found


def metrics_of(text: str) -> list[str]:
    """Names, types and labels of Prometheus metrics, without values and bounds of histograms."""
    found = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            found.add(line)
        elif line and not line.startswith("#"):
            name = line.rpartition(" ")[0]
            found.add(re.sub(r'(python|version|le)="[^"]*"', r'\1=""', name))
    return sorted(found)


def document_of(value: Any, within: str = "") -> Any:
    """An OpenAPI document without descriptions. within: the name of the field that it is the value of."""
    match value:
        case dict():
            told = {"description", "summary", "title"} if within != "properties" else set()
            return {
                name: "VERSION" if name == "version" and isinstance(each, str) else document_of(each, name)
                for name, each in value.items()
                if name not in told or not isinstance(each, str)
            }
        case list():
            return [document_of(each) for each in value]
    return value


# ---- outputs of commands ---------------------------------------------------------------------------------------------


def _text(text: str, marks: Marks) -> Any:
    text = _FREE.sub(r"\1 N", _DATE.sub("DATE", marks.plain(text)))
    text = _TIME.sub("TIME", _RATE.sub(r"N \3/s", text))
    return [_AGE.sub("AGE", re.sub(r"\s{2,}", "  ", line.rstrip())) for line in text.splitlines()]


def _numbers(text: str, marks: Marks) -> Any:
    return [_SIZE.sub("SIZE", _NUMBER.sub("N", line)) for line in _text(text, marks)]


def _options(text: str, _: Marks) -> Any:
    flags = {word.split(" ")[0] for found in _OPTION.findall(text) for word in found.split(", ")}
    return sorted(flags)


def _parsed(text: str) -> list[Any]:
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def _json(text: str, marks: Marks) -> Any:
    masked = Masked(marks)
    return [masked(each) for each in _parsed(text)]


def _lines(text: str, marks: Marks) -> Any:
    return sorted(_json(text, marks), key=lambda line: str(line.get("id")))


def _plan(text: str, marks: Marks) -> Any:
    return _DATE.sub("DATE", marks.plain(text)).splitlines()


def _shape(text: str, _: Marks) -> Any:
    return shape_of(_parsed(text))


def _findings(text: str, _: Marks) -> Any:
    return [each["what"] for each in json.loads(text)]


def _generated(text: str, marks: Marks) -> Any:
    return [
        {name: _without_cached(each) if name == "usage" else each for name, each in line.items()}
        for line in _lines(text, marks)
    ]


def _without_cached(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    """The usage of an answer without counts of cached tokens. A line of an error may have none."""
    return usage and {name: each for name, each in usage.items() if not name.startswith("cached_tokens")}


OUTPUTS: dict[str, Callable[[str, Marks], Any]] = {
    "text": _text,
    "numbers": _numbers,
    "options": _options,
    "json": _json,
    "lines": _lines,
    "plan": _plan,
    "shape": _shape,
    "findings": _findings,
    "generated": _generated,
    "nothing": lambda text, marks: None,
}
"""Ways in which an output is compared.

text      line by line, without measured times and rates
numbers   the same without any numbers
options   the names of the options that help shows
json      JSON or JSON lines
lines     JSON lines in the order of their ids
plan      line by line, every digit of its numbers. A command that ends with an error has failed, and is no answer
shape     the fields of JSON and the types of their values
findings  what `quire doctor --json` has looked at
generated JSON lines of `quire generate` without counts of cached tokens: with a tier they depend on the measured speed,
          because a prefix on the disk is computed again if that is faster than fetching it
nothing   not at all
"""


def output_of(text: str, shows: str, marks: Marks) -> Any:
    """What of an output is compared. JSON that cannot be read is compared as text."""
    try:
        return OUTPUTS[shows](text, marks)
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"unreadable": _text(text, marks)}


def failure_of(error: Exception, marks: Marks) -> str:
    """The class of an error and its message in one line, without numbers, addresses and temporary paths: the same
    failure of two runs has the same text.
    """
    text = _TEMPORARY.sub("PATH", _ADDRESS.sub("ADDRESS", marks.plain(str(error))))
    return f"{type(error).__name__}: {' '.join(_NUMBER.sub('N', text).split()) or 'no message'}"


def blamed_of(errors: str) -> str:
    """Who speaks in the last line of standard error, as in `quire serve:`, or which exception ended the command. The
    wording is not compared.
    """
    last: Iterable[str] = [line for line in errors.splitlines() if line.strip()][-1:]
    found = [re.match(r"quire[a-z ]*:|([\w.]+\.)?\w+Error\b", line) for line in last]
    return "".join(each[0].rpartition(".")[2] for each in found if each)
