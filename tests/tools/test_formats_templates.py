"""What a chat template writes of earlier calls is what its format reads and what grammars make models write.

The templates have the structure of those of Qwen 2.5, Llama 3.1 and Mistral v3, in words of our own.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.errors import RequestError
from quire.models.chat import ChatTemplate
from quire.tools.calls import Call, Tool, ToolChoice
from quire.tools.format import ToolFormat
from quire.tools.formats import format_of
from tests.tools.test_formats import ARGUMENTS, NAMES, cuts_of, gathered, read

QWEN = """{%- if tools -%}
<|im_start|>system
You may use tools. They are:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Put each use between <tool_call></tool_call>.<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- elif message.tool_calls -%}
{{ '<|im_start|>' + message.role }}{{ '\\n' + message.content if message.content else '' }}
{%- for call in message.tool_calls -%}
{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"""

LLAMA = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'user' and loop.first and tools -%}
{{ '<|start_header_id|>user<|end_header_id|>\\n\\nUse one of these if it helps. Write {"name": function name, ' }}
{{- '"parameters": dictionary of argument name and its value}.\\n\\n' }}
{%- for tool in tools -%}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor -%}
{{ message.content + '<|eot_id|>' }}
{%- elif message.tool_calls -%}
{%- if message.tool_calls | length != 1 -%}{{ raise_exception('one tool at a time') }}{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- (call.arguments | tojson) + '}<|eot_id|>' }}
{%- elif message.role == 'tool' -%}
{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- else -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- endif -%}
{%- endfor -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt else '' }}"""

MISTRAL = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- if loop.first and tools -%}
{{ '[AVAILABLE_TOOLS] [' }}{%- for tool in tools -%}{{ (tool | tojson) + (', ' if not loop.last else '') }}
{%- endfor -%}{{ '][/AVAILABLE_TOOLS]' }}
{%- endif -%}
{{ '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls -%}
{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls -%}
{%- if call.id | length != 9 -%}{{ raise_exception('ids of calls have nine letters') }}{%- endif -%}
{%- set text = call.function | tojson -%}
{{ text[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else '') }}
{%- endfor -%}
{{ ']' + eos_token }}
{%- elif message.role == 'tool' -%}
{%- if message.tool_call_id | length != 9 -%}{{ raise_exception('ids of calls have nine letters') }}{%- endif -%}
{{ '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}
{%- else -%}
{{ ' ' + message.content + eos_token }}
{%- endif -%}
{%- endfor -%}"""

# Template, format, and what stands around an answer.
FAMILIES = {
    "qwen": (QWEN, "hermes", "<|im_start|>assistant\n", "<|im_end|>"),
    "llama": (LLAMA, "llama", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "mistral": (MISTRAL, "mistral", "[/INST]", "</s>"),
}
TOOLS = [Tool(name, f"Does {name}.") for name in NAMES]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def rendered(name: str, messages: list[dict[str, Any]], opens: bool = False) -> tuple[ToolFormat, str]:
    """The format of a family and its prompt for a conversation, as the server makes it."""
    source, *_ = FAMILIES[name]
    format_, tools = format_of(source), [tool.for_template() for tool in TOOLS]
    return format_, ChatTemplate(source, TOKENS).render(format_.messages(messages, TOOLS), opens, {"tools": tools})


def called(calls: list[Call]) -> dict[str, Any]:
    """The message of an answer that called, as the server gives it to a template."""
    made = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_that_a_template_writes_are_read(name: str, seed: int) -> None:
    draw, (_, family, begin, end) = random.Random(seed), FAMILIES[name]
    for _ in range(20):
        format_ = format_of(FAMILIES[name][0])
        count = draw.randrange(1, 4) if format_.separator is not None else 1
        calls = [Call(f"call_{draw.random()}", draw.choice(NAMES), json.dumps(draw.choice(ARGUMENTS)))
                 for _ in range(count)]  # fmt: skip
        results = [{"role": "tool", "content": "17", "tool_call_id": call.id} for call in calls]
        messages = [
            {"role": "user", "content": "Go."},
            called(calls),
            *results,
            {"role": "assistant", "content": "So."},
        ]
        format_, prompt = rendered(name, messages)
        assert format_.name == family and '"Does add."' in prompt and prompt.count("17") >= count
        text = prompt[prompt.index(begin) + len(begin) :].partition(end)[0]
        said, found = gathered(read(format_, text, cuts_of(draw, text)))
        assert not said
        assert [(called, json.loads(arguments)) for called, arguments in found] == [
            (call.name, json.loads(call.arguments)) for call in calls
        ]


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_the_prompt_goes_on_with_what_grammars_write(name: str) -> None:
    """So that the answer is found in the cache when it comes back. Mistral's templates add ids."""
    draw = random.Random(0)
    for arguments in ARGUMENTS:
        calls = [Call("call_1", draw.choice(NAMES), json.dumps(arguments, ensure_ascii=False))]
        user = {"role": "user", "content": "Go."}
        format_, opened = rendered(name, [user], opens=True)
        assert rendered(name, [user, called(calls)])[1].startswith(opened + format_.write(calls))


def test_ids_of_other_servers_fit_templates_that_count_their_letters() -> None:
    calls = [Call("call_of_another_server", "add", "{}"), Call("abcdefgh1", "weather", "{}")]
    results = [{"role": "tool", "content": "1", "tool_call_id": call.id} for call in calls]
    _, prompt = rendered("mistral", [{"role": "user", "content": "Go."}, called(calls), *results])
    first, second = (prompt.rpartition(f'"{name}"')[2].partition('"id": "')[2][:9] for name in ("add", "weather"))
    assert second == "abcdefgh1" != first and prompt.count(first) == prompt.count(second) == 2


def test_a_template_that_takes_one_call_is_told_so_by_its_grammar() -> None:
    calls = [Call("a", "add", "{}"), Call("b", "add", "{}")]
    with pytest.raises(RequestError, match="one tool at a time"):
        rendered("llama", [{"role": "user", "content": "Go."}, called(calls)])
    grammar = format_of(LLAMA).grammar(TOOLS, ToolChoice("required"), lambda text: None)
    assert grammar is not None and ")*" not in grammar
