"""The OpenAI-compatible HTTP server.

Knows HTTP, JSON and the names of OpenAI's API; knows nothing of pages, steps or tensors. It serves the
engines of `server.engines`. Needs the `serve` extra (FastAPI, uvicorn, pydantic, prometheus-client).
"""
