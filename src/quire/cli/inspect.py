"""Show a model's memory needs and how many requests fit, or show the cache of a running server.

With MODEL: the weights by type, in the file and in memory, the bytes of a token in the cache, the tokens and sequences
that fit, the machine's memory, and what runs out first. Reads the model's headers only; with --digest all of it. What
fits is computed without retention, which frees a part of each sequence's memory once its prompt is computed.
With --tree: the prefixes that a server keeps, who shares them, how often they were found, their bytes and last use.
With MODEL --tiers: what the disk of --tiers.disk would hold, its measured speed, and when fetching is faster than
computing. With --tiers alone: what the tiers of a server hold, and how fetching went.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import EngineConfig, format_bytes, options_from
from quire.errors import ConfigError
from quire.options import format_number

if TYPE_CHECKING:
    from quire.inspection import ModelInspection
    from quire.models.digest import Digest
    from quire.models.loading import TensorGroup

LENGTHS = (512, 2048, 8192)


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    shared.add_engine_arguments(parser, needs_model=False)
    text = f"sequence lengths in tokens (default: {' '.join(map(str, LENGTHS))})"
    parser.add_count("--length", text=text, nargs="+")
    text = f"show the prefixes in a running server's cache (default: {shared.DEFAULT_URL})"
    parser.add_argument("--tree", nargs="?", const=shared.DEFAULT_URL, metavar="URL", help=text)
    text = (
        "with MODEL: show what a disk would hold; without: show the tiers of a running server"
        f" (default: {shared.DEFAULT_URL})"
    )
    parser.add_argument("--tiers", nargs="?", const="", metavar="URL", help=text)
    shared.add_api_key_file(parser, "with --tree or --tiers: ")
    text = "print a hash of the weights and the model's configuration too; it is remembered until a file changes"
    parser.add_switch("--digest", text=text)
    parser.add_switch("--json", text="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Prints the sizes, or the prefixes or tiers of a server."""
    if args.tree is not None or (args.tiers is not None and args.model is None):
        return _show_server(args)
    if args.model is None:
        raise ConfigError("quire inspect needs a MODEL, or --tree or --tiers for a running server")
    if args.api_key_file is not None:
        raise ConfigError("--api-key-file needs --tree, or --tiers without a MODEL")
    if args.tiers:
        raise ConfigError(f"--tiers with a MODEL takes no URL, but got {args.tiers!r}")
    if args.tiers is not None and (args.digest or args.length):
        raise ConfigError("--tiers shows a disk; it takes no --length and no --digest")
    if shared.printed_config(args):
        return 0
    from quire.inspection import ModelInspection

    hashing = shared.byte_progress("hashing") if args.digest else None
    found = ModelInspection.of(args.model, EngineConfig.from_flags(args), hashing)
    if args.tiers is not None:
        from quire.cli import tiers

        tiers.print_disk(args.model, found, as_json=args.json)
        return 0
    # A given length above the longest request is shown with 0 sequences; a default one is left out.
    most = found.sizes.max_context
    lengths = sorted({*(args.length or [length for length in LENGTHS if length <= most]), most})
    if args.json:
        print(json.dumps(found.to_json(lengths), indent=2))
        return 0
    _print_table(args.model, found, lengths)
    if found.digest is not None:
        print(f"digest: {found.digest.digest} ({_digest_note(found.digest)})")
    return 0


def _show_server(args: argparse.Namespace) -> int:
    """Shows the prefixes or the tiers of a running server."""
    flag = "--tree" if args.tree is not None else "--tiers"
    if args.tree is not None and args.tiers is not None:
        raise ConfigError("give --tree or --tiers, not both")
    of_model = args.model is not None or args.config is not None or args.length or args.digest
    if of_model or options_from(args):
        raise ConfigError(
            f"{flag} asks a running server: it takes no MODEL, no engine settings, no lengths and no --digest"
        )
    from quire.cli import remote, tiers, tree

    url = args.tree if args.tree is not None else args.tiers or shared.DEFAULT_URL
    answer = remote.call_server(url, "/debug/cache", remote.read_key(args.api_key_file), flag, "prefixes")
    if flag == "--tiers":
        tiers.print_tiers(answer, as_json=args.json)
    elif args.json:
        print(json.dumps(answer, indent=2))
    else:
        tree.print_tree(answer)
    return 0


