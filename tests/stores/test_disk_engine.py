"""An engine with a disk: evicted chunks come back from files, also in the next process, with the same answers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import load
from quire.async_llm import AsyncLLM
from quire.cache.demotion import Demotion
from quire.cache.manager import CacheManager
from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from quire.engine.tiering import PIN_CHECK_SECONDS, RETRY_SECONDS, Tiering
from quire.errors import ConfigError, QuireError
from quire.llm import LLM
from quire.stores.direct import DirectFile
from quire.stores.disk import DiskStore
from tests.cache.test_fetching import CACHES, SHAPE, VOCABULARY

from ..disk_runs import MIB, disk_usage
from ..engines import GREEDY, drain, generate, make_engine
from ..store_helpers import put_store
from ..tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("toy_codec")

SLOW = 1e6
"""Bytes per second. The toy model's chunks have 8 KiB a layer, so this is 20 MB/s for a model with 160."""


def with_disk(folder: Path, **options: Any) -> tuple[Engine, DiskStore]:
    engine = make_engine(SHAPE, **options)
    store = DiskStore(folder, 64 * MIB, engine.namespace)  # type: ignore[arg-type]
    return put_store(make_engine(SHAPE, chunks=14, **options), store), store


def settle(engine: Engine) -> None:
    """Evicts everything, which offers it to the store."""
    manager: CacheManager = engine.scheduler.manager
    manager.eviction.evict(1000)
    engine.check()


@pytest.mark.parametrize("cache", ["dense", "g4", "retained"])
def test_chunks_come_back_from_the_disk_with_the_same_answers(cache: str, tmp_path: Path, seed: int) -> None:
    rng, options = random.Random(seed), CACHES[cache]
    prompts = [[rng.randrange(VOCABULARY) for _ in range(64 * 3 + rng.randrange(64))] for _ in range(4)]
    params = replace(GREEDY, max_tokens=20)
    expected = [generate(make_engine(SHAPE, **options), [prompt], params)[0] for prompt in prompts]
    for is_restarted in (False, True):
        engine, store = with_disk(tmp_path / "store", **options)
        for index, prompt in enumerate(prompts):
            for attempt in range(2):
                engine.add(f"{index}-{attempt}", prompt, params)
                output = drain(engine)[f"{index}-{attempt}"]
                assert output.outputs[0].token_ids == expected[index], f"seed {seed}"
                if is_restarted or attempt:
                    assert output.num_cached_tokens > 0
                settle(engine)
        stats = store.stats()
        assert stats["num_failed"] == 0 and int(stats["num_read"] or 0) > 0
        assert store.flush(10)
        store.check()
        store.close()


def fail_with(number: int) -> Callable[..., None]:
    def call(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call


def slowed(real: Callable[..., None]) -> Callable[..., None]:
    def call(file: DirectFile, views: Any, *args: Any) -> None:
        time.sleep((len(views) if isinstance(views, memoryview) else sum(map(len, views))) / SLOW)
        real(file, views, *args)

    return call


def break_disk(fault: str, folder: Path, rng: random.Random, patch: pytest.MonkeyPatch) -> None:
    files = sorted(folder.rglob("*.runs"))
    if fault == "damaged":
        assert files
        for path in files:
            data = bytearray(path.read_bytes())
            for _ in range(len(data) // 4096):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
    elif fault == "removed":
        shutil.rmtree(folder)
    elif fault == "full":
        patch.setattr(DirectFile, "write", fail_with(errno.ENOSPC))
    elif fault == "reads fail":
        patch.setattr(DirectFile, "read", fail_with(errno.EIO))
    elif fault == "writes fail":
        patch.setattr(DirectFile, "write", fail_with(errno.EIO))
    else:
        for name in ("read", "write"):
            patch.setattr(DirectFile, name, slowed(getattr(DirectFile, name)))


@pytest.mark.parametrize("fault", ["damaged", "removed", "full", "reads fail", "writes fail", "slow"])
def test_a_fault_while_requests_run_changes_no_token_and_is_said_once(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, seed: int
) -> None:
    rng, folder = random.Random(seed), tmp_path / "store"
    prompts = [[rng.randrange(VOCABULARY) for _ in range(64 * 3 + rng.randrange(64))] for _ in range(14)]
    params = replace(GREEDY, max_tokens=12)
    expected = generate(make_engine(SHAPE, chunks=200), prompts, params)
    engine, store = with_disk(folder)
    # However fast this machine computes, everything on the disk is fetched.
    monkeypatch.setattr(engine.scheduler.manager.fetching.costs, "fetch", lambda num_bytes: 0.0)
    if fault == "reads fail":
        store._reading._limit = 2
    with contextlib.closing(store):
        for num_known in range(4, 14, 2):
            if num_known == 6:
                break_disk(fault, folder, rng, monkeypatch)
            order = [*rng.sample(range(num_known), 4), num_known, num_known + 1]
            asked, wanted = [prompts[index] for index in order], [expected[index] for index in order]
            assert generate(engine, asked, params) == wanted
            settle(engine)
            store.flush(2)
            assert not folder.exists() or disk_usage(folder) <= 64 * MIB
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    said = [message for message in warnings if " is off: " in message]
    assert len(said) == (fault not in ("damaged", "slow")), warnings
    assert len(warnings) - len(said) == (fault in ("damaged", "removed", "reads fail")), warnings  # the first lost run
    assert engine.holds_nothing


def disk_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("quire-disk")]


def break_down(*given: Any) -> None:
    raise RuntimeError("on purpose")


LIBRARY: dict[str, Any] = {"model.dtype": "float32", "cache.memory": "2MiB", "runtime.threads": 1}


@pytest.mark.parametrize("where", ["prefixes that do not fit", "the measurement at start"])
def test_a_start_that_fails_leaves_no_thread_of_the_disk(where: str, tmp_path: Path, monkeypatch: Any) -> None:
    options = LIBRARY | {"tiers.disk": f"{tmp_path / 'kv'}:64MiB"}
    if where == "prefixes that do not fit":
        (tmp_path / "pins").write_text(json.dumps({"prompt": "x" * 3000}) + "\n")
        options |= {"cache.pin": str(tmp_path / "pins")}
    else:
        monkeypatch.setattr(load, "measure_prefill", break_down)
    with pytest.raises((ConfigError, RuntimeError), match="pin over 50%|on purpose"):
        LLM(str(save_tiny(tmp_path / "tiny")), options)
    assert not disk_threads()


def test_a_home_folder_that_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="home folder of ~nosuchuser is not known"):
        LLM(str(save_tiny(tmp_path / "tiny")), LIBRARY | {"tiers.disk": "~nosuchuser/kv:64MiB"})


