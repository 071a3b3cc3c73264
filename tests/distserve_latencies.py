"""The latency models of DistServe: that of its simulator with the published constants, and that of its appendix.

The constants were fitted to DistServe's engine on A100 GPUs with 80 GB; this engine has no part in them.

Shortcuts of the simulator's model:
- a step has prompts or decoding sequences; the sum for a step with both is ours;
- every sequence reads a shared prefix, and a cached prefix costs a prompt only pairs of query and key;
- stages of a pipeline are equal, and a hop between two costs prompts 1 ms per stage of the pipeline, decoding nothing;
- decoding follows one straight line below 95 sequences and another one from there on: 96 take less time than 94;
- the transfer of the cache takes no time, and the overhead of Ray, 2 ms and 0.1 us a token, is left out here too.

Source: DistServe, arXiv 2401.09670, Appendix A, and simdistserve/estimators of its repository.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.timing.latency import Origin, StepWork

MILLI = 1e-3

Line = tuple[float, float, float]

MOST_TOKENS = 2048
"""Positions of OPT: no measured prompt or context was longer."""


@dataclass(frozen=True)
class Coefficients:
    """Milliseconds of one model with one tensor parallelism.

    prefill    of a step, of a prompt token, of a squared length of a prompt
    small      of a step, of a token of context, of a sequence, for fewer than `threshold` sequences
    large      the same for `threshold` and more
    """

    prefill: Line
    small: Line
    large: Line
    threshold: int = 95

    def prefill_ms(self, tokens: float, squares: float) -> float:
        """tokens: sum of the prompts' lengths; squares: sum of their squares."""
        step, token, square = self.prefill
        return step + token * tokens + square * squares

    def decode_ms(self, sequences: float, context: float) -> float:
        """context: sum of the contexts' lengths."""
        step, token, sequence = self.line(sequences)
        return step + token * context + sequence * sequences

    def line(self, sequences: float) -> Line:
        """The constants for a number of decoding sequences."""
        return self.small if sequences < self.threshold else self.large


COEFFICIENTS = {
    ("opt-13b", 1): Coefficients((18.10, 0.1019, 7.12e-6), (19.93, 6.27e-4, 0.0385), (7.17, 5.80e-4, 0.158)),
    ("opt-13b", 2): Coefficients((14.74, 0.0686, 2.45e-6), (13.29, 3.41e-4, 0.0630), (10.64, 3.12e-4, 0.0856)),
    ("opt-13b", 4): Coefficients((12.06, 0.0381, 5.23e-7), (10.26, 1.88e-4, 0.0327), (10.48, 1.71e-4, 0.0457)),
    ("opt-66b", 2): Coefficients((43.06, 0.2742, 2.25e-5), (48.29, 9.42e-4, 0.1276), (28.73, 4.74e-4, 0.296)),
    ("opt-66b", 3): Coefficients((33.00, 0.1957, 1.22e-5), (35.80, 5.85e-4, 0.0953), (22.65, 5.36e-4, 0.209)),
    ("opt-66b", 4): Coefficients((29.44, 0.1514, 8.32e-6), (30.76, 4.52e-4, 0.0633), (27.47, 4.05e-4, 0.125)),
    ("opt-66b", 8): Coefficients((25.49, 0.1066, 3.39e-6), (23.16, 2.27e-4, 0.0480), (21.72, 3.76e-4, 0.0898)),
}
"""Of models by name and tensor parallelism, as the repository's file of profiles has them."""


def coefficients_of(model: str, tp: int) -> Coefficients:
    """Published constants. Raises ConfigError that lists them."""
    found = COEFFICIENTS.get((model.lower(), tp))
    if found is None:
        known = ", ".join(f"{name} with tp {count}" for name, count in COEFFICIENTS)
        raise ConfigError(f"DistServe has no constants of {model} with tp {tp}; it has {known}")
    return found


