"""List or remove what Quire keeps on disk: packed layers of models, and the cache of --tiers.disk; carry prefixes.

quire cache ls                          lists packed layers of models, with size and last use
quire cache clear [NAME ...]            removes them: all, or those of a model, by its name, its path or a file's name
quire cache ls --disk DIR               lists what disk tiers keep in a folder, by model and codec
quire cache clear --disk DIR            removes it; with --model NAME only what is of one model
quire cache export --disk DIR FILE      writes prefixes of a folder to a file: all, or those of --key or --prompt-file
quire cache import --disk DIR FILE --model MODEL
                                        puts the prefixes of a file into a folder, for a model and its settings

The first start of a model of 384 MiB or more on a CPU writes its packed layers, unless --model.images is false. A
running model keeps the layers that it has mapped; the next start writes them again. Folders of disk tiers may be looked
at while engines write to them. Import is for administrators: whoever imports vouches for the file. It computes one
chunk in 16 again and compares, unless --trust is given. See docs/guide/restart.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import add_flags, format_bytes, options_from
from quire.errors import ConfigError, QuireError
from quire.models import image_folder
from quire.models.image_folder import Image, ImageDraft, ImageError

CHOICES = ("ls", "clear", "export", "import")
SECTIONS = ("model", "cache", "attention", "runtime")
"""Settings that determine an imported page, or how it is computed again."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    parser.add_argument("action", choices=CHOICES, metavar="|".join(CHOICES), help="what to do")
    text = "with clear: a model's name or path, or a file's name; with export and import: the FILE"
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help=text)
    parser.add_switch("--json", text="with ls: print JSON instead of a table")
    parser.add_argument("--disk", metavar="DIR", help="the folder of --tiers.disk, with or without its size")
    text = "of clear and export: only what is of this model; of import: the model"
    parser.add_argument("--model", metavar="MODEL", help=text)
    parser.add_argument("--key", metavar="HEX", help="with export: only the prefix with this key")
    text = 'with export and --model: only prefixes of these prompts, lines as of cache.pin: {"prompt": "..."}'
    parser.add_file("--prompt-file", text=text)
    parser.add_switch("--trust", text="with import: compute nothing again")
    parser.add_file("--config", text="with import: TOML file with settings of the model")
    add_flags(parser, SECTIONS)


def run(args: argparse.Namespace) -> int:
    """Runs the action."""
    _check(args)
    if args.disk is not None:
        from quire.cli import cache_disk

        return cache_disk.run(args)
    try:
        if args.action == "ls":
            _show(image_folder.list_images(), image_folder.list_drafts(), as_json=args.json)
        else:
            freed = image_folder.clear(image_folder.images_called(args.names) if args.names else None)
            print(f"freed {format_bytes(freed)}")
    except ImageError as error:
        raise QuireError(f"packed layers: {error}") from None
    except OSError as error:
        if error.filename is None:  # of the output
            raise
        what = "read" if args.action == "ls" else "removed"
        raise QuireError(f"{error.filename}: cannot be {what} ({error.strerror})") from error
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for arguments that do not go together."""
    action, is_file = args.action, args.action in ("export", "import")
    if action == "ls" and args.names:
        raise ConfigError(f"quire cache ls takes no names, but got {args.names[0]!r}")
    if action != "ls" and args.json:
        raise ConfigError("--json is for quire cache ls")
    if is_file and (args.disk is None or len(args.names) != 1):
        raise ConfigError(f"quire cache {action} needs --disk DIR and one FILE")
    if is_file and args.names == ["-"]:
        raise ConfigError(f"quire cache {action} needs a FILE, not -")
    if args.disk is not None and not is_file and args.names:
        raise ConfigError(f"with --disk name a model by --model, not {args.names[0]!r}")
    if args.model is not None and (args.disk is None or action == "ls"):
        raise ConfigError("--model is for clear --disk, export and import")
    if (args.key is not None or args.prompt_file is not None) and action != "export":
        raise ConfigError("--key and --prompt-file are for quire cache export")
    if args.key is not None and args.prompt_file is not None:
        raise ConfigError("give --key or --prompt-file, not both")
    if args.prompt_file is not None and args.model is None:
        raise ConfigError("--prompt-file needs --model MODEL, whose tokenizer reads it")
    if action == "import" and args.model is None:
        raise ConfigError("quire cache import needs --model MODEL")
    settings = options_from(args, SECTIONS) or args.config is not None
    if action != "import" and (args.trust or settings):
        raise ConfigError("--trust, --config and settings of a model are for quire cache import")


def _show(images: list[Image], drafts: list[ImageDraft], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([_facts(image) for image in images], indent=2))
        return
    for draft in drafts:
        ended = "draft of a process that ended; quire cache clear removes it"
        print(f"{draft.path}: {format_bytes(draft.num_bytes)}, {'being written' if draft.is_written else ended}")
    if not images:
        print(f"no packed layers in {image_folder.image_folder()}")
        return
    rows = [
        (
            image.origin.model,
            image.origin.form,
            image.origin.dtype,
            format_bytes(image.num_bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(image.used)),
            image.origin.path + " (no longer exists)" * (not Path(image.origin.path).exists()),
        )
        for image in images
    ]
    columns = ("model", "form", "dtype", "size", "last used", "checkpoint")
    shared.print_table(columns, rows, ("form", "dtype", "checkpoint"))
    print(f"{format_bytes(sum(image.num_bytes for image in images))} in total")


def _facts(image: Image) -> dict[str, object]:
    return {
        "model": image.origin.model,
        "checkpoint": image.origin.path,
        "form": image.origin.form,
        "dtype": image.origin.dtype,
        "num_bytes": image.num_bytes,
        "last_used": image.used,
        "path": str(image.path),
        "key": image.origin.key,
    }
