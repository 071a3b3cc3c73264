"""The prefixes of an engine for an event loop: listing, finding by key, dropping, and flushing to the disk.

Questions to the engine run on its own thread, between two steps. Listings of a disk run on another one.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

from quire.engine.engine import Engine
from quire.llm import DROP_SECONDS, BaseLLM
from quire.prefixes.cached import CachedPrefix, drop_prefix, find_prefix, known_prefixes, parse_prefix_key
from quire.prefixes.disk_index import DiskPrefixIndex
from quire.prefixes.listing import Prefix, engine_prefixes

Answer = TypeVar("Answer")


def _all(salt: str) -> bool:
    return True


class AsyncPrefixes(BaseLLM):
    """The prefixes of a running engine. All methods raise QuireError if the engine does not run, or stops meanwhile."""

    @abstractmethod
    async def _ask(self, question: Callable[[Engine], Answer]) -> Answer:
        """Runs a question on the engine's thread."""

    async def prefixes(self, visible: Callable[[str], bool] = _all) -> list[Prefix]:
        """The cached prefixes with a visible salt, parents first; see `LLM.prefixes`."""
        return await self._ask(lambda engine: engine_prefixes(engine, visible))

    async def known_prefixes(self, visible: Callable[[str], bool] = _all) -> list[CachedPrefix]:
        """As `LLM.known_prefixes`, for prefixes with a visible salt."""
        arena = await self.prefixes(visible)
        disk_index = await self._disk_index(visible)
        return await asyncio.to_thread(known_prefixes, arena, disk_index)

    async def find_prefix(self, key: str, visible: Callable[[str], bool] = _all) -> CachedPrefix | None:
        """As `LLM.find_prefix`, for a prefix with a visible salt."""
        name, disk_index = parse_prefix_key(key), await self._disk_index(visible)
        return await self._ask(lambda engine: find_prefix(engine, name, disk_index, visible))

    async def drop_prefix(self, key: str, visible: Callable[[str], bool] = _all) -> dict[str, int] | None:
        """As `LLM.drop_prefix`, for a prefix with a visible salt."""
        name, disk_index = parse_prefix_key(key), await self._disk_index(visible)
        dropped = await self._ask(lambda engine: drop_prefix(engine, name, disk_index, visible))
        if dropped is not None and (tiers := self._parts.engine.tiering.tiers) is not None:
            await asyncio.to_thread(tiers.flush, DROP_SECONDS)
        return dropped

    async def flush(self, seconds: float = 60.0) -> bool:
        """As `LLM.flush`, while requests run."""
        tiers, loop = self._parts.engine.tiering.tiers, asyncio.get_running_loop()
        end = loop.time() + seconds
        while (wait := await self._ask(lambda engine: engine.tiering.idle())) is not None:
            if loop.time() >= end:
                return False
            await asyncio.sleep(wait)
        return tiers is None or await asyncio.to_thread(tiers.flush, max(0.0, end - loop.time()))

    async def _disk_index(self, visible: Callable[[str], bool]) -> DiskPrefixIndex:
        return await asyncio.to_thread(self._read_disk_index, visible)
