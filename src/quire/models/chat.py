"""Chat templates: a list of messages -> the prompt a model was trained on.

A template comes with the model and is not trusted. `quire.models.render` renders it in a separate process with limited
time and memory. This module starts that process, sends it plain JSON values and reads its answers. All templates of
this process share one such process.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import marshal
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ModelError, RequestError
from quire.models import render

RESERVED = frozenset({"messages", "add_generation_prompt", "chat_template", "tokenize"})
"""Variables that a caller cannot set: they have another source, or a feature behind them that does not exist."""

MAX_SECONDS = 2.0
"""Limit of processor time for one rendering: 1,000 messages take about 5 ms."""

MAX_BYTES = 512 << 20
"""Limit of the rendering process's address space: 8 MiB of messages take about 60 MB."""

MAX_CHARS = 16 << 20
"""Limit of a rendered prompt: twice the server's default limit of a request body."""

# Additional wall-clock time of a rendering, in case other processes use the cores.
_PATIENCE = 10.0


class ChatTemplate:
    """A template and the special tokens that it may print."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """special_tokens: bos_token, eos_token, ... -> text. Raises ModelError if the template does not parse."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._number = next(_numbers)
        kind, text = _renderer.ask(self._number, source, None)
        if kind == render.REFUSED:
            raise ModelError(f"the chat template does not parse: {text}")
        if kind != render.DONE:
            reason = _REASONS.get(kind, text.partition(": ")[2])  # without the name of Python's error
            raise ModelError(f"the chat template does not compile: {reason}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. Waits for another process, so an event loop must call it on a thread.

        messages   role and content (and other keys for the template), oldest first
        variables  variables for the template: tools, documents, enable_thinking; none of RESERVED, no *_token
        Raises RequestError with the template's own message if it rejects the conversation, and if rendering fails,
        takes too long or makes too long a text.
        """
        try:
            given = {name: _plain(value, name) for name, value in (variables or {}).items()}
            plain = _plain(messages, "messages")
        except RecursionError:
            raise RequestError("messages or variables are nested too deep for a chat template", "messages") from None
        if taken := RESERVED & given.keys() | {name for name in given if name.endswith("_token")}:
            raise RequestError(f"a chat template's {', '.join(sorted(taken))} cannot be set", "chat_template_kwargs")
        names = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **given,
            "messages": plain,
            "add_generation_prompt": add_generation_prompt,
        }
        kind, text = _renderer.ask(self._number, self.source, names)
        if kind == render.DONE:
            return text
        if kind == render.REFUSED:
            raise RequestError(f"the chat template rejects these messages: {text}", "messages")
        if kind == render.LONG:
            text = f"it made {int(text):,} characters; the limit is {MAX_CHARS:,}"
        raise RequestError(f"the chat template fails on these messages: {_REASONS.get(kind, text)}", "messages")


_LATE, _DIED = b"t", b"x"
"""Kinds of answers in addition to the program's own: it ran too long, or died."""

_REASONS = {
    render.MEMORY: f"it needs more than {MAX_BYTES >> 20} MiB of memory",
    _LATE: f"it did not end within {MAX_SECONDS:g} s of processor time",
    _DIED: "the process that renders it died",
}


class _Renderer:
    """The rendering process. It starts at the first request, and again after it ended. One request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._owner = 0
        self._compiled: set[int] = set()

    def ask(self, number: int, source: str, names: dict[str, Any] | None) -> tuple[bytes, str]:
        """The kind and text of the program's answer.

        number  number of the template, which the program keeps compiled
        names   the variables; None: only compile
        """
        with self._lock:
            if self._owner != os.getpid() or self._process is None or self._process.poll() is not None:
                self._start()
            assert self._socket is not None
            known = number in self._compiled
            try:
                self._socket.settimeout(_PATIENCE * MAX_SECONDS)
                self._send((number, None if known else source, names, MAX_CHARS, MAX_SECONDS))
                head = self._receive(9)
                kind, text = head[:1], self._receive(int.from_bytes(head[1:], "little"))
            except OSError as error:  # a timeout too
                return self._stop(kill=isinstance(error, TimeoutError)), ""
            except BaseException:
                self._stop(kill=True)  # interrupted within an answer that nobody will read
                raise
            if kind == render.MEMORY:
                self._stop()
            elif known or names is not None or kind == render.DONE:
                self._compiled.add(number)
            return kind, text.decode("utf-8", "surrogatepass")

    def _start(self) -> None:
        if self._socket is not None:  # of a renderer that was killed, or of the process that this one was forked from
            self._socket.close()
        self._compiled.clear()
        ours, theirs = socket.socketpair()
        with theirs:
            # In its own session, so that Ctrl-C reaches only us. It ends when our socket is closed. Without `site` it
            # starts faster; it gets our path for jinja2.
            command = [sys.executable, "-I", "-S", render.__file__, str(theirs.fileno())]
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command,
                stdin=null,
                stdout=null,
                stderr=null,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket, self._owner = ours, os.getpid()
        with contextlib.suppress(OSError):  # one that is gone already is found out by the request
            self._send((sys.path, MAX_BYTES))

    def _send(self, message: tuple[Any, ...]) -> None:
        assert self._socket is not None
        data = marshal.dumps(message)
        self._socket.sendall(len(data).to_bytes(8, "little") + data)

    def _receive(self, count: int) -> bytes:
        assert self._socket is not None
        parts = []
        while count:
            part = self._socket.recv(min(count, 1 << 20))
            if not part:
                raise ConnectionResetError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _stop(self, kill: bool = False) -> bytes:
        """Ends the process, by closing its socket or by force. Returns the kind of answer for the current request."""
        process, connection = self._process, self._socket
        self._process = self._socket = None
        if connection is not None:
            connection.close()
        if process is None:
            return _DIED
        if kill:
            process.kill()
        try:
            status = process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        return _LATE if kill or status == -signal.SIGPROF else _DIED

    def close(self) -> None:
        """Ends the process; the next request starts another."""
        if self._owner == os.getpid():
            self._stop()


_renderer = _Renderer()
_numbers = itertools.count()
atexit.register(_renderer.close)


def _plain(value: Any, name: str) -> Any:
    """A copy made only of JSON types: an untrusted template must not get objects with methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    raise RequestError(f"{name} has a {type(value).__name__}; a chat template takes only JSON values", name)
