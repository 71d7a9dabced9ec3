"""What is known of tasks beside their messages: the task library, where there is one, and the
latest failed tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import RedisError

from ..center.center import TimeoutCenter
from ..center.failures import found_of
from ..center.topics import MOST_FAR
from ..errors import TocError
from ..library.records import attributes_of
from ..model.failures import FailedTask
from ..model.library import FAILURES, STATUSES, Record
from . import fields as schema
from .messages import DecompressionBudget
from .request import Answer, Background, Operations, Request, answer
from .tokens import HIDDEN, Mask, Masking

logger = logging.getLogger(__name__)

_RECORD = schema.record(
    "id queue status createTime",
    texts="id queue task bizType bizId worker error",
    wholes="attempts",
    status={**schema.TEXT, "enum": list(STATUSES)},
    attributes={"type": "object", "additionalProperties": schema.TEXT},
    scheduleTime=schema.TIME,
    createTime=schema.TIME,
    updateTime=schema.TIME,
)
_PAGE = schema.record(
    "tasks",
    tasks=schema.array(_RECORD),
    nextPageToken=schema.or_null(schema.TEXT),
    away=schema.described(
        schema.WHOLE, "How many databases do not answer: what they have is not here."
    ),
)

#: Seconds for which databases are waited for. (KEDA waits for three.)
FAR_WITHIN = 2.0

OPERATIONS = Operations("library", problems=("not-found",))


def shown_record(record: Record, mask: Mask | Masking | None = None) -> dict[str, Any]:
    """A record, as in JSON.

    mask: what is hidden; its arguments are not known here, so of its error only the type is shown
    """
    shown = schema.members(record, _RECORD["properties"])
    if mask:
        shown["attributes"] = None
        shown["error"] = record.error and mask.error(record.error)
    return {name: value for name, value in shown.items() if value not in (None, {})}


_FIND = {
    "bizType": schema.Text("The business type.", most=64),
    "bizId": schema.Text("The business id.", most=255),
    "status": schema.Text("Only those of this status.", choices=STATUSES),
    "task": schema.Text("The name of a task.", most=255),
    "attributes": schema.Text(
        "Only those with these attributes: NAME=VALUE, separated by commas.", most=4000
    ),
    "since": schema.Time("Not before this action time."),
    "until": schema.Time("Not after this action time."),
    **schema.paging(1000),
}


@OPERATIONS.add(
    "GET /v1/library/tasks",
    query=_FIND,
    returns=("A page.", _PAGE),
)
async def find(api: Any, request: Request) -> Answer:
    """Find tasks in the library."""
    asked = request.asked
    which = _filters(asked, read_attributes(asked.get("attributes", "")))
    which |= {"status": asked.get("status"), "limit": asked["limit"]}
    with schema.going_on():
        page = await api.ask_library("find", after=asked.get("after"), **which)
    mask = api.masking_for(request.token)
    shown = [shown_record(one, mask) for one in page.records]
    return answer({"tasks": shown, "nextPageToken": page.after, "away": len(page.away)})


def _filters(asked: Mapping[str, Any], attributes: dict[str, str]) -> dict[str, Any]:
    """The arguments of :meth:`.core.TaskLibrary.find` that say which tasks are meant."""
    names = {"biz_type": "bizType", "biz_id": "bizId", "task": "task"}
    which = {name: asked.get(said) for name, said in names.items()}
    return {**which, "attributes": attributes, "between": between(asked)}


def between(asked: Mapping[str, Any]) -> tuple[float | None, float | None] | None:
    """The bounds of what was asked for; None: there are none."""
    since, until = asked.get("since"), asked.get("until")
    return None if since is until is None else (since, until)


def read_attributes(text: str) -> dict[str, str]:
    """Attributes as they are asked for: ``shop=berlin,till=7``. Raises Problem."""
    found = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise schema.invalid("attributes", "write them as NAME=VALUE, separated by commas")
        found[name.strip()] = value.strip()
    return _checked(found)


def _checked(attributes: dict[str, str]) -> dict[str, str]:
    try:
        return attributes_of(attributes)
    except ValueError as exc:
        raise schema.invalid("attributes", str(exc)) from None


@OPERATIONS.add(
    "POST /v1/library/tasks:retry",
    role="operate",
    request=schema.Object(
        {
            **{name: _FIND[name] for name in ("bizType", "bizId", "task", "since", "until")},
            "status": schema.Listed(schema.Text(choices=FAILURES), "Those of these.", most=2),
            "attributes": schema.Headers("Only those with these attributes.", most=50),
            "limit": schema.Number("How many at most.", least=1, most=100_000, whole=True),
        },
        needed=("status",),
    ),
    returns=(
        "How many were sent again, and of how many the messages are not kept.",
        schema.record("retried notKept", wholes="retried notKept"),
    ),
)
async def retry(api: Any, request: Request) -> Answer:
    """Send again what has failed or is dead, each once."""
    asked = request.asked
    which = _filters(asked, _checked(asked.get("attributes") or {}))
    done = await api.ask_library("retry", status=asked["status"], limit=asked.get("limit"), **which)
    return answer({"retried": done.number, "notKept": done.not_kept}, number=done.number)


@OPERATIONS.add("GET /v1/library/tasks/{id}", returns=("Its records.", _PAGE))
async def history(api: Any, request: Request, id: str) -> Answer:
    """Show the history of a task."""
    records = await api.ask_library("history", id)
    if not records:
        raise schema.not_found(f"the library knows no task {id!r}")
    mask = api.masking_for(request.token)
    return answer({"tasks": [shown_record(one, mask) for one in records]})


# -- what is in the task library only


async def far_of(api: Any, queue: str, within: float | None = None) -> int | None:
    """How many messages of a queue with a horizon are in the task library only, and come due within
    so many seconds, if any are said. None: it cannot be asked."""

    def count(center: TimeoutCenter) -> int | None:
        if center.messages.far is None:
            return None
        seconds, us = center.client.time()
        until_us = seconds * 1_000_000 + us + int((within or 0.0) * 1_000_000)
        return center.messages.far.count(queue, MOST_FAR, None if within is None else until_us)

    try:
        found: int | None = await asyncio.wait_for(api.center.call(count), FAR_WITHIN)
    except (TocError, RedisError, asyncio.TimeoutError):
        return None
    return found


def _with_horizon(center: TimeoutCenter) -> list[str]:
    return [one.name for one in center.registry.far(None)]


class FarAhead(Background[dict[str, int | None]]):
    """The same of all queues, for all who look at a page; None: it cannot be asked. It takes a
    twentieth of the time at most."""

    SHARE, FIRST = 20.0, 0.5

    def __init__(self, api: Any) -> None:
        self._api, self.latest = api, {}

    async def ask(self) -> dict[str, int | None]:
        names: list[str] = []
        center = self._api.center
        try:
            if self._api.has_library:
                names = await center.call(_with_horizon)
            return {**dict.fromkeys(names), **(await center.queues.count_far() if names else {})}
        except Exception as exc:
            logger.debug("what is in the task library only is not known: %s", exc)
            return dict.fromkeys(names or self.latest)


# -- the latest failed tasks: listed, retried, forgotten


#: Failed tasks that one request retries or deletes, at most.
MOST_FAILURES = 1000

_FAILURE = schema.record(
    "id queue task exception failTime dead retryable",
    texts="id queue task arguments worker",
    wholes="retries",
    exception=schema.described(schema.TEXT, "The type of the exception."),
    failTime=schema.TIME,
    error=schema.described(schema.TEXT, "The text of the exception and the end of its traceback."),
    runtime=schema.described({"type": "number"}, "Seconds."),
    dead=schema.described(schema.FLAG, "Its message is a dead letter."),
    retryable=schema.described(schema.FLAG, "Its message is kept, or it is a dead letter."),
)
_FAILURES = schema.page_of(
    "failures",
    _FAILURE,
    "",
    missing=schema.described(
        schema.TEXT, "What has not answered, if anything: its failures are missing."
    ),
)

_WHICH = {
    "task": schema.Text("Only tasks of this name; * and ? match any.", most=255),
    "exception": schema.Text("Only with this type of exception.", most=255),
}
_CHOSEN = schema.Object(
    {
        "ids": schema.Listed(schema.Text(most=2000), "The ids of tasks.", most=MOST_FAILURES),
        "limit": schema.Number(
            "Instead of ids: so many at most, the latest.", least=1, most=MOST_FAILURES, whole=True
        ),
        **_WHICH,
    },
    one_of=("ids", "limit"),
    name="FailedTasks",
)
_RETRIED = schema.record(
    "retried notKept gone",
    retried=schema.WHOLE,
    notKept=schema.described(
        schema.WHOLE, "How many cannot be retried: their messages are not kept."
    ),
    gone=schema.described(
        schema.WHOLE, "How many were retried before, or are no dead letters any more."
    ),
    expires=schema.described(
        schema.WHOLE, "From how many an expiry that had passed was taken away."
    ),
    eta=schema.described(schema.WHOLE, "From how many an eta that had passed was taken away."),
    unique=schema.described(schema.WHOLE, "How many have a unique key, which they do not hold."),
    chords=schema.described(
        schema.WHOLE, "How many belong to a group or chord, which stays as it is."
    ),
)

FAILED = Operations("failures", problems=("not-found",))


def shown_failure(failed: FailedTask, masking: Masking | None, reader: Any) -> dict[str, Any]:
    """A failed task as JSON, and as the page shows it.

    masking: None: nothing is hidden. Of a failure whose message was not read, all arguments are
    reader: reads messages without what is hidden
    """
    shown = schema.members(failed, _FAILURE["properties"])
    if masking is not None and failed.message:
        read = reader.read(found_of(failed), 0, DecompressionBudget())
        shown |= {"error": read.error, "arguments": read.arguments}
    elif masking is not None:
        shown |= {"error": f"{failed.exception}: {HIDDEN}", "arguments": HIDDEN}
    if failed.runtime is None:
        del shown["runtime"]
    return shown


async def shown_failures(
    failures: Sequence[FailedTask], masking: Masking | None, reader: Any
) -> list[dict[str, Any]]:
    """As :func:`shown_failure`, of many, in a thread: to expand messages takes its time."""
    return await asyncio.to_thread(list, (shown_failure(one, masking, reader) for one in failures))


@FAILED.add(
    "GET /v1/queues/{queue}/failures",
    query={
        **_WHICH,
        "since": schema.Time("Not failed before."),
        "until": schema.Time("Not failed after."),
        **schema.paging(200),
    },
    returns=("A page.", _FAILURES),
)
async def list_failures(api: Any, request: Request, queue: str) -> Answer:
    """List failed tasks."""
    await api.known_queue(queue)
    masking = api.masking_for(request.token, queue)
    tools = api.page.tools
    with schema.going_on():
        page, missing = await tools.as_far(
            api.center.failures.find(queue, messages=masking is not None, **request.asked)
        )
    shown = await shown_failures(page.failures, masking, tools.reader)
    said = {"missing": missing} if missing else {}
    return answer({"failures": shown, "nextPageToken": page.after, **said})


@FAILED.add(
    "GET /v1/queues/{queue}/failures/{id}",
    returns=("The failure.", _FAILURE),
)
async def show_failure(api: Any, request: Request, queue: str, id: str) -> Answer:
    """Show why a task failed."""
    await api.known_queue(queue)
    found, missing = await api.page.tools.as_far(api.center.failures.get(id, topic=queue))
    for one in found:
        masking = api.masking_for(request.token, queue)
        return answer(shown_failure(one, masking, api.page.tools.reader))
    if missing:
        raise schema.Problem("broker", f"no answer from {missing}", headers=schema.retry_after(1))
    raise schema.not_found(f"no failure of {id!r} is kept")


@FAILED.add(
    "POST /v1/queues/{queue}/failures:retry",
    role="operate",
    act="retry",
    request=_CHOSEN,
    returns=("How many, and what was taken away from them.", _RETRIED),
)
async def retry_failures(api: Any, request: Request, queue: str) -> Answer:
    """Run failed tasks again."""
    await api.known_queue(queue)
    done = await api.acting.failures.retry(queue, **request.asked)
    said = {"retried": done.number, "notKept": done.not_kept, **done._asdict()}
    return answer({name: said[name] for name in _RETRIED["properties"]}, number=done.number)


@FAILED.add(
    "POST /v1/queues/{queue}/failures:forget",
    role="operate",
    act="forget",
    request=_CHOSEN,
    returns=("How many.", schema.record("deleted", deleted=schema.WHOLE)),
)
async def forget(api: Any, request: Request, queue: str) -> Answer:
    """Forget failed tasks."""
    await api.known_queue(queue)
    number = await api.center.failures.delete(queue, **request.asked)
    return answer({"deleted": number}, number=number)
