"""Pull: lease messages, and acknowledge, extend, reject or release them by receipt."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Iterable
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..aio.center import AsyncTimeoutCenter
from ..errors import ReceiptError
from ..model.delivery import read_receipt
from ..model.results import DEAD, IN_FLIGHT, WAITING, Delivery, Found
from . import fields as schema
from .messages import CONTENT, LEASED, LEASED_TASK, DecompressionBudget, content_of, shown_delivery
from .request import Answer, Gone, Operations, Request, answer, current, end

#: Seconds for which a lease may wait, at most; messages of one lease, and receipts of one request.
MAX_WAIT = 30
MAX_LEASES = 1000

#: Seconds for which the answer to a lease is kept under an Idempotency-Key.
KEEP_LEASES = 300.0

_VISIBILITY = schema.Number(
    "Seconds that the leases last; what each message says, or its queue, unless given.",
    least=1,
    most=31_536_000,
)
_RECEIPTS = schema.Listed(
    schema.Text(most=10_000), "The receipts of the messages.", most=MAX_LEASES
)

LEASE = schema.Object(
    {
        "limit": schema.Number(
            "Messages at most.", least=1, most=MAX_LEASES, whole=True, default=1
        ),
        "wait": schema.Number("Seconds to wait until something is due.", most=MAX_WAIT, default=0),
        "visibility": _VISIBILITY,
    },
    name="Lease",
)
SETTLE = schema.Object({"receipts": _RECEIPTS}, needed=("receipts",), name="Receipts")
EXTEND = schema.Object(
    {"receipts": _RECEIPTS, "visibility": _VISIBILITY}, needed=("receipts",), name="Extension"
)
REJECT = schema.Object(
    {
        "receipts": _RECEIPTS,
        "error": schema.Text("What went wrong; kept with the message.", most=10_000, least=0),
        "dead": schema.Flag("Whether it goes to the dead messages although it has retries left."),
        "reason": schema.Text("Why, of a message that dies.", most=1000, least=0),
        "backoff": schema.Number(
            "Seconds until it is due again; as its queue says unless given.", most=31_536_000
        ),
    },
    needed=("receipts",),
    name="Rejection",
)

OPERATIONS = Operations("pull")


def _settled(name: str, about: str, **more: Any) -> dict[str, Any]:
    counted: dict[str, Any] = {name: schema.described(schema.WHOLE, about)}
    stale = schema.array(schema.TEXT, "The receipts that came too late.")
    return schema.record(f"{name} stale", stale=stale, **counted, **more)


async def lease_again(api: Any, made: Answer, queue: str) -> Answer:
    """The answer to a lease once more, with the bytes of the messages that are still in flight by
    it: another consumer may have one by now, or another message its id."""
    tasks = json.loads(made.body)["tasks"]
    found: list[Found] = await api.center.get([one["id"] for one in tasks], topic=queue)
    bodies = {(one.id, one.token): one.body for one in found if one.state == IN_FLIGHT}
    budget = DecompressionBudget(LEASED)
    whole = []
    for one in tasks:
        body = bodies.get((one["id"], Delivery.of_receipt(one["receipt"]).birth))
        if body is not None:
            whole.append({**one, **content_of(body, one["id"], budget)})
    return answer({"tasks": whole}, headers=made.headers)


@OPERATIONS.add(
    "POST /v1/queues/{queue}:lease",
    role="write",
    again=lease_again,
    request=LEASE,
    required=False,
    returns=(
        "The messages; none if nothing has come.",
        schema.record("tasks", tasks=schema.array(LEASED_TASK)),
    ),
)
async def lease(api: Any, request: Request, queue: str) -> Answer:
    """Lease messages that are due.

    With wait, the answer comes as soon as something is due, and is empty after that time. Clients
    that wait are served in the order of asking. A message comes back when its lease ends without an
    acknowledgement.
    """
    long_polls, visibility = api.long_polls, request.asked.get("visibility")
    leasing = long_polls.lease(queue, **request.asked, who=request.token.name)
    if request.asked["wait"]:
        leasing = _unless_gone(request, long_polls, leasing)
    messages = await leasing
    if not api.tokens.has(request.token):
        await long_polls.give_back(messages)
        raise schema.Problem("unauthorized", "this token was removed", "authorization")
    if not messages:
        return answer({"tasks": []}, keep=1.0)
    try:
        budget = DecompressionBudget(LEASED)
        document = {"tasks": [shown_delivery(one, budget) for one in messages]}
        keep, kept = KEEP_LEASES, None
        if b"idempotency-key" in request.headers:
            keep = min(keep, await _shortest(api, queue, messages, visibility))
            bare = [
                {name: said for name, said in one.items() if name not in CONTENT}
                for one in document["tasks"]
            ]
            kept = answer({"tasks": bare}).body
        return answer(document, keep=keep, kept=kept, undo=partial(long_polls.give_back, messages))
    except BaseException:
        await long_polls.give_back(messages)
        raise


async def _shortest(
    api: Any, queue: str, messages: Iterable[Delivery], asked: float | None
) -> float:
    """Seconds that the first of these leases to end lasts."""
    if asked is not None:
        return asked
    own = [one.visibility for one in messages]
    found = [seconds for seconds in own if seconds is not None]
    if len(found) < len(own):
        topic = await api.center.registry.declared(queue)
        limits = api.center.limits
        found.append((limits if topic is None else topic.declaration.limits(limits)).visibility)
    return min(found)


async def _unless_gone(
    request: Request, long_polls: LongPolls, leasing: Awaitable[list[Delivery]]
) -> list[Delivery]:
    """Lease for a client that may go away while it waits. Raises Gone."""
    leaving = [asyncio.ensure_future(request.wait_until_gone())]
    connection = current()
    if connection is not None:
        connection.hold()
        leaving.append(asyncio.ensure_future(connection.lost.wait()))
    waiting = asyncio.ensure_future(leasing)
    try:
        await asyncio.wait({waiting, *leaving}, return_when=asyncio.FIRST_COMPLETED)
        if any(one.done() for one in leaving):
            if waiting.done() and waiting.exception() is None:
                await long_polls.give_back(waiting.result())
            raise Gone
        return waiting.result()
    finally:
        for task in (waiting, *leaving):
            task.cancel()


def receipts_of(fields: dict[str, Any], queue: str) -> list[str]:
    """The receipts of a request, each once. Raises Problem for one that is none, or of another
    queue: who may use this one need not be allowed that."""
    receipts: list[str] = fields["receipts"]
    for place, receipt in enumerate(receipts):
        try:
            topic = read_receipt(receipt)[0]
        except ReceiptError as exc:
            raise schema.invalid(f"receipts[{place}]", str(exc)) from None
        if topic != queue:
            raise schema.invalid(f"receipts[{place}]", f"it is of another queue than {queue!r}")
    return list(dict.fromkeys(receipts))


async def _settle(verb: str, done: str, api: Any, request: Request, queue: str) -> Answer:
    """Acknowledge messages, or give them back unhandled, which spends no retry."""
    receipts = receipts_of(request.asked, queue)
    settled = await getattr(api.center, verb)(receipts)
    return answer({done: int(settled), "stale": list(settled.stale)})


for _verb, _done, _summary, _returns, _about in (
    ("ack", "acknowledged", "Acknowledge messages", "How many there were.", "deleted now"),
    ("release", "released", "Give messages back unhandled", "How many are back.", "back"),
):
    OPERATIONS.add(
        f"POST /v1/queues/{{queue}}:{_verb}",
        _summary,
        role="write",
        request=SETTLE,
        returns=(_returns, _settled(_done, f"How many are {_about}.")),
    )(partial(_settle, _verb, _done))


@OPERATIONS.add(
    "POST /v1/queues/{queue}:extend",
    role="write",
    request=EXTEND,
    returns=("How many are extended.", _settled("extended", "How many are extended.")),
)
async def extend(api: Any, request: Request, queue: str) -> Answer:
    """Extend leases."""
    receipts = receipts_of(request.asked, queue)
    stale = await api.center.extend(receipts, request.asked.get("visibility"))
    return answer({"extended": len(receipts) - len(stale), "stale": list(stale)})


@OPERATIONS.add(
    "POST /v1/queues/{queue}:reject",
    role="write",
    request=REJECT,
    returns=(
        "What became of them.",
        _settled(
            "requeued",
            "How many wait again.",
            dead=schema.described(schema.WHOLE, "How many are dead."),
        ),
    ),
)
async def reject(api: Any, request: Request, queue: str) -> Answer:
    """Give messages back after a failure."""
    asked = request.asked
    receipts = receipts_of(asked, queue)
    how = {name: asked[name] for name in ("reason", "error", "backoff") if name in asked}
    # What tasks of a loop ask for in one turn leaves together.
    states: Iterable[str | None] = await asyncio.gather(
        *(api.center.reject(receipt, requeue=not asked["dead"], **how) for receipt in receipts)
    )
    states = list(states)
    return answer(
        {
            "requeued": sum(one == WAITING for one in states),
            "dead": sum(one == DEAD for one in states),
            "stale": [one for one, at in zip(receipts, states, strict=True) if at is None],
        }
    )


# -- leases that wait: clients ask, and one pop for each queue waits for all of them
#
# A waiting client costs a future and a timer. It holds no connection to the broker and no
# thread. What the pop brings is handed out in the order of asking.


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


@dataclass(slots=True, eq=False)
class Ask:
    """What one client asks for.

    until: when it gives up, by the loop's clock
    """

    answer: asyncio.Future[list[Delivery]]
    limit: int
    visibility: float | None
    until: float

    def give(self, messages: list[Delivery]) -> bool:
        """Answer it; whether it still waits."""
        if self.answer.done():
            return False
        self.answer.set_result(messages)
        return True


@dataclass(eq=False)
class Line:
    """Those who wait for one queue, and the pop that waits for them.

    opened_by: who began it, and whose share it is of
    """

    opened_by: str
    asks: deque[Ask] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None

    def waiting(self) -> deque[Ask]:
        """Those who wait, from the first one that still does."""
        while self.asks and self.asks[0].answer.done():
            self.asks.popleft()
        return self.asks

    def end(self, error: BaseException | None = None) -> None:
        """Answer all who wait: with an error, or that nothing has come."""
        for ask in self.asks:
            if error is None:
                ask.give([])
            elif not ask.answer.done():
                ask.answer.set_exception(error)
        self.asks.clear()


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
        return sum(not ask.answer.done() for line in self._lines.values() for ask in line.asks)

    @property
    def lines(self) -> int:
        """How many queues are waited for."""
        return len(self._lines)

    async def lease(
        self, queue: str, limit: int, wait: float, visibility: float | None = None, who: str = ""
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
        ask = Ask(loop.create_future(), limit, visibility, loop.time() + wait)
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
        some = list(messages)
        try:
            if some:
                await self._center.release(some)
        except Exception as exc:
            logger.warning("%d messages come back when their leases end: %s", len(some), exc)

    def _stand_in_line(self, queue: str, ask: Ask, who: str) -> None:
        line = self._lines.get(queue)
        if line is None:
            opened = sum(line.opened_by == who for line in self._lines.values())
            if opened >= self._share:
                raise schema.Problem(
                    "rate-limited",
                    f"clients with this token wait for {self._share} queues already; lease "
                    "without wait, or later",
                    headers=schema.retry_after(SPELL),
                )
            line = self._lines[queue] = Line(who)
        line.asks.append(ask)
        if line.task is None:
            # It is for all who wait: of the request that came first, it knows nothing.
            make = asyncio.get_running_loop().create_task
            line.task = Context().run(make, self._serve(queue, line))

    async def _serve(self, queue: str, line: Line) -> None:
        """Pop for those who wait, until nobody does."""
        try:
            while asks := line.waiting():
                limit, until = 0, 0.0
                for ask in asks:
                    if not ask.answer.done():
                        limit += ask.limit
                        until = max(until, ask.until)
                        if limit >= TOGETHER:
                            break
                visibility = asks[0].visibility
                # No longer than somebody waits: the queue counts among those that are waited for.
                wait = min(max(until - asyncio.get_running_loop().time(), _SHORTEST), SPELL)
                popped = await self._center.pop(
                    [queue], min(limit, TOGETHER), wait=wait, visibility=visibility
                )
                await self._hand_out(line, deque(popped.messages), visibility)
        except Exception as exc:
            line.end(exc)
        except BaseException:
            line.end()
            raise
        finally:
            # Nothing is awaited between the last look at the line and this.
            del self._lines[queue]

    async def _hand_out(self, line: Line, left: deque[Delivery], visibility: float | None) -> None:
        extended: set[int] = set()
        try:
            while left and (asks := line.waiting()):
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
            await self.give_back(left)

    async def aclose(self) -> None:
        """Answer all who wait, and wait for nothing any more."""
        self._closed = True
        lines = [*self._lines.values()]
        for line in lines:
            line.end()
        await end(*(line.task for line in lines))
