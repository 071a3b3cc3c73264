"""scripts/recorded.py compares what does not depend on the speed of the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from recorded import masks

    return masks


def test_a_prefix_that_was_computed_again_is_the_same_answer_as_one_from_the_disk(masks: Any) -> None:
    def shown(text: str, num_cached: int) -> Any:
        usage = {"prompt_tokens": 370, "cached_tokens": num_cached, "cached_tokens_by_tier": {"disk": num_cached}}
        line = json.dumps({"id": 1, "text": text, "usage": usage})
        return masks.output_of(line, "generated", masks.Marks())

    assert shown("a", 320) == shown("a", 0)
    assert shown("a", 320) != shown("b", 320)
    assert shown("a", 320)[0]["usage"] == {"prompt_tokens": 370}
