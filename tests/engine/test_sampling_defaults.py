"""The sampling parameters that a model's makers recommend, in the files that contain them."""

import json

import pytest

from quire.engine.params import SamplingParams
from quire.engine.sampling_defaults import NO_DEFAULTS, read_sampling_defaults
from quire.errors import ModelError
from quire.llm import LLM
from quire.models.embedded import SMOLLM2
from tests.tiny_models import save_tiny, tiny_shape, write_gguf


def folder_with(tmp_path, **settings):
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize(
    "written, read",
    [
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
        ),
        ({"temperature": 0.6, "eos_token_id": [1, 2], "transformers_version": "5"}, {"temperature": 0.6}),
        ({"min_p": 0.05, "max_new_tokens": 2048}, {"min_p": 0.05, "max_tokens": 2048}),
        ({"temperature": None, "top_k": None, "top_p": None}, {}),
        ({"bos_token_id": 1}, {}),
        # The best token is taken, whatever the file goes on to say about drawing.
        ({"do_sample": False, "temperature": 0.9, "top_k": 50, "top_p": 0.9}, {"temperature": 0.0}),
        (
            {"do_sample": False, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({"do_sample": True, "top_k": 0}, {"top_k": 0}),
    ],
)
def test_generation_config_gives_what_it_holds_and_nothing_more(tmp_path, written, read):
    found = read_sampling_defaults(folder_with(tmp_path, **written))
    assert found.values == read
    assert found.source == ("generation_config.json" if read else "")


def test_a_folder_without_the_file_advises_nothing(tmp_path):
    assert read_sampling_defaults(tmp_path) is NO_DEFAULTS


@pytest.mark.parametrize(
    "written, text",
    [
        ({"top_p": 1.5}, "top_p is 1.5; it must be a number above 0 and at most 1"),
        ({"temperature": "hot"}, "setting temperature is 'hot'; it must be one number"),
        ({"top_k": 2.5}, "setting top_k is 2.5; it must be a whole number"),
        ({"do_sample": "no"}, "setting do_sample is 'no'; it must be true or false"),
        ({"max_new_tokens": 0}, "setting max_new_tokens is 0; it must be a whole number from 1"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_file_and_setting(tmp_path, written, text):
    with pytest.raises(ModelError, match=text) as caught:
        read_sampling_defaults(folder_with(tmp_path, **written))
    assert str(tmp_path / "generation_config.json") in str(caught.value)


def test_a_gguf_file_advises_in_llama_cpps_keys(tmp_path):
    path = tmp_path / "tiny.gguf"
    keys = {"temp": 0.2, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "penalty_repeat": 1.1}
    write_gguf(path, tiny_shape(), extra={f"general.sampling.{key}": value for key, value in keys.items()})
    found = read_sampling_defaults(path)
    # Stored in float32, 0.2 would come back as 0.20000000298.
    assert found.values == {"temperature": 0.2, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    assert str(found) == ("temperature 0.2, top_p 0.9, top_k 40, min_p 0.05, repetition_penalty 1.1 (the model's file)")


def test_llama_cpps_switched_off_penalty_and_negative_temperature_are_understood(tmp_path):
    path = tmp_path / "tiny.gguf"
    keys = {"temp": -1.0, "penalty_repeat": 1.3, "penalty_last_n": 0}
    write_gguf(path, tiny_shape(), extra={f"general.sampling.{key}": value for key, value in keys.items()})
    assert read_sampling_defaults(path).values == {"temperature": 0.0}


def test_the_embedded_model_is_sampled_as_its_makers_advise_unless_the_file_says_otherwise(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_shape())
    assert read_sampling_defaults(path, "smollm2").values == {"temperature": 0.2, "top_p": 0.9} == SMOLLM2.sampling
    assert read_sampling_defaults(path, str(path)).values == {}
    other = tmp_path / "other.gguf"
    write_gguf(other, tiny_shape(), extra={"general.sampling.temp": 0.5})
    assert read_sampling_defaults(other, "smollm2").values == {"temperature": 0.5}


def test_the_library_takes_the_advice_unless_it_is_given_parameters(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    folder_with(folder, do_sample=True, temperature=0.3, top_k=7)
    with LLM(str(folder), options={"cache.memory": "8MiB", "runtime.threads": 1}) as llm:
        assert llm.sampling_defaults.values == {"temperature": 0.3, "top_k": 7}
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 7, 16)
        given = []
        queue = llm.engine.queue

        def watched(request_id, request):
            given.append(request.params)
            return queue(request_id, request)

        llm.engine.queue = watched
        llm.generate("hello")
        llm.generate("hello", SamplingParams(max_tokens=2))
        assert (given[0], given[-1]) == (params, SamplingParams(max_tokens=2))
