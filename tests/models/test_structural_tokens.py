"""Special tokens and punctuation, in vocabularies of every kind, by the templates in the field."""

from __future__ import annotations

import gc
import gzip
import json
import weakref
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Pipeline

from quire.cache.retention.policies import occurrences
from quire.models.chat import ChatTemplate
from quire.models.structural_tokens import find_structural_tokens
from quire.models.tokenizer import Tokenizer, load_tokenizer
from tests.real_model import embedded_gguf
from tests.tiny_models import BOS, EOS, byte_tokenizer, save_tokenizer

LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' }}"
    "{% if loop.first and system %}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
    "{{ m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n' + system + '<|eot_id|>' }}"
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim"
    " + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<start_of_turn>' + (m.role | replace('assistant', 'model')) + '\n' + m.content + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
ALPACA = (
    "{{ 'Below is an instruction that describes a task.\n\n' }}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n\n' }}"
    "{% elif m.role == 'assistant' %}{{ '### Response:\n' + m.content + '\n\n' }}"
    "{% else %}{{ m.content + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ 'A chat between a curious user and an artificial intelligence assistant. ' }}{% endif %}"
    "{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
    "{% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + eos_token }}"
    "{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
MISTRAL = (
    # The system message stands inside the last question.
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}{{ bos_token }}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (system + '\n\n' if system and loop.last else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ '[' + m.role + '] ' + m.content + '\n' }}{% endfor %}"
BARE = "{% for m in messages %}{{ m.role + '\n' + m.content + '\n' }}{% endfor %}"

CONVERSATION = [
    {"role": "system", "content": "Be brief: 1 + 1 is 2."},
    {"role": "user", "content": "What is\n\nnew?"},
    {"role": "assistant", "content": "3 things."},
    {"role": "user", "content": "\n\nWhich (user, system) things"},
]


def chars(words: list[str]) -> dict[str, int]:
    """A vocabulary of the words' characters and of all their beginnings."""
    pieces = sorted({char for word in words for char in word})
    pieces += [word[:end] for word in words for end in range(2, len(word) + 1)]
    return {piece: order for order, piece in enumerate(dict.fromkeys(pieces))}


def with_control(pipeline: Pipeline, *texts: str) -> Pipeline:
    pipeline.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    return pipeline


def sentencepiece(strips_space: bool = True) -> Pipeline:
    """Characters, bytes for what is none, a few longer tokens, and a sign in place of each space."""
    words = ["▁[", "INST", "[/", "▁<<", "SYS", "<</", "\n\n", "▁.", "...", ":\n", "▁the", "user", "▁"]
    words += [f"▁{letter}" for letter in ascii_letters]
    vocab = chars([chr(code) for code in range(0x21, 0x7F)] + words)
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)} | {"<unk>": len(vocab) + 256}
    merges = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    pipeline = Pipeline(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    pipeline.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_space else steps)
    return with_control(pipeline, "<s>", "</s>")


def bytes_with(*control: str) -> Pipeline:
    return with_control(byte_tokenizer(), *control)


def chatting(pipeline: Pipeline, template: str, bos: str = BOS, eos: str = EOS) -> Tokenizer:
    return Tokenizer(pipeline, ChatTemplate(template, {"bos_token": bos, "eos_token": eos}), bos, eos)


def marked(tokenizer: Tokenizer, messages: list[dict[str, str]], is_begun: bool = True) -> list[str]:
    """The text of each stretch of marked tokens in a prompt."""
    ids = tokenizer.encode(tokenizer.chat(messages, is_begun), add_special=False)
    found = occurrences(ids, find_structural_tokens(tokenizer).special)
    stretches: list[list[int]] = [[]]
    for token_id, is_marked in zip(ids, found, strict=True):
        if is_marked:
            stretches[-1].append(token_id)
        elif stretches[-1]:
            stretches.append([])
    texts = [b"".join(map(tokenizer.token_bytes, stretch)).decode() for stretch in stretches if stretch]
    return [text.replace("▁", " ") for text in texts]


def headers(tokenizer: Tokenizer) -> set[str]:
    """Markers that are not just a control token."""
    control = {(token_id,) for token_id in tokenizer.special_ids}
    special = find_structural_tokens(tokenizer).special
    assert len(set(special)) == len(special) and control <= set(special)
    found = {b"".join(map(tokenizer.token_bytes, mark)).decode() for mark in special if mark not in control}
    assert not any(content in text for text in found for content in ("alpha", "Zulu")), "no header holds a message"
    return found


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return load_tokenizer(embedded_gguf())


