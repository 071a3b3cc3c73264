"""What hostile or broken clients send: bodies, heads and connections that cost a server more than the client.

Knows HTTP as bytes on sockets, and the endpoints that servers of OpenAI's API share; nothing else about the servers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

SMALL, LARGE = 1_200_000, 8_300_000
"""Bytes of a body: 600,000 numbers, and the most that the default limit of 8 MiB accepts."""


@dataclass(frozen=True)
class Target:
    """A server: where it listens, how its model and the text to tokenize are called, how long one bomb may take."""

    port: int
    model: str
    seconds: float
    text: str = "prompt"


class Client:
    """One connection that sends until it is answered, closed or out of time."""

    def __init__(self, target: Target) -> None:
        self.until = time.monotonic() + target.seconds
        self.received = b""
        self.ended = ""
        self.socket = socket.create_connection(("127.0.0.1", target.port), timeout=target.seconds)

    def send(self, data: bytes) -> bool:
        """Sends, and looks for an answer. Returns whether to continue."""
        try:
            view = memoryview(data)
            while view and not self.received and not self.ended:
                self._left(0.05)
                with contextlib.suppress(TimeoutError):
                    view = view[self.socket.send(view) :]
                self.look(0.0)
        except OSError as error:
            self.look(0.2)
            self.ended = self.ended or type(error).__name__
        return not self.received and not self.ended

    def look(self, seconds: float) -> None:
        """Reads available bytes, waiting up to `seconds` for the first."""
        try:
            self._left(seconds)
            part = self.socket.recv(65536)
            self.received = (self.received + part)[:65536]
            if not part:
                self.ended = "closed"
        except (BlockingIOError, TimeoutError):
            if time.monotonic() >= self.until:
                self.ended = "no answer"
        except OSError as error:
            self.ended = type(error).__name__

    def outcome(self) -> str:
        """Waits for the answer until the time is over. Returns its status, or how the connection ended."""
        while b"\r\n" not in self.received and not self.ended:
            self.look(min(1.0, max(0.01, self.until - time.monotonic())))
        self.socket.close()
        if self.received.startswith(b"HTTP/"):
            return self.received.split(None, 2)[1].decode()
        return {"ConnectionResetError": "reset", "BrokenPipeError": "reset"}.get(self.ended, self.ended or "closed")

    def _left(self, seconds: float) -> None:
        self.socket.settimeout(max(0.0, min(seconds, self.until - time.monotonic())))


def post(path: str, body: bytes) -> bytes:
    """A whole request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def ask(target: Target, sent: bytes) -> str:
    """Sends some bytes. Returns the outcome."""
    client = Client(target)
    client.send(sent)
    return client.outcome()


def together(outcomes: Iterator[str]) -> str:
    """Many outcomes in a few words: `48 x 408, 2 x reset`."""
    counts = Counter(outcomes)
    return ", ".join(f"{count} x {what}" for what, count in counts.most_common(3))


def side_by_side(count: int, work: Callable[[int], str]) -> str:
    """The outcomes of `count` clients at once."""
    with ThreadPoolExecutor(count) as pool:
        return together(pool.map(work, range(count)))


# --- bodies ----------------------------------------------------------------------------------------------------------

MESSAGE = b'"messages":[{"role":"user","content":"a"}]'


