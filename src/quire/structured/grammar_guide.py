"""A compiled grammar, and what it makes of one sequence: the tokens that must come next, and those that may."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from quire.structured.guide import GuideProposal
from quire.structured.masks import MaskExecutor, PendingMask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from quire.structured.guide import Allowed

MAX_LEXER_STATES = 50_000
"""A fifth of the library's own number. No schema of the JSON Schema Test Suite needs 2,000 within 60 tokens."""

LIMITS: dict[str, Any] = {"verbose_errors": False, "max_lexer_states": MAX_LEXER_STATES}

RENEWAL_TOKENS = 64
"""Tokens that a sequence must have written since its lexer was renewed before it is renewed again."""

_REPLAYED = 32
"""Tokens that are taken in one call, which holds Python's lock."""


class CompiledGrammar:
    """A grammar at its beginning. It does not change; each sequence begins with a copy.

    Copies share the states of a lexer, which become more with what is written, up to MAX_LEXER_STATES. A sequence for
    which they do not suffice continues with a lexer of its own.

    num_bytes  memory that it takes, as measured on trial; 0 if it was not tried
    tenant     for whom it is
    """

    def __init__(self, vocabulary: LLTokenizer, source: str, num_bytes: int = 0, tenant: str = "") -> None:
        self._vocabulary, self._source = vocabulary, source
        self._beginning = self.compiled()
        self.num_bytes, self.tenant = num_bytes, tenant

    @property
    def error(self) -> str:
        """What llguidance says against it; "" if nothing."""
        return self._beginning.get_error() if self._beginning.is_error() else ""

    def begin(self) -> LLMatcher:
        """A copy, for a sequence."""
        return self._beginning.deep_copy()

    def compiled(self) -> LLMatcher:
        """Compiles it again, with a lexer that nobody shares."""
        from llguidance import LLMatcher, LLParserLimits

        return LLMatcher(self._vocabulary, self._source, log_level=0, limits=LLParserLimits(**LIMITS))


class GrammarGuide:
    """Proposes the tokens that a grammar forces, and allows those that it allows. See Guide.

    Its state follows the sequence's tokens, wherever they were generated: after a preemption it proposes again, and on
    another engine it begins with the tokens that there are.
    """

    def __init__(self, grammar: CompiledGrammar, masks: MaskExecutor, ends: Allowed, num_prompt: int) -> None:
        """ends: the tokens that end a complete text. num_prompt: tokens of the prompt."""
        self._grammar, self._masks, self._end_tokens = grammar, masks, ends
        self._matcher: LLMatcher | None = None  # copied when the first token is near
        self._num_prompt = num_prompt
        self._num_seen = num_prompt  # tokens of the sequence that the matcher has taken, or that are the prompt's
        self._ahead: list[int] = []  # tokens that it has taken before the sequence has them
        self._forced: list[int] = []  # tokens that must follow those of the sequence, as far as is known
        self._is_complete = False
        self._pending: PendingMask | None = None
        self._renewed_at: int | None = None  # generated tokens when the lexer was renewed

    def propose(self, token_ids: list[int], most: int) -> GuideProposal:
        """See Guide."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        matcher = self._follow(token_ids)
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
                allowed.append(self._end_tokens)
            else:
                self._pending = self._masks.submit(matcher, partial(self._renewed, token_ids, len(token_ids), drafts))
                allowed.append(self._pending)
        return GuideProposal(drafts, allowed)

    def _follow(self, token_ids: list[int]) -> LLMatcher:
        """The matcher at the sequence's tokens."""
        if self._matcher is None:
            self._matcher = self._grammar.begin()
        new, ahead, self._ahead = token_ids[self._num_seen :], self._ahead, []
        self._num_seen += len(new)
        self._forced = self._forced[len(new) :] if self._forced[: len(new)] == new else []
        if new[: len(ahead)] == ahead:
            new = new[len(ahead) :]
        else:  # a step was not taken
            self._is_complete = False
            if not self._matcher.rollback(len(ahead)):  # some grammars cannot be
                begin = self._grammar.begin if self._renewed_at is None else self._grammar.compiled
                self._matcher, new = begin(), token_ids[self._num_prompt :]
        if new and not self._is_complete:
            _consume(self._matcher, new)
        return self._matcher

    def _renewed(self, token_ids: list[int], num_tokens: int, drafts: list[int]) -> LLMatcher | None:
        """A matcher with a lexer of its own, behind the same tokens; None if the last one has not lasted long enough.
        Called by a thread that computes a mask, while the engine waits for it.
        """
        given = [*token_ids[self._num_prompt : num_tokens], *drafts]
        if self._renewed_at is not None and len(given) < self._renewed_at + RENEWAL_TOKENS:
            return None
        self._renewed_at = len(given)
        matcher = self._matcher = self._grammar.compiled()
        _consume(matcher, given)
        return matcher

    def _ends(self, matcher: LLMatcher) -> bool:
        """Whether the text is complete and nothing may follow but an end. A matcher in error has stopped, too."""
        if not self._is_complete and matcher.is_stopped() and not matcher.is_error():
            self._is_complete = True
        return self._is_complete


def _consume(matcher: LLMatcher, tokens: list[int]) -> None:
    for place in range(0, len(tokens), _REPLAYED):
        matcher.consume_tokens(tokens[place : place + _REPLAYED])