def test_markers_of_the_embedded_model(embedded: Tokenizer) -> None:
    roles = ("system", "user", "assistant")
    opened = {f"<|im_start|>{role}" for role in roles}
    assert headers(embedded) == opened | {f"{text}\n" for text in opened} | {"<|im_end|>\n"}
    assert find_structural_tokens(embedded).special[:17] == tuple((token_id,) for token_id in range(17))


def test_every_header_of_a_prompt_is_marked_and_nothing_else(embedded: Tokenizer) -> None:
    turn = "<|im_end|>\n<|im_start|>"
    expected = ["<|im_start|>system\n", f"{turn}user\n", f"{turn}assistant\n", f"{turn}user", f"{turn}assistant\n"]
    assert marked(embedded, CONVERSATION) == expected
    # The template's own system prompt is text.
    assert marked(embedded, CONVERSATION[1:2]) == expected[:3]
    # A role that was not asked for still has its control token.
    tool = {"role": "tool", "content": "4"}
    assert marked(embedded, [*CONVERSATION, tool])[4:] == [turn, f"{turn}assistant\n"]


def test_ordinary_text_has_no_markers(embedded: Tokenizer, data_dir: Path) -> None:
    code = gzip.decompress((data_dir / "text" / "HumanEval.jsonl.gz").read_bytes()).decode().splitlines()
    texts = [(data_dir / "text" / "war_and_peace.txt").read_text(encoding="utf-8")[:300_000]]
    texts += ["\n".join(json.loads(line)["prompt"] for line in code)]
    texts += ["user\nassistant\nsystem\n" * 3, "im_start user\n\n"]
    llama = chatting(sentencepiece(), LLAMA_2, "<s>", "</s>")
    zephyr = chatting(byte_tokenizer(), ZEPHYR)
    for tokenizer in (embedded, llama, zephyr):
        special = find_structural_tokens(tokenizer).special
        for text in texts:
            ids = tokenizer.encode(text, add_special=False)
            assert len(ids) > 4 and not occurrences(ids, special).any()


@pytest.mark.parametrize("strips_space", [True, False])
def test_markers_spelled_in_several_tokens(strips_space: bool) -> None:
    tokenizer = chatting(sentencepiece(strips_space), LLAMA_2, "<s>", "</s>")
    assert marked(tokenizer, CONVERSATION) == [
        "<s> [INST] <<SYS>>\n",
        "<</SYS>>\n\n",
        " [/INST]",
        "</s><s> [INST]",
        " [/INST]",
    ]
    inst = next(mark for mark in find_structural_tokens(tokenizer).special if len(mark) == 3)
    assert [tokenizer.token_bytes(token_id) for token_id in inst] == [b" [", b"INST", b"]"]
    # Also where no control token stands before it.
    ids = tokenizer.encode("[INST] hi", add_special=False)
    assert occurrences(ids, find_structural_tokens(tokenizer).special).tolist() == [True] * 3 + [False] * (len(ids) - 3)


