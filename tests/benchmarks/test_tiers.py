"""The benchmarks of the disk tier: their loads, their arenas, how they time, and how they judge."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cache.costs import Costs
from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.models.weights import open_model
from quire.workload.traces import read_trace
from quire.workload.workload import Arrival, Span
from tests.benchmark_scripts import benchmark
from tests.effort import tries
from tests.tiny_models import save_tiny
from tests.trace_cases import counted_on_tokens

tiers, restart, documents = benchmark("tiers"), benchmark("restart"), benchmark("documents")
trace, replay = benchmark("tier_trace"), benchmark("trace_replay")
busy, costs = benchmark("busy_disk"), benchmark("costs")

NAN = math.nan
FILE_SYSTEM = tiers.file_system


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096))


@pytest.fixture(autouse=True)
def any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run with their folders in RAM."""
    monkeypatch.setattr(tiers, "file_system", lambda path: "some")


# Marks


@pytest.mark.parametrize(
    ("values", "bound", "at_most", "reached"),
    [
        ([7.0, 9.0, 8.5], 8, False, True),
        ([7.0, 9.0, 7.9], 8, False, False),
        ([8.0], 8, False, True),
        ([1.02], 1.02, True, True),
        ([1.03, 1.03, 0.1], 1.02, True, False),
        ([NAN, 9.0], 8, False, True),
        ([], 8, False, None),
        ([NAN], 8, True, None),
    ],
)
def test_a_mark_judges_the_median(values: list[float], bound: float, at_most: bool, reached: bool | None) -> None:
    assert tiers.Mark("m", values, bound, at_most).reached is reached


def test_only_a_whole_run_fails_for_a_missed_mark() -> None:
    missed, unmeasured = tiers.Mark("m", [1.0], 2), tiers.Mark("n", [], 2)
    assert tiers.exit_status(SimpleNamespace(quick=False), [missed, unmeasured]) == 1
    assert tiers.exit_status(SimpleNamespace(quick=False), [unmeasured]) == 0
    assert tiers.exit_status(SimpleNamespace(quick=True), [missed]) == 0


def test_the_table_says_which_mark_was_missed() -> None:
    rows = tiers.marks_table([tiers.Mark("slow", [1.0, 3.0, 1.5], 2), tiers.Mark("unmeasured", [], 2)]).splitlines()
    assert rows[2].split() == ["slow", "1.500", "1.000", "to", "3.000", "at", "least", "2", "NO"]
    assert rows[3].split()[1] == rows[3].split()[-1] == "-"


def test_ratios_are_within_a_round() -> None:
    assert tiers.ratios([4.0, 9.0], [2.0, 3.0]) == [2.0, 3.0]
    assert tiers.ratios([4.0], []) == [] and math.isnan(tiers.ratios([4.0], [0.0])[0])


def test_the_restart_is_judged_by_cold_disk_and_the_peer() -> None:
    samples = {"quire cold": [1.8, 2.0], "quire from disk": [0.2, 0.2], "quire tokens from disk": [4032, 3000]}
    peer = {"llama.cpp from disk": [0.3, 0.1], "llama.cpp tokens from disk": [4095, 4095]}
    marks = restart.marks_of(samples | peer, 4096)
    assert [list(mark.values) for mark in marks] == [
        pytest.approx([9.0, 10.0]),
        pytest.approx([4032 / 4096, 3000 / 4096]),
        pytest.approx([1.5, 0.5]),
    ]
    assert restart.marks_of(samples, 4096)[2].reached is None
    peer["llama.cpp tokens from disk"] = [0, 64]
    assert restart.marks_of(samples | peer, 4096)[2].reached is None, "it computed its prompts"


