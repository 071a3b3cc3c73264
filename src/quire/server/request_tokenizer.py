"""Text to token ids and back. The context bounds the cost, and long texts are processed off the event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from quire.errors import RequestError
from quire.models.tokenizer import GROWTH
from quire.server.errors import ApiError, bad_request
from quire.server.json_complexity import MAX_VALUES
from quire.tools.calls import Tool
from quire.tools.conversation import ChatText, render_chat

if TYPE_CHECKING:
    from quire.server.engines import ServedEngine

T = TypeVar("T")

# About 5 ms of tokenization. Longer texts would delay streams on the event loop, so a thread tokenizes them.
LONG_TEXT = 16 * 1024
CALL_CHARS = 32
"""Characters with the same cost as the overhead of a call: 10 us."""

WHOLE_BYTES = 256 * 1024
"""Maximum size of a text, once normalized, that is encoded as a whole without being counted: 0.3 s and 40 MB at worst,
for a token per byte."""
END = "\u2063quire-ends-here\u2063"
"""Marks the end of a message that the answer continues, while its conversation is rendered."""

PIECE_BYTES = 64 * 1024
"""Size, once normalized, of the pieces in which a longer text is first counted: 0.1 s and 10 MB at worst."""

MAX_TOKENS = MAX_VALUES
"""Maximum number of tokens of all texts of a request, the same as its maximum number of ids. 8 MiB of rare characters,
in 2,048 texts that fit the context, would be 8,000,000 tokens and 300 MB."""


class RequestTokenizer:
    """The tokenizer of an engine, for requests. Processes one long text and renders one conversation at a time, because
    each may use a core and much memory.
    """

    def __init__(self, engine: ServedEngine, keep_tokens: bool = False) -> None:
        """keep_tokens: for texts of users and tools in conversations; see `render_chat`."""
        self.engine = engine
        self._keep_tokens = keep_tokens
        self._long_texts = ThreadPoolExecutor(1, "quire-encode")
        self._templates = ThreadPoolExecutor(1, "quire-template")

    async def encode(self, text: str, add_special: bool, param: str) -> list[int]:
        """The token ids of `text`. Raises ApiError 400 if it is far too long for the context; see `_check_length`."""
        return await self._off_loop(_size(text), lambda: self._encode(text, add_special, param))

    async def encode_all(self, texts: Sequence[str], add_special: bool, param: str) -> list[list[int]]:
        """The token ids of several prompts. Raises ApiError 400 at the first that does not fit the context."""

        def run() -> list[list[int]]:
            found, num_tokens = [], 0
            for text in texts:
                found.append(self._encode(text, add_special, param))
                if len(found[-1]) >= self.engine.max_context:
                    raise self._too_long(param, f"{len(found[-1])} tokens")
                num_tokens += len(found[-1])
                if num_tokens > MAX_TOKENS and len(texts) > 1:
                    message = f"the {len(texts)} texts of '{param}' have more than {MAX_TOKENS:,} tokens together"
                    raise bad_request(f"{message}; send fewer in one request", param)
            return found

        return await self._off_loop(sum(_size(text) + CALL_CHARS for text in texts), run)

    async def decode(self, token_ids: Sequence[int], skip_special: bool, param: str) -> str:
        """The text of token ids. Raises ApiError 400 for more than the context holds."""
        if len(token_ids) > self.engine.max_context:
            raise self._too_long(param, f"{len(token_ids)} tokens")
        decode = self.engine.tokenizer.decode
        return await self._off_loop(len(token_ids), lambda: decode(token_ids, skip_special))

    async def _off_loop(self, size: int, run: Callable[[], T]) -> T:
        """Returns `run()`. For a large `size` it runs on a thread, one at a time."""
        if size <= LONG_TEXT:
            return run()
        return await asyncio.get_running_loop().run_in_executor(self._long_texts, run)

    def _encode(self, text: str, add_special: bool, param: str, escape: str = "") -> list[int]:
        self._check_length(text, param, escape)
        ids: list[int] = self.engine.tokenizer.encode(text, add_special, escape)
        return ids

    def _check_length(self, text: str, param: str, escape: str) -> None:
        """Raises ApiError 400 for a text that cannot fit the context. The context bounds the cost, not the text.

        A text that is only a little too long passes, and its tokens are counted exactly later. A longer text is counted
        in pieces, until the count exceeds the context. As a whole, 8 MB of one word would cost 3 s and 400 MB, and
        262,144 characters that normalization expands to 18 each would cost 1 GB.
        """
        if _size(text) <= LONG_TEXT:
            return
        tokenizer, longest = self.engine.tokenizer, self.engine.tokenizer.max_token_bytes
        # Normalizers may join characters, but never four.
        num_chars = len(text) - (text.count(escape) if escape else 0)
        least = num_chars // (4 * longest)
        if least > self.engine.max_context:
            raise self._too_long(param, f"{num_chars} characters, which are at least {least} tokens")
        pieces = tokenizer.pieces(text, PIECE_BYTES)
        first = list(itertools.islice(pieces, WHOLE_BYTES // PIECE_BYTES + 1))
        if len(first) <= WHOLE_BYTES // PIECE_BYTES:
            return
        num_tokens = 0
        for piece in itertools.chain(first, pieces):
            # A cut splits at most one token, at most into its bytes.
            num_tokens += len(tokenizer.encode(piece, False, escape)) - longest
            if num_tokens > self.engine.max_context:
                raise self._too_long(param, f"{num_chars} characters, which are at least {num_tokens} tokens")

    def _check_chars(self, num_chars: int, param: str) -> None:
        """Raises ApiError 400 for a conversation with too many characters for a context. Such a conversation is not
        rendered: 8 MB of text with one emoji would take 200 MB, here and in the rendering process.
        """
        if num_chars <= LONG_TEXT:
            return
        most = 4 * self.engine.tokenizer.max_token_bytes * self.engine.max_context
        if num_chars > most:
            held = f"{num_chars:,} characters with its tools and variables; at most {most:,} can fit"
            raise self._too_long(param, held)

    def _too_long(self, param: str, held: str) -> ApiError:
        message = (
            f"This model's maximum context length is {self.engine.max_context} tokens ({self.engine.context_limit})."
            f" However, '{param}' has {held}. Please reduce its length."
        )
        return bad_request(message, param, "context_length_exceeded")

    async def encode_chat(
        self,
        messages: Callable[[], list[dict[str, Any]]],
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] = (),
        *,
        continues: bool = False,
        param: str = "messages",
    ) -> list[int]:
        """The token ids of a conversation, rendered by the model's chat template with `variables`. Raises RequestError
        if the template rejects the messages or its text does not fit the context.

        messages   makes the messages, in the form of chat templates, on the thread
        tools      tools that the answer may call
        continues  whether the answer continues the last message
        param      parameter that errors name
        """

        def run() -> ChatText:
            given, opens = messages(), add_generation_prompt and not continues
            schemas = [tool.for_template() for tool in tools]
            self._check_chars(_num_chars(given) + _num_chars(schemas) + _num_chars(variables or {}), param)
            if continues:
                given[-1] = {**given[-1], "content": given[-1]["content"] + END}
            chat = render_chat(self.engine.tokenizer, given, tools, variables, opens, keep_tokens=self._keep_tokens)
            if continues and END not in chat.escaped:
                message = "the chat template changes the last message, so that it cannot be continued"
                raise bad_request(message, "continue_final_message")
            return ChatText(chat.escaped[: chat.escaped.rfind(END)], chat.escape) if continues else chat

        # Always on a thread: another process renders, and a bad template uses up its whole time limit.
        try:
            text, escape = await asyncio.get_running_loop().run_in_executor(self._templates, run)
        except ApiError as error:
            raise error.with_traceback(None) from None  # the frames of the traceback hold the conversation
        except RequestError as error:
            raise RequestError(str(error), param if error.param == "messages" else error.param) from None
        # The first text with escapes takes up to 0.1 s, for vocabularies with 6,000 control tokens.
        size = LONG_TEXT + 1 if escape else _size(text)
        return await self._off_loop(size, lambda: self._encode(text, False, param, escape))


def _size(text: str) -> int:
    """Upper bound of a text's bytes once normalized, and thus of its tokens; 0.1 us for ASCII."""
    return len(text) if text.isascii() else GROWTH * len(text)


def _num_chars(value: Any) -> int:
    """Characters of all texts in a JSON value, without names."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list | tuple):  # before mappings, which it takes 1 us to recognize
        return sum(map(_num_chars, value))
    return sum(map(_num_chars, value.values())) if isinstance(value, Mapping) else 0
