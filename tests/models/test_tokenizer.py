"""Token ids of the embedded model, and detokenization piece by piece."""

from __future__ import annotations

import codecs
import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, normalizers, pre_tokenizers

from quire.errors import ModelError, RequestError
from quire.models.tokenizer import GROWTH, LONG_TEXT, SLICE_CHARS, Detokenizer, Tokenizer, load_tokenizer
from tests.effort import examples
from tests.real_model import embedded_gguf
from tests.tiny_models import BOS, EOS, byte_tokenizer

DIGITS = [
    "1",
    "a 1",
    "in 2024 there were 1234567 of 89",
    "  42",
    "x = 3.14159 * 10 ** -7",
    "1 2 3\n4\t5",
    "½ ² ٣ 一二 Ⅷ",
]
CODE = [
    "def f(x):\n    return x[0] + 1\n",
    "\tif (a&&b) {\r\n\t\ti+=10;\r\n}",
    "for(int i=0;i<100;++i)",
    "SELECT * FROM t WHERE id=007;",
]
UNICODE = [
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "مرحبا بالعالم",
    "e\u0301 \u00a0 \u200b",
    "a\x00b\x7f",
    "Ωμέγα ß ﬁ",
    "\ufffd",
]
SPECIAL = [
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|><|im_start|>",
    "a<|endoftext|>b",
    "<|im_end",
    "<repo_name> 1<file_sep>2",
]
SPACES = ["", " ", "   ", "\n\n\n", " a", "a ", "a  b", "\t\t a"]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return load_tokenizer(embedded_gguf())


@pytest.fixture(scope="module")
def theirs(data_dir: Path) -> Pipeline:
    return Pipeline.from_file(str(data_dir / "models" / "smollm2_tokenizer.json"))


@pytest.mark.parametrize("text", DIGITS + CODE + UNICODE + SPECIAL + SPACES)
def test_token_ids_of_awkward_texts(text: str, ours: Tokenizer, theirs: Pipeline) -> None:
    assert ours.encode(text) == theirs.encode(text).ids


def test_token_ids_of_the_humaneval_prompts(ours: Tokenizer, theirs: Pipeline, data_dir: Path) -> None:
    lines = gzip.decompress((data_dir / "text" / "HumanEval.jsonl.gz").read_bytes()).decode().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert len(prompts) == 164
    for prompt in prompts:
        assert ours.encode(prompt) == theirs.encode(prompt).ids


def test_token_ids_of_long_text(ours: Tokenizer, theirs: Pipeline, data_dir: Path) -> None:
    text = (data_dir / "text" / "war_and_peace.txt").read_text(encoding="utf-8")[:400_000]
    ids = ours.encode(text)
    assert ids == theirs.encode(text).ids
    assert ours.decode(ids) == text


@examples(300)
@given(text=st.text())
def test_token_ids_of_any_text(text: str, ours: Tokenizer, theirs: Pipeline) -> None:
    assert ours.encode(text) == theirs.encode(text).ids


@pytest.mark.parametrize("char", ["é", "漢", "\ufdfa", "😊", "à "])
def test_token_ids_of_texts_that_may_grow(char: str, ours: Tokenizer, theirs: Pipeline) -> None:
    for count in (LONG_TEXT // GROWTH, LONG_TEXT // GROWTH + 1, 3000):
        assert ours.encode(char * count) == theirs.encode(char * count).ids


NORMALIZERS = {
    "none": None,
    "NFC": normalizers.NFC(),
    "NFKC": normalizers.NFKC(),
    "NFKD": normalizers.NFKD(),
    "replace": normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace("a", "bcd" * 10)]),
}


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize(
    "text", ["a" * 50_000, "\ufdfa" * 50_000, "a é漢\ufdfa\U0001d160" * 9000, "", "a"], ids=range(5)
)
def test_pieces_of_a_text_are_bounded_once_normalized(name: str, text: str) -> None:
    pipeline = byte_tokenizer()
    if NORMALIZERS[name] is not None:
        pipeline.normalizer = NORMALIZERS[name]
    pieces = list(Tokenizer(pipeline).pieces(text, 40_000))
    sizes = [len(pipeline.normalizer.normalize_str(each).encode() if pipeline.normalizer else each.encode())
             for each in pieces]  # fmt: skip
    assert "".join(pieces) == text and max(sizes, default=0) <= 40_000
    assert len(pieces) <= 1 + sum(sizes) / (40_000 - GROWTH * SLICE_CHARS)


