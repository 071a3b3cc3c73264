"""Vidur beside Quire's simulator: both simulate the requests that benchmarks/simulation_fidelity.py has served.

    python3.11 -m venv VENV && VENV/bin/pip install vidur==0.0.26
    python benchmarks/simulation_peer.py --data DIR --report fidelity.jsonl --vidur VENV/bin/python

It takes the loads of the side `mixed`: one engine with a dense cache. Vidur (arXiv 2405.05465) gets one replica with
Sarathi's scheduler, the server's rows per step, its sequences per batch, its number of blocks of 64 tokens, and the
same requests at the same moments. A predictor of ours, registered with Vidur for its type DUMMY, returns the seconds
that Quire's simulator takes: those of the model that is fitted to the profiles. Vidur knows no client, so the seconds
between client and engine are added to its TTFT. What remains different is the scheduler, and what Vidur leaves out.

`Vidur, paper` has the form of DistServe's appendix A instead, fitted to the same profiles: one slope for prompt tokens,
and another form for steps that decode. The paper has no mixed steps; here a mixed step takes the sum of both forms.

What Vidur 0.0.26 leaves out or does differently, by its source:

- A request is two lengths without tokens. No prefix is shared: nothing reads CacheConfig.enable_prefix_caching or
  enable_disk_caching. There are no codecs, no retention, no tiers and no hand-overs.
- The scheduler is written for the simulator. Sarathi's fills a step with a slice of any length; Quire cuts a prompt at
  multiples of 64 tokens. Vidur admits a request if the blocks of its prompt are free beside a watermark of 1 % (its
  default, kept here). Quire leaves a chunk to grow for each running sequence.
- A preemption ends the simulation with a failed assertion, because Request.restart does not reset the tokens that the
  first stage has processed. Such a load is shown as failed.
- A batch takes the time of its layers. Embedding, last layer, sampling, scheduling and clients take none. The logged
  steps of Quire, to which both forms here are fitted, contain all of these but the clients.
- Its own predictors are not used here. They add up operators that are profiled on GPUs. They round the rows of a batch
  up to a multiple of 8 and contexts to a multiple of 256, and take a prompt's slice of one row for a decoding row.
- A decoding row has one key too many. The predictor here subtracts it.
- Its metric of seconds per token divides by all tokens of an answer. TPOT here, as in Quire, leaves out the first one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from common import format_table, hardware, hardware_line
from simulation_fidelity import Simulated, kept_load, knee, prompts_of

from quire.cache.ledger import PAGE_TOKENS
from quire.timing.latency import BASE, ROWS, TERMS, LatencyModel
from quire.workload.slo import Slo
from quire.workload.workload import Floats, Workload

RUN_VIDUR = Path(__file__).resolve().parent / "peers" / "run_vidur.py"

QUIRE, VIDUR, PAPER = "Quire", "Vidur", "Vidur, paper"

Form = dict[str, Any]
"""Seconds of a step as run_vidur.py takes them: `terms` by feature, and `bends`, pairs of rows and seconds of each row
beyond them.
"""

Times = tuple[Floats, Floats]
"""TTFT and TPOT of each request of a load."""


def fitted_form(model: LatencyModel) -> Form:
    """The seconds of a latency model. Where a piece of rows begins, the slope changes by a bend."""
    slopes = [0.0, *(model.coefficients.get(f"{ROWS}{knot}", 0.0) for knot in model.knots)]
    bends = [after - before for before, after in itertools.pairwise(slopes)]
    terms = {name: model.coefficients.get(name, 0.0) for name in TERMS}
    # Nothing is shared in Vidur: all of a context is distinct.
    terms["context"] += terms.pop("unique")
    return {
        "terms": {"step": model.coefficients.get(BASE, 0.0), **terms},
        "bends": [*zip(model.knots, bends, strict=True)],
    }


def paper_form(paper: Mapping[str, float]) -> Form | None:
    """The seconds by the paper's constants; None if steps of one kind were not measured."""
    if not any(name in paper for name in ("C1", "C2", "C3")) or not any(name in paper for name in ("C4", "C5")):
        return None
    constants = {name: paper.get(name, 0.0) for name in ("C1", "C2", "C3", "C4", "C5")}
    terms = {
        "prompt_rows": constants["C1"],
        "prompt_pairs": 2 * constants["C2"],  # the square of a prompt's length is twice its pairs
        "with_prompts": constants["C3"],
        "with_decodes": constants["C4"],
        "context": constants["C5"],
    }
    return {"terms": terms, "bends": []}


def vidur(python: Path, simulated: Simulated, loads: list[Workload]) -> dict[str, list[Times | None]]:
    """What Vidur says of the loads, with each form; None for a load that it failed on."""
    plan, model = simulated.plans["mixed"], simulated.models["mixed"]
    forms = {VIDUR: fitted_form(model), PAPER: paper_form(model.paper)}
    requests = [[(each.at, each.num_in, each.num_out) for each in load.arrivals] for load in loads]
    asked = {
        "rows": plan.config.scheduler.token_budget,
        "running": plan.config.scheduler.max_running,
        "block_tokens": PAGE_TOKENS,
        "blocks": plan.sizes.num_chunks,
        "forms": {name: form for name, form in forms.items() if form is not None},
        "loads": requests,
    }
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "asked.json").write_text(json.dumps(asked))
        subprocess.run([python, RUN_VIDUR, name], check=True)
        answered = json.loads((Path(name) / "answered.json").read_text())
    found: dict[str, list[Times | None]] = {}
    for form, answers in answered.items():
        found[form] = []
        for load, rows, answer in zip(loads, requests, answers, strict=True):
            if "error" in answer:
                print(f"{form} failed on a load of {load.name} with {len(rows)} requests: {answer['error']}")
                found[form].append(None)
                continue
            first, last = np.array(answer["prefill"]), np.array(answer["all"])
            more = np.array([num_out - 1 for _, _, num_out in rows])
            found[form].append((first + 2 * simulated.overhead, (last - first) / np.maximum(1, more)))
    return found


