"""Profiles a machine for a model: measures its parts, then whole generations at some placements, and fits the rest.

`quire.offload.planning.hardware` measures the parts. The generations run in this process, on the engine that serves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.cache.ledger import MAX_ARENA_BYTES
from quire.config import EngineConfig
from quire.engine.build import ops_type
from quire.engine.machine import available_memory
from quire.engine.params import SamplingParams
from quire.errors import ConfigError, QuireError
from quire.kernels import runtime
from quire.llm import LLM
from quire.measure.memory_use import free_memory, memory_of, peak_memory
from quire.models.image_folder import image_folder
from quire.models.layers import torch_dtype
from quire.models.resolve import resolve_model
from quire.models.weights import open_model
from quire.offload.model import OffloadedModel
from quire.offload.planning.costs import BlockWorkload, Sizes
from quire.offload.planning.fit import fit
from quire.offload.planning.hardware import (
    CPU,
    DEVICE_ROWS,
    HEAD_ROWS,
    ROWS,
    AttentionTimer,
    LayerTimer,
    host_timer,
    measure_bus,
    measure_copy,
    measure_curve,
    measure_disk,
)
from quire.offload.planning.planner import predict
from quire.offload.planning.profile import Corrections, Profile, ProfiledGpu, ProfiledRun
from quire.offload.planning.program import Prediction
from quire.offload.planning.quiet import quietest, spread
from quire.offload.planning.subject import Subject
from quire.offload.policy import OffloadPolicy, policy_text
from quire.offload.units import ALL, NONE, TIERS, Share, Split

SHAPES = ((1, 32, 6), (4, 320, 2), (8, 96, 4), (32, 32, 4))
"""Sequences, tokens of a prompt and of an answer of the generations that corrections are fitted to."""

MEMORY_SHARE = 0.7
"""Share of the free memory that resident weights of a run may take."""

FAR_SHARE = 0.3
"""Share of the host's free memory for chunks that attention on the host is timed on."""

QUIET_SECONDS = 0.1
"""Without a read for so long, a stream has filled its buffers."""

PLACED: dict[str, Any] = {
    "offload.memory": None, "offload.cache": None, "offload.micro_batch": None, "offload.overlap": True,
    "offload.profile": None, "cache.share": False,
}  # fmt: skip
"""Settings of every generation, whatever a file or flags say: its policy decides."""

Told = Callable[[str], None]
"""Called with what is measured next, in words."""


@dataclass(frozen=True)
class Timing:
    """A generation.

    seconds     from the first prompt to the last token
    bytes_read  weights that were read from the disk for it
    memory      memory that the engine took at most: anonymous memory of the process, or of the GPU if that computes
    """

    seconds: float
    bytes_read: int
    memory: int


class Generator:
    """An engine with a placement of weights. Generates blocks of random prompts. before: memory without it."""

    def __init__(self, llm: Any, before: int, device: torch.device) -> None:
        self.llm = llm
        self._before = before
        self._device = device
        self.model: OffloadedModel = llm.engine.runner.model
        self._vocab = llm.shape.vocab_size
        self._random = random.Random(0)

    @property
    def disk_share(self) -> Share:
        """Share of the layers' bytes on the disk, as realised."""
        return self.model.weights.split.shares[-1]

    @property
    def host_share(self) -> Share:
        """Beside a GPU, share of the layers' bytes in the host's memory, as realised."""
        return NONE if self._device.type == "cpu" else self.model.weights.split.shares[1]

    def run(self, sequences: int, prompt_tokens: int, output_tokens: int) -> Timing:
        """Generates a block, and waits until the weights of its end have been read ahead."""
        prompts = [
            {"prompt_token_ids": [self._random.randrange(self._vocab) for _ in range(prompt_tokens)]}
            for _ in range(sequences)
        ]
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        before = self.settle()
        with peak_memory(self._device) as peak:
            begun = time.perf_counter()
            answers = self.llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begun
        if any(len(answer.outputs[0].token_ids) != output_tokens for answer in answers):
            raise QuireError("a generation failed while the machine was measured; the log has the reason")
        return Timing(seconds, self.settle() - before, peak[0] - self._before - self._untouched)

    @property
    def _untouched(self) -> int:
        """Bytes of the cache that nothing used so far. On a GPU they are allocated, too."""
        if self._device.type == "cpu":
            return 0
        told = self.llm.stats()["cache"]
        return int(told["bytes_total"] - told["bytes_peak"])

    def settle(self) -> int:
        """Waits until nothing is read, and returns the bytes that were read so far."""
        stream, last, since = self.model.stream, -1, time.perf_counter()
        while time.perf_counter() - since < QUIET_SECONDS:
            if stream.bytes_from_disk != last:
                last, since = stream.bytes_from_disk, time.perf_counter()
            time.sleep(0.005)
        return last


