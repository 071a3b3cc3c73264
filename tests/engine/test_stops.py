"""Stop rules: emitted text is never withdrawn, and equals the text cut at the first complete stop string."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.params import SamplingParams
from quire.engine.stops import SequenceEnd, StopChecker, StopStrings
from tests.effort import examples

EOS = 2


def first_stop(text: str, stops: list[str], first_char: int = 0) -> tuple[int, str] | None:
    """Where the first stop string to be complete after `first_char` characters ends, and which it is."""
    for end in range(first_char + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


def run(
    params: SamplingParams, deltas: list[str], token_ids: list[int] | None = None
) -> tuple[list[str], SequenceEnd | None]:
    """What each push emitted, and the stop; the last delta is the last token the length allows."""
    checker = StopChecker(params, [EOS])
    emitted = []
    for index, delta in enumerate(deltas):
        token_id = token_ids[index] if token_ids else 10
        text, stop = checker.push(delta, token_id, finished_by_length=index == len(deltas) - 1)
        emitted.append(text)
        if stop is not None:
            return emitted, stop
    return emitted, None


@st.composite
def cut_texts(draw):
    """Deltas and stop strings over two letters, so that near misses and overlaps are common."""
    deltas = draw(st.lists(st.text("ab", max_size=5), min_size=1, max_size=12))
    stops = draw(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
    return deltas, stops


@examples(500)
@given(case=cut_texts(), keep=st.booleans(), min_tokens=st.integers(0, 4))
def test_the_emitted_text_is_the_text_cut_at_the_first_stop(case, keep, min_tokens):
    deltas, stops = case
    text = "".join(deltas)
    params = SamplingParams(stop=stops, include_stop_str_in_output=keep, min_tokens=min_tokens, max_tokens=None)
    emitted, stop = run(params, deltas)
    expected = first_stop(text, stops, first_char=len("".join(deltas[:min_tokens])))
    if expected is None:
        assert ("".join(emitted), stop) == (text, SequenceEnd("length", None))
    else:
        end, string = expected
        assert "".join(emitted) == text[: end if keep else end - len(string)]
        assert stop == SequenceEnd("stop", string)


@examples(200)
@given(case=cut_texts())
def test_nothing_is_held_that_cannot_become_a_stop_string(case):
    deltas, stops = case
    checker = StopChecker(SamplingParams(stop=stops), [EOS])
    seen = emitted = ""
    for delta in deltas:
        text, stop = checker.push(delta, 10)
        if stop is not None:
            return
        seen += delta
        emitted += text
        held = seen[len(emitted) :]
        assert seen.startswith(emitted)
        assert not held or any(string.startswith(held) and string != held for string in stops)


def test_a_stop_string_over_many_tokens_never_leaks():
    params = SamplingParams(stop=["<|end|>"])
    emitted, stop = run(params, ["Hi", " <", "|e", "nd", "|", ">tail", "x"])
    assert emitted == ["Hi", " ", "", "", "", ""]
    assert stop == SequenceEnd("stop", "<|end|>")


def test_a_near_miss_is_released():
    emitted, stop = run(SamplingParams(stop=["<|end|>"]), ["a<|", "en", "ough", "."])
    assert emitted == ["a", "", "<|enough", "."]
    assert stop == SequenceEnd("length", None)


def test_the_first_complete_string_wins_whatever_the_order():
    for stops in (["abcd", "bc"], ["bc", "abcd"]):
        for deltas in (["xabcd", "."], list("xabcd.")):
            emitted, stop = run(SamplingParams(stop=stops), deltas)
            assert ("".join(emitted), stop) == ("xa", SequenceEnd("stop", "bc"))


def test_of_two_strings_ending_together_the_longer_is_cut():
    emitted, stop = run(SamplingParams(stop=["b", "ab"]), ["xxab", "."])
    assert ("".join(emitted), stop) == ("xx", SequenceEnd("stop", "ab"))


def test_a_stop_token_ends_the_text():
    emitted, stop = run(SamplingParams(stop_token_ids=[7]), ["a", "", "b"], [5, 7, 5])
    assert ("".join(emitted), stop) == ("a", SequenceEnd("stop", 7))


def test_end_of_text_has_no_stop_reason_and_releases_what_was_held():
    emitted, stop = run(SamplingParams(stop=["<|end|>"]), ["a<|", "", "b"], [5, EOS, 5])
    assert ("".join(emitted), stop) == ("a<|", SequenceEnd("stop", None))


def test_ignore_eos_goes_on_unless_the_id_is_a_stop_token_too():
    emitted, stop = run(SamplingParams(ignore_eos=True), ["a", "", "b"], [5, EOS, 5])
    assert ("".join(emitted), stop) == ("ab", SequenceEnd("length", None))
    _, stop = run(SamplingParams(ignore_eos=True, stop_token_ids=[EOS]), ["a", "", "b"], [5, EOS, 5])
    assert stop == SequenceEnd("stop", EOS)


def test_no_stop_counts_before_min_tokens():
    params = SamplingParams(min_tokens=2, stop="x", stop_token_ids=[7])
    emitted, stop = run(params, ["x", "x", "x", "y"], [7, EOS, 5, 5])
    assert ("".join(emitted), stop) == ("xx", SequenceEnd("stop", "x"))
    checker = StopChecker(params, [EOS])
    assert [checker.ends_at(7), checker.ends_at(EOS)] == [False, False]
    checker.push("x", 7)
    checker.push("x", 7)
    assert [checker.ends_at(7), checker.ends_at(EOS), checker.ends_at(5)] == [True, True, False]


def test_a_stop_string_begun_before_min_tokens_counts_when_completed_after():
    emitted, stop = run(SamplingParams(min_tokens=1, stop="ab"), ["xa", "by", "z"])
    assert (emitted, stop) == (["x", ""], SequenceEnd("stop", "ab"))


def test_a_stop_in_the_last_token_takes_precedence_over_the_length():
    _, stop = run(SamplingParams(stop="b"), ["a", "ab"])
    assert stop == SequenceEnd("stop", "b")
    _, stop = run(SamplingParams(), ["a", ""], [5, EOS])
    assert stop == SequenceEnd("stop", None)


def test_flush_releases_what_an_aborted_sequence_held():
    checker = StopChecker(SamplingParams(stop="abc"))
    assert checker.push("xab", 5) == ("x", None)
    assert checker.flush() == "ab"
    assert checker.flush() == ""
    with pytest.raises(AssertionError):
        checker.push("c", 5)


def test_without_stop_strings_text_passes_through():
    assert run(SamplingParams(), ["a", "", "b"]) == (["a", "", "b"], SequenceEnd("length", None))


@pytest.mark.alone
def test_long_repetitive_stop_strings_cost_linear_time():
    checker = StopChecker(SamplingParams(stop=["a" * 1000 + f"!{i}" for i in range(16)]))
    started = time.perf_counter()
    for _ in range(20):
        assert checker.push("a" * 1000, 5)[1] is None
    assert time.perf_counter() - started < 2.0


def test_sequences_of_a_request_share_what_is_prepared_of_stop_strings() -> None:
    stop = [(chr(97 + each) + "b") * 512 for each in range(16)]
    params = SamplingParams(stop=stop)
    strings = StopStrings(params)
    tracemalloc.start()
    try:
        checkers = [StopChecker(params, [EOS], strings) for _ in range(128)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / len(checkers) < 4000, f"{held} bytes for 128 sequences"
    first, second = checkers[:2]
    assert first.push(stop[0][:-1], 10) == ("", None)
    assert second.push("z", 10) == ("z", None), "the text of another sequence counts"
    assert first.push("b", 10) == ("", SequenceEnd("stop", stop[0]))
