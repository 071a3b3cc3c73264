"""Grammars of answers: which tokens may come next, and which must. The grammars themselves are llguidance's.

Tokens that a grammar forces are proposed as drafts, which cost rows of a step and no steps, and no logits. They are
those of the tokenizer, so that the text is the one that the model would have had to write.

Source: llguidance (guidance-ai), an Earley parser over a lexer of derivatives; "Efficient Guided Generation for Large
Language Models" (Willard and Louf, 2023) is about masks.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import json
import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.engine import probe, schemas
from quire.engine.masks import Masks, PendingMask
from quire.engine.step import Proposal
from quire.engine.structured import StructuredOutputsParams
from quire.errors import QueueFullError, RequestError
from quire.models.child import DIED, LATE, Child

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from quire.engine.step import Allowed
    from quire.models.tokenizer import Tokenizer

NUM_KEPT = 128
"""Compiled grammars that are kept, least recently used ones dropped. A usual one takes a tenth of a megabyte."""

KEPT_CHARS = 1 << 20
"""Characters of the sources of those. A grammar takes up to 250 times its source: 5,000 objects to choose from, which
are 200 KB, take 50 MB."""

MAX_SECONDS = 0.4
"""Processor time of compiling one grammar. The largest that may be asked for take as long."""

FIRST_SECONDS = 0.05
"""Processor time after which a grammar makes way for those that have not been tried. A usual one takes a few
milliseconds."""

MAX_BYTES = 512 << 20
"""Memory that compiling one grammar may take."""

MAX_GBNF_CHARS = 8192
"""Most characters of a grammar in GBNF: the converter's time grows with the square of its rules."""

MAX_WAITING = 128
"""Requests whose grammars wait to be compiled."""

LIMITS: dict[str, Any] = {"verbose_errors": False, "max_lexer_states": 50_000}
"""A fifth of the library's own states. No schema of the JSON Schema Test Suite needs 2,000 within 60 tokens."""

_PROBE = Child(probe.__name__, (MAX_BYTES,))
"""One for all models of this process."""


