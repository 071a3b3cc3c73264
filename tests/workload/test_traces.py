"""Traces: requests that are read from files and scaled, and the matches that are counted for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.workload.traces import read_workload
from quire.workload.workload import Arrival, Span, Workload
from tests.workload.test_workload import TALK, plain
from tests.workloads import trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:47.6805900,396,109\n"
    "2023-11-16 18:15:50.6805900,91,0\n"
)

MOONCAKE = (
    '{"timestamp": 6000, "input_length": 1200, "output_length": 5, "hash_ids": [70, 71, 72]}\n'
    '{"timestamp": 9000, "input_length": 700, "output_length": 0, "hash_ids": [70, 80]}\n'
    '{"timestamp": 9000, "input_length": 1536, "output_length": 9, "hash_ids": [70, 71, 72]}\n'
)

SECOND = MOONCAKE.splitlines()[1]

OWN = (
    '{"workload": "talk"}\n'
    '{"at": 0.5, "prompt": [[0, 512], [7, 30]], "num_out": 129}\n'
    '{"at": 0.0, "prompt": [[8, 25]], "num_out": 64, "after": 0, "pause": 4.0}\n'
    '{"at": 2.5, "prompt": [[0, 512], [9, 1]], "num_out": 1}\n'
)


def written(folder: Path, text: str, name: str = "some.trace") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_an_azure_trace_is_read_as_prompts_that_share_nothing(tmp_path: Path) -> None:
    workload = read_workload(written(tmp_path, AZURE))
    assert workload == Workload(
        "some",
        (
            Arrival(0.0, (Span(0, 374),), 44),
            Arrival(1.0, (Span(1, 396),), 109),
            Arrival(4.0, (Span(2, 91),), 1),
        ),
    )
    assert workload.rate == pytest.approx(2 / 4) and workload.cv == pytest.approx(0.5)  # gaps 1 and 3
    assert workload.mean_in == pytest.approx(287) and workload.mean_out == pytest.approx(154 / 3)
    assert workload.shared == 0


def test_columns_of_an_azure_trace_may_come_in_any_order_and_with_others(tmp_path: Path) -> None:
    rows = [line.split(",") for line in AZURE.splitlines()]
    text = "".join(f"x,{out},{time}+00:00,{size}\r\n" for time, size, out in rows).replace("AMP+00:00", "AMP")
    assert read_workload(written(tmp_path, "\ufeff" + text)) == read_workload(written(tmp_path, AZURE))


def test_a_mooncake_trace_is_read_as_spans_of_512_tokens(tmp_path: Path) -> None:
    workload = read_workload(written(tmp_path, MOONCAKE))
    whole, last = (Span(0, 512), Span(1, 512)), 1200 - 1024
    assert list(workload.arrivals) == [
        Arrival(0.0, (*whole, Span(2, last)), 5),
        Arrival(3.0, (Span(0, 512), Span(3, 188)), 1),
        Arrival(3.0, (*whole, Span(2, 512)), 9),
    ]
    assert workload.cached_tokens.tolist() == [0, 512, 1200 // 64 * 64]
    assert workload.shared == pytest.approx((512 + 1152) / (1200 + 700 + 1536))


def test_our_own_lines_carry_everything(tmp_path: Path) -> None:
    workload = read_workload(written(tmp_path, OWN))
    assert workload == Workload("talk", TALK)
    workload.write(tmp_path / "again")
    assert read_workload(tmp_path / "again") == workload
    assert (tmp_path / "again").read_text().splitlines()[1] == OWN.splitlines()[1]
    # The page on planning shows requests alone.
    bare = written(tmp_path, OWN.partition("\n")[2])
    assert read_workload(bare) == Workload(bare.stem, TALK)
    odd = Workload("odd", (Arrival(0.1 + 0.2, (Span(1 << 61, 3),), 2), Arrival(7.25, (Span(0, 1),), 3, 0, 1 / 3)))
    odd.write(tmp_path / "odd")
    assert read_workload(tmp_path / "odd") == odd


@pytest.mark.parametrize("text", [AZURE, MOONCAKE, OWN])
def test_only_the_first_requests_are_read_if_a_limit_says_so(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text + "what is no request\n")
    assert read_workload(path, 2) == read_workload(written(tmp_path, text)).first(2)
    with pytest.raises(ConfigError, match=rf"trace line {len(text.splitlines()) + 1}: "):
        read_workload(written(tmp_path, text + "what is no request\n"))


@pytest.mark.parametrize(
    ("text", "old", "new", "said"),
    [
        (AZURE, "396", "39.6", "line 3: ContextTokens is '39.6'; it must be a whole number of at least 1"),
        (AZURE, "396", "0", "line 3: ContextTokens is 0"),
        (AZURE, "396", "+396", "line 3: ContextTokens is '+396'"),
        (AZURE, "396", "9" * 5000, "line 3: ContextTokens is "),
        (AZURE, "109", "-1", "line 3: GeneratedTokens is '-1'"),
        (AZURE, ",109", "", "line 3: 2 cells; the header asks for 3"),
        (AZURE, "18:15:47.6805900", "noon", "line 3: TIMESTAMP is '2023-11-16 noon'"),
        (AZURE, "18:15:47", "18:15:45", "line 3: its timestamp is before that of the line above"),
        (AZURE, "Generated", "Made", "line 1: the header has no column GeneratedTokens"),
        (AZURE, "TIMESTAMP", "TIME", "starts with 'TIME,ContextTokens,GeneratedTokens'; a workload is CSV with TIME"),
        (AZURE, AZURE[40:], "", "has no requests"),
        (AZURE, AZURE, "", "is empty; a workload is CSV with TIMESTAMP"),
        (MOONCAKE, "9000", "5999", "line 2: its timestamp is before that of the line above"),
        (MOONCAKE, ": 9,", ": 9", "line 3: not JSON"),
        (MOONCAKE, '"output_length": 5', f'"output_length": {10**9}', "line 1: output_length is 1000000000"),
        (MOONCAKE, "timestamp", "stamp", "line 1: timestamp is None"),
        (MOONCAKE, SECOND, "[1]", "line 2: a request is an object, not '[1]'"),
        (MOONCAKE, SECOND, "[" * 100_000, "line 2: "),
        (MOONCAKE, "6000", "-6000", "line 1: timestamp is -6000"),
        (MOONCAKE, "6000", "NaN", "timestamp is nan"),
        (MOONCAKE, "6000", "true", "timestamp is True"),
        (MOONCAKE, "1200", "0", "input_length is 0; it must be a whole number of at least 1"),
        (MOONCAKE, "1200", '"1200"', "input_length is '1200'"),
        (MOONCAKE, "1200", "true", "input_length is True"),
        (MOONCAKE, "output_length", "output", "output_length is None"),
        (MOONCAKE, "[70, 80]", "[70]", "line 2: hash_ids has 1 ids; 700 tokens in blocks of 512 have 2"),
        (MOONCAKE, "[70, 80]", "[70, 2.5]", "hash_ids is [70, 2.5]"),
        (MOONCAKE, "[70, 80]", "7", "hash_ids is 7"),
        (OWN, "[7, 30]", "[7]", "line 2: prompt is [[0, 512], [7]]"),
        (OWN, '"at": 0.5', '"at": 1e300', "line 2: at is 1e+300; it must be at most 1e+09 seconds"),
        (OWN, "[7, 30]", "[7, 0]", "line 2: a span of its prompt is 0"),
        (OWN, "[7, 30]", "[-7, 30]", "line 2: an id of its prompt is -7"),
        (OWN, "[[8, 25]]", "[]", "line 3: its prompt has no tokens"),
        (OWN, ": 64", ": 0", "line 3: num_out is 0; it must be a whole number of at least 1"),
        (OWN, ": 64", ": true", "line 3: num_out is True"),
        (OWN, '"after": 0', '"after": -2', "line 3: after is -2"),
        (OWN, '"pause": 4.0', '"pause": -4.0', "line 3: pause is -4.0"),
        (OWN, '"at": 2.5', '"at": NaN', "line 4: at is nan"),
        (OWN, '"at": 2.5', '"at": "2.5"', "line 4: at is '2.5'; it must be seconds"),
        (OWN, '"at": 2.5', '"at": 1' + "0" * 400, "line 4: at is 1000"),
        (MOONCAKE, "9000", "9" * 400, "line 2: timestamp is 9999"),
        (OWN, '{"at": 2.5', '[{"at": 2.5', "line 4: "),
        (OWN, OWN[21:], "3\n", "line 2: a request is an object, not 3"),
        (OWN, OWN[21:], "", "has no requests"),
    ],
)
def test_what_is_no_request_is_named_by_file_and_line(text: str, old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in text
    path = written(tmp_path, text.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        read_workload(path)
    assert said in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_files_that_cannot_be_read_or_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{")
    for path in (tmp_path, tmp_path / "none", tmp_path / "bytes"):
        with pytest.raises(ConfigError, match="cannot read the workload"):
            read_workload(path)
    with pytest.raises(ConfigError, match="cannot write the workload"):
        plain((0, 1, 1)).write(tmp_path)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "count", "median_in", "median_out"), [("conv", 19366, 1020, 129), ("code", 8819, 1469, 13)]
)
def test_the_azure_traces_have_their_known_sizes(
    data_dir: Path, name: str, count: int, median_in: int, median_out: int
) -> None:
    workload = read_workload(trace(data_dir, f"AzureLLMInferenceTrace_{name}.csv"))
    assert len(workload.arrivals) == count and workload.shared == 0
    assert np.median(workload.prompt_tokens) == median_in and np.median(workload.columns.num_out) == median_out


@pytest.mark.data
def test_the_mooncake_trace_repeats_the_known_share_of_its_blocks(data_dir: Path) -> None:
    workload = read_workload(trace(data_dir, "mooncake_conversation.jsonl"))
    ids = workload.columns.ids
    assert len(workload.arrivals) == 12031
    assert round(1 - len(np.unique(ids)) / len(ids), 3) == 0.366
