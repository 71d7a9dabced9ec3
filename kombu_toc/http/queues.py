"""Queues: declared, altered, counted, paused, purged; their limits, and their dead messages; and
how much work there is, for an autoscaler."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from ..center.topics import ALTERABLE
from ..errors import ConfigurationError
from ..model import limits as terms
from ..model.limits import LIMITS, PRIORITIES
from ..model.results import DEAD, Counts
from ..model.topic import Topic
from . import fields as schema
from .fields import Problem, invalid
from .library import far_of
from .messages import read_page
from .request import Answer, Operations, Request, answer
from .tasks import CANCELLING, PAGE, shown_page
from .tokens import Token

# -- which queues a token may see, page by page


async def page_of_names(
    topics: Callable[..., Awaitable[list[str]]], token: Token, after: str, limit: int
) -> tuple[list[str], str | None]:
    """Names of queues that a token may see, and behind which it goes on, if there are more. Read
    are those only that begin as its patterns do, a page of each.

    topics: reads names, as :meth:`Queues.names` does
    """
    heads = sorted({re.split(r"[*?]", pattern)[0] for pattern in token.queues})
    heads = [
        one for one in heads if not any(one != head and one.startswith(head) for head in heads)
    ]
    pages = await asyncio.gather(
        *(topics(prefix=head, after=after, limit=limit + 1) for head in heads)
    )
    # What is behind the last name of a full page is not known.
    until = min((page[-1] for page in pages if len(page) > limit), default=None)
    names = [
        one
        for one in sorted(one for page in pages for one in page)
        if token.sees(one) and (until is None or one <= until)
    ]
    if len(names) > limit:
        return names[:limit], names[limit - 1]
    return names, until


#: Dead messages that one request requeues or purges, at most, and queues of a page.
MAX_DEAD = 1000
MAX_PAGE = 200

_ABOUT = "As in docs/options.md; null takes it back to the default."

#: Kinds of limits -> the types of JSON that they may have, if these are not text.
_TYPES: dict[type, tuple[str, ...]] = {
    terms.Flag: ("boolean", "null"),
    terms.Rate: ("number", "string", "null"),
    terms.Weights: ("object", "string", "null"),
}


def camel(name: str) -> str:
    """``retry_backoff`` as ``retryBackoff``."""
    return re.sub("_([a-z])", lambda found: found[1].upper(), name)


def _kind_of(limit: str) -> schema.Anything:
    """What a limit may be in JSON. Whether its value makes sense is for the center to say."""
    if limit == "steps":
        items = {"type": "integer", "minimum": min(PRIORITIES), "maximum": max(PRIORITIES)}
        return schema.Anything(f"Priority steps. {_ABOUT}", ("array", "null"), {"items": items})
    kind = LIMITS[limit]
    about = f"It must be {kind.must}. {_ABOUT}"
    types = _TYPES.get(type(kind), ("string", "null"))
    also: dict[str, Any] = {}
    if isinstance(kind, terms.Number):
        types = ("integer" if kind.kind is int else "number", "null")
        also = {"minimum": 0 if kind.zero else kind.least, "maximum": kind.most}
    elif isinstance(kind, terms.Choice):
        also = {"enum": [*kind.words, None]}
    return schema.Anything(about, types, also)


#: name in JSON -> name of a limit
_LIMITS_BY = {camel(name): name for name in (*LIMITS, "steps")}

DECLARE = schema.Object(
    {name: _kind_of(limit) for name, limit in _LIMITS_BY.items()}, name="NewQueue"
)
ALTER = schema.Object({camel(limit): _kind_of(limit) for limit in ALTERABLE}, name="Limits")

_COUNTS = schema.record(
    "ready scheduled inFlight dead",
    wholes="ready scheduled inFlight dead due",
    far=schema.or_null(
        schema.WHOLE,
        "Of a queue with a horizon: how many are in the task library only, because they are "
        "further ahead, and so in none of the other numbers. Of each table of the library, 100,000 "
        "are counted at most. null: it cannot be asked.",
    ),
)
_LIMITS = schema.record(
    "value source",
    value=schema.described(schema.ANYTHING, "null: there is none."),
    source=schema.described(schema.TEXT, "Where it comes from."),
)
_QUEUE = schema.record(
    "name slots limits paused counts",
    texts="name",
    wholes="slots",
    limits={"type": "object", "additionalProperties": _LIMITS},
    paused=schema.FLAG,
    targetStopped=schema.or_null(
        schema.TEXT, "Why nothing is sent to its target any more; null: it is, if there is."
    ),
    counts=_COUNTS,
    consumers=schema.array(schema.TEXT),
)
_SUMMARY = schema.record(
    "name slots counts oldestSeconds",
    texts="name",
    wholes="slots",
    counts=_COUNTS,
    oldestSeconds=schema.described(schema.NUMBER, "How overdue its oldest message is."),
)
_USED = schema.record(
    "name value used of opensSeconds",
    texts="name",
    value=schema.or_null(schema.TEXT, "As it is declared."),
    used=schema.described(schema.WHOLE, "How much is used of it."),
    of=schema.or_null(schema.WHOLE, "How much there is."),
    opensSeconds=schema.described(schema.NUMBER, "Until something may start again."),
)
_MORE = schema.described(schema.FLAG, "Repeat it then.")
_PAUSED = ("What it is now.", schema.record("paused", paused=schema.FLAG))

WITHIN = schema.Number("Count also what comes due within so many seconds.", most=31_536_000)
_DEAD = schema.Object(
    {
        "ids": CANCELLING.fields["ids"],
        "limit": schema.Number(
            "Instead of ids: so many at most, the oldest.", least=1, most=MAX_DEAD, whole=True
        ),
    },
    one_of=("ids", "limit"),
    name="DeadTasks",
)

OPERATIONS = Operations("queues", problems=("not-found",))


def shown_counts(counts: Counts) -> dict[str, int]:
    return {camel(name): number for name, number in counts._asdict().items()}


@OPERATIONS.add(
    "GET /v1/queues",
    many_queues=True,
    query=schema.paging(MAX_PAGE),
    returns=("A page.", schema.page_of("queues", _SUMMARY, schema.SPARSE)),
    problems=(),
)
async def list_queues(api: Any, request: Request) -> Answer:
    """List queues."""
    asked = {"after": "", **request.asked}
    page, more = await page_of_names(api.center.queues.names, request.token, **asked)
    found = await asyncio.gather(*(api.center.queues.summary(name) for name in page))
    queues = [
        {
            **schema.members(one, ("name", "slots", "oldestSeconds"), name="topic"),
            "counts": shown_counts(one.counts),
        }
        for some in found
        for one in some
    ]
    return answer({"queues": queues, "nextPageToken": more})


@OPERATIONS.add("GET /v1/queues/{queue}", returns=("The queue.", _QUEUE))
async def describe(api: Any, request: Request, queue: str) -> Answer:
    """Describe a queue."""
    return answer(await _described(api, queue))


async def _described(api: Any, queue: str) -> dict[str, Any]:
    found, declared = await asyncio.gather(
        api.center.queues.describe(queue), api.center.registry.declared(queue)
    )
    return {
        **schema.members(found, ("name", "slots", "paused", "targetStopped"), name="topic"),
        "limits": {
            camel(name): {"value": one.value, "source": one.source}
            for name, one in found.limits.items()
        },
        "counts": await _with_far(api, declared, shown_counts(found.counts)),
        "consumers": [one.name for one in found.consumers],
    }


async def _limit(verb: str, api: Any, request: Request, queue: str) -> Answer:
    """Declare a queue; or change its limits while it is in use, where null means the default."""
    fields, alters = request.asked, verb == "alter"
    if alters and not fields:
        raise invalid("", f"say what to change; there are {', '.join(ALTER.fields)}")
    given = {_LIMITS_BY[name]: said for name, said in fields.items() if alters or said is not None}
    try:
        await getattr(api.center.queues, verb)(queue, **given)
    except ConfigurationError as exc:
        raise Problem("invalid-field", str(exc), _meant(str(exc), queue, fields)) from None
    return answer(await _described(api, queue))


OPERATIONS.add(
    "PUT /v1/queues/{queue}",
    "Declare a queue",
    role="operate",
    act="declare",
    request=DECLARE,
    returns=("The queue as it is declared now.", _QUEUE),
    about="The first declaration stands: what a later one says otherwise changes nothing.",
    problems=(),
)(partial(_limit, "declare"))
OPERATIONS.add(
    "PATCH /v1/queues/{queue}",
    "Change limits of a queue",
    role="operate",
    act="alter",
    request=ALTER,
    returns=("The queue as it is declared now.", _QUEUE),
)(partial(_limit, "alter"))


def _meant(error: str, queue: str, fields: Mapping[str, Any]) -> str:
    """Of the fields of a request, the one that an error is about; empty if that is not known."""
    if len(fields) == 1:
        return next(iter(fields))
    said = error.replace(f"{queue!r}", "").replace("the slot count", "slots")
    at = {name: re.search(rf"\b{_LIMITS_BY[name]}\b|_{name}\b", said) for name in fields}
    found = {name: match.start() for name, match in at.items() if match is not None}
    return min(found, key=found.__getitem__, default="")


@OPERATIONS.add(
    "DELETE /v1/queues/{queue}",
    role="operate",
    act="delete queue",
    query={"ifEmpty": schema.Flag("Only if it holds nothing; this takes five seconds.")},
    returns=("Whether it is deleted.", schema.record("deleted", deleted=schema.FLAG)),
)
async def delete(api: Any, request: Request, queue: str) -> Answer:
    """Delete a queue with everything in it."""
    await api.known_queue(queue)
    deleted = await api.acting.queues.delete(queue, if_empty=request.asked["ifEmpty"])
    return answer({"deleted": deleted}, number=-1 if deleted else 0)


@OPERATIONS.add(
    "GET /v1/queues/{queue}/counts",
    query={"within": WITHIN},
    returns=("How many there are.", _COUNTS),
)
async def counts(api: Any, request: Request, queue: str) -> Answer:
    """Count messages."""
    within = request.asked.get("within")
    await api.known_queue(queue)
    declared = await api.center.registry.known(queue)
    return answer(await _with_far(api, declared, await counts_of(api, queue, within)))


async def _with_far(api: Any, declared: Topic | None, shown: dict[str, int]) -> dict[str, Any]:
    """Counts, and what is in the task library only, if the queue has a horizon."""
    if declared is None or not declared.declaration.far:
        return shown
    return {**shown, "far": await far_of(api, declared.name)}


async def counts_of(api: Any, queue: str, within: float | None) -> dict[str, int]:
    """What Redis holds of a queue, and ``due``: what is due within so many seconds."""
    if within is None:
        return shown_counts(await api.center.counts(queue))
    found, [due] = await asyncio.gather(
        api.center.counts(queue), api.center.queues.coming(queue, [within])
    )
    return {**shown_counts(found), "due": due}


@OPERATIONS.add(
    "GET /v1/queues/{queue}/limits",
    returns=(
        "What is used.",
        schema.record(
            limits=schema.array(_USED),
            wholes="running waiting keysWaiting",
            oldestSeconds=schema.NUMBER,
        ),
    ),
)
async def usage(api: Any, request: Request, queue: str) -> Answer:
    """Show what is used of limits."""
    found = await api.center.queues.usage(queue)
    shown = schema.members(found, ("running", "waiting", "keysWaiting", "oldestSeconds"))
    shown["limits"] = [
        {
            **schema.members(one, ("used", "of", "opensSeconds")),
            "name": camel(one.name),
            "value": one.value if one.value is None else str(one.value),
        }
        for one in found.limits
    ]
    return answer(shown)


async def _pause(verb: str, api: Any, request: Request, queue: str) -> Answer:
    """Have workers take nothing from a queue, or let them take again."""
    await api.known_queue(queue)
    await getattr(api.center.queues, verb)(queue)
    return answer({"paused": verb == "pause"})


for _verb, _summary in (
    ("pause", "Have workers take nothing"),
    ("resume", "Let workers take again"),
):
    OPERATIONS.add(
        f"POST /v1/queues/{{queue}}:{_verb}", _summary, role="operate", act=_verb, returns=_PAUSED
    )(partial(_pause, _verb))


@OPERATIONS.add(
    "POST /v1/queues/{queue}:purge",
    role="operate",
    act="purge all that waits",
    returns=(
        "How many there were, and the schedules whose next firing was among them.",
        schema.record("purged schedules", wholes="purged", schedules=schema.array(schema.TEXT)),
    ),
)
async def purge(api: Any, request: Request, queue: str) -> Answer:
    """Delete every message that waits."""
    await api.known_queue(queue)
    purged = await api.acting.queues.purge(queue)
    return answer({"purged": purged, "schedules": list(purged.schedules)}, number=purged)


# -- dead messages


@OPERATIONS.add(
    "GET /v1/queues/{queue}/dead",
    query=schema.paging(MAX_PAGE),
    returns=("A page.", PAGE),
)
async def list_dead(api: Any, request: Request, queue: str) -> Answer:
    """List dead messages."""
    await api.known_queue(queue)
    page = await read_page(api.center, queue, state=DEAD, **request.asked)
    return answer(await shown_page(api, request, page))


async def _change_dead(verb: str, done: str, api: Any, request: Request, queue: str) -> Answer:
    """Deliver dead messages again, or delete them: those that a request names, or the oldest. What
    is meant is said in the body: one that got lost on the way means nothing."""
    await api.known_queue(queue)
    fields, more = request.asked, False
    ids = list(dict.fromkeys(fields.get("ids", ())))
    if not ids:
        page = await read_page(api.center, queue, state=DEAD, limit=fields["limit"])
        ids, more = [one.id for one in page.messages], page.after is not None
    number = await getattr(api.acting.dead, verb)(queue, ids=ids) if ids else 0
    return answer({done: number, "more": more}, number=number)


for _verb, _done, _summary in (
    ("requeue", "requeued", "Deliver dead messages again"),
    ("purge", "purged", "Delete dead messages"),
):
    OPERATIONS.add(
        f"POST /v1/queues/{{queue}}/dead:{_verb}",
        _summary,
        role="operate",
        act=_verb,
        request=_DEAD,
        required=False,
        returns=("How many.", schema.record(_done, wholes=_done, more=_MORE)),
    )(partial(_change_dead, _verb, _done))


# -- how much work a queue has, for an autoscaler


SCALE = Operations("scale")


@SCALE.add(
    "GET /scale/{queue}",
    query={"within": WITHIN},
    returns=(
        "The value is ready and in flight, and what comes due.",
        schema.record(
            "value ready inFlight due",
            value=schema.described(schema.WHOLE, "due and inFlight."),
            wholes="ready inFlight",
            due=schema.described(
                schema.WHOLE, "What is ready, or comes due within so many seconds."
            ),
            far=schema.or_null(
                schema.WHOLE,
                "Of a queue with a horizon: what of due is in the task library only; null: it "
                "cannot be asked.",
            ),
        ),
    ),
)
async def scale(api: Any, request: Request, queue: str) -> Answer:
    """Tell an autoscaler how much work there is.

    For KEDA's metrics-api scaler. A queue that nobody has declared has no work.
    """
    within = request.asked.get("within", 0.0)
    declared = await api.center.registry.declared(queue)
    if declared is None:  # nobody has put anything yet
        return answer({"value": 0, "ready": 0, "inFlight": 0, "due": 0})
    found = await counts_of(api, queue, within)
    due = max(found["due"], found["ready"])
    told: dict[str, int | None] = {"ready": found["ready"], "inFlight": found["inFlight"]}
    if declared.declaration.far:  # what cannot be asked can nobody put, and needs no more pods
        told["far"] = await far_of(api, queue, within)
        due += told["far"] or 0
    return answer({"value": due + found["inFlight"], "due": due, **told})
