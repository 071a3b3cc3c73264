"""Text <-> token ids, incremental detokenization, and the model's chat template.

Uses the `tokenizers` library directly: `transformers` would cost seconds of start-up and, for a GGUF, lose the digit
rule.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quire.errors import ModelError, RequestError
from quire.models.chat import ChatTemplate
from quire.models.control_tokens import ControlTokens, EscapedConversation
from quire.models.files import read_json
from quire.models.gguf_file import read_header
from quire.models.settings import CheckedSettings, one_line
from quire.models.vocabulary import from_file, from_gguf, from_merges, gguf_token, gguf_vocabulary, token_text
from quire.safe_io import read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Pipeline

# Number of prompt ids before a detokenizer's text: a character has at most four bytes, hence at most four tokens.
_LOOKBACK = 8


LONG_TEXT = 16 * 1024
"""An ASCII text longer than this is encoded by the library's batch call. It lets other threads run and keeps no offsets
(2,000,000 characters in 0.65 s and 3 MB, against 1.4 s, all threads stopped, and 320 MB)."""

GROWTH = 33
"""Most bytes of a character once normalized: U+FDFA is 18 characters of 33 bytes under NFKC. Thus a text other than
ASCII is long from LONG_TEXT / GROWTH characters on."""

SLICE_CHARS = 1024
"""Characters that are normalized in one call, to 34 kB at most, in 0.5 ms."""


class Detokenizer(Protocol):
    """Turns ids into text incrementally. Returns only complete characters.

    Invariant: the joined results of `push` and `flush` equal `Tokenizer.decode` of all ids. The exception is an
    incomplete last character, which is left out here; `decode` writes U+FFFD.
    """

    def push(self, token_id: int) -> str:
        """The text that one more token completes; empty if its character is incomplete or the token is skipped."""

    def flush(self) -> str:
        """The remaining complete characters. The detokenizer must not be used afterwards."""


class Tokenizer:
    """The tokenizer of one model. Immutable; may be used by several threads."""

    def __init__(
        self,
        pipeline: Pipeline,
        chat_template: ChatTemplate | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        """tool_template: the template for conversations with tools; None: `chat_template` serves them too."""
        self._pipeline = pipeline
        self._chat_template = chat_template
        self._tool_template = tool_template or chat_template
        self.bos_token = bos_token
        self.eos_token = eos_token
        added = pipeline.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self.vocab_size: int = pipeline.get_vocab_size(with_added_tokens=True)
        self.bos_id = None if bos_token is None else pipeline.token_to_id(bos_token)
        eos_id = None if eos_token is None else pipeline.token_to_id(eos_token)
        self.eos_ids: tuple[int, ...] = () if eos_id is None else (eos_id,)
        self._to_bytes, self._strips_space = _byte_rule(pipeline)
        self._bytes: dict[int, bytes] = {}

    @functools.cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self._pipeline)

    @functools.cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token."""
        return max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be called."""
        return self._chat_template is not None

    @property
    def chat_template(self) -> str:
        """The source of the model's chat template; empty if it has none."""
        return "" if self._chat_template is None else self._chat_template.source

    @property
    def tool_template(self) -> str:
        """The source of the template of conversations with tools. For most models it is `chat_template`."""
        return "" if self._tool_template is None else self._tool_template.source

    def encode(self, text: str, add_special: bool = True, escape: str = "") -> list[int]:
        """Token ids of a text. add_special adds the model's tokens around a text (bos); it does not affect special
        tokens within. escape: the escape of an `EscapedConversation`; such a text gets no tokens around it.
        """
        assert not (escape and add_special), "tokens around a rendered conversation"
        pipeline = self._control_tokens.pipeline(escape) if escape else self._pipeline
        try:
            if len(text) > (LONG_TEXT if text.isascii() else LONG_TEXT // GROWTH):
                return pipeline.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
            return pipeline.encode(text, add_special_tokens=add_special).ids
        except (TypeError, UnicodeEncodeError):
            raise RequestError(_no_unicode(text), "prompt") from None

    def pieces(self, text: str, num_bytes: int) -> Iterator[str]:
        """Splits a text into pieces of at most `num_bytes` once normalized, or of 1,024 characters. This bounds the
        number of tokens of a piece, and the time and memory of its encoding.
        """
        normalizer = self._pipeline.normalizer
        begin = size = 0
        for at in range(0, len(text), SLICE_CHARS):
            part = text[at : at + SLICE_CHARS]
            try:
                grown = len((part if normalizer is None else normalizer.normalize_str(part)).encode())
            except (TypeError, UnicodeEncodeError):
                raise RequestError(_no_unicode(text), "prompt") from None
            if at > begin and size + grown > num_bytes:
                yield text[begin:at]
                begin, size = at, 0
            size += grown
        if begin < len(text):
            yield text[begin:]

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids. Bytes that are not a character become U+FFFD; unknown ids become nothing."""
        if self._to_bytes is None:
            return self._pipeline.decode(list(token_ids), skip_special_tokens=skip_special)
        skipped = self.special_ids if skip_special else frozenset()
        found = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        text = found.decode("utf-8", "replace")
        return text[1:] if self._strips_space and text.startswith(" ") else text

    def stream(self, prompt_ids: Sequence[int] = (), skip_special: bool = True) -> Detokenizer:
        """A detokenizer for text that continues `prompt_ids`.

        After a prompt, the first piece keeps its leading space and may complete a character that the prompt began. If
        it does not, the character is the prompt's, and the pieces have no U+FFFD for it. Without a prompt, the pieces
        are those of a separate text.
        """
        skipped = self.special_ids if skip_special else frozenset()
        if self._to_bytes is None:
            return _WindowDetokenizer(self._pipeline, skipped, prompt_ids[-_LOOKBACK:])
        strips = self._strips_space and not prompt_ids
        return _ByteDetokenizer(self.token_bytes, skipped, prompt_ids[-_LOOKBACK:], strips)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; for some tokens only a part of a character; empty for ids outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            text = self._pipeline.id_to_token(token_id) if token_id >= 0 else None
            to_bytes = self._to_bytes or str.encode
            found = self._bytes[token_id] = b"" if text is None else to_bytes(text)
        return found

    def to_json(self) -> str:
        """The whole tokenizer, in the form of a tokenizer.json."""
        return self._pipeline.to_str()

    def added_id(self, text: str) -> int | None:
        """Id of the added token with this text, special or not; None if there is none."""
        return self._added_ids.get(text)

    def token_id(self, text: str) -> int | None:
        """Id of the token with this text in the vocabulary, such as "<|im_end|>"; None if there is none."""
        return self._pipeline.token_to_id(text)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. Encode it with add_special=False, because templates write bos themselves.

        variables  variables for the template, such as enable_thinking; with `tools` the template is `tool_template`
        Raises RequestError if the model has no chat template or the template rejects the messages.
        """
        template = self._tool_template if (variables or {}).get("tools") else self._chat_template
        if template is None:
            raise RequestError(
                "this model has no chat template; set model.chat_template or use plain completions", "messages"
            )
        return template.render(messages, add_generation_prompt, variables)

    def escape_names(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> EscapedConversation:
        """The conversation with the names of control tokens in texts of users and tools escaped. Render it with `chat`,
        then encode it with its escape.
        """
        return self._control_tokens.escape(messages, variables or {}, self.chat_template + self.tool_template)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, in which names of control tokens in texts of users and tools are text."""
        escaped = self.escape_names(messages)
        text = self.chat(escaped.messages, add_generation_prompt)
        return self.encode(text, add_special=False, escape=escaped.escape)


def _no_unicode(text: str) -> str:
    """The reason why a text cannot be encoded. Python represents undecodable bytes as halves of surrogate pairs."""
    halves = ((place, ord(char)) for place, char in enumerate(text) if "\ud800" <= char <= "\udfff")
    place, half = next(halves, (0, 0))
    if not half:
        return "the text cannot be encoded"
    if 0xDC80 <= half <= 0xDCFF:
        return f"the text is not valid UTF-8: byte 0x{half - 0xDC00:02x} after {place} characters"
    return f"the text is not valid Unicode: half of a surrogate pair after {place} characters"


@one_line()
def load_tokenizer(
    path: str | Path, tokenizer: str | Path | None = None, chat_template: str | Path | None = None
) -> Tokenizer:
    """The tokenizer of a model folder or GGUF.

    tokenizer      a tokenizer.json, or a folder with one, to use instead of the model's own
    chat_template  a file to use instead of the model's own template
    Raises ModelError, one line with the file and what is missing or wrong in it.
    """
    path = Path(path)
    if tokenizer is not None:
        pipeline, tokens, templates = _load(Path(tokenizer))
        own_tokens, own_templates = _own_extras(path)
        tokens, templates = {**own_tokens, **tokens}, templates or own_templates
    else:
        pipeline, tokens, templates = _load(path)
    if chat_template is not None:
        templates = {_PLAIN: _read_text(Path(chat_template))}
    with one_line(chat_template or path):
        compiled = {name: ChatTemplate(text, tokens) for name, text in templates.items()}
    return Tokenizer(
        pipeline, compiled.get(_PLAIN), tokens.get("bos_token"), tokens.get("eos_token"), compiled.get(_TOOLS)
    )


_PLAIN, _TOOLS = "default", "tool_use"
"""Names of chat templates, as in transformers. Other names are for other tasks, such as `rag`."""

_Parts = tuple["Pipeline", dict[str, str], dict[str, str]]
"""Pipeline, special tokens by role, chat templates by name."""


def _load(path: Path) -> _Parts:
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            pipeline = from_file(path / "tokenizer.json")
        elif (path / "vocab.json").is_file():
            pipeline = from_merges(path, _tokenizer_config(path))
        else:
            hint = "; tokenizer.model alone is not read, convert it" if (path / "tokenizer.model").exists() else ""
            raise ModelError(f"{path}: no tokenizer.json{hint} (or name one with model.tokenizer)")
        return pipeline, *_own_extras(path)
    if path.suffix == ".gguf":
        return from_gguf(read_header(path).metadata, path), *_own_extras(path)
    if not path.is_file():
        raise ModelError(f"{path}: no such tokenizer")
    return from_file(path), *_own_extras(path.parent)


def _own_extras(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """(special tokens by role, chat templates by name) of a folder or GGUF."""
    if path.suffix == ".gguf":
        metadata = read_header(path).metadata
        roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        vocabulary = gguf_vocabulary(metadata, path)
        texts = {role: gguf_token(vocabulary, name) for role, name in roles.items()}
        settings, key = CheckedSettings(metadata, str(path)), "tokenizer.chat_template"
        templates = {_PLAIN: settings.text(key, ""), _TOOLS: settings.text(f"{key}.{_TOOLS}", "")}
    else:
        config = _tokenizer_config(path)
        texts = {key: token_text(config, key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
        separate, more = path / "chat_template.jinja", path / "additional_chat_templates" / f"{_TOOLS}.jinja"
        templates = {_PLAIN: _read_text(separate)} if separate.exists() else _templates(config)
        if more.exists():
            templates[_TOOLS] = _read_text(more)
    tokens = {role: text for role, text in texts.items() if text is not None}
    return tokens, {name: text for name, text in templates.items() if text}


def _templates(config: CheckedSettings) -> dict[str, str]:
    """The chat templates in a tokenizer_config.json, by name. Without a default template, the first one becomes it."""
    if not isinstance(config.values.get("chat_template"), list):
        return {_PLAIN: config.text("chat_template", "")}
    named = {entry.text("name", ""): entry.text("template", "") for entry in config.tables("chat_template")}
    plain = named.get(_PLAIN) or next(iter(named.values()), "")
    return {_PLAIN: plain, _TOOLS: named.get(_TOOLS, "")}


def _tokenizer_config(folder: Path) -> CheckedSettings:
    path = folder / "tokenizer_config.json"
    return CheckedSettings(read_json(path), str(path))


def _read_text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from None


class _ByteDetokenizer:
    """For vocabularies of byte strings: one table look-up and one incremental UTF-8 step per token."""

    __slots__ = ("_bytes_of", "_decode", "_decoder", "_is_first", "_skipped", "_strip")

    def __init__(
        self, bytes_of: Callable[[int], bytes], skipped: frozenset[int], before: Sequence[int], strip: bool
    ) -> None:
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._strip = strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = self._decoder.decode
        self._is_first = True  # whether the last byte so far is the prompt's
        for token_id in before:
            if token_id not in skipped:
                self._decode(bytes_of(token_id))

    def push(self, token_id: int) -> str:
        """See Detokenizer.push."""
        if token_id in self._skipped:
            return ""
        data = self._bytes_of(token_id)
        if self._is_first and data:
            self._is_first = False
            if not 0x80 <= data[0] < 0xC0:  # it continues no character
                self._decoder.reset()
        text = self._decode(data)
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """See Detokenizer.flush: every complete character has already been returned."""
        return ""


class _WindowDetokenizer:
    """For any other decoder: decodes a short window without and with the new tokens and takes the difference."""

    def __init__(self, pipeline: Pipeline, skipped: frozenset[int], before: Sequence[int]) -> None:
        self._pipeline = pipeline
        self._skipped = skipped
        self._window = [token_id for token_id in before if token_id not in skipped]
        self._done = len(self._window)  # number of ids of the window with their text returned

    def push(self, token_id: int) -> str:
        """See Detokenizer.push."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        return self._take(final=False)

    def flush(self) -> str:
        """See Detokenizer.flush."""
        return self._take(final=True).rstrip("\ufffd")

    def _take(self, final: bool) -> str:
        before = self._pipeline.decode(self._window[: self._done], skip_special_tokens=False)
        text = self._pipeline.decode(self._window, skip_special_tokens=False)
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        # Keeps the tokens just returned as context of the next ones.
        self._window = self._window[self._done :]
        self._done = len(self._window)
        return text[len(before) :]


def _byte_rule(pipeline: Pipeline) -> tuple[Callable[[str], bytes] | None, bool]:
    """The function from a token's text to its bytes, and whether a text loses a leading space; (None, False) for other
    decoders.
    """
    steps = json.loads(pipeline.decoder.__getstate__()) if pipeline.decoder is not None else {}
    if steps.get("type") == "ByteLevel":
        return _byte_level_bytes, False
    steps = steps.get("decoders", [])
    kinds = [step["type"] for step in steps]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    is_known = kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == _UNDERLINE_TO_SPACE
    if not is_known or steps[3:] not in ([], strip):
        return None, False
    return _sentencepiece_bytes, steps[3:] == strip


_UNDERLINE_TO_SPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes map to themselves, the other 68 bytes to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden: Iterable[int] = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + order): byte for order, byte in enumerate(hidden)}


def _byte_level_bytes(text: str) -> bytes:
    alphabet = _byte_of_char()
    try:
        return bytes([alphabet[char] for char in text])
    except KeyError:
        # An added token with a character outside the alphabet (a space, say) is written literally.
        return text.encode()


def _sentencepiece_bytes(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return text.replace("▁", " ").encode()
