"""What a JSON text holds is counted before it is parsed."""

import json
import random

import pytest

from quire.server import json_complexity
from quire.server.errors import ApiError
from quire.server.json_complexity import check_complexity
from tests.effort import tries

pytestmark = pytest.mark.anyio

SHAPES = {
    "values": (b"1", json_complexity.MAX_VALUES),
    "arrays": (b"[]", json_complexity.MAX_CONTAINERS - 1),
    "objects": (b"{}", json_complexity.MAX_CONTAINERS - 1),
    "names": (b'{"a":1,"b":1}', json_complexity.MAX_NAMES // 2),
    "strings": (b'"a"', json_complexity.MAX_STRINGS),
}


@pytest.mark.parametrize("what", SHAPES)
def test_what_a_body_may_hold_is_counted_exactly(what):
    item, most = SHAPES[what]
    check_complexity(b"[" + b",".join([item] * most) + b"]")
    with pytest.raises(ApiError, match="body has more than") as refusal:
        check_complexity(b"[" + b",".join([item] * (most + 1)) + b"]")
    assert refusal.value.status == 400 and refusal.value.code == "body_too_complex"


def test_levels_are_counted_over_slices():
    check_complexity(b"[" * 200 + b"]" * 200)
    check_complexity(b"[[], " * 199 + b" " * 200_000 + b"[]" + b"]" * 199)
    with pytest.raises(ApiError, match="200 levels"):
        check_complexity(b"[" * 150 + b" " * 200_000 + b"[" * 51)


def test_what_stands_in_strings_is_not_counted():
    for text in (b",:[]{}", b'\\"', b"\\\\", b'\\\\\\",[', b"\\u005b[", "ä🌍,".encode()):
        check_complexity(b'{"prompt":"' + text * (4_000_000 // len(text)) + b'"}')


def test_counting_agrees_with_the_parser_however_slices_fall(seed, monkeypatch):
    draw = random.Random(seed)

    def value(depth):
        match draw.randrange(6 if depth else 4):
            case 0:
                return draw.randrange(100)
            case 1 | 2:
                return "".join(draw.choice('ab"\\,:[]{}é\n') for _ in range(draw.randrange(12)))
            case 3:
                return None
            case 4:
                return [value(depth - 1) for _ in range(draw.randrange(4))]
        return {f'{each}"\\[': value(depth - 1) for each in range(draw.randrange(4))}

    def count(found, level=0):
        """values between commas and one, strings, names, containers, depth"""
        if isinstance(found, str):
            return 0, 1, 0, 0, level
        if not isinstance(found, list | dict):
            return 0, 0, 0, 0, level
        items = list(found.values()) if isinstance(found, dict) else found
        inner = [count(each, level + 1) for each in items]
        names = len(found) if isinstance(found, dict) else 0
        totals = [sum(each[place] for each in inner) for place in range(4)]
        commas = totals[0] + max(0, len(items) - 1)
        return commas, totals[1] + names, totals[2] + names, totals[3] + 1, max([level + 1, *(e[4] for e in inner)])

    for _ in range(tries(200)):
        found = value(5)
        text = json.dumps(found, ensure_ascii=draw.random() < 0.5).encode()
        monkeypatch.setattr(json_complexity, "SLICE", draw.randrange(2, 20))
        commas, strings, names, containers, depth = count(found)
        for limit, exact in (
            ("MAX_VALUES", commas + 1),
            ("MAX_STRINGS", strings),
            ("MAX_NAMES", names),
            ("MAX_CONTAINERS", containers),
            ("MAX_DEPTH", depth),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(json_complexity, limit, exact)
                check_complexity(text)
                if exact:
                    patch.setattr(json_complexity, limit, exact - 1)
                    with pytest.raises(ApiError):
                        check_complexity(text)


BROKEN = [
    b'"' * 100_000,
    b"\\" * 100_000,
    b'"\\' * 50_000,
    b"]" * 100_000,
    bytes(range(256)) * 400,
    b'"' + b"\\" * 65535,
]


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_what_is_no_json_is_counted_without_an_error_of_ours(text):
    try:
        check_complexity(text)
    except ApiError as error:
        assert error.status == 400
