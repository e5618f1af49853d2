import asyncio

import pytest

from draft_worker.outbox import Outbox
from outrider.errors import OverloadedError
from outrider.messages import Draft, DraftEvent, Proposal


def event(number: int) -> DraftEvent:
    return Proposal(session_id=str(number), epoch=1, base_len=number, draft=Draft())


async def test_everything_that_lies_there_goes_out_at_once() -> None:
    outbox = Outbox()
    outbox.put([event(1)])
    outbox.put([event(2), event(3)])
    assert await outbox.take() == [event(1), event(2), event(3)]


async def test_take_waits_for_an_event_of_another_thread() -> None:
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    await asyncio.to_thread(outbox.put_threadsafe, [event(1)])
    async with asyncio.timeout(20):
        assert await taking == [event(1)]


async def test_a_closed_outbox_gives_what_is_left_and_then_nothing() -> None:
    outbox = Outbox()
    outbox.put([event(1)])
    outbox.close()
    outbox.put([event(2)])
    assert await outbox.take() == [event(1)]
    assert await outbox.take() == []
    assert await outbox.take() == []
    assert outbox.error is None


async def test_closing_wakes_who_waits() -> None:
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.close()
    async with asyncio.timeout(20):
        assert await taking == []


async def test_a_peer_that_does_not_read_is_cut_off() -> None:
    outbox = Outbox(max_events=3)
    outbox.put([event(1), event(2), event(3)])
    assert outbox.error is None
    outbox.put([event(4)])
    with pytest.raises(OverloadedError):
        raise outbox.error or AssertionError("still open")
    outbox.close()
    assert isinstance(outbox.error, OverloadedError)


def test_events_for_a_loop_that_has_ended_are_dropped() -> None:
    async def make() -> Outbox:
        return Outbox()

    outbox = asyncio.run(make())
    outbox.put_threadsafe([event(1)])