def numbers(size: int) -> bytes:
    """A list of ones, `size` bytes long."""
    return b"[" + b",".join([b"1"] * (size // 2)) + b"]"


def pairs(size: int) -> bytes:
    """Names and numbers, about `size` bytes long."""
    return b",".join(b'"%07d":1' % each for each in range(size // 12))


def repeated(item: bytes, size: int) -> bytes:
    """A list of equal items, about `size` bytes long."""
    return b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"


def body(where: str, size: int) -> tuple[str, bytes]:
    """(path, body) of a bomb in a field of the request."""
    chat = "/v1/chat/completions"
    match where:
        case "messages":
            return chat, b'{"model":"%s","messages":' + numbers(size) + b"}"
        case "modalities":
            return chat, b'{"model":"%s",' + MESSAGE + b',"modalities":' + numbers(size) + b"}"
        case "metadata":
            return chat, b'{"model":"%s",' + MESSAGE + b',"metadata":{' + pairs(size) + b"}}"
        case "unknown names":
            return chat, b'{"model":"%s",' + MESSAGE + b"," + pairs(size) + b"}"
        case "tokens":
            return "/detokenize", b'{"model":"%s","tokens":' + numbers(size) + b"}"
        case "empty lists":
            return chat, b'{"model":"%s","messages":' + repeated(b"[]", size) + b"}"
        case "small objects":
            return chat, b'{"model":"%s","messages":' + repeated(b'{"a":1}', size) + b"}"
        case "template arguments":
            return chat, b'{"model":"%s",' + MESSAGE + b',"chat_template_kwargs":{"a":' + repeated(b"[]", size) + b"}}"
    raise ValueError(where)


def named(target: Target, path: str, text: bytes) -> bytes:
    """The request, with the server's name for its model."""
    return post(path, text.replace(b"%s", target.model.encode(), 1))


def validation(where: str, size: int, count: int = 1) -> Callable[[Target], str]:
    """Bodies that are slow to validate."""

    def send(target: Target) -> str:
        sent = named(target, *body(where, size))
        return ask(target, sent) if count == 1 else side_by_side(count, lambda _: ask(target, sent))

    return send


def prompt_scores(target: Target) -> str:
    """Scores of 2,800 prompt tokens with 20 others each, for eight choices."""
    text = b'{"model":"%s","prompt":[' + b",".join([b"600"] * 2800) + b"]"
    text += b',"max_tokens":1,"n":8,"prompt_logprobs":20}'
    return ask(target, named(target, "/v1/completions", text))


def one_word(target: Target) -> str:
    """8 MB without a blank, to be tokenized."""
    begin = b'{"model":"%s","' + target.text.encode() + b'":"'
    return ask(target, named(target, "/tokenize", begin + b"a" * 8_000_000 + b'"}'))


# --- heads -----------------------------------------------------------------------------------------------------------

HEAD = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED += b"Transfer-Encoding: chunked\r\n\r\n"


def endless(begin: bytes, more: bytes, size: int) -> Callable[[Target], str]:
    """A beginning, then `more` repeated up to `size` bytes."""

    def send(target: Target) -> str:
        client = Client(target)
        piece = more * (1 + 2**16 // len(more))
        going, sent = client.send(begin), 0
        while going and sent < size:
            going, sent = client.send(piece), sent + len(piece)
        return client.outcome()

    return send


def many_heads(target: Target) -> str:
    """200 connections with 1 MB of headers each, none of which ends."""
    one = endless(HEAD, b"x-header: " + b"a" * 1000 + b"\r\n", 1_000_000)
    # Connections stay open until answered, or for a while, so that all their bytes are in memory at once.
    short = dataclasses.replace(target, seconds=min(20.0, target.seconds))
    return side_by_side(200, lambda _: one(short))


def dripping(begin: bytes, drop: bytes, count: int) -> Callable[[Target], str]:
    """Connections that send a beginning, then a drop every second; with an empty drop, nothing more."""

    def send(target: Target) -> str:
        def one(_: int) -> str:
            client = Client(target)
            going = client.send(begin)
            while going:
                client.look(1.0)
                going = not (client.received or client.ended) and client.send(drop)
                going = going or not (client.received or client.ended)
            return client.outcome()

        return side_by_side(count, one)

    return send


# --- connections -----------------------------------------------------------------------------------------------------


def many_connections(begin: bytes) -> Callable[[Target], str]:
    """3,000 connections that send only a beginning and stay open for five seconds."""

    def send(target: Target) -> str:
        held, outcomes = [], []
        for _ in range(3000):
            try:
                client = socket.create_connection(("127.0.0.1", target.port), timeout=5)
                held.append(client)
                client.sendall(begin)
            except OSError as error:
                outcomes.append(type(error).__name__)
        time.sleep(5)
        for each in held:
            each.setblocking(False)
            try:
                part = each.recv(100)
                outcomes.append(part.split(None, 2)[1].decode() if part else "closed")
            except BlockingIOError:
                outcomes.append("open")
            except OSError:
                outcomes.append("reset")
            each.close()
        return together(iter(outcomes))

    return send


def pipelined(target: Target) -> str:
    """100,000 pipelined requests on one connection, without reading any answer."""
    client = Client(target)
    sent = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100_000
    client.send(sent)
    return client.outcome()


PLACES = ("messages", "modalities", "tokens", "metadata", "unknown names")
BOMBS: dict[str, Callable[[Target], str]] = {
    **{f"1.2 MB in {where}": validation(where, SMALL) for where in PLACES},
    **{f"8.3 MB in {where}": validation(where, LARGE) for where in PLACES},
    "8.3 MB of empty lists": validation("empty lists", LARGE),
    "8.3 MB of small objects": validation("small objects", LARGE),
    "8.3 MB for the template": validation("template arguments", LARGE),
    "16 x 8.3 MB at once": validation("messages", LARGE, 16),
    "one header of 60 MB": endless(HEAD + b"x: ", b"a", 60_000_000),
    "200 MB of headers": many_heads,
    "endless trailers": endless(CHUNKED + b"0\r\n", b"a: b\r\n", 60_000_000),
    "endless chunk extension": endless(CHUNKED + b"1;", b"a", 60_000_000),
    "slow headers": dripping(HEAD, b"a: b\r\n", 50),
    "slow bodies": dripping(CHUNKED + b"5\r\n{", b"", 50),
    "100,000 requests ahead": pipelined,
    "3,000 connections": many_connections(b""),
    "3,000 begun bodies": many_connections(CHUNKED + b"5\r\n{"),
    "prompt scores, n = 8": prompt_scores,
    "8 MB of one word": one_word,
}
"""By name; each sends to a server and returns the outcome."""
