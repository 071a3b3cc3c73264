"""Structured output: what is accepted, whether answers are valid, what it costs, and what a hostile schema does.

    pip download --no-deps --no-binary :all: jsonschema==4.26.0     # its tests are the JSON Schema Test Suite
    python benchmarks/structured.py suite --source jsonschema-4.26.0.tar.gz
    python benchmarks/structured.py cost
    python benchmarks/structured.py bombs

suite  compiles every schema of a draft, and asks the model for --answers answers to the accepted ones at temperature 1.
       Each answer that ends is checked with jsonschema, an independent implementation. Prints the accepted share, the
       refusals by their reasons, the share of answers that end within --max-tokens, those that are invalid, and those
       whose grammar failed. With --urls the same through servers, such as vLLM's, 32 requests at a time; with --tiny
       through tiny random models with tokenizers like those of families, whose answers need not end.
cost   tokens/s of a full batch with a schema for each sequence, and without, in turns: the same prompts, and answers as
       long as the ones that the schemas gave. The first line is the time to the first token of a request with a new
       schema, less that of one without. All schemas differ.
bombs  compiles hostile schemas, expressions and grammars, and takes steps with those that are accepted. Prints the
       longest compilation and the longest step, and what a request that runs meanwhile waits for.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, InvalidOperation
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from common import format_table, hardware, hardware_line

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.errors import QuireError, RequestError

PROMPT = "Give an example of a JSON value that fits this JSON Schema. Answer with JSON alone, as short as you can.\n{}"
SHOWN = (
    ({"type": "integer", "minimum": 3}, 5),
    ({"properties": {"a": {"type": "string"}, "b": {"type": "boolean"}}, "required": ["a"]}, {"a": "x"}),
    ({"type": "array", "items": {"enum": ["p", "q"]}}, ["q"]),
    ({"not": {"type": "null"}}, "word"),
)
"""Schemas with short answers, which a conversation begins with: small models then write short ones."""
BATCH = 32


def schemas_of(source: Path, draft: str) -> list[tuple[str, Any]]:
    """Every schema of a draft of the suite, without its optional part, and what it is about."""
    found = []
    with tarfile.open(source) as archive:
        for member in archive.getmembers():
            name = re.search(rf"/json/tests/{draft}/([^/]+\.json)$", member.name)
            file = archive.extractfile(member) if name else None
            if name is not None and file is not None:
                found += [(f"{name[1]}: {group['description']}", group["schema"]) for group in json.load(file)]
    return found


class Library:
    """The suite through `LLM`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.name, self._llm, self._args = args.model, LLM(args.model, options_of(args)), args

    def refusal(self, schema: Any) -> str | None:
        """Why a schema is refused; None if it is accepted."""
        try:
            self._llm.engine.grammars.compile(StructuredOutputsParams(json=schema))
        except RequestError as error:
            return str(error).partition("cannot be honoured: ")[2]
        return None

    def answers(self, schemas: list[Any]) -> list[Answer]:
        """An answer to each."""
        prompts = [self._llm.tokenizer.chat(messages(schema)) for schema in schemas]
        params = [
            SamplingParams(max_tokens=self._args.max_tokens, temperature=1.0, seed=number, structured_outputs=wanted)
            for number, wanted in enumerate({"json": schema} for schema in schemas)
        ]
        found = [answer.outputs[0] for answer in self._llm.generate(prompts, params)]
        failed = Counter(str(output.stop_reason) for output in found if output.finish_reason == "error")
        return [Answer(output.finish_reason == "stop", output.text, failed) for output in found]

    def close(self) -> None:
        """Ends the engine."""
        self._llm.close()


