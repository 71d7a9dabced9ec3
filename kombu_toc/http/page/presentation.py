"""What people read: messages decoded, masked, in text; numbers and times; the page's templates, and
the answers that show them. Jinja2 escapes what is put into them; what would turn text around is
written as its number."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote, urlencode

from ...client.programs import check_installed
from ...model import timetext
from ...model.message import MOST
from ...model.results import DEAD, IN_FLIGHT, Cancelled, Found
from ...version import __version__
from ..fields import Problem, invalid, shown_time
from ..messages import EXPANDED, DecompressionBudget
from ..request import Answer, Request
from ..tokens import COOKIE, HIDDEN, Mask, Masking, Visitor, cookie_header, cookie_name, read_cookie

if TYPE_CHECKING:
    from jinja2 import Environment

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


# -- the page: its parts, what a view is asked, and what it has made

HTML = b"text/html; charset=utf-8"

#: What a page may load: its own script and style sheet, and nothing from anywhere else.
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

HEADERS = (
    (b"content-security-policy", POLICY),
    (b"referrer-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)

#: The cookie that says once what was done.
SAID = "toc_said"

#: Files beside the pages -> their types.
FILES = {
    "page.css": b"text/css; charset=utf-8",
    "page.js": b"text/javascript; charset=utf-8",
    "icon.svg": b"image/svg+xml",
}


class Ask(NamedTuple):
    """What is asked of a view.

    query: parameters of the URL
    fields: of a form that was sent
    """

    request: Request
    visitor: Visitor
    query: Mapping[str, str]
    fields: Mapping[str, list[str]]

    def field(self, name: str) -> str:
        """A field of the form; empty if it is not there."""
        return (self.fields.get(name) or [""])[0]


class View(NamedTuple):
    """What a view has made.

    template: the one that shows it
    values: what the template is given
    nav: which part of the navigation it is
    every: milliseconds after which its live parts are looked at again; 0: never
    trouble: why what is shown is old; empty if it is not
    now_us: Redis's clock, for times that count down
    typed: whether there is something to type: without the script, loading it again would lose that
    """

    title: str
    template: str
    values: Mapping[str, Any]
    nav: str = "-"
    every: int = 0
    trouble: str = ""
    status: int = 200
    now_us: int = 0
    typed: bool = False


# -- templates

#: What makes text look like another text, and what no page can hold: half of a surrogate pair, and
#: NUL. Each is shown as its number.
_TURNS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_NUMBERS = {one: f"\\u{one:04x}" for one in (0, *map(ord, _TURNS), *range(0xD800, 0xE000))}


def visible(value: Any) -> Any:
    """What a template shows of a value: of None, nothing."""
    if value is None:
        return ""
    if isinstance(value, (int, float)):
        return value
    text = value if isinstance(value, str) else str(value)
    if text.isascii() and "\0" not in text:
        return text
    return text.translate(_NUMBERS)  # of what is HTML already, it stays that


@cache
def templates() -> Environment:
    """The templates, made when the first page is shown."""
    check_installed("the page", "http", "jinja2")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        auto_reload=False,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    filters = (number, span, lateness, moment, iso, us, cut, last_line)
    made.filters.update((one.__name__, one) for one in filters)
    functions = (away, counted, encoded, link, noted, skipped, sparkline)
    made.globals.update((one.__name__, one) for one in functions)
    made.globals.update(version=__version__, whole=WHOLE)
    made.globals["file"] = lambda name: link(name, v=file_of(name)[1])
    return made


def render(template: str, **values: Any) -> str:
    """A template as HTML, which another one may be given."""
    made = templates().get_template(f"{template}.html").render(values)
    from markupsafe import Markup

    return Markup(made)


def sparkline(values: Sequence[float | None], width: int, height: int) -> str:
    """The path of a line through values; where one is None, it has a gap."""
    most = max((value for value in values if value is not None), default=0) or 1.0
    step = width / max(len(values) - 1, 1)
    pieces: list[str] = []
    drawing = False
    for place, value in enumerate(values):
        if value is None:
            drawing = False
            continue
        x, y = place * step, height - 2 - (height - 4) * value / most
        alone = not drawing and (place + 1 == len(values) or values[place + 1] is None)
        pieces.append(f"{'L' if drawing else 'M'}{x:.1f} {y:.1f}{'h1' if alone else ''}")
        drawing = True
    return " ".join(pieces)


#: Behind the name of a field whose value is percent-encoded, as in RFC 8187.
_ENCODED = "*"


def encoded(name: str, value: Any) -> tuple[str, str]:
    """The name and the value of a field that comes back as it is. The page shows some characters
    as their numbers, and a browser sends each end of a line as CR LF: what has such is
    percent-encoded."""
    said = str(value)
    if "\n" in said or "\r" in said or visible(said) != said:
        return name + _ENCODED, quote(said, safe="", errors="surrogatepass")
    return name, said


def decoded(pairs: Iterable[tuple[str, str]], detail: str) -> list[tuple[str, str]]:
    """Fields as :func:`encoded` was given them. Raises Problem, with this detail."""
    try:
        return [
            (name.removesuffix(_ENCODED), unquote(value, errors="surrogatepass"))
            if name.endswith(_ENCODED)
            else (name, value)
            for name, value in pairs
        ]
    except UnicodeDecodeError:
        raise Problem("bad-request", detail) from None


# -- answers


@cache
def file_of(name: str) -> tuple[bytes, str]:
    """A file beside the pages, and what tells its version from others."""
    content = Path(__file__).with_name(name).read_bytes()
    return content, hashlib.sha256(content).hexdigest()[:12]


def page_of(ask: Ask, view: View, has_library: bool) -> Answer:
    """The answer that shows a view."""
    headers = list(HEADERS)
    said = unquote(read_cookie(ask.request, cookie_name(SAID, ask.request)))
    if said:
        headers.append(cookie_header(SAID, "", ask.request, lasts=0))
    if ask.visitor.cookie:
        headers.append(cookie_header(COOKIE, ask.visitor.cookie, ask.request))
    shown = {"ask": ask, "view": view, "has_library": has_library, "notice": said}
    document = render(view.template, now_us=view.now_us, **shown, **view.values)
    return Answer(document.encode(), view.status, HTML, tuple(headers))


def redirect(ask: Ask, to: str, said: str = "", *cookies: tuple[bytes, bytes]) -> Answer:
    """To another view, which says what was done.

    to: as :func:`.link` makes it
    """
    headers = [*HEADERS, (b"location", to.encode("ascii", "ignore")), *cookies]
    if said:  # a cookie has 4 KB
        headers.append(cookie_header(SAID, quote(said[:300]), ask.request, lasts=20))
    return Answer(b"", 303, HTML, tuple(headers))


# -- numbers, times and spans of time as people read and type them, and addresses of views


def link(view: str, **query: Any) -> str:
    """The address of a view, relative to the page: so it is the same wherever the page is mounted.
    What is None or empty is left out."""
    said = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{view}?{urlencode(said, errors='surrogatepass')}" if said else view


#: Seconds, and what they are called.
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def number(value: float) -> str:
    """``1,234``; below 10 with one digit behind the point if it is no whole number."""
    if value == int(value) or value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value < 1 else f"{value:.1f}"


def skipped(schedules: Collection[str], number: int = 0) -> str:
    """What becomes of schedules whose next firing was deleted: these, or more, `number` in all."""
    shown = [repr(name) for name in sorted(schedules)]
    *some, last = shown if number <= len(shown) else [*shown, f"{number - len(shown):,} more"]
    names = f"{', '.join(some)} and {last}" if some else last
    goes = "each goes" if some else "it goes"
    return f"The next firing of {names} was among them; {goes} on with the one after that."


def noted(notes: Mapping[str, int]) -> str:
    """Sentences about what was retried."""
    return "".join(f" {number:,} {_NOTES[name]}." for name, number in notes.items() if number)


_NOTES = {
    "not_kept": "without a message: cannot be retried",
    "expires": "without its expiry, which had passed",
    "eta": "without its eta, which had passed",
    "unique": "without holding its unique key",
    "chords": "of a group or chord, which stays as it is",
}


def counted(value: int, thing: str) -> str:
    """``1 message``, ``2,000 messages``."""
    return f"{value:,} {thing}" if value == 1 else f"{value:,} {thing}s"


def span(seconds: float) -> str:
    """``5 s``, ``1 min 5 s``, ``3 d 2 h``: the two largest units."""
    seconds = abs(seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.0005 else "0 s"
    left, said = int(seconds), []
    for size, name in _UNITS:
        if left >= size:
            said.append(f"{left // size} {name}")
            left %= size
        elif said:
            break
        if len(said) == 2:
            break
    return " ".join(said)


def lateness(seconds: float | None) -> str:
    """``4.2 ms``, ``1.3 s``; a dash where nothing is known."""
    if seconds is None:
        return "-"
    if seconds < 0.0995:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def moment(us: int) -> str:
    """``2026-01-31 09:30:00 UTC``."""
    said = shown_time(us)
    return f"{said[:10]} {said[11:19]} UTC" if said else f"{us} µs"


def iso(us: int) -> str:
    """``2026-01-31T09:30:00.000000Z``."""
    return shown_time(us) or ""


def us(moment: datetime) -> int:
    """Microseconds since the epoch."""
    return round(moment.timestamp() * 1e6)


def away(us: int, now_us: int) -> str:
    away = (us - now_us) / 1e6
    return f"in {span(away)}" if away > 0 else f"{span(away)} ago"


# -- times as people type them


def read_time(text: str, field: str, now: float) -> float | None:
    """As :func:`.timetext.read_time`, and None for nothing. Raises Problem.

    now: by Redis's clock
    """
    try:
        return timetext.read_time(text, now) if text.strip() else None
    except ValueError as exc:
        raise invalid(field, str(exc)) from None
