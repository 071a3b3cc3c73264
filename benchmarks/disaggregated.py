"""Prompts and decoding apart or together, beside vLLM: latencies and SLO attainment of one load, on the same two cores.

    python benchmarks/disaggregated.py --data DIR --plot slo.png                          # Quire alone, every budget
    python benchmarks/disaggregated.py --data DIR --sides apart,mixed-512,vllm,vllm-apart --plot slo.png

DIR has AzureLLMInferenceTrace_conv.csv in traces/. The load is its first requests that fit --longest tokens, with
random prompts and Poisson arrivals. Every side gets the same requests at the same moments. Sides:

    apart       quire serve with one prefill and one decode instance, a core each
    apart@REV   the same of an earlier commit
    mixed-B     quire serve, one process on both cores, with scheduler.token_budget B
    vllm        vLLM on both cores                                            (needs scripts/peers.sh --only vllm,...)
    vllm-apart  two vLLM with the NIXL connector, a core each, and the two posts that a proxy makes (needs nixl beside
                it: pip install --no-deps --target .peers/nixl nixl nixl-cu12)

A side stays up for all rates of a round, and the order of sides rotates from round to round. A request meets its SLO if
both its time to first token and its mean time per token after that are at most --ttft and --tpot, times the scale. What
a side does not answer misses it. With --long-every K a prompt of --long-tokens comes with every K-th request, which is
not counted itself. The last table compares `apart` with every other side: their latencies at the same rate.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import append_record, format_table, hardware, hardware_line
from contest import checkouts
from load import Answered, LoadRequest, Send, attainment, azure, completions, poisson, post, quantile, replay, stream
from servers import peer_server, quire_server

SCALES = (0.5, 0.75, 1.0, 1.5, 2.0)
SHARES = (0.5, 0.9, 0.99)
VOCABULARY = range(1000, 20000)


@dataclass(frozen=True)
class Point:
    """What one side did at one rate."""

    side: str
    rate: float
    answers: list[Answered]

    def ttft(self, share: float) -> float:
        """A quantile."""
        return quantile([each.ttft for each in self.answers], share)

    def tpot(self, share: float) -> float:
        """A quantile over requests."""
        return quantile([each.tpot for each in self.answers], share)


@contextmanager
def serving(side: str, args: argparse.Namespace, folder: Path, trees: Mapping[str, Path]) -> Iterator[Send]:
    """Starts what a side needs. Yields how it is asked. trees: checkouts of earlier commits."""
    log = folder / f"{side.replace('/', '-')}.log"
    memory = ["--cache.memory", "1GiB", "--scheduler.max_running", args.running, "--model.weights", args.weights]
    name, _, revision = side.partition("@")
    if name == "apart":
        tree = {"tree": trees[revision]} if revision else {}
        roles = ["--cluster.prefill", 1, "--cluster.decode", 1]
        with quire_server(log, args.model, *roles, *memory, **tree) as server:
            yield completions(server.url, args.model)
            print(transfers_text(server.url), file=sys.stderr, flush=True)
    elif side.startswith("mixed-"):
        with quire_server(log, args.model, *memory, "--scheduler.token_budget", side[6:]) as server:
            yield completions(server.url, args.model)
    elif side == "vllm":
        with vllm_server(log, args, "0-1") as url:
            yield completions(url, "model")
    elif side == "vllm-apart":
        with ExitStack() as both:
            urls = [
                both.enter_context(vllm_server(folder / f"{side}-{core}.log", args, str(core), 5611 + core))
                for core in range(2)
            ]
            yield through_nixl(*urls)
    else:
        raise SystemExit(f"there is no side {side!r}")


@contextmanager
def vllm_server(log: Path, args: argparse.Namespace, cores: str, channel: int | None = None) -> Iterator[str]:
    """VLLM on some cores; with a side channel it passes its cache on through NIXL."""
    peers: Path = args.peers
    command = [
        peers / "vllm/bin/vllm", "serve", peers / "models/float32", "--served-model-name", "model", "--dtype",
        args.vllm_dtype, "--max-model-len", "4096", "--max-num-seqs", args.running,
    ]  # fmt: skip
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": str(1 + ("-" in cores)),
    }  # fmt: skip
    if channel is not None:
        transfer = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'
        command += ["--enforce-eager", "--kv-transfer-config", transfer]
        environment |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel),
            "UCX_NET_DEVICES": "lo", "PYTHONPATH": str(peers / "nixl"),
        }  # fmt: skip
    with peer_server(log, command, environment) as server:
        yield server.url


def through_nixl(prefill: str, decode: str) -> Send:
    """The two posts of a request: the prompt at one, and all tokens at the other, which fetches the cache."""

    async def send(request: LoadRequest, answer: Answered) -> None:
        first = {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
            "remote_host": None, "remote_port": None,
        }  # fmt: skip
        body: dict[str, Any] = {
            "model": "model", "prompt": request.prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 1,
        }  # fmt: skip
        found = await post(prefill, "/v1/completions", body | {"kv_transfer_params": first})
        body |= {"max_tokens": request.num_out, "stream": True, "stream_options": {"include_usage": True}}
        await stream(decode, "/v1/completions", body | {"kv_transfer_params": found["kv_transfer_params"]}, answer)

    return send


def transfers_text(url: str) -> str:
    """How long transfers took, of all requests that a cluster has answered."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        lines = page.read().decode().splitlines()
    name = "quire_stage_seconds"
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith(name))
    stages = ("queue", "prefill", "transfer", "decode")
    sums = {stage: float(found[f'{name}_sum{{stage="{stage}"}}']) for stage in stages}
    count = float(found[f'{name}_count{{stage="transfer"}}'])
    steps = [
        (float(key.split('le="')[1].split('"')[0]), float(value)) for key, value in found.items()
        if "_bucket" in key and 'stage="transfer"' in key
    ]  # fmt: skip
    shares = ", ".join(f"{100 * value / count:.0f} % within {1e3 * bound:g} ms" for bound, value in sorted(steps)[:-1])
    share = 100 * sums["transfer"] / sum(sums.values())
    return f"transfers of {count:.0f} requests: {share:.2f} % of their latency; {shares}"


