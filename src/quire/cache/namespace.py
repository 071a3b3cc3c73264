"""What must be equal, besides the tokens, for two sequences to read the same pages."""

from __future__ import annotations

from dataclasses import dataclass

FORMAT_VERSION = 3
"""Of page images; docs/page-format.md."""


@dataclass(frozen=True)
class Namespace:
    """Everything a page's bytes depend on but the tokens up to it, and whose they are. One prefix tree a namespace.

    Retention is not in it: what enters the tree is always complete.

    model        the checkpoint's fingerprint, see `models.fingerprint`
    dtype        of weights and activations
    weights      native, dequantized or g4: the products differ
    adapter      what changes the weights per request; empty: nothing
    codec        of sealed pages
    calibration  hash of what the codec was calibrated with; empty where it needs none
    strict       whether chunks attend to earlier ones as stored
    rope         rotary settings, as text
    version      of page images
    salt         whose requests may share: those with an equal one
    """

    model: str = ""
    dtype: str = ""
    weights: str = ""
    adapter: str = ""
    codec: str = ""
    calibration: str = ""
    strict: bool = True
    rope: str = ""
    version: int = FORMAT_VERSION
    salt: str = ""
