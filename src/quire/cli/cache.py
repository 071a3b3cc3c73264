"""List or remove packed layers of models in the user's cache folder.

quire cache ls                   lists them, with size and last use
quire cache clear                removes all of them
quire cache clear NAME ...       removes those of a model, by its name, its path, or the name of the file

The first start of a model of 384 MiB or more on a CPU writes its packed layers there, unless --model.images is false. A
running model keeps the layers that it has mapped; the next start writes them again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import format_bytes
from quire.errors import ConfigError, QuireError
from quire.models import image_folder
from quire.models.image_folder import Draft, Image, ImageError

HELP = "list or remove packed layers of models on disk"


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    parser.add_argument("action", choices=("ls", "clear"), metavar="ls|clear", help="what to do")
    parser.add_argument(
        "names", nargs="*", default=[], metavar="NAME", help="with clear: a model's name or path, or a file's name"
    )
    parser.add_argument("--json", action="store_true", help="with ls: print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the images, or remove them."""
    if args.action == "ls" and args.names:
        raise ConfigError(f"quire cache ls takes no names, but got {args.names[0]!r}")
    if args.action == "clear" and args.json:
        raise ConfigError("--json is for quire cache ls")
    try:
        if args.action == "ls":
            _show(image_folder.list_images(), image_folder.list_drafts(), as_json=args.json)
        else:
            freed = image_folder.clear(_chosen(args.names) if args.names else None)
            print(f"freed {format_bytes(freed)}")
    except ImageError as error:
        raise QuireError(f"packed layers: {error}") from None
    except OSError as error:
        what = "read" if args.action == "ls" else "removed"
        raise QuireError(f"{error.filename}: cannot be {what} ({error.strerror})") from error
    return 0


def _chosen(names: list[str]) -> list[Image]:
    images = image_folder.list_images()
    found = {image.path: image for name in names for image in images if _is_called(image, name)}
    for name in names:
        if not any(_is_called(image, name) for image in found.values()):
            known = ", ".join(sorted({image.origin.model for image in images})) or "none"
            raise ConfigError(f"no packed layers of {name!r}; models with packed layers: {known}")
    return list(found.values())


def _is_called(image: Image, name: str) -> bool:
    path = str(Path(name).resolve())
    return name in (image.origin.model, image.origin.key, image.path.name) or path in (
        image.origin.path,
        str(image.path),
    )


def _show(images: list[Image], drafts: list[Draft], *, as_json: bool) -> None:
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
