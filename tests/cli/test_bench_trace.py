"""`quire bench trace`: its expected hits are correct for the prompts it sends, and the engine's hits equal them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.errors import ConfigError
from quire.planning.traces import count_chunks, count_matches, make_prompts, read_trace, scaled
from tests.effort import IS_FULL, full_only, tries
from tests.tiny_models import save_tiny

IDS = range(64, 129)
FLAGS = ["--model.dtype", "float32", "--runtime.device", "cpu", "--runtime.threads", "1"]

Asked = tuple[int, int, list[int]]
"""input_length, output_length, hash_ids"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192))


def blocks(*ids: int, cut: int = 0, answer: int = 512) -> Asked:
    """A request for whole blocks, the last one cut by so many tokens."""
    return 512 * len(ids) - cut, answer, list(ids)


FORKS: list[Asked] = [
    blocks(0, 1, 2, 3, 4),  # 160 tokens at 32 a block
    blocks(0, 1, 2, 3, 4),  # the same again: two chunks of 2.5
    blocks(0, 1, 2, 3),  # exactly two chunks: only one may match
    blocks(0, 1, 2, 3),
    blocks(0, 1, 2, 3, 5, 6),  # a fork on a chunk boundary
    blocks(0, 1, 2, 7, 8, 9),  # a fork inside a chunk
    blocks(0, 1, 2, 7, 8, 9, 10, 11, cut=100),  # goes on after it
    blocks(0, 1, 2, 7, 8, 9, 10, 11, 12, answer=2048),  # fills up a block that was cut short, with a long answer
    blocks(0, 1, 2, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16),  # and on, where the cache has that answer
    blocks(2, 1, 0),  # the same ids elsewhere
    blocks(17, cut=511),  # one token
    blocks(17, cut=511),
    blocks(17, 18, 19, cut=510, answer=1),
    blocks(17, 18, 19, 20),
]


