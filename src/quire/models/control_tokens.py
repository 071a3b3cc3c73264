"""Names of control tokens in texts of users and tools are text: a `<|im_end|>` that a user typed ends no message.

A chat template renders a conversation to one string, and the tokenizer turns every name of a control token in a string
into that token. So the names in texts that the application did not write are escaped before the template is rendered: a
character that the conversation lacks, the escape, is put behind the first character of each. Added tokens do not match
an escaped name, and templates keep the escape. A second pipeline with the same vocabulary drops the escapes after it
has matched added tokens and before it splits words. Hence a name is tokenized together with the text around it, as if
no added token had this name, and everything else is tokenized as in the first pipeline.

Control tokens are the tokens that the tokenizer declares special, and added tokens with a bar inside their brackets,
such as `<|User|>`: DeepSeek's tokenizers declare their headers as ordinary added tokens. A name has at least two
characters.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise, repeat
from typing import Any, NamedTuple

from tokenizers import AddedToken, NormalizedString, PreTokenizedString, Tokenizer, pre_tokenizers

from quire.errors import RequestError

OWN_ROLES = ("system", "developer", "assistant")
"""Roles with texts of the application and of the model. A replayed answer needs its tokens of calls and reasoning."""

FOREIGN_VARIABLES = ("tools", "documents")
"""Variables of templates with texts from elsewhere: definitions of tools, and documents that were found."""

_BARRED = re.compile(r"<[|｜].*>|<.*[|｜]>", re.DOTALL)

_ESCAPES = (*map(chr, range(0xA500, 0xA60C)), *map(chr, range(0x20000, 0x2A6D7)))
"""Letters of the Vai script, then rare Chinese characters: few texts have them, normalizing leaves them, and they are
printable, so that a template that writes a list or an object leaves them too.
"""

_PIECE_CHARS = 256 * 1024
"""Characters that one search covers: 7 ms at worst."""


class EscapedConversation(NamedTuple):
    """The conversation for a template. escape: the character in escaped names; "" if there are no such names."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    escape: str


class ControlTokens:
    """The control tokens of one tokenizer. May be used by several threads."""

    def __init__(self, pipeline: Tokenizer) -> None:
        self._pipeline = pipeline
        self._added = pipeline.get_added_tokens_decoder()
        tokens = [token for token in self._added.values() if _is_control(token)]
        self._names = sorted({token.content for token in tokens})
        self._longest = max(map(len, self._names), default=0)
        self._heads = frozenset(name[0] for name in self._names)
        self._head = re.compile("|".join(map(re.escape, sorted(self._heads))) or r"(?!)")
        self._beginnings = _beginnings(self._names)
        # Tokens with `normalized` are matched in normalized text, where another text may have become their name.
        normalized = [token.content for token in tokens if token.normalized]
        self._normalizer = pipeline.normalizer if normalized else None
        if self._normalizer is not None:
            self._normalized_beginnings = _beginnings(sorted(map(self._normalizer.normalize_str, normalized)))
        self._made: tuple[str, Tokenizer] | None = None
        self._is_cut: bool | None = None

    def escape(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], template: str = ""
    ) -> EscapedConversation:
        """Escapes the names in texts of users and tools, in a copy. Without such names the conversation is as it was.

        template  the template's source; the escape does not occur in it
        """
        if not self._names:
            return EscapedConversation(messages, variables, "")
        others = [name for name in FOREIGN_VARIABLES if name in variables]
        foreign = [*filter(_is_foreign, messages), *map(variables.__getitem__, others)]
        try:
            if not any(map(self._has_name, _texts(foreign))):
                return EscapedConversation(messages, variables, "")
            escape = _unused(lambda: chain(_texts([*messages, variables]), [template]))
            escaped = [self._escaped_message(each, escape) if _is_foreign(each) else each for each in messages]
            changed = {name: self._escaped(variables[name], escape) for name in others}
        except RecursionError:
            raise RequestError("messages or variables are nested too deep for a chat template", "messages") from None
        return EscapedConversation(escaped, {**variables, **changed}, escape)

    def pipeline(self, escape: str) -> Tokenizer:
        """Tokenizes a text with this escape."""
        if self._is_cut is None:
            # Some models make a control token of its name even without added tokens. They get names in two parts.
            found = self._bare().encode_batch_fast(self._names, add_special_tokens=False)
            ids = map(self._pipeline.token_to_id, self._names)
            self._is_cut = any(token_id in each.ids for token_id, each in zip(ids, found, strict=True))
        made = self._made
        if made is None or made[0] != escape:
            made = self._made = escape, self._unescaping(escape, self._is_cut)
        return made[1]

    def _bare(self, *steps: pre_tokenizers.PreTokenizer) -> Tokenizer:
        """A pipeline with the same model, in the same memory, without added tokens. steps: before its own ones."""
        found = Tokenizer(self._pipeline.model)
        if self._pipeline.normalizer is not None:
            found.normalizer = self._pipeline.normalizer
        own = self._pipeline.pre_tokenizer
        found.pre_tokenizer = pre_tokenizers.Sequence([*steps, *([] if own is None else [own])])
        return found

    def _unescaping(self, escape: str, is_cut: bool) -> Tokenizer:
        found = self._bare(pre_tokenizers.PreTokenizer.custom(_Unescaping(escape, is_cut)))
        # In the order of their ids they get the same ids.
        found.add_tokens([self._added[token_id] for token_id in sorted(self._added)])
        assert all(found.token_to_id(token.content) == token_id for token_id, token in self._added.items())
        return found

    def _has_name(self, text: str) -> bool:
        if self._head.search(text) is None and self._normalizer is None:
            return False
        pieces = map(self._name_begins, repeat(text), range(0, len(text), _PIECE_CHARS))
        return any(map(any, pieces)) or any(self._cut_names(text)) or self._has_hidden_name(text)

    def _name_begins(self, text: str, begin: int) -> Iterator[int]:
        """The place behind the first character of every name in a piece of a text. Pieces bound the memory, and other
        threads can run between them.
        """
        end = begin + _PIECE_CHARS
        for found in self._beginnings.finditer(text, begin, end + self._longest):
            if found.start() < end:
                yield found.end()

    def _has_hidden_name(self, text: str) -> bool:
        """Whether normalizing makes a name in a text."""
        if self._normalizer is None:
            return False
        return self._normalized_beginnings.search(self._normalizer.normalize_str(text)) is not None

    def _cut_names(self, text: str) -> Iterator[int]:
        """The same for names that the end of the text cuts: a template may append text that completes them."""
        text = text.rstrip()
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[begin] not in self._heads:
                continue
            end = text[begin:]
            place = bisect.bisect_left(self._names, end)
            if place < len(self._names) and self._names[place].startswith(end):
                yield begin + 1

    def _escaped_message(self, message: Mapping[str, Any], escape: str) -> dict[str, Any]:
        return {key: item if key == "role" else self._escaped(item, escape) for key, item in message.items()}

    def _escaped(self, value: Any, escape: str) -> Any:
        """A copy of JSON values with every name escaped."""
        if isinstance(value, str):
            return self._escaped_text(value, escape)
        if isinstance(value, Mapping):
            return {self._escaped(key, escape): self._escaped(item, escape) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._escaped(item, escape) for item in value]
        return value

    def _escaped_text(self, text: str, escape: str) -> str:
        found = text
        for place in reversed([*self._cut_names(text)]):
            found = f"{found[:place]}{escape}{found[place:]}"
        pieces = []
        for begin in range(0, len(found), _PIECE_CHARS):
            cuts = [begin, *self._name_begins(found, begin), min(begin + _PIECE_CHARS, len(found))]
            pieces.append(escape.join(found[one:other] for one, other in pairwise(cuts)))
        found = "".join(pieces)
        return escape.join(text) if self._has_hidden_name(found) else found