@dataclass(frozen=True)
class PaperModel:
    """The latencies of DistServe's simulator. See StepTime.

    pp  stages of the pipeline. A prompt passes all of them one after the other. Decoding sequences are divided into as
        many batches, of which each stage computes one, so that a step is the way of one batch through all stages
    """

    coefficients: Coefficients = COEFFICIENTS["opt-13b", 1]
    pp: int = 1

    def __post_init__(self) -> None:
        if self.pp < 1:
            raise ConfigError(f"pp is {self.pp}; a pipeline has at least 1 stage")

    @property
    def origin(self) -> Origin:
        """Fitted by the authors, to steps of their engine."""
        return Origin.FITTED

    def seconds(self, work: StepWork) -> float:
        """See StepTime."""
        found = self.pp * self._stage(work) if work.prompt_rows else 0.0
        if work.decode_rows:
            batches = min(self.pp, work.decode_rows)
            found += MILLI * self.coefficients.decode_ms(work.decode_rows / batches, work.context / batches)
        return found

    def occupancy(self, work: StepWork) -> float:
        """See StepTime. Prompts keep a stage busy for its share and a millisecond per stage."""
        return self._stage(work) if work.prompt_rows and not work.decode_rows else self.seconds(work)

    def quiet(self, work: StepWork, count: int) -> float:
        """See StepTime. Exact, because a step is linear in its context."""
        assert not work.prompt_rows, f"a quiet step with {work.prompt_rows} rows of prompts"
        batches = min(self.pp, max(1, work.decode_rows))
        _, token, _ = self.coefficients.line(work.decode_rows / batches)
        growth = MILLI * token * work.decode_rows / batches
        return count * self.seconds(work) + growth * (count * (count - 1) / 2)

    @property
    def knots(self) -> tuple[int, ...]:
        """See StepTime."""
        return ()

    def covers(self, work: StepWork) -> bool:
        """See StepTime: prompts or decoding sequences, with lengths that OPT has."""
        if work.prompt_rows and work.decode_rows:
            return False
        return work.context <= MOST_TOKENS * work.decode_rows and work.prompt_rows <= MOST_TOKENS * work.num_prompts

    def _stage(self, work: StepWork) -> float:
        """Seconds of prompts in one stage. A pair of query and key is half a square of a length."""
        whole = self.coefficients.prefill_ms(work.prompt_rows, 2 * work.prompt_pairs)
        return MILLI * (whole / self.pp + self.pp)


@dataclass(frozen=True)
class AppendixModel:
    """The latencies of the paper's Appendix A, on one GPU. See StepTime.

        prefill = c1 (4 t h^2 + 2 t h m) + c2 3 h t2 / b + c3        decode = c4 (4 h^2 + 2 h m) + c5 3 h t

    t is the sum of the lengths of prompts, or of contexts, and t2 the sum of the squared ones. The products of a decode
    step take as long as the reads of the weights, whatever the number of sequences.

    hidden, ffn  h and m, widths of the model
    tile         b, tokens of a block of the attention kernel
    c1 .. c5     seconds: of a multiplication, of a token's attention, of a step; of a weight, of a read of the cache
    """

    hidden: int
    ffn: int
    tile: int
    c1: float
    c2: float
    c3: float
    c4: float
    c5: float

    @classmethod
    def of(cls, coefficients: Coefficients, hidden: int, ffn: int, tile: int) -> AppendixModel:
        """The constants that say the same as the simulator's, for few sequences and without the time of a sequence."""
        (fixed, token, square), (step, context, _) = coefficients.prefill, coefficients.small
        weights, reads = 4 * hidden**2 + 2 * hidden * ffn, 3 * hidden
        return cls(
            hidden=hidden,
            ffn=ffn,
            tile=tile,
            c1=MILLI * token / weights,
            c2=MILLI * square * tile / reads,
            c3=MILLI * fixed,
            c4=MILLI * step / weights,
            c5=MILLI * context / reads,
        )

    @property
    def origin(self) -> Origin:
        """Fitted by the authors, to steps of their engine."""
        return Origin.FITTED

    def seconds(self, work: StepWork) -> float:
        """See StepTime."""
        weights, reads, found = 4 * self.hidden**2 + 2 * self.hidden * self.ffn, 3 * self.hidden, 0.0
        if work.prompt_rows:
            attention = self.c2 * reads * 2 * work.prompt_pairs / self.tile
            found += self.c1 * weights * work.prompt_rows + attention + self.c3
        if work.decode_rows:
            found += self.c4 * weights + self.c5 * reads * work.context
        return found

    def occupancy(self, work: StepWork) -> float:
        """See StepTime. One GPU is no pipeline."""
        return self.seconds(work)

    def quiet(self, work: StepWork, count: int) -> float:
        """See StepTime. Exact, because a step is linear in its context."""
        assert not work.prompt_rows, f"a quiet step with {work.prompt_rows} rows of prompts"
        growth = self.c5 * 3 * self.hidden * work.decode_rows
        return count * self.seconds(work) + growth * (count * (count - 1) / 2)

    @property
    def knots(self) -> tuple[int, ...]:
        """See StepTime."""
        return ()

    def covers(self, work: StepWork) -> bool:
        """See StepTime: prompts or decoding sequences."""
        return not (work.prompt_rows and work.decode_rows)
