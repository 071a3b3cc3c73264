"""`quire chat`: turns, commands, and stopping an answer."""

import fcntl
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from quire.cli import main
from quire.engine.outputs import CompletionOutput
from quire.engine.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def chat(monkeypatch, capsys):
    """Runs a chat of the given lines on the fake engine; returns what it printed."""

    def run(*lines, words=(), engine=None):
        engine = FakeEngine() if engine is None else engine

        @asynccontextmanager
        async def loaded(_):
            yield engine

        monkeypatch.setattr("quire.cli.shared.engine", loaded)
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        assert main(["chat", "fake", *words]) == 0
        assert not engine.live
        return capsys.readouterr()

    return run


def test_the_conversation_grows(chat):
    out = chat("hello", "more").out
    # The fake answers with all that it was given.
    assert out == ("user: hello\nassistant:\nuser: hello\nassistant: user: hello\nassistant:\nuser: more\nassistant:\n")


def test_reset_and_system(chat):
    found = chat("/system Be brief.", "a", "/reset", "b", "/system", "c", words=["--system", "old"])
    assert "old" not in found.out
    assert found.out.count("system: Be brief.\n") == 2
    assert found.out.endswith("user: c\nassistant:\n")


def test_exit_ends_at_once(chat):
    assert chat("/exit", "never").out == ""
    assert chat("/quit", "never").out == ""


def test_unknown_commands_are_explained(chat):
    error = chat("/rest").err
    assert "unknown command /rest" in error and "/reset" in error


def test_a_backslash_continues_the_line(chat):
    assert chat("one\\", "two").out == "user: one\ntwo\nassistant:\n"


def test_save_writes_what_generate_reads(chat, tmp_path):
    file = tmp_path / "talk.jsonl"
    error = chat("hi", f"/save {file}", "/save /no/such/folder/x", "/save ~nosuchuser/x", "/save").err
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"]
    assert "2 messages" in error and "cannot write /no" in error and "cannot write ~nosuchuser/x: the home" in error
    assert "needs a file name" in error


def test_an_empty_conversation_is_not_saved(chat, tmp_path):
    file = tmp_path / "talk.jsonl"
    assert "there are no messages to save" in chat("hi", "/reset", f"/save {file}").err and not file.exists()


def test_a_conversation_too_long_can_be_reset(chat):
    found = chat("x" * 300, "/reset", "short", engine=FakeEngine(max_context=250))
    assert "too long" in found.err
    assert found.out == "user: short\nassistant:\n"


def test_an_answer_that_fails_is_told_and_leaves_no_turn(chat, tmp_path):
    class Failing(FakeEngine):
        async def _generate(self, ids, params, request_id):
            prompt_bytes = bytes(token for token in ids if token < 256)
            async for item in super()._generate(ids, params, request_id):
                if b"bad" in prompt_bytes and self.decoded > 3:
                    item.outputs, item.finished = (
                        [CompletionOutput(0, "", [], None, "error", "NaN in the logits")],
                        True,
                    )
                yield item
                if item.finished:
                    return

    file = tmp_path / "talk.jsonl"
    found = chat("bad", "good", f"/save {file}", engine=Failing())
    assert found.out == "use\nuser: good\nassistant:\n"
    assert "the answer failed: NaN in the logits" in found.err
    assert json.loads(file.read_text())["messages"][0]["content"] == "good"


@pytest.fixture
def chat_params(chat):
    """Runs a chat on a model whose makers advise something; returns the parameters of its answers."""

    def run(*words, advice=NO_DEFAULTS, lines=("hi",)):
        found = []

        class Watched(FakeEngine):
            sampling_defaults = advice

            async def _generate(self, ids, params, request_id):
                found.append(params)
                async for item in super()._generate(ids, params, request_id):
                    yield item

        chat(*lines, words=words, engine=Watched())
        return found[0]

    return run


def test_an_answer_ends_at_1024_tokens_unless_told(chat_params):
    assert chat_params().max_tokens == 1024
    assert chat_params("--max-tokens", "7").max_tokens == 7
    assert chat_params("--max-tokens", "0").max_tokens is None, "the rest of the context"
    assert chat_params(advice=SamplingDefaults({"max_tokens": 99})).max_tokens == 1024


def test_a_chat_is_sampled_as_the_models_makers_advise_and_a_flag_wins(chat_params):
    advice = SamplingDefaults({"temperature": 0.2, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2})
    params = chat_params(advice=advice)
    assert {name: getattr(params, name) for name in advice.values} == advice.values and params.top_p == 1.0
    params = chat_params("--temperature", "0.9", "--top-k", "0", advice=advice)
    assert (params.temperature, params.top_k, params.min_p) == (0.9, 0, 0.1)


def test_without_advice_a_chat_is_a_little_cooler_than_the_model(chat_params):
    params = chat_params()
    assert (params.temperature, params.top_p) == (0.7, 0.95)
    params = chat_params("--top-p", "0.5")
    assert (params.temperature, params.top_p) == (0.7, 0.5)


SCRIPT = """
import sys
from contextlib import asynccontextmanager
from quire.cli import main, shared
from tests.server.fake_engine import FakeEngine

@asynccontextmanager
async def loaded(_):
    yield FakeEngine(step_seconds=0.02, max_context=10**6)

shared.engine = loaded
sys.exit(main(["chat", "fake"]))
"""


WAITING = """
import builtins

def marked(prompt):
    print("waiting", flush=True)
    return read(prompt)

read, builtins.input = builtins.input, marked
"""
"""Has the chat print a line whenever it begins to wait for a message."""


@pytest.mark.parametrize("text", [b"", b"a long message that takes a while to repeat because every letter is slow\n"])
def test_without_a_terminal_ctrl_c_ends_the_chat(text):
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", WAITING + SCRIPT], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        assert b"/help" in process.stderr.readline() and process.stdout.readline() == b"waiting\n"
        process.stdin.write(text)
        process.stdin.flush()
        if text:
            assert process.stdout.read(4) == b"user"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == b"quire: interrupted\n"
    finally:
        process.kill()
        process.communicate()


def test_on_a_terminal_ctrl_c_stops_the_answer_and_the_chat_goes_on():
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C goes to whom the terminal belongs
        env=os.environ | {"TERM": "dumb"},
    )
    os.close(slave)
    seen = b""

    def expect(text):
        nonlocal seen
        text = text.encode()
        until = time.monotonic() + 15
        while text not in seen:
            ready, _, _ = select.select([master], [], [], 0.2)
            if ready:
                seen += os.read(master, 4096)
            assert time.monotonic() < until, seen
        seen = seen[seen.index(text) + len(text) :]

    try:
        expect("/help")
        expect("36m>")
        os.write(master, b"a long message that takes a while to repeat because every letter is slow\n")
        expect("user: a long")
        os.write(master, b"\x03")
        expect("…")
        expect("tokens/s")
        expect("36m>")
        os.write(master, b"/reset\n")
        expect("forgotten")
        expect("36m>")
        os.write(master, b"hi\n")
        expect("user: hi")
        expect("first after")
        expect("36m>")
        os.write(master, b"\x04")
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
