"""A compiled grammar, and its guide for one sequence: the tokens that must and that may come next."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from quire.structured.guide import GuideProposal
from quire.structured.masks import MaskExecutor, PendingMask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from quire.structured.guide import Allowed

MAX_LEXER_STATES = 50_000
"""A fifth of the library's default. No schema of the JSON Schema Test Suite needs 2,000 within 60 tokens."""

LIMITS: dict[str, Any] = {"verbose_errors": False, "max_lexer_states": MAX_LEXER_STATES}

RENEWAL_TOKENS = 64
"""Number of tokens that a sequence must generate between two renewals of its lexer."""

_REPLAYED = 32
"""Maximum number of tokens consumed in one call, which holds Python's lock."""


class CompiledGrammar:
    """A grammar in its initial state, which never changes: each sequence begins with a copy.

    Copies share the states of a lexer, whose number grows with the generated text, up to MAX_LEXER_STATES. A sequence
    that needs more continues with a lexer of its own.

    num_bytes  memory in bytes, as measured in a trial; 0 without a trial
    tenant     tenant of the request
    """

    def __init__(self, vocabulary: LLTokenizer, source: str, num_bytes: int = 0, tenant: str = "") -> None:
        self._vocabulary, self._source = vocabulary, source
        self._beginning = self.compiled()
        self.num_bytes, self.tenant = num_bytes, tenant

    @property
    def error(self) -> str:
        """The error that llguidance reports; "" if none."""
        return self._beginning.get_error() if self._beginning.is_error() else ""

    def begin(self) -> LLMatcher:
        """A copy for a sequence."""
        return self._beginning.deep_copy()

    def compiled(self) -> LLMatcher:
        """Compiles the grammar again, with a lexer that is not shared."""
        from llguidance import LLMatcher, LLParserLimits

        return LLMatcher(self._vocabulary, self._source, log_level=0, limits=LLParserLimits(**LIMITS))


class GrammarGuide:
    """Proposes the tokens that a grammar forces, and allows the tokens that it permits. See Guide.

    The state follows the sequence's tokens, wherever they were generated: it proposes again after a preemption, and
    starts from the existing tokens on another engine.
    """

    def __init__(self, grammar: CompiledGrammar, masks: MaskExecutor, ends: Allowed, num_prompt: int) -> None:
        """ends: tokens that end a complete text. num_prompt: number of prompt tokens."""
        self._grammar, self._masks, self._end_tokens = grammar, masks, ends
        self._matcher: LLMatcher | None = None  # copied when the first token is near
        self._num_prompt = num_prompt
        self._num_seen = num_prompt  # tokens of the prompt, and tokens that the matcher has consumed
        self._ahead: list[int] = []  # consumed tokens that the sequence does not have yet
        self._forced: list[int] = []  # known forced tokens after those of the sequence
        self._is_complete = False
        self._pending: PendingMask | None = None
        self._renewed_at: int | None = None  # number of generated tokens when the lexer was renewed

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
        """The matcher in the state after the sequence's tokens."""
        if self._matcher is None:
            self._matcher = self._grammar.begin()
        new, ahead, self._ahead = token_ids[self._num_seen :], self._ahead, []
        self._num_seen += len(new)
        self._forced = self._forced[len(new) :] if self._forced[: len(new)] == new else []
        if new[: len(ahead)] == ahead:
            new = new[len(ahead) :]
        else:  # the sequence lacks consumed tokens
            self._is_complete = False
            if not self._matcher.rollback(len(ahead)):  # some grammars cannot be rolled back
                begin = self._grammar.begin if self._renewed_at is None else self._grammar.compiled
                self._matcher, new = begin(), token_ids[self._num_prompt :]
        if new and not self._is_complete:
            _consume(self._matcher, new)
        return self._matcher

    def _renewed(self, token_ids: list[int], num_tokens: int, drafts: list[int]) -> LLMatcher | None:
        """A matcher in the same state with a lexer of its own; None if the last renewal was too recent. Called by a
        thread that computes a mask, while the engine waits for it.
        """
        given = [*token_ids[self._num_prompt : num_tokens], *drafts]
        if self._renewed_at is not None and len(given) < self._renewed_at + RENEWAL_TOKENS:
            return None
        self._renewed_at = len(given)
        matcher = self._matcher = self._grammar.compiled()
        _consume(matcher, given)
        return matcher

    def _ends(self, matcher: LLMatcher) -> bool:
        """Whether the text is complete and only an end may follow. True also for a matcher with an error."""
        if not self._is_complete and matcher.is_stopped() and not matcher.is_error():
            self._is_complete = True
        return self._is_complete


def _consume(matcher: LLMatcher, tokens: list[int]) -> None:
    for place in range(0, len(tokens), _REPLAYED):
        matcher.consume_tokens(tokens[place : place + _REPLAYED])
