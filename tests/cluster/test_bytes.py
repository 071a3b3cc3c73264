"""What travels between instances: what the manifests say, no byte more, and nothing twice."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.cache.ledger import PAGE_TOKENS
from quire.cluster import wire
from quire.cluster.bodies import CacheState, ManifestMessage, PullRequest, cache_state_of, swapped_of
from quire.cluster.messages import Attempt, Manifest, Token
from quire.cluster.transport.channel import Channel
from quire.cluster.transport.sockets import SocketStream
from quire.engine.admission import AdmittedRequest
from quire.engine.engine import Engine
from quire.engine.handover import Handover
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.errors import ExtentError

from ..benchmark_scripts import benchmark
from ..clusters import RunningCluster, ThreadedInstances
from ..codecs import options_of
from ..effort import combine
from ..engines import GREEDY, drain, make_engine
from ..tiny_models import save_tiny, tiny_shape
from .test_tokens import CODECS, RETENTION, alone, engine_options, prompt_of

cluster_bytes = benchmark("cluster_bytes")

pytestmark = pytest.mark.usefixtures("toy_codec")

Ports = frozenset[int]

HEADER_BYTES, FRAME_BYTES, HANDSHAKE_BYTES = 80, 40, 400
"""Of an extent (docs/reference/page-format.md); of a frame around a message or an extent; at most, of a connection."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), head_dim=16)


