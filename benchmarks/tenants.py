"""Structured output of several tenants: whether one can tell what another asks for, or change what it gets.

    python benchmarks/tenants.py answers
    python benchmarks/tenants.py wear
    python benchmarks/tenants.py times

answers  1,000 requests of one tenant, alone and beside as many of another: 50 forms of 12 kinds, temperatures 0 to 2.
         Prints how many answers are the same, token by token, and how many end with an error. In float32.
wear     5,000 answers of random tokens to 12 forms, those included that use up the states of a lexer. Prints how many
         end with an error. Without a model.
times    the time until a new schema is compiled, for 200 that another tenant has used a moment before, and for 200 that
         nobody has. Prints both medians and the probability of such a difference by chance (Mann and Whitney's test).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
from common import hardware, hardware_line

from quire import SamplingParams, StructuredOutputsParams
from quire.async_llm import AsyncLLM
from quire.errors import QuireError
from quire.models.resolve import resolve_model
from quire.models.tokenizer import load_tokenizer
from quire.structured.grammar_compiler import GrammarCompiler

TENANTS = ("one/", "two/")


def forms(number: int) -> dict[str, Any]:
    """A form, of one of twelve kinds."""
    draw = random.Random(number)
    name = "".join(draw.choice("abcdefgh") for _ in range(6))
    kinds: list[dict[str, Any]] = [
        {"json": {"type": "object", "required": [name], "additionalProperties": False,
                  "properties": {name: {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}}},
        {"json": {"enum": [name, name[::-1], None, number]}},
        {"json": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4}},
        {"json": {"type": "string", "pattern": f"^{name}-[0-9]{{3}}$"}},
        {"json": {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {name: {"const": number}}}]}},
        {"json": {"type": "string", "format": "date-time"}},
        {"regex": rf"{name}: [a-z]{{3,9}}\."},
        {"regex": rf".*[A-Z].{{0,80}}{name}"},
        {"regex": rf"[ab]*a[ab]{{16}}{name}"},
        {"choice": [f"{name} {each}" for each in range(20)]},
        {"grammar": f'start: "{name}" (" " WORD)~1..6\nWORD: /[a-z]{{1,5}}/'},
        {"grammar": f'root ::= "{name}" item+\nitem ::= " " [0-9]+ ";"'},
    ]  # fmt: skip
    return kinds[number % len(kinds)]


def run_answers(args: argparse.Namespace) -> int:
    """See the module."""
    options = {"model.dtype": "float32", "runtime.threads": args.threads, "scheduler.max_queue": 64}

    async def one(llm: AsyncLLM, tenant: int, number: int) -> tuple[str, tuple[int, ...]]:
        params = SamplingParams(
            max_tokens=24, temperature=(number % 5) / 2, seed=number,
            structured_outputs=StructuredOutputsParams(**forms(number % 50)),
        )  # fmt: skip
        prompt = {"prompt": f"Item {number % 7}:", "cache_salt": TENANTS[tenant]}
        tokens, reason = list[int](), ""
        async for item in llm.generate(prompt, params):
            for output in item.outputs:
                tokens += output.token_ids
                reason = output.finish_reason or reason
        return reason, tuple(tokens)

    async def several(tenants: tuple[int, ...]) -> dict[int, list[tuple[str, tuple[int, ...]]]]:
        async with AsyncLLM(args.model, options) as llm:
            gates = {tenant: asyncio.Semaphore(16) for tenant in tenants}

            async def guarded(tenant: int, number: int) -> tuple[str, tuple[int, ...]]:
                async with gates[tenant]:
                    return await one(llm, tenant, number)

            found = {}
            for tenant in tenants:
                found[tenant] = asyncio.gather(*(guarded(tenant, number) for number in range(args.requests)))
            return {tenant: await each for tenant, each in found.items()}

    alone = asyncio.run(several((0,)))[0]
    beside = asyncio.run(several((0, 1)))
    equal = sum(one == other for one, other in zip(alone, beside[0], strict=True))
    errors = Counter(reason for each in (alone, *beside.values()) for reason, _ in each)
    print(f"{equal} of {len(alone)} answers are the same beside another tenant's requests; ends: {dict(errors)}")
    return int(equal < len(alone) or errors["error"] > 0)


def make_grammars(args: argparse.Namespace) -> GrammarCompiler:
    """Those of a model, without its weights."""
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path)
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    grammars.prepare(StructuredOutputsParams(regex="a")).result()
    return grammars


def run_wear(args: argparse.Namespace) -> int:
    """See the module."""
    grammars, draw = make_grammars(args), random.Random(args.seed)
    held = [grammars.prepare(StructuredOutputsParams(**forms(number))).result() for number in range(12)]
    failed, num_tokens = Counter[str](), 0
    ends = set(grammars._eos_token_ids)
    for number in range(args.answers):
        guide, tokens = grammars.guide(held[number % 12], 0), list[int]()
        most = 150 if number % 12 in (7, 8) else 40
        try:
            while len(tokens) < most and not (tokens and tokens[-1] in ends):
                drafts, masks = guide.propose(tokens, 8)
                mask = masks[-1]
                tokens += drafts
                tokens.append(mask if isinstance(mask, int) else one_of(mask(), draw))
        except QuireError as error:
            failed[f"form {number % 12}: {error}"] += 1
        num_tokens += len(tokens)
    print(f"{args.answers} answers with {num_tokens} tokens; errors: {sum(failed.values())} {dict(failed) or ''}")
    return int(bool(failed))


def one_of(words: Any, draw: random.Random) -> int:
    """A random token of a mask."""
    return int(draw.choice(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))))


def run_times(args: argparse.Namespace) -> int:
    """See the module."""
    from scipy.stats import mannwhitneyu

    grammars, draw = make_grammars(args), random.Random(args.seed)
    times: dict[bool, list[float]] = {True: [], False: []}
    sides = [True, False] * args.schemas
    draw.shuffle(sides)
    for number, was_used in enumerate(sides):
        names = [f"{draw.randrange(10**9)}_{each}" for each in range(40)]
        properties = {
            name: {"type": "string", "pattern": f"^[a-z]{{1,{3 + each}}}$"} for each, name in enumerate(names)
        }
        wanted = StructuredOutputsParams(json={"type": "object", "properties": properties, "required": names})
        others = grammars.prepare(wanted, TENANTS[1]).result() if was_used else None
        begun = time.perf_counter()
        grammars.prepare(wanted, TENANTS[0]).result()
        times[was_used].append(time.perf_counter() - begun)
        del others, number
    chance = float(mannwhitneyu(times[True], times[False]).pvalue)
    medians = {side: 1000 * statistics.median(each) for side, each in times.items()}
    print(f"used by another tenant {medians[True]:.2f} ms, new {medians[False]:.2f} ms; by chance: {chance:.3f}")
    return int(chance < 0.001)


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("answers", "wear", "times"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=1000, help="answers: of each tenant (default: 1000)")
    parser.add_argument("--answers", type=int, default=5000, help="wear: (default: 5000)")
    parser.add_argument("--schemas", type=int, default=200, help="times: of each kind (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    args = parser.parse_args()
    print(hardware_line(hardware()))
    return {"answers": run_answers, "wear": run_wear, "times": run_times}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
