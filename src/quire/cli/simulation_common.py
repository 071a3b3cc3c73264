"""Shared parts of commands that simulate: their arguments, the requests, and how results are shown."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import SloConfig
from quire.errors import ConfigError
from quire.options import format_number

if TYPE_CHECKING:
    from quire.planning.latency import Latency
    from quire.planning.slo import Slo
    from quire.simulation.load import Load, Workers
    from quire.simulation.outcome import Outcome
    from quire.simulation.setup import Setup

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors by which both latency targets are scaled."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

NOTED = 0.05
"""Both rates are printed if the rate of a simulation differs from that of its arrivals by more than this share."""

MOST_OUTSIDE = 0.2
"""A simulation is doubted if more than this share of its steps is outside the latency model's range."""

MOST_SEED = 2**32 - 1
"""Largest seed: seeds have 32 bits, half of a 64-bit word."""


def positive(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def positives(text: str) -> list[float]:
    """Comma-separated numbers above 0, for argparse."""
    return [positive(word) for word in text.split(",")]


def add_search_arguments(group: Arguments, seconds: float) -> None:
    """Adds the arguments of plans for a trace's requests. seconds: default of --plan.seconds."""
    text = "requests: an Azure trace, a Mooncake trace, or a workload of Quire's own; they are resampled"
    group.add_file("--trace", text=text)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="first seed of the requests (default: 0)")
    text = (
        "time for the search; one option of each role is tried in any case, and what is found is simulated as a whole"
        f" afterwards (default: {seconds:g})"
    )
    group.add_argument("--plan.seconds", type=positive, default=seconds, dest="plan_seconds", metavar="X", help=text)
    group.add_count("--processes", text="simulations at once", default=1)


def slo_of(args: argparse.Namespace) -> Slo:
    """The latency targets of the command line and its file; infinite without a target."""
    from quire.planning.slo import Slo

    given = SloConfig.from_flags(args)
    ttft, tpot = (math.inf if each is None else each for each in (given.ttft, given.tpot))
    return Slo(ttft, tpot, given.attainment)


def check_targets(slo: Slo, needs: str) -> None:
    """Raises ConfigError without latency targets, or with an attainment of 0. needs: what needs the targets."""
    if slo.ttft == slo.tpot == math.inf:
        raise ConfigError(f"{needs} needs a latency target: give --slo.ttft or --slo.tpot in seconds, or both")
    if not 0 < slo.attainment <= 1:
        raise ConfigError(f"slo.attainment is {slo.attainment:g}; {needs} needs a share above 0")


def check_seed(seed: int) -> None:
    """Raises ConfigError for an invalid seed."""
    if not 0 <= seed <= MOST_SEED:
        raise ConfigError(f"--seed is {seed}; it must be from 0 to {MOST_SEED}")


@contextlib.contextmanager
def workers_of(processes: int) -> Iterator[Workers | None]:
    """Processes that simulate; None for a single one, which is this process."""
    if processes == 1:
        yield None
        return
    from quire.simulation.load import Workers

    with Workers(processes) as workers:
        yield workers


def load_of(file: Path, count: int, *, fitted: bool) -> Load:
    """The requests of a trace. fitted: drawn from distributions; otherwise its first ones. Raises ConfigError."""
    from quire.planning.fitted import fit
    from quire.planning.traces import read_workload
    from quire.simulation.load import Load

    workload = read_workload(file)
    if fitted:
        return Load(workload, count, fit(workload))
    return Load(workload.first(count), min(count, len(workload.arrivals)))


def facts_of(load: Load) -> dict[str, Any]:
    """Numbers of the requests, for JSON."""
    workload = load.workload
    found: dict[str, Any] = {
        "name": workload.name,
        "requests": load.count,
        "rate": finite(workload.rate),
        "cv": workload.cv,
        "mean_in": workload.mean_in,
        "mean_out": workload.mean_out,
        "shared": workload.shared,
        "origin": load.origin.value,
    }
    if load.fitted is not None:
        found["fit"] = {
            "ks_in": load.fitted.ks_in,
            "ks_out": load.fitted.ks_out,
            "ks_gaps": load.fitted.ks_gaps,
            "cv": load.fitted.cv,
            "accepted": load.fitted.accepted,
        }
    return found


def print_load(load: Load) -> None:
    """Prints the requests for people."""
    from quire.planning.fitted import ACCEPTED

    workload = load.workload
    rate = "all at once" if math.isinf(workload.rate) else f"{workload.rate:.4g} requests/s"
    print(
        f"trace {workload.name} (measured): {len(workload.arrivals):,} requests, {rate}, CV of gaps {workload.cv:.2f};"
        f" prompts of {workload.mean_in:,.0f} tokens and answers of {workload.mean_out:,.0f} on average,"
        f" {workload.shared:.1%} of the prompts shared"
    )
    fitted = load.fitted
    if fitted is not None:
        word = "accepted" if fitted.accepted else "NOT accepted"
        print(
            f"requests (fitted): {load.count:,} drawn for each simulation, gaps gamma with CV {fitted.cv:.2f}; KS"
            f" distances prompts {fitted.ks_in:.3f}, answers {fitted.ks_out:.3f}, gaps {fitted.ks_gaps:.3f}; {word}:"
            f" both lengths must be below {ACCEPTED:g}"
        )


def origins_of(latencies: Sequence[Latency]) -> str:
    """The origins of latencies, in words."""
    return " and ".join(sorted({each.origin.value for each in latencies}))


