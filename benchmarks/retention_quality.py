"""Quality after keeping only a part of a prompt's keys and values: Quire's retention compared with other methods.

    scripts/peers.sh --only transformers,checkpoint,openvino,openvino-model,kvpress    # below .peers/
    python benchmarks/retention_quality.py --data DIR          # DIR has wiki.test.raw and war_and_peace.txt; hours
    python benchmarks/retention_quality.py --data DIR --engines openvino --prompts 5 --windows 2
    python benchmarks/retention_quality.py --data DIR --json FILE --earlier FILE     # FILE's rows for engines not run

SmolLM2-135M-Instruct prefills the whole prompt; then the cache is thinned to a share of its tokens. Quire's tokenizer
and prompts give every engine the same ids.

Retrieval (kinds filler, book and later, for each length): the prompts of `quire eval retrieval`, with a five-digit
number in about 1,000 or 2,000 tokens at five depths. The answer is decoded greedily from the thinned cache. "filler"
and "book" hide the number in that command's filler and in a novel, and the whole prompt is thinned, question included,
as in serving. In "filler, question after", the question is read after the text before it has been thinned.

Perplexity (kind windows): of 256 tokens that follow 1,536 tokens of WikiText-2's test text or of the novel, read one
after the other with the thinned cache. The full cache predicts the first of them, which is not scored. Ratios are
relative to the same engine's full cache, with their standard error over windows. "same token" is the share of positions
with the full cache's most probable token; KL is the mean divergence from it in nats.

"resident" is the share of the full cache's bytes that is really held after the prompt, whatever share was requested.
"at the end" is the same after a continuation, during which an engine may drop more.

An engine is a row of ENGINES and a runner in retention_quality/; tasks.py there defines its input and output. Results
are stored below --peers and not computed again, so an interrupted run continues. The exit status is 2 if nothing was
measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from common import ROOT, append_record, commit, format_table, hardware, hardware_line
from contest import say
from turns import WorkerError

HERE = Path(__file__).resolve().parent
BENCHMARK = "retention_quality"
KEPT = (0.75, 0.5, 0.25)
LENGTHS = (1024, 2048)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CONTEXT, CONTINUATION = 1536, 256
# First sentence after the preface and the contents; most sentences of a prompt.
BOOK_START, BOOK_SENTENCES = 2000, 400
KINDS = ("filler", "windows", "book", "later")
FULL = "full"
TEXTS = {"wiki": "wiki.test.raw", "book": "war_and_peace.txt"}
ABOUT = ["engine", "method", "kept", "resident"]

Table = tuple[list[str], list[list[str]]]
"""Heading and rows."""


@dataclass(frozen=True)
class Peer:
    """How to start one engine's runner. `python` and `model` are paths below --peers.

    python  interpreter of its environment; None: the one that runs this script
    """

    title: str
    runner: str
    python: str | None
    model: str


ENGINES = {
    "quire": Peer("Quire", "run_quire.py", None, "models/float32"),
    "kvpress": Peer("kvpress", "run_kvpress.py", "kvpress/bin/python", "models/float32"),
    "openvino": Peer("OpenVINO GenAI", "run_openvino.py", "openvino/bin/python", "models/openvino"),
}


@dataclass(frozen=True)
class Item:
    """One task and the place of its result.

    column  "book 1024", or the name of a text that is continued
    number  the number to find; None for a continuation
    task    the fields of the runners' `Task` but its name
    """

    column: str
    number: int | None
    task: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the task; equal ids give equal names."""
        return checksum(self.task)


