"""The simulator is the engine: it replays what real engines recorded, and decides the same, to the last page."""

from __future__ import annotations

import ast
import random
from typing import Any

import pytest

from quire.simulation.cluster import SimulatedCluster
from tests.effort import tries
from tests.engines import chunk_bytes
from tests.simulated import Note, RealCluster, Script, Setting, asked, first_difference, run_alone, run_cluster
from tests.tiny_models import tiny_shape

CODECS = ("dense", "g4", "nuq3")
RETENTIONS: tuple[dict[str, Any], ...] = (
    {}, {}, {"retain.budget": 0.5, "retain.profile_rows": 32}, {"retain.threshold": 0.9, "retain.profile_rows": 32},
)  # fmt: skip
SHAPE = tiny_shape(head_dim=16)


def setting(rng: random.Random, *, small: bool) -> Setting:
    """Settings under which engines evict, preempt, swap and fetch."""
    options = {
        "cache.codec": rng.choice(CODECS), "scheduler.max_running": rng.choice([3, 5, 8]),
        "scheduler.token_budget": rng.choice([136, 200, 320]), "cache.share": rng.random() < 0.9,
        "cache.lifetime": rng.choice([None, None, 0.3]), **rng.choice(RETENTIONS),
    }  # fmt: skip
    share = 1.0 if options["cache.codec"] == "dense" else 0.4  # of a dense chunk's bytes, open chunks included
    share += 0.3 * any(key.startswith("retain") for key in options)  # sums
    chunks = rng.randint(8, 12) if small else rng.randint(14, 40)
    disk = rng.choice([0, 18, 60, 60]) * chunk_bytes(SHAPE) if options["cache.share"] else 0
    return Setting(int(share * chunks * chunk_bytes(SHAPE)), options, disk, SHAPE)


EXPECTED = {
    0: {"_preempt", "retain"}, 2: {"_preempt", "retain", "evict", "start_transfer", "swapped", "Wait"},
    4: {"_preempt", "evict", "start_transfer", "expire", "follows"}, 9: {"evict", "compact"},
}  # fmt: skip
"""What some loads must lead to, so that it is compared."""


def decided(notes: list[Note]) -> set[str]:
    found = {note[2] for note in notes if len(note) > 2 and isinstance(note[2], str)}
    found |= {"swapped" for note in notes if note[2:3] == ("swap_out",) and note[4]}
    found |= {"Wait" for note in notes if note[2:4] == ("next_step", "Wait")}
    return found | {"follows" for note in notes if note[2:3] == ("next_step",) and len(note) > 4 and note[4]}


@pytest.mark.parametrize("seed", range(tries(12)))
def test_an_engine_and_its_simulation_decide_the_same(seed):
    rng = random.Random(seed)
    chosen, script = setting(rng, small=rng.random() < 0.7), Script()
    load = asked(rng, rng.randint(4, 10), 330)
    real = run_alone(chosen.real(script, rng), chosen.stores(real=True), load)
    assert EXPECTED.get(seed, set()) <= (found := decided(real)), f"only {found}"
    simulated = run_alone(chosen.simulated(script), chosen.stores(real=False), load)
    assert not (parted := first_difference(real, simulated)), f"{chosen}: {parted}"


EXPECTED_OF_CLUSTERS = {2: {"pulled", "failed", "ahead", "preempted"}, 3: {"pulled", "failed", "preempted"}}
"""What instances of some clusters must have done."""


def done(notes: list[Note]) -> set[str]:
    stats = [ast.literal_eval(note[2]) for note in notes if note[0] == "end"]
    counts = {
        "pulled": [each["tiers"]["neighbour"]["num_pulls"] for each in stats],
        "failed": [each["tiers"]["neighbour"]["num_failed"] for each in stats],
        "ahead": [each["moves"]["prefetched"] for each in stats],
        "preempted": [each["preemptions"] for each in stats],
    }
    return {name for name, found in counts.items() if any(found)}


ROLES = (("prefill", "decode"), ("mixed", "mixed"), ("prefill", "prefill", "decode"), ("prefill", "decode", "mixed"))


@pytest.mark.parametrize("seed", range(tries(8)))
def test_a_cluster_and_its_simulation_decide_the_same(seed):
    rng = random.Random(1000 + seed)
    chosen, roles = setting(rng, small=rng.random() < 0.3), ROLES[seed % len(ROLES)]
    scripts = [Script() for _ in roles]
    load = asked(rng, rng.randint(3, 8), 400)
    engines = [chosen.real(script, rng) for script in scripts]
    real = run_cluster(RealCluster, engines, chosen.stores(real=True), roles, load)
    assert EXPECTED_OF_CLUSTERS.get(seed, set()) <= (found := done(real)), f"only {found}"
    simulated = run_cluster(
        SimulatedCluster, [chosen.simulated(script) for script in scripts], chosen.stores(real=False), roles, load
    )
    assert not (parted := first_difference(real, simulated)), f"{chosen}, {roles}: {parted}"
