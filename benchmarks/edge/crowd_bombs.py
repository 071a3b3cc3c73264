"""What a hostile client makes of many requests that are cheap to send: their number, the memory that each holds while
it waits, the turns of the event loop that they take, and the forms that take work with every token.

Each request is within the limits. The sizes of the crowds keep a bomb below a minute.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable

from bombs import Target, named, side_by_side
from text_bombs import CHAT, COMPLETIONS, fields

MANY = 400
"""Clients at once: fewer than the default limit of connections."""

ASK_SECONDS = 20.0


def crowd(count: int, path: str, make: Callable[[int], bytes]) -> Callable[[Target], str]:
    """Requests at once, each of which is given up after a while. make: gives the body of each, by its number."""

    def send(target: Target) -> str:
        requests = [named(target, path, make(each)) for each in range(count)]
        return side_by_side(count, lambda each: _asked(target, requests[each]))

    return send


def _asked(target: Target, request: bytes) -> str:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", target.port), ASK_SECONDS) as client:
        client.sendall(request)
        return client.recv(65536).split(None, 2)[1].decode()
    return "given up"


def unread(count: int, make: Callable[[Target], bytes], seconds: float) -> Callable[[Target], str]:
    """Connections that send as much as the server takes, read nothing and leave all at once."""

    def send(target: Target) -> str:
        held: list[tuple[socket.socket, memoryview]] = []
        with contextlib.ExitStack() as ends:
            for _ in range(count):
                client = ends.enter_context(socket.socket())
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", target.port))
                client.setblocking(False)
                held.append((client, memoryview(make(target))))
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                held = [(client, rest[_sent(client, rest) :]) for client, rest in held]
                time.sleep(0.1)
        return f"{count} x left"

    return send


def _sent(client: socket.socket, rest: memoryview) -> int:
    with contextlib.suppress(OSError):
        return client.send(rest) if rest else 0
    return 0


def dropped(target: Target) -> str:
    """One request after the other, each of which is dropped at once."""
    body = fields(prompt=list(range(1000, 6000)), max_tokens=500, n=8, ignore_eos=True)
    request, number, until = named(target, COMPLETIONS, body), 0, time.monotonic() + 15
    while time.monotonic() < until:
        with socket.create_connection(("127.0.0.1", target.port)) as client:
            client.sendall(request)
            time.sleep(0.02)
        number += 1
    return f"{number} x left"


def ahead(target: Target) -> bytes:
    """A long answer, and a large body that is not read before it."""
    first = named(target, COMPLETIONS, fields(prompt="a", max_tokens=3000, ignore_eos=True))
    return first + named(target, COMPLETIONS, fields(prompt="a" * 300_000, max_tokens=1))


def formed(number: int, form: dict[str, object], **given: object) -> bytes:
    """A completion whose text has a form. number: makes it differ from others."""
    return fields(prompt=f"{number}", structured_outputs=form, temperature=2.0, **given)


def slow_form(number: int) -> bytes:
    """A schema that takes nearly as long as one may."""
    names = [f"p{number}_{each}" for each in range(900)]
    texts = {name: {"type": "string", "pattern": f"^[a-z]{{1,40}}[0-9]{{{len(name)}}}$"} for name in names}
    return formed(number, {"json": {"type": "object", "properties": texts, "required": names}}, max_tokens=2)


def long_prompts(number: int) -> bytes:
    """120 different prompts of token ids."""
    draw = random.Random(number)
    return fields(prompt=[[draw.randrange(1000, 40_000) for _ in range(7900)] for _ in range(120)], max_tokens=1)


STOPS = [("ab" * 511) + chr(0x4E00 + each) for each in range(16)]
"""Periodic texts: an automaton of each has as many numbers as it has characters."""

CROWD_BOMBS: dict[str, Callable[[Target], str]] = {
    "16 stops for 1,024 answers": crowd(
        8, COMPLETIONS, lambda _: fields(prompt="a", max_tokens=200, n=128, temperature=1.0, stop=STOPS)
    ),
    "400 chats of 900 messages": crowd(
        MANY, CHAT, lambda _: fields(messages=[{"role": "user", "content": "a"}] * 900, max_tokens=1)
    ),
    "400 x 11,000 template lists": crowd(
        MANY,
        CHAT,
        lambda _: fields(
            messages=[{"role": "user", "content": "a"}], max_tokens=1, chat_template_kwargs={"a": [[]] * 10_900}
        ),
    ),
    "1,024 biases, 400 at once": crowd(
        MANY,
        COMPLETIONS,
        lambda _: fields(prompt="a", max_tokens=50, logit_bias={str(each): 1 for each in range(1000, 2024)}),
    ),
    "900 bodies sent ahead": unread(900, ahead, 15.0),
    "900 unread descriptions": unread(
        900, lambda _: b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8, 10.0
    ),
    "960 prompts of 7,900 tokens": crowd(8, COMPLETIONS, long_prompts),
    "200 slow forms": crowd(200, COMPLETIONS, slow_form),
    "16 answers with ever new states": crowd(
        1, COMPLETIONS, lambda _: formed(0, {"regex": "[ab]*a[ab]{14}"}, n=16, max_tokens=400)
    ),
    "700 requests dropped": dropped,
}
"""By name; each sends to a server and returns the outcome."""
