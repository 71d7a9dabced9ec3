"""Messages as the page shows them: decoded, masked, in text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from ...model.message import MOST
from ...model.results import DEAD, IN_FLIGHT, Cancelled, Found
from ..messages import EXPANDED, DecompressionBudget
from ..tokens import HIDDEN, Mask, Masking

#: Characters of arguments in a table, and of a body and an error on a page of their own.
CUT = 160
WHOLE = 20_000

#: Messages that are read at a time, and bytes that these may expand to.
STEP = 50
TOGETHER = EXPANDED

#: States as they are named here. A waiting message is scheduled or ready.
SCHEDULED, READY, FLYING, DIED = "scheduled", "ready", "in-flight", "dead"
STATES = (SCHEDULED, READY, FLYING, DIED)


class Parts(NamedTuple):
    """The parts of a message.

    args, kwargs: of a task; None of anything else, and of what cannot be decoded
    rest: what else a task has, such as a chain
    body: its bytes, as they were sent
    problem: why it cannot be read; empty if it can
    """

    task: str | None
    args: Any
    kwargs: Any
    rest: Any
    headers: dict[str, Any]
    properties: dict[str, Any]
    content_type: str | None
    body: bytes
    problem: str = ""


class Shown(NamedTuple):
    """A message in text, without what is hidden.

    arguments: in one line, as in a call; of what is no task, its bytes
    body: as JSON if it is JSON
    key, unique: its key for limits, and its unique key
    """

    found: Found
    state: str
    task: str | None
    arguments: str
    headers: dict[str, Any]
    properties: dict[str, Any]
    content_type: str | None
    body: str
    reason: str
    error: str
    problem: str
    key: str | None
    unique: str | None

    @property
    def biz(self) -> tuple[str, str] | None:
        """Its business type and business id."""
        id = self.headers.get("x-biz-id")
        return None if id is None else (str(self.headers.get("x-biz-type") or ""), str(id))

    @property
    def retries(self) -> int:
        """How often its task was retried, as Celery counts."""
        said = self.headers.get("retries")
        return said if isinstance(said, int) else 0


def read_parts(found: Found, budget: DecompressionBudget) -> Parts:
    """The parts of a message, as far as they may be looked at."""
    message, problem = budget.look(found.body, found.id)
    if message is None:
        return Parts(None, None, None, None, {}, {}, None, found.body)
    headers, body = message["headers"], message["body"]
    kind = message["content-type"]
    task, args, kwargs, rest = headers.get("task"), None, None, None
    if task is not None:
        value = None
        if not problem:
            value, problem, _ = budget.read_content(message)
        if isinstance(value, (list, tuple)) and len(value) == 3:
            args, kwargs, rest = value
        else:
            problem = problem or "the body has no arguments of a task"
            args, kwargs = headers.get("argsrepr"), headers.get("kwargsrepr")
    return Parts(
        None if task is None else str(task),
        args,
        kwargs,
        rest,
        headers,
        message["properties"],
        None if kind is None else str(kind),
        body,
        problem,
    )


class Reader:
    """Reads messages.

    parts: the parts of a message
    parameters: names of the parameters of a task
    """

    def __init__(self, mask: Mask, extras: Any) -> None:
        self._mask = mask
        self._extras = extras

    async def read_all(self, found: Sequence[Found], now_us: int) -> AsyncIterator[Shown]:
        """As :meth:`read`, of many messages, in a thread: to expand them takes its time."""
        for begin in range(0, len(found), STEP):
            budget = DecompressionBudget(TOGETHER)
            some = (self.read(one, now_us, budget) for one in found[begin : begin + STEP])
            for shown in await asyncio.to_thread(list, some):
                yield shown

    def read(self, found: Found, now_us: int, budget: DecompressionBudget) -> Shown:
        """A message in text.

        now_us: Redis's clock
        """
        parts: Parts = self._extras.parts(found, budget)
        masking = Masking(self._mask, self._extras.parameters)
        if parts.task is not None:
            args = masking.args(parts.task, parts.args)
            kwargs = masking.kwargs(parts.kwargs)
            rest = masking.value(parts.rest)
            arguments = call_text(args, kwargs)
            body = _pretty([args, kwargs, rest])
        else:
            arguments, body = self._content(parts.body, masking)
        return Shown(
            found,
            state_of(found, now_us),
            parts.task,
            arguments,
            masking.headers(parts.headers),
            masking.properties(parts.properties),
            parts.content_type,
            body,
            masking.text(found.reason),
            masking.text(found.error),
            masking.text(parts.problem),
            HIDDEN if found.key and self._mask.hides_header("x-key") else masking.text(found.key),
            masking.text(found.unique),
        )

    def _content(self, body: bytes, masking: Masking) -> tuple[str, str]:
        """The bytes of what is no task: in one line, and in full."""
        try:
            text = body.decode()
        except UnicodeDecodeError:
            text = f"{len(body):,} bytes: {body[:64].hex(' ')}{' ...' if len(body) > 64 else ''}"
            return (HIDDEN, HIDDEN) if self._mask else (text, text)
        try:
            if len(body) > MOST:
                raise ValueError
            value = json.loads(text)
            if not isinstance(value, (dict, list)):
                raise ValueError
        except (ValueError, RecursionError):
            if not self._mask:
                return text, text
            hidden = masking.hide(text)
            return hidden, hidden
        masked = masking.value(value)
        return _line(masked), _pretty(masked)


def state_of(found: Found, now_us: int) -> str:
    """One of STATES."""
    if found.state == DEAD:
        return DIED
    if found.state == IN_FLIGHT:
        return FLYING
    return SCHEDULED if found.time_us > now_us else READY


def call_text(args: Any, kwargs: Any) -> str:
    """Arguments as in a call: ``7, 'anna', late=True``."""
    said = []
    if isinstance(args, str):
        said.append(args)
    elif isinstance(args, Sequence):
        said += [_line(one) for one in args]
    elif args is not None:
        said.append(_line(args))
    if isinstance(kwargs, dict):
        said += [f"{name}={_line(value)}" for name, value in kwargs.items()]
    elif kwargs is not None and kwargs != "{}":
        said.append(str(kwargs))
    return ", ".join(said)


def _line(value: Any) -> str:
    if value == HIDDEN:
        return HIDDEN
    return repr(value) if isinstance(value, str) else _json(value, None)


def _pretty(value: Any) -> str:
    return _json(value, 2)


def _json(value: Any, indent: int | None) -> str:
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def cut(text: str, most: int = CUT) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def last_line(error: str) -> str:
    """The line of an error that tells it from others: the last one of a traceback."""
    lines = [line for line in error.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""


# -- what the page can show and do beside what every center has


class WorkerRow(NamedTuple):
    """A worker, as it says itself.

    queues: which it consumes
    running, held: messages that it runs, and that it has fetched besides: id and name of a task
    free: how many more could start at once; None if that is not known
    """

    name: str
    queues: list[str]
    running: list[tuple[str, str]]
    held: list[tuple[str, str]]
    free: int | None
    paused: bool = False


class PageExtras:
    """What a center knows by itself. An app's page has a class of its own
    (:class:`celery_toc.web.AppExtras`), which also has schedules and sends tasks."""

    #: whether there are schedules, and tasks that can be sent
    has_schedules = False
    #: whether workers can be asked what they hold
    has_workers = False

    def parts(self, found: Found, budget: DecompressionBudget) -> Parts:
        """The parts of a message."""
        return read_parts(found, budget)

    def parameters(self, task: str) -> Sequence[str] | None:
        """Names of the parameters of a task, in order; None if they are not known."""
        return None

    async def cancelled(self, cancelled: Sequence[Cancelled]) -> None:
        """Messages were deleted before they were run."""

    async def sources(self, id: str) -> list[tuple[str, str, str]]:
        """What else knows what became of a task: the name of each source, what it says, and why it
        has not answered."""
        return []

    async def workers(self) -> list[WorkerRow] | None:
        """What workers hold, as far as they have said; None until the first have answered."""
        return None

    async def tasks(self, may_any: bool) -> tuple[list[str], str]:
        """Names of the tasks that may be started, and what is to be said of them.

        may_any: whether these are all that workers have registered
        """
        return [], ""

    async def aclose(self) -> None:
        """End what goes on by itself."""
