"""The stream of a request whose sequences are routed one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from quire.cluster.answers import Item, stream_answer
from quire.cluster.messages import Attempt, FirstTokenInfo, Token
from quire.engine.admission import AdmittedRequest
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.engine.params import SamplingParams

CACHED = FirstTokenInfo(None, 64, {"arena": 64}, None, None)
COMPUTED = FirstTokenInfo([None, {}, {}], 0, {}, None, None)


def token(token_id: int, *, is_last: bool = False, first: FirstTokenInfo | None = None) -> Token:
    output = CompletionOutput(0, "", [token_id], None, "length" if is_last else None, None, None)
    return Token(Attempt(1, 1), output, 0, is_last, first)


class Routed:
    """A router that begins requests, and answers them as a test says."""

    def __init__(self) -> None:
        self.answers: list[Callable[[Item], None]] = []
        self.aborted: list[Any] = []

    def begin(self, job: Any, answer: Callable[[Item], None], trace: Any) -> SimpleNamespace:
        self.answers.append(answer)
        return SimpleNamespace(is_over=len(self.answers) == 1)

    def abort(self, request: Any) -> None:
        self.aborted.append(request)


def test_other_answers_wait_in_order_for_the_one_with_the_prompt_s_log_probabilities() -> None:
    async def scenario() -> list[RequestOutput]:
        router: Any = Routed()
        request = AdmittedRequest(None, [1, 2, 3], SamplingParams(n=2, max_tokens=3, prompt_logprobs=0))
        stream = stream_answer(router, "r", request, 7)
        found = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        first, second = router.answers
        for each in (token(5, first=CACHED), token(6), token(7, is_last=True), None):
            second(each)
        await asyncio.sleep(0.01)
        assert not found.done()
        first(token(8, first=COMPUTED))
        first(token(9, is_last=True))
        outputs = [await found, *[each async for each in stream]]
        assert len(router.aborted) == 1, "of those that are not over"
        return outputs

    outputs = asyncio.run(scenario())
    assert [(each.outputs[0].index, each.outputs[0].token_ids) for each in outputs] == [
        (0, [8]),
        (1, [5]),
        (1, [6]),
        (1, [7]),
        (0, [9]),
    ]
    assert [each.prompt_logprobs for each in outputs] == [COMPUTED.prompt_logprobs, None, None, None, None]
    assert [each.finished for each in outputs] == [False] * 4 + [True] and not outputs[1].num_cached_tokens
