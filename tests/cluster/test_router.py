"""What a router does when messages are late, lost or repeated, and when instances are gone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from quire.cluster.bodies import InstanceLoad, InstanceReady
from quire.cluster.members import Health, Member
from quire.cluster.messages import Attempt, Failed, HandedOver
from quire.cluster.protocol import RequestPhase
from quire.cluster.router import RoutedRequest, Router
from tests.cluster.test_agent import ATTEMPT, JOB, token
from tests.clusters import LIMITS


def router_of(tries: int = 3) -> tuple[Router, list[tuple[str, Any]], list[float]]:
    sent, now = list[tuple[str, Any]](), [0.0]
    router = Router(lambda to, message: sent.append((to, message)), timeout=10, tries=tries, clock=lambda: now[0])
    for name, role in (("p.1", "prefill"), ("d.2", "decode")):
        ready = InstanceReady(name, "", 64, 8, LIMITS, 1e-3, 1e-3)
        router.members[name] = Member(name, name[0], role, Health.SERVING, ready)
    return router, sent, now


def begun(router: Router) -> tuple[RoutedRequest, list[Any]]:
    answers: list[Any] = []
    return router.begin(JOB, answers.append), answers


def test_tokens_of_an_attempt_that_has_failed_are_not_those_of_the_next_one() -> None:
    async def scenario() -> None:
        router, _, _ = router_of()
        request, answers = begun(router)
        router.handle(token(5))
        router.handle(Failed(Attempt(1, 1), "no room"))
        router.handle(token(66, position=1))  # late, or of an instance that is mistaken
        await asyncio.sleep(0)
        assert request.state.number == 2
        router.handle(token(6, Attempt(1, 2), 1))
        assert [each.output.token_ids for each in answers] == [[5], [6]]
        assert not request.state.early

    asyncio.run(scenario())


def test_a_token_that_came_already_is_not_kept() -> None:
    router, _, _ = router_of()
    request, answers = begun(router)
    for _ in range(2):
        router.handle(token(5))
    router.handle(HandedOver(ATTEMPT))
    assert len(answers) == 1 and not request.state.early


def test_an_instance_has_a_part_in_an_attempt_until_its_cache_is_taken() -> None:
    """So that a drained source does not end before its receivers have what it holds."""
    router, _, _ = router_of()
    begun(router)
    assert router.num_attempts("p.1") == router.num_attempts("d.2") == 1
    router.handle(token(5))
    assert router.num_attempts("p.1") == 1
    router.handle(HandedOver(ATTEMPT))
    assert router.num_attempts("p.1") == 0 and router.num_attempts("d.2") == 1


def test_an_attempt_that_waits_for_its_turn_is_not_given_up() -> None:
    router, _, now = router_of(tries=1)
    requests = [begun(router)[0] for _ in range(2)]
    waits = requests[0].state.attempt
    for second in range(100):
        now[0] = float(second)
        router.handle_load(InstanceLoad("p.1", 0, 0, 0, 0, 1, 1, (waits, Attempt(1, 7), Attempt(99, 1))))
        router.tick()
    assert requests[0].state.phase is RequestPhase.RUNNING and requests[1].state.phase is RequestPhase.FAILED


def test_a_token_behind_one_that_is_lost_renews_nothing() -> None:
    router, _, now = router_of(tries=1)
    request, answers = begun(router)
    for second in range(30):
        now[0] = float(second)
        router.handle(token(5, position=second + 1))
        router.tick()
    assert request.state.phase is RequestPhase.FAILED and len(answers) == 1


@pytest.mark.parametrize("health", [Health.DRAINING, Health.STARTING])
def test_requests_wait_for_the_only_instance_that_is_restarted(health: Health) -> None:
    router, _, now = router_of()
    for name in list(router.members):
        router.members[name].health = health
    request, _ = begun(router)
    for second in range(100):
        now[0] = float(second)
        router.tick()
    assert request.state.phase is RequestPhase.QUEUED
    router.members.clear()
    now[0] = 200.0
    router.tick()
    assert request.state.phase is RequestPhase.FAILED, "nobody comes"


def test_counters_of_instances_that_are_gone_stay() -> None:
    router, _, _ = router_of()
    router.members["p.1"].stats = {"decode_tokens": 7, "running": 3}
    router.down("p.1")
    assert router.past_counters["decode_tokens"] == 7 and "running" not in router.past_counters


def test_members_forget_attempts_that_have_ended() -> None:
    async def scenario() -> None:
        router, _, _ = router_of(tries=4)
        requests = [begun(router)[0] for _ in range(6)]
        router.handle(Failed(requests[0].state.attempt, "no room"))
        router.handle(token(5, requests[1].state.attempt, is_last=True))
        await asyncio.sleep(0)
        for request in requests:
            router.abort(request)
        for member in router.members.values():
            assert not member.rows and not member.sequences
        assert not router._requests

    asyncio.run(scenario())


def test_a_prompt_counts_among_the_rows_of_its_instance_until_its_first_token() -> None:
    router, _, _ = router_of()
    request, _ = begun(router)
    member = router.members["p.1"]
    assert member.num_rows == len(JOB.prompt_ids)
    router.handle(token(5, request.state.attempt))
    assert not request.is_over and not member.rows and member.num_rows == 0


def test_only_who_computes_a_prompt_pins_it() -> None:
    router, sent, _ = router_of()
    router.begin(replace(JOB, hints={"cache_pin": {"tier": "arena"}, "cache_priority": 3}), lambda answer: None)
    hints = {to: message.job.cache_hints() for to, message in sent}
    assert [*hints] == ["p.1", "d.2"] and hints["p.1"].cache_pin and not hints["d.2"].cache_pin
    assert {each.cache_priority for each in hints.values()} == {3}


def test_instances_with_which_an_attempt_failed_come_last() -> None:
    """A connection between two instances may be broken while both say that they are alive."""

    async def scenario() -> None:
        router, _, _ = router_of(tries=3)
        for name, role in (("p.3", "prefill"), ("d.4", "decode")):
            ready = InstanceReady(name, "", 64, 8, LIMITS, 1e-3, 1e-3)
            router.members[name] = Member(name, name[0], role, Health.SERVING, ready)
        request, _ = begun(router)
        tried = [(request.state.source, request.state.receiver)]
        for number in (1, 2):
            router.handle(Failed(Attempt(1, number), "the source does not answer"))
            await asyncio.sleep(0)
            tried.append((request.state.source, request.state.receiver))
        assert {*tried[:2]} == {("p.1", "d.2"), ("p.3", "d.4")}
        assert tried[2][0] == "" and tried[2][1] not in tried[1], "the last attempt needs one instance"

    asyncio.run(scenario())


def test_a_source_whose_receiver_has_ended_computes_again() -> None:
    """It has the prompt in its cache."""

    async def scenario() -> None:
        router, _, _ = router_of()
        for name, role in (("p.3", "prefill"), ("d.4", "decode")):
            ready = InstanceReady(name, "", 64, 8, LIMITS, 1e-3, 1e-3)
            router.members[name] = Member(name, name[0], role, Health.SERVING, ready)
        request, _ = begun(router)
        source, receiver = request.state.source, request.state.receiver
        router.down(receiver)
        await asyncio.sleep(0)
        assert request.state.number == 2 and request.state.source == source and request.state.receiver != receiver

    asyncio.run(scenario())
