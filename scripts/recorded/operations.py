"""Requests for operators: health, models, version, metrics, the document, clusters, and wrong URLs and methods."""

from __future__ import annotations

from recorded.cases import Request, get, post


def health() -> list[Request]:
    """All routes of health."""
    paths = ("/health", "/health/live", "/health/ready")
    return [
        get(f"operations{path}{'' if method == 'GET' else '-head'}", path, method)
        for path in paths
        for method in ("GET", "HEAD")
    ]


def models(name: str) -> list[Request]:
    """What is served. name: of the model."""
    return [
        get("operations/models", "/v1/models"),
        get("operations/model", f"/v1/models/{name}"),
        get("operations/model-unknown", "/v1/models/other"),
        get("operations/version", "/version"),
    ]


def metrics() -> list[Request]:
    """Names of metrics."""
    return [get("operations/metrics", "/metrics")]


def document() -> list[Request]:
    """The OpenAPI document."""
    return [get("operations/openapi", "/openapi.json")]


def wrong() -> list[Request]:
    """Unknown URLs, wrong methods, and what is only for clusters."""
    found = [
        get("operations/unknown-url", "/v1/nothing"),
        get("operations/root", "/"),
        get("operations/trailing-slash", "/v1/models/"),
        post("operations/unknown-post", "/v1/completion", {}),
        get("operations/chat-by-get", "/v1/chat/completions"),
        get("operations/completions-by-put", "/v1/completions", "PUT"),
        get("operations/prefixes-by-patch", "/v1/cache/prefixes", "PATCH"),
        get("operations/models-by-delete", "/v1/models", "DELETE"),
        post("operations/health-by-post", "/health", {}),
        get("operations/no-cluster", "/v1/cluster"),
    ]
    bodies = {"drain": {"instance": "prefill-0"}, "restart": {}, "role": {"instance": "decode-0", "role": "mixed"}}
    return found + [post(f"operations/no-cluster-{name}", f"/v1/cluster/{name}", body) for name, body in bodies.items()]


def identified() -> list[Request]:
    """Ids of requests, which an answer gives back."""
    return [
        get("operations/request-id", "/version", X_Request_Id="my-request-1"),
        get("operations/request-id-too-long", "/version", X_Request_Id="x" * 200),
        get("operations/request-id-of-an-error", "/v1/nothing", X_Request_Id="my-request-2"),
    ]