@dataclass
class Row:
    """One cache of one engine.

    kept        requested share of the prompt
    resident    share of the full cache's bytes that was held, mean over tasks
    resident_end  the same at the end of a continuation; NaN if the engine does not report it
    tasks       name of the set of tasks; only rows with equal names can be compared
    found       by column: for each prompt, whether its number was found
    surprise    by text: for each window, the sum of -ln p
    agreeing    for each window, the number of positions with the full cache's most probable token
    divergence  for each window, the sum of KL(full || thinned), in nats; empty if the engine does not report it
    """

    engine: str
    version: str
    method: str
    kept: float
    tasks: str
    resident: float = 0.0
    found: dict[str, list[bool]] = field(default_factory=dict)
    surprise: dict[str, list[float]] = field(default_factory=dict)
    agreeing: list[int] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    resident_end: float = math.nan

    def losses(self, text: str | None = None) -> list[float]:
        """Mean -ln p of each window, of one text or all."""
        return [
            total / CONTINUATION
            for name, totals in self.surprise.items()
            for total in totals
            if text is None or name == text
        ]


def make_items(given: argparse.Namespace) -> list[Item]:
    """The tasks of all requested kinds."""
    from quire.evaluation.retrieval import (
        ANSWER_TOKENS,
        FILLER,
        QUESTION,
        hidden_number,
        make_prompt,
        split_sentences,
    )
    from quire.models.resolve import resolve_model
    from quire.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_model(given.model))
    texts = {name: (given.data / file).read_text(encoding="utf-8") for name, file in given.texts.items()}
    book = split_sentences(texts["book"])[BOOK_START:]
    stop = sorted(tokenizer.eos_ids)
    question = tokenizer.encode(QUESTION, add_special=False)

    def retrieval(column: str, apart: bool) -> Iterator[Item]:
        for length in given.lengths:
            for trial, depth in ((n // len(DEPTHS), DEPTHS[n % len(DEPTHS)]) for n in range(given.prompts)):
                number = hidden_number(length, depth, trial)
                sentences = FILLER[trial % len(FILLER) :]
                if column == "book":
                    sentences = book[trial * BOOK_SENTENCES : (trial + 1) * BOOK_SENTENCES]
                ids = make_prompt(tokenizer, sentences, length, depth, number)
                at = find_last(ids, question) if apart else len(ids)
                task = {"prompt": ids[:at], "later": ids[at:], "continuation": [], "answer_tokens": ANSWER_TOKENS}
                name = f"{column}{', question after' if apart else ''} {length}"
                yield Item(name, number, {**task, "kept": KEPT, "stop": stop})

    def continuations(text: str, number: int) -> Iterator[Item]:
        ids = tokenizer.encode(texts[text])
        # One token more than is scored, because the full cache predicts the first.
        size = CONTEXT + CONTINUATION + 1
        for start in spread_starts(len(ids), size, number):
            window = ids[start : start + size]
            task = {"prompt": window[:CONTEXT], "later": [], "continuation": window[CONTEXT:], "answer_tokens": 0}
            yield Item(text, None, {**task, "kept": KEPT, "stop": []})

    half = given.windows // 2
    kinds = {
        "filler": lambda: retrieval("filler", False),
        "windows": lambda: chain(continuations("wiki", given.windows - half), continuations("book", half)),
        "book": lambda: retrieval("book", False),
        "later": lambda: retrieval("filler", True),
    }
    return [item for kind in given.kinds for item in kinds[kind]()]


def checksum(value: object) -> str:
    """Eight hexadecimal digits of its JSON."""
    return f"{zlib.crc32(json.dumps(value).encode()):08x}"


def find_last(ids: Sequence[int], part: Sequence[int]) -> int:
    """Index of the last occurrence of a part in ids."""
    return max(at for at in range(len(ids)) if ids[at : at + len(part)] == part)


def spread_starts(total: int, size: int, number: int) -> list[int]:
    """The starts of `number` windows, spread evenly over a text, none at its very beginning."""
    room = (total - size) // max(number, 1)
    if room < size:
        raise ValueError(f"{number} windows of {size} tokens do not fit into {total}")
    return [room * (index + 1) - room // 2 for index in range(number)]


def measure(name: str, items: Sequence[Item], given: argparse.Namespace) -> list[Row]:
    """All caches of one engine. Raises WorkerError."""
    peer = ENGINES[name]
    python = given.peers / peer.python if peer.python else Path(sys.executable)
    model = given.peers / peer.model
    for path in (python, model):
        if not path.exists():
            raise WorkerError(f"{name}: {path} is missing; run scripts/peers.sh")
    work = given.peers / BENCHMARK
    work.mkdir(parents=True, exist_ok=True)
    tasks, results = work / f"{name}-tasks.json", work / f"{name}.jsonl"
    tasks.write_text(json.dumps([{"name": item.name, **item.task} for item in items]))
    command = [python, HERE / BENCHMARK / peer.runner, "--model", model, "--tasks", tasks]
    command += ["--results", results, "--threads", given.threads]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(given.threads)}
    # The code that ends a runner with this script is shared with the other benchmarks of peers.
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE / "peers"), str(ROOT / "src")])
    log = given.peers / "logs" / f"retention-{name}.log"
    log.parent.mkdir(exist_ok=True)
    say(f"{peer.title}: {len(items)} tasks; {log} counts them")
    with log.open("w") as file:
        done = subprocess.run([str(word) for word in command], stdout=file, stderr=file, env=environment)
    if done.returncode:
        raise WorkerError(f"{name}: its runner ended with {done.returncode}; see {log}")
    return collect(name, items, [json.loads(line) for line in results.read_text().splitlines()], given)


