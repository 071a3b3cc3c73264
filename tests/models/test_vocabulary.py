"""Tokenizers from folders and from GGUF vocabularies of every kind."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from quire.errors import ModelError, RequestError
from quire.models.tokenizer import load_tokenizer
from quire.models.vocabulary import from_gguf
from tests.tiny_models import BOS, EOS, byte_tokenizer, save_tokenizer

TEXT = [
    "Hello there 12 345",
    "it's  we'LL\n\n  x",
    "日本語 ½ naïve",
    "a_b(c)[1]=2;\r\n\tend",
    " lead",
    "tail ",
    "ﬁ e\u0301",
]

CORPUS = [
    "it's 2024 and there are 12345 words in the text",
    "def f(x): return x + 1",
    "日本語 ½ naïve",
    "we'll see; they'LL see",
] * 4


def trained(pre_tokenizer: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocab, merges) of a byte-level BPE trained on a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def gguf_metadata(vocab: dict[str, int], merges: list[tuple[str, str]], pre: str, **more: Any) -> dict[str, Any]:
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def split_by(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# As published in the tokenizer.json of Meta-Llama-3-8B and Qwen2-7B.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@pytest.mark.parametrize(
    ("pre", "pre_tokenizer", "normalizer"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False), None),
        (
            "smollm",
            pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
            None,
        ),
        ("llama-bpe", split_by(LLAMA3), None),
        ("qwen2", split_by(QWEN2), normalizers.NFC()),
    ],
)
def test_byte_level_vocabularies_split_as_their_name_says(pre: str, pre_tokenizer: Any, normalizer: Any) -> None:
    vocab, merges = trained(pre_tokenizer)
    expected = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    expected.pre_tokenizer = pre_tokenizer
    expected.decoder = decoders.ByteLevel()
    if normalizer is not None:
        expected.normalizer = normalizer
    ours = from_gguf(gguf_metadata(vocab, merges, pre), Path("x.gguf"))
    for text in TEXT + CORPUS:
        ids = ours.encode(text).ids
        assert ids == expected.encode(text).ids, text
        assert ours.decode(ids) == expected.decode(ids)


def test_the_pre_tokenizers_differ_where_it_matters() -> None:
    vocab, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    ids = {
        pre: from_gguf(gguf_metadata(vocab, merges, pre), Path("x")).encode("in 2024").ids
        for pre in ("gpt-2", "smollm", "llama-bpe")
    }
    assert len({tuple(found) for found in ids.values()}) == 3


def test_control_tokens_are_special_and_user_tokens_are_not() -> None:
    vocab, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    metadata = gguf_metadata({**vocab, "<|end|>": len(vocab), "<tool>": len(vocab) + 1}, merges, "gpt-2")
    metadata["tokenizer.ggml.token_type"] = [1] * len(vocab) + [3, 4]
    ours = from_gguf(metadata, Path("x"))
    ids = ours.encode("a<|end|><tool>b").ids
    assert len(vocab) in ids and len(vocab) + 1 in ids
    assert ours.decode(ids) == "a<tool>b"


@pytest.mark.parametrize(("add_bos", "add_eos"), [(None, None), (True, None), (True, True), (False, True)])
def test_bos_and_eos_are_added_when_the_file_says_so(add_bos: bool | None, add_eos: bool | None) -> None:
    vocab, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos, "bos_token_id": 0, "eos_token_id": 1}
    metadata = gguf_metadata(
        vocab, merges, "gpt-2", **{key: value for key, value in flags.items() if value is not None}
    )
    ours = from_gguf(metadata, Path("x"))
    plain = ours.encode("text", add_special_tokens=False).ids
    assert ours.encode("text").ids == ([0] if add_bos else []) + plain + ([1] if add_eos else [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "viking"}, "unknown pre-tokenizer 'viking'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "has no vocabulary"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types for"),
        ({"tokenizer.ggml.merges": ["never seen"]}, "vocabulary and merges do not match"),
        ({"tokenizer.ggml.model": "llama"}, "needs one score per token"),
        *(
            ({f"tokenizer.ggml.{key}": value}, f"setting tokenizer.ggml.{key} is .*; it must be {wanted}")
            for key, values, wanted in (
                ("tokens", (5, "abc", [1, 2]), "a list of texts"),
                ("merges", (5, "a b", [1, 2]), "a list of texts"),
                ("token_type", (5, "x", ["x"], [True]), "a list of numbers"),
                ("pre", (5, ["default"]), "text"),
                ("model", (5, ["gpt2"]), "text"),
                ("bos_token_id", ("x", 1.5, -2), "a token id or a list of them"),
                ("add_bos_token", ("x", 2), "true or false"),
            )
            for value in values
        ),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": "x"}, "setting tokenizer.ggml.scores is 'x'"),
    ],
)
def test_vocabularies_that_cannot_be_built_are_named(changes: dict[str, Any], message: str) -> None:
    vocab, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    with pytest.raises(ModelError, match=message) as caught:
        from_gguf(
            gguf_metadata(vocab, merges, "gpt-2", bos_token_id=0, add_bos_token=True) | changes, Path("model.gguf")
        )
    assert "\n" not in str(caught.value) and "model.gguf" in str(caught.value)


def sentencepiece_ids(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's BPE by definition: join the best-scoring adjacent pair, leftmost first, while there is one."""
    ids = {token: index for index, token in enumerate(tokens)}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [(scores[ids[a + b]], -place) for place, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not joins:
            break
        place = -max(joins)[1]
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    found = []
    for part in parts:
        found += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def sentencepiece_metadata(tokens: list[str], scores: list[float], types: list[int]) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def read_tok512(path: Path) -> Iterator[tuple[str, float]]:
    """llama2.c's tokenizer file: longest length, then (score, length, bytes) of each token."""
    data = path.read_bytes()
    position = 4
    while position < len(data):
        score, length = struct.unpack_from("<fi", data, position)
        yield data[position + 8 : position + 8 + length].decode(), score
        position += 8 + length


@pytest.fixture(scope="module")
def real_vocabulary(data_dir: Path) -> tuple[list[str], list[float]]:
    tokens, scores = zip(*read_tok512(data_dir / "models" / "tok512.bin"), strict=True)
    marked = [token.replace(" ", "▁") for token in tokens]
    marked[:3] = ["<unk>", "<s>", "</s>"]
    marked[3:259] = [f"<0x{byte:02X}>" for byte in range(256)]
    return marked, list(scores)


@pytest.mark.parametrize(
    "text", ["Once upon a time, there was a little girl.", "a  b", " x", "", "日本😀", "Lily's 3 cats\nran", "zzz"]
)
def test_a_real_sentencepiece_vocabulary_joins_by_score(
    text: str, real_vocabulary: tuple[list[str], list[float]], tmp_path: Path
) -> None:
    tokens, scores = real_vocabulary
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    path = write_vocabulary(tmp_path / "model.gguf", sentencepiece_metadata(tokens, scores, types))
    ours = load_tokenizer(path)
    assert ours._to_bytes is not None and ours._strips_space  # the fast detokenizer, not the general one
    expected = sentencepiece_ids(text, tokens, scores) if text else []
    assert ours.encode(text, add_special=False) == expected
    assert ours.encode(text) == [1, *expected]
    assert ours.decode(ours.encode(text)) == text
    stream = ours.stream()
    assert "".join([*(stream.push(token_id) for token_id in ours.encode(text)), stream.flush()]) == text


@pytest.mark.parametrize("text", ["<unk>", "a<unk>b", "<unk><unk>", "<un k>", "</s><unk", "zzz"])
def test_the_unknown_token_in_a_text_is_the_token(
    text: str, real_vocabulary: tuple[list[str], list[float]], tmp_path: Path
) -> None:
    from transformers import LlamaTokenizer

    tokens, scores = real_vocabulary
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    ours = load_tokenizer(write_vocabulary(tmp_path / "model.gguf", sentencepiece_metadata(tokens, scores, types)))
    merges = list(map(tuple, json.loads(ours._pipeline.to_str())["model"]["merges"]))
    theirs = LlamaTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=merges, legacy=True)
    ids = ours.encode(text, add_special=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ids.count(0) == text.count("<unk>")
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_leading_spaces_belong_to_continuations(real_vocabulary: tuple[list[str], list[float]], tmp_path: Path) -> None:
    tokens, scores = real_vocabulary
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    ours = load_tokenizer(write_vocabulary(tmp_path / "model.gguf", sentencepiece_metadata(tokens, scores, types)))
    prompt, more = ours.encode("once upon"), ours.encode("a time", add_special=False)
    assert ours.decode(more) == "a time"
    stream = ours.stream(prompt_ids=prompt)
    assert ours.decode(prompt) + "".join(stream.push(token_id) for token_id in more) == "once upon a time"


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> Path:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_folder_gives_tokenizer_special_tokens_and_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab") == [97, 98] and tokenizer.bos_token == BOS and tokenizer.eos_ids == (257,)
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == "<user>hi\n<assistant>"


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path: Path) -> None:
    pipeline = byte_tokenizer()
    pipeline.enable_truncation(3)
    pipeline.enable_padding(length=10)
    pipeline.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("abcdef") == list(b"abcdef")


