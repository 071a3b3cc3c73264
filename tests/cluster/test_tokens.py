"""A cluster answers with the tokens of one engine, whatever its caches are stored as, keep, share, travel by, and leave
on a disk.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM
from quire.cluster.bodies import ManifestMessage
from quire.engine.calibration import Calibration
from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.errors import ConfigError, InstancesFailedError
from quire.models.fingerprint import fingerprint

from ..clusters import ByRole, ProcessInstances, RunningCluster, ThreadedInstances
from ..codecs import EVERY, TOY, options_of, row_of
from ..effort import combine, whole
from ..nuq_tables import random_tables
from ..tiny_models import save_tiny

SHAPE = {"num_layers": 2, "num_heads": 2, "head_dim": 16}
RETENTION: dict[str, dict[str, Any]] = {
    "all": {},
    "threshold": {"retain.threshold": 0.5, "retain.profile_rows": 32},
    "budget": {"retain.budget": 0.5, "retain.profile_rows": 32},
}
CODECS = whole(sorted({"dense", *EVERY}, key=lambda name: (name not in ("dense", "nuq3", TOY.name), name)), 3)
SHARING: dict[str, tuple[str, ...] | None] = {
    "arena": (),
    "nothing": None,
    "disk of source": ("prefill",),
    "disk of receiver": ("decode",),
    "two disks": ("prefill", "decode"),
}
"""Roles of the instances with a disk of their own. All share what is in their arenas, but for "nothing"."""

LENGTHS = (1, 63, 64, 65, 128, 200, 257, 320)

GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
DRAWN = replace(
    GREEDY, temperature=0.9, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, logprobs=2
)

pytestmark = pytest.mark.usefixtures("toy_codec")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), head_dim=16)


def engine_options(model: Path, codec: str = "dense", **more: Any) -> dict[str, Any]:
    """Settings of each engine, the lonely one included. The tables of a calibrated codec are made up."""
    options = {
        "model.dtype": "float32", "runtime.device": "cpu", "runtime.threads": 1, "cache.memory": "4MiB",
        "scheduler.max_running": 8, "scheduler.token_budget": 256, **options_of(codec), **more,
    }  # fmt: skip
    if codec != "dense":
        options |= {"cache.sink_tokens": 3, "cache.check": False}
    if codec != TOY.name and row_of(codec).is_calibrated:
        options["cache.calibration"] = str(calibration(model, codec))
    return options


def calibration(model: Path, codec: str, seed: int = 0) -> Path:
    """A file with made-up tables beside the model's folder."""
    file = model.parent / f"{codec}-{seed}.safetensors"
    if not file.exists():
        Calibration(
            fingerprint(model),
            {codec: random_tables(*SHAPE.values(), seed, reach=1.0)},
            {"outlier_slots": 1.0},
            {},
        ).save(file)
    return file


@lru_cache(4)
def alone(model: Path, options: tuple[tuple[str, Any], ...]) -> LLM:
    return LLM(str(model), dict(options))


def same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """All that a client can see of some requests is equal; log-probabilities nearly, for batches differ."""
    for one, other in zip(found, expected, strict=True):
        assert one.finished and one.prompt == other.prompt and one.prompt_token_ids == other.prompt_token_ids
        assert one.kept_fraction == pytest.approx(other.kept_fraction)
        assert len(one.outputs) == len(other.outputs)
        for mine, right in zip(one.outputs, other.outputs, strict=True):
            assert mine.token_ids == right.token_ids and mine.text == right.text
            assert (mine.index, mine.finish_reason, mine.stop_reason) == (
                right.index, right.finish_reason, right.stop_reason,
            )  # fmt: skip
            assert mine.cumulative_logprob == pytest.approx(right.cumulative_logprob, abs=1e-3)
            assert flat(mine.logprobs) == pytest.approx(flat(right.logprobs), abs=1e-4)
        assert flat(one.prompt_logprobs) == pytest.approx(flat(other.prompt_logprobs), abs=1e-4)


def flat(entries: Any) -> Any:
    """Log-probabilities by place and token."""
    if entries is None:
        return None
    return {(i, token): entry.logprob for i, each in enumerate(entries) for token, entry in (each or {}).items()}


