"""Bytes that go from the instance that computes a prompt to the one that decodes, by codec and by what retention keeps.

    python benchmarks/cluster_bytes.py                     # smollm2, 4,096 tokens: minutes
    python benchmarks/cluster_bytes.py --tiny              # a random model of two layers: seconds

Each setting has a cluster of its own, one prefill and one decode instance in processes. A prompt of random tokens goes
through it, and then a second one with the same first half. Dense pages are of the model's dtype, bf16 by default.

    sent     bytes of all extents but for column sums: pages, headers, masks, exact first tokens
    pages    bytes of pages among them, with the positions of packed ones
    sums     bytes of column sums: what retention goes on with
    state    bytes of the manifest's arrays: masks, policies, positions
    second   what the second prompt sends, of the first one's
    ratio    sent, of what dense pages without retention send

The exit status is 1 if a ratio is above its bound, or if the second prompt sends more than its own half and a chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, append_record, format_table, hardware, hardware_line

from quire import SamplingParams
from quire.cache.ledger import PAGE_TOKENS
from quire.cluster.cluster import Cluster
from quire.config import ClusterConfig

SETTINGS: dict[str, tuple[dict[str, Any], float | None]] = {
    "dense": ({}, None),
    "nuq3": ({"cache.codec": "nuq3"}, 0.25),
    "dense, budget 0.5": ({"retain.budget": 0.5}, None),
    "nuq3, budget 0.5": ({"cache.codec": "nuq3", "retain.budget": 0.5}, 0.15),
}
"""Options of the engines, and the most that the ratio may be."""

SECONDS = 300.0
"""Longest wait for a count to settle."""

QUIET_SECONDS = 2.5
"""Instances tell their counters once a second."""

NAMES = ("bytes_read", "bytes_pages", "bytes_sums", "bytes_state", "num_pulls")

Counts = dict[str, int]


@dataclass(frozen=True)
class Row:
    """What two prompts sent under a setting."""

    setting: str
    first: Counts
    second: Counts

    @property
    def sent(self) -> int:
        """Bytes of the first prompt's extents, without column sums."""
        return self.first["bytes_read"] - self.first["bytes_sums"]

    @property
    def share_of_second(self) -> float:
        """What the second prompt sent, of the first one's."""
        return (self.second["bytes_read"] - self.second["bytes_sums"]) / self.sent


async def measure(setting: str, model: str, options: dict[str, Any], tokens: int, seed: int) -> Row:
    """Two prompts through a cluster."""
    rng = random.Random(seed)
    async with Cluster(model, options, settings=ClusterConfig(prefill=1, decode=1, timeout=600)) as cluster:
        vocabulary = range(300, cluster.shape.vocab_size) if cluster.shape.vocab_size > 1000 else range(256)
        first = rng.choices(vocabulary, k=tokens)
        second = first[: tokens // 2] + rng.choices(vocabulary, k=tokens - tokens // 2)
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        found = [dict.fromkeys(NAMES, 0)]
        for prompt in (first, second):
            async for _ in cluster.generate({"prompt_token_ids": prompt}, params):
                pass
            found.append(await settled(cluster, found[-1]))
    first_counts, second_counts = (
        {name: after[name] - before[name] for name in NAMES} for before, after in itertools.pairwise(found)
    )
    return Row(setting, first_counts, second_counts)


async def settled(cluster: Cluster, before: Counts) -> Counts:
    """The counters of the receiver, once they have grown and no longer change."""
    seen, since, end = before, time.monotonic(), time.monotonic() + SECONDS
    while seen == before or time.monotonic() - since < QUIET_SECONDS:
        if time.monotonic() > end:
            raise TimeoutError("nothing was handed over")
        await asyncio.sleep(0.1)
        tiers = cluster.stats().get("tiers", {}).get("neighbour", {})
        found = {name: int(tiers.get(name, 0)) for name in NAMES}
        if found != seen:
            seen, since = found, time.monotonic()
    return seen


@contextmanager
def tiny_model(tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A random model with heads of 64 channels, and the options that nuq3 needs on it: made-up tables of 3 bits."""
    sys.path.insert(0, str(ROOT))
    from quire.engine.calibration import Calibration
    from quire.models.fingerprint import fingerprint
    from tests.nuq_tables import random_tables
    from tests.tiny_models import save_tiny

    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny(Path(folder) / "tiny", head_dim=64, max_position_embeddings=tokens + 64)
        tables = random_tables(2, 2, 64, seed=0, key_bits=[3], value_bits=[3], slots=(1,), reach=1.0)
        file = Path(folder) / "nuq3.safetensors"
        Calibration(fingerprint(model), {"nuq3": tables}, {"outlier_slots": 1.0}, {}).save(file)
        yield str(model), {"model.dtype": "bfloat16", "cache.calibration": str(file), "cache.check": False}


def table_of(rows: list[Row]) -> str:
    """All that was measured."""
    dense = rows[0].sent
    return format_table(
        ("setting", "sent", "pages", "sums", "state", "second", "ratio", "at most"),
        [
            (
                row.setting, *(f"{count:,}" for count in (
                    row.sent, row.first["bytes_pages"], row.first["bytes_sums"], row.first["bytes_state"])),
                f"{row.share_of_second:.3f}", f"{row.sent / dense:.4f}", SETTINGS[row.setting][1] or "-",
            )
            for row in rows
        ],
    )  # fmt: skip


def faults_of(rows: list[Row], tokens: int) -> list[str]:
    """What is not as it must be."""
    dense, found = rows[0].sent, []
    # Column sums, and with retention what the sequence packs for itself alone, are of the whole prompt.
    most_of_second = 0.5 + PAGE_TOKENS / tokens
    for row in rows:
        options, most = SETTINGS[row.setting]
        if most is not None and row.sent > most * dense:
            found.append(f"{row.setting}: {row.sent / dense:.4f} of dense, and at most {most} are allowed")
        if "retain.budget" not in options and row.share_of_second > most_of_second:
            found.append(f"{row.setting}: the second prompt sent {row.share_of_second:.3f} of the first one's bytes")
    return found


def main() -> int:
    """Measures all settings, and judges them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers instead")
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt (default: 4096)")
    parser.add_argument("--memory", default="320MiB", help="of each instance's cache (default: 320MiB)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the results as a JSON line")
    given = parser.parse_args()
    with tiny_model(given.tokens) if given.tiny else named(given.model) as (model, more):
        rows = []
        for setting, (options, _) in SETTINGS.items():
            own = {"cache.memory": given.memory, "model.max_context": given.tokens + 64, **more, **options}
            if "cache.codec" not in options:
                own.pop("cache.calibration", None)
            rows.append(asyncio.run(measure(setting, model, own, given.tokens, given.seed)))
    name = "a tiny model" if given.tiny else given.model
    print(f"{name}, {given.tokens:,} tokens, dense pages of bf16, on {hardware_line(hardware())}\n\n{table_of(rows)}")
    if given.json:
        record = {row.setting: {"first": row.first, "second": row.second} for row in rows}
        append_record(given.json, {"benchmark": "cluster_bytes", "model": name, "tokens": given.tokens, "rows": record})
    faults = faults_of(rows, given.tokens)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


@contextmanager
def named(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A model as it is."""
    yield model, {}


if __name__ == "__main__":
    sys.exit(main())
