"""POST /v1/responses: with OpenAI's own client, whole and streamed, with tools, forms and reasoning."""

import json

import openai
import pytest
from pydantic import TypeAdapter

from quire.server import response_shapes
from quire.server.chat_schema import read_arguments
from quire.server.responses_schema import ResponsesRequest
from tests.server.fake_engine import FakeEngine
from tests.server.harness import OPTIONS, client, error_of, named_events, openai_client, real_server, turns
from tests.server.test_tooling import SCHEMAS, TEMPLATES
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": name, "parameters": schema, "strict": True} for name, schema in SCHEMAS.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192))


def sent(text):
    """The events of a stream, each in its shape."""
    found = named_events(text)
    for event in found:
        TypeAdapter(response_shapes.ResponseEvent).validate_python(event, strict=True)
    return found


def grown(events):
    """The output that the deltas of a stream make, and which items were opened and closed."""
    items = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append({"type": event["item"]["type"], "text": "", "done": False, "id": event["item"]["id"]})
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[-1]["id"] and not items[-1]["done"]
            items[-1]["text"] += event["delta"]
        elif kind == "output_item.done":
            items[-1]["done"] = True
            item = event["item"]
            whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert whole == items[-1]["text"]
    assert all(item["done"] for item in items)
    return [(item["type"], item["text"]) for item in items]


def plain(output):
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in output
    ]


async def test_openais_client_reads_answers_whole_and_streamed():
    async with openai_client() as api:
        answer = await api.responses.create(
            model="fake", input="Hello", instructions="Be brief.", max_output_tokens=90, store=False,
            metadata={"a": "b"}, top_logprobs=2, include=["message.output_text.logprobs"],
        )  # fmt: skip
        assert answer.output_text == "system: Be brief.\nuser: Hello\nassistant:"
        assert answer.status == "completed" and answer.metadata == {"a": "b"} and answer.id.startswith("resp_")
        assert answer.usage.output_tokens == len(answer.output_text) + 1  # and the end
        (item,) = answer.output
        assert (
            len(item.content[0].logprobs) == len(answer.output_text)
            and len(item.content[0].logprobs[0].top_logprobs) == 2
        )
        text, last = "", None
        stream = await api.responses.create(model="fake", input=[{"role": "user", "content": "Hello"}], stream=True)
        async for event in stream:
            text += event.delta if event.type == "response.output_text.delta" else ""
            last = event
        assert last.type == "response.completed" and last.response.output_text == text == "user: Hello\nassistant:"
        short = await api.responses.create(model="fake", input="Hello", max_output_tokens=3)
        assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await api.responses.create(model="fake", input="a", previous_response_id="resp_1")


async def test_many_scores_never_stop_the_event_loop_for_long():
    """1,500 tokens with 20 alternatives are 3 MB, and the last events of a stream have them four times. The time is
    this thread's, whatever else the machine does.
    """
    body = {"input": "a" * 1500, "top_logprobs": 20, "max_output_tokens": 1500}
    engine = FakeEngine(max_context=4096)
    async with client(engine) as http:
        await http.post(PATH, json=body | {"max_output_tokens": 3})  # what is imported at first use
        async with turns() as found:
            answer = await http.post(PATH, json=body)
            text = (await http.post(PATH, json=body | {"stream": True})).text
    assert len(found) > 20 and max(found) < 0.05, f"the loop stood still for {max(found):.2f} s"
    (item,) = answer.json()["output"]
    events = named_events(text)
    assert len(item["content"][0]["logprobs"]) == 1500 and [event["sequence_number"] for event in events] == [
        *range(len(events))
    ]
    assert events[-1]["response"]["output"][0]["content"] == item["content"] == events[-2]["item"]["content"]


async def test_reasoning_is_an_item_of_its_own():
    engine = FakeEngine()
    engine.tokenizer.chat_template = "<think></think>"
    engine.tokenizer.chat = lambda messages, opens, variables: messages[-1]["content"]
    body = {"input": "<think>Hm.</think>\nYes."}
    async with client(engine) as http:
        whole = (await http.post(PATH, json=body)).json()
        events = sent((await http.post(PATH, json=body | {"stream": True})).text)
    TypeAdapter(response_shapes.Response).validate_python(whole, strict=True)
    assert plain(whole["output"]) == [("reasoning", "Hm."), ("message", "Yes.")] == grown(events)
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>Hm.</think>")
    assert [events[0]["type"], events[1]["type"], events[-1]["type"]] == [
        "response.created", "response.in_progress", "response.completed"
    ]  # fmt: skip
    assert plain(events[-1]["response"]["output"]) == plain(whole["output"])