@contextlib.contextmanager
def generator(model: str, config: EngineConfig, placement: Split | OffloadPolicy) -> Iterator[Generator]:
    """An engine with a placement: a policy, or the shares of its layers' weights. Raises ConfigError."""
    policy = placement if isinstance(placement, OffloadPolicy) else weights_at(placement)
    device = torch.device("cpu" if len(policy.weights.shares) < len(TIERS) else "cuda")
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        file = Path(folder) / "policy.json"
        file.write_text(policy_text(policy, TIERS[-len(policy.weights.shares) :]))
        free_memory()  # of the last engine
        before = memory_of(device)
        with LLM(model, config.with_options({**PLACED, "offload.mode": str(file)}).to_options()) as llm:
            yield Generator(llm, before, device)


def weights_at(split: Split, sequences: int | None = None) -> OffloadPolicy:
    """A policy that places weights, and one micro-batch of so many sequences, or of any number."""
    near = Split((ALL, *[NONE] * (len(split.shares) - 1)))
    most = sequences or EngineConfig().scheduler.max_running
    return OffloadPolicy(most, 1, split, near, near)


def layer_timer(subject: Subject) -> LayerTimer:
    """The model's first layers, in memory."""
    given: dict[str, Any] = {}
    if subject.has_device:
        given = {"ops": ops_type("triton")(), "device": torch.device("cuda")}
    form, size = subject.config.model.weights, subject.sizes.layer_bytes
    with open_model(resolve_model(subject.name)) as checkpoint:
        return LayerTimer(checkpoint, torch_dtype(subject.dtype), form, size, **given)


def measure_machine(
    subject: Subject, *, folder: Path | None = None, rounds: int = 3, tell: Told = lambda what: None
) -> Profile:
    """A profile of this machine for a model.

    folder  where the disk is measured; None: the folder of layer images
    rounds  how often everything is measured
    Raises ConfigError, ModelError, and QuireError for a disk that cannot be measured.
    """
    profile = measure_parts(subject, folder=folder, rounds=rounds, tell=tell)
    runs: list[ProfiledRun] = []
    for split in placements(subject):
        with generator(subject.name, subject.config, split) as made:
            on_host = f" and {made.host_share:.0%} in the host's memory" * subject.has_device
            tell(f"generations with {made.disk_share:.0%} of the weights on the disk{on_host}")
            runs += measure_runs(made, run_shapes(subject), subject.token_budget, rounds)
        del made  # else its memory counts as that of the process before the next one
    return fitted(profile, subject.sizes, runs)


def measure_parts(
    subject: Subject, *, folder: Path | None = None, rounds: int = 3, tell: Told = lambda what: None
) -> Profile:
    """A profile without runs and corrections; see measure_machine."""
    if subject.config.retain.is_on or subject.config.tiers.is_on:
        raise ConfigError("a profile is measured without retain and tiers; plan with them instead")
    conditions = subject.conditions()
    runtime.set_num_threads(conditions.threads)
    tell("the disk")
    if folder is None:
        folder = image_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    disk = measure_disk(folder, conditions.disk_bandwidth, rounds)
    tell("memory and products")
    copy, timer = measure_copy(rounds), layer_timer(subject)
    rows = ROWS + DEVICE_ROWS * subject.has_device
    products, head = measure_curve(timer.products, rows, rounds), measure_curve(timer.head, HEAD_ROWS, rounds)
    del timer
    tell("attention")
    device = None
    with generator(subject.name, subject.config, placements(subject)[0]) as made:
        engine = made.llm.engine
        backend, context = engine.runner.attention, engine.max_context
        near = AttentionTimer(backend.clone(), backend.spec, context)
        attention, prompt = near.decoding(rounds), near.prompts(rounds)
        if subject.has_device:
            tell("the GPU's copies, and attention on the host")
            room = min(int(available_memory(CPU) * FAR_SHARE), MAX_ARENA_BYTES)
            far = host_timer(backend.spec, context, room).decoding(rounds)
            device = ProfiledGpu(*measure_bus(torch.device("cuda"), rounds), far)
    return Profile(
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), conditions, disk, copy, products, head,
        attention, prompt, device=device,
    )  # fmt: skip


