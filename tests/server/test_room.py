"""A resource that requests share is lent in order and returned."""

import asyncio

import pytest

from quire.server.room import Room

pytestmark = pytest.mark.anyio


async def test_room_is_lent_in_order_and_given_back_by_those_who_stop_waiting():
    room = Room(10)
    await room.take(8)
    order = []

    async def take(name, size):
        await room.take(size)
        order.append(name)

    large, small = asyncio.ensure_future(take("large", 5)), asyncio.ensure_future(take("small", 2))
    await asyncio.sleep(0)
    assert not order, "the smaller one overtook"
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    await asyncio.wait_for(small, 1)
    room.give(8)
    # Cancelled in the very turn in which it is lent.
    late = asyncio.ensure_future(take("late", 9))
    await asyncio.sleep(0)
    room.give(2)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert order == ["small"] and room.free == 10
    # Cancelled just before it would be lent.
    await room.take(8)
    late = asyncio.ensure_future(take("late", 9))
    await asyncio.sleep(0)
    late.cancel()
    room.give(8)
    assert [type(each) for each in await asyncio.gather(late, return_exceptions=True)] == [asyncio.CancelledError]
    assert order == ["small"] and room.free == 10


async def test_who_wants_more_than_there_is_has_all_of_it():
    room = Room(10)
    async with room.hold(25):
        assert room.free == 0
        waiting = asyncio.ensure_future(room.take(1))
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 1)
    assert room.free == 9
