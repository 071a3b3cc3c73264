"""The namespace of chunks: what must be equal, besides the tokens, for two sequences to read the same pages."""

from __future__ import annotations

from dataclasses import dataclass

FORMAT_VERSION = 3
"""Version of page images; docs/reference/page-format.md."""


@dataclass(frozen=True)
class Namespace:
    """Everything that a page's bytes depend on besides the tokens up to it; and the salt. Requests share segments only
    within a namespace.

    Retention is not part of it, because only complete chunks enter the tree. Nor are sparse values: with them, no chunk
    with tokens of an answer enters it (`KeepAll.replays`), and prompts read all values.

    model        the checkpoint's fingerprint, see `models.fingerprint`
    dtype        type of weights and activations
    weights      native, dequantized or g4: the products differ
    adapter      name of the request's adapter of the weights; empty: none
    codec        codec of sealed pages
    calibration  hash of the codec's calibration; empty if it needs none
    strict       whether chunks attend to earlier ones as stored
    rope         rotary settings, as text
    version      version of page images
    salt         only requests with equal salts share
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

    def __hash__(self) -> int:
        # Namespaces of one engine differ by their salts alone, and every sequence looks its namespace up.
        return hash(self.salt)