def test_half_a_surrogate_pair_has_no_pieces(ours: Tokenizer) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair after 3000 characters"):
        list(ours.pieces("a" * 3000 + "\ud800", 100_000))


def test_the_growth_is_the_most_of_unicode() -> None:
    form = normalizers.NFKD()
    grown = max(len(form.normalize_str(chr(each)).encode()) for each in range(0x110000) if not 0xD800 <= each < 0xE000)
    assert grown == GROWTH


@examples(200)
@given(text=st.text())
def test_every_text_comes_back(text: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_the_embedded_tokenizer_knows_about_itself(ours: Tokenizer) -> None:
    assert ours.vocab_size == 49152
    assert ours.eos_ids == (2,) and ours.eos_token == "<|im_end|>" and ours.token_id("<|im_end|>") == 2
    assert ours.special_ids == frozenset(range(17))
    assert ours.encode("a", add_special=True) == ours.encode("a", add_special=False)


def test_half_a_surrogate_pair_is_a_bad_request(ours: Tokenizer) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair after 1 characters"):
        ours.encode("a\ud800b")
    with pytest.raises(RequestError, match="not valid UTF-8: byte 0xe9 after 3 characters"):
        ours.encode(b"caf\xe9".decode(errors="surrogateescape"))


@pytest.mark.parametrize("name", ["no\nsuch\x1b[31m", "x" * 100_000])
def test_a_tokenizer_that_is_not_there_is_refused_in_one_short_line(name: str) -> None:
    with pytest.raises(ModelError) as refusal:
        load_tokenizer(embedded_gguf(), tokenizer=name)
    text = str(refusal.value)
    assert text.isprintable() and len(text) < 2000


def test_a_tokenizer_alone_needs_no_torch() -> None:
    code = "import sys, quire.models.tokenizer, quire.models.resolve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def pieces_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", DIGITS + CODE + UNICODE + SPECIAL + SPACES)
@pytest.mark.parametrize("skip_special", [True, False])
def test_pieces_join_to_the_decoded_text(text: str, skip_special: bool, ours: Tokenizer, theirs: Pipeline) -> None:
    ids = ours.encode(text)
    pieces = pieces_of(ours.stream(skip_special=skip_special), ids)
    assert "".join(pieces) == ours.decode(ids, skip_special) == theirs.decode(ids, skip_special_tokens=skip_special)
    assert any("\ufffd" in piece for piece in pieces) == ("\ufffd" in text)


@examples(300)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip_special=st.booleans())
def test_any_ids_decode_as_the_tokenizers_library_does(ids: list[int], skip_special: bool, ours: Tokenizer) -> None:
    expected = ours._pipeline.decode(ids, skip_special_tokens=skip_special)
    assert ours.decode(ids, skip_special) == expected
    joined = "".join(pieces_of(ours.stream(skip_special=skip_special), ids))
    assert joined in (expected, expected.removesuffix("\ufffd")), "only a character cut off at the end may be left out"


@examples(300)
@given(data=st.binary(max_size=30))
def test_any_bytes_become_what_python_makes_of_them(data: bytes) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    pieces = pieces_of(tokenizer.stream(), list(data))
    assert tokenizer.decode(list(data)) == data.decode("utf-8", "replace")
    assert "".join(pieces) == codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def test_an_unfinished_character_waits() -> None:
    stream = Tokenizer(byte_tokenizer()).stream()
    emoji = "😀".encode()
    assert [stream.push(byte) for byte in emoji] == ["", "", "", "😀"]
    assert [stream.push(byte) for byte in emoji[:2]] == ["", ""]
    assert stream.flush() == ""