def write(path: Path, asked: list[Asked], every: float = 100.0) -> Path:
    keys = ("input_length", "output_length", "hash_ids")
    lines = [{"timestamp": every * index} | dict(zip(keys, each, strict=True)) for index, each in enumerate(asked)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def random_trace(draw: random.Random, count: int) -> list[Asked]:
    """Requests that begin like earlier ones, cut anywhere, and go on with known or new ids."""
    asked: list[Asked] = []
    for _ in range(count):
        ids = list(draw.choice(asked)[2]) if asked and draw.random() < 0.8 else []
        ids = ids[: draw.randint(0, len(ids))]
        ids += [draw.randrange(40) for _ in range(draw.randint(0 if ids else 1, 4))]
        cut = draw.choice([0, 0, 1, 17, 32, 500, 511])
        asked.append(blocks(*ids, cut=cut, answer=draw.choice([0, 3, 512, 900])))
    return asked


def counted_on_tokens(prompts: list[list[int]], is_dense: bool) -> list[int]:
    """The same count without ids: every prompt against every earlier one, token by token."""
    found = []
    for index, prompt in enumerate(prompts):
        best = 0
        for earlier in prompts[:index]:
            equal = 0
            for left, right in zip(prompt, earlier, strict=False):
                if left != right:
                    break
                equal += 1
            best = max(best, equal)
        last = (len(prompt) - 1) // 64 * 64
        found.append(min(best // 64 * 64, len(prompt) - 1 if is_dense else last))
    return found


def bench(folder: str, trace: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and row of a run."""
    out = trace.with_suffix(".out")
    out.unlink(missing_ok=True)
    status = main(["bench", "trace", folder, "--trace", str(trace), "--json", str(out), *FLAGS, *flags])
    return status, json.loads(out.read_text())


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


def test_every_request_matches_what_was_counted(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trace = write(tmp_path / "trace", FORKS)
    status, row = bench(folder, trace)
    assert status == 0 and row["is_exact"] and row["evicted_bytes"] == 0
    expected = [0, 128, 127, 127, 128, 64, 192, 192, 256, 0, 0, 0, 0, 64]
    assert row["matched_tokens"] == row["expected_tokens"] == sum(expected)
    assert row["computed_tokens"] == row["prompt_tokens"] - row["matched_tokens"]
    assert row["prompt_tokens"] == sum(-(-length // 16) for length, _, _ in FORKS)
    # A copied last chunk is the request's own until its last token is computed.
    shared, later = (sum(each // 64 * 64 for each in found) for found in (expected, [each + 1 for each in expected]))
    assert shared <= row["saved_bytes"] / (2 * 2 * 12 * 2 * 4) <= later
    assert 0 < row["cached_bytes"] <= row["cache_bytes"]
    printed = capsys.readouterr().out
    assert all(
        said in printed for said in ("matched tokens", "expected tokens", "hit rate", "p99", "cached at the end")
    )


def test_no_answer_can_pass_for_a_prompt(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.engine.admission import AdmittedRequest
    from quire.engine.engine import Engine

    prompts: list[list[int]] = []
    answers: set[int] = set()

    def spied(self: Engine, request_id: str, admitted: AdmittedRequest, *more: Any, **named: Any) -> Any:
        prompts.append(admitted.prompt_ids)
        answers.update(admitted.params.logit_bias or ())
        return queue(self, request_id, admitted, *more, **named)

    queue = Engine.queue
    monkeypatch.setattr(Engine, "queue", spied)
    assert bench(folder, write(tmp_path / "trace", FORKS))[0] == 0
    assert len(prompts) == len(FORKS) + 1, "one to warm up"
    assert len(answers) == 1 and not any(answers.intersection(prompt) for prompt in prompts)


@pytest.mark.parametrize("seed_", range(3))
def test_random_forks_match_what_was_counted(folder: str, tmp_path: Path, seed_: int) -> None:
    trace = write(tmp_path / "trace", random_trace(random.Random(seed_), 60 if IS_FULL else 30))
    status, row = bench(folder, trace, "--block-tokens", str((32, 48, 64)[seed_]))
    assert status == 0 and row["is_exact"] and row["differing_requests"] == 0
    assert row["matched_tokens"] == row["expected_tokens"] > 0


def test_a_lifetime_is_no_error_of_the_engine(folder: str, tmp_path: Path) -> None:
    status, row = bench(folder, write(tmp_path / "trace", FORKS), "--cache.lifetime", "0")
    assert status == 0 and not row["is_exact"] and row["matched_tokens"] < row["expected_tokens"]


def test_a_single_chunk_that_is_not_found_ends_with_status_one(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.cache.tree import PrefixTree

    extend = PrefixTree.extend

    def forgetful(self: PrefixTree, path: Any, keys: Any, limit: int, is_hit: bool = True) -> int:
        return extend(self, path, keys, min(limit, 1) if len(keys._token_ids) == 192 else limit, is_hit)

    monkeypatch.setattr(PrefixTree, "extend", forgetful)
    status, row = bench(folder, write(tmp_path / "trace", FORKS))
    assert (status, row["differing_requests"], row["expected_tokens"] - row["matched_tokens"]) == (1, 1, 64)
    assert "line 5: 64 tokens matched, 128 expected" in capsys.readouterr().out


def test_a_cache_as_large_as_was_said_is_enough_and_a_smaller_one_is_told(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    # 12 prompts of 12 chunks, one of them common to all; a chunk takes 24 KiB.
    asked = [blocks(0, 1, *range(50 * index + 2, 50 * index + 24)) for index in range(12)] * 2
    trace = write(tmp_path / "trace", asked)
    status, row = bench(folder, trace, "--cache.memory", "1MiB")
    (said,) = re.findall(r"(\d+MiB) would hold it all", capsys.readouterr().out)
    assert status == 0 and not row["is_exact"] and row["evicted_bytes"] > 0
    assert row["matched_tokens"] < row["expected_tokens"]
    status, row = bench(folder, trace, "--cache.memory", said)
    assert status == 0 and row["is_exact"] and row["evicted_bytes"] == 0
    assert "holds the whole trace" in capsys.readouterr().out
    chunks = count_chunks(scaled(read_trace(trace, 500), 32, None), [0] + [64] * 11 + [767] * 12)
    assert row["cached_bytes"] <= chunks * 64 * 2 * 2 * 12 * 2 * 4 <= row["cache_bytes"]


@pytest.mark.parametrize("pace", [["--concurrency", "4"], ["--speed", "20"]])
def test_requests_at_once_share_what_is_there(folder: str, tmp_path: Path, pace: list[str]) -> None:
    status, row = bench(folder, write(tmp_path / "trace", FORKS * 2), *pace, "--output-tokens", "3")
    assert status == 0 and not row["is_exact"]
    assert 0 < row["matched_tokens"] <= row["expected_tokens"]
    assert row["output_tokens"] == 3 * row["requests"] == 3 * 2 * len(FORKS)
    if "--speed" in pace:
        assert row["seconds"] >= 0.1 * (len(FORKS) * 2 - 1) / 20
    assert 0 < row["ttft_p50"] <= row["ttft_p99"] <= row["seconds"]


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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "needs --trace FILE"),
        (["--trace", "/nowhere"], "cannot read the trace /nowhere"),
        (["--trace", "EMPTY"], "has no requests"),
        (["--trace", "TRACE", "--block-tokens", "30"], "--block-tokens is 30; it must be a multiple of 4"),
        (["--trace", "TRACE", "--speed", "0"], "--speed is 0.0"),
        (["--trace", "TRACE", "--output-tokens", "0"], "--output-tokens is 0"),
        (["--trace", "TRACE", "--batch", "1"], "--batch is for quire bench throughput, not for trace"),
        (["--trace", "TRACE", "--cache.share", "false"], "cache.share is false"),
        (["--trace", "TRACE", "--block-tokens", "1024"], "line 7: 7992 prompt tokens and 1024 output tokens exceed"),
        (["--trace", "TRACE", "--json", "/"], "cannot write /"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(
    folder: str, flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "EMPTY").write_text("\n")
    write(tmp_path / "TRACE", FORKS)
    words = [str(tmp_path / word) if word.isupper() else word for word in flags]
    assert main(["bench", "trace", folder, *words, *FLAGS]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_flags_of_the_trace_are_not_for_throughput(folder: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "throughput", folder, "--requests", "5"]) == 2
    assert "--requests is for quire bench trace, not for throughput" in capsys.readouterr().err


def test_a_cache_the_machine_cannot_hold_is_refused(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.build.available_memory", lambda device: 2**20)
    assert main(["bench", "trace", folder, "--trace", str(write(tmp_path / "trace", FORKS)), *FLAGS]) == 2
    assert re.search(r"the 14 requests of .* need cache.memory \d+MiB", capsys.readouterr().err)


def conversation(data_dir: Path) -> Path:
    path = data_dir / "traces" / "mooncake_conversation.jsonl"
    if not path.is_file():
        pytest.skip(f"no trace at {path}")
    return path


@pytest.mark.data
@pytest.mark.parametrize("block_tokens", [32, 64])
def test_the_count_holds_on_a_real_trace(data_dir: Path, block_tokens: int) -> None:
    requests = scaled(read_trace(conversation(data_dir), 500), block_tokens, None)
    prompts = make_prompts(requests, block_tokens, range(12288, 24576))
    matches = count_matches(requests, block_tokens, is_dense=True)
    assert matches == counted_on_tokens(prompts, True) and sum(matches) > 0


@pytest.mark.data
@full_only("random traces and forks are counted on the same paths")
def test_five_hundred_real_requests_match_what_was_counted(folder: str, data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "trace").symlink_to(conversation(data_dir))
    status, row = bench(folder, tmp_path / "trace")
    assert status == 0 and row["is_exact"] and row["requests"] == 500
    assert row["matched_tokens"] == row["expected_tokens"] > 0
    assert row["computed_tokens"] == row["prompt_tokens"] - row["matched_tokens"]