class Served:
    """The suite through an OpenAI server."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self.name, self._url, self._args = url, url.rstrip("/") + "/v1/chat/completions", args

    def refusal(self, schema: Any) -> str | None:
        """Why a schema is refused; None if it is accepted."""
        status, found = self._ask(schema, 0, 1)
        return None if status == 200 else f"{status}: {found}"

    def answers(self, schemas: list[Any]) -> list[Answer]:
        """An answer to each, as many at a time as a batch has."""

        def one(number: int) -> Answer:
            status, found = self._ask(schemas[number], number, self._args.max_tokens)
            if status != 200:
                return Answer(False, f"{status}: {found}", {})
            (choice,) = found["choices"]
            return Answer(choice["finish_reason"] == "stop", choice["message"]["content"] or "", {})

        with ThreadPoolExecutor(BATCH) as pool:
            return list(pool.map(one, range(len(schemas))))

    def _ask(self, schema: Any, seed: int, max_tokens: int) -> tuple[int, Any]:
        body = {
            "messages": messages(schema), "max_tokens": max_tokens, "temperature": 1.0, "seed": seed,
            "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}},
        }  # fmt: skip
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json", "Authorization": "Bearer none"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return 200, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")[:300]

    def close(self) -> None:
        """The server goes on."""


class Answer(NamedTuple):
    """An answer, and whether it has ended by itself."""

    has_ended: bool
    text: str
    failed: Mapping[str, int]
    """Of all answers, the reasons of those whose grammar failed."""


def messages(schema: Any) -> list[dict[str, str]]:
    """What a model is asked for a schema."""
    found = []
    for shown, answer in SHOWN:
        found.append({"role": "user", "content": PROMPT.format(json.dumps(shown))})
        found.append({"role": "assistant", "content": json.dumps(answer)})
    return [*found, {"role": "user", "content": PROMPT.format(json.dumps(schema))}]


def run_suite(args: argparse.Namespace) -> int:
    """See the module."""
    given = schemas_of(args.source, args.draft)
    failed = 0
    for family in args.tiny:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.tokenizer_families import save_family_model

        with TemporaryDirectory() as folder:
            print(f"a tiny random model with the tokenizer of {family}")
            path = save_family_model(Path(folder), family)
            own = argparse.Namespace(**{**vars(args), "model": str(path), "answers": args.answers // len(args.tiny)})
            engine = Library(own)
            failed |= suite_of(engine, given, own, must_end=False)
            engine.close()
    for engine in (Served(url, args) for url in args.urls) if args.urls else [Library(args)] if not args.tiny else []:
        failed |= suite_of(engine, given, args)
        engine.close()
    return failed


def exact(text: str) -> Any:
    """JSON with its numbers as they are written: of doubles, 0.0003 is no multiple of 0.0001."""
    return json.loads(text, parse_float=_number)


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:  # the exponent has more than 18 digits
        return float(text)


def suite_of(
    engine: Library | Served, given: list[tuple[str, Any]], args: argparse.Namespace, *, must_end: bool = True
) -> int:
    """The suite through an engine."""
    import jsonschema

    validator = {
        "draft4": jsonschema.Draft4Validator, "draft6": jsonschema.Draft6Validator,
        "draft7": jsonschema.Draft7Validator, "draft2019-09": jsonschema.Draft201909Validator,
        "draft2020-12": jsonschema.Draft202012Validator,
    }[args.draft]  # fmt: skip
    accepted, reasons = [], Counter[str]()
    for name, schema in given:
        if (reason := engine.refusal(schema)) is None:
            accepted.append((name, schema))
        else:
            reasons[re.sub(r"[0-9]+", "N", reason)[:90]] += 1
    print(f"{engine.name}: {args.draft}: {len(given)} schemas, {len(accepted)} accepted"
          f" ({len(accepted) / len(given):.1%})")  # fmt: skip
    print(format_table(["refused", "reason"], [[str(count), reason] for reason, count in reasons.most_common()]))
    asked = [accepted[number % len(accepted)] for number in range(args.answers)]
    begun = time.perf_counter()
    answers = engine.answers([schema for _, schema in asked])
    took = time.perf_counter() - begun
    ended, undecided, invalid = 0, 0, []
    for (name, schema), answer in zip(asked, answers, strict=True):
        if not answer.has_ended:
            continue
        ended += 1
        try:
            validator(exact(json.dumps(schema))).validate(exact(answer.text))
        except InvalidOperation:  # a remainder of a number with a huge exponent
            undecided += 1
        except (ValueError, jsonschema.ValidationError) as error:
            invalid.append((name, schema, answer.text, str(error).partition("\n")[0]))
    failed = sum(answers[0].failed.values())
    print(f"{len(asked)} answers in {took:.0f} s, {ended} ended ({ended / len(asked):.1%}), {len(invalid)} are invalid,"
          f" {undecided} could not be checked, {failed} have a grammar that failed"
          f" {dict(answers[0].failed) or ''}")  # fmt: skip
    unfinished = Counter(name for (name, _), each in zip(asked, answers, strict=True) if not each.has_ended)
    for name, count in unfinished.most_common(12):
        print(f"  did not end: {count} x {name}")
    for name, schema, text, reason in invalid[:20]:
        print(f"  invalid: {name}: {json.dumps(schema)[:120]}: {text[:120]!r}: {reason[:120]}")
    few = len(accepted) < 0.75 * len(given) or (must_end and ended < 0.95 * len(asked))
    return int(few or bool(invalid) or failed > 0)


def record_schema(number: int) -> dict[str, Any]:
    """A schema like those of programs, different for each number."""
    return {
        "type": "object",
        "properties": {
            f"title_{number}": {"type": "string", "maxLength": 60},
            "kind": {"enum": [f"article-{number}", "book", "letter"]},
            "pages": {"type": "integer", "minimum": 1, "maximum": 999},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 2, "maxItems": 4},
            "author": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 40}, "is_alive": {"type": "boolean"}},
                "required": ["name", "is_alive"],
                "additionalProperties": False,
            },
        },
        "required": [f"title_{number}", "kind", "pages", "tags", "author"],
        "additionalProperties": False,
    }


def run_cost(args: argparse.Namespace) -> int:
    """See the module."""
    ratios, waits, rows = [], [], []
    with LLM(args.model, options_of(args)) as llm:
        prompts = [
            llm.tokenizer.chat([{"role": "user", "content": f"Describe text number {number} as JSON."}])
            for number in range(BATCH)
        ]
        for turn in range(args.rounds + 1):
            schemas = [record_schema(1000 * turn + number) for number in range(BATCH)]
            held = [
                SamplingParams(max_tokens=200, temperature=1.0, seed=number, structured_outputs={"json": schema})
                for number, schema in enumerate(schemas)
            ]
            # A server compiles before it queues.
            compiled = [llm.engine.grammars.compile(params.structured_outputs) for params in held]
            first, answers = timed(llm, prompts, held)
            del compiled
            counts = [len(answer.outputs[0].token_ids) for answer in answers]
            free = [
                SamplingParams(max_tokens=count, temperature=1.0, seed=number, ignore_eos=True)
                for number, count in enumerate(counts)
            ]
            second, _ = timed(llm, prompts, free)
            new = SamplingParams(max_tokens=1, structured_outputs={"json": record_schema(10**6 + turn)})
            wait = timed(llm, prompts[:1], [new])[0] - timed(llm, prompts[:1], [SamplingParams(max_tokens=1)])[0]
            if turn:  # the first one warms up
                ratios.append(second / first)
                waits.append(wait)
                rows.append([f"{sum(counts) / first:.0f}", f"{sum(counts) / second:.0f}", f"{second / first:.3f}",
                             f"{1000 * wait:.1f}"])  # fmt: skip
    print(format_table(["tokens/s with schemas", "without", "ratio", "first token later by, ms"], rows))
    ratio, wait = statistics.median(ratios), statistics.median(waits)
    print(f"batch {BATCH}: {ratio:.3f} of the throughput without (at least 0.95: {yes(ratio >= 0.95)});"
          f" a new schema costs {1000 * wait:.1f} ms (at most 100: {yes(wait <= 0.1)})")  # fmt: skip
    return int(ratio < 0.95 or wait > 0.1)


def timed(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> tuple[float, list[Any]]:
    """Seconds of a batch, and its answers."""
    begun = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begun, answers


def nested(depth: int) -> dict[str, Any]:
    """An object within objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def alternatives(count: int, depth: int) -> dict[str, Any]:
    """Alternatives of alternatives."""
    return {"anyOf": [alternatives(count, depth - 1) for _ in range(count)]} if depth else {"type": "integer"}


