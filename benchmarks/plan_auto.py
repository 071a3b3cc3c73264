"""Whether `quire plan auto` chooses well: at most eight of its finalists run for real, the chosen one and the default
among them.

    python benchmarks/plan_auto.py --data DIR --out DIR --traces conv,code --memory 400MiB --seconds 900

DIR of --data has traces/ and text/. For each trace the requests of at most --longest tokens are planned for, with
Poisson arrivals as in DistServe's evaluation: silences of the trace of code would leave minutes without a request.
Their order is drawn, too, because a measurement takes the first ones, which may be shorter or longer than the others.

A finalist is served with `quire serve --config`, and the first requests are sent at several rates, open loop, each for
--load-seconds: a ladder of rates from the predicted one, up while the target is reached and down while it is missed.
Its goodput is the rate at which attainment falls to the target, between two rates on a straight line. All finalists get
the same requests. The quality that the chosen one loses is measured on a text that the plan has not seen.

Prints the measured and the predicted goodputs, how long the steps took that were served, and whether: the traces have
different configurations; the chosen one has at least 0.9 of the best goodput; the default loses to both by at least
10 %; the loss is within the budget.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import format_table, hardware, hardware_line
from load import LoadRequest, attainment, completions, replay
from servers import ServerError, quire_server

from quire.config import ClusterConfig, EngineConfig, describe
from quire.engine.step_log import read_steps
from quire.errors import ConfigError
from quire.measure.latency_bench import LatencyFiles
from quire.models.fingerprint import fingerprint
from quire.models.resolve import resolve_model
from quire.planning.auto_local import machine_of
from quire.planning.curves import Loss
from quire.planning.quality import Quality, Text
from quire.planning.space import Settings, Space
from quire.workload.traces import read_workload, tokens
from quire.workload.workload import Arrival, Workload

VOCABULARY = range(1000, 20000)
TRACES = {
    "conv": "AzureLLMInferenceTrace_conv.csv",
    "code": "AzureLLMInferenceTrace_code.csv",
    "mooncake": "mooncake_conversation.jsonl",
}
STEP = 1.15
"""Ratio of neighbouring rates of the ladder."""


def part_of(data: Path, trace: str, longest: int, most: int, arrivals: str = "poisson") -> Workload:
    """The first requests of a trace that fit, as they came or, with arrivals "poisson", in any order, one a second."""
    whole = read_workload(data / "traces" / TRACES[trace])
    fits = [each for each in whole.arrivals if each.num_in + each.num_out <= longest and each.after < 0][:most]
    times = [each.at - fits[0].at for each in fits]
    if arrivals == "poisson":
        draw = random.Random(0)
        draw.shuffle(fits)
        times = list(itertools.accumulate(draw.expovariate(1.0) for _ in fits))
    return Workload(trace, [Arrival(at, each.prompt, each.num_out) for at, each in zip(times, fits, strict=True)])


def plan(args: argparse.Namespace, trace: str, file: Path) -> dict[str, Any]:
    """What `quire plan auto` says."""
    command = [
        sys.executable, "-m", "quire", "plan", "auto", args.model, "--trace", file, "--plan.memory", args.memory,
        "--plan.quality", args.quality, "--plan.seconds", args.seconds, "--slo.ttft", args.ttft,
        "--slo.tpot", args.tpot, "--slo.attainment", args.attainment,
        "--text", args.data / "text" / args.text, "--windows", args.windows,
        "--processes", args.processes, "--output", args.out / f"{trace}.toml", "--json", *args.more,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    (args.out / f"{trace}.json").write_text(done.stdout)
    return found


def finalists(planned: dict[str, Any], most: int) -> list[dict[str, Any]]:
    """The chosen settings, the default if it was simulated, and the best others by prediction."""
    found = {each["settings"]: each for each in named(planned).values()}
    for each in sorted(planned["finalists"], key=lambda each: -each["goodput"]["rate"]):
        if len(found) < most:
            found.setdefault(each["settings"], each)
    return list(found.values())


def named(planned: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The chosen settings and the default, by these words. A plan without time for the default lacks it."""
    return {name: planned[name] for name in ("chosen", "default") if planned[name] is not None}


def configuration(options: dict[str, Any], file: Path) -> None:
    """Writes a file for `quire serve --config`."""
    engine = {key: value for key, value in options.items() if not key.startswith(("cluster.", "parallel."))}
    cluster = {key: value for key, value in options.items() if key.startswith("cluster.")}
    groups = (EngineConfig.from_options(engine), ClusterConfig.from_options(cluster))
    file.write_text("\n".join(describe(group, {}) for group in groups))


