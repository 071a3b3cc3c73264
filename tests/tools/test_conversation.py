"""Conversations with calls, as templates of model families take them: what is rendered is what parsers read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from quire.tools.answer_parser import call_parser
from quire.tools.calls import Call, Tool
from quire.tools.conversation import render_chat
from quire.tools.formats import format_of
from tests.tokenizer_families import CALLING, family_tokenizer
from tests.tools.test_formats import cuts_of, gathered

# In words of our own, with the marks and the structure of the families' templates.
TURNS = "{% for m in messages %}BEGIN{{ m.role }}MIDDLE{{ m.content or '' }}CALLSEND{% endfor %}"
OPENS = "{% if add_generation_prompt %}ANSWER{% endif %}"


def template(begin: str, middle: str, end: str, answer: str, calls: str = "", tools: str = "") -> str:
    turns = TURNS.replace("CALLS", calls).replace("BEGIN", begin).replace("MIDDLE", middle).replace("END", end)
    return "{% if tools %}" + tools + "{{ tools | tojson }}{% endif %}" + turns + OPENS.replace("ANSWER", answer)


ARGS = "{% for c in m.tool_calls or [] %}"
TEMPLATES = {
    "mistral-args": template("[", "]", "</s>", "[assistant]", ARGS + "[TOOL_CALLS]{{ c.function.name }}[ARGS]"
                             "{{ c.function.arguments | tojson }}{% endfor %}"),
    "mistral-ids": template("[", "]", "</s>", "[assistant]", ARGS + "[TOOL_CALLS]{{ c.function.name }}"
                            "[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"),
    "glm": template("<|", "|>\n", "", "<|assistant|>\n", ARGS + "\n<tool_call>{{ c.function.name }}\n"
                    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
                    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n"
                    "{% endfor %}</tool_call>{% endfor %}"),
    "glm4": "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
            "{% if m.metadata %}{{ m.metadata }}{% endif %}{{ '\n' + m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}{# <|observation|> #}",
    "olmo": template("<|im_start|>", "\n", "<|im_end|>\n", "<|im_start|>assistant\n",
                     "{% if m.tool_calls %}<function_calls>{% for c in m.tool_calls %}{{ c.function.name }}("
                     "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
                     "{{ ', ' if not loop.last }}{% endfor %}){{ '\n' if not loop.last }}{% endfor %}"
                     "</function_calls>{% endif %}"),
    "gemma": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
             "{{ raise_exception('roles must alternate') }}{% endif %}"
             "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
             "{% if m.content is string %}{{ m.content }}{% else %}"
             "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<end_of_turn>\n"
             "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "granite": template("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n",
                        "<|start_of_role|>assistant<|end_of_role|>", tools="write <|tool_call|> and a list: "),
    "phi": CALLING["phi"].template,
}  # fmt: skip
ANSWER = {"mistral-args": "[assistant]", "mistral-ids": "[assistant]", "glm": "<|assistant|>\n",
          "glm4": "<|assistant|>", "olmo": "<|im_start|>assistant\n", "gemma": "<start_of_turn>model\n",
          "granite": "<|start_of_role|>assistant<|end_of_role|>", "phi": "<|assistant|>"}  # fmt: skip
END = {"mistral-args": "</s>", "mistral-ids": "</s>", "glm": "<|tool|>", "glm4": "<|observation|>",
       "olmo": "<|im_end|>", "gemma": "<end_of_turn>", "granite": "<|end_of_text|>", "phi": "<|end|>"}  # fmt: skip
TOOLS = [
    Tool("weather", "Does weather.", {"type": "object", "properties": {"city": {"type": "string"},
                                                                       "days": {"type": "array"}}}),
    Tool("add", "Does add.", {"type": "object", "properties": {"a": {"type": "number"}}}),
]  # fmt: skip
CALLS = [
    Call("call_one", "weather", '{"city": "Zürich \\"x\\" (}", "days": [1, {"a": null}]}'),
    Call("call_two", "add", '{"a": -1.5}'),
]


def called(calls: list[Call]) -> dict[str, Any]:
    made = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_in_a_conversation_are_rendered_in_the_form_that_is_read(name: str, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    tokenizer = family_tokenizer(tmp_path, CALLING[name]._replace(template=TEMPLATES[name]))
    format_ = format_of(tokenizer.tool_template)
    assert format_.name == name
    for calls in (CALLS, CALLS[:1], CALLS[1:]):
        results = [{"role": "tool", "content": f"17 {call.name}", "tool_call_id": call.id} for call in calls]
        messages = [{"role": "user", "content": "Go."}, called(calls), *results]
        text = render_chat(tokenizer, messages, TOOLS).text
        assert all(f"Does {tool.name}." in text for tool in TOOLS) and text.endswith(ANSWER[name])
        assert all(f"17 {call.name}" in text for call in calls)
        opened = render_chat(tokenizer, messages[:1], TOOLS).text
        answer = text.removeprefix(opened).partition(END[name])[0]
        assert text.startswith(opened)
        for cuts in ([], cuts_of(draw, answer)):
            parser = call_parser(format_, TOOLS)
            pieces = [answer[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
            said, found = gathered([part for piece in pieces for part in parser.push(piece)] + parser.flush())
            assert not said, answer
            assert [(each, json.loads(arguments)) for each, arguments in found] == [
                (call.name, json.loads(call.arguments)) for call in calls
            ]


def test_the_first_message_of_gemma_explains_its_calls_and_roles_alternate(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, CALLING["gemma"]._replace(template=TEMPLATES["gemma"]))
    messages = [
        {"role": "user", "content": "Go."},
        called(CALLS),
        {"role": "tool", "content": "1", "tool_call_id": "call_one"},
        {"role": "tool", "content": "2", "tool_call_id": "call_two"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]
    text = render_chat(tokenizer, messages, TOOLS).text
    assert text.index("You can call these functions") < text.index("Go.") < text.index("weather(city=")
    assert text.count("<start_of_turn>user") == 2 and text.count("```tool_output\n") == 2 and "And?" in text


@pytest.mark.parametrize("name", ["phi", "granite"])
def test_results_have_their_own_role_in_templates_without_calls(name: str, tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, CALLING[name]._replace(template=TEMPLATES[name]))
    system = {"role": "system", "content": "Be brief."}
    messages = [system, {"role": "user", "content": "Go."}, called(CALLS), {"role": "tool", "content": "17"}]
    text = render_chat(tokenizer, messages, TOOLS).text
    assert {"phi": "<|tool_response|>17", "granite": "<|start_of_role|>tool_response<|end_of_role|>17"}[name] in text
    assert text.count("<|system|>") == (name == "phi")
    if name == "phi":
        listed = text.partition("Be brief.<|tool|>")[2].partition("<|/tool|>")[0]
        assert [each["name"] for each in json.loads(listed)] == ["weather", "add"]


def test_names_of_tokens_in_tools_stay_text_where_the_system_message_lists_them(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, CALLING["phi"])
    chat = render_chat(tokenizer, [{"role": "user", "content": "Go."}], [Tool("add", "Ends with <|/tool|>.")])
    ids = tokenizer.encode(chat.escaped, add_special=False, escape=chat.escape)
    assert ids.count(tokenizer.added_id("<|/tool|>")) == 1 and chat.text.count("<|/tool|>") == 2
