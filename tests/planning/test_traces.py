"""Traces: requests that are read and scaled, and the matches that are counted for them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.planning.traces import count_matches, make_prompts, read_trace, scaled
from tests.effort import tries
from tests.trace_cases import FORKS, blocks, conversation, counted_on_tokens, random_trace, write

IDS = range(64, 129)


@pytest.mark.parametrize("block_tokens", [4, 32, 48, 64, 100, 512])
def test_the_count_is_the_common_prefix_of_what_is_sent(block_tokens: int, tmp_path: Path) -> None:
    draw = random.Random(block_tokens)
    for asked in (FORKS, *(random_trace(draw, 40) for _ in range(tries(5)))):
        requests = scaled(read_trace(write(tmp_path / "trace", asked), 100), block_tokens, None)
        prompts = make_prompts(requests, block_tokens, IDS)
        assert prompts == make_prompts(requests, block_tokens, IDS), "the same in every run"
        assert [len(prompt) for prompt in prompts] == [each.input_tokens for each in requests]
        assert all(token in IDS for prompt in prompts for token in prompt)
        for is_dense in (False, True):
            matches = count_matches(requests, block_tokens, is_dense=is_dense)
            assert matches == counted_on_tokens(prompts, is_dense)
            assert block_tokens < 32 or sum(matches) > 0


def test_blocks_of_different_ids_differ_before_a_chunk_can_end(tmp_path: Path) -> None:
    """Even with more blocks than there are token ids."""
    asked = [blocks(*range(100 * first, 100 * first + 100)) for first in range(50)]
    requests = scaled(read_trace(write(tmp_path / "trace", asked), 100), 4, None)
    prompts = make_prompts(requests, 4, range(10, 19))
    heads = {tuple(prompt[start : start + 4]) for prompt in prompts for start in range(0, 400, 4)}
    assert len(heads) == 5000


def test_lengths_are_scaled_up_to_whole_tokens(tmp_path: Path) -> None:
    asked = [(1, 0, [0]), (16, 16, [0]), (17, 17, [0]), (512, 512, [0]), (513, 513, [0, 1])]
    read = read_trace(write(tmp_path / "trace", asked), 100)
    assert [each.input_tokens for each in read] == [1, 16, 17, 512, 513]
    assert [each.output_tokens for each in read] == [1, 16, 17, 512, 513], "there is no answer of no token"
    shorter = scaled(read, 32, None)
    assert [each.input_tokens for each in shorter] == [each.output_tokens for each in shorter] == [1, 1, 2, 32, 33]
    assert {each.output_tokens for each in scaled(read, 32, 7)} == {7}


GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: a request is an object, not '[1]'"),
        ("[" * 100_000, "line 2: "),
        (GOOD.replace("5,", "-5,"), "timestamp is -5"),
        (GOOD.replace("5,", "NaN,"), "timestamp is nan"),
        (GOOD.replace("5,", "true,"), "timestamp is True"),
        (GOOD.replace("5,", "4,"), "line 2: its timestamp is before that of the line above"),
        (GOOD.replace("600", "0"), "input_length is 0; it must be a whole number of at least 1"),
        (GOOD.replace("600", '"600"'), "input_length is '600'"),
        (GOOD.replace("600", "true"), "input_length is True"),
        (GOOD.replace("output_length", "output"), "output_length is None"),
        (GOOD.replace("[1, 2]", "[1]"), "line 2: hash_ids has 1 ids; 600 tokens in blocks of 512 have 2"),
        (GOOD.replace("[1, 2]", "[1, 2.5]"), "hash_ids is [1, 2.5]"),
        (GOOD.replace("[1, 2]", "7"), "hash_ids is 7"),
    ],
)
def test_a_line_that_is_no_request_is_named(line: str, said: str, tmp_path: Path) -> None:
    trace = tmp_path / "some.jsonl"
    trace.write_text(GOOD + line)
    with pytest.raises(ConfigError) as error:
        read_trace(trace, 10)
    assert said in str(error.value) and str(error.value).startswith(f"{trace} line 2") and "\n" not in str(error.value)
    assert len(read_trace(trace, 1)) == 1, "lines that are not wanted are not read"


@pytest.mark.data
@pytest.mark.parametrize("block_tokens", [32, 64])
def test_the_count_holds_on_a_real_trace(data_dir: Path, block_tokens: int) -> None:
    requests = scaled(read_trace(conversation(data_dir), 500), block_tokens, None)
    prompts = make_prompts(requests, block_tokens, range(12288, 24576))
    matches = count_matches(requests, block_tokens, is_dense=True)
    assert matches == counted_on_tokens(prompts, True) and sum(matches) > 0