class Written:
    """Counts what is written to TCP connections, in both directions together, by the ports of each.

    bytes    all of them
    framed   those of messages and extents, with their frames
    extents  those of extents alone
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes, self.framed, self.extents = Counter[Ports](), Counter[Ports](), Counter[Ports]()
        write, send = SocketStream.write, Channel.send

        def counted_write(stream: SocketStream, *parts: bytes | memoryview) -> None:
            self.bytes[ports_of(stream)] += sum(map(len, parts))
            write(stream, *parts)

        def counted_send(
            channel: Channel, kind: int, number: int, meta: bytes = b"", payload: memoryview | None = None
        ) -> None:
            ports, extent_bytes = ports_of(channel.stream), 0 if payload is None else len(payload)
            self.framed[ports] += FRAME_BYTES + len(meta) + extent_bytes
            self.extents[ports] += extent_bytes
            send(channel, kind, number, meta, payload)

        monkeypatch.setattr(SocketStream, "write", counted_write)
        monkeypatch.setattr(Channel, "send", counted_send)


def ports_of(stream: SocketStream) -> Ports:
    """Empty if the peer has gone."""
    with contextlib.suppress(OSError):
        return frozenset(port for _, port in (stream._socket.getsockname(), stream._socket.getpeername()))
    return frozenset()


def expected_bytes(engine: Engine, cache: CacheState | None, parts: frozenset[int], num_shared: int) -> int:
    """Bytes of the extents of some parts, from the page format's document and a manifest alone.

    cache  None: parts are shared chunks
    """
    table: Any = engine.scheduler.manager.table
    num_layers, num_heads = table.shape
    beside = 0 if table.sinks is None else table.sinks.layer_bytes
    total = 0
    if chunks := [part for part in parts if part < num_shared]:
        total += num_layers * (HEADER_BYTES + len(chunks) * (6 + 9 * num_heads))
        total += len(chunks) * int(table.sizes[table.sealed_codec.kernel_id].sum())
        total += num_layers * beside * (0 in chunks)
    if num_shared in parts:
        assert cache is not None and cache.own is not None
        own = cache.own
        total += num_layers * (HEADER_BYTES + len(own.kinds) * (6 + 9 * num_heads))
        total += int(table.sizes[own.kinds][own.masks != 0].sum()) + 4 * PAGE_TOKENS * int(own.placed.sum())
        total += num_layers * beside * int(own.has_sidecar.sum())
    return total


@combine(1, codec=CODECS, retention=list(RETENTION))
def test_bytes_on_the_wire_are_those_of_the_manifests(
    model: Path, codec: str, retention: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, written = random.Random(seed), Written(monkeypatch)
    options = engine_options(model, codec, **RETENTION[retention])
    prompts = [prompt_of(rng, length) for length in (1, 64, 100, 300)]
    prompts.append([*prompts[-1][:256], *prompt_of(rng, 70)])
    with RunningCluster(model, options, ThreadedInstances(), "tcp") as cluster:
        source, receiver = cluster.instance("prefill"), cluster.instance("decode")
        for prompt in prompts:
            cluster.generate([prompt], replace(GREEDY, max_tokens=4))
        cluster.settle()
        manifests = {each.message.attempt: each for _, each in source.sent if isinstance(each, ManifestMessage)}
        asked = [each for _, each in receiver.sent if isinstance(each, PullRequest)]
        right = 0
        for want in asked:
            cache = manifests[want.attempt].cache
            right += expected_bytes(receiver.engine, cache, want.parts, cache.num_shared)
        twice = Counter((want.attempt, part) for want in asked for part in want.parts)
        assert set(twice.values()) == {1}, "something is asked for twice"
        by_attempt: dict[Attempt, set[int]] = {}
        for attempt, part in twice:
            by_attempt.setdefault(attempt, set()).add(part)
        for attempt, manifest in manifests.items():
            parts, pulled = manifest.message.parts, by_attempt.get(attempt, set())
            assert pulled <= parts and (not parts or max(parts) in pulled), "the rest always travels"
        told = receiver.ask(Engine.stats)["tiers"]["neighbour"]
        assert told["bytes_read"] == right
        assert told["bytes_read"] >= told["bytes_pages"] + told["bytes_sums"] > 0
        owns = [each.cache.own for each in manifests.values() if each.cache.own is not None]
        attached = [(own.masks != 0)[len(own.kinds) - own.num_attached :] for own in owns]
        assert told["bytes_sums"] == 4 * PAGE_TOKENS * sum(int(each.sum()) for each in attached)
        assert (told["bytes_sums"] > 0) >= (retention == "budget") and told["bytes_state"] > 0
        router = int(cluster.cluster.supervisor._address.rpartition(":")[2])
        between = [ports for ports in written.bytes if ports and router not in ports]
        total, framed, extents = (
            sum(counts[ports] for ports in between) for counts in (written.bytes, written.framed, written.extents)
        )
    assert extents == right
    assert framed <= total <= framed + HANDSHAKE_BYTES * len(between)


def test_a_second_request_with_the_prefix_sends_only_its_suffix(model: Path, seed: int) -> None:
    rng = random.Random(seed)
    shared = prompt_of(rng, 320)
    with RunningCluster(model, engine_options(model), ThreadedInstances(), "shm") as cluster:
        pulled = []
        for length in (0, 70, 64):
            sent = cluster.instance("decode").sent
            before = len(sent)
            cluster.generate([[*shared, *prompt_of(rng, length)]], GREEDY)
            cluster.settle()
            parts = [each.parts for _, each in sent[before:] if isinstance(each, PullRequest)]
            pulled.append({part for each in parts for part in each})
    assert pulled == [{0, 1, 2, 3, 4}, {5, 6}, {5}]


@pytest.mark.parametrize("retention", [name for name in RETENTION if name != "all"])
@pytest.mark.parametrize("codec", ["dense", "nuq3"])
def test_all_that_retention_knows_travels(retention: str, codec: str, seed: int) -> None:
    """Policies, positions, sums, the local window and the counts of its path, as bytes: every field of them."""
    rng, shape = random.Random(seed), tiny_shape(head_dim=16)
    engine = make_engine(shape, **options_of(codec), **RETENTION[retention])
    engine.queue("x", AdmittedRequest(None, prompt_of(rng, 300), GREEDY), continued=Handover(1, will_hand_over=True))
    drain(engine)
    swapped = engine.exports["x"].swapped
    table: Any = engine.scheduler.manager.table
    state = wire.decode(wire.encode(_as_manifest(cache_state_of(swapped, table.shape, b"digest")))).cache
    found = swapped_of(state, 300, table.shape, len(table.sizes), b"digest")
    mine, right = found.path.retention.retained, swapped.path.retention.retained
    assert mine is not None and right is not None and right.positions.shape[2] > 0
    assert vars(mine).keys() == vars(right).keys()
    for name, value in vars(right).items():
        np.testing.assert_equal(vars(mine)[name], value, name)
    assert found.run is not None and swapped.run is not None
    for field in fields(found.run):
        if field.name != "namespace":
            np.testing.assert_equal(getattr(found.run, field.name), getattr(swapped.run, field.name), field.name)
    for part in ("path", "path.reservation", "path.retention"):
        here, there = attrgetter(part)(found), attrgetter(part)(swapped)
        for field in fields(here):
            # The other engine reserves room itself, and the request says the rest.
            if field.name not in (
                "retained", "num_reserved", "num_chunks", "priority", "lifetime", "reservation", "retention",
            ):  # fmt: skip
                np.testing.assert_equal(getattr(here, field.name), getattr(there, field.name), field.name)
    with pytest.raises(ExtentError, match="another model, codec or calibration"):
        swapped_of(state, 300, table.shape, len(table.sizes), b"another")
    engine.end_export("x")
    assert state.own is not None and state.retained is not None
    own, kept = state.own, state.retained
    for wrong in (
        {"layers": (0, 1)}, {"heads": (1, 2)}, {"num_tokens": 299}, {"num_shared": 5}, {"num_shared": -1},
        {"num_sealed": 6}, {"num_stored": -1}, {"num_dropped": 6}, {"free_until": -64}, {"free_until": 6 * 64 + 1},
        {"own": replace(own, names=(b"short",))}, {"own": replace(own, names=())},
        {"own": replace(own, names=own.names * 2)}, {"own": replace(own, is_shared=True)},
        {"own": replace(own, tokens=np.zeros(64, np.int32))}, {"own": replace(own, start=1)},
        {"own": replace(own, parent=own.names[0])}, {"own": replace(own, is_divisible=True)},
        {"own": replace(own, num_attached=len(own.kinds) + 1)},
        {"own": replace(own, masks=own.masks[1:])}, {"own": replace(own, placed=own.placed[:, 1:])},
        {"own": replace(own, kinds=own.kinds + len(table.sizes))}, {"own": replace(own, bases=own.bases[1:])},
        {"own": replace(own, has_sidecar=own.has_sidecar[1:])}, {"own": replace(own, kinds=own.kinds[:0])},
        {"retained": replace(kept, policies=kept.policies[1:])},
        {"retained": replace(kept, in_place=kept.in_place[1:])},
        {"retained": replace(kept, positions=kept.positions[:, :, 1:])},
        {"retained": replace(kept, policies=kept.policies + 100)}, {"retained": replace(kept, members=("king",))},
    ):  # fmt: skip
        with pytest.raises(ExtentError):
            swapped_of(replace(state, **wrong), 300, table.shape, len(table.sizes), b"digest")
    with pytest.raises(wire.WireError, match="namespace"):
        wire.decode(wire.encode(_as_manifest(replace(state, own=replace(own, namespace=engine.namespace)))))


def _as_manifest(cache: CacheState) -> ManifestMessage:
    token = Token(Attempt(1, 1), output=CompletionOutput(0, "", [1]))
    return ManifestMessage(Manifest(token.attempt, frozenset({0}), token), cache)


@pytest.mark.parametrize("prefix", ["half", "nothing"])
def test_the_benchmark_counts_and_judges(prefix: str) -> None:
    counts = {"bytes_read": 1100, "bytes_pages": 900, "bytes_sums": 100, "bytes_state": 7, "num_pulls": 1}
    second = {name: count // 2 if prefix == "half" else count for name, count in counts.items()}
    rows = [cluster_bytes.Row(setting, counts, second) for setting in cluster_bytes.SETTINGS]
    faults = cluster_bytes.faults_of(rows, 4096)
    assert [fault.partition(":")[0] for fault in faults if "of dense" in fault] == ["nuq3", "nuq3, budget 0.5"]
    assert any("second prompt" in fault for fault in faults) == (prefix == "nothing")
    assert cluster_bytes.table_of(rows).splitlines()[2].split()[1:5] == ["1,000", "900", "100", "7"]


@pytest.mark.parametrize(("retention", "most"), [("all", 0.25), ("budget", 0.15)])
def test_encoded_and_retained_caches_send_a_fraction_of_dense_ones(retention: str, most: float, seed: int) -> None:
    """As benchmarks/cluster_bytes.py, with fewer tokens."""
    prompt = prompt_of(random.Random(seed), 1024)
    sent = []
    with cluster_bytes.tiny_model(1200) as (folder, more):
        for codec in ("dense", "nuq3"):
            options = {**more, "cache.codec": codec, "cache.memory": "16MiB", "runtime.threads": 1}
            if codec == "dense":
                del options["cache.calibration"]
            else:
                options |= RETENTION[retention]
            with RunningCluster(folder, options, ThreadedInstances(), "shm") as cluster:
                cluster.generate([prompt], replace(GREEDY, max_tokens=2))
                told = cluster.ask("decode", Engine.stats)["tiers"]["neighbour"]
            sent.append(told["bytes_read"] - told["bytes_sums"])
    assert 0 < sent[1] <= most * sent[0], sent


def test_an_idle_receiver_fetches_chunks_while_the_prompt_is_computed(model: Path, seed: int) -> None:
    options = {**engine_options(model), "scheduler.token_budget": 72}
    with RunningCluster(model, options, ThreadedInstances(), "shm") as cluster:
        source, prompt = cluster.instance("prefill").engine, prompt_of(random.Random(seed), 450)
        step = source.step

        def slow_step() -> list[RequestOutput]:
            time.sleep(0.1 if source.has_work else 0.0)
            return step()

        source.step = slow_step  # type: ignore[method-assign]
        (found,) = cluster.generate([prompt], GREEDY)
        cluster.settle()
        told = cluster.ask("decode", Engine.stats)
        assert cluster.cluster.router.counts["again"] == 0
    (right,) = alone(model, tuple(options.items())).generate([prompt], GREEDY)
    assert found.outputs[0].token_ids == right.outputs[0].token_ids
    assert told["moves"]["prefetched"] > 3, "nearly nothing came before the prompt was computed"