def summary(times: list[Times | None], slo: Slo) -> Floats:
    """Attainment, mean TTFT and mean TPOT: means of the loads. NaN if there is a load without times."""
    rows = [
        (np.nan,) * 3
        if each is None
        else (((each[0] <= slo.ttft) & (each[1] <= slo.tpot)).mean(), each[0].mean(), each[1].mean())
        for each in times
    ]
    return np.array(rows).mean(0)


def report(args: argparse.Namespace) -> None:
    """Simulates every quiet load with all simulators, and compares."""
    records = [json.loads(line) for line in args.report.read_text().splitlines()]
    measured = [each for each in records if each["kind"] == "load" and each["side"] == "mixed"]
    kept = [each for each in measured if each["others"] <= args.quiet]
    if not kept:
        raise SystemExit(f"{args.report} has no quiet load of the side mixed; raise --quiet, or measure again")
    simulated = Simulated("mixed", records, args.model, sorted({each["repeat"] for each in measured}))
    loads = [kept_load(args.data, each) for each in kept]
    plan, model = simulated.plans["mixed"], simulated.models["mixed"]
    print(hardware_line(hardware()))
    print(
        f"{model.counts['steps']} steps; measured / fitted, sum of all: {model.residuals['total']:.3f};"
        f" {plan.config.scheduler.token_budget} rows a step, {plan.config.scheduler.max_running} sequences,"
        f" {plan.sizes.num_chunks} blocks; {1e3 * simulated.overhead:.1f} ms each way;"
        f" {len(measured) - len(kept)} of {len(measured)} loads dropped"
    )
    said: dict[str, list[Times | None]] = {QUIRE: []}
    for load, each in zip(loads, kept, strict=True):
        outcome = simulated.run(load, prompts_of(load, each["rate"], each["repeat"]))
        said[QUIRE].append((outcome.ttft, outcome.tpot))
    said |= vidur(args.vidur, simulated, loads)
    real: list[Times | None] = [(np.array(each["ttft"]), np.array(each["tpot"])) for each in kept]
    for trace in dict.fromkeys(each["trace"] for each in kept):
        compare(args, trace, kept, real, said)


def compare(
    args: argparse.Namespace,
    trace: str,
    kept: list[dict[str, Any]],
    real: list[Times | None],
    said: dict[str, list[Times | None]],
) -> None:
    """Prints one trace: a table by rate, mean absolute errors, and the rate at which attainment falls to the target."""
    slo = Slo(args.ttft, args.tpot)
    rates = sorted({each["rate"] for each in kept if each["trace"] == trace})
    rows: list[list[str]] = []
    errors: dict[str, list[Floats]] = {name: [] for name in said}
    shares: dict[str, list[float]] = {name: [] for name in ("measured", *said)}
    for rate in rates:
        places = [place for place, each in enumerate(kept) if (each["trace"], each["rate"]) == (trace, rate)]
        truth = summary([real[place] for place in places], slo)
        shares["measured"].append(truth[0])
        rows.append([f"{rate:g}", str(len(places)), "measured", *cells(truth)])
        for name, times in said.items():
            found = summary([times[place] for place in places], slo)
            shares[name].append(found[0])
            if np.isnan(found).any():
                rows.append(["", "", name, "failed", *[""] * 5])
                continue
            error = 100 * np.array([found[0] - truth[0], *(found[1:] / truth[1:] - 1)])
            errors[name].append(np.abs(error))
            rows.append(["", "", name, *cells(found, error)])
    print(f"\nmixed, {trace}; SLO {slo.ttft:g} s, {slo.tpot:g} s")
    head = ["rate", "repeats", "", "met %", "error, points", "TTFT s", "error %", "TPOT ms", "error %"]
    print(format_table(head, rows))
    limit = knee(rates, shares["measured"], slo.attainment)
    rows = [["measured", "", "", "", shown(limit), ""]]
    for name, each in errors.items():
        means = [f"{mean:.1f}" for mean in np.mean(each, 0)] if each else [""] * 3
        fall = knee(rates, shares[name], slo.attainment)
        rows.append([name, *means, shown(fall), f"{100 * (fall / limit - 1):+.1f}" if fall and limit else ""])
    print("\nmean absolute errors, and the rate at which attainment falls to the target")
    print(format_table(["", "met, points", "TTFT %", "TPOT %", f"rate at {slo.attainment:.0%}", "error %"], rows))


def cells(found: Floats, error: Floats | None = None) -> list[str]:
    """Attainment, TTFT and TPOT for a table, each followed by its error."""
    values = (f"{100 * found[0]:.1f}", f"{found[1]:.3f}", f"{1e3 * found[2]:.1f}")
    errors = [""] * 3 if error is None else [f"{each:+.1f}" for each in error]
    return [text for pair in zip(values, errors, strict=True) for text in pair]


def shown(rate: float | None) -> str:
    """A rate, if it is known."""
    return "not within these rates" if rate is None else f"{rate:.3f}"


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--report", type=Path, required=True, metavar="FILE", help="what simulation_fidelity has kept")
    parser.add_argument("--vidur", type=Path, required=True, metavar="PYTHON", help="of Vidur's own environment")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--ttft", type=float, default=2.0)
    parser.add_argument("--tpot", type=float, default=0.1)
    parser.add_argument("--quiet", type=float, default=0.1, help="cores that other programs may take (default: 0.1)")
    report(parser.parse_args())


if __name__ == "__main__":
    main()
