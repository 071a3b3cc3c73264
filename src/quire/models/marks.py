"""Which tokens of a vocabulary mark the structure of a text: control tokens, headers of messages, punctuation.

Knows the tokenizer and its chat template; `quire.cache.retention.policies` decides what is done with marked tokens.

Special tokens are what FastGen (arXiv 2310.01801) keeps first: `<s>`, `[INST]`. The paper does not say how they are
found. Here they are all control tokens, and of what the chat template writes around messages

    <|im_start|>user\\n             a control token and the rest of its line, if that has at most three words
    [INST]   ### Response:\\n       a line beside a message without a control token, if it is spelled as no text is

The rest of a line is kept with the control token before it unless it is spelled as no text is: `user\\n` alone would
match text everywhere. Longer lines are text that the template brings along, such as a system prompt.

Punctuation are tokens of nothing but Unicode's punctuation (categories P) and blanks: the paper names . : and ?. Not
among them are symbols (S: $ + = < |), which are the content of amounts, formulas and code as digits are, and line
breaks alone, which are blanks. A token with both, such as ":\\n", is punctuation. With the embedded model's vocabulary
9 to 13 % of the tokens of prose are punctuation and 26 % of Python's; symbols and line breaks would make that 40 %.
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

# What messages say. Both ends of the others differ from the first one's; each joins what stands around it in its own
# way: "user\n" with two line breaks behind it becomes other tokens than "user\n" with a letter.
_CONTENT = "alpha"
_OTHER_CONTENTS = ("Zulu", "\n\nZulu.\n\n")

_MOST_WORDS = 3
_LEAST_CHARS = 4


@dataclass(frozen=True)
class Marks:
    """Token ids that mark structure.

    special      markers, each of one token or more in a row; control tokens first, then headers of messages
    punctuation  single tokens, none of them a control token
    """

    special: tuple[tuple[int, ...], ...]
    punctuation: frozenset[int]


def find_marks(tokenizer: Tokenizer) -> Marks:
    """The marks of a tokenizer, found once for each.

    Without a chat template, or with one that refuses plain conversations, control tokens are the only special ones.
    """
    found = _FOUND.get(tokenizer)
    if found is None:
        control = [(token_id,) for token_id in sorted(tokenizer.special_ids)]
        headers = dict.fromkeys(_headers(tokenizer)) if tokenizer.has_chat_template else ()
        found = _FOUND[tokenizer] = Marks((*control, *headers), _punctuation(tokenizer))
    return found


_FOUND: weakref.WeakKeyDictionary[Tokenizer, Marks] = weakref.WeakKeyDictionary()


def _punctuation(tokenizer: Tokenizer) -> frozenset[int]:
    ids = (token_id for token_id in range(tokenizer.vocab_size) if token_id not in tokenizer.special_ids)
    return frozenset(token_id for token_id in ids if _is_punctuation(_text(tokenizer, (token_id,))))


def _is_punctuation(text: str) -> bool:
    chars = "".join(text.split())
    return bool(chars) and all(unicodedata.category(char)[0] == "P" for char in chars)


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of tokens; U+FFFD, which is no punctuation, where they stop inside a character."""
    spelled = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    # Some decoders leave SentencePiece's sign for a space in their tokens.
    return spelled.replace("▁", " ")


def _headers(tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """Markers of several tokens, or of one that is no control token, out of what the template writes."""
    for roles in _CONVERSATIONS:
        for content in _OTHER_CONTENTS:
            try:
                runs = _between(tokenizer, roles, content)
            except RequestError:  # a template may want no system message
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
    """What a template writes before, between and behind messages, as token ids of the whole prompt.

    Tokens that reach into a message are left out, whether it is `_CONTENT` or the content given: what changes with a
    message begins and ends where these tokens do.
    """

    def encoded(contents: Sequence[str]) -> list[int]:
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
        return tokenizer.encode(tokenizer.chat(messages, add_generation_prompt=True), add_special=False)

    contents = [_CONTENT] * len(roles)
    ids = encoded(contents)
    changed = []
    for place in range(len(roles)):
        other = encoded([*contents[:place], content, *contents[place + 1 :]])
        if other != ids:  # else the template leaves this message out
            changed.append((_num_equal(ids, other), len(ids) - _num_equal(ids[::-1], other[::-1])))
    # In the order of the prompt: a system message may stand inside a later one.
    changed.sort()
    begins = [0, *(end for _, end in changed)]
    ends = [*(begin for begin, _ in changed), len(ids)]
    return [ids[begin:end] for begin, end in zip(begins, ends, strict=True)]


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two lists have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _lines(tokenizer: Tokenizer, run: Sequence[int]) -> list[list[int]]:
    """Tokens cut before control tokens and behind line breaks; blanks before a line are left out."""
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
    """What of a line is a marker; None if nothing is, or the control token alone, which is one anyway.

    is_beside  whether a message stands directly before or behind the line
    """
    rest = line[1:] if line[0] in tokenizer.special_ids else line
    text = _text(tokenizer, rest)
    if not rest or len(text.split()) > _MOST_WORDS:
        return None
    if is_beside and _stands_out(text):
        return tuple(rest)
    return tuple(line) if rest is not line else None


def _stands_out(text: str) -> bool:
    """Whether words are spelled as text hardly spells them: letters beside other signs, and not just one or two."""
    chars = "".join(text.split())
    return (
        len(chars) >= _LEAST_CHARS
        and any(char.isalpha() for char in chars)
        and not all(char.isalnum() for char in chars)
    )