class Grammars:
    """Compiles grammars for the tokens of a model. May be used by several threads.

    tokenizer      of the model
    vocab_size     number of logits
    eos_token_ids  tokens that end an answer, which may come once the text is complete
    num_threads    threads that compute masks
    begins_early   whether they do while the logits are computed; see Masks
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
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._num_chars: dict[bytes, int] = {}  # of what each kept one is made of
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._vocabulary: LLTokenizer | RequestError | None = None
        self._todo: list[tuple[float, int, StructuredOutputsParams, Future[LLMatcher]]] = []  # a heap
        self._numbers = itertools.count()
        self._compiler: ThreadPoolExecutor | None = None
        self._num_waiting = 0
        self._masks = Masks(-(-vocab_size // 32), num_threads, begins_early=begins_early)
        self.ends = self._end()

    def compile(self, wanted: StructuredOutputsParams) -> LLMatcher:
        """The grammar at its beginning: to be copied, not changed. Takes a millisecond for a usual schema, and at most
        some hundreds. Raises RequestError if it cannot be honoured or is too large.
        """
        key = _key(wanted)
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        vocabulary = self._loaded()
        made = _compiled(vocabulary, wanted, self._tokenizer.special_id)
        with self._lock:
            self._kept[key], self._num_chars[key] = made, len(wanted.text)
            while len(self._kept) > 1 and (len(self._kept) > NUM_KEPT or sum(self._num_chars.values()) > KEPT_CHARS):
                dropped, _ = self._kept.popitem(last=False)
                del self._num_chars[dropped]
        return made

    def prepare(self, wanted: StructuredOutputsParams) -> Future[LLMatcher]:
        """Compiles on a thread, one grammar after the other. First it tries in another process whether that takes too
        much time or memory, and refuses what does. Those that take long come after those that have not been tried, so
        that they hold up nothing else. Raises QueueFullError if too many wait.
        """
        found: Future[LLMatcher] = Future()
        with self._lock:
            if (known := self._known(wanted)) is not None:
                _settle(found, known)
                return found
            if self._num_waiting >= MAX_WAITING:
                raise QueueFullError(f"{self._num_waiting} grammars wait to be compiled; try again later")
            self._num_waiting += 1
            if self._compiler is None:
                self._compiler = ThreadPoolExecutor(1, "quire-grammars")
        found.add_done_callback(self._has_compiled)
        self._add(FIRST_SECONDS, wanted, found)
        return found

    def _known(self, wanted: StructuredOutputsParams) -> LLMatcher | RequestError | None:
        """What is kept of a form, or why it was refused. Needs the lock."""
        key = _key(wanted)
        if (refusal := self._refused.get(key)) is not None:
            return RequestError(refusal, "structured_outputs")
        return self._kept.get(key)

    def _add(self, seconds: float, wanted: StructuredOutputsParams, found: Future[LLMatcher]) -> None:
        assert self._compiler is not None
        with self._lock:
            heapq.heappush(self._todo, (seconds, next(self._numbers), wanted, found))
        self._compiler.submit(self._try_next)

    def _try_next(self) -> None:
        """Compiles the next grammar, if it takes neither too much time nor too much memory."""
        with self._lock:
            seconds, _, wanted, found = heapq.heappop(self._todo)
            result: LLMatcher | BaseException | None = self._known(wanted)  # another request may have wanted the same
        if found.cancelled():
            return
        if result is None:
            try:
                if not self._try(wanted, seconds):
                    self._add(MAX_SECONDS, wanted, found)
                    return
                result = self.compile(wanted)
            except RequestError as refusal:
                self._remember(wanted, refusal)
                result = refusal
            except BaseException as failure:
                result = failure
        if found.set_running_or_notify_cancel():
            _settle(found, result)

    def _remember(self, wanted: StructuredOutputsParams, refusal: RequestError) -> None:
        with self._lock:
            self._refused[_key(wanted)] = str(refusal)
            if len(self._refused) > NUM_KEPT:
                self._refused.popitem(last=False)

    def _try(self, wanted: StructuredOutputsParams, seconds: float) -> bool:
        """Whether a grammar can be compiled within so much time. Raises RequestError for what takes more than
        MAX_SECONDS, or too much memory, and QueueFullError if that cannot be tried.
        """
        self._loaded()
        try:
            source = source_of(wanted, self._tokenizer.special_id)
        except Exception:
            return True  # `compile` says why not

        def request(made_of: tuple[Any, ...] | None) -> tuple[Any, ...]:
            return self._name, made_of, source, LIMITS, seconds

        def whole() -> tuple[Any, ...]:
            return request((self._written(), self._vocab_size, self._eos_token_ids))

        kind, _ = _PROBE.ask(request(None), whole)
        if kind == probe.LARGE:
            raise _refused(wanted, f"compiling it takes more than {MAX_BYTES >> 20} MiB of memory")
        if kind == probe.SLOW and seconds < MAX_SECONDS:
            return False
        if kind == probe.SLOW:
            raise _refused(wanted, f"compiling it takes more than {MAX_SECONDS:g} s of processor time")
        if kind in (LATE, DIED):
            raise QueueFullError("the process that tries grammars has not answered; try again later")
        return True

    def _has_compiled(self, _: Future[LLMatcher]) -> None:
        with self._lock:
            self._num_waiting -= 1

    def guide(self, wanted: StructuredOutputsParams, num_prompt: int) -> GrammarGuide:
        """A guide for one sequence with so many prompt tokens. Compiles what is not compiled yet; see `compile`."""
        return GrammarGuide(self, self.compile(wanted), num_prompt)

    def mask(self, matcher: LLMatcher) -> PendingMask:
        """The tokens that may come next; see Masks."""
        return self._masks.ask(matcher)

    def _end(self) -> Allowed:
        """The tokens that end a complete text."""
        if len(self._eos_token_ids) == 1:
            return self._eos_token_ids[0]
        words = np.zeros(-(-self._vocab_size // 32), np.uint32)
        for token_id in self._eos_token_ids:
            words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return lambda: words

    def warm(self, *, tries: bool = False) -> None:
        """Loads the vocabulary on a thread, so that the first request need not wait for it: a quarter of a second for
        50,000 tokens. tries: also starts the process of trials, for `prepare`.
        """

        def run() -> None:
            self._load()
            if tries:
                with contextlib.suppress(RequestError, QueueFullError):
                    self._try(StructuredOutputsParams(regex="a"), MAX_SECONDS)

        threading.Thread(target=run, name="quire-vocabulary", daemon=True).start()

    def _written(self) -> str:
        return unspoken(self._tokenizer.to_json())

    def _loaded(self) -> LLTokenizer:
        """Raises RequestError for a tokenizer that grammars cannot be for."""
        found = self._load()
        if isinstance(found, RequestError):
            raise found
        return found

    def _load(self) -> LLTokenizer | RequestError:
        from llguidance import LLTokenizer

        with self._loading:
            if self._vocabulary is None:
                try:
                    if not self._eos_token_ids:
                        raise ValueError("no token ends an answer")
                    self._vocabulary = LLTokenizer(
                        self._written(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                    )
                except Exception as error:  # the library's own kinds
                    self._vocabulary = RequestError(
                        f"structured_outputs: not with this tokenizer: {_first_line(str(error))}", "structured_outputs"
                    )
            return self._vocabulary


class GrammarGuide:
    """Proposes the tokens that a grammar forces, and allows those that it allows. See Guide.

    Its state follows the sequence's tokens, wherever they were generated: after a preemption it proposes again, and on
    another engine it begins with the tokens that there are.
    """

    def __init__(self, grammars: Grammars, compiled: LLMatcher, num_prompt: int) -> None:
        self._grammars = grammars
        self._compiled = compiled
        self._matcher: LLMatcher | None = None  # copied when the first token is near
        self._num_prompt = num_prompt
        self._num_seen = num_prompt  # tokens of the sequence that the matcher has taken, or that are the prompt's
        self._ahead: list[int] = []  # tokens that it has taken before the sequence has them
        self._forced: list[int] = []  # tokens that must follow those of the sequence, as far as is known
        self._is_complete = False
        self._pending: PendingMask | None = None

    def propose(self, token_ids: list[int], most: int) -> Proposal:
        """See Guide."""
        if self._pending is not None:
            self._pending.withdraw()
            self._pending = None
        matcher, grammars = self._follow(token_ids), self._grammars
        if not self._forced and not self._ends(matcher):
            self._forced = matcher.compute_ff_tokens()
        forced = self._forced
        drafts = forced[:most]
        allowed: list[Allowed | None] = [*forced[: most + 1]]
        if len(forced) <= most:
            if drafts:
                matcher.consume_tokens(drafts)
                self._ahead = drafts
            if self._ends(matcher):
                allowed.append(grammars.ends)
            else:
                self._pending = grammars.mask(matcher)
                allowed.append(self._pending)
        return Proposal(drafts, allowed)

    def _follow(self, token_ids: list[int]) -> LLMatcher:
        """The matcher at the sequence's tokens."""
        if self._matcher is None:
            self._matcher = self._compiled.deep_copy()
        new, ahead, self._ahead = token_ids[self._num_seen :], self._ahead, []
        self._num_seen += len(new)
        self._forced = self._forced[len(new) :] if self._forced[: len(new)] == new else []
        if new[: len(ahead)] == ahead:
            new = new[len(ahead) :]
        else:  # a step was not taken
            self._is_complete = False
            if not self._matcher.rollback(len(ahead)):  # some grammars cannot be
                self._matcher, new = self._compiled.deep_copy(), token_ids[self._num_prompt :]
        if new and not self._is_complete:
            self._matcher.consume_tokens(new)
        return self._matcher

    def _ends(self, matcher: LLMatcher) -> bool:
        """Whether the text is complete and nothing may follow but an end. A matcher in error has stopped, too."""
        if not self._is_complete and matcher.is_stopped() and not matcher.is_error():
            self._is_complete = True
        return self._is_complete


