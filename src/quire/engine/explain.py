"""Explains to people how much of a prompt was found in the prefix tree."""

from __future__ import annotations

import numpy as np

from quire.cache.holder import Holder
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.manager import CacheManager


def explain(manager: CacheManager, holder: Holder) -> str:
    """Explains in one sentence how much of a sequence's prompt is cached, and why not more."""
    tree = manager.tree
    if not tree.shares:
        return "cache.share is off"
    if not holder.reads_cache:
        return "log-probabilities of the prompt are wanted, so all of it is computed"
    keys, tokens, limits = holder.keys, holder.token_ids, manager.retention.limits(holder)
    matches = tree.walk(keys, limits.num_reusable), limits.find(tree, keys)
    known, reusable = (sum(count for _, count in found) for found in matches)
    if known > reusable:
        return (
            f"{known * PAGE_TOKENS} tokens of it are cached, and their attention is known up to token"
            f" {reusable * PAGE_TOKENS}: retention needs both"
        )
    limit = (len(tokens) - 1) // PAGE_TOKENS
    if limit < 1:
        return f"of {len(tokens)} tokens no whole chunk of {PAGE_TOKENS} lies before the last one, which is computed"
    found = list(tree.walk(keys, limit))
    num_chunks = sum(count for _, count in found)
    at = num_chunks * PAGE_TOKENS
    if num_chunks == limit:
        return "everything but its last tokens, which are always computed"
    if found:
        last, count = found[-1]
        after = (child.tokens for child in last.children.values())
        candidates = [last.tokens[count * PAGE_TOKENS :]] if count < len(last.chunks) else list(after)
    else:
        candidates = [each.tokens for each in tree.segments() if each.start == 0 and each.namespace == keys.namespace]
        if not candidates:
            return "nothing is cached with its salt"
    if not candidates:
        return f"no cached prompt goes on after token {at}"
    wanted = np.array(tokens[at : at + PAGE_TOKENS], np.int32)
    same = max(num_same_tokens(candidate[:PAGE_TOKENS], wanted) for candidate in candidates)
    if at + same == 0:
        return "no cached prompt begins with its first token"
    return (
        f"the nearest cached prompt differs from it at token {at + same};"
        f" chunks are shared whole, so it is computed from token {at} on"
    )


def num_same_tokens(left: np.ndarray, right: np.ndarray) -> int:
    """Number of leading tokens that two chunks have in common."""
    differ = left != right
    return int(differ.argmax()) if differ.any() else len(left)
