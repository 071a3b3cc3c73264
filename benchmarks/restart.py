"""Time to first token after `kill -9` of the server and a new start: Quire with its disk tier, and llama.cpp.

    python benchmarks/restart.py --llama-server .peers/llamacpp/bin/llama-server --llama-model .peers/models/bf16.gguf
    python benchmarks/restart.py --codec nuq3              # without llama.cpp
    python benchmarks/restart.py --quick

`scripts/peers.sh --only llamacpp,llamacpp-model` builds the peer. Any llama-server with --slot-save-path does. Its
model must have the same bf16 weights.

Each round has a new prompt of random tokens, a fresh folder, and these steps, in turns with llama.cpp's.

    Quire       start with --tiers.disk; send the prompt (`cold`); wait until the folder no longer grows; kill -9; drop
                the page cache; start; send the prompt (`from disk`)
    llama.cpp   start with --slot-save-path and one slot; send the prompt (`cold`); save the slot (`save`); kill -9;
                drop the page cache; start; restore the slot (`restore`) and send the prompt (`from disk`, which
                includes the restore)

Seconds count from the call, with the server ready and warmed up by a short prompt, to the first token of the streamed
answer. `tokens from disk` are those that Quire reports by tier, and llama.cpp's `timings.cache_n`. Quire's answers
before and after the restart are compared, too. In 16 bits a few may differ by rounding: the last chunk of a prompt is
computed with the chunks before it, or alone after they are fetched.

The page cache is dropped with posix_fadvise on each file of the folder, and for the whole system where the script may
write to /proc/sys/vm/drop_caches. A line below the tables says which, and how much stayed. Ratios are medians of the
ratios within a round. The exit status is 1 if a mark is missed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, append_record, format_table, median
from servers import Server, ServerError, peer_server, quire_server
from tiers import (
    Mark,
    OtherLoad,
    arena_need,
    conditions,
    disk_options,
    drop_page_cache,
    engine_options,
    exit_status,
    fresh_folder,
    marks_table,
    parse_tier,
    random_prompts,
    ratios,
    read_sides,
    tier_arguments,
    token_ids,
)

WARM_TOKENS = 32
"""Less than a chunk, so that nothing of the warm-up is stored."""

ANSWER_TOKENS = 16
"""Of the answers that are compared: after the cold prompt, and after the one from disk."""

QUIET_SECONDS = 2.0
"""A folder that has not grown for so long is written. The tier writes within about a second."""

MOST_SECONDS = 120.0

SIDES = ("quire", "llamacpp")

Figures = dict[str, float]


@dataclass(frozen=True)
class First:
    """A streamed answer.

    seconds  from the call to its first event
    fields   what its events say, the last word on each field
    """

    seconds: float
    fields: dict[str, Any]


def call(server: Server, path: str, body: dict[str, Any]) -> First:
    """Sends a POST and reads the answer, streamed or not. Raises ServerError for a refusal."""
    content = json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=MOST_SECONDS)
    try:
        begun = time.perf_counter()
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ServerError(f"{path} was answered {answer.status}: {answer.read().decode(errors='replace'):.300}")
        seconds, fields = math.nan, {}
        if not body.get("stream"):
            fields = json.loads(answer.read())
            return First(time.perf_counter() - begun, fields)
        for line in answer:
            if line.startswith(b"data:") and b"[DONE]" not in line:
                if math.isnan(seconds):
                    seconds = time.perf_counter() - begun
                fields |= json.loads(line[5:])
        return First(seconds, fields)
    finally:
        connection.close()


def ask_quire(server: Server, model: str, prompt: list[int]) -> First:
    """The first token of Quire, and the usage."""
    # One token: the event of an unfinished answer may be held back until its bytes are whole characters.
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    return call(server, "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})


def answer_of(server: Server, model: str, prompt: list[int]) -> str:
    """The text of a longer answer, to compare."""
    body = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    return str(call(server, "/v1/completions", body).fields["choices"][0]["text"])


def ask_llama(server: Server, prompt: list[int]) -> First:
    """The first token of llama.cpp, and its timings."""
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0.0, "ignore_eos": True, "cache_prompt": True}
    return call(server, "/completion", {**body, "stream": True})


def wait_until_written(folder: Path, clock: Callable[[], float] = time.monotonic) -> float:
    """Waits until a folder has files and no longer changes. Returns its MiB on disk. Raises ServerError for none."""
    begun = since = clock()
    seen = -1
    while clock() - since < QUIET_SECONDS:
        if clock() - begun > MOST_SECONDS:
            raise ServerError(f"the tier is still writing after {MOST_SECONDS:.0f} s")
        found = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        if found != seen:
            seen, since = found, clock()
        time.sleep(0.1)
    if not seen:
        raise ServerError("the tier has written nothing")
    return seen / 2**20


def quire_turn(given: argparse.Namespace, warm: list[int], prompt: list[int]) -> tuple[Figures, str]:
    """One round of Quire, and how the page cache was dropped."""
    with fresh_folder(given.folder, given.need_bytes) as folder:
        options = engine_options(given, cache_codec=given.codec) | disk_options(folder, given.need_bytes)
        words = [given.model, *(word for key, value in options.items() for word in (f"--{key}", value))]
        words += given.options.split()
        with quire_server(given.logs / "quire.log", *words) as server:
            ask_quire(server, given.model, warm)
            cold = ask_quire(server, given.model, prompt)
            text = answer_of(server, given.model, prompt)
            written = wait_until_written(folder)
            server.kill()
        how = drop_page_cache(folder)
        with quire_server(given.logs / "quire.log", *words) as server:
            ask_quire(server, given.model, warm)
            again = ask_quire(server, given.model, prompt)
            same = text == answer_of(server, given.model, prompt)
    details = again.fields["usage"]["prompt_tokens_details"]
    return {
        "quire cold": cold.seconds,
        "quire from disk": again.seconds,
        "quire tokens from disk": details.get("cached_tokens_by_tier", {}).get("disk", 0),
        "quire cold tokens found": cold.fields["usage"]["prompt_tokens_details"]["cached_tokens"],
        "quire MiB written": written,
        "quire same answers": float(same),
    }, how


def llama_turn(given: argparse.Namespace, warm: list[int], prompt: list[int]) -> tuple[Figures, str]:
    """One round of llama.cpp, and how the page cache was dropped."""
    with fresh_folder(given.folder, given.need_bytes) as folder:
        command = [given.llama_server, "-m", given.llama_model, "-t", given.threads, "-np", 1, "--offline"]
        command += ["-c", len(prompt) + 256, "--cache-ram", 0, "--no-webui", "--slot-save-path", f"{folder}/"]
        slot = {"filename": "slot"}
        with peer_server(given.logs / "llamacpp.log", command, {}) as server:
            ask_llama(server, warm)
            cold = ask_llama(server, prompt)
            save = call(server, "/slots/0?action=save", slot)
            server.kill()
        how = drop_page_cache(folder)
        written = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
        with peer_server(given.logs / "llamacpp.log", command, {}) as server:
            ask_llama(server, warm)
            restore = call(server, "/slots/0?action=restore", slot)
            again = ask_llama(server, prompt)
    return {
        "llama.cpp cold": cold.seconds,
        "llama.cpp save": save.seconds,
        "llama.cpp restore": restore.seconds,
        "llama.cpp from disk": restore.seconds + again.seconds,
        "llama.cpp tokens from disk": again.fields["timings"]["cache_n"],
        "llama.cpp MiB written": written,
    }, how


def marks_of(samples: dict[str, list[float]], num_tokens: int) -> list[Mark]:
    """The claims. NaN where a side did not run."""
    cold, disk = samples.get("quire cold", []), samples.get("quire from disk", [])
    share = [found / num_tokens for found in samples.get("quire tokens from disk", [])]
    # A peer that restored nothing computed the prompt.
    restored = samples.get("llama.cpp tokens from disk", [])
    peer = [
        seconds if found >= 0.95 * num_tokens else math.nan
        for seconds, found in zip(samples.get("llama.cpp from disk", []), restored, strict=True)
    ]
    return [
        Mark("Quire: cold / from disk", ratios(cold, disk), 8),
        Mark("Quire: share of the prompt from disk", share, 0.95),
        Mark("from disk: llama.cpp / Quire", ratios(peer, disk), 1),
    ]


def report(given: argparse.Namespace, samples: dict[str, list[float]], hows: Sequence[str], load: OtherLoad) -> str:
    """All tables."""

    def show(name: str, form: str) -> str:
        return format(median(samples[name]), form) if name in samples else "-"

    rows = [
        [
            title,
            show(f"{side} cold", ".3f"),
            show(f"{side} from disk", ".3f"),
            show(f"{side} restore", ".3f"),
            show(f"{side} save", ".3f"),
            show(f"{side} tokens from disk", ".0f"),
            show(f"{side} MiB written", ".0f"),
        ]
        for side, title in (("quire", f"Quire, {given.codec}"), ("llama.cpp", "llama.cpp, f16 cache"))
        if f"{side} cold" in samples
    ]
    head = ["seconds to first token", "cold", "from disk", "restore", "save", "tokens from disk", "MiB written"]
    text = format_table(head, rows, given.markdown)
    text += (
        f"\n\n{marks_table(marks_of(samples, given.prompt_tokens), given.markdown)}\n\n{given.prompt_tokens} tokens."
    )
    if "quire same answers" in samples:
        same = samples["quire same answers"]
        text += f" Quire's answers before and after the restart are equal in {sum(same):.0f} of {len(same)} rounds."
        if any(samples["quire cold tokens found"]):
            text += "\nA COLD PROMPT WAS NOT COLD: it found cached tokens."
    if any(found == 0 for found in samples.get("llama.cpp tokens from disk", [])):
        text += "\nLLAMA.CPP RESTORED NOTHING in a round: its time is that of computing the prompt."
    return f"{text}\nPage cache: {'; '.join(dict.fromkeys(hows))}.\n{conditions(given, load)}"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = tier_arguments(__doc__, rounds=5)
    parser.add_argument("--codec", default="dense", help="cache.codec of Quire (default: dense)")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--options", default="", help="further flags of Quire, separated by spaces")
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="llama.cpp's server; none: without llama.cpp")
    parser.add_argument("--llama-model", type=Path, metavar="PATH", help="the same weights for it, a bf16 .gguf file")
    parser.add_argument("--sides", default=",".join(SIDES), help="which to run (default: both)")
    parser.add_argument("--logs", type=Path, default=ROOT / ".peers/logs", help="folder for the servers' output")
    given = parse_tier(parser, words, prompt_tokens=384)
    sides = read_sides(parser, given, SIDES)
    if given.llama_server is None and "llamacpp" in sides:
        sides.remove("llamacpp")
    if "llamacpp" in sides and given.llama_model is None:
        parser.error("--llama-server needs --llama-model")
    if not sides:
        parser.error("no side is left; --sides llamacpp needs --llama-server and --llama-model")
    given.sides = sides
    return given


def main() -> int:
    """Measures and prints."""
    given = arguments()
    ids = token_ids(given.model)
    chunks = -(-(given.prompt_tokens + ANSWER_TOKENS) // 64)
    given.need_bytes = arena_need(given.model, engine_options(given, cache_codec="dense"), chunks, 1, 1).num_bytes
    turns = {"quire": quire_turn, "llamacpp": llama_turn}
    samples: dict[str, list[float]] = {}
    hows = []
    load = OtherLoad()
    for number in range(given.rounds):
        prompt, warm = random_prompts(ids, 2, given.prompt_tokens, (given.seed, number))
        order = given.sides if number % 2 == 0 else given.sides[::-1]
        for side in order:
            try:
                figures, how = turns[side](given, warm[:WARM_TOKENS], prompt)
            except ServerError as error:
                sys.exit(f"{side}: {error}")
            hows.append(how)
            for name, value in figures.items():
                samples.setdefault(name, []).append(value)
            shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
            print(f"round {number + 1}/{given.rounds}  {shown}", file=sys.stderr, flush=True)
    print(report(given, samples, hows, load))
    if given.json:
        record = {"benchmark": "restart", "model": Path(given.model).name, "codec": given.codec, "page_cache": hows}
        append_record(given.json, {**record, "prompt_tokens": given.prompt_tokens, "rounds": samples})
    return exit_status(given, marks_of(samples, given.prompt_tokens))


if __name__ == "__main__":
    sys.exit(main())