@pytest.mark.parametrize("name", TEMPLATES)
async def test_calls_are_items_and_conversations_go_on(folder, tmp_path, name, seed):
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATES[name])
    async with real_server(folder, OPTIONS | {"model.chat_template": str(file)}) as (_, _, http):
        body = {"input": [{"role": "user", "content": "Go."}], "tools": TOOLS, "max_output_tokens": 300, "seed": seed}
        body |= {"tool_choice": {"type": "function", "name": "add"}, "temperature": 1.0}
        whole = (await http.post(PATH, json=body)).json()
        TypeAdapter(response_shapes.Response).validate_python(whole, strict=True)
        (call,) = whole["output"]
        assert call["type"] == "function_call" and call["name"] == "add" and set(json.loads(call["arguments"])) == {
            "a", "b"
        }  # fmt: skip
        events = sent((await http.post(PATH, json=body | {"stream": True})).text)
        assert grown(events) == plain(whole["output"])
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
        again = body | {"input": [*body["input"], call, result], "tool_choice": "auto", "max_output_tokens": 20}
        answer = await http.post(PATH, json=again)
        assert answer.status_code == 200, answer.text


UNIQUE = {"type": "function", "name": "unique", "parameters": {"type": "object", "uniqueItems": True}}


async def test_tools_that_cannot_be_strict_are_not_unless_they_say_so():
    lax = {"type": "function", "name": "lax", "parameters": {"type": "object"}}
    engine = FakeEngine()
    engine.max_context = 1_000_000
    async with client(engine) as http:
        answer = await http.post(PATH, json={"input": "a", "tools": [lax, UNIQUE, TOOLS[0]]})
        assert answer.status_code == 200, answer.text
        assert [tool["strict"] for tool in answer.json()["tools"]] == [True, False, True]
        large = {"type": "object", "properties": {"a": {"enum": ["b" * 9000]}}}
        many = [lax | {"name": f"t{number}", "parameters": large} for number in range(40)]
        answer = await http.post(PATH, json={"input": "a", "tools": [*many, TOOLS[0]], "max_output_tokens": 3})
        assert answer.status_code == 200, answer.text
        assert [tool["strict"] for tool in answer.json()["tools"]] == [False] * 40 + [True]


async def test_forms_of_the_text_are_honoured(folder, seed):
    schema = SCHEMAS["weather"]
    forms = [
        {"type": "json_schema", "name": "weather", "schema": schema, "strict": True},
        {"type": "text"},
    ]
    async with real_server(folder) as (_, _, http):
        for form in forms:
            body = {"input": "Go.", "text": {"format": form}, "max_output_tokens": 200, "seed": seed, "temperature": 1}
            answer = (await http.post(PATH, json=body)).json()
            assert answer["text"]["format"] == form
            if form["type"] == "json_schema":
                assert set(json.loads(answer["output"][0]["content"][0]["text"])) == {"city", "days"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type"),
        ({"input": "a", "store": True}, "store"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"uniqueItems": True}}}},
         "text.format.schema"),
        ({"input": "a", "text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
         "structured_outputs"),
        ({"input": "a", "structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs"),
        ({"input": "a", "tools": [UNIQUE | {"strict": True}]}, "tools[0].parameters"),
        ({"input": "a", "tools": [TOOLS[0], UNIQUE], "tool_choice": "required"}, "tools[1].parameters"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)  # fmt: skip
async def test_what_is_not_taken_is_refused_by_name(body, param):
    async with client() as http:
        answer = await http.post(PATH, json=body)
    assert answer.status_code == 400 and error_of(answer)["param"] == param, answer.text


@pytest.mark.parametrize(
    ("item", "way_out"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "Nothing is stored here: send the item itself"),
        ({"type": "computer_call", "id": "a"}, "message, function_call, function_call_output, reasoning"),
    ],
)
async def test_an_item_that_is_not_taken_is_refused_with_the_way_out(item, way_out):
    async with client() as http:
        answer = await http.post(PATH, json={"input": [{"role": "user", "content": "a"}, item]})
    error = error_of(answer)
    assert answer.status_code == 400 and error["param"] == "input[1].type", answer.text
    assert item["type"] in error["message"] and way_out in error["message"]


async def test_scores_of_a_message_have_no_tokens_of_marks():
    engine = FakeEngine()
    engine.tokenizer.chat_template = "<think></think>"
    engine.tokenizer.chat = lambda messages, opens, variables: messages[-1]["content"]
    for said, text in (("<think>Hm.</think>\n\nYes.", "Yes."), ("Yes <t.", "Yes <t."), ("<think></think>No", "No")):
        body = {"input": said, "include": ["message.output_text.logprobs"]}
        async with client(engine) as http:
            whole = (await http.post(PATH, json=body)).json()
            (part,) = whole["output"][-1]["content"]
            scored = "".join(each["token"] for each in part["logprobs"]).removesuffix("</s>")
            assert part["text"] == text == scored.lstrip("\n"), scored
            found = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
            assert found == (said.find("</think>") + len("</think>") if "</think>" in said else 0)


async def test_scores_of_a_message_have_no_tokens_of_calls():
    engine = FakeEngine()
    engine.tokenizer.chat_template = "<tool_call>"
    engine.tokenizer.chat = lambda messages, opens, variables: messages[-1]["content"]
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": False}
    said = 'Look:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\nDone'
    async with client(engine) as http:
        body = {"input": said, "include": ["message.output_text.logprobs"], "tools": [tool]}
        output = (await http.post(PATH, json=body)).json()["output"]
        assert plain(output) == [("message", "Look:"), ("function_call", '{"a": 1}'), ("message", "Done")]
        for item in (output[0], output[2]):
            (part,) = item["content"]
            scored = "".join(each["token"] for each in part["logprobs"]).removesuffix("</s>")
            assert scored.strip() == part["text"], scored


def test_reasoning_goes_to_the_template_with_the_answer_that_it_led_to():
    def thought(text):
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": []}
    body = ResponsesRequest(input=[
        {"role": "user", "content": "a"}, thought("one"), call, result, thought("two"),
        {"role": "assistant", "content": "b"}, thought("lost"), {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"}, {"type": "reasoning"}, call,
    ])  # fmt: skip
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]
    assert body.for_template() == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "one", "tool_calls": calls},
        {"role": "tool", "content": "", "tool_call_id": "c"},
        {"role": "assistant", "content": "b", "reasoning_content": "two"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "tool_calls": calls},
    ]


