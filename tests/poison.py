"""Poison: bytes that no page holds become NaN in every format, so that reading them cannot pass."""

from quire.cluster.faults import poison_free

__all__ = ["poison_free"]
