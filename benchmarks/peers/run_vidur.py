"""Vidur, a simulator of serving clusters: one replica with Sarathi's scheduler, for given loads and seconds of steps.

    python run_vidur.py FOLDER

FOLDER/asked.json has the settings, the seconds of steps in one or more forms, and the loads. FOLDER/answered.json gets,
by form and load, the times of every request, or the assertion that failed:

    {"rows": 1024, "running": 48, "block_tokens": 64, "blocks": 546,
     "forms": {NAME: {"terms": {FEATURE: SECONDS}, "bends": [[ROWS, SECONDS], ...]}},
     "loads": [[[AT, PROMPT, ANSWER], ...], ...]}
        ->  {NAME: [{"prefill": [SECONDS, ...], "all": [SECONDS, ...]}, {"error": "..."}, ...]}

Runs in Vidur's own virtual environment: knows Vidur, and nothing of Quire. Written for Vidur 0.0.26.
"""

import csv
import json
import logging
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vidur.config import (
    BaseExecutionTimePredictorConfig,
    CacheConfig,
    ClusterConfig,
    MetricsConfig,
    ReplicaConfig,
    SarathiSchedulerConfig,
    SimulationConfig,
    TraceRequestGeneratorConfig,
)
from vidur.entities import Batch, ExecutionTime, Replica
from vidur.execution_time_predictor import BaseExecutionTimePredictor, ExecutionTimePredictorRegistry
from vidur.simulator import Simulator
from vidur.types import ExecutionTimePredictorType

DATE = "2000-01-01"
"""Vidur replays the requests of one day of a trace."""

Load = Sequence[tuple[float, int, int]]
"""When each request comes, and the tokens of its prompt and of its answer."""


@dataclass
class GivenConfig(BaseExecutionTimePredictorConfig):
    """Seconds of a batch: a form, see `seconds_of`."""

    form: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def get_type() -> ExecutionTimePredictorType:
        """A type of Vidur's that has no predictor."""
        return ExecutionTimePredictorType.DUMMY


# A predictor has an abstract method for each operator. None is called here, because `Given` overrides their sum.
Operators: Any = type(
    "Operators",
    (BaseExecutionTimePredictor,),
    dict.fromkeys(BaseExecutionTimePredictor.__abstractmethods__, lambda self, batch: 0.0),
)


class Given(Operators):
    """The seconds of a whole batch at once."""

    def get_execution_time(self, batch: Batch, pipeline_stage: int) -> ExecutionTime:
        """One layer with one operator that takes all of the time, in milliseconds."""
        return ExecutionTime(1, 1e3 * seconds_of(self._config.form, features_of(batch)), *[0.0] * 13)


ExecutionTimePredictorRegistry.register(ExecutionTimePredictorType.DUMMY, Given)


def features_of(batch: Batch) -> dict[str, float]:
    """What a batch computes.

    Vidur counts a token as processed once it is sampled. So it gives a decoding row one key more than the row attends
    to.
    """
    found = dict.fromkeys(("rows", "prompt_rows", "prompt_pairs", "num_prompts", "decode_rows", "context"), 0.0)
    for request, num_rows, num_keys in zip(batch.requests, batch.num_q_tokens, batch.num_kv_tokens, strict=True):
        if request.is_prefill_complete:
            found["decode_rows"] += 1
            found["context"] += num_keys - 1
        else:
            found["prompt_rows"] += num_rows
            found["prompt_pairs"] += num_rows * (num_keys - num_rows / 2)
            found["num_prompts"] += 1
    found["rows"] = found["prompt_rows"] + found["decode_rows"]
    return {
        **found, "step": 1.0, "with_prompts": float(found["prompt_rows"] > 0),
        "with_decodes": float(found["decode_rows"] > 0),
    }  # fmt: skip


def seconds_of(form: Mapping[str, Any], features: Mapping[str, float]) -> float:
    """A sum of terms, and of bends: a bend adds seconds for each row beyond a number of rows."""
    terms = sum(seconds * features[name] for name, seconds in form["terms"].items())
    return terms + sum(seconds * max(0.0, features["rows"] - rows) for rows, seconds in form["bends"])


def simulate(asked: Mapping[str, Any], form: dict[str, Any], load: Load) -> dict[str, Any]:
    """The times of a load's requests: from arrival to the first token, which ends the prefill, and to the last token.

    Model and device stay Vidur's defaults. They decide nothing, because the blocks and the seconds are given.
    """
    # The router expects the ids of replicas to begin with 0. Ids count on from one simulation of a process to the next.
    Replica._id = -1
    with tempfile.TemporaryDirectory() as name:
        trace = Path(name) / "trace.csv"
        with trace.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["Date", "Time", "PromptTokenCount", "CompletionTokenCount"])
            writer.writerows([DATE, *request] for request in load)
        metrics = MetricsConfig(
            enable_chrome_trace=False, store_plots=False, store_batch_metrics=False, store_utilization_metrics=False,
            output_dir=name,
        )  # fmt: skip
        config = SimulationConfig(
            cluster_config=ClusterConfig(
                num_replicas=1,
                replica_config=ReplicaConfig(num_pipeline_stages=1, tensor_parallel_size=1),
                cache_config=CacheConfig(block_size=asked["block_tokens"], num_blocks=asked["blocks"]),
                replica_scheduler_config=SarathiSchedulerConfig(
                    batch_size_cap=asked["running"], chunk_size=asked["rows"]
                ),
            ),
            request_generator_config=TraceRequestGeneratorConfig(
                trace_file=str(trace), date=DATE, prefill_scale_factor=1, decode_scale_factor=1, time_scale_factor=1,
                max_tokens=max(num_in + num_out for _, num_in, num_out in load),
            ),
            execution_time_predictor_config=GivenConfig(cache_dir=name, form=form),
            metrics_config=metrics,
        )  # fmt: skip
        Simulator(config).run()
        with (Path(metrics.output_dir) / "request_metrics.csv").open(newline="") as file:
            rows = sorted(csv.DictReader(file), key=lambda row: int(row["Request Id"]))
    return {
        "prefill": [float(row["prefill_e2e_time"]) for row in rows],
        "all": [float(row["request_e2e_time"]) for row in rows],
    }


def main() -> None:
    """Simulates every load with every form."""
    logging.getLogger("vidur").setLevel(logging.WARNING)
    folder = Path(sys.argv[1])
    asked = json.loads((folder / "asked.json").read_text())
    answered: dict[str, list[dict[str, Any]]] = {}
    for name, form in asked["forms"].items():
        answered[name] = []
        for load in asked["loads"]:
            try:
                answered[name].append(simulate(asked, form, load))
            except AssertionError as error:
                at = traceback.extract_tb(error.__traceback__)[-1]
                answered[name].append({"error": f"{Path(at.filename).name}, {at.name}: {at.line} {error}".rstrip()})
    (folder / "answered.json").write_text(json.dumps(answered))


if __name__ == "__main__":
    main()