def test_headers_between_control_tokens() -> None:
    control = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer = chatting(bytes_with(*control), LLAMA_3)

    def header(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    expected = [BOS + header("system"), *(f"<|eot_id|>{header(role)}" for role in ("user", "assistant", "user"))]
    assert marked(tokenizer, CONVERSATION, False) == [*expected, "<|eot_id|>"], "dates are text"
    assert marked(tokenizer, CONVERSATION)[-1] == f"<|eot_id|>{header('assistant')}"
    tool = {"role": "ipython", "content": "4"}
    assert marked(tokenizer, [*CONVERSATION, tool])[4:6] == ["<|eot_id|><|start_header_id|>", "<|end_header_id|>\n\n"]


@pytest.mark.parametrize(
    ("template", "first", "expected"),
    [
        (
            GEMMA,
            1,
            [
                f"{BOS}<start_of_turn>user\n",
                "<end_of_turn>\n<start_of_turn>model\n",
                "<end_of_turn>\n<start_of_turn>user\n",
                "<end_of_turn>\n<start_of_turn>model\n",
            ],
        ),
        (ALPACA, 0, ["### Instruction:\n", "### Response:\n", "### Instruction:\n", "### Response:\n"]),
        (
            ZEPHYR,
            0,
            ["<|system|>\n", *(f"{EOS}\n<|{role}|>\n" for role in ("user", "assistant", "user", "assistant"))],
        ),
        (
            PHI,
            0,
            ["<|system|>\n", *(f"<|end|>\n<|{role}|>\n" for role in ("user", "assistant", "user", "assistant"))],
        ),
        (VICUNA, 1, ["USER: ", "ASSISTANT: ", f"{EOS}USER: ", "ASSISTANT:"]),
        (MISTRAL, 0, [f"{BOS}[INST] ", "[/INST] ", f"{EOS}[INST] ", "[/INST]"]),
        (NO_SYSTEM, 0, ["[user] ", "[assistant] ", "[user] "]),
    ],
    ids=["gemma", "alpaca", "zephyr", "phi", "vicuna", "mistral", "no system message"],
)
def test_templates_of_the_field(template: str, first: int, expected: list[str]) -> None:
    tokenizer = chatting(bytes_with("<start_of_turn>", "<end_of_turn>"), template)
    assert marked(tokenizer, CONVERSATION[first:]) == expected
    assert all(any(text.strip() in stretch for stretch in expected) for text in headers(tokenizer))


@pytest.mark.parametrize(
    "template",
    [
        None,
        BARE,
        "{{ 'Version: beta\n' }}" + BARE,
        "{{ raise_exception('no') }}",
        "{{ messages[0].absent.deeper }}",
        "hello",
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ 'Q: ' + m.content + '\n----\n' }}{% endfor %}",
    ],
)
def test_templates_that_write_nothing_rare_leave_control_tokens(template: str | None) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), None if template is None else ChatTemplate(template))
    assert find_structural_tokens(tokenizer).special == ((256,), (257,))


def test_the_tiny_models_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert headers(tokenizer) == {"<system>", "<user>", "<assistant>"}
    assert marked(tokenizer, CONVERSATION[:2]) == ["<system>", "<user>", "<assistant>"]


@pytest.mark.parametrize("text", [".", ",", " ?", "...", ":\n", "(", '."', " —", "。", "_", "/"])
def test_punctuation(text: str, embedded: Tokenizer) -> None:
    ids = embedded.encode(text, add_special=False)
    assert len(ids) == 1 or text == ":\n"
    assert set(ids[:1]) <= find_structural_tokens(embedded).punctuation


@pytest.mark.parametrize("text", ["\n", "\n\n", " ", "1", "$", " =", "+", "<", "a", "'s", " a", "|", "<|im_end|>", "é"])
def test_what_is_no_punctuation(text: str, embedded: Tokenizer) -> None:
    ids = embedded.encode(text, add_special=False)
    assert len(ids) == 1 and not set(ids) & find_structural_tokens(embedded).punctuation


def test_punctuation_where_spaces_are_signs() -> None:
    tokenizer = Tokenizer(sentencepiece())
    found = {tokenizer.token_bytes(token_id) for token_id in find_structural_tokens(tokenizer).punctuation}
    signs = {bytes([code]) for code in b"!\"#%&'()*,-./:;?@[\\]_{}"}
    assert found == signs | {b" .", b" [", b"..", b"...", b":\n", b"[/"}
    # Bytes of their own, which stand for the same characters, count as they do.
    assert tokenizer.token_id("<0x2E>") in find_structural_tokens(tokenizer).punctuation
    assert tokenizer.token_id("<0x0A>") not in find_structural_tokens(tokenizer).punctuation
    assert tokenizer.token_id("<0xE2>") not in find_structural_tokens(tokenizer).punctuation


def test_punctuation_where_a_decoder_puts_the_spaces() -> None:
    pipeline = Pipeline(models.WordLevel({"▁.": 0, ".": 1, "▁a": 2, "▁": 3, "[UNK]": 4}, unk_token="[UNK]"))
    pipeline.decoder = decoders.Metaspace()
    assert find_structural_tokens(Tokenizer(pipeline)).punctuation == {0, 1}


def test_a_control_token_is_no_punctuation() -> None:
    tokenizer = Tokenizer(bytes_with("[...]"))
    assert find_structural_tokens(tokenizer).special == ((256,), (257,), (258,))
    assert 258 not in find_structural_tokens(tokenizer).punctuation


def test_marks_are_found_once_and_go_with_their_tokenizer() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert find_structural_tokens(tokenizer) is find_structural_tokens(tokenizer)
    watched = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert watched() is None
