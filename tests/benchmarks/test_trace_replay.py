"""`benchmarks/trace_replay.py`: what it counts, and that an engine's hits equal the count."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from quire.workload.traces import read_trace, read_workload
from quire.workload.workload import Arrival, Span, Workload
from tests.benchmark_scripts import benchmark
from tests.effort import IS_FULL, full_only, tries
from tests.tiny_models import save_tiny
from tests.trace_cases import FORKS, blocks, conversation, counted_on_tokens, random_trace, write

replay = benchmark("trace_replay")

IDS = range(64, 129)
FLAGS = ["--model.dtype", "float32", "--runtime.device", "cpu", "--runtime.threads", "1"]


# ---- the count


@pytest.mark.parametrize("block_tokens", [4, 32, 48, 64, 100, 512])
def test_the_count_is_the_common_prefix_of_what_is_sent(block_tokens: int, tmp_path: Path) -> None:
    draw = random.Random(block_tokens)
    for asked in (FORKS, *(random_trace(draw, 40) for _ in range(tries(5)))):
        requests = replay.scaled(read_trace(write(tmp_path / "trace", asked), 100), block_tokens, None)
        prompts = replay.make_prompts(requests, block_tokens, IDS)
        assert prompts == replay.make_prompts(requests, block_tokens, IDS), "the same in every run"
        assert [len(prompt) for prompt in prompts] == [each.num_in for each in requests]
        assert all(token in IDS for prompt in prompts for token in prompt)
        for is_dense in (False, True):
            matches = replay.count_matches(requests, block_tokens, is_dense=is_dense)
            assert matches == counted_on_tokens(prompts, is_dense)
            assert block_tokens < 32 or sum(matches) > 0


def test_blocks_of_different_ids_differ_before_a_chunk_can_end(tmp_path: Path) -> None:
    """Even with more blocks than there are token ids."""
    asked = [blocks(*range(100 * first, 100 * first + 100)) for first in range(50)]
    requests = replay.scaled(read_trace(write(tmp_path / "trace", asked), 100), 4, None)
    prompts = replay.make_prompts(requests, 4, range(10, 19))
    heads = {tuple(prompt[start : start + 4]) for prompt in prompts for start in range(0, 400, 4)}
    assert len(heads) == 5000


def test_lengths_are_scaled_up_to_whole_tokens(tmp_path: Path) -> None:
    asked = [(1, 0, [0]), (16, 16, [0]), (17, 17, [0]), (512, 512, [0]), (513, 513, [0, 1])]
    read = read_trace(write(tmp_path / "trace", asked), 100)
    assert [each.num_in for each in read] == [1, 16, 17, 512, 513]
    assert [each.num_out for each in read] == [1, 16, 17, 512, 513], "there is no answer of no token"
    shorter = replay.scaled(read, 32, None)
    assert [each.num_in for each in shorter] == [each.num_out for each in shorter] == [1, 1, 2, 32, 33]
    assert {each.num_out for each in replay.scaled(read, 32, 7)} == {7}


@pytest.mark.data
@pytest.mark.parametrize("block_tokens", [32, 64])
def test_the_count_holds_on_a_real_trace(data_dir: Path, block_tokens: int) -> None:
    requests = replay.scaled(read_trace(conversation(data_dir), 500), block_tokens, None)
    prompts = replay.make_prompts(requests, block_tokens, range(12288, 24576))
    matches = replay.count_matches(requests, block_tokens, is_dense=True)
    assert matches == counted_on_tokens(prompts, True) and sum(matches) > 0


@pytest.mark.data
def test_the_count_is_that_of_a_real_workload(data_dir: Path) -> None:
    path = conversation(data_dir)
    expected = replay.count_matches(read_trace(path, 1500), 512, is_dense=True)
    assert read_workload(path, 1500).cached_tokens.tolist() == expected and sum(expected) > 0


@pytest.mark.parametrize("seed", range(tries(4)))
def test_the_count_is_that_of_a_workload(seed: int) -> None:
    draw = random.Random(seed)
    requests: list[Arrival] = []
    for index in range(60):
        ids = [span.id for span in draw.choice(requests).prompt] if requests and draw.random() < 0.8 else []
        ids = ids[: draw.randint(0, len(ids))]
        ids += [draw.randrange(30) for _ in range(draw.randint(0 if ids else 1, 3))]
        sizes = [512] * (len(ids) - 1) + [512 - draw.choice([0, 0, 1, 17, 448, 500, 511])]
        requests.append(Arrival(float(index), tuple(map(Span, ids, sizes)), 1))
    expected = replay.count_matches(requests, 512, is_dense=True)
    assert Workload("w", requests).cached_tokens.tolist() == expected and sum(expected) > 0


# ---- the replay


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192))


def bench(folder: str, trace: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and row of a run."""
    out = trace.with_suffix(".out")
    out.unlink(missing_ok=True)
    words = ["--model", folder, "--trace", str(trace), "--json", str(out)]
    status = replay.main([*words, *FLAGS, *flags])
    return status, json.loads(out.read_text())


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
    assert "request 5: 64 tokens matched, 128 expected" in capsys.readouterr().out


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
    chunks = replay.count_chunks(replay.scaled(read_trace(trace, 500), 32, None), [0] + [64] * 11 + [767] * 12)
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


def test_a_cache_the_machine_cannot_hold_is_refused(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.build.available_memory", lambda device: 2**20)
    with pytest.raises(SystemExit, match=r"the 14 requests of .* need cache.memory \d+MiB"):
        bench(folder, write(tmp_path / "trace", FORKS))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--block-tokens", "30"], "--block-tokens is 30; it must be a multiple of 4"),
        (["--speed", "0"], "--speed is 0.0"),
        (["--cache.share", "false"], "cache.share is false"),
        (["--block-tokens", "1024"], "request 7: 7992 prompt tokens and 1024 output tokens exceed"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    folder: str, flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(folder, write(tmp_path / "trace", FORKS), *flags)
    assert said in f"{ended.value}{capsys.readouterr().err}"


@pytest.mark.data
@full_only("random traces and forks are counted on the same paths")
def test_five_hundred_real_requests_match_what_was_counted(folder: str, data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "trace").symlink_to(conversation(data_dir))
    status, row = bench(folder, tmp_path / "trace")
    assert status == 0 and row["is_exact"] and row["requests"] == 500
    assert row["matched_tokens"] == row["expected_tokens"] > 0
    assert row["computed_tokens"] == row["prompt_tokens"] - row["matched_tokens"]