def print_setup(setup: Setup) -> None:
    """Prints the instances, and the connections between them."""
    from quire.config import format_bytes

    rows = []
    for each in setup.replicas:
        sizes, capacity, role = each.plan.sizes, each.capacity, each.role if setup.is_cluster else "engine"
        rows.append(
            (
                f"{each.count} x {role}", each.unit, f"{sizes.tokens:,} tokens", f"{capacity.prompt_rows:,}",
                f"{capacity.batch:,}", format_number(1e3 * capacity.seconds_per_row),
                format_number(1e3 * capacity.seconds_per_step),
            )
        )  # fmt: skip
    shared.print_table(
        ("instances", "each", "cache", "rows that saturate", "useful batch", "ms per row", "ms per step"),
        rows,
        left=("each",),
    )
    ways, told = setup.ways, []
    for name, text in (
        ("server", f"{format_number(1e3 * ways.server)} ms between client and server"),
        ("hop", f"{format_number(1e3 * ways.hop)} ms a message"),
        ("bulk", f"caches at {format_bytes(int(ways.bulk.bytes_per_second))}/s"),
    ):
        names = ("shm", "tcp") if name == "bulk" else (name,)
        if name == "server" or setup.is_cluster:
            told.append(f"{text} ({'measured' if ways.measured.intersection(names) else 'modelled'})")
    print("; ".join(told))


def times_of(outcome: Outcome) -> dict[str, dict[str, float | None]]:
    """Mean and quantiles of TTFT and TPOT, in seconds, over the answered requests. None: no answered requests."""
    import numpy as np

    answered = np.isfinite(outcome.last)
    found: dict[str, dict[str, float | None]] = {}
    for name, values in (
        ("ttft", outcome.ttft[answered]),
        ("tpot", outcome.tpot[answered & (outcome.num_out > 1)]),
    ):
        found[name] = {"mean": float(values.mean()) if len(values) else None}
        for quantile, share in QUANTILES.items():
            found[name][quantile] = float(np.quantile(values, share)) if len(values) else None
    return found


def result_of(rate: float, outcome: Outcome, slo: Slo, origin: str) -> dict[str, Any]:
    """All numbers of a simulation, for JSON."""
    has_targets = min(slo.ttft, slo.tpot) < math.inf
    used = outcome.used
    return {
        "rate": finite(rate),
        "requests": len(outcome.arrived),
        "failed": outcome.num_failed,
        "attainment": outcome.attainment(slo) if has_targets else None,
        "attainment_by_scale": {
            f"{scale:g}": outcome.attainment(slo.scaled(scale)) for scale in (SCALES if has_targets else ())
        },
        **times_of(outcome),
        "offered": finite(outcome.offered),
        "seconds": outcome.duration,
        "tokens_per_second": outcome.tokens_per_second,
        "utilisation": outcome.utilisation(),
        "hit_rate": outcome.hit_rate,
        "shares": {name: share for name, share in outcome.shares().items() if math.isfinite(share)},
        "preemptions": sum(int(str(each.counters.get("preemptions", 0))) for each in used),
        "steps": sum(each.num_steps for each in used),
        "steps_outside": sum(each.num_out for each in used),
        "origin": origin,
    }


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def print_results(results: Sequence[Mapping[str, Any]], origin: str) -> None:
    """Prints the results of each rate."""
    names = [f"{metric} {which}" for metric in ("TTFT", "TPOT") for which in ("mean", *QUANTILES)]
    rates = ["all at once" if each["rate"] is None else f"{each['rate']:.4g}" for each in results]
    has_targets = results[0]["attainment"] is not None
    print(f"\n{'attainment of both targets, and ' * has_targets}times in ms, from {origin} latencies")
    shared.print_table(
        ("requests/s", *(("attained",) if has_targets else ()), "failed", *names),
        [
            (
                rate,
                *((f"{each['attainment']:.1%}",) if has_targets else ()),
                f"{each['failed']:,}",
                *(_milliseconds(value) for metric in ("ttft", "tpot") for value in each[metric].values()),
            )
            for rate, each in zip(rates, results, strict=True)
        ],
    )
    rows: dict[str, list[str]] = {}
    for each in results:
        for name, share in each["utilisation"].items():
            rows.setdefault(f"{name} busy", []).append(f"{share:.1%}")
    for kind, text in (("hit_rate", "prompt tokens from {}"), ("shares", "time in {}")):
        for name in dict.fromkeys(name for each in results for name in each[kind]):
            rows[text.format(name)] = [f"{each[kind].get(name, 0):.1%}" for each in results]
    if any(each["rate"] and each["offered"] and abs(each["offered"] / each["rate"] - 1) > NOTED for each in results):
        rows["requests/s that arrived"] = [f"{each['offered'] or math.inf:.4g}" for each in results]
    rows["preemptions"] = [f"{each['preemptions']:,}" for each in results]
    rows["steps outside the latency model's range"] = [
        f"{each['steps_outside'] / max(1, each['steps']):.1%}" for each in results
    ]
    print(f"\nshares, from {origin} latencies")
    shared.print_table(("requests/s", *rates), [(name, *cells) for name, cells in rows.items()])
    outside = max(each["steps_outside"] / max(1, each["steps"]) for each in results)
    if outside > MOST_OUTSIDE:
        print(
            f"doubt: up to {outside:.0%} of the steps are outside what the latency model was measured with, and their"
            " seconds are extrapolated; measure longer with quire bench latency --seconds"
        )


def slo_facts(slo: Slo) -> dict[str, float | None]:
    """The latency targets, for JSON. None: no target."""
    return {"ttft": finite(slo.ttft), "tpot": finite(slo.tpot), "attainment": slo.attainment}


def finite(value: float) -> float | None:
    """The value for JSON; None for a number that is not finite."""
    return value if math.isfinite(value) else None
