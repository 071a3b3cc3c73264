"""Attention of far chunks where they are. There is no GPU here: a second memory, and counters of what crosses between
the two, take the place of the GPU's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.attention.rows import RowSlice
from quire.engine import offloaded_cache, offloading
from quire.offload.attended import split_near_far
from quire.offload.policy import OffloadPolicy
from quire.offload.units import Share
from tests.engine.test_offloading import CODECS, LAYERS, ON_DISK, Run, expected, greedy, least, numbers, running

from ..effort import combine, whole
from ..engines import keep_calibration
from ..offloaded import patched, poisoned
from ..opt_paper import percents
from ..tiny_models import save_tiny

HEADS, DIM = 4, 32
LONG = {"model.max_context": 512, "offload.cache": "64MiB"}
NO_LIMIT = {"cache.memory": "16MiB"}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, num_hidden_layers=LAYERS, hidden_size=128, intermediate_size=96)
    keep_calibration(path)
    return path


@pytest.fixture(scope="module")
def of_many_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many kv heads as query heads."""
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_size": HEADS * DIM}
    return save_tiny(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS, intermediate_size=96, **sizes)


@contextlib.contextmanager
def beside_a_device(attended: float | None = None) -> Iterator[None]:
    """Memory stands for a device's, and chunks leave it for other memory. attended: what a policy says; None: without
    one.
    """
    policy = None if attended is None else OffloadPolicy(2, 2, *percents_of(attended))
    told: dict[str, Any] = {} if policy is None else {"policy_of": lambda config: policy}
    home = {"offload_target": lambda model, config: torch.device("cpu")}
    with patched(offloading, **told), patched(offloaded_cache, **told, **home):
        yield


def percents_of(attended: float) -> tuple[Any, ...]:
    return percents(100, 0), percents(0, 100), percents(100, 0), Share(attended)


@combine(codec=whole([*CODECS], 3), micro_batch=[2, 1, 3], share=[True, False], least_memory=[True, False])
def test_tokens_are_those_of_a_cache_in_memory(
    model: Path, codec: str, micro_batch: int, share: bool, least_memory: bool
) -> None:
    options = CODECS[codec] | {"cache.share": share} | ON_DISK | {"offload.micro_batch": micro_batch}
    with beside_a_device(), poisoned():
        memory = least(model, options) * (1 if least_memory else 2)
        with running(model, options | {"cache.memory": memory}) as run:
            assert run.table is not None and run.table.host is not None
            answers = run.ask() + run.ask()
            assert run.table.host.memory.bytes_crossed > 0 or not least_memory
    assert answers == expected(model, options)


def test_a_model_with_a_window_loads_what_its_rows_see(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, "mistral", num_hidden_layers=LAYERS, sliding_window=100)
    options = ON_DISK | {"offload.micro_batch": 2}
    with beside_a_device(), poisoned(), running(path, options | {"cache.memory": least(path, options)}) as run:
        assert run.table is not None and run.table.host is not None and not run.table.attends
        assert run.ask() + run.ask() == expected(path, options)
        assert run.table.host.memory.bytes_read > 0 == run.table.host.memory.bytes_crossed


def decode_bytes(run: Run, count: int, tokens: int) -> tuple[int, int]:
    """Bytes of chunks that are loaded, and bytes that cross otherwise, while `count` prompts answer one token more."""
    assert run.table is not None and run.table.host is not None
    memory = run.table.host.memory
    prompts = [numbers(place, tokens) for place in range(count)]
    at = []
    for length in (2, 3):
        before = memory.bytes_read, memory.bytes_crossed
        run.ask(prompts, greedy(length))
        at.append((memory.bytes_read - before[0], memory.bytes_crossed - before[1]))
    return at[1][0] - at[0][0], at[1][1] - at[0][1]


@pytest.mark.parametrize("codec", ["dense", "g4"])
def test_queries_cross_in_place_of_keys_and_values(of_many_heads: Path, codec: str) -> None:
    count, chunks = 3, 7
    options = CODECS[codec] | ON_DISK | LONG | NO_LIMIT | {"cache.share": False}
    found = {}
    for attended in (0.0, 1.0):
        with beside_a_device(attended), running(of_many_heads, options) as run:
            found[attended] = decode_bytes(run, count, chunks * 64 + 5)
            assert run.table is not None
            chunk = run.table.sealed.num_bytes
    assert found[0.0] == (count * chunks * chunk, 0)
    # A query, its output and the log-sum-exp of its heads.
    row = LAYERS * HEADS * (2 * DIM + 1) * 4
    assert found[1.0] == (0, count * row)
    if codec == "dense":
        assert chunk == LAYERS * HEADS * 64 * 2 * DIM * 4
        ratio = found[0.0][0] / found[1.0][1]
        assert ratio == pytest.approx(chunks * 64, rel=0.02)  # as many times fewer bytes as there are far tokens


def test_what_is_far_is_attended_to_on_the_host(model: Path) -> None:
    options = ON_DISK | LONG | NO_LIMIT
    prompts = [numbers(place, 200 + place) for place in range(3)]
    with beside_a_device(1.0), running(model, options) as run:
        assert run.table is not None and run.table.host is not None
        first = run.ask(prompts, greedy(8))
        assert first == expected(model, options, prompts, greedy(8))[:3]
        run.table.host.memory.memory.zero_()
        # Sealed chunks are nowhere else: prompts that are cached answer otherwise without them.
        assert run.ask(prompts, greedy(8)) != first


def test_prompts_load_what_they_attend_to(model: Path) -> None:
    options = ON_DISK | LONG | NO_LIMIT
    cached = numbers(0, 448)
    with beside_a_device(1.0), running(model, options) as run:
        assert run.table is not None
        run.ask([cached], greedy(1))
        before = run.table.num_layers_loaded
        run.ask([cached[:384] + numbers(1, 70)], greedy(1))
        assert run.table.num_layers_loaded - before == 6 * LAYERS


def test_a_slice_is_divided_into_near_and_far_chunks() -> None:
    piece = RowSlice(5 * 64 + 3, 1, np.arange(10, 16, dtype=np.int32), ((7, 2), (8, 2)))
    near, far = split_near_far(piece, np.array([True, False, True, True, False]))
    assert (near.chunks.tolist(), near.shared, near.num_dropped) == ([11, 14, 15], ((7, 1), (8, 0)), 3)
    assert (far.chunks.tolist(), far.shared, far.num_dropped) == ([10, 12, 13], ((7, 1), (8, 2)), 3)
    assert near.start == far.start == piece.start


def test_rows_that_share_far_chunks_read_them_once(model: Path) -> None:
    options = ON_DISK | LONG | NO_LIMIT | {"offload.micro_batch": 4}
    shared = numbers(3, 448)
    prompts = [shared + numbers(place, 10) for place in range(4)]
    with beside_a_device(1.0), running(model, options) as run:
        assert run.table is not None
        run.ask(prompts, greedy(1))
        far: Any = run.engine.runner.attention
        reads = torch.zeros(run.table.capacity, run.table.shape[1], dtype=torch.int32)
        far._far.reads = reads
        run.ask(prompts, greedy(2))
        # One decode step in each layer; the step of the prompts reads no far chunk on the host.
        assert int(reads.max()) == LAYERS
