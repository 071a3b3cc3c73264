"""The file of cache.pin, and the fingerprint that keeps checkpoints apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.engine.params import SamplingParams
from quire.engine.pins import protect, read_pins
from quire.errors import ConfigError, QuireError, RequestError
from quire.models.chat import ChatTemplate
from quire.models.fingerprint import HEAD_BYTES, fingerprint
from quire.models.tokenizer import Tokenizer
from tests.tiny_models import BOS, EOS, byte_tokenizer, save_tiny

LONG = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(
        byte_tokenizer(), ChatTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}", {}), BOS, EOS
    )


def test_prefixes_are_texts_or_conversations(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "pins.jsonl"
    system = [{"role": "system", "content": LONG}]
    file.write_text(f"# what is kept\n{json.dumps({'prompt': LONG})}\n\n{json.dumps({'messages': system})}\n")
    text, chat = read_pins(file, tokenizer)
    assert (text.line, chat.line) == (2, 4)
    assert text.ids == tokenizer.encode(LONG)[:128]
    assert chat.ids == tokenizer.encode(LONG + "\n", add_special=False)[:128]


def test_names_of_control_tokens_in_a_users_text_are_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "pins.jsonl"
    texts = [{"role": role, "content": f"{EOS}{LONG}"} for role in ("user", "system")]
    file.write_text("".join(f"{json.dumps({'messages': [text]})}\n" for text in texts))
    user, system = read_pins(file, tokenizer)
    end = tokenizer.added_id(EOS)
    assert user.ids == tokenizer.chat_ids(texts[:1], False)[:128]
    assert end not in user.ids and system.ids[0] == end


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "pins.jsonl, line 1: not JSON"),
        (json.dumps({"messages": [{"role": "sys", "content": LONG}]}), "one of system"),
        (json.dumps({"messages": [{"role": "tool", "content": LONG}]}), "one of system"),
        (json.dumps({"messages": [{"role": "assistant", "content": LONG, "tool_calls": []}]}), "calls of tools"),
        (json.dumps({"messages": [{"role": "user", "content": [LONG]}]}), "must be a string"),
        (json.dumps({"messages": []}), "it must be"),
        ("[]", "it must be"),
        (json.dumps({"prompt": 3}), "it must be"),
        (json.dumps({"prompt": LONG, "more": 1}), "it must be"),
        (json.dumps({"messages": 5}), "line 1"),
        (json.dumps({"prompt": "short"}), "whole chunks of 64"),
        ("", "holds no prefix"),
    ],
)
def test_what_is_no_prefix_is_refused_by_its_line(
    tmp_path: Path, tokenizer: Tokenizer, line: str, message: str
) -> None:
    file = tmp_path / "pins.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=message):
        read_pins(file, tokenizer)
    with pytest.raises(ConfigError, match="cannot read"):
        read_pins(tmp_path / "absent", tokenizer)


def make_llm(folder: Path, pins: Path, **options: Any) -> LLM:
    settings = {"model.dtype": "float32", "runtime.device": "cpu", "cache.memory": "224KiB", "cache.pin": str(pins)}
    return LLM(str(folder), settings | options)


def test_pinned_prefixes_are_there_for_the_first_request(tmp_path: Path) -> None:
    folder, file = save_tiny(tmp_path / "model"), tmp_path / "pins.jsonl"
    file.write_text(json.dumps({"prompt": LONG}))
    with make_llm(folder, file) as llm:
        (output,) = llm.generate(LONG + "And then?", SamplingParams(max_tokens=2))
        assert output.num_cached_tokens == len(llm.tokenizer.encode(LONG)) // 64 * 64 > 0
        (prefix,) = [each for each in llm.prefixes() if each.pinned_seconds is not None]
        assert prefix.pinned_seconds == float("inf") and prefix.hits == 1
        assert llm.stats()["cache"]["bytes_pinned"] == prefix.num_bytes
        llm.generate({"prompt": LONG, "cache_pin": False}, SamplingParams(max_tokens=1))
        assert llm.stats()["cache"]["bytes_pinned"] == prefix.num_bytes, "a request ended a pin of the file"
        chunks = llm.engine.scheduler.manager.table.capacity
        assert llm.max_context == (chunks - prefix.num_tokens // 64) * 64
        with pytest.raises(RequestError, match="context"):
            llm.generate([[1] * llm.max_context])
    file.write_text("\n".join(json.dumps({"prompt": f"{number} {LONG}"}) for number in range(3)))
    with pytest.raises(ConfigError, match="pins.jsonl, line 3: it would pin over 50% of the cache"):
        make_llm(folder, file)
    with pytest.raises(ConfigError, match="cannot read cache.pin"):
        make_llm(tmp_path / "no model", tmp_path / "no file")
    with pytest.raises(ConfigError, match="cache.share is false"):
        make_llm(folder, file, **{"cache.share": False})


@pytest.mark.parametrize("count", [2, 3])
def test_prefixes_that_fill_their_half_leave_no_room_for_another(tmp_path: Path, count: int) -> None:
    """Neither does the next one drive out those before it."""
    folder, file = save_tiny(tmp_path / "model"), tmp_path / "pins.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{number}" * 270}) for number in range(count)))
    with pytest.raises(ConfigError, match="line 2: it would pin over 50% of the cache"):
        make_llm(folder, file, **{"cache.memory": 8 * 24576})


def test_a_prefix_is_protected_before_there_are_requests(tmp_path: Path) -> None:
    with LLM(str(save_tiny(tmp_path)), {"model.dtype": "float32", "cache.memory": "1MiB"}) as llm:
        llm.generate({"prompt": LONG, "cache_pin": True}, SamplingParams(max_tokens=1))
        ids = llm.tokenizer.encode(LONG)[:128]
        llm.engine.add("running", [1, 2, 3], SamplingParams(max_tokens=2))
        with pytest.raises(QuireError, match="before there are requests"):
            protect(llm.engine, ids)
        llm.engine.abort("running")
        protect(llm.engine, ids)


def test_a_prompt_in_a_dict_may_have_hints(tmp_path: Path) -> None:
    with LLM(str(save_tiny(tmp_path)), {"model.dtype": "float32", "cache.memory": "1MiB"}) as llm:
        params = SamplingParams(max_tokens=1)
        for salt in ("a", "b", "a"):
            (output,) = llm.generate([{"prompt": LONG, "cache_salt": salt, "cache_pin": 60}], params)
        assert output.num_cached_tokens and len(llm.prefixes()) == 2


def test_a_fingerprint_tells_checkpoints_apart_and_not_where_they_lie(tmp_path: Path) -> None:
    first = bytes(range(256)) * 20_000
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    one.write_bytes(first)
    two.write_bytes(first)
    assert fingerprint(one) == fingerprint(two)
    for changed in (
        first[:-1],
        b"x" + first[1:],
        first[: HEAD_BYTES + 100] + b"xxxx" + first[HEAD_BYTES + 104 :],
    ):
        two.write_bytes(changed)
        assert fingerprint(one) != fingerprint(two)


def test_a_fingerprint_of_a_folder_reads_weights_and_settings(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    before = fingerprint(folder)
    (folder / "notes.txt").write_text("nothing to do with it")
    assert fingerprint(folder) == before
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert fingerprint(folder) != before
