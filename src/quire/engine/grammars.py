"""Grammars of answers: which tokens may come next, and which must. The grammars themselves are llguidance's.

A mask is computed on a thread of its own while the model computes the logits that it is for. Tokens that a grammar
forces are proposed as drafts, which cost rows of a step and no steps. They are those of the tokenizer, so that the text
is the one that the model would have had to write.

Source: llguidance (guidance-ai), an Earley parser over a lexer of derivatives; "Efficient Guided Generation for Large
Language Models" (Willard and Louf, 2023) is about masks.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.step import Proposal
from quire.engine.structured import StructuredOutputsParams
from quire.errors import QueueFullError, QuireError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from quire.engine.step import Mask
    from quire.models.tokenizer import Tokenizer

NUM_KEPT = 128
"""Compiled grammars that are kept, least recently used ones dropped. A usual one takes a tenth of a megabyte."""

MAX_WAITING = 32
"""Grammars that wait to be compiled."""

JSON_STYLE: Any = {
    "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "coerce_one_of": False,
    "lenient": False,
}  # fmt: skip
"""How JSON is written, and that schemas are honoured whole or refused."""

TOO_COMPLEX = "the grammar became too complex here"
"""How the explanation begins of an answer that ended because of that."""

LIMITS: dict[str, Any] = {"verbose_errors": False}

Words = NDArray[np.uint32]


class Grammars:
    """Compiles grammars for the tokens of a model. May be used by several threads.

    tokenizer      of the model
    vocab_size     number of logits
    eos_token_ids  tokens that end an answer, which may come once the text is complete
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._kept: OrderedDict[tuple[Any, ...], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiler: ThreadPoolExecutor | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._num_waiting = 0
        self._ends = self._only(self._eos_token_ids)

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
        made = _compiled(vocabulary, wanted, self._special)
        with self._lock:
            self._kept[key] = made
            if len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        return made

    def prepare(self, wanted: StructuredOutputsParams) -> Future[LLMatcher]:
        """Compiles on a thread, one grammar after the other, so that large ones hold up nothing else. Raises
        QueueFullError if too many wait.
        """
        found: Future[LLMatcher] = Future()
        with self._lock:
            if (kept := self._kept.get(_key(wanted))) is not None:
                found.set_result(kept)
                return found
            if self._num_waiting >= MAX_WAITING:
                raise QueueFullError(f"{self._num_waiting} grammars wait to be compiled; try again later")
            self._num_waiting += 1
            if self._compiler is None:
                self._compiler = ThreadPoolExecutor(1, "quire-grammars")
        found = self._compiler.submit(self.compile, wanted)
        found.add_done_callback(self._has_compiled)
        return found

    def _has_compiled(self, _: Future[LLMatcher]) -> None:
        with self._lock:
            self._num_waiting -= 1

    def guide(self, wanted: StructuredOutputsParams, num_prompt: int) -> GrammarGuide:
        """A guide for one sequence with so many prompt tokens. Compiles what is not compiled yet; see `compile`."""
        return GrammarGuide(self, self.compile(wanted).deep_copy(), num_prompt)

    def mask(self, matcher: LLMatcher) -> Future[Words]:
        """Computes the tokens that may come next. Until then nobody else may use the matcher."""
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "quire-masks")
        return self._worker.submit(self._masked, matcher)

    def only(self, token_id: int) -> Words:
        """A mask with one token."""
        return self._only([token_id])

    @property
    def ends(self) -> Words:
        """The mask of a complete text that nothing may follow."""
        return self._ends

    def _special(self, text: str) -> int | None:
        token_id = self._tokenizer.token_id(text) if text else None
        return token_id if token_id in self._tokenizer.special_ids else None

    def _only(self, token_ids: Sequence[int]) -> Words:
        words = np.zeros(-(-self._vocab_size // 32), np.uint32)
        for token_id in token_ids:
            words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return words

    def _masked(self, matcher: LLMatcher) -> Words:
        words = np.empty(-(-self._vocab_size // 32), np.uint32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise QuireError(f"{TOO_COMPLEX}: {_first_line(matcher.get_error())}")
        return words

    def _loaded(self) -> LLTokenizer:
        if self._vocabulary is None:
            from llguidance import LLTokenizer

            self._vocabulary = LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
        return self._vocabulary


class GrammarGuide:
    """Proposes the tokens that a grammar forces, and allows those that it allows. See Guide.

    Its state follows the sequence's tokens, wherever they were generated: after a preemption it proposes again, and on
    another engine it begins with the tokens that there are.
    """

    def __init__(self, grammars: Grammars, matcher: LLMatcher, num_prompt: int) -> None:
        self._grammars = grammars
        self._matcher = matcher
        self._num_seen = num_prompt  # tokens of the sequence that the matcher has taken, or that are the prompt's
        self._ahead: list[int] = []  # tokens that it has taken before the sequence has them
        self._is_complete = False
        self._pending: Future[Words] | None = None

    def propose(self, token_ids: list[int], most: int) -> Proposal:
        """See Guide."""
        if self._pending is not None:
            self._pending.exception()  # until then the matcher is in use
            self._pending = None
        self._follow(token_ids)
        matcher, grammars = self._matcher, self._grammars
        forced = [] if self._ends() else matcher.compute_ff_tokens()
        drafts = forced[:most]
        masks: list[Mask | None] = [_given(grammars.only(token_id)) for token_id in forced[: most + 1]]
        if len(forced) <= most:
            if drafts:
                matcher.consume_tokens(drafts)
                self._ahead = drafts
            if self._ends():
                masks.append(_given(grammars.ends))
            else:
                self._pending = grammars.mask(matcher)
                masks.append(self._pending.result)
        return Proposal(drafts, masks)

    def _follow(self, token_ids: list[int]) -> None:
        """Brings the matcher to the sequence's tokens."""
        new = token_ids[self._num_seen :]
        ahead, self._ahead = self._ahead, []
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ahead, new, strict=False)))
        if same < len(ahead):
            self._matcher.rollback(len(ahead) - same)
            self._is_complete = False
        if len(new) > same and not self._is_complete:
            self._matcher.consume_tokens(new[same:])
        self._num_seen += len(new)

    def _ends(self) -> bool:
        """Whether the text is complete and nothing may follow but an end. A matcher in error has stopped, too."""
        if not self._is_complete and self._matcher.is_stopped() and not self._matcher.is_error():
            self._is_complete = True
        return self._is_complete


def _key(wanted: StructuredOutputsParams) -> tuple[Any, ...]:
    return (wanted.way, wanted.text, wanted.reasoning)


def _given(words: Words) -> Mask:
    return lambda: words


def _compiled(
    vocabulary: LLTokenizer, wanted: StructuredOutputsParams, special: Callable[[str], int | None]
) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    try:
        matcher = LLMatcher(vocabulary, source_of(wanted, special), log_level=0, limits=LLParserLimits(**LIMITS))
    except ValueError as error:
        raise _refused(wanted, str(error)) from None
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
    found = _form(wanted)
    if "json_schema" in found:
        return f"%json {json.dumps(found['json_schema'])}"
    if wanted.way == "grammar":
        raise RequestError("structured_outputs: a grammar cannot be combined with tools", "structured_outputs")
    return str(found["lark_grammar"]).removeprefix("start: ")


def _form(wanted: StructuredOutputsParams) -> dict[str, Any]:
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    match wanted.way:
        case "json":
            schema = json.loads(wanted.text)
            if schema is False:
                return {"json_schema": schema}
            return {"json_schema": {**({} if schema is True else schema), "x-guidance": JSON_STYLE}}
        case "json_object":
            return {"json_schema": {"type": "object", "x-guidance": JSON_STYLE}}
        case "regex":
            return {"lark_grammar": f"start: /{regex_to_lark(wanted.text)}/"}
        case "choice":
            assert wanted.choice is not None
            return {"lark_grammar": "start: " + " | ".join(map(json.dumps, wanted.choice))}
        case _:
            return {"lark_grammar": any_to_lark(wanted.text)}


def _refused(wanted: StructuredOutputsParams, reason: str) -> RequestError:
    what = {"json": "the schema", "json_object": "a JSON object"}.get(wanted.way, wanted.way)
    return RequestError(
        f"structured_outputs: {what} cannot be honoured: {' '.join(reason.split())[:400]}", "structured_outputs"
    )


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
