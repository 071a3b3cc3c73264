"""Engines whose cache has a store."""

from __future__ import annotations

from pathlib import Path

from quire.cache.manager import CacheManager
from quire.cache.namespace import Namespace
from quire.cache.store import Store
from quire.engine.engine import Engine
from quire.engine.scheduler import Scheduler
from quire.engine.tiering import Tiering
from quire.stores.disk import DiskStore
from quire.stores.memory import MemoryStore
from quire.stores.tiers import Tiers

from .toy_store import ToyStore

Kept = ToyStore | MemoryStore | DiskStore


def open_store(kept: str, folder: Path, namespace: Namespace, seed: int) -> Kept:
    """A store by name: toy, memory or disk."""
    if kept == "toy":
        return ToyStore(seed, delay=0.002)
    return MemoryStore(64 << 20, pinned=False) if kept == "memory" else DiskStore(folder, 64 << 20, namespace)


def put_store(engine: Engine, store: Store) -> Engine:
    """Gives an engine's manager a store from its beginning."""
    manager = engine.scheduler.manager
    table, tree, before = manager.table, manager.tree, manager.retainer
    retention = None if before is None else before.retention
    manager = CacheManager(table, tree, tree.lifetime, retention, store)
    policy = engine.scheduler.policy
    engine.scheduler = Scheduler(manager, policy.token_budget, policy.max_running, engine.scheduler.max_queue)
    tiers = Tiers([store]) if isinstance(store, MemoryStore | DiskStore) else None
    engine.tiering = Tiering(manager, tiers)
    if manager.retainer is not None:
        engine.runner.decide = manager.retainer.choose
    return engine
