"""Measures whether a model finds a number hidden in a long text, with prompt and answer in one codec's cache.

The prompt is an ordinary request: its prefix is matched and its answer is decoded. Knows engines, tokens and text.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, product
from typing import Any

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.errors import ConfigError, ModelError
from quire.llm import merge_delta
from quire.measure.engines import Progress, load_engines
from quire.models.tokenizer import Tokenizer

ANSWER_TOKENS = 12
"""Maximum tokens of an answer: five digits are five tokens in many vocabularies, and a space or a mark may come
first.
"""

NEEDLE = "The pass key is the number {number}. Remember it."
TASK = "A pass key is hidden in the text below. Find it and remember it."
QUESTION = "What is the pass key?"
LEAD = "The pass key is the number"
"""The given beginning of the answer, in the needle's own words. Without it SmolLM2 found 1 of 5 at 2,048 tokens in our
filler and talked about pass keys instead; with it 10 of 10."""

FILLER = (
    "The river runs slowly past the old mill.",
    "Boats lie along the bank and wait for the evening.",
    "A man mends a net in the shade of a willow.",
    "Children throw flat stones across the water.",
    "The baker closes his shop at noon and sleeps until three.",
    "Two dogs walk down the lane without a sound.",
    "Someone plays a slow tune behind an open window.",
    "The clouds move from the west and bring no rain.",
    "A cart with hay stands at the gate of the farm.",
    "The clock on the church tower is four minutes late.",
    "Bees work in the lavender along the wall.",
    "A woman counts the eggs and writes down how many there are.",
    "The road to the harbour is dusty and white.",
    "Swallows sit on the wire and leave together.",
    "The postman leans his bicycle against the fence.",
    "By night the lamps along the quay are lit one by one.",
)
"""The default filler text, repeated as often as needed."""


@dataclass(frozen=True, slots=True)
class Retrieval:
    """One cell of the table.

    codec       name of the codec, and the setting of retention if it is on
    length      maximum tokens of prompt and answer together
    depth       place of the number: 0 is the beginning of the text, 1 its end
    num_found   number of answers with the number
    num_trials  number of answers
    """

    codec: str
    length: int
    depth: float
    num_found: int
    num_trials: int

    @property
    def found(self) -> float:
        """The share of numbers found."""
        return self.num_found / self.num_trials

    def facts(self) -> dict[str, Any]:
        """All of it by name, for JSON."""
        return asdict(self)


def retrieval(
    model: str,
    text: str | None = None,
    *,
    config: EngineConfig | None = None,
    codecs: Sequence[str] = (),
    lengths: Sequence[int] = (1024, 2048, 4096),
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    num_trials: int = 2,
    progress: Progress = lambda done, total: None,
) -> list[Retrieval]:
    """Counts how often a hidden number is found, for each codec, length and depth, in the given order.

    model       a folder, a .gguf file, a hub id, or `smollm2`; loaded once
    text        filler text, repeated if it is too short; None: the built-in filler
    config      settings of the engines, see `configs_of`; None: the defaults
    codecs      values of cache.codec; empty: the codec of the configuration
    lengths     tokens of prompt and answer together
    depths      in [0, 1]
    num_trials  trials per length and depth, each with a text that begins with another sentence
    progress    called with (answers done, number of answers)
    Raises ConfigError for a length that the model or the cache cannot hold, or that has no room for any text;
    ModelError.
    """
    sentences = FILLER if text is None else split_sentences(text)
    engines, tokenizer = load_engines(model, config or EngineConfig(), max(lengths), codecs, sequences=2)
    cells = list(product(lengths, depths))
    prompts = [
        make_prompt(tokenizer, sentences[trial % len(sentences) :], length, depth, hidden_number(length, depth, trial))
        for length, depth in cells
        for trial in range(num_trials)
    ]
    results = []
    for place, (codec, engine) in enumerate(engines.items()):

        def count(done: int, before: int = place * len(prompts)) -> None:
            progress(before + done, len(engines) * len(prompts))

        texts = iter(answers(engine, prompts, count))
        for length, depth in cells:
            found = sum(names(next(texts), hidden_number(length, depth, trial)) for trial in range(num_trials))
            results.append(Retrieval(codec, length, depth, found, num_trials))
    return results


def hidden_number(length: int, depth: float, trial: int) -> int:
    """Five digits, the same in every run."""
    return random.Random(f"{length} {depth} {trial}").randrange(10_000, 100_000)


def split_sentences(text: str) -> list[str]:
    """Splits the text after full stops, question marks and exclamation marks. Raises ConfigError for an empty text."""
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    if not sentences[0]:
        raise ConfigError("the text to hide a number in is empty")
    return sentences


def make_prompt(tokenizer: Tokenizer, sentences: Sequence[str], length: int, depth: float, number: int) -> list[int]:
    """The ids of a prompt that leaves room for the answer within `length`, with the chat template if there is one.

    Raises ConfigError if not a single sentence fits.
    """

    def encode(text: Sequence[str]) -> list[int]:
        at = round(depth * len(text))
        hidden = " ".join((*text[:at], NEEDLE.format(number=number), *text[at:]))
        task = f"{TASK}\n\n{hidden}\n\n{QUESTION}"
        if not tokenizer.has_chat_template:
            return tokenizer.encode(f"{task}\n{LEAD}")
        return tokenizer.encode(tokenizer.chat([{"role": "user", "content": task}]) + LEAD, add_special=False)

    room = length - ANSWER_TOKENS
    left = room - len(encode(()))
    text: list[str] = []
    for sentence in cycle(sentences):
        left -= max(1, len(tokenizer.encode(f" {sentence}", add_special=False)))
        if left < 0:
            break
        text.append(sentence)
    # Sentences together may have a few tokens more or fewer than the sum of each.
    while text and len(ids := encode(text)) > room:
        del text[-1]
    if not text:
        raise ConfigError(f"a length of {length} tokens has no room for text, question and answer; give more")
    return ids


def answers(engine: Engine, prompts: Sequence[list[int]], progress: Callable[[int], None]) -> list[str]:
    """The greedy answers to prompts, as a batch. Raises ModelError if one fails."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)
    waiting = deque(enumerate(prompts))
    collected: dict[str, RequestOutput] = {}
    num_done = 0
    while waiting or engine.has_work:
        while waiting and engine.scheduler.has_room(1):
            index, ids = waiting.popleft()
            engine.add(str(index), ids, params)
        for delta in engine.step():
            merge_delta(collected, delta)
            num_done += delta.finished
        progress(num_done)
    outputs = [collected[str(index)].outputs[0] for index in range(len(prompts))]
    for output in outputs:
        if output.finish_reason == "error":
            raise ModelError(f"the model cannot be evaluated: {output.stop_reason}")
    return [output.text for output in outputs]


def names(answer: str, number: int) -> bool:
    """Whether an answer has the number, not as a part of a longer one."""
    return str(number) in re.findall(r"\d+", answer)