def test_documents_are_judged_by_codec_and_bandwidth() -> None:
    def of(rate: float, read: float = 0.0) -> dict[str, list[float]]:
        return {"rate": [rate], "bytes_read": [read]}

    cells = {
        ("dense", "dropping"): of(1.0),
        ("dense", "50MB"): of(1.0),
        ("dense", "200MB"): of(2.5, 1000.0),
        ("dense", "400MB"): of(3.0),
        ("nuq3", "200MB"): of(2.0, 230.0),
        ("nuq3", "400MB"): of(2.7),
        ("nuq3", "50MB"): of(1.5),
    }
    marks = documents.marks_of({documents.Cell(*name): samples for name, samples in cells.items()})
    found = {mark.name: (list(mark.values), mark.reached) for mark in marks}
    assert found == {
        "dense: 200MB / dropping": ([2.5], True),
        "nuq3: 200MB / dropping": ([], None),
        "nuq3 / dense at 400MB": ([pytest.approx(0.9)], False),
        "nuq3 / dense at 50MB": ([1.5], True),
        "bytes read, nuq3 / dense at 200MB": ([0.23], True),
    }


def test_a_busy_disk_is_compared_with_the_same_requests_without_transfers() -> None:
    moving = {"p50": [10.6], "p99": [20.0], "cpu_share": [0.04], "bytes_read": [1.0]}
    marks = busy.marks_of({"moving": moving, "near": {"p50": [10.0], "p99": [18.0]}, "alone": {"p50": [1.0]}})
    assert [mark.reached for mark in marks] == [False, True, True]
    idle = moving | {"bytes_read": [0.0]}
    assert [mark.reached for mark in busy.marks_of({"moving": idle, "near": {"p50": [10.0], "p99": [18.0]}})] == [
        None
    ] * 3


# Loads


def test_every_document_is_asked_equally_often_in_an_order_of_its_round() -> None:
    given = SimpleNamespace(documents=7, asks=5, seed=3)
    orders = [documents.order_of(given, number) for number in (0, 1)]
    assert all(Counter(order) == dict.fromkeys(range(7), 5) for order in orders)
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])
    assert documents.order_of(given, 0) == orders[0]


