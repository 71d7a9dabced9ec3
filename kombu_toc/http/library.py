"""The task library, where there is one: find by business id, and the history of a task."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from redis.exceptions import RedisError

from ..center.center import TimeoutCenter
from ..errors import TocError
from ..library.records import attributes_of
from ..model.library import FAILURES, STATUSES, Record
from .fields import (
    TEXT,
    TIME,
    WHOLE,
    Headers,
    Listed,
    Number,
    Object,
    Text,
    Time,
    array,
    described,
    or_null,
    record,
    shown_time,
)
from .problems import invalid, not_found
from .request import Answer, Operations, Request, answer
from .tokens import Mask, Masking

logger = logging.getLogger(__name__)

_RECORD = record(
    "id queue status createTime",
    id=TEXT,
    queue=TEXT,
    status={**TEXT, "enum": list(STATUSES)},
    attempts=WHOLE,
    attributes={"type": "object", "additionalProperties": TEXT},
    task=TEXT,
    bizType=TEXT,
    bizId=TEXT,
    worker=TEXT,
    error=TEXT,
    scheduleTime=TIME,
    createTime=TIME,
    updateTime=TIME,
)
_PAGE = record(
    "tasks",
    tasks=array(_RECORD),
    nextPageToken=or_null(TEXT),
    away=described(WHOLE, "How many databases do not answer: what they have is not here."),
)
_TASKS = ("v1", "library", "tasks")

#: Seconds for which databases are waited for. (KEDA waits for three.)
FAR_WITHIN = 2.0

OPERATIONS = Operations()


def shown_record(record: Record, mask: Mask | Masking | None = None) -> dict[str, Any]:
    """A record, as in JSON.

    mask: what is hidden; its arguments are not known here, so of its error only the type is shown
    """
    error = record.error
    if mask and error:
        error = mask.error(error)
    shown = {
        "id": record.id,
        "queue": record.topic,
        "status": record.status,
        "attempts": record.attempts,
        "task": record.task,
        "bizType": record.biz_type,
        "bizId": record.biz_id,
        "attributes": None if mask else record.attributes or None,
        "worker": record.worker,
        "error": error,
        "scheduleTime": shown_time(record.action_us),
        "createTime": shown_time(record.created_us),
        "updateTime": shown_time(record.modified_us),
    }
    return {name: value for name, value in shown.items() if value is not None}


@OPERATIONS.add(
    "GET",
    _TASKS,
    "Find tasks in the library",
    query={
        "bizType": Text("The business type.", most=64),
        "bizId": Text("The business id.", most=255),
        "status": Text("Only those of this status.", choices=STATUSES),
        "task": Text("The name of a task.", most=255),
        "attributes": Text(
            "Only those with these attributes: NAME=VALUE, separated by commas.", most=4000
        ),
        "since": Time("Not before this action time."),
        "until": Time("Not after this action time."),
        "limit": Number("How many at most.", least=1, most=1000, whole=True, default=100),
        "after": Text("The nextPageToken of the page before.", most=4000),
    },
    returns=("A page.", _PAGE),
    problems=("not-found",),
)
async def find(api: Any, request: Request) -> Answer:
    """Find records, in the order of their action times."""
    asked = request.asked
    since, until = asked.get("since"), asked.get("until")
    try:
        page = await api.ask_library(
            "find",
            biz_type=asked.get("bizType"),
            biz_id=asked.get("bizId"),
            status=asked.get("status"),
            task=asked.get("task"),
            attributes=read_attributes(asked.get("attributes", "")),
            between=None if since is until is None else (since, until),
            limit=asked.get("limit", 100),
            after=asked.get("after"),
        )
    except ValueError:
        raise invalid("after", "no page goes on there; use the nextPageToken of one") from None
    mask = api.masking_for(request.token)
    shown = [shown_record(one, mask) for one in page.records]
    return answer({"tasks": shown, "nextPageToken": page.after, "away": len(page.away)})


def read_attributes(text: str) -> dict[str, str]:
    """Attributes as they are asked for: ``shop=berlin,till=7``. Raises Problem."""
    found = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise invalid("attributes", "write them as NAME=VALUE, separated by commas")
        found[name.strip()] = value.strip()
    return _checked(found)


def _checked(attributes: dict[str, str]) -> dict[str, str]:
    try:
        return attributes_of(attributes)
    except ValueError as exc:
        raise invalid("attributes", str(exc)) from None


@OPERATIONS.add(
    "POST",
    _TASKS,
    "Send again what has failed or is dead, each once",
    verb="retry",
    role="operate",
    request=Object(
        {
            "status": Listed(Text(choices=FAILURES), "Those of these.", most=2),
            "bizType": Text("The business type.", most=64),
            "bizId": Text("The business id.", most=255),
            "task": Text("The name of a task.", most=255),
            "attributes": Headers("Only those with these attributes.", most=50),
            "since": Time("Not before this action time."),
            "until": Time("Not after this action time."),
            "limit": Number("How many at most.", least=1, most=100_000, whole=True),
        },
        needed=("status",),
    ),
    returns=(
        "How many were sent again, and of how many the messages are not kept.",
        record("retried notKept", retried=WHOLE, notKept=WHOLE),
    ),
    problems=("not-found",),
)
async def retry(api: Any, request: Request) -> Answer:
    """Send again what has failed or is dead."""
    asked = request.fields()
    since, until = asked.get("since"), asked.get("until")
    done = await api.ask_library(
        "retry",
        status=asked["status"],
        biz_type=asked.get("bizType"),
        biz_id=asked.get("bizId"),
        task=asked.get("task"),
        attributes=_checked(asked.get("attributes") or {}),
        between=None if since is until is None else (since, until),
        limit=asked.get("limit"),
    )
    return answer({"retried": done.number, "notKept": done.not_kept}, number=done.number)


@OPERATIONS.add(
    "GET",
    (*_TASKS, "{id}"),
    "Show the history of a task",
    returns=("Its records.", _PAGE),
    problems=("not-found",),
)
async def history(api: Any, request: Request) -> Answer:
    """All that is known of a task, the oldest first."""
    id = request.segments[0]
    records = await api.ask_library("history", id)
    if not records:
        raise not_found(f"the library knows no task {id!r}")
    mask = api.masking_for(request.token)
    return answer({"tasks": [shown_record(one, mask) for one in records]})


# -- what is in the task library only


async def far_of(api: Any, queue: str) -> int | None:
    """How many messages of a queue with a horizon are in the task library only. None: it cannot be
    asked."""
    try:
        found: dict[str, int] = await asyncio.wait_for(
            api.center.queues.count_far(queue), FAR_WITHIN
        )
    except (TocError, RedisError, asyncio.TimeoutError):
        return None
    return found.get(queue)


def _with_horizon(center: TimeoutCenter) -> list[str]:
    return [one.name for one in center.registry.far(None)]


class FarAhead:
    """The same of all queues, for all who look at a page: asked at most every ten seconds, and no
    more often than takes a twentieth of the time. Nobody waits for a slow database."""

    EVERY: float = 10.0
    SHARE: float = 20.0

    #: Seconds for which the first viewer waits.
    FIRST = 0.5

    def __init__(self, api: Any) -> None:
        self._api = api
        self._latest: dict[str, int | None] = {}
        self._next = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def looks(self) -> bool:
        """Whether it is asking."""
        return self._task is not None

    async def read(self) -> dict[str, int | None]:
        """Of each queue with a horizon, how much is in the library only; None: it cannot be asked.
        It may be some seconds old."""
        if not self._api.has_library:
            return {}
        loop = asyncio.get_running_loop()
        if self._task is None and loop.time() >= self._next:
            is_first = not self._next
            self._task = loop.create_task(self._look())
            if is_first:
                await asyncio.wait((self._task,), timeout=self.FIRST)
        return self._latest

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        names: list[str] = []
        center = self._api.center
        try:
            names = await center.call(_with_horizon)
            if names:
                self._latest = {**dict.fromkeys(names), **await center.queues.count_far()}
            else:
                self._latest = {}
        except Exception as exc:
            logger.debug("what is in the task library only is not known: %s", exc)
            self._latest = dict.fromkeys(names or self._latest)
        finally:
            took = loop.time() - began
            self._next = began + max(self.EVERY, took * self.SHARE)
            self._task = None

    async def aclose(self) -> None:
        """End a look that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
