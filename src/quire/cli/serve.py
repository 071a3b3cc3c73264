"""Serve a model over HTTP with OpenAI's API.

The server listens on 127.0.0.1:8000 by default. An address that other machines can reach needs --api-key-file or
--allow-public. After SIGTERM running requests may finish (--drain-seconds). See docs/reference/endpoints.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import cluster, shared
from quire.config import ENGINE_SECTIONS, CalibrateConfig, ClusterConfig, ServeConfig, SloConfig, options_from
from quire.errors import ConfigError
from quire.extras import install_command
from quire.gc_pause import gc_paused

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.cluster.cluster import Cluster


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    shared.add_engine_arguments(parser, (*ENGINE_SECTIONS, "calibrate", "serve", "cluster", "slo"))


def run(args: argparse.Namespace) -> int:
    """Serves until a signal."""
    if shared.printed_config(args, server=True):
        return 0
    config = ServeConfig.from_flags(args)
    slo = SloConfig.from_flags(args)
    try:
        with gc_paused():
            from quire.server.run import HttpListener, serve
            from quire.server.service import tenants_of
    except ImportError as error:
        raise ConfigError(
            f"quire serve needs a package that is not installed ({error.name}); {install_command('serve')}"
        ) from error
    begun = time.monotonic()
    # Before the model is loaded: a wrong key file or a port in use is reported at once, not after a minute.
    listener = HttpListener(config)

    async def main() -> None:
        async with _engine(args, tenants_of(config, listener.keys).salts) as llm:

            def ready() -> None:
                seconds = time.monotonic() - begun
                if llm.operations is not None:
                    for each in llm.operations.state()["instances"]:
                        print(cluster.ready_line(each))
                print(f"ready after {seconds:.1f} s: {llm.model_name} at {listener.url}/v1")
                if config.sampling_defaults == "model" and llm.sampling_defaults.values:
                    print(f"default sampling parameters, from the model: {llm.sampling_defaults}")
                has_keys = bool(listener.keys.keys)
                is_chat = llm.tokenizer.has_chat_template
                print(f"try it:\n{example(listener.url, llm.model_name, is_chat, has_keys)}", flush=True)

            print(await serve(llm, listener, ready, slo=slo), flush=True)

    try:
        with shared.runner() as loop:
            loop.run(main())
    finally:
        listener.close()
    return 0


def _engine(args: argparse.Namespace, salts: list[str]) -> AsyncLLM | Cluster:
    """The engine of this process, or the cluster of the settings. salts: salts of the tenants."""
    settings = ClusterConfig.from_flags(args)
    if not settings.is_on:
        when = CalibrateConfig.from_flags(args).when
        # The server itself pins, once for each API key.
        return shared.engine(args, pins_at_start=False, calibrates_beside=when == "beside")
    from quire.cluster.cluster import Cluster

    slo = SloConfig.from_flags(args)
    return Cluster(args.model, options_from(args), args.config, settings, salts=salts, slo=slo)


def example(url: str, model: str, is_chat: bool, has_keys: bool) -> str:
    """A curl command of several lines that sends a request to the server at `url`."""
    fields: dict[str, Any] = {"prompt": "A quire is"}
    if is_chat:
        fields = {"messages": [{"role": "user", "content": "Give me three tips for writing a letter."}]}
    body = json.dumps({"model": model, **fields, "max_tokens": 64}, ensure_ascii=False)
    key = "    -H 'Authorization: Bearer KEY' \\\n" if has_keys else ""
    return (
        f"  curl {url}/v1/{'chat/' if is_chat else ''}completions -H 'Content-Type: application/json' \\\n"
        f"{key}    -d {shlex.quote(body)}"
    )