def referring(count: int, word: str) -> dict[str, Any]:
    """Definitions that use the one before twice."""
    both = {number: {"$ref": f"#/$defs/d{number}"} for number in range(count)}
    defs: dict[str, Any] = {f"d{number}": {word: [both[number - 1], both[number - 1]]} for number in range(1, count)}
    return {"$defs": {**defs, "d0": {"type": "string"}}, "$ref": f"#/$defs/d{count - 1}"}


BOMBS: dict[str, dict[str, Any]] = {
    "100 levels": {"json": nested(100)},
    "50 levels": {"json": nested(50)},
    "7 ^ 4 alternatives": {"json": alternatives(7, 4)},
    "2 ^ 26 alternatives": {"json": referring(26, "anyOf")},
    "2 ^ 26 conjunctions": {"json": referring(26, "allOf")},
    "2000 patterns": {
        "json": {
            "type": "object",
            "properties": {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{1,{n + 1}}}$"} for n in range(2000)},
        }
    },
    "5000 objects": {"json": {"enum": [{"a": number, "b": "x" * 20} for number in range(5000)]}},
    "a pattern of patterns": {"json": {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}},
    "20 patterns at once": {
        "json": {"allOf": [{"type": "string", "pattern": f".*{chr(97 + n)}.*"} for n in range(20)]}
    },
    "multiples": {"json": {"type": "integer", "multipleOf": 1000003, "minimum": 1, "maximum": 10**15}},
    "five multiples": {"json": {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83, 79, 73)]}},
    "60000 unclosed classes": {"json": {"type": "string", "pattern": r"\p{" * 60000}},
    "10000 in a long name": {
        "json": {"properties": {"k" * 130000: {"properties": {f"a{n}": {} for n in range(9999)}}}}
    },
    "a million characters": {"json": {"type": "string", "minLength": 10**6}},
    "100000 items": {"json": {"type": "array", "minItems": 10**5, "items": {"type": "integer"}}},
    "eight counts": {"regex": "(" * 8 + "a" + "{1,10})" * 8},
    "400 stars": {"regex": "([a-z]+[0-9]+)*" * 400},
    "looking back": {"regex": "(.*a){50}(.*b){50}"},
    "4000 choices": {"choice": [f"choice number {number}" for number in range(4000)]},
    "2 ^ 60 texts": {"grammar": "\n".join([*(f"a{n}: a{n + 1} a{n + 1}" for n in range(60)), 'a60: "x"', "start: a0"])},
    "any number of ways": {"grammar": 'start: start start | "a" | start "b" start |'},
}


