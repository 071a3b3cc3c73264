"""The OpenAI-compatible HTTP server.

Knows HTTP, JSON and the names of OpenAI's API; knows nothing of pages, steps or tensors. It can serve every engine with
the methods of `server.protocol.Engine`. Needs the `serve` extra (FastAPI, uvicorn, pydantic, prometheus-client).
"""