class _Unescaping:
    """The step of a pipeline that drops escapes, or cuts words at them."""

    def __init__(self, escape: str, is_cut: bool) -> None:
        self._character = escape
        self._is_cut = is_cut

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        """Called by the library with the parts of a text between added tokens."""
        if self._is_cut:
            text.split(lambda _, part: part.split(self._character, "removed"))
        else:
            text.normalize(self._unescape)

    def _unescape(self, part: NormalizedString) -> None:
        part.replace(self._character, "")


def _is_control(token: AddedToken) -> bool:
    return len(token.content) > 1 and (token.special or _BARRED.fullmatch(token.content) is not None)


def _is_foreign(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") not in OWN_ROLES


def _texts(value: Any) -> Iterator[str]:
    """All strings in JSON values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _unused(texts: Callable[[], Iterable[str]]) -> str:
    """A character for escapes that the texts lack."""
    if not any(_ESCAPES[0] in text for text in texts()):
        return _ESCAPES[0]
    used = set().union(*texts())
    found = next((escape for escape in _ESCAPES if escape not in used), None)
    if found is None:
        raise RequestError(
            "the conversation has all letters of Vai and all rare Chinese characters; leave one out", "messages"
        )
    return found


def _beginnings(names: Sequence[str]) -> re.Pattern[str]:
    """Matches the first character of each of the sorted names in a text, also of those that overlap."""
    heads = groupby((name for name in names if name), key=lambda name: name[0])
    branches = [f"{re.escape(head)}(?={_one_of([name[1:] for name in group])})" for head, group in heads]
    return re.compile("|".join(branches) if branches else r"(?!)")


def _one_of(texts: list[str]) -> str:
    """Matches at least the shortest of some sorted texts. Texts that begin alike share a branch, so that a search costs
    the same with 6,000 names as with ten.
    """
    if not texts[0]:
        return ""
    branches = []
    for _, group in groupby(texts, key=lambda text: text[0]):
        alike = list(group)
        unlike = (place for place, (one, other) in enumerate(zip(alike[0], alike[-1], strict=False)) if one != other)
        shared = next(unlike, len(alike[0]))
        branches.append(re.escape(alike[0][:shared]) + _one_of([text[shared:] for text in alike]))
    return f"(?:{'|'.join(branches)})" if len(branches) > 1 else branches[0]
