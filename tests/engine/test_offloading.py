"""An engine whose cache and activations are on the disk: the tokens, bytes and errors of every placement."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli import main
from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.errors import ConfigError, QuireError
from quire.offload.mover import Mover
from quire.offload.policy import OffloadPolicy, policy_text
from quire.offload.table import OffloadedTable
from quire.stores.direct import DirectFile

from ..effort import combine, tries, whole
from ..engines import keep_calibration
from ..offloaded import delayed, patched, poisoned
from ..opt_paper import percents
from ..tiny_models import save_tiny, tiny_shape

LAYERS = 3
CHUNK = LAYERS * 2 * 2 * 64 * 32 * 4
"""Bytes of a dense chunk of the model."""
ALL = {"model.dtype": "float32", "model.max_context": 256, "scheduler.max_running": 4, "runtime.threads": 1}
IN_MEMORY = {"cache.memory": "8MiB"}
ON_DISK = {"offload.mode": "auto", "offload.cache": "4MiB"}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, num_hidden_layers=LAYERS, hidden_size=128, intermediate_size=96)
    keep_calibration(path)
    return path


def numbers(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(count)]


SHARED, OTHER = numbers(0, 130), numbers(1, 70)
PROMPTS = [
    *(SHARED + numbers(place, 3 + place) for place in range(2, 5)),
    numbers(5, 1),
    numbers(6, 63),
    numbers(7, 64),
    numbers(8, 128),
    *(OTHER + numbers(place, 20) for place in range(9, 11)),
]
"""More than run at once; whole chunks, one token more and one less; two shared beginnings."""


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **more)


PARAMS = [greedy(2 + 5 * (place % 4)) for place in range(len(PROMPTS))]


class Run:
    """A model, and what it answers. `table` is None if the cache is in memory."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.llm = LLM(str(path), options=ALL | IN_MEMORY | options)
        loaded = self.llm._loaded
        assert loaded is not None
        self.engine = loaded.engine
        self.model: Any = self.engine.runner.model
        table: Any = self.engine.scheduler.manager.table
        self.table: OffloadedTable | None = table if isinstance(table, OffloadedTable) else None

    def ask(self, prompts: list[list[int]] = PROMPTS, params: Any = PARAMS) -> list[list[int]]:
        found = self.llm.generate(prompts, params, use_tqdm=False)
        self.engine.check()
        return [output.token_ids for answer in found for output in answer.outputs]


@contextlib.contextmanager
def running(path: Path, options: dict[str, Any]) -> Iterator[Run]:
    run = Run(path, options)
    try:
        yield run
    finally:
        run.llm.close()


_known: dict[str, list[list[int]]] = {}


def expected(path: Path, options: dict[str, Any], prompts: Any = PROMPTS, params: Any = PARAMS) -> list[list[int]]:
    """What an engine without offloading answers, asked twice."""
    plain = {name: value for name, value in options.items() if not name.startswith("offload.")}
    key = repr((path, plain, prompts, params))
    if key not in _known:
        with running(path, plain) as run:
            _known[key] = run.ask(prompts, params) + run.ask(prompts, params)
    return _known[key]


def least(path: Path, options: dict[str, Any]) -> int:
    """The memory that the error of a cache on the disk names."""
    with pytest.raises(ConfigError, match="an offloaded cache needs at least") as found:
        Run(path, options | {"cache.memory": 1000})
    return int(str(found.value).split("at least ")[1].split()[0])


def found(
    path: Path, options: dict[str, Any], prompts: Any = PROMPTS, params: Any = PARAMS, *, asks: int = 2
) -> list[list[int]]:
    """What an engine with offloading answers in the least memory that it takes."""
    with running(path, options | {"cache.memory": least(path, options)}) as run:
        assert run.table is not None
        answers = [answer for _ in range(asks) for answer in run.ask(prompts, params)]
        assert run.table.num_layers_loaded > 0 and run.table.num_layers_stored > 0
        return answers


def policy_file(folder: Path, micro_batch: int, num_batches: int, weights: int, cache: int, hidden: int) -> str:
    """A policy with these percents in memory."""
    splits = (percents(each, 100 - each) for each in (weights, cache, hidden))
    file = folder / "policy.json"
    file.write_text(policy_text(OffloadPolicy(micro_batch, num_batches, *splits), ("cpu", "disk")))
    return str(file)


