"""Expressions of JSON Schema are read as ECMA-262 reads them, or refused by name."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Iterable

import pytest

from quire.structured import ecma_regex

from ..schema_texts import allows, refusal, walked

TEXTS = [
    *'abA5_ \t\n\r\x0c\u2028\x85\xa0\ufeff\xe9\u03a9\u0663\U0001f600-+,&[]~!^\\\x08\u4e00#',
    'ab', '\xe9\xf6', '[]', 'a]', ':]', '~]', '{a}', 'a{b', '/-@ #', '12-3', 'aabc', 'aab', 'bd', 'abd', 'abdd',
     'xa', 'xab', 'cab', 'AB\U0001f600', 'w.-', '\u042f1', '\u042f\u042f', '\t\n\r\x0c', 'axb', 'a\nb',
     '^$.*+?()[]{}|\\', '#a b', '2024-05', 'x@y.z', 'x@ y', '',
]  # fmt: skip

MATCHES: list[tuple[str, Iterable[str]]] = [
    (r"^.$", 'abA5_ \t\x0c\x85\xa0\ufeff\xe9\u03a9\u0663\U0001f600-+,&[]~!^\\\x08\u4e00#'),
    (r"^\s$", ' \t\n\r\x0c\u2028\xa0\ufeff'),
    (r"^\S$", 'abA5_\x85\xe9\u03a9\u0663\U0001f600-+,&[]~!^\\\x08\u4e00#'),
    (r"^\d$", '5'),
    (r"^\w$", 'abA5_'),
    (r"^\W$", ' \t\n\r\x0c\u2028\x85\xa0\ufeff\xe9\u03a9\u0663\U0001f600-+,&[]~!^\\\x08\u4e00#'),
    (r"^[^\d]$", 'abA_ \t\n\r\x0c\u2028\x85\xa0\ufeff\xe9\u03a9\u0663\U0001f600-+,&[]~!^\\\x08\u4e00#'),
    (r"^[[:alpha:]]$", ['[]', 'a]', ':]']),
    (r"^[a&&b]$", 'ab&'),
    (r"^[+--]$", '-+,'),
    (r"^[!~~]$", '~!'),
    (r"^[\w-.]+$", ['a', 'b', 'ab', 'A', '5', '_', '-', '12-3', 'aabc', 'aab', 'bd', 'abd', 'abdd', 'xa', 'xab',
     'cab', 'w.-', 'axb', '2024-05']),
    (r"^[a\-z]$", 'a-'),
    (r"^[-a]$", 'a-'),
    (r"^[a-]$", 'a-'),
    (r"^[^]$", 'abA5_ \t\n\r\x0c\u2028\x85\xa0\ufeff\xe9\u03a9\u0663\U0001f600-+,&[]~!^\\\x08\u4e00#'),
    (r"^\x41\u0042\u{1f600}$", ['AB\U0001f600']),
    (r"^\ud83d\ude00$", '\U0001f600'),
    (r"^[\ud83d\ude00-\ud83d\ude02]$", '\U0001f600'),
    (r"^\cJ$", '\n'),
    (r"^\/\-\@\ \#$", ['/-@ #']),
    (r"^(?<year>\d{2})-(?<day_2>\d)$", ['12-3']),
    (r"^a{2}b{1,}c{0,1}$", ['aabc', 'aab']),
    (r"^a*?b+?c??d{1,2}?$", ['bd', 'abd', 'abdd']),
    (r"^a|b$", ['a', 'b', 'ab', 'a]', 'a{b', 'aabc', 'aab', 'abd', 'abdd', 'xab', 'cab', 'axb', 'a\nb', '#a b']),
    (r"^(a|b)$", 'ab'),
    (r"a$|^b", ['a', 'b', 'bd', 'xa']),
    (r"(^|x)a(b|$)", ['a', 'ab', 'abd', 'abdd', 'xa', 'xab']),
    (r"^^a$$", 'a'),
    (r"^{a}$", ['{a}']),
    (r"^a{b$", ['a{b']),
    (r"^a]$", ['a]']),
    (r"^\p{Lu}$", 'A\u03a9'),
    (r"^\p{Script=Greek}$", '\u03a9'),
    (r"^\p{sc=Cyrl}\P{L}$", ['\u042f1']),
    (r"^[\p{L}\d_]$", 'abA5_\xe9\u03a9\u4e00'),
    (r"^[^\p{L}\d]$", '_ \t\n\r\x0c\u2028\x85\xa0\ufeff\u0663\U0001f600-+,&[]~!^\\\x08#'),
    (r"^[\b]$", '\x08'),
    (r"^\t\n\r\f$", ['\t\n\r\x0c']),
    (r"^\u4e00$", '\u4e00'),
    (r"^é[ä-ü]$", ['\xe9\xf6']),
    (r"", TEXTS),
    (r"^$", ['']),
    (r"a.b", ['a{b', 'aabc', 'aab', 'axb', '#a b']),
    (r"^()$", ['']),
    (r"^(?:)*a$", 'a'),
    (r"^[\]\\]$", ']\\'),
    (r"^\^\$\.\*\+\?\(\)\[\]\{\}\|\\$", ['^$.*+?()[]{}|\\']),
    (r"^#a b$", ['#a b']),
    (r"^[ #]$", ' #'),
    (r"^\d{4}-\d{2}$", ['2024-05']),
    (r"^[^\s@]+@[^\s@]+$", ['x@y.z']),
]  # fmt: skip
"""What Node 20 says: with the flag u, and for expressions that it does not take with it, without."""


@pytest.mark.parametrize(("pattern", "matched"), MATCHES, ids=[each for each, _ in MATCHES])
def test_an_expression_matches_what_it_does_in_javascript(pattern: str, matched: Iterable[str]) -> None:
    schema, wanted = {"type": "string", "pattern": pattern}, set(matched)
    for text in TEXTS:
        assert allows(schema, json.dumps(text, ensure_ascii=False)) == (text in wanted), (pattern, text)


REFUSED = [
    (r"(?=a)b", "look-ahead is not supported"), (r"a(?!b)", "look-ahead"), (r"(?<=a)b", "look-behind"),
    (r"(?<!a)b", "look-behind"), (r"(?x)a", r"'\(\?x\)' begins no group"), (r"(?i:a)", r"'\(\?i:' begins no group"),
    (r"(?P<n>a)", "begins no group"), (r"(?>a)", "begins no group"), (r"(?#a)", "begins no group"),
    (r"(?<1>a)", "begins no group"), (r"\Aa\z", r"\\A is no escape"), (r"a\z", r"\\z is no escape"),
    (r"a\Z", r"\\Z is no escape"), (r"\h", r"\\h is no escape"), (r"\Qa\E", r"\\Q"), (r"[\A]", r"\\A is no escape"),
    (r"a++", r"nothing that '\+' repeats"), (r"a*+", "repeats"), (r"a{2}{3}", "repeats"), (r"*a", "repeats"),
    (r"(*a)", "repeats"), (r"a|+", "repeats"), (r"^*", "repeats"), (r"a???", "repeats"), (r"a{,3}", "no quantifier"),
    (r"a{3,2}", "out of order"), (r"[b-a]", "out of order"), (r"[a--b]", "out of order"),
    (r"[\d-\x00]x[z-a]", "out of order"), (r"(a)\1", "back-reference"), (r"(?<n>a)\k<n>", "back-references"),
    (r"\bword\b", r"word boundary \\b"), (r"a\B", r"word boundary \\B"), (r"(a", "unclosed group"),
    (r"a)", "closes no group"), (r"[a", "not closed"), (r"[a\]", "not closed"), ("a\\", "ends with a backslash"),
    (r"[]", "matches nothing"), (r"[]a]", "matches nothing"), (r"[^]a]", "two meanings"), (r"[^\s\S]", "empty"),
    (r"\x4", "hexadecimal"), (r"\u12", "hexadecimal"), (r"\u{110000}", "no code point"), (r"\u{}", "hexadecimal"),
    (r"\c1", r"\\c is no escape"), (r"\ud800", "surrogate"), (r"[\udc00]", "surrogate"), ("\ud800", "surrogate"),
    (r"\p", "property"), (r"\pL", "property"), (r"\p{^L}", "property"), (r"\p{Script!=Greek}", "property"),
    (r"\01", r"\\0 is no escape"), (r"[\1]", r"\\1 is no escape"), ("(" * 201 + ")" * 201, "200 groups"),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "reason"), REFUSED, ids=[each[:20] for each, _ in REFUSED])
def test_what_is_no_expression_of_ecma_or_cannot_be_honoured_is_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(ecma_regex.RegexTranslationError, match=reason):
        ecma_regex.to_rust(pattern)
    for schema, word in (
        ({"type": "string", "pattern": pattern}, "pattern: "),
        ({"patternProperties": {pattern: True}}, "patternProperties: "),
    ):
        said = refusal({"items": schema}) or ""
        assert said.startswith(word) and re.search(reason, said) and "(at items)" in said, said


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"pattern": "a^b"}, "pattern: ^ is not supported there, in a^b"),
        ({"items": {"pattern": "(a$)?b"}}, "pattern: $ is not supported there, in (a$)?b (at items)"),
        ({"pattern": r"\p{Klingon}"}, r"pattern: Unicode property not found, in \p{Klingon}"),
        ({"patternProperties": {"f.*": True, "b.*": False}}, "patternProperties: a name could match both f.* and b.*"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_library_refuses_is_said_with_the_expression_that_was_given(schema: object, said: str) -> None:
    assert refusal(schema) == said


def test_names_are_matched_as_texts_are() -> None:
    schema = {"type": "object", "patternProperties": {r"^\w$": {"const": 1}}, "additionalProperties": False}
    assert allows(schema, '{"a": 1}') and not allows(schema, '{"é": 1}') and not allows(schema, '{"a": 2}')
    same = {"patternProperties": {"^[0-9]$": {"minimum": 2}, r"^\d$": {"maximum": 4}}, "type": "object"}
    assert [number for number in range(6) if allows(same, f'{{"1": {number}}}')] == [2, 3, 4]


@pytest.mark.parametrize("pattern", [r"^a\0$", r"^a\v$", r"^a\cA$", r"^a[\x01]$", "^a\x7f$", r"^a[\x01-\x02]$"])
def test_a_character_that_json_writes_by_its_number_is_asked_for_and_not_left_out(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert not allows(schema, '"a"')
    assert [code for code in (*range(32), 127) if allows(schema, f'"a\\u{code:04x}"')]


def test_numbered_escapes_of_a_pattern_open_no_escapes_in_names() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"^[\u4e00-\u9fff]+$"}}}
    assert allows(schema, '{"a": "一"}') and not allows(schema, '{"\\u0061": 3}')


LOOK_AROUND = list(ecma_regex.WITHOUT_LOOK_AROUND.items())
PIECES = ["P", "1", "23", "Y", "M", "D", "T", "H", "S", "W", ".", "5", ",", "a", "B", "@", "..", "-", "_", "b.cd", "00",
          "DE", "01", "99", "0123456789A"]  # fmt: skip


@pytest.mark.parametrize(("given", "plain"), LOOK_AROUND, ids=["duration", "email", "email 3", "emoji", "iban"])
def test_what_libraries_write_with_look_around_has_the_same_language_without(given: str, plain: str, seed: int) -> None:
    draw, schema = random.Random(seed), {"type": "string", "pattern": given}
    if r"\p" in given:  # which Python does not know; Node 20 says this
        for text, is_right in (("👋", True), ("👋🏽", True), ("1", False), ("1\ufe0f\u20e3", True), ("🇨🇭", True),
                               ("\ufe0f", False), ("a👋", False), ("#*1", False), ("", False)):  # fmt: skip
            assert allows(schema, json.dumps(text, ensure_ascii=False)) == is_right, text
        return
    for _ in range(3000):
        text = "".join(draw.choices(PIECES, k=draw.randrange(8)))
        assert (re.search(given, text) is None) == (re.search(plain, text) is None), text
    # Few walks through an expression of letters end in time.
    walks = (walked(schema, draw) for _ in range(1000))
    texts = [json.loads(text) for text in itertools.islice((each for each in walks if each is not None), 10)]
    assert texts and all(re.search(given, text, re.ASCII) for text in texts)


def test_host_names_as_zod_writes_them_are_honoured_beside_their_format() -> None:
    schema = {"type": "string", "format": "hostname", "pattern": ecma_regex.HOSTNAME[0]}
    for labels in (["a", "bc"], ["a" * 62] * 4 + ["a"], ["a" * 62] * 4 + ["ab"], ["a", ""], ["-a"], ["a" * 64]):
        text = ".".join(labels)
        is_right = re.search(ecma_regex.HOSTNAME[0], text) is not None and not text.endswith(".")
        assert allows(schema, json.dumps(text)) == is_right, text
    assert not allows({**schema, "maxLength": 3}, '"ab.c"') and allows({**schema, "maxLength": 4}, '"ab.c"')
    assert "look-ahead" in (refusal({"pattern": ecma_regex.HOSTNAME[0]}) or "")


def test_durations_and_addresses_as_zod_writes_them_are_honoured(seed: int) -> None:
    duration, email = LOOK_AROUND[0][0], LOOK_AROUND[1][0]
    for schema, good, bad in (
        ({"type": "string", "format": "duration", "pattern": duration}, ["P1W", "P1Y2M", "PT5S"], ["P", "PT", "P1"]),
        ({"type": "string", "format": "email", "pattern": email}, ["a.b@c.de"], ["a..b@c.de", ".a@c.de", "a@c"]),
    ):
        assert all(allows(schema, json.dumps(text)) for text in good)
        assert not any(allows(schema, json.dumps(text)) for text in bad)


@pytest.mark.parametrize(
    "piece", ["\\p{", "[", "\\", "(", "{", "[^", "\\p{a}", "[[:", "a{1", "a{,", "(?<", "\\u{0", "[a-"]
)
def test_any_long_expression_is_translated_in_linear_time(piece: str) -> None:
    begun = time.process_time()
    for text in (piece * (40_000 // len(piece)), piece + "0" * 40_000, "a" + piece + "1" * 20_000 + "}"):
        try:
            ecma_regex.to_rust(text)
        except ecma_regex.RegexTranslationError as error:
            assert len(str(error)) < 1000
    assert time.process_time() - begun < 2
