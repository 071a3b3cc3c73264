"""The paper's hardware, a T4 with 208 GB of memory and an SSD, as the paper's appendix and its public code have it.

The constants are the public code's, in GiB/s and TFLOPS, fitted by its authors.

Source: FlexGen, arXiv 2303.06865, Appendix A.3, and experimental/cost_model.py of its repository.
"""

from __future__ import annotations

import math

from quire.offload.planning.costs import Form, Options, Rates, TieredMachine, TierLink, Traffic
from quire.offload.units import TIERS

GIB = float(1 << 30)
TERA = 1e12

FORMS = {Form.MAX: Options(), Form.SUMS: Options(Form.SUMS, slack=0.8, hidden_tiers=2)}
"""The paper's model, and the one of its public code."""

OVERALL = 12.89 * GIB
STORE_CACHE, STORE_HIDDEN = 0.97 * GIB, 4.82 * GIB
FROM_DISK = 0.473 * GIB
TO_DISK_CACHE, TO_DISK_HIDDEN, TO_DISK_LATER = 0.746 * GIB, 2.015 * GIB, 2.015 * GIB
DISK_WEIGHTS = 0.95
"""Share of the disk's bandwidth that weights reach while decoding; the public code alone has it."""

PRODUCTS, ATTENTION = (21.24 * TERA, 4.3 * TERA), (9.97 * TERA, 0.079 * TERA)
"""While prompts are computed, and while decoding."""
CPU_ATTENTION = 0.0123 * TERA
SMALL_BATCH = (0.0168, 0.0328, 0.0621)
"""Coefficients of the loss of CPU attention with small micro-batches and narrow models."""


def t4(hidden: int, micro_batch: int, capacities: tuple[float, float, float], form: Form) -> TieredMachine:
    """The paper's machine, with the speeds of a micro-batch. hidden: width of the model's rows."""
    narrow = max(0.0, math.log2(4096 / hidden))
    small = max(0.0, math.log2(64 / micro_batch))
    both, of_batch, of_width = SMALL_BATCH
    cpu = CPU_ATTENTION * max(0.1, 1 + both * small * narrow - of_batch * small - of_width * narrow)
    weights = FROM_DISK * (DISK_WEIGHTS if form is Form.SUMS else 1)
    first = TierLink(Traffic.alike(OVERALL), Traffic(OVERALL, STORE_CACHE, STORE_HIDDEN))
    prefill = TierLink(Traffic.alike(FROM_DISK), Traffic(FROM_DISK, TO_DISK_CACHE, TO_DISK_HIDDEN))
    decode = TierLink(Traffic(weights, FROM_DISK, FROM_DISK), Traffic.alike(TO_DISK_LATER))
    return TieredMachine(
        tiers=TIERS,
        capacities=capacities,
        prefill=Rates((first, prefill), PRODUCTS[0], ATTENTION[0]),
        decode=Rates((first, decode), PRODUCTS[1], ATTENTION[1], cpu),
    )
