"""Bodies: counted before they are kept, in one budget; slow ones make room for fast ones."""

import asyncio
import json

import pytest
from tests.helpers.live_models import TOKEN, apart

from manyheads.view.live.request_bodies import FREE, Bodies, RefusedError
from manyheads.view.live.security import Guard

PIECE = 10 * FREE


class Sender:
    """A body that arrives piece by piece, when it is told to."""

    def __init__(self, bodies):
        self.bodies, self.pieces, self.got, self.refused = bodies, asyncio.Queue(), None, None
        self.answered, self.task = asyncio.Event(), asyncio.ensure_future(self.run())

    async def run(self):
        try:
            async with self.bodies.reading(self.pieces.get) as receive:
                self.got = await receive()
                await self.answered.wait()
        except RefusedError as error:
            self.refused = error

    async def send(self, size, more=True):
        self.pieces.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})
        for _ in range(9):  # the loop has gone round when everything that can go on has done so
            await asyncio.sleep(0)

    async def answer(self):
        self.answered.set()
        await self.task


def run(test):
    """Run a test with senders, and end those that have not ended."""

    async def main():
        senders = []

        def sender(bodies):
            senders.append(Sender(bodies))
            return senders[-1]

        try:
            await test(sender)
        finally:
            for one in senders:
                one.task.cancel()
            await asyncio.gather(*(one.task for one in senders), return_exceptions=True)

    apart(main())


def test_a_body_comes_in_one_piece_and_counts_until_it_is_answered():
    async def test(sender):
        bodies = Bodies(budget=100 * FREE)
        one = sender(bodies)
        await one.send(PIECE)
        assert bodies.counted == PIECE - FREE
        await one.send(7, more=False)
        assert len(one.got["body"]) == PIECE + 7
        assert not one.got["more_body"]
        assert bodies.counted == PIECE + 7 - FREE
        await one.answer()
        assert bodies.counted == 0

    run(test)


def test_the_budget_holds_and_the_slowest_body_makes_room():
    async def test(sender):
        bodies = Bodies(budget=25 * FREE)
        slow = sender(bodies)
        await slow.send(4 * FREE)
        await asyncio.sleep(0.05)
        fast = sender(bodies)
        await fast.send(PIECE)
        await fast.send(PIECE)
        assert slow.refused is None
        await fast.send(PIECE // 2)
        assert slow.refused.status == 503
        assert bodies.counted <= bodies.budget
        await fast.send(1, more=False)
        assert len(fast.got["body"]) == 2 * PIECE + PIECE // 2 + 1

    run(test)


def test_many_unfinished_bodies_stay_within_the_budget():
    async def test(sender):
        bodies = Bodies(budget=25 * FREE)
        many = [sender(bodies) for _ in range(20)]
        for one in many:
            await one.send(PIECE)
            assert bodies.counted <= bodies.budget
        assert sum(one.refused is not None for one in many) == 18

    run(test)


def test_bodies_that_wait_for_an_answer_keep_their_place_and_texts_find_room():
    async def test(sender):
        bodies = Bodies(budget=2 * PIECE)
        whole = [sender(bodies) for _ in range(2)]
        for one in whole:
            await one.send(PIECE, more=False)
        late = sender(bodies)
        await late.send(PIECE)
        assert late.refused.status == 503
        assert all(one.got for one in whole)
        text = sender(bodies)
        await text.send(FREE, more=False)
        assert len(text.got["body"]) == FREE

    run(test)


def test_a_body_that_does_not_arrive_in_time_is_refused():
    async def test(sender):
        one = sender(Bodies(seconds=0.05))
        await one.send(3)
        await asyncio.wait([one.task], timeout=20)
        assert one.refused.status == 408

    run(test)


def test_who_leaves_in_the_middle_leaves_nothing():
    async def test(sender):
        bodies = Bodies()
        one = sender(bodies)
        await one.send(PIECE)
        one.pieces.put_nowait({"type": "http.disconnect"})
        await asyncio.wait([one.task], timeout=20)
        assert one.got is None
        assert bodies.counted == 0

    run(test)


@pytest.mark.parametrize(("size", "status"), [(2 * FREE, 413), (3, 408)])
def test_the_guard_refuses_in_a_sentence_and_ends_the_connection(size, status):
    sent = []

    async def main():
        pieces = asyncio.Queue()
        pieces.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": True})
        headers = [(b"host", b"localhost"), (b"x-manyheads-token", TOKEN.encode())]
        guard = Guard(None, host="127.0.0.1", token=TOKEN, bodies=Bodies(largest=FREE, seconds=0.05))
        scope = {"type": "http", "path": "/api/attend", "headers": headers}

        async def send(message):
            sent.append(message)

        await guard(scope, pieces.get, send)

    apart(main())
    assert sent[0]["status"] == status
    assert (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"].startswith("the request")