def test_vocab_and_merges_are_enough_for_opt(tmp_path: Path) -> None:
    vocab, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    vocab = {token: index + 4 for token, index in vocab.items()} | {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges) + "\n")
    special = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False, **special}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(tmp_path)
    expected = Tokenizer(models.BPE(vocab, merges))
    expected.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in TEXT:
        assert ours.encode(text) == [2, *expected.encode(text).ids]
        assert ours.decode(ours.encode(text)) == text
    assert ours.eos_ids == (2,) and ours.special_ids == {1, 2}


def test_another_tokenizer_and_template_may_be_named(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder in (model, other):
        folder.mkdir()
        save_tokenizer(folder)
    pipeline = byte_tokenizer()
    pipeline.add_tokens(["xyz"])
    pipeline.save(str(other / "tokenizer.json"))
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0]['content'] }}!")
    assert load_tokenizer(model, tokenizer=other).encode("xyz") == [258]
    assert load_tokenizer(model, tokenizer=other / "tokenizer.json").encode("xyz") == [258]
    assert load_tokenizer(model, chat_template=template).chat([{"role": "user", "content": "hi"}]) == "hi!"


def test_a_template_file_of_its_own_wins(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert load_tokenizer(tmp_path).chat([]) == "own file"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": {"content": EOS}}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat([]) == "plain" and tokenizer.eos_token == EOS
    assert tokenizer.chat([], variables={"tools": [{}]}) == "tools" and tokenizer.tool_template == "tools"


def test_without_a_template_for_tools_the_plain_one_is_for_them(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    for named in ("plain", [{"name": "default", "template": "plain"}, {"name": "rag", "template": "documents"}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.chat([], variables={"tools": [{}]}) == "plain" == tokenizer.tool_template


def test_a_template_for_tools_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.chat([]), tokenizer.chat([], variables={"tools": [{}]})) == ("plain", "tools")
    other = tmp_path / "other.jinja"
    other.write_text("mine")
    assert load_tokenizer(tmp_path, chat_template=other).chat([], variables={"tools": [{}]}) == "mine"


def test_a_gguf_may_have_a_template_for_tools(tmp_path: Path) -> None:
    vocab, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    path = write_vocabulary(tmp_path / "model.gguf", gguf_metadata(vocab, merges, "gpt-2") | templates)
    assert load_tokenizer(path).chat([], variables={"tools": [{}]}) == "tools"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("chat_template", 5, "setting chat_template is 5; it must be text"),
        ("chat_template", {"default": "x"}, "setting chat_template is {'default': 'x'}; it must be text"),
        ("chat_template", ["x"], r"setting chat_template is \['x'\]; it must be a list of objects"),
        ("chat_template", [{"name": "a", "template": 5}], "setting chat_template.0.template is 5; it must be text"),
        ("chat_template", "{% for %}", "does not parse"),
        ("chat_template", "{% for a in b %}" * 30 + "{% endfor %}" * 30, "does not compile: too many statically"),
        ("bos_token", 5, "setting bos_token is 5; it must be text"),
        ("bos_token", {"content": 7}, "setting bos_token.content is 7; it must be text"),
        ("eos_token", ["x"], r"setting eos_token is \['x'\]; it must be text"),
        ("eos_token", "\ud800", r"setting eos_token is '\\ud800'; it must be text"),
    ],
)
def test_a_tokenizer_config_of_the_wrong_type_is_named(key: str, value: Any, message: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"added_tokens_decoder": ["x"]}, "setting added_tokens_decoder is .*; it must be an object"),
        ({"added_tokens_decoder": {"7": "x"}}, "setting added_tokens_decoder.7 is 'x'; it must be an object"),
        ({"added_tokens_decoder": {"7": {}}}, "setting added_tokens_decoder.7.content is missing"),
        ({"added_tokens_decoder": {"7": {"content": "a", "special": "x"}}}, "added_tokens_decoder.7.special is 'x'"),
        ({"tokenizer_class": 5}, "setting tokenizer_class is 5; it must be text"),
        ({"add_bos_token": True, "bos_token": "absent"}, "'absent' must be added to every text, but is not in"),
    ],
)
def test_a_config_beside_vocab_and_merges_of_the_wrong_type_is_named(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [5, ["x"]])
def test_a_chat_template_in_a_gguf_is_text(value: Any, tmp_path: Path) -> None:
    vocab, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    metadata = gguf_metadata(vocab, merges, "gpt-2") | {"tokenizer.chat_template": value}
    path = write_vocabulary(tmp_path / "model.gguf", metadata)
    with pytest.raises(ModelError, match="model.gguf: setting tokenizer.chat_template is .*; it must be text"):
        load_tokenizer(path)


