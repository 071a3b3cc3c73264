"""Chat templates: a list of messages -> the prompt a model was trained on.

Templates come with the model, that is from strangers. `quire.models.render` renders them in a process of its own, in
bounded time and memory; this module starts it, hands it plain JSON values and reads what it says. All templates of
this process share that one.
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
"""Names a caller cannot give a template: they come from elsewhere, or would promise what is not done."""

MAX_SECONDS = 2.0
"""Of processor time for one rendering: 1,000 messages take some 5 ms."""

MAX_BYTES = 512 << 20
"""Address space of the rendering process: 8 MiB of messages take some 60 MB."""

MAX_CHARS = 16 << 20
"""Of a rendered prompt: twice the longest request body that the server takes by default."""

# How much longer than its processor time a rendering may take where other processes have the cores.
_PATIENCE = 10.0


class ChatTemplate:
    """A template and the special tokens it may print."""

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
        """The prompt of a conversation. Waits for another process: an event loop calls it on a thread.

        messages   role and content (and whatever else the template reads), oldest first
        variables  further names the template may read: tools, documents, enable_thinking; none of RESERVED, no *_token
        Raises RequestError with the template's own message when it refuses the conversation, and when rendering fails,
        takes too long or makes too much.
        """
        try:
            given = {name: _plain(value, name) for name, value in (variables or {}).items()}
            plain = _plain(messages, "messages")
        except RecursionError:
            raise RequestError("messages or variables are nested too deep for a chat template", "messages") from None
        if taken := RESERVED & given.keys() | {name for name in given if name.endswith("_token")}:
            raise RequestError(f"a chat template's {', '.join(sorted(taken))} cannot be given", "chat_template_kwargs")
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
            raise RequestError(f"the chat template refuses these messages: {text}", "messages")
        if kind == render.LONG:
            text = f"it made {int(text):,} characters, and {MAX_CHARS:,} is the limit"
        raise RequestError(f"the chat template fails on these messages: {_REASONS.get(kind, text)}", "messages")


_LATE, _DIED = b"t", b"x"
"""Kinds of answers besides those of the program: it ran too long, or ended for another reason."""

_REASONS = {
    render.MEMORY: f"it needs more than {MAX_BYTES >> 20} MiB of memory",
    _LATE: f"it did not end within {MAX_SECONDS:g} s of processor time",
    _DIED: "the process that renders it died",
}


class _Renderer:
    """The process that renders, started when it is first asked, and again after it ended. One request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._owner = 0
        self._compiled: set[int] = set()

    def ask(self, number: int, source: str, names: dict[str, Any] | None) -> tuple[bytes, str]:
        """The kind and text of the program's answer.

        number  of the template, which the program keeps compiled
        names   the variables; None: compile alone
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
                self._stop(kill=True)  # interrupted in the middle of an answer that nobody will read
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
            # In a session of its own: Ctrl-C is for us. It ends by itself once our socket is closed. Without `site` it
            # starts faster; it looks for jinja2 where we do.
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
        """Ends the process, by closing its socket or by force; returns what that says about the request."""
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
    """A copy made of JSON types alone: objects with methods are nothing a stranger's template should hold."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    raise RequestError(f"{name} holds a {type(value).__name__}; only JSON values can be given to a chat template", name)
