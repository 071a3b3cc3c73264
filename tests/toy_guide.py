"""A drafter for tests: it knows the sequence's continuation, and proposes that, something else, or a mixture."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.structured.guide import GuideProposal

if TYPE_CHECKING:
    from quire.structured.guide import Allowed


@dataclass
class ToyGuide:
    """Proposes up to four drafts, of which the first few are right.

    answer      the sequence's tokens, prompt included, as it would get them by itself
    allowed     sets of tokens: those that may come anywhere; None: all may
    vocabulary  other tokens are drawn from so many
    exact       whether the sequence gets exactly these; else it may go its own way, and no draft is right from there
    """

    answer: list[int]
    rng: random.Random
    vocabulary: int = 256
    allowed: NDArray[np.uint32] | None = None
    exact: bool = True
    proposed: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    def propose(self, token_ids: list[int], most: int) -> GuideProposal:
        """See Guide."""
        is_known = self.answer[: len(token_ids)] == token_ids
        assert is_known or not self.exact, "a refused draft was left among the tokens"
        following = self.answer[len(token_ids) :]
        count = min(most, self.rng.randrange(5), len(following))
        right = self.rng.choice([0, count // 2, count]) if is_known else 0
        drafts = following[:count]
        for place in range(right, count):
            drafts[place] = (drafts[place] + 1 + self.rng.randrange(self.vocabulary - 1)) % self.vocabulary
        self.proposed.append(count)
        self.right.append(right)
        return GuideProposal(drafts, [] if self.allowed is None else [self._allows] * (count + 1))

    def _allows(self) -> NDArray[np.uint32]:
        assert self.allowed is not None
        return self.allowed


def bits(tokens: set[int], vocabulary: int) -> NDArray[np.uint32]:
    """A set of tokens as `Slice.allowed`."""
    found = np.zeros(-(-vocabulary // 32), np.uint32)
    for token in tokens:
        found[token // 32] |= np.uint32(1 << token % 32)
    return found


def members(allowed: Allowed | None) -> list[int]:
    """The tokens of what a guide allows."""
    assert allowed is not None
    if isinstance(allowed, int):
        return [allowed]
    return np.unpackbits(allowed().view(np.uint8), bitorder="little").nonzero()[0].tolist()
