"""The engines that the server serves: one in this process, or a cluster. The tests' fake engine has the same methods.

Imports both only for types: the process loads only the one that it serves.
"""

from __future__ import annotations

from quire.async_llm import AsyncLLM
from quire.cluster.cluster import Cluster

ServedEngine = AsyncLLM | Cluster
"""Runs in an event loop. Closing a stream of `generate`, or cancelling the task that waits for it, aborts the request
and frees its cache within one step.
"""