def collect(name: str, items: Sequence[Item], lines: Sequence[dict[str, Any]], given: argparse.Namespace) -> list[Row]:
    """A runner's results, in rows."""
    from quire.evaluation.retrieval import names
    from quire.models.resolve import resolve_model
    from quire.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_model(given.model))
    (*_, version) = (line["version"] for line in lines if "version" in line)
    results: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        results.setdefault(line.get("task", ""), []).append(line)
    rows: dict[tuple[str, float], Row] = {}
    residents: dict[tuple[str, float], list[float]] = {}
    ends: dict[tuple[str, float], list[float]] = {}
    for item in items:
        for result in results.get(item.name, []):
            key = result["method"], result["kept"]
            row = rows.setdefault(key, Row(name, version, *key, given.tasks))
            residents.setdefault(key, []).append(result["resident"])
            if item.number is not None:
                row.found.setdefault(item.column, []).append(names(tokenizer.decode(result["answer"]), item.number))
                continue
            if result.get("resident_end") is not None:
                ends.setdefault(key, []).append(result["resident_end"])
            row.surprise.setdefault(item.column, []).append(result["surprise"])
            row.agreeing.append(result["agreeing"])
            row.divergence += [] if result["divergence"] is None else [result["divergence"]]
    for key, row in rows.items():
        row.resident = statistics.fmean(residents[key])
        row.resident_end = statistics.fmean(ends[key]) if key in ends else math.nan
    return sorted(rows.values(), key=lambda row: (row.method != FULL, row.method, -row.kept))


def earlier(file: Path, given: argparse.Namespace) -> list[Row]:
    """The rows of a --json file, on the same tasks, for engines not measured now; the latest row of each cache."""
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    fields = Row.__dataclass_fields__
    found = {
        (record["engine"], record["method"], record["kept"]): Row(
            **{name: record[name] for name in fields if name in record}
        )
        for record in records
        if record["benchmark"] == BENCHMARK and record["engine"] not in given.engines and record["tasks"] == given.tasks
    }
    return list(found.values())


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN for fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def report(rows: Sequence[Row], given: argparse.Namespace) -> str:
    """The tables, and the conditions."""
    tables = [
        format_table(head, lines, given.markdown) for head, lines in (found_table(rows), loss_table(rows)) if lines
    ]
    versions = {ENGINES[row.engine].title: row.version for row in rows}
    conditions = (
        f"{given.prompts} prompts of each kind and length, {given.windows} windows; {hardware_line(hardware())}; "
        f"commit {commit()}; {time.strftime('%Y-%m-%d')}.\n"
        f"{', '.join(f'{title} {version}' for title, version in versions.items())}."
    )
    return "\n\n".join([*tables, conditions])


