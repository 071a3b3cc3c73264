"""Runs a program of Quire in its own process, where the kernel limits its time and memory, and sends it requests.

Knows processes, sockets and plain values, not the meaning of requests.
"""

from __future__ import annotations

import atexit
import contextlib
import marshal
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

TIMED_OUT, DIED = b"t", b"x"
"""Kinds of answers in addition to the program's own: it ran too long, or died."""

NEEDS_CONTEXT = b"u"
"""The kind of an answer to a request that refers to data the program lacks: the request is sent again with the data."""

_BEGIN = """
import importlib, socket, sys
module, number, *sys.path = sys.argv[1:]
try:
    importlib.import_module(module).serve(socket.socket(fileno=int(number)))
except ConnectionError:
    pass
"""

ANSWER_SECONDS = 20.0
"""Seconds that an answer may take, in case other processes use the cores."""

CLOSE_SECONDS = 3.0
"""Seconds that `close` waits for a thread in `ask`, which gives a busy program a second before it kills it. The program
also ends without that thread, because its socket is closed."""


def receive_request(connection: socket.socket) -> Any:
    """The next request, for the program; ends the process if there is none."""
    size = int.from_bytes(_bytes(connection, 8), "little")
    return marshal.loads(_bytes(connection, size))


def send_answer(connection: socket.socket, kind: bytes, text: str = "") -> None:
    """Sends the program's answer."""
    data = text.encode("utf-8", "surrogatepass")
    connection.sendall(kind + len(data).to_bytes(8, "little") + data)


def _bytes(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        got = connection.recv_into(view[at:])
        if not got:
            raise SystemExit(0)
        at += got
    return data


class ChildProcess:
    """A program in its own process. It starts at the first request, and again after it ended. One request at a time."""

    def __init__(self, module: str, greeting: tuple[Any, ...], last: bytes = b"") -> None:
        """The program is the function `serve` of a module, which gets a socket.

        greeting  the first message to each process
        last      the kind of answer after which the program ends
        """
        self._module = module
        self._greeting = greeting
        self._last = last
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._owner = 0
        self._is_closing = self._has_ended = False
        atexit.register(self._end)

    def ask(self, request: tuple[Any, ...], whole: Callable[[], tuple[Any, ...]]) -> tuple[bytes, str]:
        """Returns the kind and text of the program's answer; DIED while another thread closes it, and when this process
        ends. whole: makes the request with all data that the program may lack.
        """
        with self._lock:
            if self._has_ended:
                return DIED, ""
            if self._owner != os.getpid() or self._process is None or self._process.poll() is not None:
                self._start()
            # `close` sets this before it looks for a socket: either it sees this socket, or this thread sees the flag.
            if self._is_closing:
                self._is_closing = False
                return self._stop(), ""
            assert self._socket is not None
            try:
                self._socket.settimeout(ANSWER_SECONDS)
                kind, text = self._exchange(request)
                if kind == NEEDS_CONTEXT:
                    kind, text = self._exchange(whole())
            except OSError as error:  # a timeout too
                return self._stop(kill=isinstance(error, TimeoutError)), ""
            except BaseException:
                self._stop(kill=True)  # interrupted within an answer, whose rest would confuse the next request
                raise
            if kind == self._last:
                self._stop()
            return kind, text.decode("utf-8", "surrogatepass")

    def _exchange(self, request: tuple[Any, ...]) -> tuple[bytes, bytes]:
        self._send(request)
        head = self._receive(9)
        return head[:1], self._receive(int.from_bytes(head[1:], "little"))

    def _start(self) -> None:
        if self._socket is not None:  # belongs to a killed program, or to the parent that this process was forked from
            self._socket.close()
        ours, theirs = socket.socketpair()
        with theirs:
            # In its own session, so that Ctrl-C reaches only us. It ends when our socket is closed. Without `site` it
            # starts faster; it gets our path for what it imports.
            command = [sys.executable, "-I", "-S", "-c", _BEGIN, self._module, str(theirs.fileno()), *sys.path]
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, stdin=null, stdout=null, stderr=null, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._socket, self._owner = ours, os.getpid()
        with contextlib.suppress(OSError):  # if the program has already ended, the request reports it
            self._send(self._greeting)

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
            return DIED
        if kill:
            process.kill()
        try:
            status = process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        return TIMED_OUT if kill or status == -signal.SIGPROF else DIED

    def close(self) -> None:
        """Ends the process; the next request starts another."""
        if self._owner != os.getpid():
            return
        self._is_closing = True
        if (connection := self._socket) is not None:
            with contextlib.suppress(OSError):  # closed by now
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
        if self._lock.acquire(timeout=CLOSE_SECONDS):
            try:
                self._stop()
                self._is_closing = False
            finally:
                self._lock.release()

    def _end(self) -> None:
        """Closes the program before the interpreter ends, because a thread may still be in `ask`."""
        self._has_ended = True
        self.close()