def drawn_prompts(rng: random.Random, count: int = 4) -> list[list[int]]:
    """Half of each may be that of another one."""
    shared = [rng.randrange(256) for _ in range(400)]
    lengths = [LENGTHS[-1], *rng.sample(LENGTHS[:-1], count - 1)]
    return [[*shared[: n // 2 + n % 2], *(rng.randrange(256) for _ in range(n // 2))] for n in lengths]


def disks(roles: tuple[str, ...], folder: Path) -> ByRole:
    return {role: {"tiers.disk": f"{folder / role}:64MiB"} for role in roles}


def fetch_whatever_is_stored(engine: Engine) -> None:
    """Makes fetching free, so that the engine never computes stored chunks, however fast the machine is."""
    engine.scheduler.manager.fetching.costs.fetch = lambda num_bytes: 0.0  # type: ignore[method-assign]


@combine(
    codec=CODECS,
    retention=list(RETENTION),
    sharing=list(SHARING),
    transport=["shm", "tcp"],
)
def test_tokens_are_those_of_one_engine(
    model: Path, tmp_path: Path, codec: str, retention: str, sharing: str, transport: str, seed: int
) -> None:
    """Instances in threads: with arenas of their own, which are poisoned where nothing is held."""
    rng, with_disk = random.Random(seed), SHARING[sharing]
    options = engine_options(model, codec, **RETENTION[retention], **{"cache.share": with_disk is not None})
    prompts = drawn_prompts(rng)
    # The same again when it is cached, and some that go on from there.
    later = [*prompts[:3], [*prompts[-1], *(rng.randrange(256) for _ in range(90))]]
    longest = 8 if codec == TOY.name else 30  # the reference is slow
    params = [replace(each, seed=rng.randrange(1 << 40), max_tokens=longest) for each in (GREEDY, DRAWN, GREEDY, DRAWN)]
    single_engine = alone(model, tuple(options.items()))
    expected = [single_engine.generate(asked, params) for asked in (prompts, later)]
    assert retention == "all" or (expected[0][0].kept_fraction or 1) < 1, "retention drops nothing"
    with RunningCluster(model, options, ThreadedInstances(disks(with_disk or (), tmp_path)), transport) as cluster:
        same(cluster.generate(prompts, params), expected[0])
        cluster.settle()
        for role in with_disk or ():
            cluster.evict(role)
            cluster.ask(role, fetch_whatever_is_stored)
        same(cluster.generate(later, params), expected[1])
        cluster.settle()
        told = {role: cluster.ask(role, Engine.stats) for role in ("prefill", "decode")}
    neighbour = told["decode"]["tiers"]["neighbour"]
    assert neighbour["num_read"] > 0, "nothing was handed over"
    assert neighbour["num_failed"] == neighbour["num_damaged"] == 0, "computing it again gives the same tokens"
    for role in with_disk or ():
        # With retention a receiver may get nothing but what is packed for its sequence alone.
        is_shared = role == "prefill" or retention == "all"
        assert told[role]["tiers"]["disk"]["num_read"] > 0 or not is_shared, f"{role} has read nothing from its disk"


# ---- processes -------------------------------------------------------------------------------------------------------

APART: dict[str, tuple[str, dict[str, Any], str]] = {
    "nuq3, budget, shm": ("nuq3", {"cache.memory": "160KiB", **RETENTION["budget"]}, "shm"),
    "dense, tcp": ("dense", {"cache.memory": "768KiB"}, "tcp"),
    "g4, threshold, tcp": ("g4", {"cache.memory": "512KiB", **RETENTION["threshold"]}, "tcp"),
    "nuq2, shm": ("nuq2", {"cache.memory": "160KiB", "cache.share": False}, "shm"),
}
"""Codec, settings and transport of processes whose arenas are too small for all prompts."""


@pytest.mark.slow
@pytest.mark.parametrize("case", whole(list(APART), 1))
def test_processes_answer_with_the_tokens_of_one_engine(model: Path, tmp_path: Path, case: str, seed: int) -> None:
    codec, more, transport = APART[case]
    rng, options = random.Random(seed), engine_options(model, codec, **more)
    prompts = drawn_prompts(rng, 6)
    params = [replace(each, seed=rng.randrange(1 << 40), max_tokens=20) for each in (GREEDY, DRAWN) * 3]
    expected = alone(model, tuple(options.items())).generate(prompts, params)
    apart = ProcessInstances(disks(("prefill", "decode") if options.get("cache.share", True) else (), tmp_path))
    with RunningCluster(model, options, apart, transport) as cluster:
        pids = {each["pid"] for each in cluster.cluster.stats()["cluster"]["instances"]}
        assert len(pids) == 2 and os.getpid() not in pids
        for _ in range(2):
            same(cluster.generate(prompts, params), expected)


# ---- requests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["dense", "nuq3 threshold"])
def cluster(model: Path, request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    codec, _, retention = request.param.partition(" ")
    options = engine_options(model, codec, **RETENTION[retention or "all"])
    with RunningCluster(model, options, ThreadedInstances(), "tcp") as running:
        running.single_engine = alone(model, tuple(options.items()))
        yield running
        running.settle()


TEXT = dict.fromkeys(range(97, 123), 100.0)
"""A bias to lower-case letters."""


def prompt_of(rng: random.Random, length: int = 150) -> list[int]:
    return [rng.randrange(97, 123) for _ in range(length)]


def check(cluster: RunningCluster, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
    found, right = cluster.generate(prompts, params), cluster.single_engine.generate(prompts, params)
    same(found, right)
    return right


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_the_first_token_is_neither_lost_nor_told_twice(cluster: RunningCluster, max_tokens: int, seed: int) -> None:
    prompt = prompt_of(random.Random(seed + max_tokens))
    before = cluster.ask("decode", Engine.stats)["tiers"]["neighbour"]["num_pulls"]
    params = replace(GREEDY, max_tokens=max_tokens)
    deltas = cluster.deltas(prompt, params)
    (right,) = cluster.single_engine.generate([prompt], params)
    assert [token for delta in deltas for token in delta.outputs[0].token_ids] == right.outputs[0].token_ids
    assert len(right.outputs[0].token_ids) == max_tokens
    cluster.settle()
    pulls = cluster.ask("decode", Engine.stats)["tiers"]["neighbour"]["num_pulls"] - before
    assert (pulls > 0) == (max_tokens > 1), "an answer of one token is not handed over"


@pytest.mark.parametrize("seeded", [DRAWN, replace(GREEDY, temperature=1.0)])
def test_several_answers_to_a_prompt(cluster: RunningCluster, seeded: SamplingParams, seed: int) -> None:
    (right,) = check(cluster, [prompt_of(random.Random(seed))], replace(seeded, n=3, seed=7, prompt_logprobs=1))
    assert len({tuple(each.token_ids) for each in right.outputs}) == 3


@pytest.mark.parametrize("length", [1, 64, 150])
def test_log_probabilities_of_prompt_and_answer(cluster: RunningCluster, length: int, seed: int) -> None:
    prompt = prompt_of(random.Random(seed), length)
    (right,) = check(cluster, [prompt], replace(GREEDY, max_tokens=5, logprobs=3, prompt_logprobs=2))
    assert right.prompt_logprobs is not None and len(right.prompt_logprobs) == length


@pytest.mark.parametrize("ends_at", [1, 2, 4])
@pytest.mark.parametrize("is_shown", [False, True])
def test_a_stop_string_that_spans_the_hand_over(
    cluster: RunningCluster, ends_at: int, is_shown: bool, seed: int
) -> None:
    """Its first characters are held back by the source, and the receiver tells or drops them."""
    prompt = prompt_of(random.Random(seed))
    params = replace(GREEDY, logit_bias=TEXT, seed=3, temperature=2.0, include_stop_str_in_output=is_shown)
    text = cluster.single_engine.generate([prompt], params)[0].outputs[0].text
    (right,) = check(cluster, [prompt], replace(params, stop=text[:ends_at]))
    assert right.outputs[0].finish_reason == "stop" and right.outputs[0].text == text[: ends_at * is_shown]
    # What looks like its beginning is told once it is clear that it is not.
    (right,) = check(cluster, [prompt], replace(params, stop=[text[:ends_at] + "!", text[0] + text[:9]]))
    assert right.outputs[0].finish_reason == "length" and right.outputs[0].text == text


def test_a_character_whose_bytes_are_of_two_instances(cluster: RunningCluster, seed: int) -> None:
    rng, halves = random.Random(seed), {0xC3: 100.0, 0xA9: 100.0}
    params = [replace(GREEDY, logit_bias=halves, seed=each, temperature=5.0, max_tokens=6) for each in range(8)]
    prompts = [prompt_of(rng, 40)] * 8
    found, right = cluster.generate(prompts, params), cluster.single_engine.generate(prompts, params)
    same(found, right)
    assert any(each.outputs[0].text.startswith("é") for each in right)


def test_the_least_number_of_tokens_counts_those_of_the_source(cluster: RunningCluster, seed: int) -> None:
    prompt = prompt_of(random.Random(seed))
    often = {257: 50.0}  # the end
    for least in (0, 1, 2, 9):
        params = replace(GREEDY, ignore_eos=False, logit_bias=often, min_tokens=least, max_tokens=20)
        (right,) = check(cluster, [prompt], params)
        assert right.outputs[0].finish_reason == "stop" and len(right.outputs[0].token_ids) == least + 1


def test_a_prompt_that_is_a_text_comes_back_with_the_answer(cluster: RunningCluster) -> None:
    (right,) = check(cluster, ["Once upon a time, " * 9], replace(GREEDY, prompt_logprobs=0))
    assert right.prompt is not None and right.prompt.startswith("Once")


def test_what_a_salt_keeps_apart_is_neither_found_nor_left_out_of_a_transfer(
    cluster: RunningCluster, seed: int
) -> None:
    rng = random.Random(seed)
    prompt = prompt_of(rng, 256)
    right = cluster.single_engine.generate([prompt], GREEDY)
    pulled, cached = [], []
    for salt in ("one", "two", "one"):
        before = cluster.ask("decode", Engine.stats)["tiers"]["neighbour"]["bytes_read"]
        (found,) = cluster.generate([{"prompt_token_ids": prompt, "cache_salt": salt}], GREEDY)
        assert found.outputs[0].token_ids == right[0].outputs[0].token_ids
        cluster.settle()
        pulled.append(cluster.ask("decode", Engine.stats)["tiers"]["neighbour"]["bytes_read"] - before)
        cached.append(found.num_cached_tokens)
    assert cached[:2] == [0, 0] and cached[2] > 0
    assert pulled[0] == pulled[1] and pulled[2] <= pulled[0]


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hint", "value"), [("cache_lifetime", 0.0), ("cache_priority", -100)])
def test_wishes_for_the_cache_hold_on_both_sides(model: Path, hint: str, value: float, seed: int) -> None:
    """A chunk that is dropped when its request ends is dropped by the receiver, too."""
    prompt: Any = {"prompt_token_ids": prompt_of(random.Random(seed), 200), hint: value}
    with RunningCluster(model, engine_options(model), ThreadedInstances(), "shm") as cluster:
        cluster.generate([prompt], replace(GREEDY, max_tokens=70))
        cluster.settle()
        for role in ("prefill", "decode"):
            segments = cluster.ask(role, lambda engine: list(engine.scheduler.manager.tree.segments()))
            if hint == "cache_lifetime":
                assert not segments or all(each.lifetime == 0 for each in segments)
                assert cluster.ask(role, drops_what_ends) == 0
            else:
                assert segments and {each.priority for each in segments} == {-100}


def drops_what_ends(engine: Engine) -> int:
    engine.scheduler.manager.tick(engine.clock() + 1.0)
    return engine.scheduler.manager.tree.num_chunks


def test_log_probabilities_of_a_prompt_come_with_the_first_answer(model: Path, seed: int) -> None:
    """Of several answers one computes them, and those that have the prompt from the cache are faster."""
    prompt = prompt_of(random.Random(seed), 200)
    params = replace(GREEDY, n=3, max_tokens=4, prompt_logprobs=1)
    with RunningCluster(model, engine_options(model), ThreadedInstances(), "shm") as cluster:
        cluster.generate([prompt], GREEDY)
        deltas = cluster.deltas({"prompt_token_ids": prompt}, params)
        cluster.settle()
    assert deltas[0].prompt_logprobs is not None and len(deltas[0].prompt_logprobs) == 200
    assert {each.outputs[0].index for each in deltas} == {0, 1, 2} and deltas[-1].finished


def test_caches_of_another_calibration_are_refused(model: Path) -> None:
    options = engine_options(model, "nuq3")
    other = {"cache.calibration": str(calibration(model, "nuq3", seed=1))}
    with (
        RunningCluster(model, options, ThreadedInstances({"decode": other}), "shm", tries=1) as cluster,
        pytest.raises(InstancesFailedError, match="another model, codec or calibration"),
    ):
        cluster.generate([[1] * 200], GREEDY)


def test_an_instance_that_cannot_load_says_why(model: Path) -> None:
    wrong = {"decode": {"cache.share": False, "tiers.disk": "/nowhere:64MiB"}}
    with pytest.raises(ConfigError, match=r"cache\.share is false"):
        RunningCluster(model, engine_options(model), ThreadedInstances(wrong), "shm")


@pytest.mark.parametrize("retention", ["threshold", "budget"])
def test_another_source_decides_as_the_first_one_did(model: Path, retention: str, seed: int) -> None:
    """The first one fails when it has decided what to keep, and has told its token."""
    rng = random.Random(seed)
    options = engine_options(model, **RETENTION[retention])
    prompt = prompt_of(rng, 300)
    params = replace(DRAWN, seed=5, max_tokens=80)
    right = alone(model, tuple(options.items())).generate([prompt], params)
    manifests: list[ManifestMessage] = []
    with RunningCluster(model, options, threads := ThreadedInstances(), "shm", prefill=2, decode=1) as cluster:

        def survives(name: str, to: str, message: Any) -> bool:
            if not isinstance(message, ManifestMessage):
                return True
            if message.message.attempt.request != 1:
                return True
            manifests.append(message)
            if len(manifests) == 1:
                threading.Thread(target=threads.kill, args=(name,)).start()
            return len(manifests) > 1

        for name, instance in threads.instances.items():
            instance.may_send = partial(survives, name)
        # Beside it, others are computed: what is decided does not depend on the batch.
        others = [prompt_of(rng, 100) for _ in range(3)]
        found = cluster.generate([prompt, *others], [params, *[GREEDY] * 3])
        same(found[:1], right)
        first, second = (each.cache.retained for each in manifests)
        assert first is not None and second is not None
        for field in fields(first):
            assert np.array_equal(getattr(first, field.name), getattr(second, field.name)), field.name
