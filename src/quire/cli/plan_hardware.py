"""`quire plan hardware` and `quire bench latency --tiers`: measures this machine for a model, and writes a profile."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import EngineConfig, format_bytes, options_from
from quire.errors import ConfigError
from quire.options import format_number, read_toml

if TYPE_CHECKING:
    from quire.offload.planning.profile import Profile

ROUNDS = 3
"""How often everything is measured, by default."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of this measurement."""
    group = parser.add_argument_group("measurement of tiers")
    group.add_file("--folder", text="measure the disk of this folder (default: that of layer images)", metavar="DIR")
    group.add_count("--rounds", text=f"how often everything is measured (default: {ROUNDS})")


def run(args: argparse.Namespace) -> int:
    """Measures, and writes the profile."""
    check(args, "quire plan hardware")
    profile = measured(args)
    if args.json:
        from quire.offload.planning.profile import profile_text

        print(profile_text(profile), end="")
    else:
        print_profile(profile)
    return 0


def check(args: argparse.Namespace, command: str) -> dict[str, str]:
    """Raises ConfigError if there is nothing to measure with, or no file to write. Turns offloading on where nothing
    says how, and returns the origins of the settings that it sets.
    """
    if args.output is None:
        raise ConfigError(f"{command} needs --output FILE")
    if Path(args.model).suffix == ".json":
        raise ConfigError(f"{args.model} has no weights to measure with")
    shared.check_writable(args.output)
    if "offload.mode" in {**(read_toml(args.config) if args.config else {}), **options_from(args)}:
        return {}
    vars(args)["offload.mode"] = "auto"
    return {"offload.mode": f"default of {command}"}


def measured(args: argparse.Namespace) -> Profile:
    """Measures, and writes the profile to the file of --output."""
    from quire.measure.offload_profile import measure_machine
    from quire.offload.planning.profile import profile_text
    from quire.offload.planning.subject import Subject

    subject = Subject.of(args.model, EngineConfig.from_flags(args))
    profile = measure_machine(subject, folder=args.folder, rounds=args.rounds or ROUNDS, tell=_tell)
    args.output.write_text(profile_text(profile))
    return profile


def _tell(what: str) -> None:
    print(f"measuring {what}", file=sys.stderr, flush=True)


def print_profile(profile: Profile) -> None:
    """Prints a profile for people: the disk, a layer by rows, and the runs."""
    disk = profile.disk
    how = "past the page cache" if disk.is_direct else "through the page cache, which was told to drop it"
    threads = sorted({read.threads for read in disk.reads})
    sizes = sorted({read.request_bytes for read in disk.reads})
    rates = {(read.request_bytes, read.threads): read.rate for read in disk.reads}
    print(f"{profile.conditions.processor}, {profile.conditions.threads} threads; the disk of {disk.folder}, {how}")
    shared.print_table(
        ["request", *(f"{count} thread{'s' * (count > 1)}" for count in threads)],
        [[format_bytes(size), *(_per_second(rates[size, count].bandwidth) for count in threads)] for size in sizes],
    )
    print(
        f"weights are read at {_per_second(disk.streamed.bandwidth)}; writes {_per_second(disk.writes.bandwidth)};"
        f" copies in memory {_per_second(profile.copy.bandwidth)};"
        f" a small read takes {format_number(1e3 * disk.request_seconds)} ms"
    )
    if profile.device is not None:
        up, down = (_per_second(rate.bandwidth) for rate in (profile.device.up, profile.device.down))
        print(f"{profile.conditions.device}: {up} from the host, {down} to it")
    heads = dict(zip(profile.head.counts, profile.head.seconds, strict=True))
    shared.print_table(
        ["rows", "ms a layer", "ms output head"],
        [
            [
                f"{rows}",
                format_number(1e3 * seconds),
                format_number(1e3 * heads[rows]) if rows in heads else "",
            ]
            for rows, seconds in zip(profile.products.counts, profile.products.seconds, strict=True)
        ],
    )
    on_host = ["in the host's memory"] if profile.device is not None else []
    shared.print_table(
        [*on_host, "on the disk", "sequences", "prompt", "answer", "seconds", "spread", "predicted", "error"],
        [
            [
                *(f"{run.host_share:.1%}" for _ in on_host), f"{run.disk_share:.1%}", f"{run.sequences}",
                f"{run.prompt_tokens}", f"{run.output_tokens}", format_number(run.seconds), f"{run.spread:.0%}",
                format_number(run.predicted), f"{run.error:+.0%}",
            ]
            for run in profile.runs
        ],
    )  # fmt: skip
    fitted = profile.corrections
    copies = "" if profile.device is None else f" copies to the GPU {fitted.bus:.3g},"
    step, sequence = (format_number(1e3 * each) for each in (fitted.step_seconds, fitted.sequence_seconds))
    print(
        f"fitted: reads take {fitted.disk:.3g} of their time alone,{copies} prefill {fitted.prefill:.3g}, decoding"
        f" {fitted.decode:.3g}; {fitted.exposed:.0%} of the faster stage is not hidden; {step} ms a step and"
        f" {sequence} ms a sequence"
    )


def _per_second(rate: float) -> str:
    return f"{format_bytes(int(rate))}/s"
