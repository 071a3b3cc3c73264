"""The program that compiles grammars on trial. `quire.engine.grammars` starts it and asks it before it compiles itself.

A short schema can keep llguidance busy for hours in a single call that nothing can interrupt: 20 patterns that hold at
once take half a minute, and each further one two to three times as long. Each trial runs in a process that is forked
for it, so that the kernel can end it and the vocabulary is loaded once.

A request is (name of the vocabulary, what it is made of or None, source
of a grammar, limits, seconds).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from typing import TYPE_CHECKING, Any

from quire.models.child import UNKNOWN, received, send

if TYPE_CHECKING:
    from llguidance import LLTokenizer

DONE, SLOW, LARGE = b"d", b"s", b"m"
"""Kinds of answers: the trial has ended, with whatever result; it took too much time; or too much memory. Also UNKNOWN:
a vocabulary that was not sent yet."""

NUM_VOCABULARIES = 2


def tried(vocabulary: LLTokenizer, source: str, limits: dict[str, Any], seconds: float, max_bytes: int) -> bytes:
    """How a trial ends."""
    from llguidance import LLMatcher, LLParserLimits

    pid = os.fork()
    if not pid:
        try:
            # The default action of SIGPROF ends the process, also in the middle of one long call.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            with contextlib.suppress(OSError), open("/proc/self/statm") as file:  # only Linux has it
                size = int(file.read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (size + max_bytes, size + max_bytes))
            LLMatcher(vocabulary, source, log_level=0, limits=LLParserLimits(**limits))
        except MemoryError:
            os._exit(1)
        except BaseException:  # whatever it is, the caller finds it, too
            os._exit(0)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return SLOW if os.WTERMSIG(status) == signal.SIGPROF else LARGE
    return LARGE if os.WEXITSTATUS(status) else DONE


def serve(connection: socket.socket) -> None:
    """Answer requests until the other side closes."""
    (max_bytes,) = received(connection)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLTokenizer

    vocabularies: dict[str, LLTokenizer] = {}
    while True:
        name, made_of, source, limits, seconds = received(connection)
        if made_of is not None:
            if len(vocabularies) == NUM_VOCABULARIES:
                del vocabularies[next(iter(vocabularies))]
            text, size, eos_token_ids = made_of
            vocabularies[name] = LLTokenizer(text, n_vocab=size, eos_token=eos_token_ids)
        if name not in vocabularies:
            send(connection, UNKNOWN)
        else:
            send(connection, tried(vocabularies[name], source, limits, seconds, max_bytes))
