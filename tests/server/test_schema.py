"""Unsupported and unknown fields are refused by name, with 400 and OpenAI's body, and never ignored."""

import pytest

from tests.server.harness import CHAT, TEXT, client, error_of

pytestmark = pytest.mark.anyio

MESSAGE = {"role": "user", "content": "a"}
CHAT_REFUSED = [
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": {}}, "tools", "invalid_type"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"functions": []}, "functions", "unsupported_parameter"),
    ({"function_call": "auto"}, "function_call", "unsupported_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.name",
        "missing_required_parameter",
    ),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities[1]", "unsupported_value"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
    ({"verbosity": "low"}, "verbosity", "unsupported_parameter"),
    ({"prediction": {}}, "prediction", "unsupported_parameter"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    ({"moderation": {}}, "moderation", "unsupported_parameter"),
    ({"store": True}, "store", "unsupported_value"),
    ({"store": 0}, "store", "unsupported_value"),
    ({"service_tier": "priority"}, "service_tier", "unsupported_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"logprobs": 3}, "logprobs", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hello"}, "messages", "invalid_type"),
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": [MESSAGE, "b"]}, "messages[1]", "invalid_type"),
    ({"messages": [MESSAGE | {"role": "function"}]}, "messages[0].role", "unsupported_value"),
    ({"messages": [MESSAGE | {"role": "tool"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
    ({"messages": [MESSAGE | {"tool_calls": []}]}, "messages[0].tool_calls", "unsupported_parameter"),
    ({"messages": [MESSAGE | {"content": None}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [MESSAGE | {"content": []}]}, "messages[0].content", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "unsupported_value",
    ),
    ({"echo": True}, "echo", "invalid_value"),
    ({"ecko": True}, "ecko", "unknown_parameter"),
]
TEXT_REFUSED = [
    ({"suffix": "end"}, "suffix", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_value"),
    ({"best_of": 2, "n": 3}, "best_of", "unsupported_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "unsupported_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [[]]}, "prompt", "invalid_value"),
    ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
    ({"prompt": [True]}, "prompt", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": [258]}, "prompt", "invalid_value"),
    ({"prompt": None}, "prompt", "missing_required_parameter"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": 10**400}, "max_tokens", "invalid_value"),
    ({"messages": []}, "messages", "unknown_parameter"),
]
BOTH_REFUSED = [
    ({"guided_json": {}}, "guided_json", "unknown_parameter"),
    ({"temprature": 1}, "temprature", "unknown_parameter"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"temperature": -(10**400)}, "temperature", None),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 1.5}, "n", "invalid_type"),
    ({"n": 129}, "n", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"stop": [1]}, "stop", "invalid_value"),
    ({"stop": "x" * 1025}, "stop", "invalid_value"),
    ({"stop_token_ids": [258]}, "stop_token_ids", "invalid_value"),
    ({"cache_salt": "x" * 257}, "cache_salt", "invalid_value"),
    ({"cache_salt": 1}, "cache_salt", "invalid_type"),
    ({"cache_pin": -1}, "cache_pin", "invalid_value"),
    ({"cache_pin": "60"}, "cache_pin", "invalid_value"),
    ({"cache_pin": 10**400}, "cache_pin", "invalid_value"),
    ({"cache_pin": [1]}, "cache_pin", "invalid_value"),
    ({"cache_pin": {}}, "cache_pin", "invalid_value"),
    ({"cache_pin": {"tier": "tape"}}, "cache_pin", "invalid_value"),
    ({"cache_pin": {"tier": ["disk"]}}, "cache_pin", "invalid_value"),
    ({"cache_pin": {"tier": "disk", "seconds": -1}}, "cache_pin", "invalid_value"),
    ({"cache_pin": {"tier": "disk", "seconds": True}}, "cache_pin", "invalid_value"),
    ({"cache_pin": {"tier": "disk", "until": 5}}, "cache_pin", "invalid_value"),
    ({"cache_priority": 101}, "cache_priority", "invalid_value"),
    ({"cache_priority": -101}, "cache_priority", "invalid_value"),
    ({"cache_priority": 1.5}, "cache_priority", "invalid_type"),
    ({"cache_priority": True}, "cache_priority", "invalid_type"),
    ({"cache_lifetime": -1}, "cache_lifetime", "invalid_value"),
    ({"cache_lifetime": True}, "cache_lifetime", "invalid_value"),
    ({"cache_lifetime": "60"}, "cache_lifetime", "invalid_value"),
    ({"cache_lifetime": 10**400}, "cache_lifetime", "invalid_value"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"258": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "invalid_value"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", None),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown_parameter"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_value",
    ),
]
REFUSED = (
    [("/v1/chat/completions", CHAT | options, param, code) for options, param, code in CHAT_REFUSED + BOTH_REFUSED]
    + [("/v1/completions", TEXT | options, param, code) for options, param, code in TEXT_REFUSED + BOTH_REFUSED]
    + [
        ("/v1/completions", {"prompt": "", "add_special_tokens": False}, "prompt", "invalid_value"),
        ("/v1/completions", {}, "prompt", "missing_required_parameter"),
        ("/v1/chat/completions", {}, "messages", "missing_required_parameter"),
        ("/tokenize", {}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", "messages": [MESSAGE]}, "prompt", "invalid_value"),
        ("/tokenize", {"messages": [MESSAGE], "add_special_tokens": True}, "add_special_tokens", "invalid_value"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "invalid_value"),
        ("/detokenize", {"tokens": [258]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": None}, "tokens", "missing_required_parameter"),
        ("/v1/completions", TEXT | {"nothing": None}, "nothing", "unknown_parameter"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "invalid_type"),
        ("/detokenize", {"tokens": [1], "foo": 1}, "foo", "unknown_parameter"),
    ]
)


@pytest.mark.parametrize(("path", "body", "param", "code"), REFUSED)
async def test_a_request_is_refused_by_name(path, body, param, code):
    async with client() as http:
        response = await http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert param.rpartition(".")[2].partition("[")[0] in error["message"]


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("/v1/completions", {"prompt": [[1, 2], [3, -4]]}, "and not empty; [1][1] is -4."),
        ("/v1/completions", {"prompt": [3, 4, "{a}"]}, 'and not empty; [2] is "{a}".'),
        ("/v1/completions", {"prompt": ["a", [1]]}, "and not empty; [1] is an array."),
        ("/v1/completions", {"prompt": [[1], "a"]}, 'and not empty; [1] is "a".'),
        ("/v1/completions", {"prompt": []}, "and not empty; it is an array."),
        ("/v1/completions", {"prompt": 5}, "and not empty; it is 5."),
        ("/v1/completions", {"stop": ["a", ""]}, 'or a list of at most 16; [1] is "".'),
        ("/v1/completions", {"stop": ["a"] * 17}, "or a list of at most 16; the list has 17."),
        ("/v1/chat/completions", {"messages": []}, "'messages': its length must be at least 1 and is 0."),
        ("/v1/completions", {"stop_token_ids": [1] * 1025}, "its length must be at most 1024 and is 1025."),
        ("/v1/completions", {"logit_bias": {"1": 5, "a": 1}}, 'must be token ids; "a" is none.'),
        ("/v1/chat/completions", {"logit_bias": {"-1": 5}}, 'must be token ids; "-1" is none.'),
        ("/v1/completions", {"logit_bias": {"7": 101}}, "from -100 to 100; that of 7 is 101."),
        ("/v1/completions", {"logit_bias": {"7": "x{}"}}, 'from -100 to 100; that of 7 is "x{}".'),
        ("/v1/chat/completions", {"guided_json": {}}, 'here ({"json": SCHEMA}; or response_format).'),
        ("/v1/completions", {"n_predict": 8}, "'n_predict'; it is 'max_tokens' here."),
        ("/v1/chat/completions", {"options": {}}, "such as temperature and max_tokens."),
    ],
)
async def test_a_refusal_names_the_item_at_fault(path, options, said):
    async with client() as http:
        response = await http.post(path, json=(CHAT if "chat" in path else TEXT) | options)
    assert response.status_code == 400 and error_of(response)["message"].endswith(said), response.text


@pytest.mark.parametrize("name", ["user", "prompt_cache_key", "safety_identifier"])
async def test_hints_that_change_nothing_are_accepted(name):
    async with client() as http:
        assert (await http.post("/v1/chat/completions", json=CHAT | {name: "x"})).status_code == 200


async def test_harmless_values_of_unsupported_parameters_are_accepted():
    harmless = {
        "tools": None,
        "tool_choice": "none",
        "functions": None,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "audio": None,
        "reasoning_effort": None,
        "verbosity": None,
        "logprobs": False,
        "n": 1,
    }
    async with client() as http:
        assert (await http.post("/v1/chat/completions", json=CHAT | harmless)).status_code == 200
        assert (
            await http.post("/v1/completions", json=TEXT | {"suffix": None, "best_of": 1, "user": "a"})
        ).status_code == 200
