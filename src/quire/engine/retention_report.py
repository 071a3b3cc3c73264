"""A report of the tokens that the heads keep of one prompt, to print, draw or save. Knows arrays; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.retention.decisions import RetentionDecision


@dataclass(frozen=True)
class RetentionReport:
    """The tokens that each head keeps of a prompt, and why.

    num_tokens  tokens of the prompt
    members     the chain, in order; policy p keeps members 0 to p, policy len(members) keeps all tokens
    threshold   T: the share of its attention that a head must recover
    frequent    tokens that this member keeps, as a share of the current length
    local       tokens that this member keeps, as a share of the prompt's length
    policies    uint8 [L, H]: policy of each head
    kept        int64 [L, H]: number of kept tokens
    recovery    float64 [L, H, len(members) + 1]: recovery of every policy, nan if it was not tried
    bytes_full  bytes of the prompt's keys and values without retention, as the allocator counts them
    bytes_kept  the same with retention
    budget      the budget of the decision, as a share of the bytes; None: the threshold decided

    H are kv heads.
    """

    num_tokens: int
    members: tuple[str, ...]
    threshold: float
    frequent: float
    local: float
    policies: NDArray[np.uint8]
    kept: NDArray[np.int64]
    recovery: NDArray[np.float64]
    bytes_full: int
    bytes_kept: int
    budget: float | None = None

    def __post_init__(self) -> None:
        heads = self.policies.shape
        assert self.kept.shape == heads and self.recovery.shape == (*heads, len(self.members) + 1), (
            f"policies of {heads} heads, kept of {self.kept.shape}, recovery of {self.recovery.shape}"
        )

    @property
    def kept_fraction(self) -> float:
        """Kept tokens / prompt tokens, over all heads."""
        return float(self.kept.sum() / (self.num_tokens * self.kept.size))

    @property
    def policy_names(self) -> tuple[str, ...]:
        """A name for each policy: the member that it adds to the previous policy; the last policy is `full`."""
        if self.budget is not None:
            return ("ranked", "full")
        return (*self.members[:1], *(f"+ {member}" for member in self.members[1:]), "full")

    @property
    def num_heads(self) -> NDArray[np.int64]:
        """Heads of all layers that have each policy, int64 [len(members) + 1]."""
        return np.bincount(self.policies.ravel(), minlength=len(self.members) + 1).astype(np.int64)

    @property
    def num_tried(self) -> NDArray[np.int64]:
        """Heads for which each policy was tried, int64 [len(members) + 1]."""
        tried: NDArray[np.int64] = (~np.isnan(self.recovery)).sum((0, 1), dtype=np.int64)
        return tried

    @property
    def mean_recovery(self) -> NDArray[np.float64]:
        """Mean over the heads for which each policy was tried, float64 [len(members) + 1]; nan if there are none."""
        tried = self.num_tried
        return np.where(tried > 0, np.nansum(self.recovery, (0, 1)) / np.maximum(tried, 1), np.nan)


def report_of(decided: RetentionDecision, bytes_full: int, bytes_kept: int) -> RetentionReport:
    """The report of a decision, with the bytes of the prompt's pages before and after it."""
    chain = decided.chain
    return RetentionReport(
        decided.kept.shape[-1],
        chain.members,
        chain.threshold,
        chain.frequent,
        chain.local,
        decided.policies,
        decided.kept.sum(-1),
        decided.recovery,
        bytes_full,
        bytes_kept,
        decided.budget,
    )


def summary_of(decided: RetentionDecision) -> str:
    """A decision in one line."""
    chain = decided.chain
    kept = f"keeps {decided.kept_fraction:.1%} of a prompt of {decided.kept.shape[-1]} tokens"
    if decided.budget is not None:
        shares = decided.kept.mean(-1)
        return f"{kept}; heads from {shares.min():.1%} to {shares.max():.1%}"
    counts = np.bincount(decided.policies.reshape(-1), minlength=chain.full + 1)
    heads = ", ".join(
        f"{count} {name}" for count, name in zip(counts.tolist(), (*chain.members, "full"), strict=True) if count
    )
    return f"{kept}; heads up to: {heads}"


def as_json(report: RetentionReport) -> dict[str, Any]:
    """A report as JSON values: lists of layers of heads, policies by number, null if a policy was not tried."""
    return {
        "num_tokens": report.num_tokens,
        "budget": report.budget,
        "threshold": report.threshold if report.budget is None else None,
        "frequent": report.frequent if report.budget is None else None,
        "local": report.local if report.budget is None else None,
        "policy_names": list(report.policy_names),
        "policies": report.policies.tolist(),
        "kept": report.kept.tolist(),
        "kept_fraction": report.kept_fraction,
        "recovery": _without_nan(report.recovery.tolist()),
        "mean_recovery": _without_nan(report.mean_recovery.tolist()),
        "bytes_full": report.bytes_full,
        "bytes_kept": report.bytes_kept,
    }


def _without_nan(values: Any) -> Any:
    """Lists of numbers, however deep, with None for nan."""
    if isinstance(values, list):
        return [_without_nan(value) for value in values]
    return None if np.isnan(values) else values
