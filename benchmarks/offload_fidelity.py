"""Predicted and measured speed of placements of weights: how well `quire plan offload` knows this machine.

    python benchmarks/offload_fidelity.py --work DIR [--rounds 5] [--json FILE]

The model is a Llama shape with random weights: 199 million parameters, 398 MB in bf16. The disk is throttled to 300
MB/s. First the parts of the profile are measured. Then, in every round, the generations that the profile is fitted to
take turns with those of eight other policies, all in this process. They differ in share of weights on the disk, batch,
prompt and answer. At last the corrections are fitted, without the eight, and the eight are predicted.

A repeat is dropped if a calibration before or after it differs by more than 10 % from what it was when its round began:
a fixed product, or reads of the layer image. It is also dropped if other programs kept more than --quiet cores busy
meanwhile, beside those that the engine leaves free. Dropped repeats are counted, and repeated up to --retries times in
their round.

bytes   weights read from the disk for a generation: passes over the layers times what each reads; they must be equal.
        Two policies also have a cache on the disk, and activations; their bytes are not among these
memory  of weights, buffers, cache and activations; measured as growth of the process's anonymous memory
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import ROOT, append_record, arguments, commit, format_table, hardware, hardware_line, median, spread
from offload import make_model
from tiers import Mark, marks_table

SHAPE = {
    "vocab_size": 16000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
BANDWIDTH = "300MB"

POLICIES = (
    (0.0, 1, 64, 16), (0.0, 16, 64, 8), (0.15, 4, 64, 8), (0.25, 1, 128, 8), (0.25, 24, 48, 6), (0.75, 2, 64, 8),
    (0.35, 8, 128, 6, 2, 1.0, 1.0), (1.0, 16, 256, 4, 4, 0.5, 0.0),
)  # fmt: skip
"""Requested share of the weights on the disk, sequences, tokens of a prompt and of an answer; for blocks of several
micro-batches also their number, and the shares of the cache and of the activations on the disk. None is a generation of
the profile.
"""

MOVED = 0.1
"""Relative difference of a calibration from that of its round at which a repeat is dropped."""
CALIBRATIONS = 5
"""Calibrations when a round begins; their median counts."""
YARDSTICK, YARDSTICK_SECONDS = 640, 0.3
"""Rows and columns of the matrices of a product that is always the same."""
FITTED_SAMPLES = 3
"""The least disturbed repeats of a generation of the profile that count."""


@dataclass
class Case:
    """A policy and its repeats.

    disk_share   as realised
    seconds      of the repeats that were kept
    all_seconds  of all repeats
    loads        cores of other programs in all repeats
    bytes_moved  (predicted, measured) of all repeats
    memory       bytes of all repeats
    """

    requested: float
    sequences: int
    prompt: int
    output: int
    num_batches: int = 1
    cache_share: float = 0.0
    hidden_share: float = 0.0
    disk_share: float = math.nan
    seconds: list[float] = field(default_factory=list)
    all_seconds: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    bytes_moved: list[tuple[int, int]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def policy(self, disk_share: float) -> Any:
        """Its policy with a share of the weights on the disk."""
        from quire.offload.policy import OffloadPolicy
        from quire.offload.units import Share, Split

        shares = [Split((Share(1 - each), Share(each))) for each in (disk_share, self.cache_share, self.hidden_share)]
        return OffloadPolicy(self.sequences // self.num_batches, self.num_batches, *shares)

    @property
    def engine(self) -> tuple[Any, ...]:
        """Cases that are alike here run on the same engine."""
        own = (self.sequences, self.prompt, self.output) if self.num_batches > 1 else ()
        return (self.requested, *own)

    @property
    def tokens(self) -> int:
        """Tokens that are generated."""
        return self.sequences * self.output

    def quietest(self) -> list[float]:
        """Seconds of the repeats that were kept, or of the least disturbed ones if too few were."""
        if len(self.seconds) >= FITTED_SAMPLES:
            return self.seconds
        order = sorted(range(len(self.loads)), key=lambda index: self.loads[index])
        return [self.all_seconds[index] for index in order[:FITTED_SAMPLES]]


class Drops:
    """Repeats that were dropped, by reason."""

    def __init__(self) -> None:
        self.by_reason: dict[str, int] = {}

    def count(self, reason: str) -> None:
        """Counts one."""
        self.by_reason[reason] = self.by_reason.get(reason, 0) + 1


def yardstick() -> float:
    """Seconds of a fixed product of torch in float32, the median of some: whether the machine is as fast as before.

    Taken under load, because a processor that has rested is faster for a while.
    """
    import torch

    left, right = torch.ones(YARDSTICK, YARDSTICK), torch.ones(YARDSTICK, YARDSTICK)

    def product() -> float:
        begun = time.perf_counter()
        torch.mm(left, right)
        return time.perf_counter() - begun

    begun = time.perf_counter()
    while time.perf_counter() - begun < YARDSTICK_SECONDS:
        product()
    return median([product() for _ in range(25)])


class Calibration:
    """Compares the machine with what it was when the round began."""

    def __init__(self, profile: Any, image: Path) -> None:
        self._profile, self._image = profile, image
        self.begin()

    def begin(self) -> None:
        """Begins a round."""
        self._rate = median([self._read() for _ in range(CALIBRATIONS)])
        self._product = median([yardstick() for _ in range(CALIBRATIONS)])

    def moved(self) -> str | None:
        """What differs by more than MOVED, or None."""
        if abs(self._read() / self._rate - 1) > MOVED:
            return "calibration read"
        return "calibration product" if abs(yardstick() / self._product - 1) > MOVED else None

    def _read(self) -> float:
        from quire.offload.planning.hardware import READ_SECONDS, read_rate
        from quire.offload.stream import NUM_READERS
        from quire.stores.direct import REQUEST_BYTES

        disk, limit = self._profile.disk, self._profile.conditions.disk_bandwidth
        return read_rate(self._image, disk.is_direct, REQUEST_BYTES, NUM_READERS, limit, READ_SECONDS)


def run_round(given: argparse.Namespace, subject: Any, calibration: Calibration, runs: Any, drops: Drops) -> None:
    """One round: the profile's generations and the policies, in the order of their shares. runs: see main."""
    from quire.measure.offload_profile import generator
    from quire.offload.planning.planner import prompt_passes
    from quire.offload.planning.quiet import OtherLoad

    by_engine: dict[tuple[Any, ...], list[Case]] = {}
    for each in runs:
        by_engine.setdefault(each.engine, []).append(each)
    for _, cases in sorted(by_engine.items()):
        first, config = cases[0], subject.config
        placement = first.policy(first.requested).weights
        if first.num_batches > 1:
            placement = first.policy(first.requested)
            longest = -(-(first.prompt + first.output) // 64) * 64
            config = config.with_options({"cache.memory": "auto", "model.max_context": longest})
        with generator(subject.name, config, placement) as made:
            made.run(1, 32, 2)
            for case in cases:
                case.disk_share = made.disk_share
                passes = len(prompt_passes([case.prompt] * case.sequences, given.budget)) + case.output - 1
                for _ in range(1 + given.retries):
                    reason, load = calibration.moved(), OtherLoad()
                    timing = made.run(case.sequences, case.prompt, case.output)
                    cores = load.cores()
                    reason = reason or calibration.moved() or ("other programs" if cores > given.quiet else None)
                    case.all_seconds.append(timing.seconds)
                    case.bytes_moved.append((passes * made.model.weights.streamed_bytes, timing.bytes_read))
                    case.memory.append(timing.memory)
                    case.loads.append(cores)
                    print(
                        f"{made.disk_share:5.0%} on the disk, {case.sequences:2} x {case.prompt:3} + {case.output:2}:"
                        f" {timing.seconds:7.3f} s, others {cores:.2f}{', dropped: ' * bool(reason)}{reason or ''}",
                        file=sys.stderr, flush=True,
                    )  # fmt: skip
                    if reason is None:
                        case.seconds.append(timing.seconds)
                        break
                    drops.count(reason)
        del made


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Rank correlation."""
    from scipy.stats import spearmanr

    return float(spearmanr(left, right).statistic)


def main() -> int:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / ".peers" / "offload_fidelity", help="folder of the model")
    parser.add_argument("--quiet", type=float, default=0.2, help="cores of other programs (default: 0.2)")
    parser.add_argument("--retries", type=int, default=2, help="of a dropped repeat in its round (default: 2)")
    given = parser.parse_args()
    given.quiet += max(0, len(os.sched_getaffinity(0)) - given.threads)
    os.environ["XDG_CACHE_HOME"] = str(given.work.absolute() / "cache")
    from quire.config import EngineConfig
    from quire.measure.offload_profile import fitted, measure_parts, placements, run_shapes
    from quire.models.image_folder import list_images
    from quire.offload.planning.costs import BlockWorkload
    from quire.offload.planning.planner import predict
    from quire.offload.planning.profile import ProfiledRun
    from quire.offload.planning.quiet import OtherLoad
    from quire.offload.planning.subject import Subject
    from quire.offload.units import Share

    model = make_model(given.work / "model", SHAPE)
    options = {"offload.disk_bandwidth": BANDWIDTH, "cache.memory": "512MiB", "runtime.threads": given.threads}
    config = EngineConfig.from_options({"offload.mode": "auto", **options})
    subject, load = Subject.of(str(model), config), OtherLoad()
    given.budget = subject.token_budget
    parts = measure_parts(subject, tell=lambda what: print(f"measuring {what}", file=sys.stderr, flush=True))
    calibration, drops = Calibration(parts, list_images()[0].path), Drops()
    fitting = [Case(split.shares[-1], *shape) for split in placements(subject) for shape in run_shapes(subject)]
    cases = [Case(*policy) for policy in POLICIES]
    assert not {(each.sequences, each.prompt, each.output) for each in fitting} & {each[1:4] for each in POLICIES}
    dropped = Drops()
    for _ in range(given.rounds):
        calibration.begin()
        run_round(given, subject, calibration, fitting, dropped)
        run_round(given, subject, calibration, cases, drops)
    runs = [
        ProfiledRun(
            Share(each.disk_share), each.sequences, each.prompt, each.output, given.budget, median(each.quietest()),
            memory=max(each.memory),
        )
        for each in fitting
    ]  # fmt: skip
    profile = fitted(parts, subject.sizes, runs)
    rows, predicted, predicted_all, measured, errors, errors_of_all, of_memory = [], [], [], [], [], [], []
    for case in cases:
        policy = case.policy(case.disk_share)
        said = predict(profile, subject.sizes, BlockWorkload(case.prompt, case.output), policy, budget=given.budget)
        # A realised share, if it is requested, gives another placement, with other buffers.
        requested = case.policy(case.requested)
        memory = predict(
            profile, subject.sizes, BlockWorkload(case.prompt, case.output), requested, budget=given.budget
        ).memory["cpu"]
        seconds = median(case.seconds)
        error = said.throughput * seconds / case.tokens - 1
        error_of_all = said.throughput * median(case.all_seconds) / case.tokens - 1
        errors_of_all.append(abs(error_of_all))
        of_memory.append(abs(memory / median(case.memory) - 1))
        predicted_all.append(said.throughput)
        if case.seconds:
            predicted.append(said.throughput)
            measured.append(case.tokens / seconds)
            errors.append(abs(error))
        wrong = sum(left != right for left, right in case.bytes_moved)
        rows.append([
            f"{case.disk_share:.1%} / {case.cache_share:.0%} / {case.hidden_share:.0%}",
            f"{case.num_batches} x {case.sequences // case.num_batches} x {case.prompt} + {case.output}",
            f"{said.throughput:.3g}",
            f"{case.tokens / seconds:.3g}", f"{spread(case.seconds):.0%}", f"{error:+.1%}", len(case.seconds),
            f"{case.tokens / median(case.all_seconds):.3g}", f"{error_of_all:+.1%}",
            f"{case.bytes_moved[0][0] / 1e6:.1f}", f"{case.bytes_moved[0][1] / 1e6:.1f}", wrong,
            f"{memory / 1e6:.0f}", f"{median(case.memory) / 1e6:.0f}",
        ])  # fmt: skip
    head = [
        "weights / cache / activations on the disk", "generation",
        "tokens/s predicted", "measured", "spread", "error", "kept",
        "measured, all", "error", "MB read, predicted", "measured", "unequal", "MB memory, predicted", "measured",
    ]  # fmt: skip
    print(format_table(head, rows))
    print(f"\nfitted: {profile.corrections}")
    fit_errors = [abs(run.error) for run in profile.runs]
    print(f"median error of the {len(fit_errors)} fitted generations: {median(fit_errors):.1%}")
    print(f"median error with the dropped repeats: {median(errors_of_all):.1%}")
    for what, counted in (("policies", drops), ("profile", dropped)):
        print(f"dropped repeats of the {what}: {counted.by_reason or 'none'}")
    of_all = [case.tokens / median(case.all_seconds) for case in cases]
    print(f"rank correlation with the dropped repeats: {spearman(predicted_all, of_all):.2f}")
    rank = spearman(predicted, measured) if len(predicted) > 2 else math.nan
    unequal = sum(left != right for case in cases for left, right in case.bytes_moved)
    marks = [
        Mark("median error of the throughput", [median(errors)], 0.15, at_most=True),
        Mark("Spearman's rank correlation", [rank], 0.9),
        Mark("largest error of the memory", [max(of_memory)], 0.05, at_most=True),
        Mark("repeats with other bytes than predicted", [unequal], 0, at_most=True),
    ]
    print(f"\n{marks_table(marks, False)}\n")
    print(f"{given.rounds} rounds, {given.threads} threads, other programs used {load.cores():.2f} cores; {commit()}")
    print(hardware_line(hardware()))
    if given.json:
        record = {
            "benchmark": "offload_fidelity", "threads": given.threads, "error": median(errors), "spearman": rank,
            "error_of_all": median(errors_of_all), "dropped": drops.by_reason, "cases": [vars(case) for case in cases],
            "profile": {"corrections": vars(profile.corrections), "runs": [vars(run) for run in profile.runs]},
        }  # fmt: skip
        append_record(given.json, record)
    return int(any(mark.reached is False for mark in marks))


if __name__ == "__main__":
    sys.exit(main())
