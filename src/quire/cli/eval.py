"""Measure the effect of a cache codec or of retention on a model's quality.

ppl: perplexity of a text, read in windows of --context tokens as prompts through the engine's own cache. All tokens of
a window but the first are scored. With --kl (the default) the distribution of every next token is compared with that of
a dense cache with the same weights. Bytes are those that the request holds at the end of a window. Cached chunks that
no request reads, such as the prompt's original pages after retention, can be evicted and are not counted.

With retention only the last 256 tokens of a window are scored. They are computed one at a time after a prompt. The
dense cache it is compared with keeps every token. Likewise with cache.sparse_values; that cache reads every value.

retrieval: hides a five-digit number at several depths of texts of several lengths, and asks for it at the end.

docs/guide/quality.md has the definitions.
"""

from __future__ import annotations

import argparse
import json

from quire.arguments import Arguments
from quire.cache.codecs import CODECS, DENSE
from quire.cli import eval_perplexity, eval_retrieval, shared
from quire.config import EngineConfig
from quire.errors import ConfigError

ACTIONS = {"ppl": eval_perplexity, "retrieval": eval_retrieval}


def add_arguments(parser: Arguments) -> None:
    """The arguments of every evaluation."""
    shared.add_engine_arguments(parser)
    group = parser.add_argument_group("every evaluation")
    group.add_file("--text", text="text to read; required for ppl; retrieval has built-in filler text")
    text = "codecs to compare, such as dense,nuq4, each with its own cache; replaces --cache.codec"
    group.add_argument("--codecs", type=shared.list_of(str), metavar="NAME,...", help=text)
    group.add_switch("--json", text="print JSON lines instead of a table")


def run(args: argparse.Namespace) -> int:
    """Prints the results."""
    if args.codecs:
        if "cache.codec" in args:
            raise ConfigError("give --codecs or --cache.codec, not both")
        # Some settings are valid for some codecs only. The configuration is checked with the codec that accepts the
        # most settings: a calibrated one, else any codec but dense. The dense reference drops settings not meant for
        # it.
        calibrated = [name for name, row in CODECS.items() if row.is_calibrated]
        vars(args)["cache.codec"] = min(args.codecs, key=lambda name: (name not in calibrated, name == DENSE))
    if shared.printed_config(args):
        return 0
    action = ACTIONS[args.action]
    results = action.run(args, EngineConfig.from_flags(args))
    if args.json:
        about = {"eval": args.action, "model": args.model, "text": None if args.text is None else str(args.text)}
        for each in results:
            print(json.dumps(about | each.facts()))
    else:
        action.print_results(results)
    return 0
