"""Tools over HTTP, with the formats of several families: whole and streamed calls, replayed conversations, refusals."""

import json
import random

import jsonschema
import pytest

from tests.effort import whole
from tests.server.fake_engine import FakeEngine
from tests.server.harness import OPTIONS, client, error_of, events, real_server
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with room for tools in a vocabulary of bytes."""
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192))


TEMPLATES = {
    "hermes": "{% if tools %}<tools>{{ tools | tojson }}</tools> answer in <tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n'
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "llama": "{{ tools | tojson }}<|python_tag|>{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls else '' }}{% endfor %}<assistant>",
    "mistral": "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}[TOOL_CALLS]{{ c | tojson }}{% endfor %}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>",
    "generic": "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role') }}{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>",
}
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"About {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED_ADD = {"type": "function", "function": {"name": "add"}}
USER = {"role": "user", "content": "What now?"}


def body_of(**more):
    return {"messages": [USER], "tools": TOOLS, "max_tokens": 300, "temperature": 1.0} | more


def options_of(name, tmp_path):
    file = tmp_path / f"{name}.jinja"
    file.write_text(TEMPLATES[name])
    return OPTIONS | {"model.chat_template": str(file)}


def check_calls(calls, choice):
    assert calls
    for call in calls:
        assert call["type"] == "function" and call["id"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    assert len({call["id"] for call in calls}) == len(calls)
    if isinstance(choice, dict):
        assert [call["function"]["name"] for call in calls] == [choice["function"]["name"]]


def streamed(text, n=1):
    """The messages that chunks make together, and why they ended."""
    found = [{"content": "", "calls": [], "finish": None} for _ in range(n)]
    for chunk in events(text):
        for choice in chunk["choices"]:
            mine, delta = found[choice["index"]], choice["delta"]
            mine["content"] += delta.get("content", "")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(mine["calls"]):
                    assert set(call) == {"index", "id", "type", "function"} and call["function"]["arguments"] == ""
                    mine["calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
                else:
                    assert set(call) == {"index", "function"} and call["index"] == len(mine["calls"]) - 1
                    mine["calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
            assert mine["finish"] is None
            mine["finish"] = choice["finish_reason"]
    return found


@pytest.mark.parametrize("choice", ["required", NAMED_ADD], ids=["any", "add"])
@pytest.mark.parametrize("name", TEMPLATES)
async def test_forced_calls_are_valid_whole_and_streamed(folder, tmp_path, name, choice, seed):
    async with real_server(folder, options_of(name, tmp_path)) as (_, _, http):
        body = body_of(tool_choice=choice, n=2, seed=seed)
        answer = await http.post(PATH, json=body)
        assert answer.status_code == 200, answer.text
        whole = answer.json()["choices"]
        for each in whole:
            if each["finish_reason"] == "tool_calls":
                check_calls(each["message"]["tool_calls"], choice)
            else:  # calls in parallel may go on and on where a model is random
                assert each["finish_reason"] == "length" and choice == "required"
        parts = streamed((await http.post(PATH, json=body | {"stream": True})).text, 2)
        for each, part in zip(whole, parts, strict=True):
            mine = each["message"]["tool_calls"]
            assert [call["function"] for call in mine] == [call["function"] for call in part["calls"]]
            assert part["finish"] == each["finish_reason"] and part["content"] == (each["message"]["content"] or "")


@pytest.mark.parametrize("name", TEMPLATES)
async def test_conversations_with_calls_go_on(folder, tmp_path, name, seed):
    """Answers are replayed as they came, with what the tools have said."""
    draw = random.Random(seed)
    async with real_server(folder, options_of(name, tmp_path)) as (_, _, http):
        messages = [{"role": "system", "content": "Be brief."}, USER]
        for turn in range(6):
            choice = draw.choice(["auto", "none", "required", {"type": "function", "function": {"name": "weather"}}])
            body = body_of(messages=messages, tool_choice=choice, max_tokens=60, seed=seed + turn)
            body["parallel_tool_calls"] = False
            answer = await http.post(PATH, json=body)
            assert answer.status_code == 200, answer.text
            message = answer.json()["choices"][0]["message"]
            messages.append(message)
            for call in message.get("tool_calls", []):
                messages.append(
                    {"role": "tool", "tool_call_id": call["id"], "content": draw.choice(["17", '{"a": 1}'])}
                )
            if not message.get("tool_calls"):
                messages.append(USER)


async def test_strict_arguments_are_valid_where_calls_are_optional(folder, tmp_path, seed):
    tools = [{"type": "function", "function": each["function"] | {"strict": True}} for each in TOOLS]
    async with real_server(folder, options_of("llama", tmp_path)) as (_, _, http):
        for number in range(8):
            body = body_of(tools=tools, seed=seed + number, logit_bias={str(ord("{")): 100})
            (choice,) = (await http.post(PATH, json=body)).json()["choices"]
            assert choice["finish_reason"] == "tool_calls"
            check_calls(choice["message"]["tool_calls"], "auto")


async def test_a_template_for_tools_is_taken_where_there_are_tools(tmp_path):
    folder = save_tiny(tmp_path, max_position_embeddings=8192)
    path = folder / "tokenizer_config.json"
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": TEMPLATES["hermes"]}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    async with real_server(str(folder)) as (_, _, http):
        assert (await http.get("/v1/models")).json()["data"][0]["capabilities"]["tools"] == "hermes"
        for tools in ([], TOOLS):
            given = {"messages": [USER], "tools": tools, "add_generation_prompt": False}
            ids = (await http.post("/tokenize", json=given)).json()["tokens"]
            prompt = (await http.post("/detokenize", json={"tokens": ids})).json()["prompt"]
            assert prompt.startswith("<tools>" if tools else "<user>What now?") and "<user>What now?" in prompt
        (choice,) = (await http.post(PATH, json=body_of(tool_choice=NAMED_ADD))).json()["choices"]
        check_calls(choice["message"]["tool_calls"], NAMED_ADD)


WORDS = ["", "hi", '{"name": "add", "arguments": {}}', "<tool_call>", "[TOOL_CALLS]", "{", "ü\n", "</tool_call>"]


def drawn_messages(draw):
    """A conversation as a confused client may send it."""
    messages = []
    for _ in range(draw.randrange(1, 8)):
        role = draw.choice(["system", "user", "assistant", "tool", "assistant", "tool"])
        message = {"role": role, "content": draw.choice([*WORDS, None, [{"type": "text", "text": "a"}], []])}
        if role == "assistant" and draw.randrange(2):
            message["tool_calls"] = [
                {"id": draw.choice(["a", "call_1", "123456789"]), "type": "function",
                 "function": {"name": draw.choice(["add", "sub"]), "arguments": draw.choice(["{}", "[1]", "{", "1"])}}
                for _ in range(draw.randrange(3))
            ]  # fmt: skip
        if role == "tool" and draw.randrange(8):
            message["tool_call_id"] = draw.choice(["a", "call_1", "unknown"])
        messages.append(message)
    return messages


@pytest.mark.parametrize("name", whole(list(TEMPLATES), len(TEMPLATES)))
async def test_random_conversations_with_tools_never_fail(folder, tmp_path, name, seed):
    """75 for each format. They are answered, or refused by what is wrong with them."""
    draw, statuses = random.Random(seed), []
    async with real_server(folder, options_of(name, tmp_path)) as (_, _, http):
        for number in range(75):
            named = {"type": "function", "function": {"name": draw.choice(["add", "weather", "sub"])}}
            body = body_of(
                messages=drawn_messages(draw), tool_choice=draw.choice(["auto", "none", "required", named, None]),
                tools=draw.choice([TOOLS, TOOLS[:1], [], None]), max_tokens=draw.choice([1, 8, 24]), seed=number,
                stream=draw.random() < 0.3, parallel_tool_calls=draw.choice([True, False, None]),
                logprobs=draw.choice([None, True]),
            )  # fmt: skip
            answer = await http.post(PATH, json=body)
            assert answer.status_code in (200, 400), answer.text
            assert body["stream"] is False or "server_error" not in answer.text
            statuses.append(answer.status_code)
    assert 10 < statuses.count(200) < 75


@pytest.mark.parametrize("name", whole(list(TEMPLATES), len(TEMPLATES)))
async def test_with_a_form_an_answer_is_calls_or_that_form(folder, tmp_path, name, seed):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    found = set()
    async with real_server(folder, options_of(name, tmp_path)) as (_, _, http):
        for number in range(12):
            bias = {} if name in ("llama", "generic") else {"logit_bias": {str(ord("{")): 6 if number % 2 else -6}}
            body = body_of(response_format=form, seed=seed + number, max_tokens=400, parallel_tool_calls=False) | bias
            (choice,) = (await http.post(PATH, json=body)).json()["choices"]
            found.add(choice["finish_reason"])
            if choice["finish_reason"] == "stop":
                assert set(json.loads(choice["message"]["content"])) == {"ok"}
    assert found <= {"stop", "tool_calls", "length"}


async def test_a_call_that_a_stop_string_or_the_limit_cuts_is_not_said_to_be_whole(folder, tmp_path):
    tool = {"type": "function", "function": {"name": "say", "parameters": {
        "type": "object", "properties": {"text": {"const": "one two"}}, "required": ["text"],
        "additionalProperties": False}}}  # fmt: skip
    body = {"messages": [USER], "tools": [tool], "tool_choice": "required", "max_tokens": 100}
    async with real_server(folder, options_of("generic", tmp_path)) as (_, _, http):
        for more, reason in (
            ({"stop": [" two"]}, "stop"),
            ({"max_tokens": 60}, "length"),
            ({"max_tokens": 9}, "length"),
        ):
            (choice,) = (await http.post(PATH, json=body | {"parallel_tool_calls": False} | more)).json()["choices"]
            assert choice["finish_reason"] == reason and not choice["message"]["content"]
            calls = choice["message"].get("tool_calls", [])
            assert bool(calls) == (more != {"max_tokens": 9})
            assert all('{"text": "one two"}'.startswith(call["function"]["arguments"]) for call in calls)
        asked = {"input": "x", "tools": [{"type": "function", **tool["function"]}], "tool_choice": "required"}
        for more, reason in (({"stop": [" two"]}, None), ({"max_output_tokens": 60}, "max_output_tokens")):
            found = (await http.post("/v1/responses", json=asked | {"parallel_tool_calls": False} | more)).json()
            assert found["status"] == found["output"][-1]["status"] == "incomplete"
            assert found["incomplete_details"] == (None if reason is None else {"reason": reason})


async def test_what_is_beside_tools_is_refused_by_its_name_and_their_size_is_limited(folder, tmp_path):
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
    async with real_server(folder, options_of("generic", tmp_path)) as (_, _, http):
        for grammar in ("hello", "root ::= x " * 2000, 'start: "a"'):
            body = {"messages": [USER], "tools": [tool], "structured_outputs": {"grammar": grammar}}
            error = (await http.post(PATH, json=body)).json()["error"]
            assert "a grammar cannot be combined with tools" in error["message"], error
        many = {"type": "string", "pattern": "\\p{" * 90_000}
        tool["function"] |= {"parameters": {"type": "object", "properties": {"a": many}}}
        answer = await http.post(PATH, json={"messages": [USER], "tools": [tool], "tool_choice": "required"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "tools") and "at most 262,144 are allowed" in error[
            "message"
        ]


async def test_an_error_of_a_form_that_nothing_has_names_the_field(folder, tmp_path):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
    async with real_server(folder, options_of("generic", tmp_path)) as (_, _, http):
        answer = await http.post(PATH, json={"messages": [USER], "response_format": form})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "grammar_failed"), error
        assert error["param"] == "response_format.json_schema.schema" and "no finite text" in error["message"]
        tool = {"type": "function", "function": {"name": "a", "strict": True, "parameters": {
            "type": "object", "properties": {"id": {"const": 2**60}}, "required": ["id"]}}}  # fmt: skip
        answer = await http.post(PATH, json={"messages": [USER], "tools": [tool]})
        error = answer.json()["error"]
        assert error["param"] == "tools[0].function.parameters" and "const: integers beyond 2^53" in error["message"]


MESSAGE = {"role": "assistant", "content": None, "tool_calls": []}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{"type": "browser"}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "'weather' twice"),
        ({"tools": TOOLS * 100}, "tools", "128"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "no 'tools'"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice", "'sub'"),
        ({"tool_choice": "maybe"}, "tool_choice", "required"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs", "cannot be combined with tools"),
        ({"messages": [USER, {"role": "tool", "content": "1"}]}, "messages[1].tool_call_id", "required"),
        ({"messages": [{"role": "user", "content": "1", "tool_calls": [CALL]}]}, "messages[0].tool_calls", "supported"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "null"),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "a", "parameters": {"contains": {"const": 1}}}}]}, "tools[0].function.parameters", "contains"),
        ({"tool_choice": "required", "tools": [TOOLS[0], {"type": "function", "function": {
            "name": "a", "parameters": {"type": "string"}}}]}, "tools[1].function.parameters", "Unsatisfiable"),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "a", "parameters": {"allOf": 3}}}]}, "tools[0].function.parameters", "allOf"),
    ],
)  # fmt: skip
async def test_what_is_wrong_with_tools_is_named(more, param, said):
    async with client(FakeEngine()) as http:
        answer = await http.post(PATH, json=body_of(**more))
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == param and said in error["message"], error


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "", "tool_calls": [], "annotations": [], "refusal": None},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "assistant", "tool_calls": [CALL]},
    ],
)
async def test_answers_of_other_servers_are_replayed(message):
    messages = [USER, message]
    if message["tool_calls"]:
        messages.append({"role": "tool", "tool_call_id": "a", "content": "1"})
    else:
        messages.append(USER)
    async with client(FakeEngine()) as http:
        answer = await http.post(PATH, json={"messages": messages, "max_tokens": 3})
    assert answer.status_code == 200, answer.text
