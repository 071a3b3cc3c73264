"""The output of `quire serve` once it is ready: its address, its sampling, and a command to try."""

import json
import shlex
from contextlib import asynccontextmanager

import pytest

from quire.cli import main
from quire.engine.sampling_defaults import SamplingDefaults
from tests.server.fake_engine import FakeEngine


class Named(FakeEngine):
    """A model with a name that a shell would trip over."""

    model_name = "Ann's model"
    sampling_defaults = SamplingDefaults({"temperature": 0.2, "top_p": 0.9}, "generation_config.json")


@pytest.fixture
def served(monkeypatch, capsys):
    """Runs `quire serve` with flags until it is ready; gives the lines of its stdout, and what was there before."""

    def run(*words, chat_template=True):
        engine = Named()
        engine.tokenizer.has_chat_template = chat_template
        before = []

        @asynccontextmanager
        async def loaded(_, pins_at_start, calibrates_beside):
            assert not pins_at_start, "the server pins once for each key"
            yield engine

        async def serve(llm, listener, ready, **more):
            before.append(capsys.readouterr().out)
            ready()

        monkeypatch.setattr("quire.cli.shared.engine", loaded)
        monkeypatch.setattr("quire.server.run.serve", serve)
        assert main(["serve", "fake", "--port", "0", *words]) == 0
        assert before == [""], "nothing is said to be usable before it is"
        return capsys.readouterr().out

    return run


def curl_of(text):
    """The words of the curl command, as a shell reads them."""
    return shlex.split(text[text.index("  curl") :])


def test_the_curl_line_comes_when_the_server_is_ready_and_a_shell_reads_it(served):
    out = served()
    words = curl_of(out)
    url = out.split(" at ")[1].split("\n")[0]
    assert words[:2] == ["curl", f"{url}/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "Ann's model" and body["messages"]


def test_the_curl_line_has_a_place_for_the_key_where_one_is_needed(served, tmp_path):
    file = tmp_path / "keys"
    file.write_text("secret\n")
    file.chmod(0o600)
    out = served("--api-key-file", str(file))
    assert "Authorization: Bearer KEY" in curl_of(out) and "secret" not in out


def test_a_model_without_a_chat_template_is_asked_to_continue_a_text(served):
    words = curl_of(served(chat_template=False))
    assert words[1].endswith("/v1/completions") and "prompt" in json.loads(words[words.index("-d") + 1])


def test_the_start_says_how_the_model_is_sampled_unless_it_is_as_the_api_has_it(served):
    assert "temperature 0.2, top_p 0.9 (generation_config.json)" in served()
    assert "temperature" not in served("--sampling-defaults", "openai")
