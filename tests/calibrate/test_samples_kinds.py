"""Attention while samples are gathered is that of the model, whatever the kinds of its layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.calibrate.samples import CapturePlan
from tests.models.test_decoder import load, prefill, random_tokens
from tests.tiny_models import OF_KINDS, save_tiny


@pytest.mark.parametrize("family", [*OF_KINDS, "mistral"])
@torch.inference_mode()
def test_logits_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    model = load(save_tiny(tmp_path, family))
    tokens = random_tokens(model.shape.vocab_size, 100, 1)
    plan = CapturePlan(model.shape, len(tokens), "cpu")
    found = model.head(model.hidden(tokens, torch.arange(len(tokens)), plan))
    torch.testing.assert_close(found, prefill(model, tokens, len(tokens)), atol=1e-4, rtol=0)
