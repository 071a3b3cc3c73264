"""Serve a model over HTTP with OpenAI's API.

Listens on 127.0.0.1:8000 unless told otherwise; an address that other machines can reach needs --api-key-file or
--allow-public. SIGTERM lets running requests finish (--drain-seconds). See docs/server.md.
"""

from __future__ import annotations

import argparse
import time

from quire.cli import shared
from quire.config import ServeConfig, options_from
from quire.errors import ConfigError

HELP = "serve a model over HTTP with OpenAI's API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    shared.add_engine_arguments(parser, (*shared.ENGINE_SECTIONS, "serve"))


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    if shared.printed_config(args, server=True):
        return 0
    config = ServeConfig.from_options(options_from(args, ("serve",)), args.config)
    try:
        from quire.server.run import Listener, serve
    except ImportError as error:
        raise ConfigError(
            f"quire serve needs a package that is not installed ({error.name}): pip install 'quire[serve]'"
        ) from error
    begun = time.monotonic()
    # Before the model is loaded: a wrong key file or a port in use should not cost a minute.
    listener = Listener(config)

    async def main() -> None:
        async with shared.engine(args) as llm:

            def ready() -> None:
                seconds = time.monotonic() - begun
                print(f"ready after {seconds:.1f} s: {llm.model_name} at {listener.url}/v1", flush=True)

            print(await serve(llm, listener, ready), flush=True)

    try:
        with shared.runner() as loop:
            loop.run(main())
    finally:
        listener.close()
    return 0
