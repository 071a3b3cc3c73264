"""Kills and stops the instances of a cluster at random moments under load, and compares every answer with one engine's.

    python benchmarks/cluster_chaos.py --requests 400 --kills 20 --stops 20

Half of the requests are sampled, each with a seed, and half of the prompts share their beginning. Every instance copies
slowly and overwrites what it has let go (--faults). Prints what happened, and exits with 1 if a request is lost,
doubled, wrong, late or failed, or if bytes, processes, threads or files are left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import math
import operator
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import hardware, hardware_line

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from quire import LLM, SamplingParams  # noqa: E402
from quire.cluster.cluster import Cluster  # noqa: E402
from quire.cluster.members import Health, Member  # noqa: E402
from quire.cluster.protocol import RequestPhase  # noqa: E402
from quire.config import ClusterConfig  # noqa: E402
from quire.errors import QuireError  # noqa: E402
from tests.faults import FaultyProcesses  # noqa: E402

SETTLE_SECONDS = 60.0
"""Time in which the instances must be whole and idle after the last answer."""


@dataclass
class ClientRequest:
    """A request, and what its client got."""

    prompt: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    error: str = ""
    is_whole: bool = False
    longest_wait: float = 0.0
    seconds: float = 0.0


@dataclass
class Tally:
    """What the faults did.

    streamed  numbers of the requests that had tokens when their process went
    begun     requests that have begun
    """

    kills: int = 0
    stops: int = 0
    silent: int = 0
    begun: int = 0
    streamed: set[int] = field(default_factory=set)


class Chaos:
    """A load and its faults on one cluster."""

    def __init__(self, cluster: Cluster, requests: list[ClientRequest], args: argparse.Namespace) -> None:
        self.cluster, self.requests, self.args = cluster, requests, args
        self.tally = Tally()
        self._random = random.Random(args.seed + 1)
        self._resuming: list[asyncio.Task[None]] = []
        down = cluster.router.down

        def noted_down(name: str) -> None:
            self._note_streamed(name)
            down(name)

        cluster.router.down = noted_down  # type: ignore[method-assign]

    async def run(self) -> None:
        """All requests, by a fixed number of clients, while faults happen."""
        waiting = iter(self.requests)
        faults = asyncio.create_task(self._faults())
        await asyncio.gather(*(self._client(waiting) for _ in range(self.args.clients)))
        faults.cancel()
        await asyncio.gather(faults, *self._resuming, return_exceptions=True)

    async def _client(self, waiting: Iterator[ClientRequest]) -> None:
        for request in waiting:
            name = f"chaos-{self.tally.begun}"
            self.tally.begun += 1
            begun = last = time.monotonic()
            try:
                async with asyncio.timeout(self.args.deadline):
                    prompt = {"prompt_token_ids": request.prompt}
                    async for output in self.cluster.generate(prompt, request.params, name):
                        request.token_ids += output.outputs[0].token_ids
                        request.is_whole = output.finished
                        now = time.monotonic()
                        request.longest_wait, last = max(request.longest_wait, now - last), now
            except TimeoutError:
                request.error = f"no end after {self.args.deadline:g} s"
            except QuireError as error:
                request.error = f"{type(error).__name__}: {error}"
            request.seconds = time.monotonic() - begun
            request.longest_wait = max(request.longest_wait, time.monotonic() - last)

    # ---- faults ----------------------------------------------------------------------------------------------------

    async def _faults(self) -> None:
        """Each fault waits until some share of the requests has begun, so that all of them happen under load."""
        kinds = ["kill"] * self.args.kills + ["stop"] * self.args.stops
        self._random.shuffle(kinds)
        moments = sorted(self._random.uniform(0.04, 0.96) * len(self.requests) for _ in kinds)
        first_stop = True
        for kind, moment in zip(kinds, moments, strict=True):
            while self.tally.begun < moment:
                await asyncio.sleep(0.01)
            await asyncio.sleep(self._random.uniform(0.0, 0.3))
            if kind == "kill":
                await self._hit(signal.SIGKILL)
                self.tally.kills += 1
                continue
            # The first one is a decoding instance, for 5 s, which must go on after that.
            seconds = 5.0 if first_stop else self._random.uniform(0.2, 2 * self.args.heartbeat)
            member, pid = await self._hit(signal.SIGSTOP, "decode" if first_stop else None)
            first_stop = False
            self._resuming.append(asyncio.create_task(self._resume(member, pid, seconds)))
            self.tally.stops += 1

    async def _hit(self, number: signal.Signals, role: str | None = None) -> tuple[Member, int]:
        """Sends a signal to an instance that serves; returns it and its process."""
        while True:
            member = await self._victim(role)
            if (pid := self._signal(member, number)) is not None:
                return member, pid

    async def _victim(self, role: str | None = None) -> Member:
        while True:
            members = [each for each in self.cluster.router.members.values() if each.health is Health.SERVING]
            chosen = [each for each in members if role in (None, each.role)]
            if chosen:
                return self._random.choice(chosen)
            await asyncio.sleep(0.01)

    def _signal(self, member: Member, number: signal.Signals) -> int | None:
        pid = self.cluster.supervisor.processes.pid(member.name)
        try:
            if pid is not None:
                os.kill(pid, number)
        except ProcessLookupError:
            return None
        return pid

    async def _resume(self, member: Member, pid: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.cluster.supervisor.processes.pid(member.name) == pid:
            self._signal(member, signal.SIGCONT)
        else:
            self.tally.silent += 1

    def _note_streamed(self, name: str) -> None:
        for number, request in self.cluster.router._requests.items():
            state = request.state
            needs = {state.receiver} if state.is_taken else {state.receiver, state.source}
            if state.phase is RequestPhase.RUNNING and state.delivered and name in needs:
                self.tally.streamed.add(number)

    # ---- afterwards ------------------------------------------------------------------------------------------------

    async def settle(self) -> str:
        """Waits until all instances serve and hold nothing. Returns what they still hold, if anything."""
        end, found = time.monotonic() + SETTLE_SECONDS, "?"
        expected = self.args.prefill + self.args.decode + self.args.mixed
        while found and time.monotonic() < end:
            await asyncio.sleep(0.5)
            members = list(self.cluster.router.members.values())
            held = [_held(each) for each in members]
            if (serving := sum(each.is_serving for each in members)) < expected:
                held.append(f"{serving} of {expected} instances serve")
            found = ", ".join(filter(None, held))
        return found


def _held(member: Member) -> str:
    load, stats = member.load, member.stats
    if load is None or stats is None:
        return f"{member.name} has not said what it holds"
    counts = {
        "attempts": len({*member.rows, *member.sequences}), "running": load.num_running, "waiting": load.num_waiting,
        "exports": load.num_held, "bytes in use": stats["cache"]["bytes_used"],
        "bytes not free": load.total_bytes - load.free_bytes,
    }  # fmt: skip
    held = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{member.name}: {held}" if held else ""


def resources() -> dict[str, list[str]]:
    """What this process has: children, threads, descriptors, and the machine's names of shared memory."""
    own, children, descriptors = str(os.getpid()), list[str](), list[str]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[1] == own:
                children.append((stat.parent / "cmdline").read_text().replace("\0", " ") or stat.parent.name)
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            descriptors.append(os.readlink(entry))
    return {
        "processes": children,
        "threads": [each.name for each in threading.enumerate()],
        "descriptors": [each for each in descriptors if not each.startswith("/proc/")],
        "/dev/shm": [each.name for each in Path("/dev/shm").iterdir()],
    }


