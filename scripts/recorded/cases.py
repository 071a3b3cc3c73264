"""Requests, command lines and servers as values. Knows no sockets, no processes and no answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Answers = Mapping[str, Any]
"""Bodies of the answers of one server so far, by the names of their requests. Those of streams are joined."""

Body = Any
"""JSON; bytes, which are sent as they are; or a function of the earlier answers that returns JSON."""

JSON_HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Request:
    """One HTTP request.

    name     of its answer in a recording
    path     with the query; or a function of the earlier answers that returns it
    raw      all bytes that are sent in place of a request; None: the request is made from the other fields
    until    what must hold of the answer's JSON: the request is repeated until it does, for some seconds. It is for
             what a server does after it has answered; None: it is sent once
    """

    name: str
    path: str | Callable[[Answers], str]
    body: Body = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    until: Callable[[Any], bool] | None = None

    def url(self, answers: Answers) -> str:
        """The path with the query."""
        return self.path if isinstance(self.path, str) else self.path(answers)

    def filled(self, answers: Answers) -> bytes | None:
        """The bytes of the body."""
        body = self.body(answers) if callable(self.body) else self.body
        return body if body is None or isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()


@dataclass(frozen=True)
class Crowd:
    """Requests that are sent while other requests run.

    running  requests that have begun to answer before, and are dropped afterwards; None: a connection without a request
    drains   whether the server gets SIGTERM after these have begun
    """

    running: tuple[Request | None, ...]
    then: tuple[Request, ...]
    drains: bool = False


@dataclass(frozen=True)
class Line:
    """One command line of quire.

    shows      how standard output is compared: see `masks.OUTPUTS`
    files      written by the command, with the way in which each is compared
    stdin      text of standard input
    variables  further ones of the environment
    """

    name: str
    words: tuple[str, ...]
    shows: str = "text"
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


Step = Request | Crowd | Line


@dataclass(frozen=True)
class Server:
    """A server, and what it is asked, in order. `{url}` in the words of a line is its address.

    shows  how its own output is compared, as in a line
    """

    name: str
    words: tuple[str, ...]
    steps: tuple[Step, ...]
    shows: str = "text"


@dataclass(frozen=True)
class Places:
    """Files of one run, all within `folder`.

    tiny, similar  folders of the tiny model: as it is, and as one that was made to compare texts
    """

    folder: Path
    tiny: Path
    similar: Path

    def file(self, name: str, text: str) -> str:
        """Writes a file and returns its path."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)


def post(name: str, path: str, body: Body, **headers: str) -> Request:
    """A request with a JSON body. Underscores in names of headers are hyphens."""
    own = {key.replace("_", "-"): value for key, value in headers.items()}
    return Request(name, path, body, headers={**JSON_HEADERS, **own})


def get(name: str, path: str | Callable[[Answers], str], method: str = "GET", **headers: str) -> Request:
    """A request without a body."""
    return Request(name, path, method=method, headers={key.replace("_", "-"): each for key, each in headers.items()})


def variants(name: str, path: str, base: Mapping[str, Any], changed: Mapping[str, Mapping[str, Any]]) -> list[Request]:
    """A request for each change of a body. A value of `DROPPED` removes a field."""
    return [
        post(
            f"{name}/{key}", path, {field: value for field, value in {**base, **change}.items() if value is not DROPPED}
        )
        for key, change in changed.items()
    ]


DROPPED = object()
"""As the value of a field: the body lacks it."""


_WORDS = (
    "the old mill on the river ground flour for the village and the bakers paid with bread while children counted"
    " geese under a grey sky that promised rain before evening and nobody hurried because the road was long"
).split()


def words(count: int, seed: int) -> str:
    """A text of `count` words, the same for the same seed."""
    draw = random.Random(seed)
    return " ".join(draw.choice(_WORDS) for _ in range(count)).capitalize() + "."


def user(text: str) -> dict[str, Any]:
    """A message of a user."""
    return {"role": "user", "content": text}
