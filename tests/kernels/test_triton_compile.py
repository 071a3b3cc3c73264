"""The Triton kernels compiled for sm_90 without a GPU: no spills, loads of 16 bytes, and the required memory ordering.

Run with -s to see registers, shared memory and instruction counts.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest
import torch

from tests.effort import combine

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed")

import triton

from quire.attention.kernels.attend import attend
from quire.attention.kernels.encode import encode_groups, encode_nuq
from quire.attention.kernels.encoded import attend_encoded
from quire.attention.kernels.launch import (
    WIDE,
    Launch,
    common_launch,
    encoded_launches,
    launches,
    profile_launch,
    single_profile_launch,
)
from quire.attention.kernels.profile import keep_keys, place_queries, recover, sum_columns, sum_single_columns
from quire.attention.kernels.write import write
from quire.attention.triton_plan import ENCODE_WARPS, WRITE_ROWS
from quire.attention.triton_profile import PLACE_ROWS
from quire.cache.codecs.group import GroupCodec
from quire.cache.codecs.nuq import NuqCodec
from quire.cache.ledger import PAGE_TOKENS, UNIT
from quire.models import triton_ops, triton_packed
from quire.models.quants import FORMATS

from .ahead import POINTERS, Compiled, compile_for

HOPPER = 90
REGISTERS, SHARED_BYTES = 65536, 227 << 10  # of a multiprocessor
GROUP, NUQ = GroupCodec.kernel_id, NuqCodec.kernel_id
KINDS = ("append", "append-seeded", "short", "short-seeded", "tall")
COMMON = ("common-2", "common-8", "common-16")
"""Shared runs of decode steps of so many rows, in tiles of 16, 32 and, as tall, 64 queries for groups of 4."""


IS_OLDER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
"""Whether this compiler is older than the one that is pinned: it makes a few instructions more."""


@functools.cache
def attention(
    kind: str,
    dtype: torch.dtype,
    group: int,
    dim: int,
    window: int = 0,
    rotate: bool = True,
    masked: bool = False,
    soft_cap: float = 0.0,
) -> tuple[Compiled, int]:
    """The attention kernel and its warps. kind: one of KINDS, or "common-" and the rows of a step that shares. masked:
    with masks of pages, and the lse of rows.
    """
    short, seeded, tall, tallest = launches(dtype, group, dim)
    launch = tall if kind == "tall" else seeded if kind.endswith("-seeded") else short
    if kind.startswith("common-"):
        warps = 4 if dim <= WIDE else tallest.warps
        launch = common_launch(tallest, group, int(kind.removeprefix("common-")), warps)
    arguments = attention_arguments(kind, dtype, group, dim, window, rotate, soft_cap) | {"ROWS": launch.rows}
    arguments["OVERLAPS"] = kind.startswith(("append", "common"))
    if masked:
        arguments |= {"masks": "*i64", "lse": "*fp32"}
    compiled = compile_for(HOPPER, attend, arguments, warps=launch.warps, stages=launch.stages)
    print(
        f"\nattend {kind} {dtype} G{group} D{dim}{' masked' * masked}: {describe(compiled)}, {launch.rows} rows,"
        f" {launch.warps} warps"
    )
    return compiled, launch.warps


def attention_arguments(
    kind: str, dtype: torch.dtype, group: int, dim: int, window: int, rotate: bool, soft_cap: float = 0.0
) -> dict[str, Any]:
    """What both attention kernels take, for a model with 32 layers and 8 kv heads."""
    append, seeded = kind.startswith("append"), kind.endswith("-seeded")
    pointer = POINTERS[str(dtype).removeprefix("torch.")]
    arguments: dict[str, Any] = dict.fromkeys(("q", "out", "arena"), pointer)
    arguments |= dict.fromkeys(("new_k", "new_v"), pointer if append else None)
    arguments |= dict.fromkeys(("table", "positions", "indices", "pieces", "entries", "arrivals"), "*i32")
    arguments |= dict.fromkeys(("reads", "masks", "lse"))
    arguments |= dict.fromkeys(("partial_o", "partial_lse"), "*fp32")
    arguments |= dict.fromkeys(("cos", "sin"), "*fp32" if rotate else None)
    arguments |= {"first_lane": "i32", "q_stride": "i32:16", "k_stride": "i32:16", "v_stride": "i32:16"}
    arguments |= {
        "LANES": 256,
        "H": 8,
        "G": group,
        "D": dim,
        "P": PAGE_TOKENS,
        "DP": triton.next_power_of_2(dim),
        "UNIT": UNIT // dtype.itemsize,
        "SCALE": math.log2(math.e) / math.sqrt(dim),
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
        "ROTATE": rotate,
        "APPEND": append,
        "SEEDED": seeded,
    }
    return arguments


def describe(compiled: Compiled) -> str:
    c = compiled
    return f"{c.registers} registers, {c.stack_bytes} bytes of local memory, {c.shared_bytes} of shared"


@combine(kind=KINDS + COMMON, dim=[64, 128], masked=[False, True])
def test_attention_spills_nothing_and_copies_pages_16_bytes_at_a_time(kind: str, dim: int, masked: bool) -> None:
    compiled, warps = attention(kind, torch.bfloat16, 4, dim, masked=masked)
    assert compiled.stack_bytes == 0 and not compiled.count(r"\b(LDL|STL)\b"), describe(compiled)
    copies = compiled.count(r"\bLDGSTS\.")
    assert copies > 0 and compiled.count(r"\bLDGSTS\.\S*128") == copies
    # Besides pages and queries only scalars are loaded: piece, positions, page ids, and one lse a row of a merge.
    assert compiled.count(r"\bSTG\.\S*128") >= 4
    assert compiled.registers * warps * 32 <= REGISTERS and compiled.shared_bytes <= SHARED_BYTES, describe(compiled)


@pytest.mark.parametrize("kind", KINDS + COMMON)
def test_attention_runs_on_the_tensor_cores(kind: str) -> None:
    compiled, _ = attention(kind, torch.bfloat16, 4, 128)
    # Warp groups multiply 64 rows at a time.
    groups = kind in ("tall", "common-16")
    assert compiled.count(r"\bHGMMA\." if groups else r"\bHMMA\.") > 0


def test_the_second_launch_of_a_decode_step_begins_early_and_waits_before_it_reads_partials() -> None:
    first, _ = attention("common-16", torch.bfloat16, 4, 128)
    assert first.ptx.count("griddepcontrol.launch_dependents") == 1 and "griddepcontrol.wait" not in first.ptx
    second, _ = attention("append-seeded", torch.bfloat16, 4, 128)
    before, after = second.ptx.split("griddepcontrol.wait")
    assert before.count("mma.sync") > 0, "its own chunks are attended to after the wait"
    assert "ld.global.cg" not in before and "ld.global.cg" in after, "partials are read before the wait"


@pytest.mark.parametrize("kind", KINDS)
def test_partials_are_released_before_the_arrival_and_read_past_the_first_level_cache(kind: str) -> None:
    compiled, _ = attention(kind, torch.bfloat16, 4, 128)
    assert compiled.ptx.count("atom.global.gpu.acq_rel") == 1
    before, after = compiled.ptx.split("atom.global.gpu.acq_rel")
    assert before.rindex("bar.sync") > before.rindex("st.global"), "a thread's stores may come after the arrival"
    first_load = re.search(r"ld\.global", after)
    assert first_load is not None and after.index("bar.sync") < first_load.start(), (
        "a thread may read before the arrival is known"
    )
    assert not re.search(r"ld\.global(?!\.cg)", after), "a merge may read a stale line"


OTHER_SHAPES = [
    (torch.float16, 8, 96, 0, True),
    (torch.bfloat16, 1, 80, 4096, True),
    (torch.float32, 3, 64, 0, True),
    (torch.bfloat16, 3, 16, 0, False),
    (torch.bfloat16, 32, 128, 0, True),
]
"""Type, group, head size, window, and whether keys are rotated."""


@combine(strength=1, kind=KINDS, shape=OTHER_SHAPES)
def test_attention_compiles_for_other_shapes(kind: str, shape: tuple[torch.dtype, int, int, int, bool]) -> None:
    dtype, _, dim, _, _ = shape
    compiled, _ = attention(kind, *shape)
    # Some compilers keep a few scalars of the smallest head in local memory, and float32 runs without tensor cores.
    most = 8 if IS_OLDER else 0
    assert compiled.stack_bytes <= most or dtype == torch.float32 or dim < 64, describe(compiled)


WIDE_SHAPES = [(torch.bfloat16, 4, 256), (torch.bfloat16, 8, 512), (torch.float32, 4, 256), (torch.float32, 4, 512)]


@combine(
    kind=("append", "append-seeded", "tall", "common-2", "common-8"),
    shape=WIDE_SHAPES,
    masked=[False, True],
)
def test_attention_of_large_heads_fits_a_multiprocessor(
    kind: str, shape: tuple[torch.dtype, int, int], masked: bool
) -> None:
    dtype, group, dim = shape
    compiled, warps = attention(kind, dtype, group, dim, 1024 * masked, masked=masked)
    assert compiled.registers * warps * 32 <= REGISTERS and compiled.shared_bytes <= SHARED_BYTES, describe(compiled)
    # In float32, tiles of 512 channels are more than there are registers for.
    assert compiled.stack_bytes == 0 or (dtype == torch.float32 and dim == 512), describe(compiled)
    if dtype != torch.float32:
        copies = compiled.count(r"\bLDGSTS\.")
        assert copies > 0 and compiled.count(r"\bLDGSTS\.\S*128") == copies


@pytest.mark.parametrize("kind", ["append", "tall"])
def test_a_soft_cap_is_computed_in_registers_and_costs_nothing_without_one(kind: str) -> None:
    without, warps = attention(kind, torch.bfloat16, 4, 128)
    capped, _ = attention(kind, torch.bfloat16, 4, 128, soft_cap=72.0)
    assert capped.stack_bytes == 0 and not capped.count(r"\b(LDL|STL)\b"), describe(capped)
    assert capped.registers * warps * 32 <= REGISTERS and capped.shared_bytes <= SHARED_BYTES, describe(capped)
    # A score takes an exponential and an inverse more, and no call of a library.
    assert capped.count(r"\bMUFU\.EX2") > without.count(r"\bMUFU\.EX2")
    assert not capped.count(r"\bCALL\b") and not without.count(r"\bMUFU\.TANH")


def profile_arguments(
    kernel: Any, dtype: torch.dtype, group: int, dim: int, rows: int, codec: int = 0, soft_cap: float = 0.0
) -> dict[str, Any]:
    """What a kernel of profiles takes, for a model with 32 layers and 8 kv heads. codec: of sealed chunks, or 0."""
    pointer = POINTERS[str(dtype).removeprefix("torch.")]
    arguments: dict[str, Any] = dict.fromkeys(("q", "queries", "kept_queries", "arena"), pointer)
    arguments |= dict.fromkeys(("lse", "kept_lse", "cos", "sin", "sums", "out"), "*fp32")
    arguments |= dict.fromkeys(("kept_indices", "positions", "table", "columns", "num_columns", "chunks"), "*i32")
    arguments |= dict.fromkeys(("masks", "kept", "local"), "*i64") | {"q_stride": "i32:16"}
    codes = dict.fromkeys(("slot_positions", "bases", "heads", "pairs"), "*i32") | {"key_codebooks": "*fp32"}
    arguments |= codes | PAGE_POINTERS
    if codec != NUQ:
        arguments |= dict.fromkeys(("heads", "pairs", "key_codebooks"))
    if not codec:
        arguments |= dict.fromkeys([*codes, *PAGE_POINTERS])
        if kernel is not place_queries:
            arguments |= dict.fromkeys(("cos", "sin"))
    arguments |= dict.fromkeys(("staged", "first_source", "first_target", "first_page"), "i64") | {"num_pages": "i32"}
    arguments |= {"PAGE": 2 * PAGE_TOKENS * dim * dtype.itemsize // UNIT, "SINKS": int(codec == NUQ), "KIND": codec}
    arguments |= {"HP": max(16, triton.next_power_of_2(dim // 2)), "KEY_PARTS": 7, "MOST_KEY_SLOTS": 1}
    numbers = (
        "first_lane",
        "num_rows",
        "num_kept",
        "first_kept",
        "count",
        "first_position",
        "first_start",
        "num_words",
    )
    arguments |= dict.fromkeys(numbers, "i32") | {"LANES": 256, "H": 8, "G": group, "D": dim, "P": PAGE_TOKENS}
    arguments |= {
        "DP": triton.next_power_of_2(dim),
        "ROWS": rows,
        "UNIT": UNIT // dtype.itemsize,
        "WINDOW": 0,
        "SOFT_CAP": soft_cap,
    }
    arguments |= {"SCALE": math.log2(math.e) / math.sqrt(dim), "ROTATE": codec > 0 or kernel is place_queries}
    return {name: arguments[name] for name in kernel.arg_names}


PROFILED_SHAPES = [
    (torch.bfloat16, 4, 128),
    (torch.bfloat16, 3, 64),
    (torch.float16, 8, 80),
    (torch.float32, 3, 64),
    (torch.bfloat16, 4, 256),
    (torch.bfloat16, 4, 512),
    (torch.float32, 4, 512),
]


@combine(
    strength=1,
    kernel=[sum_columns, sum_single_columns, recover, place_queries],
    shape=PROFILED_SHAPES,
    soft_cap=[0.0, 72.0],
)
def test_profiles_spill_nothing_and_copy_keys_and_queries_16_bytes_at_a_time(
    kernel: Any, shape: tuple[torch.dtype, int, int], soft_cap: float
) -> None:
    dtype, group, dim = shape
    launch = profile_launch(dtype, group, dim)
    if kernel is place_queries:
        launch = Launch(PLACE_ROWS, 4, 3)
    elif kernel is sum_single_columns:
        launch = single_profile_launch(dtype, group, dim)
    arguments = profile_arguments(kernel, dtype, group, dim, launch.rows, soft_cap=soft_cap)
    compiled = compile_for(HOPPER, kernel, arguments, warps=launch.warps, stages=launch.stages)
    print(f"\n{kernel.__name__} {dtype} G{group} D{dim}: {describe(compiled)}, {launch}")
    assert compiled.stack_bytes == 0 and compiled.shared_bytes <= SHARED_BYTES, describe(compiled)
    assert compiled.registers * launch.warps * 32 <= REGISTERS
    if kernel is place_queries:
        return
    copies = compiled.count(r"\bLDGSTS\.")
    assert copies > 0 and compiled.count(r"\bLDGSTS\.\S*128") == copies
    if dtype != torch.float32:
        products = r"\bHMMA\." if kernel is sum_single_columns else r"\bHGMMA\."
        assert compiled.count(products) > 0, "products run outside the tensor cores"


ENCODED_SHAPES = [
    (NUQ, torch.bfloat16, 4, 128),
    (GROUP, torch.bfloat16, 3, 64),
    (NUQ, torch.float32, 3, 80),
    (NUQ, torch.bfloat16, 4, 256),
    (GROUP, torch.bfloat16, 4, 512),
]


@combine(strength=1, kernel=[sum_columns, sum_single_columns, recover, keep_keys], shape=ENCODED_SHAPES)
def test_profiles_of_encoded_pages_fit_a_multiprocessor(kernel: Any, shape: tuple[int, torch.dtype, int, int]) -> None:
    codec, dtype, group, dim = shape
    launch = (
        single_profile_launch(dtype, group, dim) if kernel is sum_single_columns else profile_launch(dtype, group, dim)
    )
    arguments = profile_arguments(kernel, dtype, group, dim, launch.rows, codec)
    compiled = compile_for(HOPPER, kernel, arguments, warps=launch.warps, stages=launch.stages)
    print(f"\n{kernel.__name__} codec {codec} {dtype} G{group} D{dim}: {describe(compiled)}, {launch}")
    assert compiled.registers * launch.warps * 32 <= REGISTERS and compiled.shared_bytes <= SHARED_BYTES
    assert compiled.stack_bytes <= 32 * (dim > 256) or dtype == torch.float32, describe(compiled)


PAGE_POINTERS = {"words": "*i32", "sidecars": "*i32"}


@functools.cache
def encoded_attention(
    kind: str,
    codec: int,
    parts: int,
    slots: int,
    dtype: torch.dtype,
    group: int,
    dim: int,
    rotate: bool = True,
    masked: bool = False,
    soft_cap: float = 0.0,
) -> tuple[Compiled, int]:
    """The kernel for encoded pages and its warps. parts: of the widths of keys and values, the powers of two. masked:
    as of `attention`, with positions of slots.
    """
    short, _, tall, tallest = encoded_launches(dtype, group, dim, codec == NUQ)
    launch = tall if kind == "tall" else short
    if kind.startswith("common-"):
        launch = common_launch(tallest, group, int(kind.removeprefix("common-")), tallest.warps)
    table = codec == NUQ
    arguments = attention_arguments(kind, dtype, group, dim, 0, rotate, soft_cap) | PAGE_POINTERS
    arguments |= {"turns": "*fp32" if rotate else None, "staged": "i64"}
    arguments |= dict.fromkeys(("slot_positions", "bases"), "*i32" if masked else None)
    if masked:
        arguments |= {"masks": "*i64", "lse": "*fp32"}
    arguments |= dict.fromkeys(("heads", "pairs"), "*i32" if table else None)
    arguments |= {"key_codebooks": "*fp32", "value_codebooks": "*fp32" if table else None}
    arguments |= {
        "ROWS": launch.rows,
        "HP": max(16, triton.next_power_of_2(dim // 2)),
        "PAGE": 2 * PAGE_TOKENS * dim * dtype.itemsize // UNIT,
        "SINKS": int(table),
        "KIND": codec,
    }
    arguments |= dict.fromkeys(("KEY_PARTS", "VALUE_PARTS"), parts)
    arguments |= dict.fromkeys(("MOST_KEY_SLOTS", "MOST_VALUE_SLOTS"), slots)
    compiled = compile_for(HOPPER, attend_encoded, arguments, warps=launch.warps, stages=launch.stages)
    numbers = 2 * PAGE_TOKENS * dim / (launch.warps * 32)
    print(
        f"\nencoded {kind} codec {codec} parts {parts} slots {slots} {dtype} G{group} D{dim}{' masked' * masked}:"
        f" {describe(compiled)},"
        f" {launch.warps} warps, {largest_loop(compiled) / numbers:.1f} instructions a number"
    )
    return compiled, launch.warps


def largest_loop(compiled: Compiled) -> int:
    """Instructions between the farthest jump back and where it goes."""
    jumps = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?BRA(?:\.\w+)* (0x[0-9a-f]+)", compiled.sass)
    return max((int(at, 16) - int(to, 16)) // 16 + 1 for at, to in jumps)


@combine(
    strength=1,
    kind=["append", "append-seeded", "tall", "common-2", "common-8"],
    limit=[(NUQ, 7, 24 if IS_OLDER else 20), (GROUP, 0, 14), (NUQ, 4, 16)],
)
def test_encoded_pages_are_read_in_registers(kind: str, limit: tuple[int, int, int]) -> None:
    """Every code once, through shuffles, and few instructions for each: their number is what bounds decoding.

    limit  the codec, the parts of its widths, and the most instructions a number
    """
    codec, parts, most = limit
    compiled, warps = encoded_attention(kind, codec, parts, 1, torch.bfloat16, 4, 128)
    assert compiled.registers * warps * 32 <= REGISTERS and compiled.shared_bytes <= SHARED_BYTES, describe(compiled)
    # Local memory has some of what the largest tiles need every page, and of what four warps need for group codes.
    most_bytes = {"tall": 320}.get(kind, 96 if codec == GROUP and kind.startswith("append") else 0)
    assert compiled.stack_bytes <= most_bytes, describe(compiled)
    if kind == "tall" or kind.startswith("common"):
        return
    numbers = 2 * PAGE_TOKENS * 128 // (warps * 32)
    assert largest_loop(compiled) <= most * numbers
    if codec == NUQ:
        shuffles = compiled.count(r"\bSHFL\.IDX")
        assert numbers <= shuffles <= numbers + 8, "a lookup does not stay inside its warp"
    assert compiled.count(r"\bHMMA\.") > 0


@combine(strength=1, kind=["append", "append-seeded", "tall"], codec=[NUQ, GROUP])
def test_encoded_pages_seen_in_part_are_read_in_registers(kind: str, codec: int) -> None:
    parts = 7 if codec == NUQ else 0
    compiled, warps = encoded_attention(kind, codec, parts, 1, torch.bfloat16, 4, 128, masked=True)
    assert compiled.registers * warps * 32 <= REGISTERS and compiled.shared_bytes <= SHARED_BYTES, describe(compiled)
    # Angles of every slot, and what tells them, are more than there are registers for.
    most = {("tall", NUQ): 800, ("tall", GROUP): 160}.get((kind, codec), 200 if codec == NUQ else 240)
    assert compiled.stack_bytes <= most, describe(compiled)


@pytest.mark.parametrize(
    "kind, codec, slots, dtype, group, dim, rotate",
    [
        ("append", NUQ, 2, torch.float16, 8, 96, True),
        ("short", NUQ, 0, torch.bfloat16, 1, 64, True),
        ("tall", NUQ, 2, torch.bfloat16, 3, 64, True),
        ("append", NUQ, 1, torch.float32, 3, 80, True),
        ("tall", GROUP, 0, torch.float32, 4, 128, True),
        ("short", NUQ, 1, torch.bfloat16, 4, 16, False),
        ("append", NUQ, 1, torch.bfloat16, 4, 256, True),
        ("tall", NUQ, 1, torch.bfloat16, 4, 256, True),
        ("append", NUQ, 1, torch.float32, 4, 256, True),
        ("append", GROUP, 0, torch.bfloat16, 4, 256, True),
        ("append", GROUP, 0, torch.bfloat16, 8, 512, True),
        ("tall", GROUP, 0, torch.bfloat16, 4, 512, True),
        ("common-2", GROUP, 0, torch.float16, 4, 512, True),
        ("tall", GROUP, 0, torch.float32, 4, 256, True),
    ],
    ids=str,
)
def test_reading_encoded_pages_compiles_for_other_shapes(
    kind: str, codec: int, slots: int, dtype: torch.dtype, group: int, dim: int, rotate: bool
) -> None:
    compiled, warps = encoded_attention(kind, codec, 7, slots, dtype, group, dim, rotate)
    assert compiled.registers * warps * 32 <= REGISTERS and compiled.shared_bytes <= SHARED_BYTES, describe(compiled)


@pytest.mark.parametrize("codec", [NUQ, GROUP])
def test_a_soft_cap_over_encoded_pages_compiles(codec: int) -> None:
    parts = 7 if codec == NUQ else 0
    compiled, warps = encoded_attention("append", codec, parts, 1, torch.bfloat16, 4, 128, soft_cap=72.0)
    assert compiled.registers * warps * 32 <= REGISTERS and compiled.shared_bytes <= SHARED_BYTES, describe(compiled)
    without, _ = encoded_attention("append", codec, parts, 1, torch.bfloat16, 4, 128)
    assert compiled.count(r"\bMUFU\.EX2") > without.count(r"\bMUFU\.EX2")


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_encoding_keeps_a_token_slot_in_a_thread(dim: int) -> None:
    arguments: dict[str, Any] = (
        {"arena": "*bf16", "table": "*i32", "seals": "*i32", "staged": "i64"}
        | PAGE_POINTERS
        | {"halves": "*fp16", "octets": "*u8"}
    )
    arguments |= dict.fromkeys(("heads", "pairs"), "*i32") | {"first_lane": "i32"}
    arguments |= dict.fromkeys(("key_edges", "key_codebooks", "key_weight", "value_edges", "value_codebooks"), "*fp32")
    arguments |= {"key_bias": "*fp32"}
    arguments |= {"LANES": 256, "H": 8, "D": dim, "P": PAGE_TOKENS, "UNIT": 64, "PAGE": 2 * dim}
    arguments |= {"DP": triton.next_power_of_2(dim), "HP": triton.next_power_of_2(dim // 2), "SINKS": 1}
    for kernel in (encode_nuq, encode_groups):
        given = {name: arguments[name] for name in kernel.arg_names}
        compiled = compile_for(HOPPER, kernel, given, warps=ENCODE_WARPS)
        print(f"\n{kernel.fn.__name__} D{dim}: {describe(compiled)}")
        assert compiled.stack_bytes == 0 and compiled.shared_bytes <= 4096, describe(compiled)
        # Neither codes nor sums over channels are exchanged: only bits of one column of values, on their way to a word.
        assert compiled.count(r"\bREDUX") <= 1


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_the_write_stores_16_bytes_at_a_time(dim: int) -> None:
    arguments: dict[str, Any] = dict.fromkeys(("k", "v", "arena"), "*bf16") | dict.fromkeys(
        ("table", "positions", "write_chunk"), "*i32"
    )
    arguments |= {
        "cos": "*fp32",
        "sin": "*fp32",
        "num_rows": "i32",
        "first_lane": "i32",
        "k_stride": "i32:16",
        "v_stride": "i32:16",
    }
    arguments |= {
        "LANES": 256,
        "H": 8,
        "D": dim,
        "P": PAGE_TOKENS,
        "DP": triton.next_power_of_2(dim),
        "ROWS": WRITE_ROWS,
        "UNIT": 64,
        "ROTATE": True,
        "PAGE": 2 * dim,
        "staged": "i32",
    }
    compiled = compile_for(HOPPER, write, arguments, warps=4)
    print(f"\nwrite D{dim}: {describe(compiled)}")
    stores = compiled.count(r"\bSTG\.")
    assert compiled.stack_bytes == 0 and stores > 0 and compiled.count(r"\bSTG\.\S*128") == stores


@pytest.mark.parametrize("add, heads, width", [(True, 1, 4096), (False, 1, 4096), (False, 40, 128)])
def test_norms_load_everything_at_once_16_bytes_at_a_time(add: bool, heads: int, width: int) -> None:
    block = triton.next_power_of_2(width)
    arguments: dict[str, Any] = {"x": "*bf16", "residual": "*bf16" if add else None, "weight": "*bf16", "out": "*bf16"}
    arguments |= {
        "num_rows": "i32",
        "row_stride": "i32:16",
        "head_stride": "i32:16" if heads > 1 else "i32",
        "eps": "fp32",
    }
    arguments |= {
        "HEADS": heads,
        "E": width,
        "BLOCK": block,
        "ROWS": max(1, min(32, triton_ops.NORM_ELEMENTS // block)),
        "ADD": add,
    }
    compiled = compile_for(HOPPER, triton_ops._norm, arguments, warps=8 if width == 4096 else 4)
    print(f"\nnorm add={add} {heads} x {width}: {describe(compiled)}")
    assert compiled.stack_bytes == 0
    if heads == 1:
        loads = compiled.count(r"\bLDG\.")
        assert compiled.count(r"\bLDG\.\S*128") == loads
        assert compiled.ptx.rindex("ld.global") < compiled.ptx.index("shfl.sync"), "a load waits for the sum"


@pytest.mark.parametrize("k", [4096, 14336, 576])
def test_the_one_row_product_keeps_tiles_under_way(k: int) -> None:
    arguments: dict[str, Any] = {
        "x": "*bf16",
        "weight": "*bf16",
        "bias": None,
        "out": "*bf16",
        "N": 6144,
        "K": k,
        "BIAS": False,
    }
    arguments |= {
        "ROWS": triton_ops.VECTOR_ROWS,
        "COLUMNS": triton_ops.VECTOR_COLUMNS,
        "STAGES": triton_ops.VECTOR_STAGES,
    }
    compiled = compile_for(HOPPER, triton_ops._vector_linear, arguments, warps=4)
    print(f"\none-row product K={k}: {describe(compiled)}")
    assert compiled.stack_bytes == 0
    assert compiled.count(r"\bLDGSTS\.\S*128") >= (triton_ops.VECTOR_STAGES - 1) * 4, (
        "weights do not travel through shared memory"
    )
    assert compiled.count(r"\bLDG\.") == 0
    # Six programs a multiprocessor: 4,096 rows are one wave.
    assert compiled.registers * 128 * 6 <= REGISTERS and compiled.shared_bytes * 6 <= SHARED_BYTES, describe(compiled)


@pytest.mark.parametrize("is_tanh", [False, True])
def test_gated_loads_and_stores_16_bytes_at_a_time(is_tanh: bool) -> None:
    compiled = compile_for(
        HOPPER,
        triton_ops._gated,
        {"gate_up": "*bf16", "out": "*bf16", "F": 14336, "TANH": is_tanh, "BLOCK": triton_ops.GATED_ELEMENTS},
        warps=4,
    )
    assert compiled.stack_bytes == 0 and compiled.count(r"\bLDG\.\S*128") == compiled.count(r"\bLDG\.") == 2
    assert compiled.count(r"\bSTG\.\S*128") == compiled.count(r"\bSTG\.") == 1


def packed_arguments(kernel: Any, kind: str) -> dict[str, Any]:
    """What a kernel of packed matrices takes, for [6144, 4096] in bfloat16."""
    of = FORMATS[kind]
    arguments: dict[str, Any] = {"x": "*bf16", "out": "*bf16", "bias": None, "index": "*i64", "codes": "*i32"}
    arguments |= {"upper": {5: "*u8", 6: "*i16"}.get(of.bits), "d": "*fp16", "m": "*fp16" if of.minima else None}
    arguments |= {"scales": ("*u8" if of.minima else "*i8") if of.superblocks else None}
    arguments |= {"minima": "*u8" if of.superblocks and of.minima else None, "sums": "*fp32" if of.minima else None}
    arguments |= {"num_rows": "i32", "x_stride": "i32:16", "out_stride": "i32:16", "N": 6144, "K": 4096, "STRIDE": 6144}
    arguments |= {"BITS": of.bits, "GROUP": of.group, "OFFSET": of.offset, "MINIMA": of.minima, "SUPER": of.superblocks}
    arguments |= {"PANELS": triton_packed.VECTOR_PANELS, "UNITS": triton_packed.VECTOR_UNITS, "BIAS": False}
    arguments |= {"STAGES": triton_packed.VECTOR_STAGES, "OUTPUTS": 0, "ROWS": 0}
    return {name: arguments[name] for name in kernel.arg_names}


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_one_row_by_packed_blocks_spills_nothing(kind: str) -> None:
    compiled = compile_for(HOPPER, triton_packed._vector, packed_arguments(triton_packed._vector, kind), warps=4)
    weights = 16 * 32 * triton_packed.VECTOR_UNITS // 128
    print(
        f"\npacked row {kind}: {describe(compiled)}, {largest_loop(compiled) / weights:.1f} instructions a weight,"
        f" {compiled.count(r'LDGSTS')} copies, {compiled.count(r'LDGSTS.*128')} of 16 bytes"
    )
    assert compiled.stack_bytes == 0 and compiled.count(r"\bLDGSTS\.\S*128") > 0, describe(compiled)
    assert compiled.registers * 128 * 2 <= REGISTERS and compiled.shared_bytes * 2 <= SHARED_BYTES, describe(compiled)


@combine(strength=1, kind=sorted(FORMATS), rows=[8, 32, 64, 512])
def test_rows_by_packed_blocks_run_on_the_tensor_cores_and_spill_nothing(kind: str, rows: int) -> None:
    tile = triton_packed.tile_of(rows, torch.bfloat16)
    arguments = packed_arguments(triton_packed._tiles, kind)
    arguments |= {"OUTPUTS": tile.outputs, "ROWS": tile.rows, "UNITS": tile.units, "STAGES": tile.stages}
    compiled = compile_for(HOPPER, triton_packed._tiles, arguments, warps=tile.warps)
    print(f"\npacked {rows} rows {kind}: {describe(compiled)}, {tile}, {compiled.count('GMMA|HMMA')} products")
    assert compiled.stack_bytes == 0 and compiled.shared_bytes <= SHARED_BYTES, describe(compiled)
    assert compiled.count(r"\bHG?MMA\.") > 0


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_rows_of_packed_blocks_spill_nothing(kind: str) -> None:
    compiled = compile_for(HOPPER, triton_packed._rows, packed_arguments(triton_packed._rows, kind), warps=4)
    print(f"\nrows of {kind}: {describe(compiled)}")
    assert compiled.stack_bytes == 0, describe(compiled)
