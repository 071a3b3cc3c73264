"""Requests for /v1/cache/prefixes and /debug/cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recorded.cases import Body, Request, get, post, user, variants, words

PATH = "/v1/cache/prefixes"
TEXT = words(160, 20)


def requests() -> list[Request]:
    """Prefixes are warmed, listed, shown and dropped."""
    base = {"prompt": TEXT}
    warmed: dict[str, dict[str, Any]] = {
        "text": {},
        "again": {},
        "longer": {"prompt": TEXT + " " + words(80, 21)},
        "token-ids": {"prompt": list(range(40, 200))},
        "messages": {"prompt": None, "messages": [user(TEXT)]},
        "messages-opened": {"prompt": None, "messages": [user(TEXT)], "add_generation_prompt": True},
        "pinned": {"prompt": words(160, 22), "cache_pin": True},
        "beside-a-pin": {"prompt": words(160, 22)[:400] + " " + words(80, 25)},
        "pinned-for-seconds": {"prompt": words(160, 23), "cache_pin": 3600, "cache_priority": 3},
        "salted": {"cache_salt": "s"},
        "too-short": {"prompt": "Hi."},
        "both": {"messages": [user("a")]},
        "neither": {"prompt": None},
        "wrong-pin": {"cache_pin": -1},
        "wrong-tier": {"cache_pin": {"tier": "disk"}},
        "unknown-field": {"temperature": 0},
    }
    key = "prefixes/warm/text"

    return [
        *variants("prefixes/warm", PATH, base, warmed),
        get("prefixes/list", PATH),
        get("prefixes/list-2", f"{PATH}?limit=2"),
        get("prefixes/list-0", f"{PATH}?limit=0"),
        get("prefixes/list-unknown", f"{PATH}?salt=s"),
        get("prefixes/show", lambda answers: f"{PATH}/{answers[key]['key']}"),
        get("prefixes/show-unknown", f"{PATH}/{'0' * 32}"),
        get("prefixes/show-wrong", f"{PATH}/nonsense"),
        _drop("prefixes/drop/key", lambda answers: {"key": answers[key]["key"]}),
        _drop("prefixes/drop/key-again", lambda answers: {"key": answers[key]["key"]}),
        _drop("prefixes/drop/prompt", {"prompt": words(160, 22)}),
        _drop("prefixes/drop/salted", {"prompt": TEXT, "cache_salt": "s"}),
        _drop("prefixes/drop/another-salt", {"prompt": TEXT, "cache_salt": "t"}),
        _drop("prefixes/drop/nothing", {}),
        get("prefixes/list-at-last", PATH),
        get("debug/cache", "/debug/cache"),
        get("debug/cache-1", "/debug/cache?limit=1"),
        get("debug/cache-wrong", "/debug/cache?limit=many"),
    ]


def _drop(name: str, body: Body) -> Request:
    return replace(post(name, PATH, body), method="DELETE")


def _list(name: str, on_disk: bool) -> Request:
    """What there is, once all of it is on the disk, too."""
    return replace(get(name, PATH), until=_is_written if on_disk else None)


def _is_written(body: Any) -> bool:
    return all("disk" in each["tiers"] for each in body["data"])


def short(*, on_disk: bool = False) -> list[Request]:
    """A few requests for any server. on_disk: whether it has a disk, to which it writes in the background."""
    return [
        *variants("prefixes/warm", PATH, {"prompt": TEXT}, {"text": {}, "again": {}}),
        _list("prefixes/list", on_disk),
        _drop("prefixes/drop/prompt", {"prompt": TEXT}),
        _list("prefixes/list-at-last", on_disk),
        get("debug/cache", "/debug/cache"),
    ]


def pinned_on_disk() -> list[Request]:
    """Pins on the disk."""
    pinned = {"prompt": words(160, 24), "cache_pin": {"tier": "disk", "seconds": 3600}}
    return [post("prefixes/warm/pinned-on-disk", PATH, pinned)]
