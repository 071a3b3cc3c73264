"""Extensions of chats: reasoning split off, going on with a message, echo, ids and scores of tokens."""

import random

import pytest

from quire.server.chat_schema import ChatRequest
from quire.server.tooling import Tooling
from quire.tools.answer_parser import AnswerParser
from quire.tools.calls import ReasoningDelta, TextDelta
from quire.tools.reasoning import FORMATS, ReasoningParser, reasoning_of
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, client, error_of, events

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


async def post(body, engine=None, path=PATH):
    async with client(engine) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def read(text, is_inside, cuts, format_=FORMATS[0]):
    reader, found = AnswerParser(ReasoningParser(format_, is_inside=is_inside)), {ReasoningDelta: "", TextDelta: ""}
    for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len(text)], strict=True)):
        for part in reader.read(text[begin:end], is_last=number == len(cuts)):
            found[type(part)] += part.text
    return found[ReasoningDelta], found[TextDelta]


@pytest.mark.parametrize(
    ("text", "is_inside", "reasoning", "rest"),
    [
        ("<think>\nHm, 1 < 2.\n</think>\n\nYes.\n", False, "Hm, 1 < 2.", "Yes.\n"),
        ("\n <think></think>Yes.", False, "", "Yes."),
        ("Hm.\n\nSo.</think>Yes. </think>", True, "Hm.\n\nSo.", "Yes. </think>"),
        ("Never ends </thin", True, "Never ends </thin", ""),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
        (" <thin", False, "", " <thin"),
        ("", True, "", ""),
        ("", False, "", ""),
    ],
)
async def test_reasoning_is_split_off_however_an_answer_is_cut(text, is_inside, reasoning, rest, seed):
    draw = random.Random(seed)
    for _ in range(40):
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(6)))
        assert read(text, is_inside, cuts) == (reasoning, rest)


async def test_a_format_is_known_by_its_template():
    assert reasoning_of("{{ '</think>' }}").name == "think" and reasoning_of("[THINK]a[/THINK]").name == "mistral"
    assert reasoning_of("{{ messages }}") is None


async def test_reasoning_has_its_own_field_whole_and_streamed():
    engine = FakeEngine()
    engine.tokenizer.chat_template = "<think></think>"
    # The fake answers with what it was given, role and all.
    engine.tokenizer.chat = lambda messages, opens, variables: messages[-1]["content"]
    body = {"messages": [{"role": "user", "content": "<think>Hm.</think>\nYes."}]}
    message = (await post(body, engine)).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None, "reasoning_content": "Hm."}
    deltas = [each["choices"][0]["delta"] for each in events((await post(body | {"stream": True}, engine)).text)]
    assert "".join(each.get("reasoning_content", "") for each in deltas) == "Hm."
    assert "".join(each.get("content", "") for each in deltas) == "Yes."
    plain = (await post(body | {"include_reasoning": False}, engine)).json()["choices"][0]["message"]
    assert plain["content"] == "<think>Hm.</think>\nYes." and "reasoning_content" not in plain


@pytest.mark.parametrize(("end", "begins"), [("<think>\n", ""), ("assistant:", "<think>")])
async def test_a_form_comes_behind_the_reasoning(end, begins):
    tokenizer = FakeEngine().tokenizer
    tokenizer.chat_template = "<think></think>"
    body = ChatRequest(messages=[USER], structured_outputs={"regex": "a"})
    tooling = await Tooling.of(body, tokenizer)
    assert tooling.constraint(tokenizer.encode(end)).reasoning == (begins, "</think>")
    tokenizer.chat_template = ""
    assert (await Tooling.of(body, tokenizer)).constraint(tokenizer.encode(end)).reasoning is None


ANSWER = {"role": "assistant", "content": "It begins so"}


async def test_an_answer_goes_on_with_the_last_message():
    body = {"messages": [USER, ANSWER], "continue_final_message": True}
    said = (await post(body)).json()["choices"][0]["message"]["content"]
    assert said == "user: hi\nassistant: It begins so"
    echoed = body | {"echo": True}
    assert (await post(echoed)).json()["choices"][0]["message"]["content"] == "It begins so" + said
    first, *_ = events((await post(echoed | {"stream": True})).text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "It begins so"}
    assert (await post({"messages": [USER], "add_generation_prompt": False})).json()["choices"][0]["message"][
        "content"
    ] == "user: hi\n"


async def test_tokenize_takes_the_same():
    bodies = [
        {"messages": [USER, ANSWER], "continue_final_message": True},
        {"messages": [USER, ANSWER], "add_generation_prompt": False},
        {"messages": [USER]},
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]},
    ]
    for body in bodies:
        ids = (await post(body, path="/tokenize")).json()["tokens"]
        found = (await post(body | {"return_token_ids": True})).json()
        assert found["prompt_token_ids"] == ids


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER, {"role": "assistant", "content": ""}], "continue_final_message": True},
         "continue_final_message"),
        ({"messages": [USER, ANSWER], "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
        ({"messages": [USER, ANSWER], "echo": True}, "echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused_by_name(more, param):
    async with client() as http:
        answer = await http.post(PATH, json=CHAT | more)
    assert answer.status_code == 400 and error_of(answer)["param"] == param, answer.text


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_token_ids_are_those_of_prompt_and_answer(path):
    engine = FakeEngine()
    body = ({"prompt": ["ab", "xyz"]} if path != PATH else CHAT) | {"max_tokens": 4, "n": 2, "return_token_ids": True}
    whole = (await post(body, engine, path)).json()
    prompts = [each["prompt_token_ids"] for each in engine.prompts]
    for choice in whole["choices"]:
        mine = choice if path != PATH else whole
        assert mine["prompt_token_ids"] == prompts[choice["index"] // 2]
        assert 0 < len(choice["token_ids"]) <= 4
    found = {choice["index"]: [] for choice in whole["choices"]}
    told = {}
    for chunk in events((await post(body | {"stream": True}, engine, path)).text):
        for choice in chunk["choices"]:
            found[choice["index"]] += choice.get("token_ids", [])
            if (ids := choice.get("prompt_token_ids", chunk.get("prompt_token_ids"))) is not None:
                assert choice["index"] not in told
                told[choice["index"]] = ids
    assert found == {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    assert told == {0: prompts[0]} if path == PATH else told == {index: prompts[index // 2] for index in range(4)}


async def test_scores_of_the_prompt_are_those_of_completions():
    engine = FakeEngine()
    chat = (await post(CHAT | {"prompt_logprobs": 2, "max_tokens": 1}, engine)).json()
    body = {"prompt": engine.prompts[0]["prompt_token_ids"], "prompt_logprobs": 2, "max_tokens": 1}
    assert chat["prompt_logprobs"] == (await post(body, path="/v1/completions")).json()["choices"][0]["prompt_logprobs"]
    assert chat["prompt_logprobs"][0] is None
