"""Measures the cost of hostile and broken clients ("bombs") to servers. Meanwhile it probes /health and samples memory.

    python benchmarks/edge.py                                   # Quire, without keys and with keys
    python benchmarks/edge.py --servers quire,vllm,llamacpp --peers .peers     # scripts/peers.sh installs them
    python benchmarks/edge.py --bombs "slow bodies" --bombs "3,000 connections" --modes open
    python benchmarks/edge.py --soak                            # 2,000 requests, a third of which are dropped

Every server runs with default settings and the same model (in the soak with an arena of 512 MiB), and stays up between
bombs. It is restarted if it does not answer /health within a second after a bomb. In the mode with keys, bombs carry no
key, as from any client that reaches the port. `edge/bombs.py` describes each bomb.

Columns
    answered   the status, or how the connections ended
    stall      seconds of the slowest answer of /health, requested 50 times a second on new connections
    busy       processor seconds of the server in the answer with the most: at most the stall, and the same however
               busy the machine is
    memory     maximum growth of the server's processes since the start of the bomb, in MB
    arena      the part of it in pages of Quire's arena, whose memory `cache.memory` grants
    left       growth without the arena after at most 10 s, in MB: waits until it is below 50
    health     number of probes that were not answered 200

The exit status says whether Quire keeps its limits: busy for at most 0.5 s, no growth above 100 MB without the arena,
of which at most 50 MB are left after 10 s, and /health always answered; with --soak the limits of `edge/soak.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "edge")]
from bombs import BOMBS as FRAMING_BOMBS  # noqa: E402
from bombs import Target, ask, named  # noqa: E402
from common import ROOT, append_record, commit, format_table, hardware, hardware_line  # noqa: E402
from crowd_bombs import CROWD_BOMBS  # noqa: E402
from probe import family, mapped, resident  # noqa: E402
from servers import Server, ServerError, answers, peer_server, quire_server  # noqa: E402
from text_bombs import TEXT_BOMBS  # noqa: E402

BOMBS = FRAMING_BOMBS | TEXT_BOMBS | CROWD_BOMBS

MAX_STALL, MAX_GROWTH, MAX_LEFT = 0.5, 100e6, 50e6
BACK_SECONDS = 10.0
MODES = {"open": "without keys", "keys": "with keys, bombs without one"}
SOAK_ARENA = "512MiB"
ARENA = tuple(f'quire_cache_bytes{{state="{state}"}}' for state in ("used", "cached", "free"))
KEY = "the-key-of-the-benchmark"
WARM = b'{"model":"%s","messages":[{"role":"user","content":"Say hi."}],"max_tokens":8}'


@dataclass(frozen=True)
class Kind:
    """How one server is started, and its names for health, model and a text to tokenize."""

    title: str
    health: str
    model: str
    text: str = "prompt"


KINDS = {
    "quire": Kind("Quire", "/health/live", "smollm2"),
    "vllm": Kind("vLLM", "/health", "smollm2"),
    "llamacpp": Kind("llama-server", "/health", "smollm2", "content"),
}


@dataclass(frozen=True)
class Seen:
    """The effect of one bomb on one server."""

    outcome: str
    seconds: float
    stall: float
    busy: float
    growth: float
    arena: float
    left: float
    failed: int
    probes: int

    @property
    def holds(self) -> bool:
        """Whether it stayed within the bounds."""
        is_small = self.growth - self.arena <= MAX_GROWTH and self.left <= MAX_LEFT
        return self.busy <= MAX_STALL and is_small and not self.failed


def server(name: str, mode: str, given: argparse.Namespace) -> AbstractContextManager[Server]:
    """A server of a kind, on its default settings."""
    log = given.logs / f"{name}-{mode}.log"
    key_file = given.logs / "keys"
    key_file.write_text(KEY + "\n")
    key_file.chmod(0o600)
    keys = mode == "keys"
    if name == "quire":
        words = ["--runtime.threads", given.threads] if given.threads else []
        # The soak's arena is full after the first half. An arena that still fills looks like a leak.
        words += ["--cache.memory", SOAK_ARENA] if given.soak else []
        return quire_server(log, given.model, *words, *(["--api-key-file", key_file] if keys else []))
    key = ["--api-key", KEY] if keys else []
    if name == "llamacpp":
        command = [given.peers / "llamacpp/bin/llama-server", "-m", given.peers / "models/bf16.gguf", "--offline"]
        return peer_server(log, [*command, "--no-webui", "--alias", KINDS[name].model, *key], {})
    python = given.peers / "vllm/bin/python"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", given.peers / "models/float32"]
    command += ["--dtype", "bfloat16", "--served-model-name", KINDS[name].model, *key]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": ""}
    return peer_server(log, command, environment)


class Probe:
    """The process that watches a server."""

    def __init__(self, found: Server, path: str) -> None:
        words = [sys.executable, HERE / "edge/probe.py", found.port, path, found.process.pid]
        self.process = subprocess.Popen(
            list(map(str, words)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._pid, size = found.process.pid, arena_size(found)
        places = [place for place in mapped(self._pid) if size and place[1] - place[0] >= size]
        self._arena = min(places, key=lambda place: place[1] - place[0], default=(0, 0))

    def arena(self) -> int:
        """Resident bytes of Quire's arena, which is in huge pages, and of what the kernel has joined to its mapping."""
        begin, end = self._arena
        return sum(size for place, size in mapped(self._pid).items() if place[0] < end and begin < place[1])

    def ask(self) -> dict[str, float]:
        """Its observations since the last call."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


def throw(found: Server, name: str, target: Target, probe: Probe) -> Seen:
    """Sends one bomb and observes the server until it has recovered or the time is over."""
    probe.ask()
    before = probe.arena()
    begun = time.monotonic()
    try:
        outcome = BOMBS[name](target)
    except OSError as error:
        outcome = type(error).__name__
    seconds = time.monotonic() - begun
    time.sleep(1.0)  # for the effects that follow the bomb
    seen = probe.ask()
    growth = seen["peak"] - seen["before"]
    arena = probe.arena() - before
    until = time.monotonic() + BACK_SECONDS
    while (left := resident(family(found.process.pid)) - seen["before"] - (probe.arena() - before)) > MAX_LEFT:
        if time.monotonic() > until:
            break
        time.sleep(0.25)
    failed, probes = int(seen["failed"]), int(seen["probes"])
    return Seen(outcome, seconds, seen["worst"], seen["busy"], growth, arena, max(0.0, left), failed, probes)


def arena_size(found: Server) -> float:
    """Bytes of the cache's arena; 0 for servers that do not report them."""
    request = urllib.request.Request(found.url + "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=60) as answer:
        lines = (line.rpartition(" ") for line in answer.read().decode().splitlines())
        return sum(float(value) for name, _, value in lines if name in ARENA)
    return 0.0


@contextmanager
def running(name: str, mode: str, given: argparse.Namespace) -> Iterator[tuple[Server, Probe, Target]]:
    """A server that has answered a request, and its probe."""
    with ExitStack() as stack:
        found = stack.enter_context(server(name, mode, given))
        kind = KINDS[name]
        target = Target(found.port, kind.model, given.seconds, kind.text)
        warm = named(target, "/v1/chat/completions", WARM)
        outcome = ask(target, warm.replace(b"Host:", f"Authorization: Bearer {KEY}\r\nHost:".encode()))
        if outcome != "200":
            raise ServerError(f"{kind.title} answered a plain request with {outcome}")
        probe = Probe(found, kind.health)
        stack.callback(probe.close)
        time.sleep(1.0)
        yield found, probe, target


def throw_all(name: str, mode: str, given: argparse.Namespace) -> dict[str, Seen]:
    """Sends every bomb to one server."""
    results: dict[str, Seen] = {}
    left = list(given.bombs)
    while left:
        say(f"{KINDS[name].title}, {MODES[mode]}: starting")
        with running(name, mode, given) as (found, probe, target):
            while left:
                bomb = left.pop(0)
                seen = results[bomb] = throw(found, bomb, target, probe)
                say(
                    f"  {bomb:28} {seen.outcome:32} {seen.stall:7.2f} s {seen.busy:7.2f} s busy"
                    f" {seen.growth / 1e6:7.0f} MB {seen.arena / 1e6:7.0f} MB of the arena"
                    f" {seen.left / 1e6:7.0f} MB left"
                )
                if found.process.poll() is not None or not answers(found.port, KINDS[name].health):
                    found.kill()
                    break
            else:
                if name == "quire":
                    found.drain()
    return results


def report(results: dict[tuple[str, str], dict[str, Seen]], given: argparse.Namespace) -> str:
    """A table per mode, with a row per bomb."""
    tables = []
    for mode in given.modes:
        names = [name for name in given.servers if (name, mode) in results]
        head = [MODES[mode]]
        for name in names:
            prefix = "" if len(names) == 1 else f"{KINDS[name].title} "
            head += [
                f"{prefix}answered",
                "stall, s",
                "busy, s",
                "memory, MB",
                *["arena, MB"] * (name == "quire"),
                "left, MB",
                "health",
            ]
        rows = []
        for bomb in given.bombs:
            row = [bomb]
            for name in names:
                seen = results[name, mode][bomb]
                health = "ok" if not seen.failed else f"{seen.failed} of {seen.probes} failed"
                row += [seen.outcome, f"{seen.stall:.2f}", f"{seen.busy:.2f}", f"{seen.growth / 1e6:.0f}"]
                row += [f"{seen.arena / 1e6:.0f}"] * (name == "quire") + [f"{seen.left / 1e6:.0f}", health]
            rows.append(row)
        tables.append(format_table(head, rows, given.markdown))
    where = f"{hardware_line(hardware())}; commit {commit()}; {time.strftime('%Y-%m-%d')}"
    return "\n\n".join([*tables, where])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="quire", help=f"comma-separated, of {', '.join(KINDS)}")
    parser.add_argument("--modes", default="open,keys", help="open, keys or both")
    parser.add_argument("--bombs", action="append", help="one of them, repeatable (default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of one bomb")
    parser.add_argument("--model", default="smollm2", help="the model that Quire loads")
    parser.add_argument("--threads", type=int, help="threads that Quire computes with (default: its own)")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="folder of scripts/peers.sh")
    parser.add_argument("--logs", type=Path, help="folder for the servers' output (default: a temporary one)")
    parser.add_argument("--soak", action="store_true", help="many requests instead of bombs")
    parser.add_argument("--requests", type=int, default=2000, help="number of requests of the soak")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line per server, mode and bomb")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    given = parser.parse_args()
    given.servers, given.modes = given.servers.split(","), given.modes.split(",")
    given.bombs = given.bombs or list(BOMBS)
    for names, known in ((given.servers, KINDS), (given.modes, MODES), (given.bombs, BOMBS)):
        for name in names:
            if name not in known:
                parser.error(f"{name!r} is none of: {'; '.join(known)}")
    given.logs = given.logs or Path(tempfile.mkdtemp(prefix="quire-edge-"))
    given.logs.mkdir(parents=True, exist_ok=True)
    return given


def say(text: str) -> None:
    """Prints progress to standard error. Standard output has only the table."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Sends all bombs to all servers, prints the tables."""
    given = arguments()
    if given.soak:
        from soak import run_soak

        with server("quire", "open", given) as found:
            holds = run_soak(found, given)
            found.drain()
        return 0 if holds else 1
    results: dict[tuple[str, str], dict[str, Seen]] = {}
    for name in given.servers:
        for mode in given.modes:
            try:
                results[name, mode] = throw_all(name, mode, given)
            except ServerError as error:
                say(f"LEFT OUT  {KINDS[name].title}, {MODES[mode]}: {error}")
    print(report(results, given))
    ours = [results.get(("quire", mode), {}) for mode in given.modes if "quire" in given.servers]
    holds = all(found and all(seen.holds for seen in found.values()) for found in ours)
    if given.json:
        for (name, mode), found in results.items():
            for bomb, seen in found.items():
                append_record(
                    given.json, {"benchmark": "edge", "server": name, "mode": mode, "bomb": bomb, **vars(seen)}
                )
    return 0 if holds and len(results) == len(given.servers) * len(given.modes) else 1


if __name__ == "__main__":
    sys.exit(main())
