"""The interface between engine and guide, used before each step of a sequence: drafts, and the allowed tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire.structured.masks import TokenBitmask

    Mask = Callable[[], TokenBitmask]
    """Returns a set of tokens, uint32 [ceil(vocabulary / 32)]: bit t of word w allows token 32 * w + t. Computes the
    set or waits for it. Raises QuireError if it cannot be computed."""
    Allowed = int | Mask
    """The only allowed next token, or the set of allowed ones. If only one is allowed, no logits are computed unless
    something else needs them."""


class GuideProposal(NamedTuple):
    """A guide's proposal for a sequence.

    drafts   tokens that are likely to follow, at most the requested number
    allowed  sets as in `Slice.allowed`: for the next token, then for the token after each draft; empty: every token is
             allowed
    """

    drafts: list[int]
    allowed: list[Allowed | None]


class Guide(Protocol):
    """Proposes tokens before each step of one sequence: a drafter, a grammar, or both."""

    def propose(self, token_ids: list[int], most: int) -> GuideProposal:
        """The proposal after all tokens so far, with at most `most` drafts."""
        ...
