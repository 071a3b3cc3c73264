"""An engine without a model: it answers with the prompt's bytes, and can be slowed, filled up and made to fail.

Has what the server asks of `quire.server.engines`, with the real sampling parameters, outputs and stop rules.
"""

from __future__ import annotations

import asyncio
import codecs
import functools
import itertools
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from quire.config import EngineConfig
from quire.engine.outputs import CompletionOutput, Logprob, RequestOutput
from quire.engine.params import SamplingParams
from quire.engine.sampling_defaults import NO_DEFAULTS
from quire.engine.stops import StopChecker
from quire.errors import QueueFullError, RequestError
from quire.models.control_tokens import ControlTokens, EscapedConversation
from quire.models.tokenizer import Tokenizer
from quire.prefixes.cached import CachedPrefix
from quire.prefixes.listing import Prefix
from quire.structured.grammar_compiler import GrammarCompiler
from quire.structured.params import StructuredOutputsParams
from tests import tiny_models

BOS, EOS = 256, 257
VOCAB = 258


MOVED: dict[str, Any] = {
    "tiers": {
        "memory": {"bytes": 1, "cap_bytes": 2, "chunks": 3, "bytes_read": 4, "bytes_written": 5, "is_on": True},
        "disk": {
            "bytes": 10,
            "cap_bytes": 20,
            "chunks": 30,
            "bytes_read": 40,
            "bytes_written": 50,
            "seconds_reading": 1.5,
            "seconds_writing": 2.5,
            "num_failed": 6,
            "num_refused": 7,
            "num_collected": 8,
            "is_on": False,
            "reason": "/home/somebody cannot be written",
        },
    },
    "moves": {
        "fetched": 11,
        "wasted": 12,
        "computed_instead": 13,
        "prefetched": 14,
        "swapped_out": 15,
        "swapped_in": 16,
        "failed_transfers": 17,
        "lost": 18,
    },
    "costs": {"chunk_bytes": 1 << 20, "fetched_bytes_per_second": 1e9, "prefill_tokens_per_second": None},
}
"""What the statistics of an engine with two tiers have besides."""