def _retention_note(config: EngineConfig) -> tuple[str, str, str]:
    retain = config.retain
    how = f"budget {retain.budget:g}" if retain.budget != "off" else f"threshold {retain.threshold:g}"
    return "retention", how, "shrinks sequences after their prompt; not counted here"


def _digest_note(digest: Digest) -> str:
    if not digest.num_bytes_hashed:
        return "remembered"
    rest = digest.num_bytes - digest.num_bytes_hashed
    return f"{format_bytes(digest.num_bytes_hashed)} hashed in {digest.seconds:.1f} s" + ", the rest remembered" * (
        rest > 0
    )


def _context_note(found: ModelInspection) -> str:
    requested = found.given.model.max_context
    if requested is not None and found.sizes.max_context < requested:
        return f"model.max_context is {requested:,}, and the cache holds no more"
    return f"the model's own limit is {found.shape.max_context:,}"


def _loaded_note(part: TensorGroup) -> str:
    tensors = f"{part.tensors} tensor{'s' * (part.tensors != 1)}"
    bits = f"{format_number(8 * part.num_bytes / part.numbers)} bits"
    if part.stored != part.held:
        bits = f"{part.held}, {bits}"
    return f"{tensors}, {part.numbers / 1e6:,.1f}M numbers in {bits}"


def _print_table(name: str, found: ModelInspection, lengths: list[int]) -> None:
    shape, config, sizes, calibration = found.shape, found.config, found.sizes, found.calibration
    heads = (
        f"{shape.num_layers} layers, {shape.num_q_heads} query and {shape.num_kv_heads} kv heads of {shape.head_dim}"
    )
    chosen = ", chosen: cache.memory is auto" if found.given.cache.memory == "auto" else ""
    cache = ("cache", sizes.cache_text, f"codec {config.cache.codec}{chosen}")
    rows = [
        ("weights", format_bytes(sizes.weight_bytes), f"on {config.runtime.device}, rows in {config.model.dtype}"),
        *((f"  {part.stored}", format_bytes(part.num_bytes), _loaded_note(part)) for part in found.weights),
        cache,
        (
            "bytes per token",
            format_bytes(round(sizes.bytes_per_token)),
            f"a chunk of 64 tokens is {format_bytes(sizes.chunk_bytes)}",
        ),
        ("tokens that fit", f"{sizes.tokens:,}", ""),
        ("longest request", f"{sizes.max_context:,} tokens", _context_note(found)),
    ]
    if found.image is not None:
        note = "written; see quire cache ls" if found.image["written"] else "the first start writes it"
        rows.insert(rows.index(cache), ("layer image", format_bytes(found.image["num_bytes"]), note))
    if config.cache.is_calibrated:
        known = "none yet" if calibration is None else calibration.hash[:12]
        note = "" if calibration else "the first start makes it; sizes are its targets"
        rows.insert(rows.index(cache) + 1, ("calibration", known, note))
    if config.retain.is_on:
        rows.append(_retention_note(config))
    for length in lengths:
        count = found.sequences(length)
        limit = config.scheduler.max_running
        note = f"scheduler.max_running lets {limit:,} run at once" if count > limit else ""
        if length > sizes.max_context:
            note = f"the longest request has {sizes.max_context:,} tokens"
        rows.append((f"sequences of {length:,}", f"{count:,}", note))
    whole = found.footprint()
    beside = f"{format_bytes(whole.step)} of steps and {format_bytes(whole.runtime)} of the process"
    rows.append(("memory in all", f"about {format_bytes(whole.total)}", f"with a full cache, {beside}"))
    if sizes.available_bytes is not None:
        needed = sizes.memory_bytes
        rows.append(
            ("memory free now", format_bytes(sizes.available_bytes), f"weights and cache take {format_bytes(needed)}")
        )
    about = f"{shape.architecture}, {shape.num_parameters / 1e6:,.0f}M parameters, {heads}"
    shared.print_facts(rows, name=name, about=about, last=f"fails first: {sizes.fails_first}")
