"""Every refusal at a limit names the setting of the limit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.cache.ledger import PageLedger
from quire.calibrate.run import _check
from quire.calibrate.settings import CalibrationSettings
from quire.config import CacheConfig, EngineConfig, ServeConfig
from quire.engine.build import resolve
from quire.engine.params import CacheHints, SamplingParams
from quire.engine.pins import protect
from quire.engine.policy import check_budget
from quire.engine.sizes import ArenaCapacity, sizes
from quire.errors import QuireError
from tests.engines import make_engine
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, TEXT, client, error_of
from tests.tiny_models import tiny_shape

LONG = [1] * 600


def ask(count: int, params: SamplingParams | None = None, hints: CacheHints | None = None, **options: Any) -> None:
    """Asks a tiny engine, whose model was made for 512 tokens, for a prompt of `count` tokens."""
    engine = make_engine(**options)
    engine.limits.check([1] * count, params or SamplingParams(), hints or CacheHints())


def ask_beside_pins() -> None:
    engine = make_engine(chunks=8)
    engine.add("pinned", [1] * 193, SamplingParams(max_tokens=1), CacheHints(cache_pin=True))
    while engine.has_work:
        engine.step()
    protect(engine, [1] * 193)
    engine.limits.check([1] * 500, SamplingParams())


def resolve_tiny(**options: Any) -> None:
    resolve(EngineConfig.from_options({"runtime.device": "cpu", "cache.memory": "8MiB"} | options), tiny_shape(), None)


def full_ledger() -> None:
    ledger = PageLedger(1 << 20)
    ledger.size_class(1024)
    ledger.take(np.full(1025, 1024))


def out_of_memory(weight_bytes: int, available_bytes: int) -> None:
    arena = ArenaCapacity(64 << 20, 1 << 20, {1024: 4})
    fits = sizes(arena, model_context=512, weight_bytes=weight_bytes, available_bytes=available_bytes)
    assert not fits.fit_the_machine
    raise QuireError(fits.fails_first)


MESSAGES: dict[str, tuple[Callable[[], object], str]] = {
    "a prompt longer than the model was made for": (lambda: ask(512), r"holds 512 \(what the model was made for\)"),
    "a prompt longer than it may be": (
        lambda: ask(300, **{"model.max_context": 256}),
        r"holds 256 \(model\.max_context\)",
    ),
    "a prompt longer than the cache": (lambda: ask(300, chunks=3), r"holds \d+ \(what fits cache\.memory\)"),
    "a prompt longer than pins leave": (ask_beside_pins, r"holds \d+ \(what cache\.pin leaves of cache\.memory\)"),
    "more sequences than may wait": (
        lambda: ask(3, SamplingParams(n=5), **{"scheduler.max_queue": 4}),
        r"scheduler\.max_queue",
    ),
    "a pin larger than half of the cache": (
        lambda: ask(400, None, CacheHints(cache_pin=True), chunks=9),
        "cache.memory",
    ),
    "a pin without sharing": (
        lambda: ask(99, None, CacheHints(cache_pin=True), **{"cache.share": False}),
        "cache.share",
    ),
    "a context the model cannot have": (
        lambda: resolve_tiny(**{"model.max_context": 513}),
        r"model\.max_context is 513",
    ),
    "a cache larger than an arena": (lambda: resolve_tiny(**{"cache.memory": "300GiB"}), r"cache\.memory is 300GiB"),
    "a cache smaller than a page": (lambda: PageLedger(10), r"raise cache\.memory"),
    "a budget too small for a full batch": (lambda: check_budget(256, 256), r"scheduler\.token_budget is 256"),
    "a cache that does not fit the machine": (lambda: out_of_memory(1 << 20, 32 << 20), r"lower cache\.memory"),
    "weights that do not fit the machine": (
        lambda: out_of_memory(64 << 20, 32 << 20),
        r"model\.dtype .*model\.weights",
    ),
    "pages of no size": (lambda: PageLedger(1 << 20).size_class(99_999), r"cache\.memory"),
    "pages that do not fit": (full_ledger, r"cache\.memory"),
    "a port that is none": (lambda: ServeConfig(port=65536), r"serve\.port is 65536"),
    "bodies that may hold nothing": (lambda: ServeConfig(max_request_bytes=10), r"serve\.max_request_bytes is 10"),
    "more sinks than a chunk": (lambda: CacheConfig(sink_tokens=65), r"cache\.sink_tokens is 65"),
    "windows longer than the model reads": (
        lambda: _check(replace(CalibrationSettings(), window_tokens=513), tiny_shape()),
        "lower --window",
    ),
}


@pytest.mark.parametrize("meet, setting", MESSAGES.values(), ids=MESSAGES)
def test_a_message_about_a_limit_names_what_sets_it(meet: Callable[[], object], setting: str) -> None:
    with pytest.raises((QuireError, ValueError), match=setting) as caught:
        meet()
    assert "\n" not in str(caught.value)


REQUESTS = {
    "a prompt of ids longer than the context": ("/v1/completions", {"prompt": LONG}, 400, "model.max_context"),
    "a prompt far longer than the context": ("/v1/completions", {"prompt": "x" * 99_999}, 400, "model.max_context"),
    "a conversation longer than the context": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x" * 600}]},
        400,
        "model.max_context",
    ),
    "an answer longer than the context": ("/v1/completions", TEXT | {"max_tokens": 600}, 400, "model.max_context"),
    "more tokens than the server gives": (
        "/v1/chat/completions",
        CHAT | {"max_tokens": 99},
        400,
        "serve.max_output_tokens",
    ),
    "a body too large": ("/v1/completions", {"prompt": "x" * 200_000}, 413, "serve.max_request_bytes"),
    "more sequences than may wait": ("/v1/completions", {"prompt": "x", "n": 3}, 400, "scheduler.max_queue"),
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
@pytest.mark.parametrize("path, body, status, setting", REQUESTS.values(), ids=REQUESTS)
async def test_the_server_names_the_setting_of_a_limit(path: str, body: Any, status: int, setting: str) -> None:
    engine = FakeEngine(max_context=512)
    engine.config = EngineConfig.from_options({"scheduler.max_queue": 2})
    async with client(engine, max_output_tokens=50 if "output" in setting else None, max_request_bytes=150_000) as http:
        response = await http.post(path, json=body)
    assert response.status_code == status
    assert setting in error_of(response)["message"]
