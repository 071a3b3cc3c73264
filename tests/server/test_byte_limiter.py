"""A resource that requests share is lent in order and returned."""

import asyncio

import pytest

from quire.server.byte_limiter import ByteLimiter

pytestmark = pytest.mark.anyio


async def test_room_is_lent_in_order_and_given_back_by_those_who_stop_waiting():
    room = ByteLimiter(10)
    await room.acquire(8)
    order = []

    async def acquire(name, size):
        await room.acquire(size)
        order.append(name)

    large, small = asyncio.ensure_future(acquire("large", 5)), asyncio.ensure_future(acquire("small", 2))
    await asyncio.sleep(0)
    assert not order, "the smaller one overtook"
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    await asyncio.wait_for(small, 1)
    room.release(8)
    # Cancelled in the very turn in which it is lent.
    late = asyncio.ensure_future(acquire("late", 9))
    await asyncio.sleep(0)
    room.release(2)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert order == ["small"] and room.free == 10
    # Cancelled just before it would be lent.
    await room.acquire(8)
    late = asyncio.ensure_future(acquire("late", 9))
    await asyncio.sleep(0)
    late.cancel()
    room.release(8)
    assert [type(each) for each in await asyncio.gather(late, return_exceptions=True)] == [asyncio.CancelledError]
    assert order == ["small"] and room.free == 10


async def test_who_wants_more_than_there_is_has_all_of_it():
    room = ByteLimiter(10)
    async with room.hold(25):
        assert room.free == 0
        waiting = asyncio.ensure_future(room.acquire(1))
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 1)
    assert room.free == 9