def run_bombs(args: argparse.Namespace) -> int:
    """See the module."""
    rows, slowest, draw = [], 0.0, random.Random(0)
    with LLM(args.model, options_of(args)) as llm:
        grammars = llm.engine.grammars
        grammars.compile(StructuredOutputsParams(regex="a"))
        for name, given in BOMBS.items():
            begun, said = time.perf_counter(), "accepted"
            guide = None
            try:
                guide = grammars.guide(grammars.prepare(StructuredOutputsParams(**given)).result(), 0)
            except RequestError as error:
                said = "refused: " + str(error).rpartition("honoured: ")[2][:70]
            compiled, longest, tokens = time.perf_counter() - begun, 0.0, list[int]()
            while guide is not None and len(tokens) < args.steps:
                begun = time.perf_counter()
                try:
                    _, masks = guide.propose(tokens, 0)
                    only = masks[0]
                    words = None if isinstance(only, int) else only()
                except QuireError as error:
                    said = f"ends with an error: {error}"[:80]
                    longest = max(longest, time.perf_counter() - begun)
                    break
                longest = max(longest, time.perf_counter() - begun)
                allowed = [only] if words is None else [
                    word * 32 + bit for word in words.nonzero()[0] for bit in range(32) if words[word] >> bit & 1
                ]  # fmt: skip
                tokens.append(int(draw.choice(allowed)))
                if tokens[-1] in llm.engine.eos_token_ids:
                    break
            slowest = max(slowest, compiled, longest)
            rows.append([name, f"{compiled:.3f}", f"{longest:.4f}", said])
        print(format_table(["bomb", "compiled, s", "longest mask, s", ""], rows))
        waits = waits_beside(llm, args)
    print(f"slowest: {slowest:.3f} s (at most 1: {yes(slowest <= 1)}); a step beside compilations takes"
          f" {1000 * waits[1]:.0f} ms at most, alone {1000 * waits[0]:.0f}")  # fmt: skip
    return int(slowest > 1)


def waits_beside(llm: LLM, args: argparse.Namespace) -> tuple[float, float]:
    """The longest step of a request alone, and of one beside a thread that compiles all bombs."""
    found = []
    for is_busy in (False, True):
        ends = threading.Event()

        def compile_all(ends: threading.Event = ends) -> None:
            while not ends.is_set():
                for number, given in enumerate(BOMBS.values()):
                    try:
                        # Of another scope each time, so that nothing is remembered.
                        scope = f"{time.perf_counter()} {number}"
                        llm.engine.grammars.prepare(StructuredOutputsParams(**given), scope).exception()
                    except RequestError:
                        pass

        thread = threading.Thread(target=compile_all)
        if is_busy:
            thread.start()
        llm.engine.add("beside", [1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
        longest = 0.0
        while llm.engine.has_work:
            begun = time.perf_counter()
            llm.engine.step()
            longest = max(longest, time.perf_counter() - begun)
        ends.set()
        if is_busy:
            thread.join()
        found.append(longest)
    return found[0], found[1]


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of the engine."""
    return {"runtime.threads": args.threads, "scheduler.max_running": BATCH, "model.max_context": 4096}


def yes(is_so: bool) -> str:
    """For a report."""
    return "yes" if is_so else "NO"


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("suite", "cost", "bombs"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--source", type=Path, metavar="FILE", help="suite: the source distribution of jsonschema")
    parser.add_argument("--draft", default="draft7", help="suite: (default: draft7)")
    parser.add_argument("--urls", nargs="+", default=[], metavar="URL", help="suite: of servers, in place of LLM")
    parser.add_argument("--tiny", nargs="+", default=[], metavar="FAMILY", help="suite: qwen3, llama3, mistral, ...")
    parser.add_argument("--answers", type=int, default=2000, help="suite: (default: 2000)")
    parser.add_argument("--max-tokens", type=int, default=512, help="suite: of an answer (default: 512)")
    parser.add_argument("--rounds", type=int, default=5, help="cost: (default: 5)")
    parser.add_argument("--steps", type=int, default=60, help="bombs: tokens taken with each (default: 60)")
    args = parser.parse_args()
    print(hardware_line(hardware()))
    return {"suite": run_suite, "cost": run_cost, "bombs": run_bombs}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
