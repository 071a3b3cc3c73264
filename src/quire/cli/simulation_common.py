"""Shared parts of commands that simulate: their arguments, the requests, and how results are shown."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import SloConfig
from quire.errors import ConfigError
from quire.options import format_number

if TYPE_CHECKING:
    from quire.simulation.load import Load
    from quire.simulation.setup import Setup
    from quire.workload.slo import Slo

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
    from quire.workload.slo import Slo

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


def print_load(load: Load) -> None:
    """Prints the requests for people."""
    from quire.workload.fitted import ACCEPTED

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


def print_setup(setup: Setup) -> None:
    """Prints the instances, and the connections between them."""
    from quire.config import format_bytes

    rows = []
    for each in setup.replicas:
        sizes, capacity, role = each.plan.sizes, each.capacity, "engine" if setup.cluster is None else each.role
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
        if name == "server" or setup.cluster is not None:
            told.append(f"{text} ({'measured' if ways.measured.intersection(names) else 'modelled'})")
    print("; ".join(told))


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def print_results(results: Sequence[Mapping[str, Any]], origin: str) -> None:
    """Prints the results of each rate."""
    from quire.simulation.outcome import QUANTILES

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