def test_an_engine_that_breaks_down_leaves_no_thread_of_the_disk(tmp_path: Path, monkeypatch: Any) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(save_tiny(tmp_path / "tiny")), LIBRARY | {"tiers.disk": f"{tmp_path / 'kv'}:64MiB"})
        await llm.start()
        assert disk_threads()
        monkeypatch.setattr(llm._parts.engine, "step", break_down)
        with pytest.raises(QuireError, match="on purpose"):
            async for _ in llm.generate("abc"):
                pass
        await llm.close()
        assert not disk_threads()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("retains", [False, True])
def test_the_measurement_at_start_leaves_no_trace_in_statistics(retains: bool, tmp_path: Path) -> None:
    options = LIBRARY | ({"retain.budget": 0.5, "retain.profile_rows": 32} if retains else {})
    with LLM(str(save_tiny(tmp_path / "tiny")), options | {"tiers.disk": f"{tmp_path / 'kv'}:64MiB"}) as llm:
        found = llm.stats()
        assert found["costs"]["prefill_tokens_per_second"] > 0
    del found["cache"]["bytes_total"], found["cache"]["bytes_free"]
    counters = {name: value for name, value in found.items() if isinstance(value, int)}
    assert not any(counters.values()) and not any(found["cache"].values()) and not any(found["moves"].values())


def test_a_prefix_pinned_on_the_disk_outlasts_the_lifetime_of_the_cache(tmp_path: Path) -> None:
    prompt = {"prompt": "a few words that are said again and again, " * 5}
    options = LIBRARY | {"tiers.disk": f"{tmp_path / 'kv'}:64MiB", "cache.lifetime": 0.5}
    with LLM(str(save_tiny(tmp_path / "tiny")), options) as llm:
        llm.generate({**prompt, "cache_pin": {"tier": "disk", "seconds": 60}}, SamplingParams(max_tokens=1))
        assert llm.flush(10)
        time.sleep(0.7)
        llm.generate("b", SamplingParams(max_tokens=1))
        assert not llm.prefixes() and [each.num_tokens for each in llm.known_prefixes()] == [192]
        llm.engine.scheduler.manager.fetching.costs.speed = None
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=1))
        assert output.cached_by_tier == {"disk": 192}


class PinTiers:
    """Tiers that have all chunks from some time on, and refuse pins."""

    def __init__(self) -> None:
        self.has_all, self.num_asked = True, 0

    def find(self, name: bytes) -> bytes | None:
        self.num_asked += 1
        return name if self.has_all else None

    def pin(self, names: list[bytes], until: float) -> bool:
        return False


