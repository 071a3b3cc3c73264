"""The model that offloading is planned for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.models.weights import open_model, stored_shape
from quire.offload.planning.subject import Subject
from tests.tiny_models import save_tiny


@pytest.mark.parametrize(
    "options", [{}, {"retain.budget": 0.5, "retain.profile_rows": 48}, {"scheduler.token_budget": 1300}], ids=str
)
def test_a_plan_has_the_token_budget_of_the_engine(tmp_path: Path, options: dict[str, Any]) -> None:
    model = save_tiny(tmp_path / "model")
    given = {"cache.memory": "16MiB", "runtime.device": "cpu", "scheduler.max_running": 1000, **options}
    config = EngineConfig.from_options(given)
    with open_model(model) as checkpoint:
        resolved, _ = resolve(config, checkpoint.shape, checkpoint)
    assert Subject.of(str(model), config).token_budget == resolved.scheduler.token_budget


def test_a_config_without_weights_has_the_sizes_of_a_checkpoint_in_bfloat16(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    shape, stored = stored_shape(str(model / "config.json"))
    assert set(stored.values()) == {"BF16"} and shape.tensor_shapes == stored_shape(str(model))[0].tensor_shapes
    config = EngineConfig.from_options({"model.dtype": "bfloat16", "runtime.device": "cpu"})
    assert Subject.of(str(model / "config.json"), config).sizes == Subject.of(str(model), config).sizes
