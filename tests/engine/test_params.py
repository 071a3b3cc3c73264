"""Request parameters: every accepted value is kept, every other one is refused with the name of its field."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from quire.engine.params import MAX_LOGPROBS, CacheHints, SamplingParams
from quire.errors import RequestError

NAN, INF = float("nan"), float("inf")


def test_the_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, -1, 1.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.prompt_logprobs) == (16, 0, None, None)
    assert (params.stop, params.stop_token_ids, params.seed, params.logit_bias) == ((), (), None, None)
    assert params.detokenize and params.skip_special_tokens
    assert not params.ignore_eos and not params.include_stop_str_in_output


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n", value) for value in (0, -1, 129, 1.0, True, "1", None, NAN)],
        *[("temperature", value) for value in (-0.1, NAN, INF, -INF, "hot", None, True, 1e300, 10**400, [1.0])],
        *[("top_k", value) for value in (-2, 1.5, None, True, "5")],
        *[("top_p", value) for value in (0, 0.0, -0.1, 1.0001, NAN, INF, None, "1")],
        *[("min_p", value) for value in (-0.01, 1.01, NAN, None)],
        *[("repetition_penalty", value) for value in (0, 0.0, -1.0, NAN, INF, None, 1e6)],
        *[("presence_penalty", value) for value in (-2.01, 2.01, NAN, None, "0")],
        *[("frequency_penalty", value) for value in (-2.01, 2.01, NAN, None)],
        *[("seed", value) for value in (1.0, "1", True, 2**63, -(2**63) - 1)],
        *[("logit_bias", value) for value in ([1], {"1": 1.0}, {1: 101}, {1: NAN}, {1: "a"}, {-1: 0}, {1: None})],
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        *[("stop", value) for value in ("", [""], ["a", 1], 5, b"a", {"a": 1}, ["x"] * 17, "y" * 1025)],
        *[("stop_token_ids", value) for value in ([-1], [1.0], [True], 3, "3", ["3"], [2] * 1025)],
        *[("max_tokens", value) for value in (0, -1, 1.0, True, "16")],
        *[("min_tokens", value) for value in (-1, 17, None, 1.5)],
        *[("logprobs", value) for value in (-1, MAX_LOGPROBS + 1, 1.0, True)],
        *[("prompt_logprobs", value) for value in (-1, MAX_LOGPROBS + 1, "1", False)],
        *[
            (name, value)
            for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")
            for value in (1, 0, None, "yes")
        ],
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("temperature", 0, 0.0),
        ("temperature", np.float32(0.5), 0.5),
        ("n", np.int64(3), 3),
        ("seed", -(2**63), -(2**63)),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("top_k", 0, 0),
        ("stop", "end", ("end",)),
        ("stop", ["a", "b", "a"], ("a", "b")),
        ("stop", None, ()),
        ("stop_token_ids", [5, 6, 5], (5, 6)),
        ("logit_bias", {np.int64(3): -100}, {3: -100.0}),
        ("max_tokens", None, None),
        ("logprobs", 0, 0),
        ("logprobs", MAX_LOGPROBS, MAX_LOGPROBS),
    ],
)
def test_a_value_in_range_is_kept_in_its_plain_type(name, value, kept):
    found = getattr(SamplingParams(**{name: value}), name)
    assert found == kept and type(found) is type(kept)


def test_stop_strings_need_text():
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop="a", detokenize=False)
    assert caught.value.param == "stop"


def test_any_minimum_goes_with_an_open_maximum():
    assert SamplingParams(max_tokens=None, min_tokens=1000).min_tokens == 1000


@pytest.mark.parametrize(
    ("settings", "greedy", "processed"),
    [
        ({}, False, False),
        ({"temperature": 0}, True, False),
        ({"temperature": 1e-6}, True, False),
        ({"top_k": 1}, True, False),
        ({"temperature": 0, "top_p": 0.5, "min_p": 0.5}, True, False),
        ({"temperature": 0, "logprobs": 3}, True, False),
        ({"temperature": 0, "logit_bias": {}}, True, False),
        ({"temperature": 0, "logit_bias": {1: 1.0}}, True, True),
        ({"temperature": 0, "min_tokens": 1}, True, True),
        ({"repetition_penalty": 1.1}, False, True),
        ({"presence_penalty": -0.1}, False, True),
        ({"frequency_penalty": 0.1}, False, True),
    ],
)
def test_the_fast_path_is_told_apart(settings, greedy, processed):
    params = SamplingParams(**settings)
    assert params.greedy is greedy
    assert params.needs_logits_processing is processed


DISK = {"tier": "disk"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache_pin": {}},
        {"cache_pin": {"tier": "tape"}},
        {"cache_pin": {"tier": ["disk"]}},
        {"cache_pin": {**DISK, "until": 5}},
        {"cache_pin": {**DISK, "seconds": -1}},
        {"cache_pin": {**DISK, "seconds": math.inf}},
        {"cache_pin": {**DISK, "seconds": "60"}},
        {"cache_pin": math.inf},
        {"cache_pin": {**DISK, "seconds": True}},
        {"cache_pin": {**DISK, "seconds": None}},
        {"cache_pin": DISK, "cache_lifetime": 5},
        {"cache_priority": 101},
        {"cache_priority": True},
        {"cache_priority": 1.5},
        {"cache_lifetime": -1},
        {"cache_lifetime": True},
        {"cache_lifetime": "60"},
        {"cache_lifetime": math.nan},
        {"cache_lifetime": 10**400},
    ],
)
def test_wishes_for_the_cache_are_refused_by_name_as_over_http(wrong):
    with pytest.raises(RequestError) as refused:
        CacheHints(**wrong)
    assert refused.value.param == next(iter(wrong))


def test_a_refused_pin_is_shown_as_it_was_given_with_all_forms():
    with pytest.raises(RequestError) as refused:
        CacheHints(cache_pin={**DISK, "seconds": -1})
    assert str(refused.value).startswith("cache_pin is {'tier': 'disk', 'seconds': -1}; it must be true, false, a")
    assert "or an object with 'tier' ('arena' or 'disk') and optionally 'seconds'" in str(refused.value)


def test_a_pin_may_name_its_tier():
    assert (CacheHints(cache_pin=DISK).cache_pin, CacheHints(cache_pin=DISK).pin_tier) == (math.inf, "disk")
    assert CacheHints(cache_pin={"tier": "arena", "seconds": 5}) == CacheHints(cache_pin=5)
    ended = CacheHints(cache_pin={**DISK, "seconds": 0}, cache_lifetime=5)
    assert (ended.cache_pin, ended.pin_tier) == (0.0, "disk")


def test_parameters_are_frozen_and_replaced():
    params = SamplingParams(stop=["a"], temperature=0)
    assert params.greedy
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    warmer = dataclasses.replace(params, temperature=0.7)
    assert not warmer.greedy and warmer.stop == ("a",)
    with pytest.raises(RequestError):
        dataclasses.replace(params, n=0)


def test_ids_outside_the_vocabulary_are_refused_by_name():
    for settings in ({"logit_bias": {50: 1.0}}, {"stop_token_ids": [50]}):
        params = SamplingParams(**settings)
        params.check_vocabulary(51)
        with pytest.raises(RequestError, match="50") as caught:
            params.check_vocabulary(50)
        assert caught.value.param in settings


def test_parameters_and_stops_need_neither_torch_nor_numpy():
    program = (
        "import sys, quire.engine.params, quire.engine.outputs, quire.engine.stops\n"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"


def test_a_refused_value_is_written_only_as_far_as_it_is_shown():
    class Item:
        num_shown = 0

        def __repr__(self):
            Item.num_shown += 1
            return "item"

    many = [Item() for _ in range(1000)]
    for refused in (
        lambda: CacheHints(cache_pin={"tier": many, "seconds": many}),
        lambda: CacheHints(cache_lifetime=many),
        lambda: SamplingParams(temperature=many),
        lambda: SamplingParams(temperature=dict.fromkeys(range(100), many)),
        lambda: SamplingParams(structured_outputs={"choice": [many]}),
        lambda: SamplingParams(n="1" * 1000),
    ):
        Item.num_shown = 0
        with pytest.raises(RequestError) as error:
            refused()
        assert Item.num_shown <= 40 and len(str(error.value)) < 400