CODECS: dict[str, dict[str, Any]] = {
    "dense": {},
    "g4 sinks": {"cache.codec": "g4", "cache.sink_tokens": 1},
    "nuq3": {"cache.codec": "nuq3", "cache.check": False},
    "g4": {"cache.codec": "g4"},
    "nuq2": {"cache.codec": "nuq2", "cache.check": False},
    "nuq4": {"cache.codec": "nuq4", "cache.check": False},
    "nuq3 no sinks": {"cache.codec": "nuq3", "cache.check": False, "cache.sink_tokens": 0},
}


@combine(
    codec=whole([*CODECS], 3),
    micro_batch=[2, 1, 3],
    sharing=["shared", "alone"],
    overlap=[True, False],
)
def test_tokens_are_those_of_a_cache_in_memory(
    model: Path, codec: str, micro_batch: int, sharing: str, overlap: bool
) -> None:
    options = CODECS[codec] | {"cache.share": sharing == "shared"} | ON_DISK
    options |= {"offload.overlap": overlap, "offload.micro_batch": micro_batch}
    with poisoned():
        assert found(model, options) == expected(model, options | {"offload.overlap": True})


@combine(
    sizes=whole([(2, 2), (1, 4), (3, 2), (4, 1), (2, 8)], 3),
    weights=[50, 0, 100],
    cache=[0, 30],
    hidden=[0, 50, 100],
    codec=["dense", "g4 sinks"],
)
def test_tokens_are_those_of_memory_under_every_policy(
    model: Path, tmp_path: Path, sizes: tuple[int, int], weights: int, cache: int, hidden: int, codec: str
) -> None:
    options = CODECS[codec] | ON_DISK | {"offload.mode": policy_file(tmp_path, *sizes, weights, cache, hidden)}
    with poisoned():
        assert found(model, options, asks=1) == expected(model, options)[: len(PROMPTS)]


@pytest.mark.parametrize("hidden", [100, 50, 0])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_cache_in_memory_may_be_computed_in_micro_batches(
    model: Path, tmp_path: Path, hidden: int, overlap: bool
) -> None:
    options = {"offload.mode": policy_file(tmp_path, 2, 2, 40, 100, hidden), "offload.overlap": overlap}
    with running(model, options) as run:
        assert run.table is None
        assert run.ask() + run.ask() == expected(model, options)
        mover = run.model.states._mover
        assert (mover is not None and mover.bytes_written > 0) == (hidden < 100)


@pytest.mark.parametrize(
    "retain",
    [
        {"retain.budget": 0.5, "retain.profile_rows": 8},
        {"retain.threshold": 0.9, "retain.profile_rows": 8},
        {"retain.threshold": 0.9, "retain.profile_rows": 8, "cache.codec": "g4"},
    ],
    ids=["budget", "threshold", "g4"],
)
def test_retention_decides_the_same_in_micro_batches(model: Path, retain: dict[str, Any]) -> None:
    options = retain | {"offload.mode": "auto", "offload.micro_batch": 2}
    with running(model, options) as run:
        assert run.ask() + run.ask() == expected(model, options)


@pytest.mark.parametrize("codec", ["dense", "g4"])
def test_weights_on_the_disk_go_with_retention_and_a_disk_tier(model: Path, tmp_path: Path, codec: str) -> None:
    plain = CODECS[codec] | {"retain.budget": 0.5, "retain.profile_rows": 8}
    expected_twice = expected(model, plain)
    count = len(PROMPTS)
    options = plain | {"tiers.disk": f"{tmp_path / 'kv'}:64MiB"}
    options |= {"offload.mode": policy_file(tmp_path, 2, 2, 0, 100, 0)}
    for number in range(2):
        with running(model, options) as run:
            assert run.table is None
            assert run.ask() == expected_twice[number * count : (number + 1) * count]
        assert any(path.is_file() for path in (tmp_path / "kv").rglob("*")), "the tier has nothing"


