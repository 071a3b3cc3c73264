"""Searches a better placement when a cluster's traffic changes, and switches to it while requests run.

`cluster.drift` decides when to search. The search runs `quire plan placement` on the last requests, in a separate
process that uses only the processor time that instances leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cache.ledger import PAGE_TOKENS
from quire.cluster.drift import Patience, Replanner, Seen, TrafficStats
from quire.cluster.router import RoutedRequest
from quire.config import SloConfig, flags_of
from quire.errors import ConfigError, QuireError
from quire.placement.cluster_file import read_cluster
from quire.placement.placement_file import Placement, read_placement
from quire.workload.workload import Arrival, Span, Workload

log = logging.getLogger("quire")

MOST_REQUESTS = 2000
"""Maximum number of requests for a search: the last ones."""

TICK_SECONDS = 1.0

SEARCH_FACTOR = 5
"""Multiple of a plan's seconds after which a search is given up."""

NICE = 19
"""Niceness of the search's process: it runs only on idle cores."""


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """An answered request.

    at          time of arrival, in seconds on the router's clock
    keys        keys of its prompt's whole chunks
    num_cached  number of cached prompt tokens
    """

    at: float
    keys: tuple[bytes, ...]
    num_in: int
    num_out: int
    num_cached: int

    @classmethod
    def of(cls, request: RoutedRequest) -> AnsweredRequest:
        """The record of a router's request."""
        num_in = len(request.job.prompt_ids)
        keys = tuple(request.keys.first(num_in // PAGE_TOKENS))
        return cls(request.begun, keys, num_in, len(request.token_ids), request.num_cached)


@dataclass(frozen=True)
class PlacementProposal:
    """The result of a search.

    rate     predicted requests/s for traffic like the last requests
    present  requests/s predicted for the present placement, for the same traffic
    """

    placement: Placement
    rate: float
    present: float


Search = Callable[[Workload, Placement], Awaitable[PlacementProposal]]
"""Searches a placement for some requests, given the present placement. Raises QuireError if it finds none."""


def workload_of(requests: Sequence[AnsweredRequest]) -> Workload:
    """Requests as a workload: one span for each whole chunk of a prompt, and one unshared span for the rest."""
    ordered = sorted(requests, key=lambda each: each.at)
    numbers: dict[bytes, int] = {}
    arrivals = []
    for index, each in enumerate(ordered):
        spans = [Span(numbers.setdefault(key, len(numbers)), PAGE_TOKENS) for key in each.keys]
        if left := each.num_in - PAGE_TOKENS * len(each.keys):
            spans.append(Span((1 << 32) + index, left))
        arrivals.append(Arrival(each.at - ordered[0].at, tuple(spans), each.num_out))
    return Workload("the last requests", arrivals)


class Replanning:
    """Watches the requests of one cluster.

    present  the cluster's placement; None: its instances do not follow a placement, and nothing is searched
    search   see Search
    switch   switches the cluster to a placement; raises QuireError if that fails
    counts   numbers of searches, switches, and failures of either
    """

    def __init__(
        self,
        present: Callable[[], Placement | None],
        search: Search,
        switch: Callable[[Placement], Awaitable[None]],
        clock: Callable[[], float],
        patience: Patience | None = None,
    ) -> None:
        """Raises ConfigError if the present placement does not state the workload that it was planned for."""
        self.counts = {"searches": 0, "switches": 0, "failed": 0}
        self._present, self._search, self._switch, self._clock = present, search, switch, clock
        self._patience = patience or Patience()
        placement = present()
        assert placement is not None, "nothing was planned"
        self._placement = placement
        self._replanner = Replanner(_planned(placement), self._patience, clock())
        self._last: deque[tuple[float, AnsweredRequest]] = deque(maxlen=MOST_REQUESTS)  # with the answer's time

    def note_arrival(self) -> None:
        """Counts the arrival of a request, which may still be refused because too many wait."""
        self._replanner.note_arrival(self._clock())

    def note(self, request: AnsweredRequest) -> None:
        """Notes an answered request."""
        self._last.append((self._clock(), request))
        self._replanner.note(Seen(request.num_in, request.num_out, request.num_cached))

    def state(self) -> dict[str, Any]:
        """The phase (quiet, suspect, search or switch), the reason if it is not quiet, and the counts."""
        reason = ", ".join(map(str, self._replanner.reason))
        return {"phase": self._replanner.phase.value, "reason": reason, **self.counts}

    async def watch(self) -> None:
        """Checks the requests periodically, until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            present = self._present()
            if present is None:
                self._replanner.pause(self._clock())
                continue
            if present is not self._placement:
                self._adopt(present)
            elif self._replanner.tick(self._clock()):
                await self._replan()

    def _adopt(self, placement: Placement) -> None:
        """Starts over after an operator has switched the cluster to another placement."""
        self._placement = placement
        try:
            self._replanner = Replanner(_planned(placement), self._patience, self._clock())
        except ConfigError as error:
            log.warning("%s; the requests before it still count as planned", error)

    async def _replan(self) -> None:
        self.counts["searches"] += 1
        log.info("requests have changed (%s): a placement is searched", ", ".join(map(str, self._replanner.reason)))
        try:
            # Only requests of the windows that differ: older requests no longer represent the traffic.
            changed = [request for at, request in self._last if at >= self._replanner.since]
            found = await self._search(workload_of(changed), self._placement)
            if self._present() is not self._placement:
                log.info("the instances were changed meanwhile: the placement that was found is not used")
                self._replanner.failed(self._clock())
                return
            if not self._replanner.found(found.rate, found.present, self._clock()):
                log.info("the placement stays: %.4g requests/s, and %.4g with the best one", found.present, found.rate)
                return
            log.info("the cluster switches: %.4g requests/s instead of %.4g", found.rate, found.present)
            await self._switch(found.placement)
        except Exception as error:
            self.counts["failed"] += 1
            log.warning("no other placement: %s", error, exc_info=not isinstance(error, QuireError))
            self._replanner.failed(self._clock())
            if self._present() is None:
                log.warning("the instances are of no placement: none is searched until quire cluster place sets one")
            return
        self._placement = found.placement
        self.counts["switches"] += 1
        self._replanner.switched(self._clock())


def _planned(placement: Placement) -> TrafficStats:
    found = placement.workload
    try:
        lengths = float(found["mean_in"]), float(found["mean_out"])
        return TrafficStats(placement.predicted.rate, *lengths, float(found.get("cached", found["shared"])))
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            "cluster.replan needs a placement that says what it was planned for (workload: mean_in, mean_out, shared);"
            " make it with quire plan placement"
        ) from None


@dataclass(frozen=True)
class SearchCommand:
    """The search in a separate process.

    model     as on the command line
    options   settings of the engine, by key
    machines  cluster file
    slo       settings of the latency targets, by key
    seconds   time limit of the plan. With the simulations after it, a search may take SEARCH_FACTOR times as long
    """

    model: str
    options: Mapping[str, Any]
    config_file: Path | None
    machines: Path
    slo: Mapping[str, Any]
    seconds: float = 120.0

    async def search(self, workload: Workload, present: Placement) -> PlacementProposal:
        """See Search."""
        try:
            async with asyncio.timeout(SEARCH_FACTOR * self.seconds):
                return await self._search(workload, present)
        except TimeoutError:
            raise QuireError(f"the search took longer than {SEARCH_FACTOR * self.seconds:g} s") from None

    async def _search(self, workload: Workload, present: Placement) -> PlacementProposal:
        with tempfile.TemporaryDirectory(prefix="quire-") as name:
            folder = Path(name)
            trace, now, found = folder / "requests.jsonl", folder / "present.json", folder / "found.json"
            workload.write(trace)
            present.write(now)
            common = [*self._settings(), "--trace", str(trace)]

            async def goodput(file: Path) -> float:
                said = await _run(
                    "simulate", self.model, *common, "--cluster.placement", str(file), "--goodput", "--json"
                )
                return float(json.loads(said)["goodput"]["rate"])

            await _run(
                "plan", "placement", self.model, *common, "--cluster.file", str(self.machines), "--plan.seconds",
                f"{self.seconds:g}", "--output", str(found),
            )  # fmt: skip
            return PlacementProposal(read_placement(found), await goodput(found), await goodput(now))

    def _settings(self) -> list[str]:
        file = [] if self.config_file is None else ["--config", str(self.config_file)]
        return file + flags_of({**self.options, **self.slo})


def search_command(
    model: str,
    options: Mapping[str, Any],
    config_file: Path | None,
    machines: Path,
    slo: SloConfig,
    placement: Placement | None,
) -> SearchCommand:
    """The search for a cluster that starts with a placement. Raises ConfigError if cluster.replan lacks a setting."""
    if placement is None:
        raise ConfigError("cluster.replan needs a placement to begin with: set cluster.placement to its file")
    if slo.ttft is None or slo.tpot is None:
        raise ConfigError("cluster.replan needs latency targets: set slo.ttft and slo.tpot")
    read_cluster(machines)
    return SearchCommand(model, options, config_file, machines, slo.to_options())


async def _run(*words: str) -> str:
    """Runs a command of Quire. Returns its output. Raises QuireError with its last line if it fails."""
    process = await asyncio.create_subprocess_exec(
        "nice", "-n", str(NICE), sys.executable, "-m", "quire", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines() or [f"it ended with {process.returncode}"]
        raise QuireError(f"quire {words[0]}: {lines[-1]}")
    return output.decode()
