"""Text to token ids and back, at a cost that the context bounds, and off the event loop where there is much to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from quire.server.errors import ApiError, bad_request
from quire.server.schema import Message

if TYPE_CHECKING:
    from quire.server.protocol import Engine

T = TypeVar("T")

# About 5 ms of tokenization: more would be felt by the streams that share the event loop, so it goes to a thread.
LONG_TEXT = 16 * 1024
CALL_CHARS = 32
"""Characters that are tokenized in the time that a call takes anyway: 10 us."""

WHOLE_CHARS = 256 * 1024
"""Characters of a text that is encoded as a whole: 0.3 s and 90 MB at worst, for characters of four bytes."""
PIECE_CHARS = 64 * 1024
"""Characters of each piece of a longer one that is looked at first: 0.1 s and 20 MB at worst."""


class Texts:
    """The tokenizer of an engine, for requests. One long text is worked on at a time, and one conversation rendered:
    each may keep a core and some memory busy.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._long_texts = ThreadPoolExecutor(1, "quire-encode")
        self._templates = ThreadPoolExecutor(1, "quire-template")

    async def encode(self, text: str, add_special: bool, param: str) -> list[int]:
        """The token ids of `text`. Raises 400 for one far too long for the context; see `_check_length`."""
        return (await self._off_loop(len(text), lambda: [self._encode(text, add_special, param)]))[0]

    async def encode_all(self, texts: Sequence[str], add_special: bool, param: str) -> list[list[int]]:
        """The token ids of several prompts. Raises 400 at the first that has no room in the context."""

        def run() -> list[list[int]]:
            found = []
            for text in texts:
                found.append(self._encode(text, add_special, param))
                if len(found[-1]) >= self.engine.max_context:
                    raise self._too_long(param, f"{len(found[-1])} tokens")
            return found

        return await self._off_loop(sum(len(text) + CALL_CHARS for text in texts), run)

    async def decode(self, token_ids: Sequence[int], skip_special: bool, param: str) -> str:
        """The text of token ids. Raises 400 for more than the context holds."""
        if len(token_ids) > self.engine.max_context:
            raise self._too_long(param, f"{len(token_ids)} tokens")
        decode = self.engine.tokenizer.decode
        return await self._off_loop(len(token_ids), lambda: decode(token_ids, skip_special))

    async def _off_loop(self, size: int, run: Callable[[], T]) -> T:
        """What `run` returns; on a thread, one at a time, if there is much to do."""
        if size <= LONG_TEXT:
            return run()
        return await asyncio.get_running_loop().run_in_executor(self._long_texts, run)

    def _encode(self, text: str, add_special: bool, param: str) -> list[int]:
        self._check_length(text, param)
        ids: list[int] = self.engine.tokenizer.encode(text, add_special)
        return ids

    def _check_length(self, text: str, param: str) -> None:
        """Raises 400 for a text that cannot fit into the context, at a cost that the context bounds, not the text.

        A text that is just longer than the context passes: its tokens are counted exactly. A longer one is read in
        pieces, and no further than the context goes: 8 MB of one word would cost 3 s and 400 MB as a whole.
        """
        if len(text) <= LONG_TEXT:
            return
        longest = self.engine.tokenizer.max_token_bytes
        # Normalizers may join characters, never as many as four.
        least = len(text) // (4 * longest)
        if least > self.engine.max_context:
            raise self._too_long(param, f"{len(text)} characters, which are at least {least} tokens")
        if len(text) <= WHOLE_CHARS:
            return
        num_tokens = 0
        for begin in range(0, len(text), PIECE_CHARS):
            # A cut splits at most one token, into no more than its bytes.
            num_tokens += len(self.engine.tokenizer.encode(text[begin : begin + PIECE_CHARS], False)) - longest
            if num_tokens > self.engine.max_context:
                raise self._too_long(param, f"{len(text)} characters, which are at least {num_tokens} tokens")

    def _too_long(self, param: str, held: str) -> ApiError:
        message = (
            f"This model's maximum context length is {self.engine.max_context} tokens ({self.engine.context_limit})."
            f" However, '{param}' holds {held}. Please reduce its length."
        )
        return bad_request(message, param, "context_length_exceeded")

    async def encode_chat(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The token ids of a conversation, by the model's chat template, which may read `variables`. Raises
        RequestError if it refuses them, or makes more than the context holds.
        """

        def run() -> str:
            rendered = [message.for_template() for message in messages]
            text: str = self.engine.tokenizer.chat(rendered, add_generation_prompt, variables)
            return text

        # Always on a thread: another process renders, and a bad template takes all of the time that it gets.
        text = await asyncio.get_running_loop().run_in_executor(self._templates, run)
        return await self.encode(text, False, "messages")
