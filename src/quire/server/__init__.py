"""The OpenAI-compatible HTTP server.

Knows HTTP, JSON and the names of OpenAI's API; knows nothing of pages, steps or tensors. Every engine that has the
methods of `server.protocol.Engine` can be served. Needs the `serve` extra (FastAPI, uvicorn, pydantic,
prometheus-client).
"""
