"""The program that compiles grammars on trial. `quire.structured.grammar_compiler` starts it, and asks it before it
compiles a grammar itself.

A short schema can keep llguidance busy for hours in a single call that nothing can interrupt: 20 simultaneous patterns
take half a minute, and each further one doubles or triples the time. Each trial runs in a forked process, so that the
kernel can end it, and so that the vocabulary is loaded only once. A trial does the first work of a request: it compiles
the grammar, computes the initially forced text, and computes the first mask.

A request is (name of the vocabulary, its TokenTable or None, source of the grammar, limits, seconds).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
from typing import TYPE_CHECKING, Any

from quire.models.child import NEEDS_CONTEXT, receive_request, send_answer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

DONE, SLOW, LARGE, CRASHED, LOST = b"d", b"s", b"m", b"c", b"l"
"""Kinds of answers: the trial ended, and its memory in bytes is the text; it took too much time; too much memory; it
crashed; or it was killed. A further kind is NEEDS_CONTEXT: the vocabulary has not been sent yet."""

NUM_VOCABULARIES = 2

_WARM = json.dumps({"grammars": [{"lark_grammar": "start: /a/"}]})


def run_trial(
    vocabulary: LLTokenizer, source: str, limits: dict[str, Any], seconds: float, max_bytes: int
) -> tuple[bytes, int]:
    """Runs a trial. Returns its kind of answer and its memory in bytes."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            # The default action of SIGPROF ends the process even during one long call.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            use(vocabulary, _WARM, limits)  # allocates the library's own 6 MB before the measurement
            size, resident = _memory()
            resource.setrlimit(resource.RLIMIT_AS, (size + max_bytes, size + max_bytes))
            use(vocabulary, source, limits)
            os.write(theirs, str(max(0, _memory()[1] - resident)).encode())
        except MemoryError:
            os._exit(1)
        except BaseException:  # the caller will meet the same error
            os._exit(0)
        os._exit(0)
    os.close(theirs)
    _, status = os.waitpid(pid, 0)
    num_bytes = int(os.read(ours, 32) or b"0")
    os.close(ours)
    if os.WIFSIGNALED(status):
        # A failed allocation aborts, and SIGKILL comes from outside, such as from a machine without memory.
        kinds = {signal.SIGPROF: SLOW, signal.SIGABRT: LARGE, signal.SIGKILL: LOST}
        return kinds.get(signal.Signals(os.WTERMSIG(status)), CRASHED), 0
    return (LARGE if os.WEXITSTATUS(status) else DONE), num_bytes


def use(vocabulary: LLTokenizer, source: str, limits: dict[str, Any]) -> None:
    """Performs a request's first work with a grammar."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary, source, log_level=0, limits=LLParserLimits(**limits))
    if not matcher.is_error():
        matcher.compute_ff_tokens()
        matcher.compute_bitmask()


def _memory() -> tuple[int, int]:
    """Bytes of this process's address space, and its resident bytes; 0 where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:  # only Linux has it
        size, resident, *_ = map(int, file.read().split())
        return size * resource.getpagesize(), resident * resource.getpagesize()
    return 0, 0


def serve(connection: socket.socket) -> None:
    """Answers requests until the other side closes."""
    (max_bytes,) = receive_request(connection)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from quire.structured.grammar_tokens import TokenTable, make_vocabulary

    vocabularies: dict[str, LLTokenizer] = {}
    while True:
        name, table, source, limits, seconds = receive_request(connection)
        if table is not None:
            if len(vocabularies) == NUM_VOCABULARIES:
                del vocabularies[next(iter(vocabularies))]
            vocabularies[name] = make_vocabulary(TokenTable(*table))
        if name not in vocabularies:
            send_answer(connection, NEEDS_CONTEXT)
        else:
            kind, num_bytes = run_trial(vocabularies[name], source, limits, seconds, max_bytes)
            send_answer(connection, kind, str(num_bytes))
