"""Chat templates render as `transformers` renders them, and cannot do harm."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from quire.errors import ModelError, RequestError
from quire.models import chat
from quire.models.chat import ChatTemplate
from quire.models.tokenizer import load_tokenizer
from tests.real_model import embedded_gguf

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1 < 2 & \"q\" 'q' é"},
    {"role": "assistant", "content": "yes", "tool_calls": [{"name": "f", "arguments": {"x": [1, None, True]}}]},
    {"role": "user", "content": "why?"},
]

TEMPLATES = {
    "blocks are trimmed": (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend"
    ),
    "tojson is not html": "{{ messages | tojson }}|{{ messages[2].tool_calls | tojson(indent=2) }}",
    "loop controls": (
        "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}"
        "{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}"
    ),
    "generation marks": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    ),
    "special tokens": "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}{{ pad_token is defined }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation prompt": "{{ messages | length }}{% if add_generation_prompt %} go{% endif %}",
    "tools": "{% if tools %}{{ tools | tojson }}{% else %}none{% endif %}{{ documents is none }}",
    "extra variables": "{{ enable_thinking is defined and enable_thinking }}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('; ') | trim }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "variables", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}], "enable_thinking": True}]
)
def test_templates_render_as_in_transformers(name: str, variables: dict[str, Any]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    given = {"tools": None, "documents": None, **variables}
    expected, _ = render_jinja_template(
        [MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=True, **given, **tokens
    )
    assert ChatTemplate(TEMPLATES[name], tokens).render(MESSAGES, variables=variables) == expected[0]


def test_the_embedded_models_prompt() -> None:
    tokenizer = load_tokenizer(embedded_gguf())
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    turn = "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == system + turn + "<|im_start|>assistant\n"
    assert tokenizer.chat([{"role": "user", "content": "hi"}], add_generation_prompt=False) == system + turn


def test_what_a_template_raises_is_a_bad_request_in_its_own_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(MESSAGES)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].absent.deeper }}",
        "{{ 1 // 0 }}",
    ],
)
def test_what_fails_inside_a_template_is_a_bad_request(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ('%c' % 1).join.__self__.__class__ }}",
    ],
)
def test_templates_stay_in_the_sandbox(source: str) -> None:
    before = [dict(message) for message in MESSAGES]
    try:
        text = ChatTemplate(source).render(MESSAGES)
    except RequestError:
        text = ""
    assert "class" not in text and "uid=" not in text and before == MESSAGES


BOMBS = {
    "{{ 'a' * 10**10 }}": "memory",
    "{{ 'a' * n }}": "memory",
    "{{ '%1000000000d' % 1 }}": "memory",
    "{{ '{:1000000000}'.format(1) }}": "memory",
    "{{ 'a' | indent(10**10) }}": "memory",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}": (
        "memory|processor time"
    ),
    "{% for i in range(10**9) %}{% endfor %}": "Range too big",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "processor time",
    "{{ lipsum(n=10**8) }}": "processor time",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{{ raise_exception('a' * 10**7) }}": "rejects",
    # Of a variable: a constant of 17 MB would be computed and written out while the template is compiled.
    "{{ 'a' * (n // 10**12 * 17 * 2**20) }}": "17,825,792 characters",
}


@pytest.mark.parametrize("source", BOMBS)
def test_what_a_template_takes_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.3)
    template = ChatTemplate(source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError, match=BOMBS[source]) as caught:
        template.render(MESSAGES, variables={"n": 10**12})
    assert len(str(caught.value)) < 1200
    # Of this process, in KiB. The renderer's memory is bounded by its address space.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    # The next one finds a renderer again.
    assert ChatTemplate("{{ messages | length }}").render(MESSAGES) == "4"


def test_a_template_that_cannot_be_compiled_in_time_is_a_bad_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.3)
    with pytest.raises(ModelError, match="processor time"):
        ChatTemplate("{{ 7 ** (10**9) }}")  # jinja2 computes constants


def test_a_renderer_that_was_killed_is_replaced() -> None:
    template = ChatTemplate("{{ messages | length }}")
    assert template.render(MESSAGES) == "4"
    assert chat._renderer._process is not None
    chat._renderer._process.kill()
    chat._renderer._process.wait()
    assert template.render(MESSAGES) == "4"


def test_threads_render_side_by_side_without_mixing_answers() -> None:
    templates = [ChatTemplate(f"{number} {{{{ messages[0].content }}}}") for number in range(4)]

    def ask(number: int) -> bool:
        text = str(number) * 1000
        return templates[number % 4].render([{"role": "user", "content": text}]) == f"{number % 4} {text}"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(200)))


def test_a_template_that_does_not_parse_is_a_bad_model() -> None:
    with pytest.raises(ModelError, match="does not parse"):
        ChatTemplate("{% for %}")


def test_objects_with_methods_never_reach_a_template() -> None:
    with pytest.raises(RequestError, match="messages has a bytes"):
        ChatTemplate("{{ messages }}").render([{"role": "user", "content": b"x"}])


@pytest.mark.parametrize("where", ["messages", "tools", "variables"])
def test_values_of_a_conversation_are_counted_before_they_are_copied(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "MAX_VALUES", 1000)
    template = ChatTemplate("{{ messages | length }}")

    def render(count: int) -> str:
        values = {"a": [{"b": each} for each in range(count)]}
        match where:
            case "messages":
                call = {"function": {"name": "f", "arguments": values}}
                return template.render([{"role": "assistant", "content": "", "tool_calls": [call]}])
            case "tools":
                return template.render(MESSAGES[:2], variables={"tools": [{"function": {"parameters": values}}]})
        return template.render(MESSAGES[:2], variables={"given": values})

    assert render(480) in "12"
    with pytest.raises(RequestError, match="more than 1,000 values together") as refused:
        render(510)
    assert refused.value.param == {"variables": "chat_template_kwargs"}.get(where, where)