async def test_answers_that_a_client_has_parsed_come_back():
    """OpenAI's client puts what it has parsed beside the text."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "parsed_arguments": {"a": [1]}}
    part = {"type": "output_text", "text": "{}", "annotations": [], "logprobs": [], "parsed": {"a": 1}}
    answers = [{"type": "message", "role": "assistant", "status": "completed", "content": [part]}, call]
    result = {"type": "function_call_output", "call_id": "c", "output": "x"}
    async with client(FakeEngine()) as http:
        answer = await http.post(PATH, json={"input": [{"role": "user", "content": "a"}, *answers, result]})
        assert answer.status_code == 200, answer.text
        made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed_arguments": [1]}}
        for content in (None, "", [], [{"type": "text", "text": "b"}]):
            said = {"role": "assistant", "content": content, "parsed": {"a": 1}, "tool_calls": [made]}
            messages = [{"role": "user", "content": "a"}, said, {"role": "tool", "tool_call_id": "c", "content": []}]
            answer = await http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
            assert answer.status_code == 200, answer.text


async def test_errors_name_what_the_request_has():
    async with client(FakeEngine(), max_output_tokens=100) as http:
        for path, body, param in (
            (PATH, {"input": "a", "max_output_tokens": 101}, "max_output_tokens"),
            ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 101}, "max_completion_tokens"),
            ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 101}, "max_tokens"),
        ):
            error = (await http.post(path, json=body)).json()["error"]
            assert error["param"] == param and error["message"].startswith(f"'{param}' is 101;")
        error = (await http.post(PATH, json={"input": None})).json()["error"]
        assert (error["param"], error["code"]) == ("input", "missing_required_parameter")
        error = (await http.post("/v1/embeddings", json={"input": [[1], []]})).json()["error"]
        assert error["param"] == "input[1]" and "empty" in error["message"]
        said = {"role": "assistant", "content": "b", "tool_calls": [CALL]}
        more = {"continue_final_message": True, "add_generation_prompt": False}
        error = (await http.post("/v1/chat/completions", json={"messages": [*MESSAGES, said], **more})).json()["error"]
        assert error["param"] == "continue_final_message" and "'tool_calls'" in error["message"]


async def test_arguments_with_half_a_character_can_be_sent_back():
    """A model may write such an escape, and no text of a prompt can hold what it stands for."""
    half = CALL | {"function": {"name": "f", "arguments": '{"b": "\\ud800"}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [half]}]
    messages += [{"role": "tool", "tool_call_id": "c", "content": "d"}]
    async with client(FakeEngine()) as http:
        answer = await http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
    assert read_arguments(half["function"]["arguments"]) == half["function"]["arguments"]


MESSAGES = [{"role": "user", "content": "a"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
