"""Finds the tokens of a vocabulary that mark the structure of a text: control tokens, message headers, punctuation.

Knows the tokenizer and its chat template; `quire.cache.retention.policies` decides on the use of marked tokens.

FastGen (arXiv 2310.01801) keeps special tokens first, such as `<s>` and `[INST]`. The paper does not say how to find
them. Here they are all control tokens, and these parts of the text that the chat template writes around messages:

    <|im_start|>user\\n             a control token and the rest of its line, if the rest has at most three words
    [INST]   ### Response:\\n       a line beside a message without a control token, if its spelling is unlike text

The rest of a line belongs to the control token before it, unless its spelling is unlike text: `user\\n` alone would
match ordinary text. Longer lines are text of the template, such as a system prompt.

Punctuation tokens consist only of Unicode punctuation (categories P) and blanks: the paper names . : and ?. Symbols (S:
$ + = < |) are not punctuation, because they are content in amounts, formulas and code, as digits are. Line breaks alone
are blanks. A token with both, such as ":\\n", is punctuation. With the embedded model's vocabulary 9 to 13 % of the
tokens of prose are punctuation, and 26 % of Python's; with symbols and line breaks it would be 40 %.
"""

from __future__ import annotations

import unicodedata
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from quire.errors import RequestError
from quire.models.tokenizer import Tokenizer

_CONVERSATIONS = (("user", "assistant", "user"), ("system", "user", "assistant", "user"))

# Contents of test messages. The others differ from the first one at both ends, because neighbouring text changes the
# tokens: "user\n" before two line breaks has other tokens than "user\n" before a letter.
_CONTENT = "alpha"
_OTHER_CONTENTS = ("Zulu", "\n\nZulu.\n\n")

_MOST_WORDS = 3
_LEAST_CHARS = 4


@dataclass(frozen=True)
class StructuralTokens:
    """Token ids that mark structure.

    special      markers, each of one or more consecutive tokens; control tokens first, then message headers
    punctuation  single tokens, none of them a control token
    """

    special: tuple[tuple[int, ...], ...]
    punctuation: frozenset[int]


def find_structural_tokens(tokenizer: Tokenizer) -> StructuralTokens:
    """The marks of a tokenizer, computed once per tokenizer.

    Without a chat template, or with one that rejects plain conversations, only control tokens are special.
    """
    found = _FOUND.get(tokenizer)
    if found is None:
        control = [(token_id,) for token_id in sorted(tokenizer.special_ids)]
        headers = dict.fromkeys(_headers(tokenizer)) if tokenizer.has_chat_template else ()
        found = _FOUND[tokenizer] = StructuralTokens((*control, *headers), _punctuation(tokenizer))
    return found


_FOUND: weakref.WeakKeyDictionary[Tokenizer, StructuralTokens] = weakref.WeakKeyDictionary()


def _punctuation(tokenizer: Tokenizer) -> frozenset[int]:
    ids = (token_id for token_id in range(tokenizer.vocab_size) if token_id not in tokenizer.special_ids)
    return frozenset(token_id for token_id in ids if _is_punctuation(_text(tokenizer, (token_id,))))


def _is_punctuation(text: str) -> bool:
    chars = "".join(text.split())
    return bool(chars) and all(unicodedata.category(char)[0] == "P" for char in chars)


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of tokens; U+FFFD, which is not punctuation, if they end inside a character."""
    spelled = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    # Some decoders leave SentencePiece's sign for a space in their tokens.
    return spelled.replace("▁", " ")


def _headers(tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """Markers in the text of the template: of several tokens, or of one that is not a control token."""
    for roles in _CONVERSATIONS:
        for content in _OTHER_CONTENTS:
            try:
                runs = _between(tokenizer, roles, content)
            except RequestError:  # a template may reject system messages
                continue
            for place, run in enumerate(runs):
                lines = _lines(tokenizer, run)
                for number, line in enumerate(lines):
                    # The last run leads to the answer.
                    is_beside = number == len(lines) - 1 or (place > 0 and number == 0)
                    mark = _mark(tokenizer, line, is_beside)
                    if mark is not None:
                        yield mark


def _between(tokenizer: Tokenizer, roles: Sequence[str], content: str) -> list[list[int]]:
    """The runs of tokens that a template writes before, between and after messages, in the ids of the whole prompt.

    Leaves out tokens that reach into a message, for `_CONTENT` and for the given content.
    """

    def encoded(contents: Sequence[str]) -> list[int]:
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
        return tokenizer.encode(tokenizer.chat(messages, add_generation_prompt=True), add_special=False)

    contents = [_CONTENT] * len(roles)
    ids = encoded(contents)
    changed = []
    for place in range(len(roles)):
        other = encoded([*contents[:place], content, *contents[place + 1 :]])
        if other != ids:  # otherwise the template omits this message
            changed.append((_num_equal(ids, other), len(ids) - _num_equal(ids[::-1], other[::-1])))
    # In the order of the prompt: a system message may stand inside a later one.
    changed.sort()
    begins = [0, *(end for _, end in changed)]
    ends = [*(begin for begin, _ in changed), len(ids)]
    return [ids[begin:end] for begin, end in zip(begins, ends, strict=True)]


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two lists."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _lines(tokenizer: Tokenizer, run: Sequence[int]) -> list[list[int]]:
    """Splits tokens into lines: before control tokens and after line breaks. Drops blanks before a line."""
    lines: list[list[int]] = []
    is_over = True
    for token_id in run:
        text = _text(tokenizer, (token_id,))
        if token_id in tokenizer.special_ids or (is_over and not text.isspace()):
            lines.append([])
            is_over = False
        if lines:
            lines[-1].append(token_id)
            is_over = is_over or "\n" in text
    return lines


def _mark(tokenizer: Tokenizer, line: list[int], is_beside: bool) -> tuple[int, ...] | None:
    """The marker in a line; None if there is none, or only the control token, which is already marked.

    is_beside  whether a message is directly before or after the line
    """
    rest = line[1:] if line[0] in tokenizer.special_ids else line
    text = _text(tokenizer, rest)
    if not rest or len(text.split()) > _MOST_WORDS:
        return None
    if is_beside and _stands_out(text):
        return tuple(rest)
    return tuple(line) if rest is not line else None


def _stands_out(text: str) -> bool:
    """Whether the spelling of words is unlike text: letters next to other signs, more than one or two."""
    chars = "".join(text.split())
    return (
        len(chars) >= _LEAST_CHARS
        and any(char.isalpha() for char in chars)
        and not all(char.isalnum() for char in chars)
    )