def measure_runs(
    made: Generator, shapes: Sequence[tuple[int, int, int]], budget: int, rounds: int
) -> list[ProfiledRun]:
    """Generations of some shapes: sequences, prompt tokens, output tokens. budget: scheduler.token_budget."""
    made.run(1, 32, 2)  # the first generation finds new memory
    runs = []
    for shape in shapes:
        memory: list[int] = []

        def seconds(shape: tuple[int, int, int] = shape, memory: list[int] = memory) -> float:
            timing = made.run(*shape)
            memory.append(timing.memory)
            return timing.seconds

        times = quietest(seconds, rounds)
        seconds_taken = statistics.median(times)
        runs.append(
            ProfiledRun(
                made.disk_share, *shape, budget, seconds_taken, spread(times), memory=max(memory),
                host_share=made.host_share,
            )
        )  # fmt: skip
    return runs


def fitted(profile: Profile, sizes: Sizes, runs: Sequence[ProfiledRun]) -> Profile:
    """The profile with corrections that fit the runs, and the runs with their predictions."""

    def seconds_of(run: ProfiledRun, corrections: Corrections) -> float:
        return predict_run(dataclasses.replace(profile, corrections=corrections), sizes, run).seconds

    corrections = fit(runs, seconds_of)
    corrections = dataclasses.replace(corrections, scratch=_scratch(profile, sizes, runs))
    told = tuple(dataclasses.replace(run, predicted=seconds_of(run, corrections)) for run in runs)
    return dataclasses.replace(profile, corrections=corrections, runs=told)


def predict_run(profile: Profile, sizes: Sizes, run: ProfiledRun) -> Prediction:
    """What the profile says of a generation."""
    far = (run.disk_share,) if profile.device is None else (run.host_share, run.disk_share)
    policy = weights_at(_split(1 - sum(far), *far), run.sequences)
    return predict(profile, sizes, BlockWorkload(run.prompt_tokens, run.output_tokens), policy, budget=run.budget)


def _scratch(profile: Profile, sizes: Sizes, runs: Sequence[ProfiledRun]) -> float:
    """The median over the placements of the factor on scratch that explains the largest memory of their generations. A
    process keeps what the largest of them took.
    """
    found = []
    for place in {(run.disk_share, run.host_share) for run in runs}:
        alike = [run for run in runs if (run.disk_share, run.host_share) == place]
        explained = max(predict_run(profile, sizes, run).memory[profile.tiers[0]] for run in alike)
        rows = max(min(run.sequences * run.prompt_tokens, run.budget) for run in alike)
        scratch = rows * max(sizes.decode)
        found.append(1 + (max(run.memory for run in alike) - explained) / scratch)
    return max(1.0, statistics.median(found))


def run_shapes(subject: Subject) -> list[tuple[int, int, int]]:
    """The generations of a profile, shortened for a model with a small context, and without too large batches."""
    most = subject.config.scheduler.max_running
    fits = {
        (min(sequences, most), min(prompt, subject.max_context - output), output)
        for sequences, prompt, output in SHAPES
    }
    return sorted(fits)


def placements(subject: Subject) -> list[Split]:
    """Placements of the weights that runs have. First as fast as memory allows; then all weights one tier lower, and
    the middle of the two. Beside a GPU also half of the weights on the disk.
    """
    free = [available_memory(CPU) * MEMORY_SHARE]
    if subject.has_device:
        free.insert(0, available_memory(torch.device("cuda")) * MEMORY_SHARE)
    sizes = subject.sizes
    total = subject.layers_bytes
    near = min(1.0, max(0.0, (free[0] - sizes.fixed_bytes) / total))
    least = round(1 - near, 3)
    if not subject.has_device:
        return [_split(1 - share, share) for share in sorted({least, (1 + least) / 2, 1.0})]
    room = min(1.0, free[1] / total)
    found = [_split(1 - far, min(far, room), max(0.0, far - room)) for far in sorted({least, (1 + least) / 2, 1.0})]
    half = min(room, 0.5)
    return [*found, *([_split(0.0, half, 1 - half)] if half < room else [])]


def _split(*shares: float) -> Split:
    return Split(tuple(map(Share, shares)))
