"""Pulls under way: what is asked for again, and what is given up."""

from __future__ import annotations

import pytest

from quire.cluster.bodies import PullExtents, PullRequest
from quire.cluster.messages import Attempt, Failed
from tests.cluster.test_agent import ATTEMPT, Pulls, Wire, agent_of, pull_of, pulling, run


def test_damaged_extents_are_asked_for_again_at_once() -> None:
    wire, pulls = Wire(), Pulls()
    agent = agent_of(wire, pulls)
    pulling(agent, pull_of(3))
    pulls.is_whole = False
    agent.receive("source", PullExtents(ATTEMPT, 3), iter(()))
    run(agent)
    want = ("source", PullRequest(ATTEMPT, 3, [[0]]))
    assert [each for each in wire.sent if isinstance(each[1], PullRequest)] == [want] * 2


def test_a_source_that_sends_nothing_but_damage_is_given_up() -> None:
    wire, pulls = Wire(), Pulls()
    agent = agent_of(wire, pulls)
    pulling(agent, pull_of(3))
    pulls.is_whole = False
    for _ in range(5):
        agent.receive("source", PullExtents(ATTEMPT, 3), iter(()))
    run(agent)
    assert ("router", Failed(ATTEMPT, "the source does not answer")) in wire.sent


def test_a_pull_whose_source_still_sends_is_not_asked_for_again() -> None:
    """It would be sent twice, which makes those behind it later still."""
    now, wire, pulls = [0.0], Wire(), Pulls()
    agent = agent_of(wire, pulls, lambda: now[0])

    def wants() -> int:
        return sum(isinstance(message, PullRequest) for _, message in wire.sent)

    pulling(agent, pull_of(100))
    run(agent)
    for second in range(1, 40):
        now[0] = float(second)
        if second % 4 == 0 and second < 20:
            agent.receive("source", PullExtents(Attempt(9, 1), second), iter(()))  # of others that asked before
        run(agent)
        assert second >= 25 or wants() == 1
    assert wants() == 3 and ("router", Failed(ATTEMPT, "the source does not answer")) in wire.sent


@pytest.mark.parametrize("how", ["damaged", "lost", "late"])
def test_a_pull_beside_the_protocol_ends(how: str) -> None:
    """Its transfer holds room, and nobody else counts its tries."""
    now, pulls = [0.0], Pulls()
    agent = agent_of(Wire(), pulls, lambda: now[0])
    agent.notice([pull_of(4), pull_of(5, "another")])
    if how == "damaged":
        pulls.is_whole = False
        agent.receive("source", PullExtents(ATTEMPT, 4), iter(()))
    elif how == "lost":
        agent.connection_lost("source")
    run(agent)
    if how == "late":
        for second in (5, 12, 30):
            pulls.came = (2, second)  # one before them still comes
            now[0] = float(second)
            run(agent)
            assert pulls.failed == ([] if second < 10 else [5]), "the other source sends nothing"
        now[0] = 60.0
        run(agent)
    assert pulls.failed == ([5, 4] if how == "late" else [4])
