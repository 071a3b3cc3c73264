"""How a router chooses instances, and what it remembers of their caches."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster import members as members_module
from quire.cluster.bodies import InstanceLoad, InstanceReady, RemotePrefix
from quire.cluster.members import (
    Health,
    Member,
    PrefixIndex,
    RoutingDecision,
    ServingInstances,
    choose_instances,
    index_keys,
)
from quire.cluster.messages import Attempt
from tests.clusters import LIMITS
from tests.effort import examples

SECONDS_PER_ROW = 1e-3


def member(place: str, role: str, *, rows: int = 0, sequences: int = 0, free: float = 1.0, batch: int = 8) -> Member:
    """An instance with prompts of so many rows to compute, and so many sequences to decode."""
    found = Member(f"{place}.1", place, role, Health.SERVING)
    found.set_ready(InstanceReady(found.name, "", 512, batch, LIMITS, SECONDS_PER_ROW, 0.01))
    found.set_load(InstanceLoad(found.name, 0, 0, 0, 0, int(free * 1000), 1000), 0.0)
    if rows:
        found.begin_prefill(Attempt(1000, 1), rows)
    found.sequences = {Attempt(number, 1) for number in range(sequences)}
    return found


def choose(members: list[Member], *about: Any, **more: Any) -> RoutingDecision | None:
    return members_module.choose_instances(ServingInstances.of(members), *about, **more)


def chosen(choice: RoutingDecision | None) -> tuple[str | None, str]:
    assert choice is not None
    return None if choice.source is None else choice.source.place, choice.receiver.place


PROMPT = list(range(640))


def keys_of(salt: str, token_ids: list[int]) -> list[bytes]:
    return index_keys(salt, token_ids).first(len(token_ids))


KEYS = keys_of("", PROMPT)


def test_a_prompt_goes_where_its_first_token_comes_earliest() -> None:
    """Queue work, what is not cached, and what can be fetched count together: neither the shortest queue nor the best
    hit wins always.
    """
    cold, warm = member("prefill-0", "prefill"), member("prefill-1", "prefill", rows=400)
    decode, index = member("decode-0", "decode"), PrefixIndex()
    index.add(warm.name, KEYS[:5])
    members = [cold, warm, decode]
    found = choose(members, index, KEYS, 640)
    assert chosen(found) == ("prefill-0", "decode-0"), "400 + 320 rows against fetching and 320"
    assert found is not None and found.num_rows == 320 and found.remote_prefix == RemotePrefix(warm.name, 5)
    warm.begin_prefill(Attempt(1000, 1), 5)
    found = choose(members, index, KEYS, 640)
    assert chosen(found) == ("prefill-1", "decode-0"), "5 rows are less than fetching 320 tokens"
    assert found is not None and found.num_rows == 320 and found.remote_prefix is None
    assert chosen(choose(members, index, KEYS, 640, "queue")) == ("prefill-0", "decode-0")
    warm.begin_prefill(Attempt(1000, 1), 40_000)
    assert chosen(choose(members, index, KEYS, 640, "affinity")) == ("prefill-1", "decode-0"), "a hot spot"


def test_who_computes_may_fetch_what_a_receiver_has() -> None:
    """The next turn of a conversation: its beginning was decoded elsewhere."""
    prefill, decode, index = member("prefill-0", "prefill"), member("decode-0", "decode"), PrefixIndex()
    index.add(prefill.name, KEYS[:3])
    index.add(decode.name, KEYS[:9])
    found = choose([prefill, decode], index, KEYS, 640)
    assert found is not None and found.remote_prefix == RemotePrefix(decode.name, 9) and found.num_rows == 64
    assert prefill.ready is not None
    prefill.set_ready(replace(prefill.ready, seconds_per_row=1e-6))
    found = choose([prefill, decode], index, KEYS, 640)
    assert found is not None and found.remote_prefix is None and found.num_rows == 640 - 192, "it computes faster"


@pytest.mark.parametrize(("speed", "fetches"), [(None, True), (1e6, True), (1e4, False)])
def test_what_transfers_have_taken_decides_whether_to_fetch(speed: float | None, fetches: bool) -> None:
    """A row takes 1 ms, a token of 984 bytes a little less at 1 MB/s, and 98 ms at 10 kB/s."""
    prefill, decode, index = member("prefill-0", "prefill"), member("decode-0", "decode"), PrefixIndex()
    index.add(decode.name, KEYS[:9])
    prefill.stats = {"costs": {"chunk_bytes": 63_000, "fetched_bytes_per_second": speed}}
    found = choose([prefill, decode], index, KEYS, 640)
    assert found is not None and (found.remote_prefix is not None) == fetches


def test_a_prefix_is_fetched_within_a_group_from_who_has_not_failed() -> None:
    prefill, decode, index = member("prefill-0", "prefill"), member("decode-0", "decode"), PrefixIndex()
    index.add(decode.name, KEYS[:9])

    def remote_prefix(**more: Any) -> RemotePrefix | None:
        found = choose([prefill, decode], index, KEYS, 640, **more)
        assert found is not None
        return found.remote_prefix

    assert remote_prefix() is not None
    assert remote_prefix(avoided=(decode.name,)) is remote_prefix(fetches=False) is remote_prefix(alone=True) is None
    decode.group = "another machine"
    assert remote_prefix() is None


def test_a_receiver_with_room_and_little_to_do_decodes() -> None:
    prefill = member("prefill-0", "prefill")
    busy, full = member("decode-0", "decode", sequences=6), member("decode-1", "decode", free=0.1)
    idle = member("decode-2", "decode", sequences=2)
    assert chosen(choose([prefill, busy, full, idle], PrefixIndex(), KEYS, 640)) == ("prefill-0", "decode-2")
    assert chosen(choose([prefill, busy, full], PrefixIndex(), KEYS, 640)) == ("prefill-0", "decode-0")


def test_a_receiver_that_has_the_prefix_is_preferred_among_equals() -> None:
    prefill, first, second = member("prefill-0", "prefill"), member("decode-0", "decode"), member("decode-1", "decode")
    index = PrefixIndex()
    index.add(second.name, KEYS)
    assert chosen(choose([prefill, first, second], index, KEYS, 640)) == ("prefill-0", "decode-1")


def test_mixed_instances_do_both_parts_and_stand_in_for_others() -> None:
    mixed, other = member("mixed-0", "mixed", rows=100), member("mixed-1", "mixed")
    assert chosen(choose([mixed, other], PrefixIndex(), KEYS, 640)) == (None, "mixed-1")
    prefill, decode = member("prefill-0", "prefill"), member("decode-0", "decode")
    assert chosen(choose([mixed, decode], PrefixIndex(), KEYS, 640)) == ("mixed-0", "decode-0")
    assert chosen(choose([prefill, mixed], PrefixIndex(), KEYS, 640)) == ("prefill-0", "mixed-0")
    assert chosen(choose([prefill], PrefixIndex(), KEYS, 640)) == (None, "prefill-0"), "nobody else is left"
    assert chosen(choose([decode], PrefixIndex(), KEYS, 640)) == (None, "decode-0")


@pytest.mark.parametrize("health", [Health.STARTING, Health.DRAINING, Health.DOWN])
def test_only_serving_instances_get_attempts(health: Health) -> None:
    prefill, decode = member("prefill-0", "prefill"), member("decode-0", "decode")
    prefill.health = health
    assert chosen(choose([prefill, decode], PrefixIndex(), KEYS, 640)) == (None, "decode-0")
    decode.health = health
    assert choose([prefill, decode], PrefixIndex(), KEYS, 640) is None


def test_the_index_is_bounded_and_forgets_who_failed() -> None:
    index = PrefixIndex(most=15)
    index.add("a", KEYS)
    index.add("b", KEYS[:4])
    assert index.matched(KEYS) == {"a": 10, "b": 4} and len(index) == 10, "a key counts once for all instances"
    other = keys_of("", [7 + each for each in PROMPT])
    index.add("a", other)
    assert len(index) == 15 and index.matched(other) == {"a": 10}
    assert index.matched(KEYS) == {"a": 5, "b": 4}, "the end of a prompt is forgotten first"
    index.forget("a")
    assert index.matched(other) == {} and index.matched(KEYS) == {"b": 4}
    index.add("c", other[:2])
    assert index.matched(other) == {"c": 2}, "it takes the place of who failed, and has nothing of theirs"


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 3), st.integers(0, 10)), max_size=30))
@examples(60)
def test_the_index_of_all_is_an_index_of_each(given: list[tuple[str, int, int]]) -> None:
    index, prompts = PrefixIndex(), [keys_of("", [number + each for each in PROMPT]) for number in range(4)]
    longest: dict[tuple[str, int], int] = {}
    for name, number, count in given:
        index.add(name, prompts[number][:count])
        longest[name, number] = max(count, longest.get((name, number), 0))
    for number, keys in enumerate(prompts):
        expected = {name: count for (name, of), count in longest.items() if of == number and count}
        assert index.matched(keys) == expected and index.matched(keys[:3]) == {
            name: min(3, count) for name, count in expected.items()
        }


@given(st.data())
@examples(60)
def test_many_members_are_compared_as_few_are(data: st.DataObject) -> None:
    members = []
    for number in range(6):
        rows, sequences = data.draw(st.sampled_from([0, 0, 5, 700])), data.draw(st.integers(0, 3))
        members.append(member(f"mixed-{number}", "mixed", rows=rows, sequences=sequences))
    index = PrefixIndex()
    for each in members:
        index.add(each.name, KEYS[: data.draw(st.sampled_from([0, 0, 3, 10]))])
    matched = index.matched(KEYS)

    def first_token(each: Member) -> tuple[float, float]:
        rows = max(1, 650 - 64 * matched.get(each.name, 0))
        return round((sum(each.rows.values()) + rows) * each.seconds_per_row, 9), each.fullness()

    found = choose(members, index, KEYS, 650, fetches=False)
    assert found is not None and first_token(found.receiver) == min(map(first_token, members))


def test_salts_and_beginnings_separate_prompts() -> None:
    assert keys_of("", PROMPT)[0] != keys_of("x", PROMPT)[0]
    assert keys_of("", PROMPT[:200]) == KEYS[:3]
    rng = random.Random(0)
    assert keys_of("", [rng.randrange(9) for _ in PROMPT])[0] != KEYS[0]


def test_a_receiver_of_the_same_group_is_preferred() -> None:
    members = [
        Member(f"{role}-{index}", f"{role}-{index}", role, Health.SERVING, group=str(index))
        for role in ("decode", "prefill")
        for index in (0, 1)
    ]
    for busy, chosen in ((2, "1"), (3, "0")):
        for member in members:
            member.forget(Attempt(1, 1))
        members[busy].begin_prefill(Attempt(1, 1), 500)
        choice = choose_instances(ServingInstances.of(members), PrefixIndex(), [], 100)
        assert choice is not None and choice.source is not None
        assert (choice.source.group, choice.receiver.group) == (chosen, chosen)
    members[1].health = Health.DOWN
    members[2].begin_prefill(Attempt(1, 1), 500)
    choice = choose_instances(ServingInstances.of(members), PrefixIndex(), [], 100)
    assert choice is not None and choice.receiver.name == "decode-0", "another machine is better than none"