def unspoken(tokenizer: str) -> str:
    """A tokenizer.json in which no text is that of a special token. llguidance would take forced text that contains
    one, such as `<|im_end|>`, for the token, and then refuse that.
    """
    found = json.loads(tokenizer)
    names = {each["content"]: f"\ufdd0{each['id']}" for each in found["added_tokens"] if each["special"]}
    for each in found["added_tokens"]:
        each["content"] = names.get(each["content"], each["content"])
    model = found["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return json.dumps(found)


def _key(wanted: StructuredOutputsParams) -> bytes:
    text = repr((wanted.way, wanted.text, wanted.reasoning))
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _compiled(
    vocabulary: LLTokenizer, wanted: StructuredOutputsParams, special: Callable[[str], int | None]
) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    try:
        matcher = LLMatcher(vocabulary, source_of(wanted, special), log_level=0, limits=LLParserLimits(**LIMITS))
    except Exception as error:  # the library's converters raise whatever comes
        raise _refused(wanted, str(error) or type(error).__name__) from None
    if matcher.is_error():
        raise _refused(wanted, matcher.get_error())
    return matcher


def source_of(wanted: StructuredOutputsParams, special: Callable[[str], int | None]) -> str:
    """The grammar as llguidance takes it: a list of grammars as JSON, of which the first one is the text's.

    special  gives the id of a special token, which is no text in a grammar
    """
    parts = [{"name": "form", **_form(wanted)}]
    if wanted.reasoning is not None:
        begins, ends = wanted.reasoning
        (begin, _), (end, is_text) = (_mark(mark, special(mark)) for mark in (begins, ends))
        free = f"free[lazy]: /(.|\\n)*/ {end}" if is_text else f"free: TEXT? {end}\nTEXT: /(.|\\n)+/"
        start = f"start: {f'({begin} thought)?' if begins else 'thought'} @form"
        outer = "\n".join([start, "thought: free BLANK?", free, r"BLANK: /[ \n]+/"])
        parts.insert(0, {"name": "text", "lark_grammar": outer})
    return json.dumps({"grammars": parts})


def _mark(text: str, token_id: int | None) -> tuple[str, bool]:
    """A mark as a term, and whether it is text."""
    return (json.dumps(text), True) if token_id is None else (f"<[{token_id}]>", False)


def term_of(wanted: StructuredOutputsParams) -> str:
    """The form as a term of Lark. Raises RequestError for a grammar, which has rules of its own."""
    if wanted.way == "grammar":
        raise RequestError("structured_outputs: a grammar cannot be combined with tools", "structured_outputs")
    found = _form(wanted)
    if "json_schema" in found:
        return f"%json {json.dumps(found['json_schema'])}"
    return str(found["lark_grammar"]).removeprefix("start: ")


def _form(wanted: StructuredOutputsParams) -> dict[str, Any]:
    from llguidance import regex_to_lark

    match wanted.way:
        case "json":
            return {"json_schema": schemas.written(json.loads(wanted.text))}
        case "json_object":
            return {"json_schema": schemas.written({"type": "object"})}
        case "regex":
            return {"lark_grammar": f"start: /{regex_to_lark(wanted.text)}/"}
        case "choice":
            assert wanted.choice is not None
            # One expression, of which a parser has one item: of thousands of alternatives it had too many.
            return {"lark_grammar": f"start: /{regex_to_lark('|'.join(map(_escaped, wanted.choice)))}/"}
        case _:
            return {"lark_grammar": _as_lark(wanted.text)}


def _escaped(text: str) -> str:
    """An expression that only this text matches."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~/-]", r"\\\g<0>", text)


def _as_lark(text: str) -> str:
    """A grammar in Lark's syntax, which has a rule named start or says that it is llguidance's; else it is GBNF."""
    if any(_LARK.match(line) for line in text.splitlines()):
        return text
    if len(text) > MAX_GBNF_CHARS:
        raise ValueError(f"a grammar in GBNF may have {MAX_GBNF_CHARS:,} characters, and it has {len(text):,}")
    from llguidance.gbnf_to_lark import gbnf_to_lark

    return str(gbnf_to_lark(text))


_LARK = re.compile(r"[ \t]*(%llguidance\b|start[ \t]*(\[[^\]]*\][ \t]*)?:(?!:))")


def _settle(found: Future[LLMatcher], result: LLMatcher | BaseException) -> None:
    if isinstance(result, BaseException):
        found.set_exception(result)
    else:
        found.set_result(result)


def _refused(wanted: StructuredOutputsParams, reason: str) -> RequestError:
    if wanted.way == "json":
        reason = schemas.explained(json.loads(wanted.text), reason)
    elif (wrong := _BAD_EXPRESSION.search(reason)) is not None:
        reason = wrong[1]
    elif reason.startswith("maximum recursion depth"):
        reason = "it is nested too deep"
    reason = reason.partition("; following special tokens are available")[0]
    what = {"json": "the schema", "json_object": "a JSON object"}.get(wanted.way, wanted.way)
    return RequestError(
        f"structured_outputs: {what} cannot be honoured: {' '.join(reason.split())[:400]}", "structured_outputs"
    )


_BAD_EXPRESSION = re.compile(r"regex parse error:\n(?:.*\n)+?error: (.*)")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
