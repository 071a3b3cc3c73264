"""The text of a rotation is a part of the namespaces in disk folders and exported prefixes of earlier builds."""

from __future__ import annotations

from quire.models.rope import Rope


def test_rotations_of_earlier_builds_have_their_text() -> None:
    assert repr(Rope(theta=10000.0, dim=64)) == (
        "Rope(theta=10000.0, dim=64, kind='default', factor=1.0, low_freq_factor=1.0, high_freq_factor=4.0,"
        " original_context=0, factors=())"
    )


def test_other_rotations_have_other_texts() -> None:
    plain = Rope(theta=10000.0, dim=64)
    others = [
        Rope(theta=10000.0, dim=64, rotated=32),
        Rope(theta=10000.0, dim=64, kind="yarn", factor=4.0, original_context=32),
        Rope(theta=10000.0, dim=64, kind="yarn", factor=4.0, original_context=32, magnitude=2.0),
    ]
    assert len({repr(each) for each in (plain, *others)}) == 4
