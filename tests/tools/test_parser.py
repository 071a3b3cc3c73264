"""Calls in answers are read however they are cut, and what is no call stays text."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from quire.tools.calls import AnswerDelta, Call
from quire.tools.parser import CallParser
from tests.tools.test_formats import ARGUMENTS, EVERY, NAMES, cuts_of, gathered, read

from ..effort import tries


@pytest.mark.parametrize("name", EVERY)
def test_calls_that_are_written_are_read_however_they_are_cut(name: str, seed: int) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    for _ in range(300):
        count = draw.randrange(1, 4) if format_.separator is not None else 1
        calls = [Call("id", draw.choice(NAMES), json.dumps(draw.choice(ARGUMENTS), ensure_ascii=False))
                 for _ in range(count)]  # fmt: skip
        before = "" if format_.at_start else draw.choice(["", "Let me look.", "a < b, [T {"])
        text = before + ("\n" if before else "") + format_.write(calls)
        said, found = gathered(read(format_, text, cuts_of(draw, text)))
        assert said == before
        assert found == [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "text",
    [
        "", "Hello.", "  leading and trailing \n", '{"name": "unknown", "arguments": {}}', '{"name": "add"',
        "<tool_call>", "<tool_call>\nno json", "[TOOL_CALLS] nothing", '{"tool_calls": [', "<|python_tag|>print(1)",
        "{", "[TOOL_CALLS] [", "<tool", '{"tool_calls": []}', '{"a": 1}', '{"name": "\\x", "arguments": {}}',
        '<tool_call>\n{"name": "\\x", "arguments": {}}', '[TOOL_CALLS] [{"name": "\\x", "arguments": {}}]',
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(name: str, text: str, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        assert gathered(read(EVERY[name], text, cuts_of(draw, text))) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>', [("add", '{"a":1}')]),
        ("hermes", '<tool_call>\n{"arguments": {"a": 1}, "name": "add"}\n</tool_call>', [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>\n{"name": "no_arguments"}\n</tool_call>', [("no_arguments", "{}")]),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1}"}\n</tool_call>', [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1', [("add", '{"a": 1')]),
        ("llama", ' {"name": "add", "parameters": {"a": "1"}}', [("add", '{"a": "1"}')]),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {}}', [("add", "{}")]),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}]', [("add", "{}")]),
        ("mistral", '[TOOL_CALLS]  [ {"name": "add", "arguments": {}} ,{"name": "weather", "arguments": {}}]',
         [("add", "{}"), ("weather", "{}")]),
        ("generic", '{"tool_calls": [{"name": "add", "arguments": {}}]}', [("add", "{}")]),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "a}"}, {"name": "add", "arguments": {}}]',
         [("add", "{}"), ("add", "{}")]),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {}, "id": "x"}\n</tool_call>', [("add", "{}")]),
        ("generic", '{"tool_calls":[{"name": "add", "arguments": {}},{"name": "weather", "arguments": {}}]}',
         [("add", "{}"), ("weather", "{}")]),
    ],
)  # fmt: skip
def test_what_models_write_otherwise_is_read(name: str, text: str, calls: list[Any], seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        assert gathered(read(EVERY[name], text, cuts_of(draw, text))) == ("", calls)


@pytest.mark.parametrize(
    ("name", "text", "said", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n<tool_call>\nnope',
         "<tool_call>\nnope", ["add"]),
        ("hermes", "<tool_call>\n{'name': 'add'}\n</tool_call>\n<tool_call>\n"
         '{"name": "add", "arguments": {}}\n</tool_call>', "<tool_call>\n{'name': 'add'}\n</tool_call>", ["add"]),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}}, 7]', ", 7]", ["add"]),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>', "", ["add"]),
        ("hermes", '<tool_call>\n{"arguments": {"a": NaN}, "name": "add"}\n</tool_call>', "", ["add"]),
    ],
)  # fmt: skip
def test_calls_beside_what_is_none_are_read(name: str, text: str, said: str, calls: list[str], seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        found = gathered(read(EVERY[name], text, cuts_of(draw, text)))
        assert (found[0], [called for called, _ in found[1]]) == (said, calls)


CALLS: list[tuple[str, str | None]] = [
    ('{"name": "add", "parameters": {"a": 1}}', '{"a": 1}'),
    ('{"name": "add", "arguments": {"a": 1}}', '{"a": 1}'),
    ('{"name": "add", "args": {"a": 1.50}}', '{"a": 1.50}'),
    ('{"name":"add","input":{"a":1}}', '{"a":1}'),
    ('{"arguments": {"a": 1}, "name": "add"}', '{"a": 1}'),
    ('{"parameters": {"a": [{}]}, "id": "x", "type": "function", "name": "add"}', '{"a": [{}]}'),
    ('{"id": "x", "type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}', '{"a": 1}'),
    ('{"type": "function", "function": {"name": "add", "parameters": {"a": "é"}}}', '{"a": "é"}'),
    ('{"type": "function", "name": "add", "parameters": {"a": 1}}', '{"a": 1}'),
    ('{"function": "add", "arguments": {"a": 1}}', '{"a": 1}'),
    ('{"name": "add", "arguments": null}', "{}"),
    ('{"name": "add", "parameters": null, "arguments": {"a": 1}}', '{"a": 1}'),
    ('{"name": "add", "arguments": {}, "parameters": {"a": 1}}', '{"a": 1}'),
    ('{"name": "add", "arguments": { }, "id": "a}"}', "{}"),
    ('{"name": "add"}', "{}"),
    ('{"name": "add", "id": "call_1"}', "{}"),
    ('{"name": "add", "arguments": ""}', "{}"),
    ('{"name": "add", "arguments": []}', "{}"),
    ('{"name": "add", "arguments": " {\\"a\\": 1} "}', '{"a": 1}'),
    ('{"name": "add", "parameters": {"a": 1}, "arguments": null}', '{"a": 1}'),
    ('{"name": "add", "arguments": [1]}', None),
    ('{"name": "add", "arguments": 5}', None),
    ('{"name": "add", "arguments": "5"}', None),
    ('{"name": "add", "arguments": "not json"}', None),
    ('{"name": "add", "a": 1}', None),
    ('{"name": "add", "arguments": {}, "a": 1}', None),
    ('{"name": "add", "Arguments": {"a": 1}}', None),
    ('{"name": "add", "arguments": null, "city": "Bern"}', None),
    ('{"arguments": {"a": 1}, "name": "add", "parameters": null, "input": {}}', '{"a": 1}'),
    ('{"arguments": {"a": NaN}, "name": "add"}', '{"a": NaN}'),
    ('{"name": "add", "arguments": {"a": NaN}}', '{"a": NaN}'),
    ('{"function": {"name": "add"}, "city": "Bern"}', None),
    ('{"name": "add", "type": {"a": 1}}', None),
    ('{"type": "function", "function": {"name": "add", "arguments": 5}}', None),
    ('{"name": 3, "arguments": {}}', None),
    ('{"name": "add", "name": "weather", "arguments": {}}', None),
]  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("call", "arguments"), CALLS, ids=[each for each, _ in CALLS])
def test_arguments_are_found_wherever_a_model_writes_them_and_never_lost(
    name: str, call: str, arguments: str | None, seed: int
) -> None:
    """What cannot be read stays text: an empty object never stands for something."""
    draw, format_ = random.Random(seed), EVERY[name]
    for text in (format_.opener + call + format_.closer, *(also + call for also in format_.other_openers)):
        for _ in range(12):
            said, found = gathered(read(format_, text, cuts_of(draw, text)))
            if arguments is None:
                assert (said, found) == (text, [])
            else:
                assert (said, found) == ("", [("add", arguments)])


OTHERS = [
    ('"parameters": {"b": 2}', True), ('"b": 2', True), ('"b": "}"', True), ('"b": [{"c": "]"}]', True),
    ('"name": "weather"', True), ('"function": "weather"', True), ('"id": {"b": 2}', True), ('"input": "5"', True),
    ('"name": "add"', False), ('"id": "call_1"', False), ('"type": "function"', False), ('"index": 0', False),
    ('"args": {}', False), ('"args": null', False), ('"input": ""', False), ('"function": null', False),
]  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_what_stands_beside_arguments_is_text_whether_they_are_streamed_or_not(name: str, seed: int) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    for _ in range(150):
        others = draw.choices(OTHERS, k=draw.randrange(1, 4))
        said = ", ".join(other for other, is_kept in others if is_kept)
        call = ['"name": "add"', f'"{format_.key}": {{"a": {draw.choice(["1", "NaN"])}}}']
        arguments = call[1].partition(": ")[2]
        beside, blank = [other for other, _ in others], draw.choice(["", " "])
        for members_ in ([*call, *beside], ['"id": 1', *call, *beside], [*reversed(call), *beside]):
            text = f"{format_.opener}{{{(blank + ', ').join(members_)}{blank}}}{format_.closer}"
            for cuts in ([], list(range(1, len(text))), cuts_of(draw, text)):
                assert gathered(read(format_, text, cuts)) == (said, [("add", arguments)]), text
            assert gathered(read(format_, text + text, [], most=1))[0] == said, "no text is of a call that is dropped"


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    ("rest", "said"),
    [
        (', "i', ""), (', "id": "x', ""), (', "type": "func', ""), (",", ""), (', "b": "x', '"b": "x'),
        (', "parameters": {"b": 2', '"parameters": {"b": 2'), (', "b', '"b'),
    ],
)  # fmt: skip
def test_what_stands_beside_arguments_is_not_lost_where_the_answer_is_cut_off(
    name: str, rest: str, said: str, seed: int
) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    text = f'{format_.opener}{{"name": "add", "{format_.key}": {{"a": 1}}{rest}'
    for cuts in ([], list(range(1, len(text))), cuts_of(draw, text)):
        assert gathered(read(format_, text, cuts)) == (said, [("add", '{"a": 1}')])


@pytest.mark.parametrize("name", EVERY)
def test_long_arguments_are_the_same_however_they_are_cut(name: str, seed: int) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    arguments = '{"a":  1e400, "text": "' + "x" * 6000 + '", "n": 12345678901234567890.10}'
    text = format_.opener + '{"name": "add", "' + format_.key + '": ' + arguments + "}" + format_.closer
    for cuts in ([], list(range(1, len(text))), cuts_of(draw, text)):
        assert gathered(read(format_, text, cuts)) == ("", [("add", arguments)])


ONE = '{"name": "add", "parameters": {"a": 1}}'

OTHER = '{"name": "weather", "parameters": {}}'

BOTH = [("add", '{"a": 1}'), ("weather", "{}")]


@pytest.mark.parametrize(
    ("name", "text", "said", "calls"),
    [
        ("llama", f"{ONE}; {OTHER}", "", BOTH),
        ("llama", f"{ONE};{OTHER};", "", BOTH),
        ("llama", f"{ONE}\n{OTHER}\n", "", BOTH),
        ("llama", f"<|python_tag|>{ONE}; {OTHER}", "", BOTH),
        ("llama", f"<|python_tag|>{ONE}<|python_tag|>{OTHER}", "", BOTH),
        ("llama", f"{ONE} Both at once: {OTHER} {{done}}", "Both at once: {done}", BOTH),
        ("llama", f"{ONE}; {{'name': 'x'}} {{", "{'name': 'x'} {", BOTH[:1]),
        ("llama", f"{ONE}; {{\"name\": \"unknown\", \"parameters\": {OTHER}}}",
         f"{{\"name\": \"unknown\", \"parameters\": {OTHER}}}", BOTH[:1]),
        ("llama", f"No. {ONE}", f"No. {ONE}", []),
        ("hermes", f"Let me look.\n<tool_call>\n{ONE}\n</tool_call>\nDone.", "Let me look.\nDone.", BOTH[:1]),
        ("hermes", f"look. <tool_call>{ONE}</tool_call><tool_call>{OTHER}</tool_call>Done.", "look. Done.", BOTH),
        ("hermes", f"so.<tool_call>{ONE}</tool_call>\n\n<tool_call>{OTHER}</tool_call>\n Done. ", "so.\n Done. ", BOTH),
        ("hermes", f"<tool_call>{ONE}</tool_call>\nOne.\n<tool_call>{OTHER}</tool_call>\nTwo.", "One.\nTwo.", BOTH),
        ("hermes", f"a<tool_call>{ONE}</tool_call>b", "ab", BOTH[:1]),
        ("mistral", f"Let me. [TOOL_CALLS] [{ONE}, {OTHER}] Done.", "Let me. Done.", BOTH),
        ("generic", f'Let me. {{"tool_calls": [{ONE}, {OTHER}]}}\nDone.', "Let me.\nDone.", BOTH),
        ("llama", f"{ONE}, {OTHER}", "", BOTH),
        ("llama", f"{ONE} ,{OTHER} Done.", "Done.", BOTH),
        ("llama", f"[{ONE}, {OTHER}]", "", BOTH),
        ("llama", f"<|python_tag|>[{ONE},{OTHER}]\nDone.", "Done.", BOTH),
        ("llama", f"\n[ {ONE}\n]", "", BOTH[:1]),
        ("llama", f"{ONE}, and so on", ", and so on", BOTH[:1]),
        ("llama", f"[{ONE}, {{\"name\": \"unknown\"}}]", ', {"name": "unknown"}]', BOTH[:1]),
        ("llama", f"{ONE}, {{\"name\": \"unknown\", \"parameters\": {OTHER}}}",
         f", {{\"name\": \"unknown\", \"parameters\": {OTHER}}}", BOTH[:1]),
        ("llama", f"[1] {ONE}", f"[1] {ONE}", []),
        ("llama", f"[{{\"name\": \"unknown\"}}, {ONE}]", f"[{{\"name\": \"unknown\"}}, {ONE}]", []),
        ("hermes", f"<tool_call>\n{ONE}\n{OTHER}\n</tool_call>\nDone.", "Done.", BOTH),
        ("hermes", f"<tool_call>{ONE}{OTHER}</tool_call><tool_call>{ONE}, {OTHER}</tool_call>", "", BOTH * 2),
        ("hermes", f"<tool_call>\n[{ONE}, {OTHER}]\n</tool_call>\n<tool_call>\n{ONE}\n</tool_call>", "",
         [*BOTH, BOTH[0]]),
        ("hermes", f"<tool_call>[[{ONE}], [{OTHER}]]</tool_call>", "", BOTH),
        ("hermes", f"<tool_call>\n{ONE}\n{{no call}}\n</tool_call>\n<tool_call>{OTHER}</tool_call>",
         "{no call}\n</tool_call>", BOTH),
        ("hermes", f"<tool_call>\n{ONE}\n</tool_call>\n{OTHER}", OTHER, BOTH[:1]),
        ("mistral", f"[TOOL_CALLS] [{ONE} {OTHER}]", "", BOTH),
        ("generic", f'{{"tool_calls": [{ONE}\n{OTHER}]}}', "", BOTH),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {}\n</tool_call>\nDone.', "Done.", [("add", "{}")]),
        ("llama", '{"name": "add", "parameters": {}', "", [("add", "{}")]),
        ("llama", '{"name": "add"', '{"name": "add"', []),
    ],
)  # fmt: skip
def test_calls_side_by_side_leave_no_syntax_and_texts_keep_their_distance(
    name: str, text: str, said: str, calls: list[Any], seed: int
) -> None:
    draw = random.Random(seed)
    for cuts in (list(range(1, len(text))), *(cuts_of(draw, text) for _ in range(60))):
        assert gathered(read(EVERY[name], text, cuts)) == (said, calls)


@pytest.mark.parametrize("name", EVERY)
def test_whole_and_streamed_agree_on_anything_that_looks_like_calls(name: str, seed: int) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    pieces = [
        *CALL_PIECES,
        format_.opener,
        format_.separator or ";",
        format_.closer,
        *format_.other_openers,
        *format_.marks,
    ]
    for _ in range(400):
        text = "".join(draw.choices(pieces, k=draw.randrange(1, 9)))
        how = {"most": 1} if draw.random() < 0.3 else {}
        whole = gathered(read(format_, text, [], **how))
        for cuts in (list(range(1, len(text))), cuts_of(draw, text)):
            assert gathered(read(format_, text, cuts, **how)) == whole, text


CALL_PIECES = [ONE, OTHER, " ", "\n", "; ", ", ", "text", "{", "}", '{"name": "add", ', '"arguments": {}', '"x"', "[",
               "]",
               '{"name": "add", "arguments": {}}', '"parameters": {"a": ', "null", '{"name": "no", "arguments": {}}',
               '{"name": "add", "arguments": {}, "input": {"b": 1}}', '{"name": "add"}']  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("piece", ['{"a": {}, ', '{"name": "', " ", "{", '{"name": "add", "arguments": {', "\\"])
def test_any_long_text_is_read_in_linear_time(name: str, piece: str) -> None:
    parser = CallParser(EVERY[name], NAMES)
    parser.push(EVERY[name].write([Call("", "add", '{"a": 1}')]) if EVERY[name].at_start else EVERY[name].opener)
    begun = time.process_time()
    for _ in range(20_000):
        parser.push(piece)
    parser.flush()
    assert time.process_time() - begun < 10


CLOSES = {"hermes": "", "llama": "", "mistral": "]", "generic": "]}", "granite": "]", "phi": "]", "cohere": "]"}
"""The brackets that close what opens calls."""

NESTS = [("{", "}"), ("[", "]"), ('{"a": ', "}"), ('{"name": "add", "a": ', "}"),
         ('{"name": "no", "arguments": {', "}}"), ('{"a": {}, "b', '"}'),
         ('{"a": "', '"}'), ('{"function": ', "}"), (", ", ""), ("{}", ""),
         ('{"name": "add", "arguments": {}, "x": ', "}"), ('{"x": 1}', "")]  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("opens", "closes"), NESTS, ids=[each for each, _ in NESTS])
@pytest.mark.parametrize("most_chars", [5, 1 << 20])
def test_any_nesting_is_read_in_linear_time(name: str, opens: str, closes: str, most_chars: int, seed: int) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    for opener in {format_.opener, ""}:
        close = closes + (CLOSES[name] if opener else "")
        count = min(100_000, tries(100_000)) // len(opener + opens + close)
        text = format_.write([Call("", "add", '{"a": 1}')]) * format_.at_start
        text += (opener + opens) * count + close * count
        parser, at, begun, found = CallParser(format_, NAMES), 0, time.process_time(), list[AnswerDelta]()
        while at < len(text):
            size = draw.randrange(1, most_chars + 1)
            found += parser.push(text[at : at + size])
            at += size
        found += parser.flush()
        assert time.process_time() - begun < 1.5, (opener, opens)  # 0.03 to 0.2 s; quadratic reading took 50 s


@pytest.mark.parametrize("name", EVERY)
def test_an_answer_that_is_mostly_no_calls_is_the_same_however_it_is_cut(name: str, seed: int) -> None:
    """What is read again too often makes the rest text, at the same place."""
    draw, format_ = random.Random(seed), EVERY[name]
    call = format_.write([Call("", "add", '{"a": 1}')])
    opener = format_.opener or (format_.other_openers[0] + call)
    closes = "}" + CLOSES[name]
    nest = (opener + '{"a": ') * 700 + closes * 700
    text = call + "so " + nest + " then " + call + " \n"
    whole = gathered(read(format_, text, []))
    for cuts in (list(range(1, len(text))), cuts_of(draw, text)):
        assert gathered(read(format_, text, cuts)) == whole
    many = call + " so " + (opener.removesuffix(call) + "{") * 9000 + " then " + call
    assert gathered(read(format_, many, [], most=1)) == gathered(read(format_, many, cuts_of(draw, many), most=1))
    if not format_.at_start:
        assert whole == ("so " + nest + " then " + call + " \n", [("add", '{"a": 1}')])
        few = nest[: len(opener) * 3 + 18] + closes * 3 + " then "
        assert gathered(read(format_, few + call, []))[1] == [("add", '{"a": 1}')]


@pytest.mark.parametrize("name", EVERY)
def test_a_call_without_its_brace_swallows_nothing(name: str, seed: int) -> None:
    """Small models forget it where they are free to."""
    draw, format_ = random.Random(seed), EVERY[name]
    brace = "}" + format_.closer
    whole = format_.write([Call("", "add", '{"a": 1}')])
    assert whole.endswith(brace)
    cut = whole.removesuffix(brace) + format_.closer
    for text, said, count in (
        (f"{cut}\nIt is done.", "It is done.", 1),
        (f"{cut}\nIt is. {format_.opener or '@'}", None, 1),
        (whole.removesuffix(brace) + ', "id": "}x"' + brace, "", 1),
        (whole.removesuffix(brace) + " \n" + brace, "", 1),
    ):
        for _ in range(20):
            found = gathered(read(format_, text, cuts_of(draw, text)))
            assert found[1] == [("add", '{"a": 1}')] * count, (text, found)
            assert said is None or found[0].strip() == said, (text, found)


@pytest.mark.parametrize("name", ["hermes", "mistral", "generic"])
def test_a_call_without_its_brace_leaves_the_next_one(name: str, seed: int) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    text = format_.write([Call("", "add", '{"a": 1}'), Call("", "weather", '{"b": 2}')]).replace("}}", "}", 1)
    for _ in range(30):
        found = gathered(read(format_, text, cuts_of(draw, text)))
        assert found == ("", [("add", '{"a": 1}'), ("weather", '{"b": 2}')]), found


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("is_exact", [False, True])
def test_further_calls_are_dropped_where_one_may_be(name: str, is_exact: bool, seed: int) -> None:
    """Not even their syntax is text. What stands beside them is."""
    draw, format_ = random.Random(seed), EVERY[name]
    calls = [Call("", "add", '{"a": 1}'), Call("", "weather", '{"b": 2}'), Call("", "no_arguments", "{}")]
    opens, text = format_.opener, format_.write(calls[: 1 if format_.separator is None else 3])
    texts = [(text, "")]
    if format_.separator is not None:
        texts += [(f"{text}\n{format_.write(calls[1:])}", ""), (f"Well. {text} So {text}\nDone.", "Well. So\nDone.")]
        texts += [(f"{text}\n{opens}nothing", f"{opens}nothing")]
    elif not is_exact:
        texts += [(f"{text}; {text}", ""), (f"{text}\n{text};\nDone.", "Done.")]
    for whole, said in texts:
        for _ in range(30):
            found = read(format_, whole, cuts_of(draw, whole), most=1, is_exact=is_exact)
            assert gathered(found) == (said, [("add", '{"a": 1}')]), whole
    for end in range(len(whole)):
        parser = CallParser(format_, NAMES, most=1, is_exact=is_exact)
        parser.push(texts[-1][0][:end])
        if parser.num_calls and '{"a": 1}' in texts[-1][0][:end]:
            assert not parser.is_cut, "a call that is dropped cuts nothing off"


@pytest.mark.parametrize("name", EVERY)
def test_of_forced_calls_that_are_cut_off_no_syntax_is_text(name: str) -> None:
    format_ = EVERY[name]
    calls = [Call("id", each, json.dumps(ARGUMENTS[1])) for each in NAMES[: 2 if format_.separator is not None else 1]]
    whole = format_.write(calls)
    for end in range(len(whole) + 1):
        parser = CallParser(format_, NAMES, is_exact=True)
        said, found = gathered(parser.push(whole[:end]) + parser.flush())
        # A special token is not cut.
        assert said == "" or any(mark.startswith(said) and mark != said for mark in format_.marks), (whole[:end], said)
        is_whole = [arguments == call.arguments for (_, arguments), call in zip(found, calls, strict=False)]
        assert parser.is_cut == (not all(is_whole)), whole[:end]


@pytest.mark.parametrize("name", EVERY)
def test_beside_a_form_an_answer_is_either_calls_or_text(name: str, seed: int) -> None:
    """Text that holds what looks like a call, or begins like one, stays as it is."""
    draw, format_ = random.Random(seed), EVERY[name]
    calls = format_.write([Call("", "add", '{"a": 1}')])
    for text in (
        *(f'"see {opener} [{{' for opener in (*format_.other_openers, format_.opener, *format_.marks)), f"word {calls}",
        f" {calls}",
        format_.opener[:5], f"x{format_.opener[:5]}", '{"na', '{"name": "b", "c": 1}', f"x {calls} y", "", " ", "a \n",
    ):  # fmt: skip
        for _ in range(10):
            found = gathered(read(format_, text, cuts_of(draw, text), is_exact=True, is_either=True))
            assert found == (text, []), text
    for _ in range(10):
        found = gathered(read(format_, calls, cuts_of(draw, calls), is_exact=True, is_either=True))
        assert found == ("", [("add", '{"a": 1}')])


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_calls_beside_a_form_may_be_several(name: str, count: int, seed: int) -> None:
    draw, format_ = random.Random(seed), EVERY[name]
    if count > 1 and format_.separator is None:
        pytest.skip("this format has one call")
    text = format_.write([Call("", "add", json.dumps({"a": number})) for number in range(count)])
    expected = ("", [("add", json.dumps({"a": number})) for number in range(count)])
    for exact in (False, True):
        for either in (False, True):
            for _ in range(10):
                found = read(format_, text, cuts_of(draw, text), is_exact=exact, is_either=either)
                assert gathered(found) == expected, (exact, either)
