"""The latest failed tasks: listed, retried, forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ..center.failures import found_of
from ..model.failures import FailedTask
from .fields import (
    FLAG,
    TEXT,
    TIME,
    WHOLE,
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
from .messages import DecompressionBudget
from .problems import invalid, not_found
from .request import Answer, Operations, Request, answer
from .tokens import HIDDEN, Masking

#: Failed tasks that one request retries or deletes, at most.
MOST = 1000

_FAILURE = record(
    "id queue task exception failTime dead retryable",
    id=TEXT,
    queue=TEXT,
    task=TEXT,
    exception=described(TEXT, "The type of the exception."),
    failTime=TIME,
    error=described(TEXT, "The text of the exception and the end of its traceback."),
    arguments=TEXT,
    worker=TEXT,
    runtime=described({"type": "number"}, "Seconds."),
    retries=WHOLE,
    dead=described(FLAG, "Its message is a dead letter."),
    retryable=described(FLAG, "Its message is kept, or it is a dead letter."),
)
_PAGE = record("failures nextPageToken", failures=array(_FAILURE), nextPageToken=or_null(TEXT))

_WHICH = {
    "task": Text("Only tasks of this name; * and ? match any.", most=255),
    "exception": Text("Only with this type of exception.", most=255),
}
_CHOSEN = Object(
    {
        "ids": Listed(Text(most=2000), "The ids of tasks.", most=MOST),
        "limit": Number(
            "Instead of ids: so many at most, the latest.", least=1, most=MOST, whole=True
        ),
        **_WHICH,
    },
    one_of=("ids", "limit"),
    name="FailedTasks",
)
_RETRIED = record(
    "retried notKept gone",
    retried=WHOLE,
    notKept=described(WHOLE, "How many cannot be retried: their messages are not kept."),
    gone=described(WHOLE, "How many were retried before, or are no dead letters any more."),
    expires=described(WHOLE, "From how many an expiry that had passed was taken away."),
    eta=described(WHOLE, "From how many an eta that had passed was taken away."),
    unique=described(WHOLE, "How many have a unique key, which they do not hold."),
    chords=described(WHOLE, "How many belong to a group or chord, which stays as it is."),
)

_ALL = ("v1", "queues", "{queue}", "failures")

OPERATIONS = Operations()


def shown_failure(failed: FailedTask, masking: Masking | None, reader: Any) -> dict[str, Any]:
    """A failed task as JSON, and as the page shows it.

    masking: None: nothing is hidden. Of a failure whose message was not read, all arguments are
    reader: reads messages without what is hidden
    """
    error, arguments = failed.error, failed.args
    if masking is not None and failed.message:
        shown = reader.read(found_of(failed), 0, DecompressionBudget())
        error, arguments = shown.error, shown.arguments
    elif masking is not None:
        error, arguments = f"{failed.exception}: {HIDDEN}", HIDDEN
    return {
        "id": failed.id,
        "queue": failed.topic,
        "task": failed.task,
        "exception": failed.exception,
        "failTime": shown_time(failed.failed_us),
        "error": error,
        "arguments": arguments,
        "worker": failed.worker,
        **({} if failed.runtime is None else {"runtime": failed.runtime}),
        "retries": failed.retries,
        "dead": failed.dead,
        "retryable": failed.retryable,
    }


async def shown_failures(
    failures: Sequence[FailedTask], masking: Masking | None, reader: Any
) -> list[dict[str, Any]]:
    """As :func:`shown_failure`, of many, in a thread: to expand messages takes its time."""

    def show() -> list[dict[str, Any]]:
        return [shown_failure(one, masking, reader) for one in failures]

    return await asyncio.to_thread(show)


@OPERATIONS.add(
    "GET",
    _ALL,
    "List failed tasks",
    query={
        **_WHICH,
        "since": Time("Not failed before."),
        "until": Time("Not failed after."),
        "limit": Number("How many at most.", least=1, most=200, whole=True, default=100),
        "after": Text("The nextPageToken of the page before.", most=4000),
    },
    returns=("A page.", _PAGE),
    problems=("not-found",),
)
async def list_failures(api: Any, request: Request) -> Answer:
    """Failed tasks, the latest first."""
    queue = await api.known_queue(request.segments[0])
    masking = api.masking_for(request.token, queue)
    try:
        page = await api.center.failures.find(
            queue, messages=masking is not None, **{"limit": 100, **request.asked}
        )
    except ValueError:
        raise invalid("after", "no page goes on there; use the nextPageToken of one") from None
    reader = api.page.tools.reader
    shown = await shown_failures(page.failures, masking, reader)
    return answer({"failures": shown, "nextPageToken": page.after})


@OPERATIONS.add(
    "GET",
    (*_ALL, "{id}"),
    "Show why a task failed",
    returns=("The failure.", _FAILURE),
    problems=("not-found",),
)
async def show_failure(api: Any, request: Request) -> Answer:
    """The latest failure of a task."""
    queue, id = await api.known_queue(request.segments[0]), request.segments[1]
    for one in await api.center.failures.get(id, topic=queue):
        masking = api.masking_for(request.token, queue)
        return answer(shown_failure(one, masking, api.page.tools.reader))
    raise not_found(f"no failure of {id!r} is kept")


@OPERATIONS.add(
    "POST",
    _ALL,
    "Run failed tasks again",
    role="operate",
    act="retry",
    verb="retry",
    request=_CHOSEN,
    returns=("How many, and what was taken away from them.", _RETRIED),
    problems=("not-found",),
)
async def retry(api: Any, request: Request) -> Answer:
    """Run failed tasks again, under their ids, each once."""
    queue = await api.known_queue(request.segments[0])
    done = await api.acting.failures.retry(queue, **request.fields())
    said = {"retried": done.number, "notKept": done.not_kept, **done._asdict()}
    return answer({name: said[name] for name in _RETRIED["properties"]}, number=done.number)


@OPERATIONS.add(
    "POST",
    _ALL,
    "Forget failed tasks",
    role="operate",
    act="forget",
    verb="forget",
    request=_CHOSEN,
    returns=("How many.", record("deleted", deleted=WHOLE)),
    problems=("not-found",),
)
async def forget(api: Any, request: Request) -> Answer:
    """Forget failed tasks; dead letters stay."""
    queue = await api.known_queue(request.segments[0])
    number = await api.center.failures.delete(queue, **request.fields())
    return answer({"deleted": number}, number=number)
