"""Measures a model's quality through the cache: perplexity and retrieval, codec by codec."""

from __future__ import annotations

from quire.evaluation.perplexity import Perplexity, perplexity
from quire.evaluation.retrieval import Retrieval, retrieval

__all__ = ["Perplexity", "Retrieval", "perplexity", "retrieval"]