def found_table(rows: Sequence[Row]) -> Table:
    """The table of found numbers."""
    columns = list(dict.fromkeys(column for row in rows for column in row.found))
    lines = [
        [*about(row), *(f"{sum(hits)}/{len(hits)}" if (hits := row.found.get(column)) else "-" for column in columns)]
        for row in rows
        if row.found
    ]
    return [*ABOUT, *columns], lines


def loss_table(rows: Sequence[Row]) -> Table:
    """The table of losses in predicting a text."""
    full = {row.engine: row for row in rows if row.method == FULL}
    texts = list(dict.fromkeys(text for row in rows for text in row.surprise))

    def ratio(row: Row, text: str | None = None) -> tuple[float, float]:
        # Both read the same tokens, so the noise is in the difference within each window.
        pairs = zip(row.losses(text), full[row.engine].losses(text), strict=True)
        differences = [loss - dense for loss, dense in pairs]
        found = math.exp(statistics.fmean(differences))
        return found, found * standard_error(differences)

    lines = [
        [
            *about(row),
            "-" if math.isnan(row.resident_end) else f"{row.resident_end:.2f}",
            f"{math.exp(statistics.fmean(row.losses())):.3f}",
            f"{ratio(row)[0]:.4f}",
            "-" if row.method == FULL else f"{ratio(row)[1]:.4f}",
            *(f"{ratio(row, text)[0]:.4f}" for text in texts),
            f"{sum(row.agreeing) / len(row.agreeing) / CONTINUATION:.1%}",
            f"{sum(row.divergence) / len(row.divergence) / CONTINUATION:.4f}" if row.divergence else "-",
        ]
        for row in rows
        if row.surprise
    ]
    return [*ABOUT, "at the end", "ppl", "ratio", "+-", *texts, "same token", "KL"], lines


def about(row: Row) -> list[str]:
    """The row's cells in the columns of ABOUT."""
    return [ENGINES[row.engine].title, row.method, f"{row.kept:.2f}", f"{row.resident:.2f}"]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder that has the two texts")
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="task kinds, comma-separated (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=20, help="prompts per kind and length (default: %(default)s)")
    parser.add_argument(
        "--lengths",
        type=lambda words: [int(word) for word in words.split(",")],
        default=list(LENGTHS),
        help="tokens of prompt and answer, comma-separated (default: 1024,2048)",
    )
    parser.add_argument("--windows", type=int, default=12, help="windows, half of each text (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute (default: %(default)s)")
    parser.add_argument("--model", default="smollm2", help="model whose tokenizer cuts the text")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="folder of scripts/peers.sh")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line per cache")
    parser.add_argument("--earlier", type=Path, metavar="FILE", help="a --json file with engines not measured now")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    given = parser.parse_args()
    given.engines, given.kinds = given.engines.split(","), given.kinds.split(",")
    for wanted, known in ((given.engines, tuple(ENGINES)), (given.kinds, KINDS)):
        if unknown := set(wanted) - set(known):
            parser.error(f"{', '.join(unknown)}: none of {', '.join(known)}")
    given.texts = TEXTS
    given.peers = given.peers.resolve()
    return given


def main() -> int:
    """Measures everything, prints the tables."""
    given = arguments()
    items = make_items(given)
    given.tasks = checksum([item.name for item in items])
    rows = earlier(given.earlier, given) if given.earlier else []
    for name in given.engines:
        try:
            found = measure(name, items, given)
        except WorkerError as error:
            say(f"LEFT OUT  {error}")
            continue
        rows += found
        for row in found if given.json else []:
            append_record(given.json, {"benchmark": BENCHMARK, **asdict(row)})
    rows.sort(key=lambda row: list(ENGINES).index(row.engine))
    if not rows:
        return 2
    print(report(rows, given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
