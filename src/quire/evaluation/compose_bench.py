"""Compares configurations of the five systems in the same memory: their sequences, goodput, quality and bytes."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.cache.codecs import DENSE
from quire.engine.machine import processor_name, usable_cores
from quire.errors import ConfigError, QuireError
from quire.evaluation.compose import (
    CODEC,
    RETENTION,
    Kind,
    Load,
    Recipe,
    Row,
    Slo,
    Systems,
    cache_of,
    num_engines,
    probe_cache,
    roles_of,
)
from quire.evaluation.compose_load import asked
from quire.evaluation.compose_room import held, resolved
from quire.evaluation.compose_run import Order, Reply, start
from quire.evaluation.engines import REFERENCE, load_engines
from quire.evaluation.perplexity import CONTINUATION, Perplexity, cut_windows, measure
from quire.version import __version__

SLO_FACTOR = 10.0
"""Latency targets that are not given, relative to the latencies of requests that are alone with nothing on."""

Progress = Callable[[int, int], None]
"""Called with (done, total)."""


@dataclass(frozen=True)
class Comparison:
    """What to compare.

    memory          bytes of all processes together
    configurations  the first one is the base of the others: nothing on
    text            for the quality; None: it is not measured
    windows         of the text
    slo             latency targets; None for one that follows from the base
    run             runs an order
    """

    model: str
    load: Load
    memory: int
    configurations: Sequence[Systems]
    recipe: Recipe
    config_file: Path | None = None
    text: str | None = None
    windows: int = 4
    ttft: float | None = None
    tpot: float | None = None
    run: Callable[[Order], Reply] = start

    def measured(self, progress: Progress = lambda done, total: None) -> tuple[list[Row], Slo]:
        """A row for each configuration, and the latency targets. Raises ConfigError if the base cannot run."""
        assert not self.configurations[0], "the base is not the first one"
        kinds = list(dict.fromkeys(Kind.of(each) for each in self.configurations))
        done, total = itertools.count(1), len(kinds) + len(self.configurations) + (self.text is not None)
        progress(0, total)
        sizes = resolved(self.model, self.recipe.options((), self.load, self.memory, 0), self.config_file)[1]
        weights = sizes.weight_bytes
        beside: dict[Kind, int | str] = {}
        for kind in kinds:
            beside[kind] = self._beside(kind, weights, probe_cache(self.load, sizes.chunk_bytes))
            progress(next(done), total)
        rows, slo = list[Row](), None
        for systems in self.configurations:
            row, reply = self._row(systems, weights, beside[Kind.of(systems)])
            if not systems:
                if row.refused:
                    raise ConfigError(row.refused)
                slo = self._slo(reply)
            rows.append(row)
            progress(next(done), total)
        if self.text is not None:
            self._add_quality(rows, self.text)
            progress(next(done), total)
        assert slo is not None
        return rows, slo

    def _beside(self, kind: Kind, weights: int, cache: int) -> int | str:
        """Bytes that processes and weights take, or why they cannot be. cache: of an engine, which the probe fills."""
        options = self.recipe.options(kind.systems, self.load, cache, weights)
        options.pop("offload.cache", None)  # what that takes is within the cache's memory
        reply = self._reply(kind.systems, options, is_probe=True)
        return reply.refused or reply.pss - cache * num_engines(kind.systems)

    def _row(self, systems: Systems, weights: int, beside: int | str) -> tuple[Row, Reply]:
        """What one configuration does."""
        row, reply = Row(systems), Reply()
        if isinstance(beside, str):
            row.refused = beside
            return row, reply
        try:
            row.cache = cache_of(systems, self.memory, beside)
            options = self.recipe.options(systems, self.load, row.cache, weights)
            sizes = resolved(self.model, options, self.config_file)[1]
            vocab_size = self._vocab_size()
            found = held(self.model, options, asked(self.load, vocab_size), self.config_file)
        except ConfigError as error:
            row.refused = str(error)
            return row, reply
        engines = num_engines(systems)
        row.cache, row.weights = row.cache * engines, sizes.weight_bytes * engines
        row.sequences = found.sequences * engines
        row.sequence_bytes = found.num_bytes / max(1, found.sequences)
        reply = self._reply(systems, options, is_base=not systems)
        row.refused, row.pss, row.stages = reply.refused, reply.pss, tuple(reply.stages)
        return row, reply

    def _reply(self, systems: Systems, options: dict[str, Any], **what: bool) -> Reply:
        file = None if self.config_file is None else str(self.config_file)
        try:
            return self.run(Order(self.model, options, roles_of(systems), self.load, file, **what))
        except QuireError as error:
            return Reply(refused=f"failed: {error}")

    def _slo(self, base: Reply) -> Slo:
        ttft, tpot = (statistics.median(each) for each in zip(*base.alone, strict=True))
        return Slo(
            SLO_FACTOR * ttft if self.ttft is None else self.ttft,
            SLO_FACTOR * tpot if self.tpot is None else self.tpot,
        )

    def _vocab_size(self) -> int:
        from quire.models.resolve import resolve_model
        from quire.models.weights import open_model

        with open_model(resolve_model(self.model)) as checkpoint:
            return checkpoint.shape.vocab_size

    def _add_quality(self, rows: Sequence[Row], text: str) -> None:
        found = quality(self.model, text, self.recipe, self.load.prompt, self.windows, self.config_file)
        for row in rows:
            of = found[CODEC in row.systems, RETENTION in row.systems]
            row.ratio, row.ratio_error = (1.0, 0.0) if of.ratio is None else (of.ratio, of.ratio_error)

    def about(self, slo: Slo) -> dict[str, Any]:
        """What a report is about."""
        return {
            "model": self.model,
            "memory": self.memory,
            "load": asdict(self.load),
            "slo": asdict(slo),
            "codec": dict(self.recipe.codec),
            "retention": dict(self.recipe.retention),
            "offload": dict(self.recipe.offload),
            "windows": None if self.text is None else self.windows,
            "processor": processor_name(),
            "cores": usable_cores(),
            "version": __version__,
            "date": time.strftime("%Y-%m-%d"),
        }


def quality(
    model: str, text: str, recipe: Recipe, context: int, num_windows: int, file: Path | None = None
) -> Mapping[tuple[bool, bool], Perplexity]:
    """Perplexities with and without the codec, and with and without retention, of the same continuations. The other
    systems change no token.

    context  tokens of a window
    Raises ConfigError if the text is shorter.
    """
    codec, base = recipe.codec["cache.codec"], {**recipe.base, **recipe.codec}
    engines, tokenizer = load_engines(model, [codec], context, base, file, compares=True)
    engines |= load_engines(model, [DENSE, codec], context, {**base, **recipe.retention}, file)[0]
    windows = cut_windows(tokenizer.encode(text), context)[:num_windows]
    found = measure(engines, windows, REFERENCE, continuation=min(CONTINUATION, max(1, context // 8)))
    keys = [(False, False), (True, False), (False, True), (True, True)]
    assert len(found) == len(keys) and not math.isnan(found[0].nll)
    return dict(zip(keys, found, strict=True))