@pytest.mark.parametrize("codec", ["dense", "g4 sinks"])
def test_stop_tokens_and_several_answers_change_nothing(model: Path, codec: str) -> None:
    first = expected(model, CODECS[codec])
    params: list[SamplingParams] = [greedy(40, stop_token_ids=[answer[1]]) for answer in first[: len(PROMPTS)]]
    params[1] = SamplingParams(n=3, max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    options = CODECS[codec] | ON_DISK | {"offload.micro_batch": 2, "scheduler.max_running": 3}
    with poisoned():
        assert found(model, options, PROMPTS, params) == expected(model, options, PROMPTS, params)


@pytest.mark.parametrize("share", [True, False])
def test_sequences_that_lose_their_room_begin_again(model: Path, share: bool) -> None:
    prompts, params = [numbers(place, 60) for place in range(4)], [greedy(140)] * 4
    options = {"offload.mode": "auto", "offload.cache": 14 * CHUNK, "offload.micro_batch": 2, "cache.share": share}
    with poisoned(), running(model, options | {"cache.memory": least(model, options)}) as run:
        assert run.table is not None
        assert run.ask(prompts, params) == expected(model, options, prompts, params)[:4]
        assert run.engine.scheduler.counters.preemptions > 0


def test_moves_that_take_any_time_change_nothing(model: Path, tmp_path: Path, seed: int) -> None:
    """Every read and write takes 0 to 20 ms longer."""
    prompts, params = [*PROMPTS[:2], PROMPTS[4], PROMPTS[5]], [greedy(3)] * 4
    for number in range(tries(2)):
        generator = random.Random(f"{seed} {number}")
        sizes = generator.choice(((1, 4), (2, 2), (3, 1)))
        shares = (generator.choice((0, 50)), generator.choice((0, 40)), generator.choice((0, 50)))
        codec = CODECS[generator.choice(("dense", "dense", "g4 sinks"))]
        options = codec | ON_DISK | {"offload.mode": policy_file(tmp_path, *sizes, *shares)}
        wanted = expected(model, options, prompts, params)
        with poisoned(), delayed(number, 0.02):
            assert found(model, options, prompts, params, asks=1) == wanted[: len(prompts)]


@pytest.mark.parametrize("window", [16, 100])
def test_a_sliding_window_reads_the_same(tmp_path: Path, window: int) -> None:
    path = save_tiny(tmp_path / "model", "mistral", sliding_window=window)
    options = ON_DISK | {"offload.micro_batch": 2}
    with poisoned():
        assert found(path, options) == expected(path, options)


def test_a_context_of_part_of_a_chunk_is_served_to_its_end(model: Path) -> None:
    options = ON_DISK | {"model.max_context": 150, "offload.micro_batch": 1}
    prompts, params = [SHARED[:149], numbers(20, 100), numbers(21, 128)], [greedy(1), greedy(50), greedy(22)]
    with poisoned():
        assert found(model, options, prompts, params) == expected(model, options, prompts, params)


def test_an_automatic_memory_is_no_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the chunks of 64 sequences of 4,096 tokens, and their buffers, would take 59 MiB of the 60 free."""
    monkeypatch.setattr("quire.engine.build.available_memory", lambda device: 60 << 20)
    options = {"offload.mode": "auto", "offload.memory": "4MiB", "offload.cache": "1GiB", "scheduler.max_running": 64}
    shape = tiny_shape(num_layers=8, max_context=4096, vocab_size=100_000)
    resolved, fits = resolve(EngineConfig.from_options(options), shape)
    assert fits.disk_bytes and fits.fit_the_machine, fits.fails_first
    assert resolved.cache.memory == (60 - 4 << 20) // 2


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["dense", "g4"])
def test_the_bytes_that_move_are_those_of_the_layers_told(model: Path, codec: str) -> None:
    with running(model, CODECS[codec] | ON_DISK | {"cache.memory": least(model, CODECS[codec] | ON_DISK)}) as run:
        run.ask()
        table, mover = run.table, run.table and run.table.mover
        assert table is not None and mover is not None
        (layer_bytes,) = set(table.sealed.layer_bytes.tolist())
        assert mover.bytes_read == table.num_layers_loaded * layer_bytes > 0
        assert mover.bytes_written == table.num_layers_stored * layer_bytes > 0


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_shared_beginning_is_loaded_once_a_layer(model: Path, micro_batch: int) -> None:
    """Four sequences share two chunks, which are on the disk, in every step of which they all decode."""
    prompts = [[*SHARED, place] for place in range(4)]
    options = ON_DISK | {"offload.micro_batch": micro_batch, "scheduler.max_running": 4}
    with running(model, options | {"cache.memory": least(model, options)}) as run:
        assert run.table is not None
        run.ask(prompts[:1], [greedy(1)])
        before, steps = run.table.num_layers_loaded, run.engine.scheduler.counters.steps
        run.ask(prompts, [greedy(8)] * 4)
        steps = run.engine.scheduler.counters.steps - steps
        assert run.table.num_layers_loaded - before == 2 * LAYERS * steps


def test_weights_are_read_once_a_step_for_all_micro_batches(model: Path, tmp_path: Path) -> None:
    options = {"offload.mode": policy_file(tmp_path, 1, 4, 0, 0, 100)}
    with running(model, options | {"cache.memory": least(model, options)}) as run:
        run.ask()
        stream, steps = run.model.stream, run.engine.scheduler.counters.steps
        assert steps > 10
        assert LAYERS * steps <= stream.num_loads <= LAYERS * steps + 2


def test_a_block_whose_sequences_have_stopped_moves_no_more(model: Path, tmp_path: Path) -> None:
    """They stop at their third token, of 60."""
    prompts = [numbers(place, 140) for place in range(4)]
    options = {"offload.mode": policy_file(tmp_path, 2, 2, 0, 0, 0)}
    stops = [[answer[2]] for answer in expected(model, {}, prompts, [greedy(3)] * 4)[:4]]
    with running(model, options | {"cache.memory": least(model, options)}) as run:
        assert run.table is not None
        found = run.ask(prompts, [greedy(60, stop_token_ids=stop) for stop in stops])
        assert all(1 <= len(answer) <= 3 for answer in found)
        stream, steps = run.model.stream, run.engine.scheduler.counters.steps
        assert steps <= 3 and LAYERS * steps <= stream.num_loads <= LAYERS * steps + 2
        movers = run.table.mover, run.model.states._mover
        moved = [(mover.bytes_read, mover.bytes_written) for mover in movers]
        assert not run.llm.engine.has_work and not run.llm.engine.step()
        time.sleep(0.05)
        assert [(mover.bytes_read, mover.bytes_written) for mover in movers] == moved
        assert stream.num_loads <= LAYERS * steps + 2


@pytest.mark.parametrize("percent", [0, 25, 50, 80])
def test_the_share_of_the_cache_in_memory_is_what_the_policy_says(model: Path, tmp_path: Path, percent: int) -> None:
    """Within one chunk after every step, the chunks that the step filled aside."""
    prompts = [numbers(place, 200) for place in range(4)]
    options = {"offload.mode": policy_file(tmp_path, 2, 2, 100, percent, 100), "offload.cache": "8MiB"}
    with running(model, options | {"cache.memory": "6MiB"}) as run:
        table = run.table
        assert table is not None and table.memory_plan.num_near > 16
        placed = table.place

        def checked(batches: Any) -> Any:
            result = placed(batches)
            count, near = table.frames.num_sealed, table.frames.num_near
            assert near <= percent / 100 * count + 1, f"{near} of {count} chunks"
            return result

        with patched(table, place=checked):
            run.ask(prompts, [greedy(50)] * 4)
        assert abs(table.frames.near_share - percent / 100) * table.frames.num_sealed <= 3


# ---- faults ----------------------------------------------------------------------------------------------------------


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("quire-mover", "quire-weights"))]


@pytest.mark.parametrize("what", ["cache read", "cache write", "activations read", "activations write"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_move_that_fails_is_an_error_and_no_hang(
    model: Path, tmp_path: Path, what: str, overlap: bool, seed: int
) -> None:
    """At any of its moves. The model answers as before afterwards: nothing of the failed step is left."""
    contents, kind = what.split()
    options = {"offload.mode": policy_file(tmp_path, 1, 4, 50, 0, 0), "offload.overlap": overlap}
    generator = random.Random(f"{seed} {what}")
    prompts, params = PROMPTS[:4], PARAMS[:4]
    with running(model, options | {"cache.memory": least(model, options)}) as run:
        assert run.table is not None
        mover: Mover = run.table.mover if contents == "cache" else run.model.states._mover
        move = getattr(mover._file, kind)
        wanted = run.ask(prompts, params)
        for number in range(tries(1)):
            left = [generator.randrange(1, 12)]

            def failing(*arguments: Any, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] == 0:
                    raise OSError(errno.EIO, "Input/output error")
                move(*arguments)

            others = [numbers(1000 + 10 * number + place, 128) for place in range(4)]
            with patched(mover._file, **{kind: failing}), poisoned(), delayed(number, 0.001):
                with pytest.raises(QuireError, match=f"offloaded {contents} cannot be moved: .*Input/output error"):
                    run.ask(others, [greedy(3)] * 4)
                assert run.ask(prompts, params) == wanted


def test_a_batch_keeps_what_was_done_before_the_disk_failed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": f"r{place}", "prompt_token_ids": prompt} for place, prompt in enumerate(PROMPTS * 2)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ALL | ON_DISK | {"scheduler.max_running": 1, "cache.share": False}
    options |= {"cache.memory": least(model, options)}
    words = ["generate", str(model), "--input", str(source), "--output", str(output), "--max-tokens", "4"]
    words += [f"--{name}={str(value).lower()}" for name, value in options.items()] + ["--temperature", "0"]
    write, left = DirectFile.write, [12]

    def full(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments)

    with patched(DirectFile, write=full):
        assert main(words) == 1
    told, done = capsys.readouterr().err, output.read_text().splitlines()
    assert "No space left on device; the same command goes on" in told and "Traceback" not in told
    assert 0 < len(done) < len(lines)
    assert main(words) == 0
    answers = output.read_text().splitlines()
    assert answers[: len(done)] == done and len(answers) == len(lines)


def test_nothing_is_left_after_closing(model: Path, tmp_path: Path) -> None:
    options = {"offload.mode": policy_file(tmp_path, 2, 2, 50, 0, 0)}
    gc.collect()
    before = threads()
    with running(model, options | {"cache.memory": least(model, options)}) as run:
        folder = run.model.folder
        files = {*folder.iterdir()}
        assert run.ask() and len(threads()) == len(before) + 6
        assert {*folder.iterdir()} == files, "a file has a name"
    del run
    gc.collect()
    assert threads() == before


def test_a_start_that_is_refused_leaves_no_threads(model: Path, tmp_path: Path) -> None:
    gc.collect()
    before = threads()
    least(model, {"offload.mode": policy_file(tmp_path, 2, 2, 50, 0, 0)})
    gc.collect()
    assert threads() == before


def test_a_disk_without_room_is_refused_with_the_reason(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has more bytes than the cache: a layer of a chunk is padded to 4 KiB."""
    options = CODECS["g4"] | ON_DISK
    memory = least(model, options)
    with running(model, options | {"cache.memory": memory}) as run:
        assert run.table is not None
        cache = run.table.ledger.num_bytes
        wanted = cache // run.table.chunk_bytes(run.table.sealed_codec) * run.table.sealed.num_bytes
        assert wanted > cache
    for free, is_enough in ((cache, False), (wanted - 1, False), (wanted, True)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: type("Usage", (), {"free": free}))
        if is_enough:
            Run(model, options | {"cache.memory": memory}).llm.close()
            continue
        with pytest.raises(ConfigError, match=r"the cache on the disk may take .*; lower offload.cache"):
            Run(model, options | {"cache.memory": memory})


@combine(codec=["dense", "g4", "g4 sinks"], max_running=[4, 1, 9], strength=1)
def test_the_memory_that_an_error_names_is_the_least_that_is_enough(model: Path, codec: str, max_running: int) -> None:
    options = CODECS[codec] | ON_DISK | {"scheduler.max_running": max_running}
    enough = least(model, options)
    with pytest.raises(ConfigError, match="needs at least"):
        Run(model, options | {"cache.memory": enough - 1})
    with running(model, options | {"cache.memory": enough}) as run:
        assert run.table is not None
        sidecars = run.table._sidecars.count * run.table._sidecars.num_bytes
        assert run.table.arena.num_bytes - sidecars <= enough + 4096, "the cache takes more memory than it may"


def test_a_folder_that_takes_no_file_is_refused(model: Path) -> None:
    def failing(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    memory = least(model, ON_DISK)
    with (
        patched(Mover, __init__=failing),
        pytest.raises(ConfigError, match="no file for the cache in .*Read-only file system"),
    ):
        Run(model, ON_DISK | {"cache.memory": memory})
