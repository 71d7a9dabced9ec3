"""Leases that wait: clients ask, and one pop for each queue waits for all of them.

A waiting client costs a future and a timer. It holds no connection to the broker and no thread.
What the pop brings is handed out in the order of asking.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from contextvars import Context
from itertools import islice

from ..aio.center import AsyncTimeoutCenter
from ..model.results import Delivery
from .problems import Problem, retry_after

logger = logging.getLogger(__name__)

#: Seconds for which one pop waits, at most. Then it is asked again, if anybody still waits.
SPELL = 20.0

#: Messages that one pop brings, at most.
TOGETHER = 1000

#: Queues that are waited for at a time: each takes a connection to the broker. Those who ask have
#: equal shares, of no less than so many.
MAX_QUEUES = 200
LEAST_SHARE = 10


#: Seconds for which one pop waits, at least.
_SHORTEST = 0.01


class Ask:
    """What one client asks for.

    until: when it gives up, by the loop's clock
    """

    __slots__ = ("answer", "limit", "until", "visibility")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limit: int,
        visibility: float | None,
        until: float,
    ) -> None:
        self.limit = limit
        self.until = until
        self.visibility = visibility
        self.answer: asyncio.Future[list[Delivery]] = loop.create_future()

    def give(self, messages: list[Delivery]) -> bool:
        """Answer it; whether it still waits."""
        if self.answer.done():
            return False
        self.answer.set_result(messages)
        return True


class Line:
    """Those who wait for one queue, and the pop that waits for them.

    opened_by: who began it, and whose share it is of
    """

    def __init__(self, center: AsyncTimeoutCenter, queue: str, opened_by: str) -> None:
        self.opened_by = opened_by
        self._center = center
        self._queue = queue
        self._asks: deque[Ask] = deque()
        self.task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return sum(not ask.answer.done() for ask in self._asks)

    def add(self, ask: Ask) -> None:
        self._asks.append(ask)

    def _waiting(self) -> deque[Ask]:
        """Those who still wait."""
        asks = self._asks
        while asks and asks[0].answer.done():
            asks.popleft()
        return asks

    async def run(self) -> None:
        """Pop for those who wait, until nobody does."""
        while asks := self._waiting():
            limit, until = 0, 0.0
            for ask in asks:
                if not ask.answer.done():
                    limit += ask.limit
                    until = max(until, ask.until)
                    if limit >= TOGETHER:
                        break
            visibility = asks[0].visibility
            # No longer than somebody waits: the queue counts among those that are waited for.
            wait = until - asyncio.get_running_loop().time()
            popped = await self._center.pop(
                [self._queue],
                min(limit, TOGETHER),
                wait=min(max(wait, _SHORTEST), SPELL),
                visibility=visibility,
            )
            if popped.messages:
                await self._hand_out(popped.messages, visibility)

    async def _hand_out(self, messages: list[Delivery], visibility: float | None) -> None:
        left = deque(messages)
        extended: set[int] = set()
        try:
            while left and (asks := self._waiting()):
                # It stays at the head of the line, where an error finds it as all others.
                ask = asks[0]
                some = [left[place] for place in range(min(ask.limit, len(left)))]
                given = some
                if ask.visibility != visibility or not extended.isdisjoint(map(id, some)):
                    extended.update(map(id, some))
                    lost = {id(one) for one in await self._center.extend(some, ask.visibility)}
                    given = [one for one in some if id(one) not in lost]
                if not given or ask.give(given):
                    for _ in some:
                        left.popleft()
                # Otherwise it has gone meanwhile, and they are for the next one.
        finally:
            if left:
                await give_back(self._center, left)

    def end(self, error: BaseException | None = None) -> None:
        """Answer all who wait: with an error, or that nothing has come."""
        for ask in self._asks:
            if ask.answer.done():
                continue
            if error is None:
                ask.answer.set_result([])
            else:
                ask.answer.set_exception(error)
        self._asks.clear()


async def give_back(center: AsyncTimeoutCenter, messages: Iterable[Delivery]) -> None:
    """Release messages that nobody has got."""
    some = list(messages)
    try:
        if some:
            await center.release(some)
    except Exception as exc:
        logger.warning("%d messages come back when their leases end: %s", len(some), exc)


class LongPolls:
    """Hands out messages to those who lease them.

    askers: how many may ask: each has a share of the queues that may be waited for
    """

    def __init__(self, center: AsyncTimeoutCenter, askers: int = 1) -> None:
        self._center = center
        self._share = max(MAX_QUEUES // max(askers, 1), LEAST_SHARE)
        self._lines: dict[str, Line] = {}
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many clients wait."""
        return sum(map(len, self._lines.values()))

    @property
    def lines(self) -> int:
        """How many queues are waited for."""
        return len(self._lines)

    async def lease(
        self, queue: str, limit: int, wait: float, visibility: float | None, who: str = ""
    ) -> list[Delivery]:
        """Messages that are due; if there are none, wait for some.

        who: whoever asks

        Raises Problem if too many queues are waited for, and what a pop raises. If it is
        cancelled, what was meant for the caller is for the next one.
        """
        if wait <= 0 or queue not in self._lines:
            popped = await self._center.pop(queue, limit, visibility=visibility)
            if popped.messages or wait <= 0:
                return popped.messages
        if self._closed:  # also if it was meanwhile
            return []
        loop = asyncio.get_running_loop()
        ask = Ask(loop, limit, visibility, loop.time() + wait)
        self._stand_in_line(queue, ask, who)
        timer = loop.call_later(wait, ask.give, [])
        try:
            return await ask.answer
        except asyncio.CancelledError:
            answer = ask.answer
            if not answer.cancelled() and answer.done() and answer.exception() is None:
                await self.give_back(answer.result())
            raise
        finally:
            timer.cancel()

    async def give_back(self, messages: Iterable[Delivery]) -> None:
        """Release what nobody has got. If that fails, it comes back when the leases end."""
        await give_back(self._center, messages)

    def _stand_in_line(self, queue: str, ask: Ask, who: str) -> None:
        line = self._lines.get(queue)
        if line is None:
            opened = sum(line.opened_by == who for line in self._lines.values())
            if opened >= self._share:
                raise Problem(
                    "rate-limited",
                    f"clients with this token wait for {self._share} queues already; lease "
                    "without wait, or later",
                    headers=retry_after(SPELL),
                )
            line = self._lines[queue] = Line(self._center, queue, who)
        line.add(ask)
        if line.task is None:
            # It is for all who wait: of the request that came first, it knows nothing.
            make = asyncio.get_running_loop().create_task
            line.task = Context().run(make, self._serve(queue, line))

    async def _serve(self, queue: str, line: Line) -> None:
        try:
            await line.run()
        except Exception as exc:
            line.end(exc)
        except BaseException:
            line.end()
            raise
        finally:
            # Nothing is awaited between the last look at the line and this.
            del self._lines[queue]

    async def aclose(self) -> None:
        """Answer all who wait, and wait for nothing any more."""
        self._closed = True
        tasks = [line.task for line in islice(self._lines.values(), None) if line.task]
        for line in self._lines.values():
            line.end()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
