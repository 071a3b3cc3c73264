"""Requests that cost a server more than their sender, generated for every route and every field of the application.

A new endpoint is included as soon as it is a route with a request body of our schema modules.
"""

import re

from hypothesis import strategies as st

from quire.server import chat_schema, cluster_schema, embeddings_schema, prefix_schema, responses_schema, schema
from tests.server.fake_engine import FakeEngine
from tests.server.harness import application

SCHEMAS = (schema, chat_schema, prefix_schema, cluster_schema, responses_schema, embeddings_schema)


def routes():
    """(method, path) of everything the application answers; HEAD is GET whose answer lacks the body."""
    found = []
    for route in application(FakeEngine()).routes:
        path = re.sub(r"\{[^}]*\}", "x", route.path)
        found += [(method, path) for method in sorted(route.methods - {"HEAD"})]
    return found


def endpoints():
    """By path, the class of the body of each endpoint that takes one."""
    found = {}
    for path, methods in application(FakeEngine()).openapi()["paths"].items():
        if "requestBody" in methods.get("post", {}):
            name = methods["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            found[path] = next(getattr(each, name) for each in SCHEMAS if hasattr(each, name))
    return found


# --- bodies: values as JSON text, because no library writes some of them ----------------------------------------------

SIZES = st.sampled_from([1000, 20_000, 70_000, 200_000])
"""Items or bytes: parsed on the event loop, on a thread, and beyond some bounds of structure."""

DEEP = st.tuples(SIZES, st.sampled_from([("[", "]"), ('{"a":', "}"), ('[{"a":', "}]"), ("[", "")])).map(
    lambda drawn: drawn[1][0] * (drawn[0] // 10) + "1" + drawn[1][1] * (drawn[0] // 10)
)
WIDE = st.tuples(
    SIZES,
    st.sampled_from(["1", "null", '""', '"a"', "[]", "{}", '{"a":1}', "[1,2]", "-0.5", "[[]]", '{"role":"user"}']),
).map(lambda drawn: "[" + ",".join([drawn[1]] * drawn[0]) + "]")
NAMES = st.tuples(SIZES, st.sampled_from(["1", '"a"', "{}", "null"])).map(
    lambda drawn: "{" + ",".join(f'"{each}":{drawn[1]}' for each in range(drawn[0])) + "}"
)
LONG = st.tuples(
    SIZES, st.sampled_from(["a", " ", "\\n", '\\"', "\\\\", "\\u0000", "é", "🌍", "{{", "[],", "a b "])
).map(lambda drawn: '"' + drawn[1] * drawn[0] + '"')
GIANT = st.sampled_from(
    [
        "1e400",
        "-1e400",
        "1e-400",
        "9" * 4000,
        "9" * 5000,
        "-" + "9" * 5000,
        "0." + "1" * 100_000,
        "1" * 200_000,
        "1E+99999",
    ]
)
BOMB = DEEP | WIDE | NAMES | LONG | GIANT

SANE = {
    "prompt": '"a"', "messages": '[{"role":"user","content":"a"}]', "tokens": "[1]", "input": '"a"', "query": '"a"',
    "documents": '["a"]', "text_1": '"a"', "text_2": '"a"',
}  # fmt: skip
"""What endpoints need besides the bomb."""


def bombs(found):
    """(path, body) with a bomb in one field, as a name, instead of the body, or within a message."""

    def body(path, place, bomb):
        fields = found[path].model_fields
        given = {name: SANE[name] for name in SANE if name in fields and fields[name].is_required()}
        if place == "whole":
            return path, bomb
        if place == "names":
            inner = bomb[1:-1] if bomb.startswith("{") else '"' + "n" * len(bomb) + '":1'
            return path, "{" + ",".join([*(f'"{name}":{value}' for name, value in given.items()), inner]) + "}"
        if place == "message":
            bomb = f'[{{"role":"user","content":{bomb}}}]'
            place = "messages" if "messages" in fields else "prompt"
        given[place] = bomb
        return path, "{" + ",".join(f'"{name}":{value}' for name, value in given.items()) + "}"

    def of_path(path):
        places = ["whole", "names", "message", *found[path].model_fields]
        return st.tuples(st.just(path), st.sampled_from(places), BOMB)

    return st.sampled_from(sorted(found)).flatmap(of_path).map(lambda drawn: body(*drawn))


# --- heads ------------------------------------------------------------------------------------------------------------

KIB = 1024
LINE = "a: b\r\n"
HEAD_BOMBS = {
    "a url": lambda method, path: f"{method} {path}?{'a' * 40 * KIB} HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a header": lambda method, path: f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nX: {'a' * 40 * KIB}\r\n\r\n",
    "headers": lambda method, path: f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{LINE * 8 * KIB}\r\n",
    "a key": lambda method, path: (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {'k' * 40 * KIB}\r\n\r\n"
    ),
    "an unended head": lambda method, path: f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nX: {'a' * 40 * KIB}",
    "trailers": lambda method, path: (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n{LINE * 8 * KIB}"
    ),
    "a chunk extension": lambda method, path: (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1;{'a' * 40 * KIB}"
    ),
}
"""Heads of more than 32 KiB, by what is long in them."""

SLOW = {
    "no line": lambda method, path: f"{method} {path}",
    "no end of the head": lambda method, path: f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n",
    "no body": lambda method, path: f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: 9\r\n\r\n",
    "half a body": lambda method, path: (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: 9\r\n\r\n{{"
    ),
    "half a chunk": lambda method, path: (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n9\r\n{{"
    ),
}
"""Requests whose clients stop."""

JSON = "Content-Type: application/json\r\n"