class CountingLLM:
    """Answers with the document's first token, and counts the requests at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.begun: list[int] = []

    async def generate(self, prompt: dict[str, list[int]], params: Any) -> AsyncIterator[Any]:
        first = prompt["prompt_token_ids"][0]
        self.begun.append(first)
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(params.max_tokens):
            await asyncio.sleep(0)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[first])], cached_by_tier={"disk": first})
        self.now -= 1


@pytest.mark.parametrize("clients", [1, 3, 12])
def test_clients_send_in_order_and_one_request_each_at_a_time(clients: int) -> None:
    llm, asked = CountingLLM(), [2, 0, 1, 1, 0, 2, 2, 0, 1, 0, 1, 2]
    _, answers = asyncio.run(documents.ask_all(llm, [[10], [11], [12]], asked, 4, clients))
    assert [answer.token_ids for answer in answers] == [[10 + document] * 4 for document in asked]
    assert [answer.cached_by_tier["disk"] for answer in answers] == [10 + document for document in asked]
    assert llm.most == clients and llm.begun == [10 + document for document in asked]


@pytest.mark.parametrize("try_", range(tries(5)))
def test_the_infinite_cache_holds_each_distinct_chunk_and_leaves_the_last_token(seed: int, try_: int) -> None:
    draw = random.Random(f"{seed} {try_}")
    requests = []
    for line in range(60):
        blocks = tuple(draw.choice([0, 1]) if draw.random() < 0.8 else 2 + line for _ in range(draw.randint(1, 9)))
        sizes = [32] * (len(blocks) - 1) + [32 - draw.choice([0, 0, 3, 31])]
        requests.append(Arrival(0.0, tuple(map(Span, blocks, sizes)), 1))
    prompts = replay.make_prompts(requests, 32, range(64, 129))
    chunks = {tuple(prompt[:end]) for prompt in prompts for end in range(64, len(prompt) + 1, 64)}
    for is_dense in (False, True):
        found = trace.Infinite.of(requests, 32, is_dense=is_dense)
        assert found.num_chunks == len(chunks) and found.prompt_tokens == sum(map(len, prompts))
        assert found.prompt_tokens - found.computed_tokens == sum(counted_on_tokens(prompts, is_dense)) > 0


# Arenas


@pytest.mark.parametrize("codec", ["dense", "g4"])
def test_the_needed_arena_holds_everything_and_no_smaller_one_does(model: str, codec: str) -> None:
    if codec == "g4":
        model = str(Path(model).parent / "wide")
        save_tiny(Path(model), hidden_size=256, max_position_embeddings=4096)
    options = {"cache.codec": codec, "runtime.threads": 1, "cache.check": False}
    need = tiers.arena_need(model, options, 3000, 4, 64)

    def fits(num_bytes: int) -> bool:
        config = EngineConfig.from_options(options | {"cache.memory": num_bytes})
        with open_model(Path(model)) as checkpoint:
            arena = resolve(config, checkpoint.shape, checkpoint)[1].arena
        return arena.fits(3000 + (4 if codec == "dense" else 0), 4, 64)

    assert fits(need.num_bytes) and not fits(need.num_bytes - 2**20)
    assert 3000 * need.chunk_bytes < need.num_bytes < 3000 * need.chunk_bytes * 1.1


def test_a_folder_needs_room_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiers.fresh_folder(tmp_path, 1) as folder:
        assert folder.parent == tmp_path and not list(folder.iterdir())
        assert tiers.disk_options(folder, 800 << 20, "200MB") == {
            "tiers.disk": f"{folder}:1924MiB",
            "tiers.disk_bandwidth": "200MB",
        }
    assert not folder.exists()
    with pytest.raises(SystemExit, match="MiB are needed"), tiers.fresh_folder(tmp_path, 1 << 60):
        pass
    monkeypatch.setattr(tiers, "file_system", lambda path: "tmpfs")
    with pytest.raises(SystemExit, match="is in RAM"), tiers.fresh_folder(tmp_path, 1):
        pass
    assert not list(tmp_path.iterdir())


def test_counters_are_differences_and_zero_without_the_tier() -> None:
    before, after = ({"tiers": {"disk": {"bytes_read": count}}} for count in (30, 100))
    assert tiers.disk_change(before, after, "bytes_read") == 70
    assert tiers.disk_change({"tiers": {"disk": None}}, {}, "bytes_read") == 0


def test_files_leave_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if FILE_SYSTEM(tmp_path) in ("tmpfs", "ramfs", "overlay", "unknown"):
        pytest.skip("the folder of tests is not on a disk")
    monkeypatch.setattr(tiers, "DROP_CACHES", tmp_path / "missing" / "drop_caches")
    (tmp_path / "below").mkdir()
    file = tmp_path / "below" / "file"
    file.write_bytes(b"x" * (3 << 20))
    assert tiers.resident_bytes(file) >= 3 << 20
    assert tiers.drop_page_cache(tmp_path) == "posix_fadvise, 0 MiB stayed"
    assert tiers.resident_bytes(file) == 0


# Timing


class Answers(BaseHTTPRequestHandler):
    """A stream of two events, 0.2 s apart, or a refusal."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(503 if self.path == "/refuse" else 200)
        self.end_headers()
        for event in ({"choices": [1], "usage": None}, {"choices": [], "usage": {"cached": 3}}):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.2)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield SimpleNamespace(port=made.server_port)
        made.shutdown()
        thread.join()


def test_a_stream_is_timed_to_its_first_event_and_read_to_its_last(server: Any) -> None:
    begun = time.perf_counter()
    first = restart.call(server, "/v1/completions", {"stream": True})
    assert first.seconds < 0.2 <= time.perf_counter() - begun - first.seconds
    assert first.fields == {"choices": [], "usage": {"cached": 3}}


def test_a_refusal_is_an_error(server: Any) -> None:
    with pytest.raises(restart.ServerError, match="/refuse was answered 503"):
        restart.call(server, "/refuse", {"stream": True})


def test_a_folder_is_written_once_it_no_longer_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "QUIET_SECONDS", 0.3)

    def grow() -> None:
        for number in range(4):
            (tmp_path / str(number)).write_bytes(b"x" * (1 << 20))
            time.sleep(0.15)

    writer = threading.Thread(target=grow)
    writer.start()
    assert restart.wait_until_written(tmp_path) == pytest.approx(4, abs=0.1)
    writer.join()


def test_a_tier_that_writes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "QUIET_SECONDS", 0.1)
    with pytest.raises(restart.ServerError, match="has written nothing"):
        restart.wait_until_written(tmp_path)


# Whole runs, on a tiny model

QUICK = ["--quick", "--threads", "1", "--model"]