class ByteTokenizer:
    """One token per byte, and two special ones."""

    special_ids = frozenset({BOS, EOS})
    control_tokens = ControlTokens(tiny_models.byte_tokenizer(("<s>", "</s>")))
    max_token_bytes = 4
    chat_template = ""

    @property
    def tool_template(self) -> str:
        return self.chat_template

    def added_id(self, text: str) -> int | None:
        return {"<s>": BOS, "</s>": EOS}.get(text)

    def pieces(self, text: str, num_bytes: int) -> Iterator[str]:
        return (text[at : at + num_bytes // 4] for at in range(0, len(text), num_bytes // 4))

    def token_bytes(self, token_id: int) -> bytes:
        return {BOS: b"<s>", EOS: b"</s>"}.get(token_id) or bytes([token_id])

    def encode(self, text: str, add_special: bool = True, escape: str = "") -> list[int]:
        if escape:
            return self.control_tokens.pipeline(escape).encode(text, add_special_tokens=False).ids
        found = [BOS] * add_special
        for piece in re.split("(<s>|</s>)", text):
            special = self.added_id(piece)
            found += list(piece.encode()) if special is None else [special]
        return found

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        special = {BOS: "" if skip_special else "<s>", EOS: "" if skip_special else "</s>"}
        text, plain = "", bytearray()
        for each in [*ids, EOS if skip_special else None]:
            if each is not None and each < 256:
                plain.append(each)
                continue
            text += plain.decode(errors="replace") + special.get(each, "")
            plain.clear()
        return text

    def chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
    ) -> str:
        for before, after in itertools.pairwise(messages):
            if before["role"] == after["role"]:
                raise RequestError("the chat template refuses these messages: roles must alternate", "messages")
        text = "".join(f"{each['role']}: {each['content']}\n" for each in messages)
        text += "".join(f"{name}={value}\n" for name, value in (variables or {}).items())
        return text + "assistant:" * add_generation_prompt

    def escape_names(
        self, messages: list[dict[str, Any]], variables: dict[str, Any] | None = None
    ) -> EscapedConversation:
        return self.control_tokens.escape(messages, variables or {})

    def chat_ids(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        messages, _, escape = self.escape_names(messages)
        return self.encode(self.chat(messages, add_generation_prompt), False, escape)


@functools.cache
def grammars() -> GrammarCompiler:
    """Of a tokenizer whose tokens are bytes."""
    tokenizer = Tokenizer(tiny_models.byte_tokenizer(), None, tiny_models.BOS, tiny_models.EOS)
    return GrammarCompiler(tokenizer, VOCAB, (EOS,))


def _embedding(ids: list[int], pooling: str) -> list[float]:
    """Of a text: how often it has four letters; of its last token: which one it is."""
    return [float((ids if pooling == "mean" else ids[-1:]).count(ord(letter))) for letter in "abcd"]


@dataclass(eq=False)
class FakeRequest:
    """What the engine has admitted.

    given  the prompt without its token ids
    """

    given: dict[str, Any]
    prompt_ids: list[int]
    grammar: object = None

    @property
    def prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt_ids, **self.given}


class FakeEngine:
    """Answer i of a prompt is the prompt turned by `i + seed` bytes, then the end token.

    step_seconds  time of a token
    fail_at       index of the token at which generate raises
    queue_limit   requests that it admits
    live          the ids of unfinished requests: what a leak would leave behind
    prompts       as they came
    cached        (salt, prefix): what it says its cache holds
    known         (salt, prefix): the same, and its disk
    moved         what its stats say of tiers
    pinned_salts  what it was asked to pin for
    kept_fraction  what it says of every prompt
    operations    of the instances behind it
    """

    model_name = "fake"
    sampling_defaults = NO_DEFAULTS
    context_limit = "model.max_context"
    operations: Any = None

    def __init__(
        self, step_seconds: float = 0.0, fail_at: int | None = None, queue_limit: int = 1000, max_context: int = 2048
    ) -> None:
        self.step_seconds = step_seconds
        self.fail_at = fail_at
        self.queue_limit = queue_limit
        self.tokenizer = ByteTokenizer()
        self.shape = SimpleNamespace(vocab_size=VOCAB, hidden_size=4)
        self.model_path = Path("/no/such/model")
        self.config = EngineConfig()
        self.max_context = max_context
        self.is_ready = True
        self.retry_after = 2.5
        self.live: set[str] = set()
        self.started = 0
        self.aborted = 0
        self.decoded = 0
        self.prompts: list[dict[str, Any]] = []
        self.cached: list[tuple[str, Prefix]] = []
        self.known: list[tuple[str, CachedPrefix]] = []
        self.moved: dict[str, Any] = {}
        self.pinned_salts: list[str] = []
        self.kept_fraction: float | None = None

    async def compile_grammar(self, wanted: StructuredOutputsParams, cache_salt: str = "") -> object:
        return grammars().compile(wanted, cache_salt)

    async def admit(self, prompt: Any, params: SamplingParams) -> Any:
        self._check(prompt)
        held = None
        if params.structured_outputs is not None:
            held = await self.compile_grammar(params.structured_outputs, prompt.get("cache_salt", ""))
        given = {name: value for name, value in prompt.items() if name != "prompt_token_ids"}
        return FakeRequest(given, prompt["prompt_token_ids"], held)

    def _check(self, prompt: Any) -> None:
        if len(prompt["prompt_token_ids"]) >= self.max_context:
            raise RequestError("prompt too long", param="prompt")
        self._check_queue()

    def _check_queue(self) -> None:
        if len(self.live) >= self.queue_limit:
            raise QueueFullError(f"{self.queue_limit} requests are waiting", retry_after=self.retry_after)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        assert request_id not in self.live
        if isinstance(prompt, FakeRequest):
            prompt = prompt.prompt
            self._check_queue()
        else:
            self._check({"prompt_token_ids": self.tokenizer.encode(prompt["prompt"])} if "prompt" in prompt else prompt)
        if "prompt" in prompt:
            hints = {name: value for name, value in prompt.items() if name != "prompt"}
            prompt = {"prompt_token_ids": self.tokenizer.encode(prompt["prompt"]), **hints}
        self.live.add(str(request_id))
        self.started += 1
        self.prompts.append(prompt)
        try:
            async for item in self._generate(prompt["prompt_token_ids"], sampling_params, str(request_id)):
                yield item
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted += 1
            raise
        finally:
            self.live.discard(str(request_id))

    async def _generate(
        self, ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None] + [_logprobs(each, params.prompt_logprobs, best=each % 2 == 0) for each in ids[1:]]
        room = self.max_context - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        answers = [_answer(ids, index + (params.seed or 0)) for index in range(params.n)]
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in answers]
        stops = [StopChecker(params, {EOS}) for _ in answers]
        running = set(range(params.n))
        step = 0
        while running:
            await asyncio.sleep(self.step_seconds)
            if self.fail_at is not None and step >= self.fail_at:
                raise RuntimeError("boom: a secret of the engine")
            if not self.is_ready:
                outputs = [CompletionOutput(index, "", [], None, "abort") for index in sorted(running)]
                yield RequestOutput(request_id, None, ids, prompt_logprobs, outputs, True, 3)
                return
            outputs = []
            for index in sorted(running):
                answer = answers[index]
                token = EOS if step == len(answer) and not params.ignore_eos else answer[step % len(answer)]
                if params.logit_bias:
                    token = max(params.logit_bias, key=lambda each: params.logit_bias[each])
                last = step + 1 == max_tokens
                delta = decoders[index].decode(bytes([token]) if token < 256 else b"", final=last)
                if token >= 256 and not params.skip_special_tokens:
                    delta += self.tokenizer.decode([token], skip_special=False)
                text, stop = stops[index].push(delta, token, last)
                logprobs = None if params.logprobs is None else [_logprobs(token, params.logprobs)]
                output = CompletionOutput(index, text, [token], logprobs)
                if stop is not None:
                    running.discard(index)
                    output.finish_reason, output.stop_reason = stop.finish_reason, stop.stop_reason
                outputs.append(output)
                self.decoded += 1
            step += 1
            yield RequestOutput(
                request_id,
                None,
                ids,
                prompt_logprobs,
                outputs,
                not running,
                3,
                {"arena": 1, "disk": 2},
                kept_fraction=self.kept_fraction,
                embedding=None if params.pooling is None else _embedding(ids, params.pooling),
            )
            prompt_logprobs = None

    def stats(self) -> dict[str, Any]:
        return {
            "prefill_tokens_computed": 10,
            "prefill_tokens_cached": 5,
            "decode_tokens": self.decoded,
            "replayed_tokens": 0,
            "preemptions": 0,
            "running": len(self.live),
            "waiting": 0,
            "steps": self.decoded,
            "cache": {
                "bytes_total": 100,
                "bytes_used": 0,
                "bytes_cached": 7,
                "bytes_free": 93,
                "bytes_peak": 50,
                "bytes_pinned": 3,
                "bytes_saved": 2,
                "bytes_evicted": 11,
                "bytes_retention_freed": 12,
            },
            **self.moved,
        }

    async def prefixes(self, visible: Callable[[str], bool] = lambda salt: True) -> list[Prefix]:
        return [prefix for salt, prefix in self.cached if visible(salt)]

    def prefix_key(self, prompt: dict[str, Any]) -> str:
        count = len(prompt["prompt_token_ids"])
        if count < 64:
            raise RequestError(f"the prompt has {count} tokens; the cache keeps whole chunks of 64", "prompt")
        return f"{count // 64:032x}"

    async def known_prefixes(self, visible: Callable[[str], bool] = lambda salt: True) -> list[CachedPrefix]:
        return [prefix for salt, prefix in self.known if visible(salt)]

    async def find_prefix(self, key: str, visible: Callable[[str], bool] = lambda salt: True) -> CachedPrefix | None:
        return next((prefix for prefix in await self.known_prefixes(visible) if prefix.key == key), None)

    async def drop_prefix(self, key: str, visible: Callable[[str], bool] = lambda salt: True) -> dict[str, int] | None:
        if await self.find_prefix(key, visible) is None:
            return None
        self.known = [(salt, prefix) for salt, prefix in self.known if prefix.key != key]
        return {"arena": 1, "disk": 2}

    async def pin(self, salts: Iterable[str] = ("",)) -> None:
        self.pinned_salts += salts

    async def close(self, drain_seconds: float = 0.0) -> None:
        self.is_ready = False


def _answer(ids: list[int], turn: int) -> list[int]:
    plain = [each for each in ids if each < 256] or [63]
    turn %= len(plain)
    return plain[turn:] + plain[:turn]


def _logprobs(token: int, count: int, best: bool = True) -> dict[int, Logprob]:
    """`token` at -0.5, before or behind the others, which follow in steps of one."""
    found = {token: Logprob(-0.5, 1 if best else 2)}
    for each in range(1, count + 1):
        found.setdefault((token + each) % VOCAB, Logprob(-0.5 - each if best else -0.25 * each, each + 1))
    return found
