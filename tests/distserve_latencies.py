"""The published constants of DistServe's latency model, of OPT on A100 GPUs with 80 GB.

They were fitted to DistServe's engine; this engine has no part in them. A step has prompts or decoding sequences.
Decoding follows one straight line below 95 sequences and another one from there on: 96 take less time than 94.

Source: DistServe, arXiv 2401.09670, Appendix A, and simdistserve/estimators of its repository.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError

Line = tuple[float, float, float]


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
        step, token, sequence = self.small if sequences < self.threshold else self.large
        return step + token * context + sequence * sequences


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