def pinning(tiers: PinTiers) -> Tiering:
    """The engine's side of tiers, with a prefix of three chunks to be pinned."""
    tiering: Any = Tiering(SimpleNamespace(demotion=SimpleNamespace(is_waiting=False)), tiers)  # type: ignore[arg-type]
    keys = SimpleNamespace(first=lambda count: [bytes([number]) for number in range(count)])
    assert tiering.pin(keys, 200, 60.0) == 192
    found: Tiering = tiering
    return found


def test_a_pin_that_is_refused_names_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    tiering = pinning(PinTiers())
    with caplog.at_level("WARNING", "quire"):
        assert tiering.idle() is None
    assert "would exceed half of this engine's part of tiers.disk" in caplog.text


def test_a_pin_that_waits_costs_a_step_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, time=time.time, now=100.0)
    monkeypatch.setattr("quire.engine.tiering.time", clock)
    tiers = PinTiers()
    tiers.has_all = False
    tiering = pinning(tiers)
    for _ in range(100):
        assert tiering.idle() == RETRY_SECONDS
    assert tiers.num_asked == 1
    clock.now += PIN_CHECK_SECONDS
    tiers.has_all = True
    assert tiering.idle() is None and tiers.num_asked == 4


def test_a_start_says_how_much_the_disk_may_hold_and_where(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, folder = str(save_tiny(tmp_path / "tiny")), tmp_path / "kv"
    with caplog.at_level("INFO", "quire"), LLM(model, LIBRARY | {"tiers.disk": f"{folder}:64MiB"}):
        pass
    assert f"at most 64MiB on the disk in {folder}" in caplog.text


def test_closing_writes_what_is_still_in_the_arena_alone(tmp_path: Path, monkeypatch: Any) -> None:
    model, options = str(save_tiny(tmp_path / "tiny")), LIBRARY | {"tiers.disk": f"{tmp_path / 'kv'}:64MiB"}
    prompt = list(range(64 * 3 + 5))
    monkeypatch.setattr(Demotion, "tick", lambda demotion, now: None)
    with LLM(model, options) as llm:
        llm.engine.add("x", prompt, GREEDY)
        while llm.engine.has_work:
            llm.engine.step()
        assert llm.stats()["tiers"]["disk"]["num_put"] == 0
    with LLM(model, options) as llm:
        llm.engine.scheduler.manager.fetching.costs.speed = None
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1))
        assert output.cached_by_tier == {"disk": 192}


KILLED = """
import json, os, signal, sys
from quire.engine.params import SamplingParams
from quire import load
from quire.llm import LLM
llm = LLM(sys.argv[1], json.loads(sys.argv[2]))
(output,) = llm.generate([json.loads(sys.argv[3])], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
assert llm.flush(30)
print(json.dumps(output.outputs[0].token_ids), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_engine_that_was_killed_serves_the_same_prefix_again(tmp_path: Path) -> None:
    model, options = str(save_tiny(tmp_path / "tiny")), LIBRARY | {"tiers.disk": f"{tmp_path / 'kv'}:64MiB"}
    prompt = list(range(64 * 3 + 5))
    words = [sys.executable, "-c", KILLED, model, json.dumps(options), json.dumps(prompt)]
    child = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr
    with LLM(model, options) as llm:
        llm.engine.scheduler.manager.fetching.costs.speed = None  # a tiny model computes faster than a disk reads
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
    assert output.cached_by_tier == {"disk": 192}
    assert output.outputs[0].token_ids == json.loads(child.stdout)


def test_what_is_always_near_stays_on_the_disk(tmp_path: Path) -> None:
    prompt = [list(range(64 * 3 + 5))]
    options = LIBRARY | {"tiers.disk": f"{tmp_path / 'kv'}:64MiB", "cache.lifetime": 2.0}
    with LLM(str(save_tiny(tmp_path / "tiny")), options) as llm:
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            (output,) = llm.generate(prompt, SamplingParams(max_tokens=1))
            assert llm.flush(10)
            time.sleep(0.1)
        assert output.cached_by_tier == {"arena": 192} and "disk" in llm.known_prefixes()[0].tiers


@pytest.mark.parametrize("caches", [("retained", "dense"), ("dense", "retained")])
def test_engines_with_and_without_retention_read_the_same_folder(
    caches: tuple[str, str], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(64 * 3 + 10)] for _ in range(2)]
    for cache in caches:
        engine, store = with_disk(tmp_path / "store", **CACHES[cache])
        for prompt in prompts:
            expected = generate(make_engine(SHAPE, **CACHES[cache]), [prompt])
            assert generate(engine, [prompt]) == expected
            settle(engine)
        assert store.flush(10)
        num_attached = sum(entry.run.num_attached for entry in store._catalog.entries.values())
        assert (num_attached > 0) == ("retained" in caches[: caches.index(cache) + 1])
        store.close()