def test_a_broken_character_gives_way_to_the_next() -> None:
    stream = Tokenizer(byte_tokenizer()).stream()
    assert [stream.push(byte) for byte in (0xF0, 0x9F, ord("a"))] == ["", "", "\ufffda"]


def test_special_tokens_are_left_out_or_kept() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), bos_token=BOS, eos_token=EOS)
    ids = [256, *b"ab", 257]
    assert tokenizer.decode(ids) == "ab" and tokenizer.decode(ids, skip_special=False) == f"{BOS}ab{EOS}"
    assert "".join(pieces_of(tokenizer.stream(skip_special=False), ids)) == f"{BOS}ab{EOS}"
    assert tokenizer.eos_ids == (257,) and tokenizer.bos_id == 256


def test_a_continuation_completes_the_character_its_prompt_began() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    emoji = "😀".encode()
    stream = tokenizer.stream(prompt_ids=[*b"abc", *emoji[:3]])
    assert stream.push(emoji[3]) == "😀"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_only_the_prompt_began_is_no_part_of_the_answer(cut: int) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    emoji = "😀".encode()
    for text in ('{"a": 1}', "é", "", "😀"):
        stream = tokenizer.stream(prompt_ids=[*b"abc", *emoji[:cut], 256])
        assert "".join(pieces_of(stream, [256, *text.encode()])) == text
    # Bytes of the answer's own that are no character are still replaced.
    assert "".join(pieces_of(tokenizer.stream(prompt_ids=[*emoji[:cut]]), [0xFF, *b"a"])) == "\ufffda"
    assert "".join(pieces_of(tokenizer.stream(prompt_ids=[*b"a"]), [*emoji[:cut], *b"a"])) == "\ufffda"


def test_ids_outside_the_vocabulary_are_nothing(ours: Tokenizer) -> None:
    assert ours.decode([49152, 10**6]) == "" and ours.token_bytes(-1) == b""


def test_tokens_are_bytes(ours: Tokenizer) -> None:
    text = "日本 1"
    assert b"".join(ours.token_bytes(token_id) for token_id in ours.encode(text)) == text.encode()


def test_an_added_token_outside_the_byte_alphabet_is_written_literally() -> None:
    pipeline = byte_tokenizer()
    pipeline.add_tokens(["a b", "über"])
    tokenizer = Tokenizer(pipeline)
    ids = tokenizer.encode("xa büber")
    assert tokenizer.decode(ids) == pipeline.decode(ids)
    assert "".join(pieces_of(tokenizer.stream(), ids)) == tokenizer.decode(ids)


def test_a_decoder_of_another_kind_streams_too() -> None:
    words = ["▁the", "▁cat", "s", "▁", "日", "本"]
    pipeline = Pipeline(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="s"))
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace()
    pipeline.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(pipeline)
    ids = [0, 1, 2, 3, 4, 5, 1, 0, 0, 2]
    pieces = pieces_of(tokenizer.stream(), ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "the cats 日本 cat the thes"
    assert pieces[1] == " cat"
    assert tokenizer.stream(prompt_ids=[0]).push(1) == " cat"


@pytest.mark.alone
def test_detokenization_is_fast(ours: Tokenizer) -> None:
    ids = ours.encode("The quick brown fox jumps over the lazy dog, 日本語 1234. " * 200)
    stream = ours.stream()
    start = time.perf_counter()
    for token_id in ids:
        stream.push(token_id)
    per_token = (time.perf_counter() - start) / len(ids)
    assert per_token < 20e-6, f"{per_token * 1e6:.1f} us a token"