async def warm(send: Send) -> None:
    """A few requests of several lengths, so that nothing is compiled while it counts."""
    lengths = (20, 200, 1000, 64, 300)
    requests = [LoadRequest(0.3 * number, [500 + number] * length, 8) for number, length in enumerate(lengths)]
    await replay(requests, send)


def measure(args: argparse.Namespace, folder: Path, trees: Mapping[str, Path]) -> list[Point]:
    """Every side at every rate. A side stays up for all rates of a round: starting it again costs a minute."""
    file = args.data / "traces" / "AzureLLMInferenceTrace_conv.csv"
    points: list[Point] = []
    for number in range(args.rounds):
        sides = args.sides[number % len(args.sides) :] + args.sides[: number % len(args.sides)]
        for side in sides:
            with serving(side, args, folder, trees) as send:
                asyncio.run(warm(send))
                for place, rate in enumerate(args.rates):
                    # Other prompts at every rate, or the cache of the rate before would answer them.
                    seed = args.seed + place + 100 * number
                    load = azure(file, args.requests, longest=args.longest, vocabulary=VOCABULARY, seed=seed)
                    load = poisson(load, rate, seed)
                    long = interfering(load, args, seed)
                    answers = asyncio.run(replay([*load, *long], send))
                    point = Point(side, rate, answers[: len(load)])
                    points.append(point)
                    print(row_text(point), file=sys.stderr, flush=True)
    return points


def interfering(load: list[LoadRequest], args: argparse.Namespace, seed: int) -> list[LoadRequest]:
    """Long prompts that come with some requests, and want one token."""
    if not args.long_every:
        return []
    rng = random.Random(seed + 1)
    return [
        LoadRequest(each.at, [rng.choice(VOCABULARY) for _ in range(args.long_tokens)], 1)
        for each in load[args.long_every - 1 :: args.long_every]
    ]


def row_text(point: Point) -> str:
    """One line, while the others are still measured."""
    missing = sum(bool(each.error) for each in point.answers)
    return (
        f"{point.side} at {point.rate:g}/s: TTFT p50 {point.ttft(0.5):.3f} p90 {point.ttft(0.9):.3f} p99"
        f" {point.ttft(0.99):.3f} s, TPOT p50 {1e3 * point.tpot(0.5):.1f} p90 {1e3 * point.tpot(0.9):.1f} p99"
        f" {1e3 * point.tpot(0.99):.1f} ms, {missing} not answered"
    )


def report(points: list[Point], args: argparse.Namespace) -> None:
    """Prints the tables."""
    print(hardware_line(hardware()))
    print(f"{args.requests} requests a point, {args.rounds} rounds; SLO: TTFT {args.ttft} s and TPOT {args.tpot} s\n")
    rows = [
        [
            point.side, f"{point.rate:g}", *(f"{point.ttft(share):.3f}" for share in SHARES),
            *(f"{1e3 * point.tpot(share):.1f}" for share in SHARES),
            *(f"{100 * attainment(point.answers, args.ttft * scale, args.tpot * scale):.0f}" for scale in SCALES),
        ]
        for point in points
    ]  # fmt: skip
    head = [
        "side", "rate", *(f"TTFT p{100 * share:g} s" for share in SHARES),
        *(f"TPOT p{100 * share:g} ms" for share in SHARES), *(f"SLO x{scale:g} %" for scale in SCALES),
    ]  # fmt: skip
    print(format_table(head, rows))


