"""Python mirrors of the kernels' structures: a differing field is found before the kernels read it."""

from __future__ import annotations

import ctypes

import pytest

from quire.attention.cpu import _Plan
from quire.attention.cpu_layers import LayerRecord, LayoutRecord
from quire.attention.nuq import NuqHead
from quire.errors import QuireError
from quire.kernels import runtime
from quire.models.cpu_panels import Matrix, _Part, _Rows
from quire.models.cpu_stack import _StackKind, _StackLayer, _StackNorm, _StackRows

MIRRORS = (
    _Plan,
    LayerRecord,
    LayoutRecord,
    NuqHead,
    _Part,
    Matrix,
    _Rows,
    _StackKind,
    _StackLayer,
    _StackNorm,
    _StackRows,
)
FIELDS = {mirror.__name__: list(mirror._fields_) for mirror in MIRRORS}


def refusal(name: str, fields: list) -> str:
    """What is said of a mirror with these fields; empty: it is taken."""
    mirror = type(name, (ctypes.Structure,), {"_fields_": fields})
    try:
        runtime.check_mirrors(mirror)
    except QuireError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", FIELDS)
def test_a_mirror_is_taken_as_it_is_and_refused_with_any_one_change(name: str) -> None:
    fields = FIELDS[name]
    assert refusal(name, fields) == ""
    for place, (field, kind) in enumerate(fields):
        before, after = fields[:place], fields[place + 1 :]
        assert f" {field} (byte " in refusal(name, [*before, ("renamed", kind), *after])
        assert refusal(name, [*before, (field, ctypes.c_char * (ctypes.sizeof(kind) + 1)), *after])
        assert f" {field} (byte " in refusal(name, before + after)
        assert " added (byte " in refusal(name, [*before, ("added", kind), (field, kind), *after])
        for other, (second, same) in enumerate(after, place + 1):
            if ctypes.sizeof(same) == ctypes.sizeof(kind):
                swapped = list(fields)
                swapped[place], swapped[other] = fields[other], fields[place]
                assert f" {field} (byte " in (said := refusal(name, swapped)) and f" {second} (byte " in said


def test_the_message_names_both_fields_where_they_first_differ() -> None:
    kind, outputs = FIELDS["_Part"][1:]
    assert refusal("Part", [FIELDS["_Part"][0], outputs, kind]) == (
        "the kernels' Part has kind (byte 8, 8 bytes) where its Python mirror has outputs (byte 8, 8 bytes)"
    )
    assert refusal("Part", FIELDS["_Part"][:2]) == (
        "the kernels' Part has outputs (byte 16, 8 bytes) where its Python mirror has its end (byte 16)"
    )


def test_every_structure_that_the_kernels_export_has_a_mirror() -> None:
    """The names are read from the sources: a table without a mirror is compared by nobody."""
    from quire.kernels.build import SOURCE_DIR

    exported = {
        line.partition("(")[2].rstrip(")\n")
        for path in SOURCE_DIR.glob("*.cpp")
        for line in path.read_text().splitlines()
        if line.startswith("QUIRE_EXPORT_FIELDS(")
    }
    assert exported == {mirror.__name__.lstrip("_") for mirror in MIRRORS}
