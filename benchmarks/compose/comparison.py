"""Compares configurations of the five systems in the same memory: their sequences, goodput, quality and bytes."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from asking import asked
from holding import held, resolved
from results import Row
from run_systems import Order, Reply, start
from systems import CODEC, RETENTION, Load, Recipe, Systems, cache_of, num_engines, probe_cache, probe_of, roles_of

from quire.cache.codecs import DENSE
from quire.config import EngineConfig
from quire.engine.machine import processor_name, usable_cores
from quire.errors import ConfigError, QuireError
from quire.evaluation.perplexity import CONTINUATION, Perplexity, cut_windows, measure
from quire.measure.engines import REFERENCE, load_engines
from quire.models.resolve import resolve_model
from quire.models.tokenizer import load_tokenizer
from quire.models.weights import open_model
from quire.version import __version__
from quire.workload.slo import Slo

SLO_FACTOR = 10.0
"""Latency targets that are not given, relative to the latencies of requests that are alone with nothing on."""

Progress = Callable[[int, int], None]
"""Called with (done, total)."""

OnRows = Callable[[Sequence[Row], Slo], None]
"""Called with the rows so far, whenever there is a new one, and the latency targets."""


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
    text: str | None = None
    windows: int = 4
    ttft: float | None = None
    tpot: float | None = None
    run: Callable[[Order], Reply] = start

    def measured(
        self, progress: Progress = lambda done, total: None, on_rows: OnRows = lambda rows, slo: None
    ) -> tuple[list[Row], Slo]:
        """A row for each configuration, and the latency targets. Raises ConfigError if the base cannot run, or if the
        text is shorter than a window.
        """
        assert not self.configurations[0], "the base is not the first one"
        probes = list(dict.fromkeys(map(probe_of, self.configurations)))
        done, total = itertools.count(1), len(probes) + len(self.configurations) + (self.text is not None)
        progress(0, total)
        sizes = resolved(self.model, self.recipe.options((), self.load, self.memory, 0))[1]
        weights, windows = sizes.weight_bytes, self._cut()
        beside: dict[Systems, int | str] = {}
        for probe in probes:
            beside[probe] = self._beside(probe, weights, probe_cache(self.load, sizes.chunk_bytes))
            progress(next(done), total)
        rows, slo = list[Row](), None
        for systems in self.configurations:
            row, reply = self._row(systems, weights, beside[probe_of(systems)])
            if not systems:
                if row.refused:
                    raise ConfigError(row.refused)
                slo = self._slo(reply)
            rows.append(row)
            assert slo is not None
            on_rows(rows, slo)
            progress(next(done), total)
        assert slo is not None
        if windows:
            self._add_quality(rows, windows)
            on_rows(rows, slo)
            progress(next(done), total)
        return rows, slo

    def _beside(self, systems: Systems, weights: int, cache: int) -> int | str:
        """Bytes that processes and weights take, or why they cannot be. cache: of an engine, which the probe fills with
        the longest requests, whatever those of the load are: memory that nothing was written to is not in use.
        """
        options = self.recipe.options(systems, self.load, cache, weights)
        options.pop("offload.cache", None)  # what that takes is within the cache's memory
        load = replace(self.load, trace=None, shared=0)
        reply = self._reply(systems, options, load, is_probe=True)
        return reply.refused or reply.pss - cache * num_engines(systems)

    def _row(self, systems: Systems, weights: int, beside: int | str) -> tuple[Row, Reply]:
        """What one configuration does."""
        row, reply = Row(systems), Reply()
        if isinstance(beside, str):
            row.refused = beside
            return row, reply
        try:
            row.cache = cache_of(systems, self.memory, beside)
            options = self.recipe.options(systems, self.load, row.cache, weights)
            sizes = resolved(self.model, options)[1]
            vocab_size = self._vocab_size()
            found = held(self.model, options, asked(self.load, vocab_size), roles_of(systems))
        except ConfigError as error:
            row.refused = str(error)
            return row, reply
        engines = num_engines(systems)
        row.cache, row.weights = row.cache * engines, sizes.weight_bytes * engines
        row.sequences = found.sequences
        row.sequence_bytes = found.num_bytes / max(1, found.sequences)
        reply = self._reply(systems, options, self.load, is_base=not systems)
        row.refused, row.pss, row.stages = reply.refused, reply.pss, tuple(reply.stages)
        return row, reply

    def _reply(self, systems: Systems, options: dict[str, Any], load: Load, **what: bool) -> Reply:
        try:
            return self.run(Order(self.model, options, roles_of(systems), load, **what))
        except QuireError as error:
            return Reply(refused=f"failed: {error}")

    def _slo(self, base: Reply) -> Slo:
        ttft, tpot = (statistics.median(each) for each in zip(*base.alone, strict=True))
        return Slo(
            SLO_FACTOR * ttft if self.ttft is None else self.ttft,
            SLO_FACTOR * tpot if self.tpot is None else self.tpot,
        )

    def _vocab_size(self) -> int:
        with open_model(resolve_model(self.model)) as checkpoint:
            return checkpoint.shape.vocab_size

    def _cut(self) -> list[list[int]]:
        """The windows of the text; none without a text."""
        if self.text is None:
            return []
        config = EngineConfig.from_options(self.recipe.base).model
        tokenizer = load_tokenizer(resolve_model(self.model), config.tokenizer, config.chat_template)
        return cut_windows(tokenizer.encode(self.text), self.load.prompt)[: self.windows]

    def _add_quality(self, rows: Sequence[Row], windows: Sequence[Sequence[int]]) -> None:
        found = quality(self.model, windows, self.recipe)
        for row in rows:
            of = found[CODEC in row.systems, RETENTION in row.systems]
            row.ratio, row.ratio_error = (1.0, 0.0) if of.ratio is None else (of.ratio, of.ratio_error)

    def about(self, slo: Slo) -> dict[str, Any]:
        """What a report is about."""
        return {
            "model": self.model,
            "memory": self.memory,
            "load": asdict(self.load),
            "slo": {"ttft": slo.ttft, "tpot": slo.tpot},
            "codec": dict(self.recipe.codec),
            "retention": dict(self.recipe.retention),
            "offload": dict(self.recipe.offload),
            "windows": None if self.text is None else self.windows,
            "processor": processor_name(),
            "cores": usable_cores(),
            "version": __version__,
            "date": time.strftime("%Y-%m-%d"),
        }


def quality(model: str, windows: Sequence[Sequence[int]], recipe: Recipe) -> Mapping[tuple[bool, bool], Perplexity]:
    """Perplexities with and without the codec, and with and without retention, of the same continuations. The other
    systems change no token.

    windows  token ids, all of the same number
    """
    context = len(windows[0])
    config = EngineConfig.from_options({**recipe.base, **recipe.codec})
    engines = load_engines(model, config, context, compares=True)[0]
    codecs = [DENSE, config.cache.codec]
    engines |= load_engines(model, config.with_options(recipe.retention), context, codecs)[0]
    found = measure(engines, windows, REFERENCE, continuation=min(CONTINUATION, max(1, context // 8)))
    keys = [(False, False), (True, False), (False, True), (True, True)]
    assert len(found) == len(keys) and not math.isnan(found[0].nll)
    return dict(zip(keys, found, strict=True))
