"""Opens tiers from settings."""

from __future__ import annotations

from quire.cache.namespace import Namespace
from quire.config import TiersConfig
from quire.errors import ConfigError
from quire.folders import user_path
from quire.stores.memory import MemoryStore
from quire.stores.tiers import Tier, Tiers


def check_disk(config: TiersConfig) -> None:
    """Raises ConfigError or OSError if the folder of tiers.disk exists and `open_tiers` would refuse it."""
    from quire.stores.folder import claim

    folder = user_path(config.disk_folder)
    if folder.exists():
        claim(folder)


def open_tiers(config: TiersConfig, namespace: Namespace, lifetime: float | None = None) -> Tiers | None:
    """The tiers of an engine; None if there are none. Raises ConfigError for a folder that cannot be used.

    namespace  namespace of the engine, without a salt; its model is a full digest
    lifetime   see cache.lifetime
    """
    found: list[Tier] = []
    if config.memory is not None:
        found.append(MemoryStore(config.memory, pinned=True, lifetime=lifetime))
    if config.disk is not None:
        try:
            from quire.stores.disk import DiskStore
        except ImportError as error:
            raise ConfigError(f"tiers.disk needs the package blake3: pip install blake3 ({error})") from None
        folder = user_path(config.disk_folder)
        found.append(
            DiskStore(folder, config.disk_bytes, namespace, bandwidth=config.disk_bandwidth, lifetime=lifetime)
        )
    return Tiers(found) if found else None