def test_documents_run_with_and_without_the_tier(model: str, tmp_path: Path) -> None:
    given = documents.arguments([*QUICK, model, "--bandwidths", "dropping,none", "--folder", str(tmp_path)])
    results, needs = documents.measure(given)
    asked = given.documents * given.asks
    for samples in results.values():
        assert samples["rate"][0] > 0 and samples["same"] == [1.0]
        assert samples["computed"][0] + samples["cached"][0] == asked * given.prompt_tokens
    dropping, disk = results.values()
    assert dropping["bytes_written"] == dropping["fetched"] == [0] and disk["bytes_written"][0] > 0
    text = documents.report(given, results, needs, tiers.OtherLoad())
    assert "12 documents of 256 tokens, each asked 3 times" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("side", ["dropping", "disk"])
def test_the_trace_runs_with_and_without_the_tier(model: str, tmp_path: Path, side: str) -> None:
    file = tmp_path / "trace.jsonl"
    asked = [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 8, 9]]
    lines = [{"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids} for ids in asked * 8]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [*QUICK, model, "--trace", str(file), "--block-tokens", "32", "--folder", str(tmp_path)]
    given = trace.arguments([*words, "--sides", side, "--requests", "32"])
    figures = trace.replay(given, side, tiers.Need(chunk_bytes=0, num_bytes=64 << 20))
    infinite = trace.Infinite.of(replay.scaled(read_trace(file, 32), 32, 1), 32, is_dense=True)
    # The arena holds everything, so the engine computes what the simulated cache does.
    assert figures["computed_tokens"] == infinite.computed_tokens
    assert figures["seconds"] > 0 and (figures["bytes_written"] > 0) == (side == "disk")


def test_visitors_fetch_where_the_arena_is_small(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A tiny model computes faster than a disk reads.
    monkeypatch.setattr(Costs, "fetch", lambda costs, num_bytes: 0.0)
    given = busy.arguments([*QUICK, model, "--folder", str(tmp_path), "--prompts", "40"])  # arenas are whole MiB
    for attempt in range(5):  # on a busy machine the disk may write after the last token
        moving = asyncio.run(busy.run(given, "moving", attempt))
        if moving["bytes_written"]:
            break
    assert moving["visitors"] > 3 and moving["bytes_written"] > 0
    assert 0 < moving["fetched"] <= moving["cached"]


def test_visitors_come_beside_decoding_requests(model: str, tmp_path: Path) -> None:
    given = busy.arguments([*QUICK, model, "--folder", str(tmp_path), "--output-tokens", "150"])
    near, alone = (asyncio.run(busy.run(given, side, 0)) for side in ("near", "alone"))
    assert 0 < near["p50"] <= near["p99"] < near["seconds"]
    # One comes with every eighth token from the moment that all four decode; each eighth one has a new prompt.
    assert 12 <= near["visitors"] <= 18 and near["bytes_read"] == 0
    assert near["cached"] == (near["visitors"] - near["visitors"] // 8) * 192
    assert alone["visitors"] == alone["cached"] == 0


def test_predictions_stand_beside_measurements(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "LENGTHS", 3)
    given = costs.arguments([*QUICK, model, "--folder", str(tmp_path), "--longest", "512"])
    seen = costs.measure(given)
    assert len(seen["fetch"]) == 3 and len(seen["prefill"]) >= 3
    assert all(predicted > 0 and measured > 0 for pairs in seen.values() for predicted, measured in pairs)
    assert not list(tmp_path.iterdir())


def test_predictions_are_judged_by_their_order_and_their_error() -> None:
    pairs = [(1.0, 2.0), (2.0, 2.1), (3.0, 30.0)]
    order, error = costs.marks_of({"fetch": pairs})
    assert order.reached and order.values == pytest.approx([1.0]) and error.reached is False
    assert costs.spearman([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1) and costs.errors(pairs)[2] == 0.9


def test_a_side_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        trace.arguments(["--trace", "file", "--sides", "dropping,tape"])
    assert "tape is none of dropping, disk" in capsys.readouterr().err


def test_quick_does_not_replace_what_is_given() -> None:
    given = restart.arguments(["--quick", "--prompt-tokens", "500"])
    assert (given.rounds, given.prompt_tokens, given.sides) == (1, 500, ["quire"])
    assert restart.arguments([]).prompt_tokens == 4096
