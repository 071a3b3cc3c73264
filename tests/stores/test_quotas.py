"""Quotas of the writers of a folder: fair shares that never exceed the cap."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from quire.stores import quotas as quotas_module
from quire.stores.folder import SLACK_BYTES, StoreFolder, writer_bytes
from quire.stores.quotas import QuotaRecord, Quotas, _read

from ..disk_runs import MIB, disk_usage
from ..effort import tries

CAP = 64 * MIB


def keep(subfolder: Path, num_bytes: int) -> None:
    """Removes files until so many bytes are gone, or all."""
    goal = writer_bytes(subfolder) - num_bytes
    for path in sorted(subfolder.glob("*.runs"), key=lambda path: int(path.stem)):
        if writer_bytes(subfolder) <= goal:
            break
        path.unlink()


def record_of(lock: Path) -> QuotaRecord:
    with lock.open("rb") as file:
        return _read(file.fileno(), 0)


def test_shares_are_fair_and_the_hungry_get_theirs(tmp_path: Path) -> None:
    limit = CAP - SLACK_BYTES
    first = Quotas(StoreFolder(tmp_path), CAP)
    assert first.bytes == limit
    second = Quotas(StoreFolder(tmp_path), CAP)
    used = limit - 5 * MIB
    assert second.bytes == 0 and first.balance(used) == first.bytes == used, "nobody has asked yet"
    assert second.grow(10 * MIB, keep) == 5 * MIB
    assert first.balance(used) == limit // 2 and first.bytes == used
    first.shrink(limit // 2)
    assert second.grow(10 * MIB, keep) == limit // 2 and first.balance(0) == limit // 2
    second.leave()
    assert first.grow(limit, keep) == limit
    first.leave()
    third = Quotas(StoreFolder(tmp_path), CAP)
    assert third.subfolder.name == "0" and third.bytes == limit
    third.leave()


def test_the_smallest_cap_of_the_live_counts(tmp_path: Path) -> None:
    large = Quotas(StoreFolder(tmp_path), 4 * CAP)
    small = Quotas(StoreFolder(tmp_path), CAP)
    limit = CAP - SLACK_BYTES
    assert large.balance(2 * limit) == limit // 2
    large.shrink(limit // 2)
    assert small.grow(CAP, keep) == limit // 2
    small.leave()
    assert large.grow(4 * CAP, keep) == 4 * CAP - SLACK_BYTES
    large.leave()


def test_a_random_schedule_of_joins_leaves_and_crashes_stays_within_the_cap(
    tmp_path: Path, seed: int, monkeypatch: Any
) -> None:
    """The model: who lives, and what each has written. A writer writes only what its quota lets it."""
    monkeypatch.setattr(quotas_module, "OTHERS_SECONDS", 0.0)
    num_crashed = num_starved = 0
    for attempt in range(tries(3)):
        rng, path = random.Random(seed + attempt), tmp_path / str(attempt)
        live: list[Quotas] = []
        numbers, limit = iter(range(10**6)), CAP - SLACK_BYTES
        for step in range(150):
            what = rng.random()
            where = f"seed {seed}, attempt {attempt}, step {step}"
            if not live or (what < 0.08 and len(live) < 5):
                live.append(Quotas(StoreFolder(path), CAP))
            elif what < 0.12 and live:
                live.pop(rng.randrange(len(live))).leave()
            elif what < 0.16 and live:
                live.pop(rng.randrange(len(live))).lock.close()  # as a kill does
                num_crashed += 1
            elif live:
                quotas = rng.choice(live)
                size = rng.randrange(1, 9) * MIB
                if (target := quotas.balance(writer_bytes(quotas.subfolder))) < quotas.bytes:
                    keep(quotas.subfolder, writer_bytes(quotas.subfolder) - target)
                    quotas.shrink(max(target, writer_bytes(quotas.subfolder)))
                used = writer_bytes(quotas.subfolder)
                if used + size > quotas.bytes:
                    before = quotas.bytes
                    assert quotas.grow(used + size, keep) >= before, where
                if used + size > quotas.bytes:
                    keep(quotas.subfolder, used + size - quotas.bytes)
                if writer_bytes(quotas.subfolder) + size <= quotas.bytes:
                    descriptor = os.open(quotas.subfolder / f"{next(numbers)}.runs", os.O_CREAT | os.O_WRONLY, 0o600)
                    os.posix_fallocate(descriptor, 0, size - 8192)
                    os.close(descriptor)
                else:
                    num_starved += 1
            if path.exists():
                assert disk_usage(path) <= CAP, where
                records = [record_of(lock) for lock in path.glob("v1/*/lock")]
                assert sum(record.quota for record in records) <= limit, where
                for quotas in live:
                    quotas.check()
        for quotas in live:
            quotas.leave()
    assert num_crashed and num_starved < tries(300)


def test_a_damaged_record_counts_the_bytes_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"\0" * 50)
    descriptor = os.open(tmp_path / "lock", os.O_RDWR)
    assert _read(descriptor, 77) == QuotaRecord(77)
    os.close(descriptor)