def requests_of(args: argparse.Namespace, vocabulary: int, longest: int) -> list[ClientRequest]:
    """Prompts of all lengths, some of them with a common beginning, and answers of all lengths."""
    rng = random.Random(args.seed)
    shared = [rng.randrange(3, vocabulary) for _ in range(longest)]
    found = []
    for index in range(args.requests):
        most = min(args.prompt_tokens, longest - args.answer_tokens - 1)
        length = rng.choice([1, 63, 64, 65, 128, rng.randint(1, most), rng.randint(1, most), rng.randint(1, most)])
        common = rng.randrange(length) if rng.random() < 0.5 else 0
        prompt = [*shared[:common], *(rng.randrange(3, vocabulary) for _ in range(length - common))]
        tokens = rng.randint(args.answer_tokens // 4, args.answer_tokens)
        if rng.random() < 0.1:
            tokens = rng.choice([1, 2, 17])
        params = SamplingParams(
            max_tokens=tokens, temperature=rng.choice([0.0, 0.8]), seed=args.seed + index, ignore_eos=True,
        )  # fmt: skip
        found.append(ClientRequest(prompt, params))
    return found


def judge(requests: list[ClientRequest], expected: list[list[int]]) -> dict[str, int]:
    """How many requests went wrong, and in which way."""
    counts = dict.fromkeys(("lost", "doubled", "wrong", "late", "failed"), 0)
    for request, tokens in zip(requests, expected, strict=True):
        got = request.token_ids
        if request.error.startswith("no end"):
            counts["late"] += 1
        elif request.error:
            counts["failed"] += 1
        if got == tokens[: len(got)]:
            counts["lost"] += not request.error and (len(got) < len(tokens) or not request.is_whole)
        else:
            counts["doubled" if len(got) > len(tokens) else "wrong"] += 1
    return counts


def explained(llm: LLM, request: ClientRequest, expected: list[int]) -> str:
    """Where an answer is wrong, and how near the right token was: one engine computes the same in other batches with
    other rounding.
    """
    pairs = zip(request.token_ids, expected, strict=False)
    place = next((index for index, (got, right) in enumerate(pairs) if got != right), len(expected))
    said = f"{len(request.prompt)} prompt tokens, temperature {request.params.temperature}, wrong from token {place} on"
    if place == len(expected):
        return said
    wanted = dataclasses.replace(request.params, logprobs=20, max_tokens=place + 1)
    (alone,) = llm.generate([{"prompt_token_ids": request.prompt}], wanted)
    found = (alone.outputs[0].logprobs or [])[place]
    got, right, tokens = request.token_ids[place], expected[place], alone.outputs[0].token_ids
    odds = [found[token].logprob if token in found else math.nan for token in (got, right)]
    return f"{said}: {got} ({odds[0]:.6f}) for {right} ({odds[1]:.6f}); alone one engine has {tokens[place]}"


def cluster_of(args: argparse.Namespace, model: str, options: dict[str, Any]) -> Cluster:
    """The cluster, not started."""
    settings = ClusterConfig(
        prefill=args.prefill, decode=args.decode, mixed=args.mixed, transport=args.transport, tries=args.tries,
        timeout=args.timeout, heartbeat=args.heartbeat,
    )  # fmt: skip
    return Cluster(model, options, settings=settings, processes=FaultyProcesses(args.faults))


async def under_fire(args: argparse.Namespace, cluster: Cluster) -> tuple[Chaos, str, float]:
    """Runs the load, and waits until the instances are idle. Returns what they still hold, and the load's seconds."""
    async with cluster:
        longest = min(cluster.max_context, args.context)
        chaos = Chaos(cluster, requests_of(args, cluster.shape.vocab_size - 2, longest), args)
        begun = time.monotonic()
        await chaos.run()
        seconds = time.monotonic() - begun
        left = await chaos.settle()
        chaos.counts = dict(cluster.router.counts)  # type: ignore[attr-defined]
        return chaos, left, seconds


def report(args: argparse.Namespace, chaos: Chaos, left: str, seconds: float, expected: list[list[int]],
           before: dict[str, list[str]], after: dict[str, list[str]]) -> bool:  # fmt: skip
    """Prints what happened. Returns whether all is well."""
    tally, wrongs = chaos.tally, judge(chaos.requests, expected)
    share = len(tally.streamed) / max(1, len(chaos.requests))
    wait, seconds_of = (max(map(operator.attrgetter(name), chaos.requests)) for name in ("longest_wait", "seconds"))
    num_tokens = sum(len(each.token_ids) for each in chaos.requests)
    print(f"{hardware_line(hardware())}")
    print(" ".join(f"{name}={value}" for name, value in sorted(vars(args).items())))
    print(f"requests {len(chaos.requests)} in {seconds:.0f} s, tokens {num_tokens}")
    print(f"kills {tally.kills}, stops {tally.stops} ({tally.silent} of them ended before they were to go on)")
    print(f"requests with streamed tokens when their process went: {len(tally.streamed)} ({share:.0%})")
    print(", ".join(f"{name} {count}" for name, count in wrongs.items()))
    print(f"longest wait for a token {wait:.1f} s, longest request {seconds_of:.1f} s")
    print(f"router: {chaos.counts}")  # type: ignore[attr-defined]
    print(f"left in instances: {left or 'nothing'}")
    for name in before:
        more = sorted((Counter(after[name]) - Counter(before[name])).elements())
        print(f"{name}: {len(before[name])} before, {len(after[name])} after {', '.join(more)}".rstrip())
    for error, count in Counter(each.error for each in chaos.requests if each.error).most_common(10):
        print(f"{count} requests: {error}")
    is_late = wait > args.timeout
    if is_late:
        print(f"a client waited for longer than {args.timeout:g} s for its next token")
    is_back = all(len(after[name]) <= len(before[name]) for name in before)
    has_faults = tally.kills == args.kills and tally.stops == args.stops and share >= args.least_streamed
    if not has_faults:
        print(f"the load was over before all faults, or fewer than {args.least_streamed:.0%} had streamed tokens")
    return not any(wrongs.values()) and not left and is_back and has_faults and not is_late


def main() -> int:
    """Runs all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a model (default: a tiny random one)")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, default=48, help="requests at a time (default: 48)")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=20, help="SIGSTOPs, of up to 2 x --heartbeat (default: 20)")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--mixed", type=int, default=0)
    parser.add_argument("--transport", default="auto", choices=("auto", "shm", "tcp"))
    parser.add_argument("--tries", type=int, default=12, help="attempts at a request (default: 12)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds without a token (default: 60)")
    parser.add_argument("--heartbeat", type=float, default=6.0)
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds that a client waits (default: 600)")
    parser.add_argument("--prompt-tokens", type=int, default=700, help="longest prompt (default: 700)")
    parser.add_argument("--answer-tokens", type=int, default=400, help="longest answer (default: 400)")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--memory", default="16MiB", help="cache of an instance (default: 16MiB)")
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--faults", default="delay=0.05,poison", help="of all instances, see tests/faults.py")
    parser.add_argument("--least-streamed", type=float, default=0.3, help="share of requests that must be hit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-level", default="ERROR")
    args = parser.parse_args()
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s router: %(message)s")
    options: dict[str, Any] = {
        "runtime.device": "cpu", "runtime.threads": 1, "cache.memory": args.memory,
        "scheduler.max_running": args.max_running, "scheduler.token_budget": 256,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model is None:
            from tests.tiny_models import save_tiny

            model = str(save_tiny(Path(folder), head_dim=16, max_position_embeddings=args.context))
            options["model.dtype"] = "float32"
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        cluster = cluster_of(args, model, options)  # the process that renders chats stays as long as this one
        before = resources()
        chaos, left, seconds = asyncio.run(under_fire(args, cluster))
        after = resources()
        llm = LLM(model, options)
        prompts = [{"prompt_token_ids": each.prompt} for each in chaos.requests]
        answers = llm.generate(prompts, [each.params for each in chaos.requests])
        expected = [each.outputs[0].token_ids for each in answers]
        for index, (request, tokens) in enumerate(zip(chaos.requests, expected, strict=True)):
            if request.token_ids != tokens[: len(request.token_ids)]:
                print(f"chaos-{index}: {explained(llm, request, tokens)}")
    is_well = report(args, chaos, left, seconds, expected, before, after)
    print("all is well" if is_well else "something is wrong")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