def test_an_id_outside_the_vocabulary_names_no_token(tmp_path: Path) -> None:
    vocab, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    path = write_vocabulary(
        tmp_path / "model.gguf", gguf_metadata(vocab, merges, "gpt-2", eos_token_id=2**32 - 1, bos_token_id=0)
    )
    assert load_tokenizer(path).eos_token is None and load_tokenizer(path).bos_id == 0


def test_a_model_without_a_template_refuses_chat(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.chat([])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.model": "x"}, "tokenizer.model alone is not read"),
        ({"tokenizer.json": "{"}, "tokenizer.json: not a tokenizer"),
        ({"tokenizer.json": "{}"}, "tokenizer.json: not a tokenizer"),
        ({"vocab.json": "{}"}, "vocab.json or merges.txt cannot be read"),
        ({"vocab.json": "{", "merges.txt": ""}, "vocab.json or merges.txt cannot be read"),
        ({"vocab.json": "[" * 100_000, "merges.txt": ""}, "vocab.json or merges.txt cannot be read"),
        ({"vocab.json": '"x"', "merges.txt": ""}, "vocab.json is not a JSON object"),
        ({"vocab.json": '{"a": "b"}', "merges.txt": ""}, "vocabulary and merges do not match"),
    ],
)
def test_folders_without_a_usable_tokenizer_are_named(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