def measured(
    args: argparse.Namespace, load: Workload, finalist: dict[str, Any], log: Path
) -> tuple[dict[str, float], float | None]:
    """Attainment by rate of a finalist that serves, at rates around the target; and what `steps_ratio` says."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "quire.toml"
        configuration(finalist["options"], file)
        steps = Path(name) / "steps.log"
        with quire_server(log, args.model, "--config", file, "--runtime.step_log", steps) as server:
            send = completions(server.url, args.model)
            asyncio.run(replay([LoadRequest(0.3 * n, [700 + n] * 200, 6) for n in range(6)], send))
            shares: dict[float, float] = {}
            rate = finalist["goodput"]["rate"] or args.least
            while len(shares) < args.most_rates:
                shares[rate] = share_of(args, load, rate, send)
                print(f"  {finalist['settings']}: {rate:.3f}/s {shares[rate]:.1%}", file=sys.stderr, flush=True)
                good = [each for each, share in shares.items() if share >= args.attainment]
                bad = [each for each, share in shares.items() if share < args.attainment]
                if good and bad and min(bad) / max(good) <= STEP * 1.001:
                    break
                if not bad:
                    rate = max(good) * STEP
                elif not good:
                    rate = min(bad) / STEP
                else:
                    rate = (max(good) * min(bad)) ** 0.5
        return {f"{rate:.4f}": share for rate, share in sorted(shares.items())}, steps_ratio(args.model, steps)


def steps_ratio(model: str, log: Path) -> float | None:
    """The seconds of a server's steps over those that the plan's latency model predicts for them. None: nothing is
    predicted, because the plan's model is composed of those of other settings or there are several instances.

    Above 1 the machine was slower than while the plan measured. At 1 a wrong goodput is the simulation's error.
    """
    if not log.exists():
        return None
    try:
        logged = read_steps([log])
        latency = LatencyFiles([], model).of("mixed", logged.config, fingerprint(resolve_model(model)))
    except ConfigError:
        return None
    return sum(seconds for _, seconds in logged.records) / sum(latency.seconds(work) for work, _ in logged.records)


def share_of(args: argparse.Namespace, load: Workload, rate: float, send: Any) -> float:
    """The share of requests that meet both targets at a rate."""
    part = load.first(max(12, round(rate * args.load_seconds))).at_rate(rate)
    prompts = tokens(part, VOCABULARY, 0)
    columns = part.columns
    requests = [
        LoadRequest(at, prompt, count)
        for at, prompt, count in zip(columns.at.tolist(), prompts, columns.num_out.tolist(), strict=True)
    ]
    return attainment(asyncio.run(replay(requests, send)), args.ttft, args.tpot)


def knee(shares: dict[str, float], target: float) -> float:
    """The rate at which attainment falls to the target; the highest that reached it if none has missed it."""
    points = sorted((float(rate), share) for rate, share in shares.items())
    good = [rate for rate, share in points if share >= target]
    if not good:
        return 0.0
    low = max(good)
    above = next(share for rate, share in points if rate == low)
    later = [(rate, share) for rate, share in points if rate > low]
    if not later:
        return low
    high, below = later[0]
    return low + (high - low) * (above - target) / max(above - below, 1e-9)


def held_out(args: argparse.Namespace, options: dict[str, Any]) -> Loss | None:
    """The loss of settings on a text that the plan has not seen."""
    space = Space.of(machine_of(args.model, EngineConfig(), {}))
    both = (each for settings in space.settings() for each in (settings, *space.later(settings)))
    settings = next((each for each in both if _same(each, options)), None)
    if settings is None:
        return None
    with tempfile.TemporaryDirectory() as name:
        text = Text.read(args.data / "text" / args.held_out)
        quality = Quality(args.model, EngineConfig(), space, text, num_windows=args.windows, folder=Path(name))
        quality.measure(settings, args.windows, float("inf"))
        return quality.losses.measured(settings)


def _same(settings: Settings, options: dict[str, Any]) -> bool:
    return all(options.get(key) == value for key, value in settings.options.items())


def report(args: argparse.Namespace, trace: str) -> None:
    """Plans, runs finalists, and prints what came of them."""
    load = part_of(args.data, trace, args.longest, args.requests, args.arrivals)
    file = args.out / f"{trace}.jsonl"
    load.write(file)
    planned = plan(args, trace, file)
    rows, goodputs = [], {}
    for number, each in enumerate(finalists(planned, args.finalists)):
        try:
            shares, ratio = measured(args, load, each, args.out / f"{trace}-{number}.log")
        except ServerError as error:
            print(f"{each['settings']} does not serve: {error}", file=sys.stderr)
            rows.append([each["settings"], "", f"{each['goodput']['rate']:.3f}", "does not serve", "", ""])
            continue
        goodputs[each["settings"]] = knee(shares, args.attainment)
        with (args.out / "measured.jsonl").open("a") as out:
            out.write(json.dumps({"trace": trace, "settings": each, "shares": shares, "steps": ratio}) + "\n")
        mark = ", ".join(name for name, one in named(planned).items() if each["settings"] == one["settings"])
        rows.append([
            each["settings"], mark, f"{each['goodput']['rate']:.3f}", f"{goodputs[each['settings']]:.3f}",
            f"{each['loss']['value']:.2%} ({each['loss']['origin']})", "" if ratio is None else f"{ratio:.3f}",
        ])  # fmt: skip
    print(f"\n{trace}: {len(load.arrivals):,} requests, mean {load.mean_in:.0f} in, {load.mean_out:.0f} out")
    print(format_table(["settings", "", "predicted/s", "measured/s", "loss", "steps, served / predicted"], rows))
    of = {name: goodputs.get(one["settings"], 0.0) for name, one in named(planned).items()}
    best = max(goodputs.values(), default=0.0)
    if not best:
        raise SystemExit(f"{trace}: no finalist serves a request within the targets")
    chosen = of["chosen"]
    print(f"chosen / best {chosen / best:.3f} (at least 0.9: {_yes(chosen >= 0.9 * best)})")
    if "default" in of:
        default = of["default"]
        ratio = default / chosen if chosen else 0
        print(f"default / chosen {ratio:.3f} (at most 0.9: {_yes(default <= 0.9 * chosen)})")
        print(f"default / best {default / best:.3f} (at most 0.9: {_yes(default <= 0.9 * best)})")
    else:
        print("default: NOT MEASURED, because the plan had no time for it or no memory")
    loss = held_out(args, planned["chosen"]["options"])
    if loss is None:
        print(f"loss on {args.held_out}: NOT MEASURED, because no settings of this machine are the chosen ones")
    else:
        print(
            f"loss on {args.held_out}: {loss.value:.2%} +- {loss.value_error or 0:.2%} ({loss.how}; within"
            f" {float(args.quality):.2%}: {_yes(loss.value <= float(args.quality))})"
        )


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "NO"


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="plans, logs and results")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--traces", default="conv,code", help=f"of {', '.join(TRACES)} (default: conv,code)")
    parser.add_argument("--memory", default="400MiB", help="plan.memory (default: 400MiB)")
    parser.add_argument("--quality", default="0.01", help="plan.quality (default: 0.01)")
    parser.add_argument("--seconds", default="900", help="plan.seconds (default: 900)")
    parser.add_argument("--text", default="wiki.test.raw", help="to measure quality with (default: wiki.test.raw)")
    parser.add_argument("--held-out", default="war_and_peace.txt", help="to judge it (default: war_and_peace.txt)")
    parser.add_argument("--windows", type=int, default=12, help="of each text (default: 12)")
    parser.add_argument("--ttft", type=float, default=2.0)
    parser.add_argument("--tpot", type=float, default=0.1)
    parser.add_argument("--attainment", type=float, default=0.9)
    parser.add_argument("--longest", type=int, default=768, help="tokens of a request (default: 768)")
    parser.add_argument("--requests", type=int, default=3000, help="of a trace (default: 3000)")
    parser.add_argument("--arrivals", choices=("poisson", "trace"), default="poisson", help="(default: poisson)")
    parser.add_argument("--finalists", type=int, default=8, help="that run for real (default: 8)")
    parser.add_argument("--load-seconds", type=float, default=90.0, help="of each rate (default: 90)")
    parser.add_argument("--most-rates", type=int, default=7, help="of each finalist (default: 7)")
    parser.add_argument("--least", type=float, default=0.1, help="first rate if none is predicted (default: 0.1)")
    parser.add_argument("--processes", type=int, default=2, help="simulations at once (default: 2)")
    parser.add_argument("more", nargs="*", help="further flags of quire plan auto, after --")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print(hardware_line(hardware()))
    for trace in args.traces.split(","):
        report(args, trace)
    texts = [(args.out / f"{trace}.json").read_text() for trace in args.traces.split(",")]
    options = [json.loads(text)["chosen"]["options"] for text in texts]
    differ = {key for key in options[0] if any(each[key] != options[0][key] for each in options)} - {"cache.memory"}
    print(f"\nthe traces differ in: {', '.join(sorted(differ)) or 'NOTHING'}")


if __name__ == "__main__":
    main()
