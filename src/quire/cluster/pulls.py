"""The pulls of an instance that are under way: those of its attempts, and those that its engine requests itself."""

from __future__ import annotations

from functools import partial

from quire.cluster.attempt_states import Timers
from quire.cluster.bodies import PullRequest
from quire.cluster.connections import PeerConnections
from quire.cluster.messages import Attempt
from quire.cluster.peer_store import PeerStore, Pull

PULL_SECONDS = 10.0
"""Maximum seconds without progress of a pull outside the protocol, or of an earlier pull from the same source."""


class PullsUnderWay:
    """Pulls that sources have not answered.

    by_attempt  pulls of the protocol, which counts how often a source is asked
    by_number   pulls outside the protocol: each ends with its attempt, or after a while without progress
    """

    def __init__(self, connections: PeerConnections, peer_store: PeerStore, timers: Timers) -> None:
        self.by_attempt: dict[Attempt, Pull] = {}
        self.by_number: dict[int, Pull] = {}
        self._connections, self._peer_store, self._timers = connections, peer_store, timers
        self._progress: dict[Attempt, tuple[int, int]] = {}  # progress when the deadline of a state was set

    def begin(self, attempt: Attempt, pull: Pull) -> None:
        """Registers the pull that an attempt waits for. The protocol decides when its source is asked."""
        self.by_attempt[attempt], self._progress[attempt] = pull, self._progress_of(pull)

    def begin_beside(self, pull: Pull) -> None:
        """Requests a pull outside the protocol."""
        self.by_number[pull.number] = pull
        self.ask(pull)
        self._timers.after(PULL_SECONDS, partial(self._overdue, pull, self._progress_of(pull)))

    def ask(self, pull: Pull) -> None:
        """Sends the request of a pull to its source."""
        self._connections.send(pull.source, PullRequest(pull.attempt, pull.number, pull.groups, pull.names))

    def note_extents(self, attempt: Attempt, number: int, is_whole: bool) -> bool:
        """Notes that the extents of a pull have arrived. Returns whether an attempt must ask for them again."""
        if is_whole:
            self.by_number.pop(number, None)
        elif number in self.by_number:
            self.give_up(number, "the source sent damaged extents")
        else:
            pull = self.by_attempt.get(attempt)
            return pull is not None and pull.number == number
        return False

    def note_not_found(self, number: int) -> None:
        """Fails a pull whose source lacks the requested chunks."""
        self.by_number.pop(number, None)
        self._peer_store.fail(number, "the source lacks the requested chunks")

    def note_connection_lost(self, peer: str) -> None:
        """Gives up pulls outside the protocol whose answers may be lost with the connection. Pulls of the protocol have
        a deadline, or their router ends them.
        """
        for pull in [each for each in self.by_number.values() if each.source == peer]:
            self.give_up(pull.number, "the connection to the source has ended")

    def is_moving(self, attempt: Attempt) -> bool:
        """Whether something has arrived since the last call. Then the pull of an attempt is late only because its
        source is still sending, and asking again would send everything twice.
        """
        before, now = self._progress[attempt], self._progress_of(self.by_attempt[attempt])
        self._progress[attempt] = now
        return now != before

    def end(self, attempt: Attempt) -> None:
        """Ends all pulls of an attempt. Called directly, not as a command: a step of the engine may be waiting for a
        layer that will not arrive.
        """
        self._progress.pop(attempt, None)
        if (own := self.by_attempt.pop(attempt, None)) is not None:
            self._peer_store.fail(own.number, "the attempt has ended")
        for pull in [each for each in self.by_number.values() if each.attempt == attempt]:
            self.give_up(pull.number, "the attempt has ended")

    def give_up(self, number: int, reason: str) -> None:
        """Fails a pull outside the protocol, if it is under way."""
        if self.by_number.pop(number, None) is not None:
            self._peer_store.fail(number, reason)

    def _progress_of(self, pull: Pull) -> tuple[int, int]:
        """The progress of a pull, and of earlier pulls from the same source. A source answers in order: once a later
        pull arrives, this one is lost.
        """
        number, num_bytes = self._peer_store.received(pull.source)
        return pull.num_bytes, num_bytes if number <= pull.number else 0

    def _overdue(self, pull: Pull, before: tuple[int, int]) -> None:
        """Gives up a pull outside the protocol, unless something has arrived meanwhile."""
        if pull.number in self.by_number and (now := self._progress_of(pull)) != before:
            self._timers.after(PULL_SECONDS, partial(self._overdue, pull, now))
        else:
            self.give_up(pull.number, "the source does not answer")
