"""The costs of fetching and computing, fitted to measurements. All are linear, so that fitting is a few sums:

fetching  seconds = LATENCY + bytes / speed             bytes: also of the transfers before it
prefill   seconds = a * tokens + b * tokens * position  position: the mean one; attention reads all tokens before it
decoding  seconds = c * tokens                          c: of a step of the whole batch
"""

from __future__ import annotations

import math

LATENCY = 0.002
"""Seconds from the start of a transfer until bytes arrive: a few reads wait for their turn, and threads wake up."""

WEIGHT = 0.2
"""Weight of a new measurement of a speed. The speed of a disk changes with its other users."""

DECAY = 0.97
"""Weight of the earlier measurements of prefill, after each new one."""

LEAST_BYTES, LEAST_TOKENS = 1 << 20, 48
"""Smaller transfers and slices say more about latency than about speed."""


class Costs:
    """Estimates of the seconds of a transfer, of a prompt and of decoded tokens.

    speed  bytes a second; None before the first measurement
    """

    def __init__(self) -> None:
        self.speed: float | None = None
        self._decode: float | None = None
        # Sums of products over past slices: of the tokens n, of n times their mean position m, and of seconds t.
        self._nn, self._nm, self._mm, self._nt, self._mt = (0.0,) * 5

    def note_fetch(self, num_bytes: int, seconds: float) -> None:
        """Records the seconds of a transfer. num_bytes: its bytes and those of the transfers before it."""
        if num_bytes >= LEAST_BYTES:
            speed = num_bytes / max(seconds - LATENCY, 1e-4)
            known = self.speed
            self.speed = speed if known is None else math.exp(_mixed(math.log(known), math.log(speed)))

    def note_prefill(self, num_tokens: int, tokens_and_positions: float, seconds: float) -> None:
        """Records the seconds of slices with `num_tokens` tokens in all.

        tokens_and_positions  the sum over slices of tokens times their mean position
        """
        if num_tokens < LEAST_TOKENS:
            return
        n, m = num_tokens, tokens_and_positions
        self._nn, self._nm, self._mm = (
            old * DECAY + new for old, new in ((self._nn, n * n), (self._nm, n * m), (self._mm, m * m))
        )
        self._nt, self._mt = self._nt * DECAY + n * seconds, self._mt * DECAY + m * seconds

    def forget_prefill(self) -> None:
        """Drops the measurements of prefill."""
        self._nn = self._nm = self._mm = self._nt = self._mt = 0.0

    def note_decode(self, seconds: float) -> None:
        """Records the seconds of a step in which every sequence got one token."""
        self._decode = seconds if self._decode is None else _mixed(self._decode, seconds)

    def fetch(self, num_bytes: int) -> float | None:
        """Seconds until the last of `num_bytes` arrives; None if nothing was fetched yet."""
        return None if self.speed is None else LATENCY + num_bytes / self.speed

    def prefill(self, start: int, num_tokens: int) -> float | None:
        """Seconds of the prefill of the tokens from position `start` on; None if no prompt was computed yet."""
        if not self._nn:
            return None
        determinant = self._nn * self._mm - self._nm**2
        a, b = self._nt / self._nn, 0.0
        if determinant > 1e-3 * self._nn * self._mm:  # else the slices are too similar to show the effect of positions
            b = (self._nn * self._mt - self._nm * self._nt) / determinant
            a_beside = (self._nt - b * self._nm) / self._nn
            a, b = (a_beside, b) if a_beside > 0 and b > 0 else (a, 0.0)
        return num_tokens * (a + b * (start + num_tokens / 2))

    def decode(self, num_tokens: int) -> float | None:
        """Seconds of `num_tokens` decode steps; None before the first measurement."""
        return None if self._decode is None else num_tokens * self._decode


def _mixed(known: float, new: float) -> float:
    return (1 - WEIGHT) * known + WEIGHT * new
