"""Pull: lease messages, and acknowledge, extend, reject or release them by receipt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from functools import partial
from typing import Any

from ..errors import ReceiptError
from ..model.delivery import read_receipt
from ..model.results import DEAD, IN_FLIGHT, WAITING, Delivery, Found
from . import guard
from .fields import TEXT, WHOLE, Flag, Listed, Number, Object, Text, array, described, record
from .messages import CONTENT, LEASED, LEASED_TASK, DecompressionBudget, content_of, shown_delivery
from .problems import Problem, invalid
from .request import Answer, Gone, Operations, Request, answer

#: Seconds for which a lease may wait, at most; messages of one lease, and receipts of one request.
MAX_WAIT = 30
MAX_LEASES = 1000

#: Seconds for which the answer to a lease is kept under an Idempotency-Key.
KEEP_LEASES = 300.0

_VISIBILITY = Number(
    "Seconds that the leases last; what each message says, or its queue, unless given.",
    least=1,
    most=31_536_000,
)
_RECEIPTS = Listed(Text(most=10_000), "The receipts of the messages.", most=MAX_LEASES)

LEASE = Object(
    {
        "limit": Number("Messages at most.", least=1, most=MAX_LEASES, whole=True, default=1),
        "wait": Number("Seconds to wait until something is due.", most=MAX_WAIT, default=0),
        "visibility": _VISIBILITY,
    },
    name="Lease",
)
SETTLE = Object({"receipts": _RECEIPTS}, needed=("receipts",), name="Receipts")
EXTEND = Object(
    {"receipts": _RECEIPTS, "visibility": _VISIBILITY}, needed=("receipts",), name="Extension"
)
REJECT = Object(
    {
        "receipts": _RECEIPTS,
        "error": Text("What went wrong; kept with the message.", most=10_000, least=0),
        "dead": Flag("Whether it goes to the dead messages although it has retries left."),
        "reason": Text("Why, of a message that dies.", most=1000, least=0),
        "backoff": Number(
            "Seconds until it is due again; as its queue says unless given.", most=31_536_000
        ),
    },
    needed=("receipts",),
    name="Rejection",
)

_QUEUE = ("v1", "queues", "{queue}")

OPERATIONS = Operations()


def _settled(name: str, about: str, **more: Any) -> dict[str, Any]:
    stale = array(TEXT, "The receipts that came too late.")
    return record(f"{name} stale", stale=stale, **{name: described(WHOLE, about)}, **more)


async def lease_again(api: Any, request: Request, made: Answer) -> Answer:
    """The answer to a lease once more, with the bytes of the messages that are still in flight by
    it: another consumer may have one by now, or another message its id."""
    tasks = json.loads(made.body)["tasks"]
    found: list[Found] = await api.center.get(
        [one["id"] for one in tasks], topic=request.segments[0]
    )
    bodies = {(one.id, one.token): one.body for one in found if one.state == IN_FLIGHT}
    budget = DecompressionBudget(LEASED)
    whole = []
    for one in tasks:
        body = bodies.get((one["id"], Delivery.of_receipt(one["receipt"]).birth))
        if body is not None:
            whole.append({**one, **content_of(body, one["id"], budget)})
    return answer({"tasks": whole}, headers=made.headers)


@OPERATIONS.add(
    "POST",
    _QUEUE,
    "Lease messages that are due",
    role="write",
    verb="lease",
    again=lease_again,
    request=LEASE,
    required=False,
    returns=("The messages; none if nothing has come.", record("tasks", tasks=array(LEASED_TASK))),
    about="With wait, the answer comes as soon as something is due, and is empty after that time. "
    "Clients that wait are served in the order of asking. A message comes back when its lease "
    "ends without an acknowledgement.",
)
async def lease(api: Any, request: Request) -> Answer:
    """Lease messages that are due; wait for some if there are none."""
    fields = request.fields()
    long_polls, queue = api.long_polls, request.segments[0]
    asked = (
        *(queue, fields.get("limit", 1), fields.get("wait", 0), fields.get("visibility")),
        request.token.name,
    )
    if not asked[2]:
        messages = await long_polls.lease(*asked)
    else:
        messages = await _unless_gone(request, long_polls, asked)
    if not api.tokens.has(request.token):
        await long_polls.give_back(messages)
        raise Problem("unauthorized", "this token was removed", "authorization")
    if not messages:
        return answer({"tasks": []}, keep=1.0)
    try:
        budget = DecompressionBudget(LEASED)
        document = {"tasks": [shown_delivery(one, budget) for one in messages]}
        keep, kept = KEEP_LEASES, None
        if b"idempotency-key" in request.headers:
            keep = min(keep, await _shortest(api, queue, messages, asked[3]))
            kept = answer({"tasks": [_without_content(one) for one in document["tasks"]]}).body
        return answer(document, keep=keep, kept=kept, undo=partial(long_polls.give_back, messages))
    except BaseException:
        await long_polls.give_back(messages)
        raise


def _without_content(task: dict[str, Any]) -> dict[str, Any]:
    return {name: said for name, said in task.items() if name not in CONTENT}


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


async def _unless_gone(request: Request, long_polls: Any, asked: tuple[Any, ...]) -> Any:
    """Lease for a client that may go away while it waits. Raises Gone."""
    leaving = [asyncio.ensure_future(request.wait_until_gone())]
    connection = guard.current()
    if connection is not None:
        connection.hold()
        leaving.append(asyncio.ensure_future(connection.wait_until_lost()))
    waiting = asyncio.ensure_future(long_polls.lease(*asked))
    try:
        await asyncio.wait({waiting, *leaving}, return_when=asyncio.FIRST_COMPLETED)
        if any(one.done() for one in leaving):
            if waiting.done() and waiting.exception() is None:
                await long_polls.give_back(waiting.result())
            raise Gone
        return waiting.result()
    finally:
        for task in (waiting, *leaving):
            if not task.done():
                task.cancel()


def receipts_of(fields: dict[str, Any], queue: str) -> list[str]:
    """The receipts of a request, each once. Raises Problem for one that is none, or of another
    queue: who may use this one need not be allowed that."""
    receipts: list[str] = fields["receipts"]
    for place, receipt in enumerate(receipts):
        try:
            topic = read_receipt(receipt)[0]
        except ReceiptError as exc:
            raise invalid(f"receipts[{place}]", str(exc)) from None
        if topic != queue:
            raise invalid(f"receipts[{place}]", f"it is of another queue than {queue!r}")
    return list(dict.fromkeys(receipts))


@OPERATIONS.add(
    "POST",
    _QUEUE,
    "Acknowledge messages",
    role="write",
    verb="ack",
    request=SETTLE,
    returns=(
        "How many there were.",
        _settled("acknowledged", "How many are deleted now."),
    ),
)
async def acknowledge(api: Any, request: Request) -> Answer:
    """Acknowledge messages: they are done."""
    receipts = receipts_of(request.fields(), request.segments[0])
    done = await api.center.ack(receipts)
    return answer({"acknowledged": int(done), "stale": list(done.stale)})


@OPERATIONS.add(
    "POST",
    _QUEUE,
    "Extend leases",
    role="write",
    verb="extend",
    request=EXTEND,
    returns=(
        "How many are extended.",
        _settled("extended", "How many are extended."),
    ),
)
async def extend(api: Any, request: Request) -> Answer:
    """Extend leases: they end that long from now."""
    fields = request.fields()
    receipts = receipts_of(fields, request.segments[0])
    stale = await api.center.extend(receipts, fields.get("visibility"))
    return answer({"extended": len(receipts) - len(stale), "stale": list(stale)})


@OPERATIONS.add(
    "POST",
    _QUEUE,
    "Give messages back unhandled",
    role="write",
    verb="release",
    request=SETTLE,
    returns=(
        "How many are back.",
        _settled("released", "How many are back."),
    ),
)
async def release(api: Any, request: Request) -> Answer:
    """Give messages back unhandled; no retry is spent."""
    receipts = receipts_of(request.fields(), request.segments[0])
    done = await api.center.release(receipts)
    return answer({"released": int(done), "stale": list(done.stale)})


@OPERATIONS.add(
    "POST",
    _QUEUE,
    "Give messages back after a failure",
    role="write",
    verb="reject",
    request=REJECT,
    returns=(
        "What became of them.",
        _settled("requeued", "How many wait again.", dead=described(WHOLE, "How many are dead.")),
    ),
)
async def reject(api: Any, request: Request) -> Answer:
    """Give messages back after a failure: one retry less, after the queue's back-off."""
    fields = request.fields()
    receipts = receipts_of(fields, request.segments[0])
    how = {
        "requeue": not fields.get("dead", False),
        "reason": fields.get("reason", ""),
        "error": fields.get("error", ""),
        "backoff": fields.get("backoff"),
    }
    # What tasks of a loop ask for in one turn leaves together.
    states: Iterable[str | None] = await asyncio.gather(
        *(api.center.reject(receipt, **how) for receipt in receipts)
    )
    states = list(states)
    return answer(
        {
            "requeued": sum(one == WAITING for one in states),
            "dead": sum(one == DEAD for one in states),
            "stale": [one for one, at in zip(receipts, states, strict=True) if at is None],
        }
    )
