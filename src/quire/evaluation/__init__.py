"""How good a model's answers are through the cache they are given from: perplexity and retrieval, codec by codec."""

from __future__ import annotations

from quire.evaluation.perplexity import Perplexity, perplexity
from quire.evaluation.retrieval import Retrieval, retrieval

__all__ = ["Perplexity", "Retrieval", "perplexity", "retrieval"]
