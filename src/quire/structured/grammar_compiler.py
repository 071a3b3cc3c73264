"""Compiles grammars of answers to the tokens that may or must come next. The parser is llguidance's.

Tokens that a grammar forces are proposed as drafts: they cost rows of a step, but no steps of their own and no logits.
They are cut as the tokenizer cuts text, so that they are the tokens that the model would have generated.

Source: llguidance (guidance-ai), an Earley parser over a lexer of derivatives; "Efficient Guided Generation for Large
Language Models" (Willard and Louf, 2023) is about masks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from quire.errors import QueueFullError, RequestError
from quire.models.child import DIED, TIMED_OUT, ChildProcess
from quire.structured import grammar_trial, schemas
from quire.structured.grammar_guide import LIMITS, CompiledGrammar, GrammarGuide
from quire.structured.grammar_source import source_of
from quire.structured.grammar_tokens import TokenTable, make_vocabulary, token_table
from quire.structured.masks import MaskExecutor
from quire.structured.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from quire.models.tokenizer import Tokenizer
    from quire.structured.guide import Allowed

NUM_REMEMBERED = 1024
"""Number of grammars whose trial results are remembered; the least recently used ones are dropped."""

MAX_SECONDS = 0.4
"""Maximum processor time for compiling one grammar and computing its first mask. The largest accepted grammars take
that long."""

FIRST_SECONDS = 0.05
"""Processor time of a first trial. A grammar that exceeds it waits for those that have not been tried. A usual grammar
takes a few milliseconds."""

MAX_BYTES = 512 << 20
"""Maximum memory of one grammar, and of all grammars of waiting and running requests together. A grammar takes up to
250 times its source: a choice among 5,000 objects, 200 KB in all, takes 50 MB."""

MAX_WAITING = 256
"""Maximum number of requests whose grammars wait to be compiled."""

MAX_TENANT_SHARE = 0.5
"""Maximum share of the waiting grammars and of the memory that one tenant may take."""

_PROBE = ChildProcess(grammar_trial.__name__, (MAX_BYTES,))
"""The process of trials, shared by all models of this process."""


class GrammarCompiler:
    """Compiles grammars for the tokens of a model. Thread-safe.

    Everything remembered about a grammar belongs to a scope, which is a request's `cache_salt`. Requests with other
    salts, such as another tenant's, neither share it nor can detect it. Waiting and running requests of one scope share
    a compiled grammar, which is freed with the last of them.

    tokenizer      tokenizer of the model
    vocab_size     number of logits
    eos_token_ids  tokens that end an answer; allowed once the text is complete
    num_threads    threads that compute masks
    begins_early   whether masks are computed while the logits are; see MaskExecutor
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        num_threads: int = 1,
        begins_early: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
        self._name = uuid.uuid4().hex
        self._live = WeakValueDictionary[bytes, CompiledGrammar]()
        self._tried: OrderedDict[bytes, int | str] = OrderedDict()  # its memory in bytes, or why it was refused
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._table: TokenTable | None = None
        self._vocabulary: LLTokenizer | RequestError | None = None
        # By the time limit of the trial, then by tenant in the order of their turns.
        self._todo: dict[float, dict[str, deque[tuple[_CompileRequest, Future[CompiledGrammar]]]]]
        self._todo = {FIRST_SECONDS: {}, MAX_SECONDS: {}}
        self._compiler: ThreadPoolExecutor | None = None
        self._waiting = Counter[str]()  # by tenant
        self._masks = MaskExecutor(-(-vocab_size // 32), num_threads, begins_early=begins_early)
        self.ends = self._end()

    def compile(self, wanted: StructuredOutputsParams, scope: str = "") -> CompiledGrammar:
        """Compiles a grammar. Takes a millisecond for a usual schema, and at most some hundreds. Raises RequestError if
        the constraint cannot be honoured or is too large.
        """
        return self._compiled(_CompileRequest.of(wanted, scope))

    def prepare(self, wanted: StructuredOutputsParams, scope: str = "") -> Future[CompiledGrammar]:
        """Compiles grammars one by one on a thread. A trial in another process first checks the time and the memory,
        and refuses grammars that exceed a limit. Slow grammars wait until all others have been tried, so that they
        delay no other. Tenants take turns within either kind. A cancelled future is skipped.

        The grammar stays compiled as long as a reference to it exists. Raises QueueFullError if too many grammars wait;
        the future raises it if referenced grammars leave no memory.
        """
        item = _CompileRequest.of(wanted, scope)
        found: Future[CompiledGrammar] = Future()
        with self._lock:
            if (known := self._known(item)) is not None:
                _settle(found, known)
                return found
            num_waiting, num_own = sum(self._waiting.values()), self._waiting[item.tenant]
            if num_own >= MAX_WAITING * MAX_TENANT_SHARE or num_waiting >= MAX_WAITING:
                raise QueueFullError(f"{num_own} grammars wait to be compiled; try again later")
            self._waiting[item.tenant] += 1
            if self._compiler is None:
                self._compiler = ThreadPoolExecutor(1, "quire-grammars")
        found.add_done_callback(lambda _: self._has_compiled(item.tenant))
        self._add(FIRST_SECONDS, item, found)
        return found

    def guide(self, grammar: CompiledGrammar, num_prompt: int) -> GrammarGuide:
        """A guide for one sequence. num_prompt: number of its prompt tokens."""
        return GrammarGuide(grammar, self._masks, self.ends, num_prompt)

    def warm(self, *, tries: bool = False) -> None:
        """Loads the vocabulary on a thread, so that the first request does not wait for it: a quarter of a second for
        50,000 tokens. tries: also starts the process of trials, for `prepare`.
        """

        # The interpreter ends daemon threads that wait for its lock. In llguidance's code that aborts the process.
        loading = threading.Thread(target=self._load, name="quire-vocabulary", daemon=False)
        loading.start()

        def run() -> None:
            loading.join()
            with contextlib.suppress(RequestError, QueueFullError):
                self._try(StructuredOutputsParams(regex="a"), MAX_SECONDS)

        if tries:
            threading.Thread(target=run, name="quire-trial", daemon=True).start()

    def _compiled(self, item: _CompileRequest) -> CompiledGrammar:
        with self._lock:
            if (found := self._live.get(item.key)) is not None:
                return found
            tried = self._tried.get(item.key)
        vocabulary = self._loaded()
        try:
            source = source_of(item.params, self._tokenizer.added_id)
        except Exception as error:  # the library's converters raise many types
            raise _refused(item.params, str(error) or type(error).__name__) from None
        made = CompiledGrammar(vocabulary, source, tried if isinstance(tried, int) else 0, item.tenant)
        if made.error:
            raise _refused(item.params, made.error)
        with self._lock:
            return self._live.setdefault(item.key, made)

    def _known(self, item: _CompileRequest) -> CompiledGrammar | RequestError | None:
        """A compiled grammar, or the reason of its refusal. Under the lock."""
        if (tried := self._tried.get(item.key)) is not None:
            self._tried.move_to_end(item.key)
        if isinstance(tried, str):
            return RequestError(tried, "structured_outputs")
        return self._live.get(item.key)

    def _add(self, seconds: float, item: _CompileRequest, found: Future[CompiledGrammar]) -> None:
        assert self._compiler is not None
        with self._lock:
            self._todo[seconds].setdefault(item.tenant, deque()).append((item, found))
        self._compiler.submit(self._try_next)

    def _try_next(self) -> None:
        """Compiles the next grammar, if it takes neither too much time nor too much memory."""
        with self._lock:
            seconds, tenants = next(each for each in self._todo.items() if each[1])
            tenant = next(iter(tenants))
            waiting = tenants.pop(tenant)
            item, found = waiting.popleft()
            if waiting:
                tenants[tenant] = waiting  # behind the others
            result: CompiledGrammar | BaseException | None = self._known(item)  # another request may have compiled it
            was_tried = item.key in self._tried
        if found.cancelled():
            return
        if result is None:
            try:
                if not was_tried:
                    num_bytes = self._try(item.params, seconds)
                    if num_bytes is None:
                        self._add(MAX_SECONDS, item, found)
                        return
                    self._remember(item, num_bytes)
                self._check_memory(item)
                result = self._compiled(item)
            except RequestError as refusal:
                self._remember(item, str(refusal))
                result = refusal
            except BaseException as failure:
                result = failure
        if found.set_running_or_notify_cancel():
            _settle(found, result)

    def _remember(self, item: _CompileRequest, outcome: int | str) -> None:
        with self._lock:
            self._tried[item.key] = outcome
            if len(self._tried) > NUM_REMEMBERED:
                self._tried.popitem(last=False)

    def _check_memory(self, item: _CompileRequest) -> None:
        with self._lock:
            wanted = self._tried.get(item.key)
            live = [(each.tenant == item.tenant, each.num_bytes) for each in self._live.values()]
        more = wanted if isinstance(wanted, int) else 0
        own, held = sum(size for is_own, size in live if is_own), sum(size for _, size in live)
        if (own and own + more > MAX_BYTES * MAX_TENANT_SHARE) or (held and held + more > MAX_BYTES):
            raise QueueFullError("the grammars of other requests leave no memory for this one; try again later")

    def _try(self, wanted: StructuredOutputsParams, seconds: float) -> int | None:
        """The memory of a grammar that compiles within `seconds`; None if it takes longer. Raises RequestError if it
        takes more than MAX_SECONDS or too much memory, and QueueFullError if the trial fails.
        """
        self._loaded()
        try:
            source = source_of(wanted, self._tokenizer.added_id)
        except Exception:
            return 0  # `compile` raises the reason

        def request(table: TokenTable | None) -> tuple[Any, ...]:
            return self._name, table and tuple(table), source, LIMITS, seconds

        kind, text = _PROBE.ask(request(None), lambda: request(self._table))
        if kind == grammar_trial.LARGE:
            raise _refused(wanted, f"compiling it takes more than {MAX_BYTES >> 20} MiB of memory")
        if kind == grammar_trial.SLOW and seconds < MAX_SECONDS:
            return None
        if kind == grammar_trial.SLOW:
            raise _refused(wanted, f"compiling it takes more than {MAX_SECONDS:g} s of processor time")
        if kind == grammar_trial.CRASHED:
            raise _refused(wanted, "compiling it crashes llguidance")
        if kind in (TIMED_OUT, DIED, grammar_trial.LOST):
            raise QueueFullError("the process that tries grammars has not answered; try again later")
        return int(text)

    def _has_compiled(self, tenant: str) -> None:
        with self._lock:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    def _end(self) -> Allowed:
        """The tokens that end a complete text."""
        if len(self._eos_token_ids) == 1:
            return self._eos_token_ids[0]
        words = np.zeros(-(-self._vocab_size // 32), np.uint32)
        for token_id in self._eos_token_ids:
            words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return lambda: words

    def _loaded(self) -> LLTokenizer:
        """The vocabulary. Raises RequestError for a tokenizer without support for grammars."""
        found = self._load()
        if isinstance(found, RequestError):
            raise found
        return found

    def _load(self) -> LLTokenizer | RequestError:
        with self._loading:
            if self._vocabulary is None:
                try:
                    self._table = token_table(self._tokenizer, self._vocab_size, self._eos_token_ids)
                    self._vocabulary = make_vocabulary(self._table)
                except Exception as error:  # the library raises types of its own
                    self._vocabulary = RequestError(
                        f"structured_outputs: not with this tokenizer: {str(error).strip().partition(chr(10))[0]}",
                        "structured_outputs",
                    )
            return self._vocabulary


class _CompileRequest(NamedTuple):
    """A request to compile a constraint. key: identifies the constraint within its scope."""

    params: StructuredOutputsParams
    key: bytes
    tenant: str

    @classmethod
    def of(cls, params: StructuredOutputsParams, scope: str) -> _CompileRequest:
        text = repr((scope, params.kind, params.text, params.reasoning, params.may_force))
        # Salts of a tenant begin with its name and a slash.
        return cls(params, hashlib.sha256(text.encode(errors="surrogatepass")).digest(), scope.partition("/")[0])


def _settle(found: Future[CompiledGrammar], result: CompiledGrammar | BaseException) -> None:
    if isinstance(result, BaseException):
        found.set_exception(result)
    else:
        found.set_result(result)


def _refused(wanted: StructuredOutputsParams, reason: str) -> RequestError:
    if wanted.kind == "json":
        reason = schemas.schema_error_text(json.loads(wanted.text), reason)
    elif (wrong := _BAD_EXPRESSION.search(reason)) is not None:
        reason = wrong[1]
    elif reason.startswith("maximum recursion depth"):
        reason = "it is nested too deep"
    reason = reason.partition("; following special tokens are available")[0]
    what = {"json": "the schema", "json_object": "a JSON object"}.get(wanted.kind, wanted.kind)
    return RequestError(
        f"structured_outputs: {what} cannot be honoured: {' '.join(reason.split())[:400]}", "structured_outputs"
    )


_BAD_EXPRESSION = re.compile(r"regex parse error:\n(?:.*\n)+?error: (.*)")
