"""The embedded model, for tests that need real weights or a real vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.models.embedded import cached_path


def embedded_gguf() -> Path:
    """The embedded model's file; skips the test when it has not been pulled."""
    path = cached_path()
    if path is None:
        pytest.skip("needs the embedded model; run `quire pull smollm2`")
    return path
