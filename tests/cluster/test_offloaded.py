"""Instances whose weights are partly on the disk answer with the tokens of one engine in memory: alone, and with all
that a cache may be stored as, keep and share at once.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cluster.cluster import Cluster
from quire.config import ClusterConfig
from quire.engine.engine import Engine
from quire.engine.outputs import CompletionOutput
from quire.errors import ConfigError

from ..clusters import RunningCluster, ThreadedInstances
from ..effort import combine
from ..engines import keep_calibration
from ..tiny_models import save_tiny

IN_MEMORY: dict[str, Any] = {
    "model.dtype": "float32", "model.max_context": 512, "runtime.device": "cpu", "runtime.threads": 1,
    "cache.memory": "8MiB", "scheduler.max_running": 6, "scheduler.token_budget": 256,
}  # fmt: skip
OFFLOADED = {"offload.mode": "auto", "offload.memory": "1100KiB"}
"""Of about 1.6 MiB: embedding, head and two layers need 930 KiB."""

CODECS: dict[str, dict[str, Any]] = {"dense": {}, "nuq3": {"cache.codec": "nuq3", "cache.check": False}}
RETENTION: dict[str, dict[str, Any]] = {"all": {}, "budget": {"retain.budget": 0.5, "retain.profile_rows": 32}}
REFERENCE = {"attention.backend": "reference", "cache.share": False}

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0)


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny(
        tmp_path_factory.mktemp("tiny"), num_hidden_layers=5, hidden_size=128, intermediate_size=96,
        max_position_embeddings=512,
    )  # fmt: skip
    keep_calibration(path)
    return path


def drawn_prompts(seed: int) -> list[list[int]]:
    """Some of whole chunks, some of one token more, and three with the same beginning."""
    draw = random.Random(seed)
    common = draw.choices(range(256), k=140)
    own = [draw.choices(range(256), k=length) for length in (1, 64, 129, 200)]
    return [*(common + draw.choices(range(256), k=60 + 9 * place) for place in range(3)), *own]


@lru_cache(8)
def alone(model: Path, options: tuple[tuple[str, Any], ...], seed: int) -> list[CompletionOutput]:
    """What one engine answers."""
    with LLM(str(model), dict(options)) as llm:
        return [answer.outputs[0] for answer in llm.generate(drawn_prompts(seed), GREEDY, use_tqdm=False)]


def tokens(answers: list[CompletionOutput]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def error(ours: list[CompletionOutput], theirs: list[CompletionOutput]) -> float:
    """Mean error of the tokens' log-probabilities, up to where answers go on differently."""
    errors = []
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logprobs is not None and other.logprobs is not None
        for at, there in zip(mine.logprobs, other.logprobs, strict=True):
            if at.keys() != there.keys():
                break
            errors += [abs(at[token].logprob - there[token].logprob) for token in at]
    return sum(errors) / len(errors)


def check(
    cluster: RunningCluster, prompts: list[list[int]], expected: list[CompletionOutput]
) -> dict[str, dict[str, Any]]:
    """Asks twice, the second time with what is cached. Returns the counters of both instances."""
    for _ in range(2):
        assert tokens([each.outputs[0] for each in cluster.generate(prompts, GREEDY)]) == tokens(expected)
        cluster.settle()
    told = {role: cluster.ask(role, Engine.stats) for role in ("prefill", "decode")}
    for role, stats in told.items():
        offload = stats["offload"]
        assert 0 < offload["weights_near"] < 1 and offload["weights_bytes_read"] > 0, f"{role} has all weights"
    neighbour = told["decode"]["tiers"]["neighbour"]
    assert neighbour["num_read"] > 0, "nothing was handed over"
    assert neighbour["num_failed"] == neighbour["num_damaged"] == 0, "what was handed over was computed again"
    return told


@combine(codec=list(CODECS), retention=list(RETENTION), share=[True, False], micro_batch=[None, 2])
def test_weights_on_the_disk_of_both_instances_change_no_token(
    model: Path, codec: str, retention: str, share: bool, micro_batch: int | None, seed: int
) -> None:
    options = IN_MEMORY | CODECS[codec] | RETENTION[retention] | {"cache.share": share}
    expected = alone(model, tuple(options.items()), seed)
    offloaded = OFFLOADED | ({} if micro_batch is None else {"offload.micro_batch": micro_batch})
    with RunningCluster(model, options | offloaded, ThreadedInstances(), "shm") as cluster:
        check(cluster, drawn_prompts(seed), expected)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_all_five_answer_like_one_plain_engine_with_the_same_pages_and_kept_tokens(
    model: Path, transport: str, seed: int
) -> None:
    """The instances are compared with one engine that has all weights in memory. That engine is compared with one that
    shares nothing and attends by the definition. A number between two levels of the codec may get another code in the
    latter, which changes much less than the codec and retention do.
    """
    lossy = IN_MEMORY | CODECS["nuq3"] | RETENTION["budget"]
    expected = alone(model, tuple(lossy.items()), seed)
    defined = alone(model, tuple((lossy | REFERENCE).items()), seed)
    lossless = alone(model, tuple((IN_MEMORY | REFERENCE).items()), seed)
    assert error(expected, defined) < 0.25 * error(lossless, defined)
    with RunningCluster(model, lossy | OFFLOADED, ThreadedInstances(), transport) as cluster:
        told = check(cluster, drawn_prompts(seed), expected)
    assert told["prefill"]["prefill_tokens_cached"] > 0, "nothing was shared"
    assert told["prefill"]["cache"]["bytes_retention_freed"] > 0, "nothing was freed"


def test_a_cache_on_the_disk_is_refused_before_anything_starts(model: Path) -> None:
    options = IN_MEMORY | OFFLOADED | {"offload.cache": "64MiB"}
    with pytest.raises(ConfigError, match="leave offload.cache out"):
        Cluster(str(model), options, settings=ClusterConfig(prefill=1, decode=1), processes=ThreadedInstances())
