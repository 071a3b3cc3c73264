"""Requests to a server with API keys: who is let in, and what each key sees."""

from __future__ import annotations

from dataclasses import replace

from recorded.cases import JSON_HEADERS, Request, get, post, words
from recorded.chats import GREEDY as CHAT
from recorded.completions import GREEDY, PATH

KEYS = ("first-key", "second-key")
PINNED = words(30, 30)


def bearer(request: Request, key: str) -> Request:
    """A request with a key."""
    return replace(request, headers={**request.headers, "Authorization": f"Bearer {key}"})


def let_in() -> list[Request]:
    """Keys in all forms, and none."""
    found = []
    for name, headers in {
        "none": {},
        "wrong": {"Authorization": "Bearer wrong"},
        "basic": {"Authorization": "Basic Zmlyc3Qta2V5"},
        "empty": {"Authorization": "Bearer "},
        "bearer": {"Authorization": f"Bearer {KEYS[0]}"},
        "lower-case": {"authorization": f"bearer {KEYS[1]}"},
        "x-api-key": {"X-Api-Key": KEYS[0]},
        "x-api-key-wrong": {"X-Api-Key": "wrong"},
    }.items():
        found.append(Request(f"keys/models-{name}", "/v1/models", method="GET", headers=headers))
    paths = ("/health", "/health/ready", "/metrics", "/openapi.json", "/version", "/debug/cache", "/v1/nothing")
    found += [get(f"keys/no-key{path}", path) for path in paths]
    found.append(post("keys/no-key-chat", "/v1/chat/completions", CHAT))
    found.append(Request("keys/no-key-no-json", PATH, b"{", headers=JSON_HEADERS))
    found.append(bearer(get("keys/any-host", "/version", Host="example.org"), KEYS[0]))
    return found


def apart() -> list[Request]:
    """Each key has prefixes of its own. Pinned ones are there from the start."""
    text = GREEDY | {"prompt": words(40, 31), "max_tokens": 2}
    pinned = GREEDY | {"prompt": PINNED + " And", "max_tokens": 2}
    first, second = KEYS
    asked = [
        (first, "first", post("keys/cold", PATH, text)),
        (first, "first", post("keys/warm", PATH, text)),
        (second, "second", post("keys/other", PATH, text)),
        (second, "second", post("keys/other-warm", PATH, text)),
        (first, "first", post("keys/salted", PATH, text | {"cache_salt": "s"})),
        (first, "first", post("keys/pinned", PATH, pinned)),
        (second, "second", post("keys/pinned", PATH, pinned)),
        (first, "first", post("keys/warm-prefix", "/v1/cache/prefixes", {"prompt": words(40, 32)})),
        (first, "first", get("keys/prefixes", "/v1/cache/prefixes")),
        (second, "second", get("keys/prefixes", "/v1/cache/prefixes")),
        (
            second,
            "second",
            replace(post("keys/drop", "/v1/cache/prefixes", {"prompt": words(40, 32)}), method="DELETE"),
        ),
        (first, "first", get("keys/debug", "/debug/cache")),
        (second, "second", get("keys/debug", "/debug/cache")),
        (first, "first", post("keys/longest", PATH, text | {"max_tokens": 33})),
        (first, "first", post("keys/usual-length", "/v1/chat/completions", CHAT | {"max_tokens": None})),
        (first, "first", get("keys/openapi", "/openapi.json")),
        (first, "first", get("keys/metrics", "/metrics")),
    ]
    return [replace(bearer(request, key), name=f"{request.name}-{who}") for key, who, request in asked]


def from_pages() -> list[Request]:
    """What scripts of web pages ask."""
    origin, other = "https://example.org", "https://example.com"
    asks = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type"}
    return [
        get("keys/cors-asked", PATH, "OPTIONS", Origin=origin, **asks),
        get("keys/cors-asked-by-others", PATH, "OPTIONS", Origin=other, **asks),
        bearer(get("keys/cors", "/version", Origin=origin), KEYS[0]),
        bearer(get("keys/cors-of-others", "/version", Origin=other), KEYS[0]),
    ]