def compare(points: list[Point]) -> None:
    """Prints latencies of every other side, divided by those of `apart`."""
    sides = dict.fromkeys(point.side for point in points if point.side != "apart")
    rows = []
    for rate in dict.fromkeys(point.rate for point in points):
        at_rate = [point for point in points if point.rate == rate]
        of = {
            side: Point(side, rate, [one for point in at_rate if point.side == side for one in point.answers])
            for side in ("apart", *sides)
        }
        rows += [
            [
                side, f"{rate:g}",
                *(f"{of[side].ttft(share) / of['apart'].ttft(share):.2f}" for share in (0.5, 0.99)),
                *(f"{of[side].tpot(share) / of['apart'].tpot(share):.2f}" for share in (0.5, 0.99)),
            ]
            for side in sides
        ]  # fmt: skip
    ratios = [f"p{share} {what} / apart's" for what in ("TTFT", "TPOT") for share in (50, 99)]
    print(format_table(["side", "rate", *ratios], rows))


def draw(points: list[Point], args: argparse.Namespace) -> None:
    """Attainment over the rate, and over the scale of the SLO at each rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * (1 + len(args.rates)), 4), layout="constrained")
    axes = figure.subplots(1, 1 + len(args.rates), sharey=True)
    for side in args.sides:
        of_side = [each for each in points if each.side == side]

        def share(found: list[Point], scale: float) -> float:
            answers = list(itertools.chain.from_iterable(each.answers for each in found))
            return 100 * attainment(answers, args.ttft * scale, args.tpot * scale)

        by_rate = [[each for each in of_side if each.rate == rate] for rate in args.rates]
        axes[0].plot(args.rates, [share(found, 1.0) for found in by_rate], marker="o", label=side)
        for axis, rate, found in zip(axes[1:], args.rates, by_rate, strict=True):
            axis.plot(SCALES, [share(found, scale) for scale in SCALES], marker="o", label=side)
            axis.set_title(f"{rate:g} requests/s")
            axis.set_xlabel("scale of the SLO")
    for axis in axes:
        for level in (90, 99):
            axis.axhline(level, linewidth=0.5, color="grey")
    axes[0].set_xlabel("requests/s")
    axes[0].set_ylabel("requests within their SLO, %")
    axes[0].legend()
    figure.savefig(args.plot)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--weights", default="dequantized", help="Quire's model.weights; 16 bits, as vLLM's, by default"
    )
    parser.add_argument("--peers", type=Path, default=Path(".peers"), metavar="DIR", help="of scripts/peers.sh")
    parser.add_argument("--running", type=int, default=64, help="sequences at once; budgets exceed it by 64 or more")
    parser.add_argument("--vllm-dtype", default="bfloat16", help="float32 is faster on a CPU with AVX2 alone")
    parser.add_argument("--sides", default="apart,mixed-128,mixed-256,mixed-512,mixed-1024,mixed-2048")
    parser.add_argument("--rates", default="0.5,1,1.5,2,2.5", help="requests a second")
    parser.add_argument("--requests", type=int, default=60, help="of each point (default: 60)")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of a request (default: 2,048)")
    parser.add_argument("--long-every", type=int, default=0, metavar="K", help="a long prompt with every K-th request")
    parser.add_argument("--long-tokens", type=int, default=1900)
    parser.add_argument("--ttft", type=float, default=1.0, help="seconds (default: 1)")
    parser.add_argument("--tpot", type=float, default=0.05, help="seconds (default: 0.05)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the attainment")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the results as JSON lines")
    args = parser.parse_args()
    args.sides = args.sides.split(",")
    args.rates = [float(each) for each in args.rates.split(",")]
    os.environ.setdefault("QUIRE_LOG", "info")
    revisions = [revision for side in args.sides if (revision := side.partition("@")[2])]
    if any("@" in side and not side.startswith("apart@") for side in args.sides):
        parser.error("only the side apart has earlier commits: apart@REV")
    with tempfile.TemporaryDirectory() as folder, checkouts(revisions) as trees:
        points = measure(args, Path(folder), trees)
    report(points, args)
    if "apart" in args.sides:
        print()
        compare(points)
    if args.plot:
        draw(points, args)
    if args.json:
        for point in points:
            times = [[each.ttft, each.tpot, each.error] for each in point.answers]
            append_record(args.json, {"side": point.side, "rate": point.rate, "requests": times})


if __name__ == "__main__":
    main()
