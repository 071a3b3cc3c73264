"""What an admission leaves to others."""

from __future__ import annotations

import pytest

from tests.cache.test_tree import Holder, chunk, make_manager, run_prompt


@pytest.mark.parametrize(("chunks", "fits"), [(5, False), (6, True)])
def test_an_admission_leaves_each_sequence_a_chunk_to_grow_into_the_new_one_too(chunks: int, fits: bool) -> None:
    manager = make_manager(chunks)
    first, second = Holder(chunk(1) + chunk(2)), Holder(chunk(3) + chunk(4))
    assert run_prompt(manager, first)
    assert manager.admit(second) == fits
    manager.check()


def test_a_sequence_that_is_alone_may_take_everything() -> None:
    manager = make_manager(2)
    assert run_prompt(manager, Holder(chunk(1) + chunk(2)))
    assert not manager.admit(Holder(chunk(3)))
